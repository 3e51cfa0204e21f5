"""What a worker process is asked and what it answers: one JSON object a line, over its stdin and stdout.

This file is imported by workers in foreign environments, so it uses the standard library only.
Between requests a worker is blocked reading its stdin: it must hold no spinning thread.

==========  ==================================================  ==============================================
op          request fields                                      answer
==========  ==================================================  ==============================================
``load``    ``path threads context``                            ``version settings load_s first_token_s``
``run``     ``prompt`` (token ids), ``new_tokens``              ``prefill_s decode_s num_new``
``batch``   ``prompts`` (lists of token ids), ``new_tokens``    ``decode_s num_new`` (over all sequences)
==========  ==================================================  ==============================================

``context`` is the room for one sequence. ``batch`` may build its own context, with room for just its sequences: it
is the last request of a worker's life, and its time to build one is not counted.

An answer with ``error`` means that the request failed; end of input means quit. Times are seconds of wall clock:

- ``load_s``: from nothing loaded to ready (imports not counted); ``first_token_s``: from there to the first token of an
  eight-token prompt, because a memory-mapped engine reads its weights only then;
- ``prefill_s``: from the call to the first new token;
- ``decode_s``: from the first new token (of ``batch``: the last sequence's first one) to the last;
  ``num_new`` counts the tokens in that interval. End-of-text tokens are ignored and decoding is greedy.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Protocol

FIRST_TOKEN_PROMPT = [11, 2041, 507, 9001, 333, 17, 4242, 99]


class PeerEngine(Protocol):
    """One engine as the workers offer it; each method returns the answer of the op of its name."""

    def load(self, path: str, threads: int, context: int) -> dict[str, Any]: ...

    def run(self, prompt: list[int], new_tokens: int) -> dict[str, Any]: ...

    def batch(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any]: ...


def serve(engine: PeerEngine) -> None:
    """Answer requests until stdin ends.

    Engines print to stdout as they like, so the answers go to a copy of it and stdout becomes stderr.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    operations: dict[str, Callable[..., dict[str, Any]]] = {
        "load": engine.load,
        "run": engine.run,
        "batch": engine.batch,
    }
    for line in sys.stdin:
        request = json.loads(line)
        operation = operations[request.pop("op")]
        try:
            answer = operation(**request)
        except Exception as error:  # the parent decides what a failure means; the log keeps the trace
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
