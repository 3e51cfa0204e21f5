"""``hotset run`` on an engine without a model: what is printed where, what the engine is asked, exit codes."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from engine_fakes import ByteCodec, answer, make_engine

import hotset
from hotset.cli.chat import HELP, Chat
from hotset.cli.main import cli
from hotset.engine.engine import Engine
from hotset.errors import MachineError
from hotset.machine.advice import Advice

TEMPERATURE = ("--temperature", "1", "--seed", "5")
SAMPLING = hotset.Sampling(temperature=1.0, seed=5)


PLACED = {"nodes": None, "numa": "bind"}
"""Where a run lies when nothing is asked."""


class Loads:
    """Stands in for ``hotset.load``: keeps what it was asked and the prompts of the engine it made."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.prompts: list[bytes] = []
        self.engine: Engine | None = None
        self.executor: Any = None

    def __call__(self, model: str, **options: Any) -> Engine:
        self.calls.append((model, options))
        prompts = self.prompts

        class Codec(ByteCodec):
            def encode_prompt(self, text: str) -> list[int]:
                prompts.append(text.encode())
                return super().encode_prompt(text)

            def encode_messages(self, messages: Any, chat_options: Any) -> list[int]:
                tokens = super().encode_messages(messages, chat_options)
                prompts.append(bytes(tokens))
                return tokens

        self.engine, self.executor = make_engine(256, codec=Codec())
        return self.engine


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    fake = Loads()
    monkeypatch.setattr(hotset, "load", fake)
    monkeypatch.setattr("hotset.machine.advice.huge_page_advice", lambda pages: None)
    return fake


def run(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments], input=stdin)


def expected(prompt: str, max_tokens: int = 12) -> str:
    return answer(list(prompt.encode()), SAMPLING, max_tokens)[1]


def test_one_prompt_streams_the_answer_alone_to_stdout(loads: Loads) -> None:
    result = run("m", "Hello", *TEMPERATURE, "--max-tokens", "12")
    assert result.exit_code == 0
    assert result.stdout == expected("[user]Hello") + "\n"
    assert result.stderr == ""
    assert loads.calls == [
        ("m", {"threads": None, "context": None, "max_sequences": 1, "cache_format": None, "snapshots": None} | PLACED)
    ]
    assert loads.executor.is_closed


def test_system_message_and_options_reach_the_engine(loads: Loads) -> None:
    result = run("m", "Hello", "--system", "Be brief.", "--threads", "2", "--context", "99", "--max-tokens", "1")
    assert result.exit_code == 0
    assert loads.prompts == [b"[system]Be brief.[user]Hello"]
    assert loads.calls == [
        ("m", {"threads": 2, "context": 99, "max_sequences": 1, "cache_format": None, "snapshots": None} | PLACED)
    ]


def test_raw_prompt_goes_in_as_it_is(loads: Loads) -> None:
    result = run("m", "Once upon", "--raw", *TEMPERATURE, "--max-tokens", "12")
    assert loads.prompts == [b"Once upon"]
    assert result.stdout == expected("Once upon") + "\n"


