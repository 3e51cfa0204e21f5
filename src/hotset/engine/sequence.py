"""One request inside the engine: its tokens, its blocks, its text so far and the events it has produced."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hotset.engine.batch import Segment
from hotset.engine.events import Event, Finished, FinishReason, Piece, Timings
from hotset.engine.sampler import Chooser
from hotset.engine.text import TextStream
from hotset.errors import HotsetError, InternalError
from hotset.kv.memory import BlockTable


class Sequence:
    """Prompt and output of one request, and how far both have been computed.

    ``tokens[:num_tokens]`` are known; ``table.num_rows`` of them have their rows in the cache. The difference is what
    is left to compute: more than one token while the prompt is prefilled, exactly one while decoding.
    """

    __slots__ = (
        "_choose", "_eos_ids", "_first_token_at", "_pending", "_started_at", "_stream", "_submitted_at", "count",
        "events", "finish_reason", "last_token", "max_tokens", "num_cached", "num_prompt", "num_recomputed",
        "num_tokens", "output", "seed", "table", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt: NDArray[np.int32],
        max_tokens: int,
        eos_ids: Collection[int],
        seed: int,
        choose: Chooser,
        stream: TextStream | None,
    ) -> None:
        """``prompt`` is int32 and not empty. ``eos_ids`` is empty when end-of-text tokens are to be ignored."""
        self.num_prompt = self.num_tokens = len(prompt)
        self.max_tokens = max_tokens
        self.tokens: NDArray[np.int32] = np.empty(self.num_prompt + max_tokens, np.int32)
        self.tokens[: self.num_prompt] = prompt
        self.last_token = int(prompt[-1])
        self.output: list[int] = []
        self.seed = seed
        self.table: BlockTable | None = None
        self.num_cached = self.num_recomputed = 0
        #: Tokens of this sequence in the step under way.
        self.count = 0
        self.events: deque[Event] = deque()
        self.finish_reason: FinishReason | None = None
        self._eos_ids = eos_ids
        self._choose = choose
        self._stream = stream
        self._pending: list[int] = []
        self._submitted_at = perf_counter()
        self._started_at = self._first_token_at = 0.0

    @property
    def num_rows(self) -> int:
        """Cache rows needed at most. The last token that may be sampled is never fed back, so it needs none."""
        return self.num_prompt + self.max_tokens - 1

    def start(self, table: BlockTable) -> None:
        """Take the blocks of an admitted request, for the first time or again after :meth:`stop`."""
        self.table = table
        if self._started_at:
            self.num_cached = min(self.num_cached, table.num_rows)
        else:
            self.num_cached = table.num_rows
            self._started_at = perf_counter()

    def stop(self) -> None:
        """Give the blocks back, keeping what is known. The sequence has to be admitted again."""
        if self.table is not None:
            self.num_recomputed += self.table.num_recomputed
            self.table.release()
            self.table = None

    @property
    def is_torn(self) -> bool:
        """A step of this sequence was begun and not committed: see :attr:`BlockTable.is_torn`."""
        return self._blocks().is_torn

    def state(self) -> tuple[NDArray[np.int32], BlockTable | None]:
        """Return the known tokens, a view, and the table that holds rows of them; None when there are no rows yet."""
        table = self.table
        return self.tokens[: self.num_tokens], table if table is not None and table.num_rows else None

    @property
    def num_remaining(self) -> int:
        """Known tokens whose rows are not in the cache yet."""
        return self.num_tokens - self._blocks().num_rows

    def adopt(self) -> None:
        """Skip blocks of known tokens that another sequence has computed meanwhile."""
        self.num_cached = min(self.num_cached + self._blocks().adopt(self.num_tokens), self.num_prompt - 1)

    def limit(self, room: int) -> int:
        """Return how many tokens of this sequence a step with ``room`` for that many may compute."""
        return self._blocks().limit(min(self.num_remaining, room))

    def segment(self, first: int) -> Segment:
        """Return this sequence's part of a step, ``count`` tokens from index ``first`` of the batch on."""
        table = self._blocks()
        position = table.num_rows
        return Segment(first, self.count, position, table.cover(position + self.count), table.frontier.slot)

    def commit(self) -> bool:
        """Count the step's tokens as computed. ``True`` when all known ones are: logits for the next one are due."""
        table = self._blocks()
        num_rows = table.num_rows + self.count
        table.commit(num_rows)
        return num_rows == self.num_tokens

    def _blocks(self) -> BlockTable:
        if self.table is None:
            raise InternalError("a sequence was to run before it was admitted")
        return self.table

    def choose(self, logits: NDArray[np.float32]) -> int:
        """Return the next token, or -1 when ``logits`` are not numbers."""
        return self._choose(logits, self.tokens[: self.num_tokens], self.num_tokens)

    def accept(self, token: int) -> FinishReason | None:
        """Append a sampled token, produce the text that became certain, and say whether the answer is complete."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.last_token = token
        self.output.append(token)
        if len(self.output) == 1:
            self._first_token_at = perf_counter()
        if token in self._eos_ids:
            return "stop"
        if self._stream is None:
            self.events.append(Piece("", (token,)))
        else:
            self._pending.append(token)
            text = self._stream.feed(token)
            if text:
                self._emit(text)
            if self._stream.is_stopped:
                return "stop"
        return "length" if len(self.output) == self.max_tokens else None

    def _emit(self, text: str) -> None:
        self.events.append(Piece(text, tuple(self._pending)))
        self._pending.clear()

    def finish(self, reason: FinishReason, error: HotsetError | None = None) -> None:
        """Give the blocks back and produce the terminal event."""
        self.stop()
        self.finish_reason = reason
        text = self._stream.finish() if self._stream is not None else ""
        if text:
            self._emit(text)
        self.events.append(
            Finished(
                finish_reason=reason,
                token_ids=tuple(self.output),
                num_prompt_tokens=self.num_prompt,
                cached_tokens=self.num_cached,
                recomputed_tokens=self.num_recomputed,
                seed=self.seed,
                timings=self._timings(),
                error=error,
            )
        )

    def _timings(self) -> Timings:
        now = perf_counter()
        started = self._started_at or now
        first = self._first_token_at or now
        return Timings(started - self._submitted_at, first - started, now - first)
