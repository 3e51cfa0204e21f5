"""Memory behind cache blocks and frontiers for tests: what a block or a slot holds is a number."""

import zlib

import numpy as np


class NumberStore:
    """A :class:`hotset.kv.store.CacheStore` with one uint64 per block and per frontier, at first all wrong."""

    block_bytes = frontier_bytes = 8

    def __init__(self, num_blocks: int, num_frontiers: int) -> None:
        self.num_frontiers = num_frontiers
        self.blocks = np.full(num_blocks, 1 << 60, np.uint64)
        self.frontiers = np.full(num_frontiers, 1 << 60, np.uint64)

    def copy_block(self, block_id: int, out: np.ndarray) -> None:
        out[:] = self.blocks[block_id : block_id + 1].view(np.uint8)

    def restore_block(self, block_id: int, data: np.ndarray) -> None:
        self.blocks[block_id] = data.view(np.uint64)[0]

    def copy_frontier(self, slot: int, out: np.ndarray) -> None:
        out[:] = self.frontiers[slot : slot + 1].view(np.uint8)

    def restore_frontier(self, slot: int, data: np.ndarray) -> None:
        self.frontiers[slot] = data.view(np.uint64)[0]


def state_of(tokens: np.ndarray) -> int:
    """The number of a frontier after these tokens."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes())
