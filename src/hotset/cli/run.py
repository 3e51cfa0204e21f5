"""``hotset run``: one answer, or a conversation."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from hotset.cli.answer import stream_answer
from hotset.cli.chat import Chat
from hotset.cli.placement import nodes_option, numa_option
from hotset.cli.recording import record_option, recording
from hotset.errors import RequestError
from hotset.log import note

if TYPE_CHECKING:
    from pathlib import Path

    from hotset.engine.sampling import Sampling
    from hotset.machine.teams import NumaMode

#: Option names that are fields of hotset.Sampling; given ones are passed on, the rest keep its defaults.
SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
)


@click.command(name="run")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="System message: how the model should behave.")
@click.option("--raw", is_flag=True, help="Give the prompt to the model as it is, without the chat template.")
@click.option(
    "--thinking",
    type=click.Choice(["on", "off"]),
    help="Reason before the answer, where the model has the choice [default: the model's].",
)
@click.option("--effort", metavar="LEVEL", help="How hard to reason, by the model's own names: low, high, max, ...")
@click.option("--temperature", type=float, metavar="X", help="0 takes the most likely token [default: 0].")
@click.option("--top-k", type=int, metavar="N", help="Sample from the N most likely tokens; 0 is all [default: 0].")
@click.option("--top-p", type=float, metavar="X", help="Sample from the likeliest tokens that sum to X [default: 1].")
@click.option("--min-p", type=float, metavar="X", help="Drop tokens below X times the best one's share [default: 0].")
@click.option(
    "--repetition-penalty", type=float, metavar="X", help="Make used tokens less likely; 1 is off [default: 1]."
)
@click.option("--presence-penalty", type=float, metavar="X", help="Subtract X from used tokens, once [default: 0].")
@click.option("--frequency-penalty", type=float, metavar="X", help="Subtract X for every use of a token [default: 0].")
@click.option("--seed", type=int, metavar="N", help="The same seed gives the same text [default: a new one].")
@click.option("--max-tokens", type=int, metavar="N", help="End after N tokens [default: what the context holds].")
@click.option("--stop", multiple=True, metavar="TEXT", help="End before TEXT; may be given several times.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end-of-text token.")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of the conversation [default: the model's, at most 8192].",
)
@click.option(
    "--cache-format",
    metavar="NAME",
    help="Format of the cache rows: BF16, F16 (Llama); FP8, BF16, FP4, with +FP8 for the indexer's too, or BF16-exact "
    "(DeepSeek-V4) [default: suits the weights].",
)
@click.option(
    "--snapshots",
    type=click.IntRange(min=0),
    metavar="N",
    help="Frontiers kept for prefix reuse, for models that have one [default: 8, and 8 a sequence].",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads [default: one a core].")
@nodes_option
@numa_option
@record_option
@click.option(
    "--stats",
    "show_stats",
    is_flag=True,
    help="Print where the memory lies, and tokens and speed after each answer, on standard error.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with text, usage and timings.")
def command(
    model: str,
    prompt: str | None,
    system: str | None,
    raw: bool,
    thinking: str | None,
    effort: str | None,
    stop: tuple[str, ...],
    ignore_eos: bool,
    context: int | None,
    cache_format: str | None,
    snapshots: int | None,
    threads: int | None,
    nodes: tuple[int, ...] | None,
    numa: NumaMode,
    record_path: Path | None,
    show_stats: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Ask MODEL one PROMPT, or chat with it when there is no PROMPT.

    MODEL is a name that `hotset list` shows, a .gguf file, or a folder. With "-" as the PROMPT, or with a pipe instead
    of a terminal, the prompt is read from standard input. The answer goes to standard output as it is written.

    \b
    hotset run smollm2-135m "What is a hot set?"
    cat notes.txt | hotset run smollm2-135m --system "Sum up the text." --stats
    hotset run smollm2-135m
    """
    import hotset
    from hotset.machine.advice import huge_page_advice
    from hotset.machine.thp import read_huge_pages
    from hotset.machine.verify import summarize

    if raw and system is not None:
        raise RequestError("--raw and --system do not go together: a system message needs the chat template")
    chat_options = _chat_options(thinking, effort)
    if raw and chat_options:
        raise RequestError(f"--raw and --{next(iter(chat_options))} do not go together: the prompt is given as it is")
    given = {name: settings[name] for name in SAMPLING_FIELDS if settings[name] is not None}
    sampling = hotset.Sampling(stop=stop, ignore_eos=ignore_eos, **given)
    text = _prompt_text(prompt)
    if text is None and (raw or as_json):
        name = "--raw" if raw else "--json"
        raise RequestError(
            f"{name} needs a PROMPT, there is none for a conversation", f'hotset run {model} "..." {name}'
        )
    advice = huge_page_advice(read_huge_pages())
    if advice is not None:
        note(f"note: {advice.line}")
    with hotset.load(
        model, threads=threads, context=context, max_sequences=1, cache_format=cache_format, snapshots=snapshots,
        nodes=nodes, numa=numa,
    ) as engine, recording(engine, record_path):  # fmt: skip
        if show_stats:
            for line in summarize(engine.regions()):
                note(line)
        if text is None:
            _enable_line_editing()
            Chat(engine, model, sampling, system, show_stats=show_stats, chat_options=chat_options).run(input)
        else:
            _one_answer(engine, model, _one_prompt(text, system, raw), sampling, chat_options, show_stats, as_json)


def _prompt_text(prompt: str | None) -> str | None:
    """The prompt, from the argument or from standard input; ``None`` means a conversation."""
    if prompt is not None and prompt != "-":
        text = prompt
    elif prompt == "-" or not sys.stdin.isatty():
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise RequestError(f"standard input is not UTF-8 text: byte {error.object[error.start]:#04x}") from None
    else:
        return None
    if not text.strip():
        raise RequestError("the prompt is empty", "give it as an argument, or on standard input")
    return text


def _one_prompt(text: str, system: str | None, raw: bool) -> str | list[dict[str, str]]:
    if raw:
        return text
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def _chat_options(thinking: str | None, effort: str | None) -> dict[str, Any]:
    options: dict[str, Any] = {} if thinking is None else {"thinking": thinking == "on"}
    return options if effort is None else options | {"effort": effort}


def _one_answer(
    engine: Any,
    model: str,
    prompt: str | list[dict[str, str]],
    sampling: Sampling,
    chat_options: dict[str, Any],
    show_stats: bool,
    as_json: bool,
) -> None:
    def write(piece: str) -> None:
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    answer = stream_answer(engine, prompt, sampling, write, chat_options=chat_options, shows_reasoning=not as_json)
    if as_json:
        click.echo(json.dumps({"model": model} | answer.to_json(), indent=2, ensure_ascii=False))
    else:
        write("\n")
        answer.note_oddities()
    if show_stats:
        note(answer.stats())
    if answer.is_interrupted:
        raise KeyboardInterrupt
    if answer.finished.finish_reason == "length" and sampling.max_tokens is None:
        note(f"note: the context is full after {answer.num_tokens} tokens of answer; --context allows more")


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401  input() gets history and editing from it
    except ImportError:
        note("note: this Python has no readline, so lines cannot be edited")
