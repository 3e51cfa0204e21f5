"""What a caller may ask with: text, messages or token ids, and whether it fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.engine.text import TextCodec
from hotset.errors import RequestError

Message = Mapping[str, Any]
Prompt = str | Sequence[Message] | Sequence[int] | NDArray[np.integer[Any]]


def encode(
    prompt: Prompt, chat_options: Mapping[str, Any], codec: TextCodec | None, vocab_size: int
) -> NDArray[np.int32]:
    """Return the tokens of a prompt, int32, not empty, all in ``[0, vocab_size)``. RequestError otherwise."""
    messages = _messages(prompt)
    if chat_options and not messages:
        raise RequestError(
            f"chat_options {', '.join(sorted(chat_options))} belong to a chat template, this prompt is not a list "
            "of messages"
        )
    if not isinstance(prompt, str) and not messages:
        return _check_tokens(prompt, vocab_size)
    if codec is None:
        raise RequestError("this engine has no tokenizer, so it takes token ids only", "give a list of token ids")
    tokens = codec.encode_prompt(prompt) if isinstance(prompt, str) else codec.encode_messages(messages, chat_options)
    return _check_tokens(tokens, vocab_size)


def _messages(prompt: Prompt) -> list[Message]:
    """The prompt as messages; empty when it is something else."""
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        return []
    messages = [entry for entry in prompt if isinstance(entry, Mapping)]
    if messages and len(messages) != len(prompt):
        raise RequestError(f"{len(messages)} of {len(prompt)} entries of the prompt are messages, expected all or none")
    return messages


def _check_tokens(tokens: Prompt, vocab_size: int) -> NDArray[np.int32]:
    if not isinstance(tokens, Sequence | np.ndarray) or isinstance(tokens, bytes | bytearray):
        raise RequestError(
            f"a prompt is a string, a list of messages or a list of token ids, not {type(tokens).__name__}"
        )
    if len(tokens) == 0:
        raise RequestError("the prompt is empty", "give at least one token")
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError):  # ragged lists, numbers beyond 64 bits
        array = None
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError("a prompt of token ids is a flat list of whole numbers")
    if array.min() < 0 or array.max() >= vocab_size:
        wrong = int(array[(array < 0) | (array >= vocab_size)][0])
        raise RequestError(f"token id {wrong} is not in the vocabulary", f"ids are 0 to {vocab_size - 1}")
    return array.astype(np.int32)


def check_length(num_prompt: int, max_tokens: int | None, max_context: int, num_rows: int) -> int:
    """Return the number of tokens that may be generated; RequestError, with the numbers, when it does not fit.

    ``num_rows`` is what the whole cache holds; the last token of an answer needs no row.
    """
    limit = min(max_context, num_rows + 1)
    place = "the context" if limit == max_context else "the cache"
    if num_prompt >= limit:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, {place} holds {limit} with at least 1 token of answer",
            f"at most {limit - 1} prompt tokens, or load with a larger context",
        )
    if max_tokens is None:
        return limit - num_prompt
    if num_prompt + max_tokens > limit:
        raise RequestError(
            f"{num_prompt} prompt tokens + max_tokens {max_tokens} = {num_prompt + max_tokens} tokens, {place} holds "
            f"{limit}",
            f"max_tokens={limit - num_prompt}",
        )
    return max_tokens
