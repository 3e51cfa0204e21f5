"""One step: what the scheduler hands to an executor, and what an executor is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotset.kv.store import CacheStore
from hotset.machine.verify import RegionPages


@dataclass(slots=True)
class Segment:
    """Consecutive tokens of one sequence inside a step.

    Attributes:
        first: index of the first one in :attr:`StepBatch.tokens`.
        count: number of tokens, at least 1.
        position: position of the first one in its sequence.
        blocks: int32 ids of the blocks that cover positions ``0..position + count - 1``. A view, valid during the
            step. Blocks before the one that holds ``position`` are full and only read; the rest are written.
        frontier: index of the sequence's frontier, 0 for a model that has none. It stands at ``position`` before the
            step and at ``position + count`` after it. At position 0 it holds anything and nothing of it is read.
    """

    first: int
    count: int
    position: int
    blocks: NDArray[np.int32]
    frontier: int = 0


@dataclass(slots=True)
class StepBatch:
    """The tokens of one step, all segments one after another.

    Attributes:
        tokens: int32 [n].
        segments: one per sequence in this step; together they cover ``tokens`` in order.
        outputs: int32 [m], rising indices into ``tokens`` whose logits are wanted.
    """

    tokens: NDArray[np.int32]
    segments: list[Segment]
    outputs: NDArray[np.int32]


class Executor(CacheStore, Protocol):
    """Runs a program on a batch. Owns the weights, and the memory of cache blocks and frontiers.

    Not thread-safe. A step that raises may have written rows of the blocks its segments write, and may have left their
    frontiers in any state; it has changed nothing else.
    """

    num_blocks: int
    max_tokens: int
    max_outputs: int

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step and return logits, float32 [m, vocab], in the order of ``batch.outputs``.

        The array is the executor's and valid until the next step.
        """
        ...

    def regions(self) -> tuple[RegionPages, ...]:
        """Every allocation: where it was planned, and where its pages are now."""
        ...

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        ...
