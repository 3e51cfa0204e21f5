"""What the engine asks of a tokenizer; ``hotset.chat.tokenizer`` has the real one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol


class TextStream(Protocol):
    """Turns the tokens of one answer into text, and looks for stop strings in it."""

    @property
    def is_stopped(self) -> bool:
        """A stop string was completed: no more text will come."""
        ...

    def feed(self, token_id: int) -> str:
        """Take the next token and return the text that became certain, often ``""``."""
        ...

    def finish(self) -> str:
        """Return the text that was held back. ``""`` after a stop string."""
        ...


class TextCodec(Protocol):
    """Text to tokens and back."""

    @property
    def eos_ids(self) -> Collection[int]:
        """Tokens that end an answer."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a whole prompt, as written by its caller: control tokens in it count as such."""
        ...

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation, written in the model's own dialect.

        ``options`` are its settings: ``tools``, ``thinking``, ``effort``, ``response_format``, and variables of a chat
        template. RequestError when the model does not have one of them.
        """
        ...

    def stream(self, stop: tuple[str, ...]) -> TextStream:
        """Return a stream for one answer."""
        ...
