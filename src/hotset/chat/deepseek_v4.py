"""DeepSeek-V4's prompts (V4-Flash and V4-Pro, the April preview and the 0731 release).

Format: /encoding/encoding_dsv4.py of the released checkpoints; its long texts are data of the checkpoint and are read
from that file. What differs from that encoder, on purpose:

- Text of a message never becomes a control token. The official encoder joins everything into one string, in which a
  user can write ``<｜Assistant｜>`` or ``</think>``; here control tokens and text stay apart until both are token ids.
- Unknown roles, fields and settings are refused instead of ignored, and so are a task that nothing follows up and a
  conversation that leaves the model nothing to answer.
- A task of a user message that is merged with the tool results before it is kept; the official encoder drops it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from hotset.chat.deepseek_v4_messages import TASKS, Argument, Result, Turn, read_format, read_tools, read_turns
from hotset.chat.deepseek_v4_parser import DeepSeekV4Parser
from hotset.chat.dialect import AnswerParser, ChatSettings, Coder, Control, Message, Piece
from hotset.chat.literals import Literal, check_text, read_literals, require_text, sha256
from hotset.errors import CheckpointError, RequestError

ENCODER_FILE = "encoding/encoding_dsv4.py"

BOS = Control("<｜begin▁of▁sentence｜>")
EOS = Control("<｜end▁of▁sentence｜>")
USER = Control("<｜User｜>")
ASSISTANT = Control("<｜Assistant｜>")
REMINDER = Control("<｜latest_reminder｜>")
THINK = Control("<think>")
END_THINK = Control("</think>")
DSML = Control("｜DSML｜")
#: Tokens inside answers that are not written like role markers.
PROTOCOL_TOKENS: frozenset[str] = frozenset({THINK, END_THINK, DSML})
_PLACEHOLDERS: Mapping[str, Control] = {
    "dsml_token": DSML,
    "thinking_start_token": THINK,
    "thinking_end_token": END_THINK,
}


@dataclass(frozen=True)
class Digests:
    """SHA-256 of the texts that the models were trained with. ``beyond`` is the 0731 release's effort ``max``."""

    tools: str = "09b7269daaddbeaf11a3ed55c07b1846c35162b841d8b4301bbe0449879d1fd8"
    response: str = "012f31fcc1338bdfe25b132eaf56ab020ee75ab8e649f37b30b8e5f544fb17a5"
    absolute: str = "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7"
    beyond: str = "53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c"


RELEASED = Digests()


@dataclass(frozen=True)
class Texts:
    """What a checkpoint's encoder file says.

    Attributes:
        tools: how to call tools, with placeholders for the markup and the tools' schemas.
        response: the heading of a response format, with a placeholder for its schema.
        efforts: the text of each effort level, by name.
    """

    tools: str
    response: str
    efforts: Mapping[str, str]


def read_texts(path: Path, digests: Digests | None = None) -> Texts:
    """Read the texts from a checkpoint's ``encoding_dsv4.py``, which is parsed and not run.

    CheckpointError when one is missing, or is not the text with the SHA-256 in ``digests`` (default: the released one).
    """
    digests = digests or RELEASED
    literals = read_literals(path)
    return Texts(
        tools=require_text(literals, "TOOLS_TEMPLATE", digests.tools, path),
        response=require_text(literals, "response_format_template", digests.response, path),
        efforts=_read_efforts(literals, digests, path),
    )


def _read_efforts(literals: Mapping[str, Literal], digests: Digests, path: Path) -> dict[str, str]:
    """The 0731 release has a dictionary of three levels, the preview one text; its ``max`` is the later ``high``."""
    levels = literals.get("REASONING_EFFORT_PROMPTS") or next(
        (
            other
            for other in literals.values()
            if isinstance(other, dict) and digests.beyond in map(sha256, other.values())
        ),
        None,
    )
    if levels is None:
        return {"max": require_text(literals, "REASONING_EFFORT_MAX", digests.absolute, path)}
    known = {"low": sha256(""), "high": digests.absolute, "max": digests.beyond}
    if not isinstance(levels, dict) or levels.keys() != known.keys():
        raise CheckpointError(f"{path}: REASONING_EFFORT_PROMPTS has other levels than low, high and max")
    return {name: check_text(levels[name], f"effort {name}", digest, path) for name, digest in known.items()}


