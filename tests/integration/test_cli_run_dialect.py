"""``hotset run`` with a model that reasons and calls tools: what is shown where, what is kept, what is refused."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from click.testing import CliRunner, Result
from engine_fakes import EOS, ByteCodec, make_engine

import hotset
from hotset.chat.deepseek_v4_parser import DeepSeekV4Parser
from hotset.cli.chat import Chat
from hotset.cli.main import cli
from hotset.engine.engine import Engine
from hotset.errors import RequestError

CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
)


class Script:
    """A text stream that says its text in pieces of three, whatever tokens were sampled."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.is_stopped = False

    def feed(self, token_id: int) -> str:
        piece, self._text = self._text[:3], self._text[3:]
        self.is_stopped = not self._text
        return piece

    def finish(self) -> str:
        return ""


class Codec(ByteCodec):
    eos_ids = frozenset({EOS})

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[list[Any], dict[str, Any]]] = []

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        if options.get("effort") == "wild":
            raise RequestError("effort is 'wild'", "low")
        self.asked.append((list(messages), dict(options)))
        return [1]

    def answer_parser(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> DeepSeekV4Parser:
        return DeepSeekV4Parser(is_thinking=options.get("thinking") is not False)

    def stream(self, stop: tuple[str, ...]) -> Script:
        return Script(self.answers.pop(0))


def load(monkeypatch: pytest.MonkeyPatch, *answers: str) -> Codec:
    codec = Codec(answers)

    def make(model: str, **options: Any) -> Engine:
        return make_engine(256, codec=codec)[0]

    monkeypatch.setattr(hotset, "load", make)
    monkeypatch.setattr("hotset.machine.advice.huge_page_advice", lambda pages: None)
    return codec


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", "m", "Hi", "--ignore-eos", *arguments])


def test_reasoning_is_talk_and_the_answer_is_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that gets the reasoning together with the answer."""
    load(monkeypatch, "hmm, let me see</think>Yes.")
    result = run()
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Yes.\n", "hmm, let me see\n")
    assert result.output == "hmm, let me see\nYes.\n", "the answer begins its own line"


def test_thinking_and_effort_reach_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = load(monkeypatch, "Yes.", "x</think>Yes.", "x</think>Yes.")
    assert run("--thinking", "off").stdout == "Yes.\n"
    assert run("--thinking", "on", "--effort", "max").exit_code == run().exit_code == 0
    assert [options for _, options in codec.asked] == [{"thinking": False}, {"thinking": True, "effort": "max"}, {}]


def test_settings_that_the_model_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, "x")
    result = run("--effort", "wild")
    assert (result.exit_code, result.output) == (2, "error: effort is 'wild'\n\nhint: low\n")


@pytest.mark.parametrize("option", [("--thinking", "on"), ("--effort", "low")])
def test_a_raw_prompt_takes_no_settings(monkeypatch: pytest.MonkeyPatch, option: tuple[str, str]) -> None:
    load(monkeypatch, "x")
    result = run("--raw", *option)
    assert result.exit_code == 2
    assert result.output == f"error: --raw and {option[0]} do not go together: the prompt is given as it is\n"


def test_a_raw_answer_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, "hmm</think>Yes.")
    assert run("--raw").stdout == "hmm</think>Yes.\n"


def test_json_has_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, "hmm</think>Yes." + CALL)
    result = run("--json")
    report = json.loads(result.stdout)
    assert (report["text"], report["reasoning"], result.stderr) == ("Yes.", "hmm", "")
    assert report["tool_calls"] == [{"name": "f", "arguments": '{"a": 1}', "is_sound": True}]


def test_calls_and_oddities_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that was markup looks like a fault of the program when nobody says what it is."""
    load(monkeypatch, "</think>Yes.</think>" + CALL)
    result = run()
    assert result.stdout == "Yes.</think>\n"
    assert result.stderr == '[the model calls f {"a": 1}]\nnote: a control tag out of place\n'


def test_a_cut_answer_is_read_as_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose last parameters were cut off looks whole: the cut came between two tags."""
    written = CALL[: CALL.index("</｜DSML｜parameter>\n") + len("</｜DSML｜parameter>\n")]
    padding = "x" * (-len("</think>" + written) % 3)
    load(monkeypatch, "</think>" + padding + CALL)
    num_pieces = len("</think>" + padding + written) // 3
    report = json.loads(run("--json", "--max-tokens", str(num_pieces)).stdout)
    assert report["finish_reason"] == "length"
    assert report["tool_calls"] == [{"name": "f", "arguments": '{"a": 1', "is_sound": False}]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_conversation_has_the_settings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = load(monkeypatch, "Yes.")
    monkeypatch.setattr("sys.stdin", Terminal("Hi\n"))
    with pytest.raises(SystemExit):
        cli.main(["run", "m", "--thinking", "off", "--max-tokens", "2"], prog_name="hotset")
    assert codec.asked[0][1] == {"thinking": False}


def test_a_conversation_keeps_reasoning_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug class: the history that the model gets is not what it wrote."""
    codec = load(monkeypatch, "hmm</think>Yes." + CALL, "no</think>Bye.")
    lines = iter(["Hi", "More"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    chat = Chat(hotset.load("m"), "m", hotset.Sampling(ignore_eos=True), None, chat_options={"thinking": True})
    chat.run(read)
    function = {"name": "f", "arguments": '{"a": 1}'}
    first = {
        "role": "assistant",
        "content": "Yes.",
        "reasoning_content": "hmm",
        "tool_calls": [{"id": "call_0", "type": "function", "function": function}],
    }
    assert codec.asked[1] == (
        [{"role": "user", "content": "Hi"}, first, {"role": "user", "content": "More"}],
        {"thinking": True},
    )
    assert chat.turns[-1] == {"role": "assistant", "content": "Bye.", "reasoning_content": "no"}
