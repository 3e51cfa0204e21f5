"""What cache memory asks of the memory behind it: copies of blocks and frontiers, as bytes."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class CacheStore(Protocol):
    """The bytes of cache blocks and frontiers, by index. The executor owns them; nothing here allocates.

    A frontier is everything that the next token of one sequence needs besides blocks, as of the position up to which
    the sequence was computed. ``frontier_bytes`` is 0 for a model that needs nothing, which then has no slots.
    Arrays are contiguous, uint8, of ``block_bytes`` or ``frontier_bytes`` bytes. Not to be called during a step.
    """

    block_bytes: int
    num_frontiers: int
    frontier_bytes: int

    def copy_block(self, block_id: int, out: Bytes) -> None:
        """Copy a block into ``out``."""
        ...

    def restore_block(self, block_id: int, data: Bytes) -> None:
        """Overwrite a block with ``data``."""
        ...

    def copy_frontier(self, slot: int, out: Bytes) -> None:
        """Copy the frontier in ``slot`` into ``out``."""
        ...

    def restore_frontier(self, slot: int, data: Bytes) -> None:
        """Overwrite the frontier in ``slot`` with ``data``."""
        ...