class DeepSeekV4:
    """Implements :class:`hotset.chat.dialect.Dialect`. The model reasons unless ``thinking`` is False."""

    name = "DeepSeek-V4"

    def __init__(self, coder: Coder, texts: Texts) -> None:
        """``texts`` are those of the checkpoint; ``coder`` is its tokenizer, whose control tokens must exist."""
        self._coder = coder
        self._texts = texts

    def encode(self, messages: Sequence[Message], settings: ChatSettings) -> list[int]:
        """Return the tokens of a conversation; its last message is one that the model answers. See :class:`Dialect`."""
        turns = _turns(messages, settings)
        _check_end(turns)
        pieces = write_prompt(turns, self._texts, is_thinking=_is_thinking(settings), effort=settings.effort)
        return self._coder.encode_parts(
            self._coder.control_id(piece) if isinstance(piece, Control) else piece for piece in pieces
        )

    def parser(self, messages: Sequence[Message], settings: ChatSettings) -> AnswerParser:
        """Return a parser for the answer to this conversation."""
        turns = _turns(messages, settings)
        _check_end(turns)
        names = {name for turn in turns for name in turn.tool_names}
        # The answer to a task is a word or a line, without reasoning.
        is_thinking = _is_thinking(settings) and not turns[-1].task
        return DeepSeekV4Parser(is_thinking=is_thinking, tool_names=names)


def _turns(messages: Sequence[Message], settings: ChatSettings) -> list[Turn]:
    if settings.variables:
        raise RequestError(
            f"DeepSeek-V4's prompt has no setting {', '.join(sorted(settings.variables))}",
            "it has tools, thinking, effort and response_format",
        )
    turns = read_turns(messages)
    tools, names = read_tools(RequestError, settings.tools)
    response_format = read_format(RequestError, settings.response_format)
    if tools or response_format:
        # They belong to the first system or developer message; without one, the system message is otherwise empty.
        if not turns or turns[0].role not in ("system", "developer"):
            turns.insert(0, Turn("system", [""]))
        first = turns[0]
        if (tools and first.tools) or (response_format and first.response_format):
            raise RequestError(
                "tools or response_format are given twice, as a setting and in the first message", "give them once"
            )
        turns[0] = replace(
            first,
            tools=tools or first.tools,
            tool_names=names or first.tool_names,
            response_format=response_format or first.response_format,
        )
    return turns


def _is_thinking(settings: ChatSettings) -> bool:
    if settings.thinking is not None and not isinstance(settings.thinking, bool):
        raise RequestError(f"thinking is {settings.thinking!r}, expected true or false")
    return settings.thinking is not False


def _check_end(turns: Sequence[Turn]) -> None:
    if not turns:
        raise RequestError("there are no messages", 'e.g. [{"role": "user", "content": "Hello"}]')
    for turn, after in pairwise(turns):
        if turn.task and after.role != "assistant":
            raise RequestError(f"after the task {turn.task!r} comes a message of the role {after.role}, not its answer")
    last = turns[-1]
    if not last.opens_answer and not last.task:
        raise RequestError(
            f"the last message is of the role {last.role}, which leaves the model nothing to answer",
            "end with a user, developer or tool message",
        )