@pytest.mark.parametrize("arguments", [("m",), ("m", "-")])
def test_prompt_from_standard_input(loads: Loads, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--max-tokens", "1", stdin="two\nlines\n")
    assert result.exit_code == 0
    assert loads.prompts == [b"[user]two\nlines\n"]


def test_json_is_one_object(loads: Loads) -> None:
    result = run("m", "Hello", "--json", *TEMPERATURE, "--max-tokens", "12")
    report = json.loads(result.stdout)
    tokens, text, reason = answer(list(b"[user]Hello"), SAMPLING, 12)
    assert (report["model"], report["text"], report["finish_reason"], report["seed"]) == ("m", text, reason, 5)
    assert report["usage"] == {
        "prompt_tokens": 11, "cached_tokens": 0, "recomputed_tokens": 0, "completion_tokens": len(tokens)
    }  # fmt: skip
    assert report["timings"]["prefill_s"] > 0 and report["timings"]["decode_tokens_per_s"] > 0


def test_stats_line_goes_to_stderr(loads: Loads) -> None:
    result = run("m", "Hello", "--stats", "--max-tokens", "1")
    assert result.stderr.startswith("prompt 11 tokens (0 cached), prefill ")
    assert result.stderr.endswith(" tok/s, answer 1 tokens, decode -\n")


def test_stop_text_given_twice(loads: Loads) -> None:
    stops = hotset.Sampling(temperature=1.0, seed=5, stop=("c", "d"))
    result = run("m", "Hello", *TEMPERATURE, "--stop", "c", "--stop", "d")
    assert result.stdout == answer(list(b"[user]Hello"), stops, 1000)[1] + "\n"


def test_full_context_is_told(loads: Loads) -> None:
    """An answer that breaks off without a word looks like a bug of the model."""
    result = run("m", "Hello", "--ignore-eos", *TEMPERATURE)
    assert result.exit_code == 0
    assert result.stderr == "note: the context is full after 1013 tokens of answer; --context allows more\n"


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("m", "x", "--raw", "--system", "s"),
         "error: --raw and --system do not go together: a system message needs the chat template\n"),
        (("m", " "), "error: the prompt is empty\n\nhint: give it as an argument, or on standard input\n"),
        (("m", "x", "--temperature", "-1"), "error: temperature is -1.0, expected a number 0 to 100\n"),
        (("m", "x" * 2000),
         "error: the prompt has 2006 tokens, the context holds 1024 with at least 1 token of answer\n\n"
         "hint: at most 1023 prompt tokens, or load with a larger context\n"),
    ],
)  # fmt: skip
def test_refusals(loads: Loads, arguments: tuple[str, ...], output: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.output) == (2, output)


def test_settings_are_refused_before_the_model_is_loaded(loads: Loads) -> None:
    """A minute of loading, then: temperature is -1."""
    run("m", "x", "--top-p", "2")
    assert loads.calls == []


@pytest.mark.parametrize("option", ["--raw", "--json"])
def test_a_conversation_takes_no_raw_and_no_json(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "m", option], prog_name="hotset")
    assert caught.value.code == 2
    assert capsys.readouterr().err == (
        f'error: {option} needs a PROMPT, there is none for a conversation\n\nhint: hotset run m "..." {option}\n'
    )


def test_not_utf8_on_standard_input(loads: Loads) -> None:
    result = CliRunner().invoke(cli, ["run", "m"], input=b"caf\xe9 au lait")
    assert result.exit_code == 2
    assert result.output == "error: standard input is not UTF-8 text: byte 0xe9\n"


