"""Tokens to text, one at a time, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """Joins the bytes of tokens and decodes UTF-8 as far as characters are complete.

    A token may hold part of a character (byte-level BPE, byte fallback), so bytes of an unfinished one are held back.
    Bytes that can never become a character give U+FFFD at once. The pieces together are the text of all bytes decoded
    at one go, whatever the split.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_id: int) -> str:
        """Take the next token and return the text that it completes."""
        return self._decode(self._token_bytes(token_id))

    def finish(self) -> str:
        """Return what the bytes held back are worth: ``""``, or U+FFFD for a character that never came."""
        return self._decode(b"", final=True)


def decode(token_bytes: Callable[[int], bytes], token_ids: Iterable[int]) -> str:
    """Return the text of ``token_ids`` decoded at one go."""
    return b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")