def write_prompt(
    turns: Sequence[Turn],
    texts: Texts,
    *,
    is_thinking: bool,
    effort: str | None = None,
    drops_reasoning: bool = True,
) -> Iterator[Piece]:
    """Yield the prompt in pieces.

    Reasoning before the last user or developer turn is left out, and developer turns before it too, unless some turn
    has tools or ``drops_reasoning`` is False. RequestError when the checkpoint has no such effort.
    """
    prefix = _effort_text(texts, is_thinking, effort)
    drops = is_thinking and drops_reasoning and not any(turn.tools for turn in turns)
    last = _last_question(turns)
    if drops:
        turns = [turn for index, turn in enumerate(turns) if turn.role != "developer" or index >= last]
        last = _last_question(turns)
    yield BOS
    if prefix:
        yield prefix
    for index, turn in enumerate(turns):
        before = turns[index - 1] if index else None
        keeps_reasoning = is_thinking and (not drops or index > last) and not (before and before.task)
        yield from _write_turn(turn, texts, keeps_reasoning)
        after = turns[index + 1] if index + 1 < len(turns) else None
        if after is None or after.role in ("assistant", "latest_reminder"):
            yield from _open_answer(turn, is_thinking, is_thinking and (not drops or index >= last))


def _effort_text(texts: Texts, is_thinking: bool, effort: str | None) -> str:
    if effort is None:
        return ""
    if not isinstance(effort, str) or effort not in texts.efforts:
        raise RequestError(
            f"effort is {effort!r}, this checkpoint knows {', '.join(texts.efforts)}",
            f"one of {', '.join(texts.efforts)}, or none at all",
        )
    if not is_thinking:
        raise RequestError(f"effort {effort} needs thinking, which is off", "thinking on, or no effort")
    return texts.efforts[effort]


def _last_question(turns: Sequence[Turn]) -> int:
    return max((index for index, turn in enumerate(turns) if turn.opens_answer), default=-1)


def _open_answer(turn: Turn, is_thinking: bool, reasons: bool) -> Iterator[Piece]:
    """What follows a turn that the model answers, or that it has answered."""
    if turn.task == "action":
        yield from (ASSISTANT, THINK if is_thinking else END_THINK, Control(TASKS["action"]))
    elif turn.task:
        yield Control(TASKS[turn.task])
    elif turn.opens_answer:
        yield from (ASSISTANT, THINK if reasons else END_THINK)


def _write_turn(turn: Turn, texts: Texts, keeps_reasoning: bool) -> Iterator[Piece]:
    if turn.opens_answer:
        yield USER
    elif turn.role == "latest_reminder":
        yield REMINDER
    if turn.role == "assistant" and keeps_reasoning:
        yield from (turn.reasoning, END_THINK)
    yield "\n\n".join(
        f"<tool_result>{part.text}</tool_result>" if isinstance(part, Result) else part for part in turn.parts
    )
    if turn.tools:
        yield "\n\n"
        yield from _fill(texts.tools, {"tool_schemas": "\n".join(turn.tools), **_PLACEHOLDERS})
    if turn.response_format:
        yield "\n\n"
        yield from _fill(texts.response, {"schema": turn.response_format})
    if turn.calls:
        yield from _write_calls(turn)
    if turn.role == "assistant":
        yield EOS


def _fill(text: str, values: Mapping[str, Piece]) -> Iterator[Piece]:
    """Yield a text of the checkpoint with its placeholders replaced. Other braces are text."""
    names = "|".join(values)
    for number, part in enumerate(re.split(rf"\{{({names})\}}", text)):
        yield values[part] if number % 2 else part


def _write_calls(turn: Turn) -> Iterator[Piece]:
    yield from ("\n\n<", DSML, "tool_calls>\n")
    for call in turn.calls:
        yield from ("<", DSML, f'invoke name="{call.name}">\n')
        for number, argument in enumerate(call.arguments):
            yield "\n" if number else ""
            yield from _write_argument(argument)
        yield from ("\n</", DSML, "invoke>\n")
    yield from ("</", DSML, "tool_calls>")


def _write_argument(argument: Argument) -> Iterator[Piece]:
    kind = "true" if argument.is_string else "false"
    yield from ("<", DSML, f'parameter name="{argument.name}" string="{kind}">', argument.text)
    yield from ("</", DSML, "parameter>")