def test_a_failed_request_is_an_error(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(model: str, **options: Any) -> Engine:
        engine = Loads.__call__(loads, model, **options)
        loads.executor.fail_with = MachineError("the disk is gone")
        return engine

    monkeypatch.setattr(hotset, "load", load)
    result = run("m", "Hello")
    assert (result.exit_code, result.output) == (3, "error: the disk is gone\n")


def test_ctrl_c_ends_the_answer_and_the_program(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C tore through the engine in the middle of a step."""
    interrupt_at_step(loads, monkeypatch, 5)
    result = run("m", "Hello", "--ignore-eos")
    assert result.exit_code == 130
    assert loads.executor.is_closed and len(loads.executor.batches) < 40
    assert "Traceback" not in result.output


def test_huge_pages_that_are_off_are_noted(loads: Loads, monkeypatch: pytest.MonkeyPatch) -> None:
    off = Advice("huge_pages", "huge pages are off", None)
    monkeypatch.setattr("hotset.machine.advice.huge_page_advice", lambda pages: off)
    result = run("m", "Hello", "--max-tokens", "1")
    assert (result.exit_code, result.stderr) == (0, "note: huge pages are off\n")


# The conversation


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def interrupt_at_step(loads: Loads, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Send SIGINT to this process while the engine runs its ``number``-th step."""

    def load(model: str, **options: Any) -> Engine:
        engine = Loads.__call__(loads, model, **options)
        run_step = loads.executor.step

        def step(batch: Any) -> Any:
            if len(loads.executor.batches) == number:
                os.kill(os.getpid(), signal.SIGINT)
            return run_step(batch)

        loads.executor.step = step
        return engine

    monkeypatch.setattr(hotset, "load", load)


def lines(*given: str) -> Any:
    """A stand-in for ``input`` that ends like Ctrl-D."""
    left: Iterator[str] = iter(given)

    def read(prompt: str) -> str:
        assert prompt == "> "
        line = next(left, None)
        if line is None:
            raise EOFError
        return line

    return read


def chat(loads: Loads, *given: str, system: str | None = None, max_tokens: int = 6) -> Chat:
    engine = hotset.load("m")
    one = Chat(engine, "m", hotset.Sampling(temperature=1.0, seed=5, max_tokens=max_tokens), system)
    one.run(lines(*given))
    engine.stats()  # raises when the cancelled requests left the accounts wrong
    return one


def test_turns_follow_each_other(loads: Loads, capsys: pytest.CaptureFixture[str]) -> None:
    one = chat(loads, "Hi", "", "  More  ", system="S")
    first, second = one.turns[1]["content"], one.turns[3]["content"]
    assert loads.prompts == [b"[system]S[user]Hi", f"[system]S[user]Hi[assistant]{first}[user]More".encode()]
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_commands(loads: Loads, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    one = chat(loads, "/stats", "/help", "Hi", f"/save {path}", f"/save {path}", "/reset", "/system Be brief.", "Yo",
               "/system", "/exit", "never read")  # fmt: skip
    talk = capsys.readouterr().err
    assert "no answer yet\n" in talk and HELP in talk
    assert talk.count(f"saved: {path}\n") == 2, "a file of this chat may be written again"
    saved = json.loads(path.read_text())
    assert saved["model"] == "m" and [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    assert loads.prompts == [b"[user]Hi", b"[system]Be brief.[user]Yo"]
    assert one.messages[0] == {"role": "user", "content": "Yo"}, "the system message was removed again"


def test_stats_after_an_answer_tell_what_was_cached(loads: Loads, capsys: pytest.CaptureFixture[str]) -> None:
    one = chat(loads, "Hi there", "More", "/stats", max_tokens=4)
    assert one.last is not None and one.last.finished.cached_tokens > 0, "the first turn is the prefix of the second"
    assert f"({one.last.finished.cached_tokens} cached)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sav x", "error: no such command: /sav\n\nhint: /help shows the commands\n"),
        ("/save", "error: /save needs a file name\n\nhint: /save chat.json\n"),
        ("/save /nonexistent/x", "error: cannot write /nonexistent/x: No such file or directory\n"),
    ],
)
def test_a_bad_command_leaves_the_chat_alive(
    loads: Loads, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    one = chat(loads, line, "Hi")
    assert message in capsys.readouterr().err
    assert len(one.turns) == 2


def test_somebody_elses_file_is_not_overwritten(
    loads: Loads, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("three years of work")
    chat(loads, "Hi", f"/save {path}")
    assert path.read_text() == "three years of work"
    assert "exists and was not written by this chat" in capsys.readouterr().err


def test_two_slashes_write_one(loads: Loads) -> None:
    chat(loads, "//etc is a folder")
    assert loads.prompts == [b"[user]/etc is a folder"]


def test_a_turn_that_does_not_fit_leaves_the_conversation(loads: Loads, capsys: pytest.CaptureFixture[str]) -> None:
    """The refused message stayed in the history, so that every later turn was refused as well."""
    one = chat(loads, "x" * 2000, "Hi")
    assert "error: the prompt has 2006 tokens" in capsys.readouterr().err
    assert one.turns[0]["content"] == "Hi"


def test_ctrl_c_stops_the_answer_not_the_chat(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at_step(loads, monkeypatch, 5)
    before = signal.getsignal(signal.SIGINT)  # a shell's background job ignores it
    one = chat(loads, "Hi", "More", max_tokens=900)
    assert "[stopped]\n" in capsys.readouterr().err
    assert len(one.turns) == 4 and one.last is not None
    assert one.turns[0]["content"] == "Hi" and len(one.turns[1]["content"]) < 900
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_at_the_prompt_drops_the_line(loads: Loads) -> None:
    given = lines("Hi")
    interrupted = iter([True])

    def read(prompt: str) -> str:
        if next(interrupted, False):
            raise KeyboardInterrupt
        return given(prompt)

    engine = hotset.load("m")
    one = Chat(engine, "m", hotset.Sampling(max_tokens=2), None)
    one.run(read)
    assert len(one.turns) == 2


def test_chat_starts_on_a_terminal(
    loads: Loads, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", lines("/exit"))
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", "m"], prog_name="hotset")
    assert caught.value.code == 0
    captured = capsys.readouterr()
    assert captured.err == "m: /help shows the commands, Ctrl-C stops an answer, Ctrl-D leaves\n"
    assert captured.out == "" and sys.stdin.isatty()
