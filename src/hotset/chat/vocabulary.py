"""What a tokenizer knows about its tokens: bytes, roles, and which of them a user's text may not write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache

SPACE_MARK = "▁"

#: Control tokens that end an answer in the model families we know, beside the one a checkpoint names itself. Instruct
#: checkpoints often name the end of a document only.
END_TOKENS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
)


class Spelling(Enum):
    """How token strings stand for bytes."""

    BYTE_LEVEL = "byte-level"  # every byte has a printable character of its own (GPT-2)
    BYTE_FALLBACK = "byte-fallback"  # a space is written as U+2581, rare bytes as <0xNN> (SentencePiece)


class TokenKind(Enum):
    """The part a token plays in text."""

    NORMAL = "normal"
    LITERAL = "literal"  # stands for its own characters, found in text before anything else is
    CONTROL = "control"  # steers the model, stands for no text
    BYTE = "byte"  # one raw byte, written <0xNN>
    UNUSED = "unused"


@dataclass(frozen=True)
class AddedToken:
    """A token that is looked for in the text before it is split into pieces.

    ``is_guarded`` ones cannot be written by the content of a message: control tokens, literal ones that look like role
    markers (``<|user|>``, ``<｜User｜>``), which some checkpoints do not call control tokens, and those that a dialect
    names (``is_protocol``), which besides are visible in answers.
    """

    content: str
    token_id: int
    is_control: bool
    takes_space_before: bool = False
    takes_space_after: bool = False
    is_protocol: bool = False

    @property
    def is_guarded(self) -> bool:
        return len(self.content) > 1 and (self.is_control or self.is_protocol or is_role_marker(self.content))


def is_role_marker(content: str) -> bool:
    """Say whether a token is written like a role marker, ``<|...|>`` or with full-width bars."""
    return content.startswith(("<|", "<｜")) and content.endswith(("|>", "｜>"))


@dataclass(frozen=True)
class Vocabulary:
    """Token ids to strings, kinds and bytes.

    Attributes:
        size: one more than the largest token id.
        text_of: the token's string in the checkpoint, ``None`` for an id without one.
        kind_of: its kind.
        added: the tokens looked for in text first.
        bos_id: the token that starts a text, if there is one.
        eos_id: the end-of-text token that the checkpoint names, if it names one.
        eos_ids: all tokens that end an answer.
        prefix_ids: tokens put before every prompt.
        has_space_prefix: a space is put before text, so decoding a whole text drops its first space.
    """

    size: int
    spelling: Spelling
    text_of: Callable[[int], str | None]
    kind_of: Callable[[int], TokenKind]
    added: tuple[AddedToken, ...]
    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    prefix_ids: tuple[int, ...]
    has_space_prefix: bool = False

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of text that a token stands for; none for control tokens and ids without a string."""
        text, kind = self.text_of(token_id), self.kind_of(token_id)
        if text is None or kind is TokenKind.CONTROL:
            return b""
        if kind is TokenKind.LITERAL:
            return text.encode()
        if kind is TokenKind.BYTE:
            return bytes([int(text[3:5], 16)])
        if self.spelling is Spelling.BYTE_FALLBACK:
            return text.replace(SPACE_MARK, " ").encode()
        table = byte_of_character()
        # Fillers for unused ids are plain text and may hold a space, which byte-level spelling never does.
        return bytes(table[c] for c in text) if all(c in table for c in text) else text.encode()


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's table (openai/gpt-2, encoder.py): printable bytes stand for themselves, others for U+0100 and up."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def find_end_tokens(added: tuple[AddedToken, ...]) -> frozenset[int]:
    """Return the ids of the control tokens that are known to end an answer."""
    contents = {token.content for token in added}
    # In OpenAI's harmony format <|end|> ends a message inside an answer; <|return|> ends the answer.
    names = set(END_TOKENS) - ({"<|end|>"} if "<|return|>" in contents else set())
    return frozenset(token.token_id for token in added if token.is_control and token.content in names)
