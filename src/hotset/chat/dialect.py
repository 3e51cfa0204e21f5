"""A dialect: how a model family writes a conversation down, and how its answers are read.

There are two: the Jinja2 template that comes with most checkpoints, and the encoder of DeepSeek-V4, whose checkpoints
bring Python instead of a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, runtime_checkable

from hotset.chat.events import ChatEvent, ContentText
from hotset.errors import CheckpointError

Message = Mapping[str, Any]


class Control(str):
    """The spelling of a control token, as opposed to text that happens to be spelled like one."""


#: A part of a prompt: a control token, or text, which cannot hold any.
Piece = str | Control


@dataclass(frozen=True)
class ChatSettings:
    """What a caller may set beside the messages; None is the dialect's own default.

    Attributes:
        tools: the tools that the model may call, each ``{"type": "function", "function": {...}}``.
        thinking: the model reasons before it answers.
        effort: how hard it should reason, by the dialect's own names.
        response_format: a JSON schema that the answer must follow.
        variables: whatever else was given, by name.
    """

    tools: Any = None
    thinking: Any = None
    effort: Any = None
    response_format: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Sort options by name into fields and ``variables``."""
        named = {name: options[name] for name in ("tools", "thinking", "effort", "response_format") if name in options}
        return cls(**named, variables={name: value for name, value in options.items() if name not in named})

    @property
    def named(self) -> dict[str, Any]:
        """The fields that are set, by name, without ``variables``."""
        fields = {
            "tools": self.tools,
            "thinking": self.thinking,
            "effort": self.effort,
            "response_format": self.response_format,
        }
        return {name: value for name, value in fields.items() if value is not None}


class AnswerParser(Protocol):
    """Turns the text of one answer into events. The joined events do not depend on how the text is cut into pieces."""

    def feed(self, text: str) -> list[ChatEvent]:
        """Take the next text and return what became certain."""
        ...

    def finish(self, *, is_cut: bool = False) -> list[ChatEvent]:
        """Return the rest. ``is_cut``: the answer was ended by a limit or by the caller, not by the model."""
        ...


class Coder(Protocol):
    """What a dialect asks of a tokenizer."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a whole prompt in which control tokens are spelled out."""
        ...

    def encode_parts(self, parts: Iterable[int | str]) -> list[int]:
        """Return the tokens of a prompt that comes as token ids and as texts, which cannot write control tokens."""
        ...

    def control_id(self, spelling: str) -> int:
        """Return the id of a control token; CheckpointError when the tokenizer has none of this spelling."""
        ...


class Dialect(Protocol):
    """How one model family writes conversations."""

    @property
    def name(self) -> str:
        """A short name, for messages."""
        ...

    def encode(self, messages: Sequence[Message], settings: ChatSettings) -> list[int]:
        """Return the tokens of a conversation up to the opening of the model's turn.

        RequestError names the message, field or setting that this dialect does not have.
        """
        ...

    def parser(self, messages: Sequence[Message], settings: ChatSettings) -> AnswerParser:
        """Return a parser for the answer to this conversation."""
        ...


@runtime_checkable
class ReadsAnswers(Protocol):
    """A tokenizer that knows how its model writes answers."""

    def answer_parser(self, messages: Sequence[Message], options: Mapping[str, Any]) -> AnswerParser:
        """Return a parser for the answer to a conversation; ``options`` as for encoding it."""
        ...


class PlainParser:
    """The parser of dialects without a grammar of their own: all text is content."""

    def feed(self, text: str) -> list[ChatEvent]:
        return [ContentText(text)] if text else []

    def finish(self, *, is_cut: bool = False) -> list[ChatEvent]:
        return []


@dataclass(frozen=True)
class DialectChoice:
    """A dialect that was found in a model folder, before there is a tokenizer.

    ``protocol_tokens`` are spellings that steer the model whatever the tokenizer file says about them: text never
    becomes one, and they are visible in answers.
    """

    protocol_tokens: frozenset[str]
    make: Callable[[Coder], Dialect]


@dataclass(frozen=True)
class MissingDialect:
    """Stands in for a dialect whose file is not there: the model still takes text and token ids."""

    path: Path
    name = "missing"

    def encode(self, messages: Sequence[Message], settings: ChatSettings) -> list[int]:
        raise self._error()

    def parser(self, messages: Sequence[Message], settings: ChatSettings) -> AnswerParser:
        raise self._error()

    def _error(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is missing, which says how this model's conversations are written",
            "pull the model again, or give the prompt as text instead of messages",
        )


def find_folder_dialect(family: str | None, folder: Path, *, has_template: bool) -> DialectChoice | None:
    """Return the dialect that a model folder brings beside a template, by family name and files.

    CheckpointError when the folder has it, and it is not what the family was released with.
    """
    if family != "deepseek_v4":
        return None
    from hotset.chat.deepseek_v4 import ENCODER_FILE, PROTOCOL_TOKENS, DeepSeekV4, read_texts

    path = folder / ENCODER_FILE
    if path.is_file():
        texts = read_texts(path)
        return DialectChoice(PROTOCOL_TOKENS, lambda coder: DeepSeekV4(coder, texts))
    # Conversions of this family come with a template that somebody wrote for it.
    return None if has_template else DialectChoice(PROTOCOL_TOKENS, lambda coder: MissingDialect(path))
