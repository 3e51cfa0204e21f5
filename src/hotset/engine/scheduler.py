"""Which tokens run next: admission by blocks, and the shares of decoding and prefilling sequences in a step.

Admission is first come, first served. A request starts when the blocks for its prompt and all tokens it may generate
can be reserved, so nothing that runs is ever stopped for want of memory.

A sequence of a model with a frontier also gets a slot for it. Its prefill steps are cut where a snapshot of it is to be
taken (``kv/frontier.py``).

A step has room for ``max_tokens`` tokens. Every decoding sequence has one of them: the longest wait between two tokens
of a running answer is one full step. The rest goes to prefills: three quarters to the oldest, the remaining quarter to
the younger ones, shortest first, and what either leaves over to the other. A short prompt therefore does not wait
behind a long one, and a long one is never starved, because it becomes the oldest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from hotset.engine.batch import StepBatch
from hotset.engine.sequence import Sequence
from hotset.errors import InternalError, RequestError
from hotset.kv.memory import CacheMemory

YOUNGER_SHARE = 4


@dataclass(slots=True)
class Step:
    """A batch and the sequences of its segments, in the same order."""

    batch: StepBatch
    sequences: list[Sequence]


class Scheduler:
    """The queue and the running set. Not thread-safe: the engine's driver is the only caller."""

    def __init__(self, memory: CacheMemory, max_tokens: int, max_outputs: int, max_sequences: int) -> None:
        # With one place per sequence, a prefill always finds room beside the decodes.
        if not 1 <= max_sequences <= min(max_tokens, max_outputs):
            raise RequestError(
                f"max_sequences is {max_sequences}, a step has room for {max_tokens} tokens and {max_outputs} outputs",
                f"1 to {min(max_tokens, max_outputs)} sequences, or a larger prefill_chunk",
            )
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._memory = memory
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._tokens = np.zeros(max_tokens, np.int32)
        self._outputs = np.zeros(max_outputs, np.int32)

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that ended, wherever it is. Its blocks are the caller's business."""
        queue = self.waiting if sequence.table is None else self.running
        queue.remove(sequence)

    def holds(self, sequence: Sequence) -> bool:
        """Whether the sequence waits or runs here."""
        return sequence in self.running or sequence in self.waiting

    def admit(self) -> None:
        """Start waiting requests, oldest first, while there is room.

        InternalError when nothing runs and the oldest cannot start: it was accepted because it fits an empty cache, so
        blocks have been lost.
        """
        self.requeue_torn()
        while self.waiting and len(self.running) < self._max_sequences:
            sequence = self.waiting[0]
            table = self._memory.open(sequence.tokens, sequence.num_tokens, sequence.num_rows)
            if table is None:
                if not self.running:
                    raise InternalError(
                        f"nothing runs, yet {sequence.num_rows} rows cannot be reserved; {self._memory.accounts()}"
                    )
                return
            self.waiting.popleft()
            sequence.start(table)
            self.running.append(sequence)

    def requeue_torn(self) -> None:
        """Send sequences back to the head of the queue whose last step was interrupted, so that their frontier is lost.

        They resume from their newest snapshot, with the tokens that they have.
        """
        torn = [sequence for sequence in self.running if sequence.is_torn]
        for sequence in reversed(torn):
            self.running.remove(sequence)
            sequence.stop()
            self.waiting.appendleft(sequence)

    def schedule(self) -> Step | None:
        """Return the next step, or ``None`` when there is nothing to run.

        The arrays of the batch are used again by the next call.
        """
        self.admit()
        if not self.running:
            return None
        sequences: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self.running:
            if sequence.num_remaining == 1:
                sequence.count = 1
                sequences.append(sequence)
            else:
                prefills.append(sequence)
        if prefills:
            self._share_out(prefills, self._max_tokens - len(sequences))
            sequences.extend(sequence for sequence in prefills if sequence.count)
        return self._build(sequences)

    def _share_out(self, prefills: list[Sequence], budget: int) -> None:
        for sequence in prefills:
            sequence.adopt()
        oldest, *younger = prefills
        oldest.count = oldest.limit(budget - budget // YOUNGER_SHARE if younger else budget)
        budget -= oldest.count
        for sequence in sorted(younger, key=attrgetter("num_remaining")):
            sequence.count = sequence.limit(budget)
            budget -= sequence.count
        oldest.count = oldest.limit(oldest.count + budget)

    def _build(self, sequences: list[Sequence]) -> Step:
        tokens, outputs, segments = self._tokens, self._outputs, []
        num_tokens = num_outputs = 0
        for sequence in sequences:
            segment = sequence.segment(num_tokens)
            segments.append(segment)
            end = segment.position + segment.count
            if segment.count == 1:
                tokens[num_tokens] = sequence.tokens[segment.position]
            else:
                tokens[num_tokens : num_tokens + segment.count] = sequence.tokens[segment.position : end]
            num_tokens += segment.count
            if end == sequence.num_tokens:
                outputs[num_outputs] = num_tokens - 1
                num_outputs += 1
        return Step(StepBatch(tokens[:num_tokens], segments, outputs[:num_outputs]), sequences)
