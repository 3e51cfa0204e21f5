"""Keeps control tokens out of the content of messages.

A template renders a conversation as text, with its control tokens spelled out, and the text is then split at them. If
the content of a message held ``<|im_end|>``, it would end the turn: whoever writes a message could write any role.
So, before rendering, a mark that occurs nowhere in the conversation is put inside every such string in every message;
the template's own control tokens stay whole. After rendering, the text is split at whole control tokens, the marks are
taken out of the pieces between, and those are encoded with control tokens switched off. The model sees exactly the
characters of the message, as ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hotset.chat.vocabulary import AddedToken
from hotset.errors import RequestError

# Code points that Unicode reserves for use inside a program; text never holds them for a reason.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class Guard:
    """Marks and splits at the guarded tokens of one vocabulary."""

    def __init__(self, added: Sequence[AddedToken]) -> None:
        guarded = sorted((token for token in added if token.is_guarded), key=lambda token: -len(token.content))
        self._tokens = {token.content: token for token in guarded}
        # With no guarded token, an expression that never matches.
        names = "|".join(re.escape(token.content) for token in guarded) or r"(?!)"
        self._whole = re.compile(names)
        # A look-ahead also finds occurrences that overlap.
        self._starts = re.compile(f"(?={names})")

    def protect(self, value: Any) -> tuple[Any, str | None]:
        """Return ``value`` (lists, mappings and strings, nested) with a mark in every guarded string, and the mark.

        The mark is ``None``, and ``value`` is as it was, when there is nothing to protect.
        """
        if not any(self._starts.search(text) for text in _strings(value)):
            return value, None
        taken = {character for text in _strings(value) for character in text if character in _MARKS}
        mark = next((mark for mark in _MARKS if mark not in taken), None)
        if mark is None:
            raise RequestError("the messages use every code point from U+FDD0 to U+FDEF, which are not for text")
        return self._marked(value, mark), mark

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            # Behind the first character, so that the string is no longer the token.
            borders = [0, *(match.start() + 1 for match in self._starts.finditer(value)), len(value)]
            return mark.join(value[a:b] for a, b in pairwise(borders))
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(entry, mark) for key, entry in value.items()}
        if isinstance(value, Sequence):
            return [self._marked(entry, mark) for entry in value]
        return value

    def split(self, text: str, mark: str) -> Iterator[int | str]:
        """Yield the id of every whole guarded token in ``text`` and the pieces between them, marks removed."""
        position = 0
        takes_space = False
        for match in (*self._whole.finditer(text), None):
            token = self._tokens[match.group()] if match else None
            piece = text[position : match.start() if match else len(text)]
            if takes_space:
                piece = piece.lstrip()
            if token and token.takes_space_before:
                piece = piece.rstrip()
            if piece:
                yield piece.replace(mark, "")
            if match and token:
                yield token.token_id
                position, takes_space = match.end(), token.takes_space_after


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.items()))
    elif isinstance(value, Sequence):
        for entry in value:
            yield from _strings(entry)
