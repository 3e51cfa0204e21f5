"""Putting saved rows back into the cache: read into blocks that nobody sees, then published in the prefix tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from hotset.errors import RequestError
from hotset.kv.memory import CacheMemory, Tokens
from hotset.kv.prefix import Node
from hotset.kv.store import Bytes, CacheStore


class Restoration:
    """Blocks and places for snapshots that wait for saved rows. See :func:`restore`."""

    def __init__(
        self, memory: CacheMemory, store: CacheStore, tokens: Tokens, num_rows: int, snapshots: Sequence[int]
    ) -> None:
        self._memory = memory
        self._store = store
        self._tokens = tokens
        self._num_rows = num_rows
        self._snapshots = snapshots
        # Blocks that the tree has already, from the beginning on: they are used, and the saved ones passed over.
        self._known = self._find_known()
        self._ids = [node.block_id for node in self._known]
        #: Reserved places by the position of their snapshot.
        self._places: dict[int, int] = {}

    def _find_known(self) -> list[Node]:
        memory = self._memory
        path = memory.walk(memory.tree.root, self._tokens, 0, self._num_rows)
        end = len(path) * memory.block_tokens
        tail = (path[-1] if path else memory.tree.root).tails.get(self._tokens[end : self._num_rows].tobytes())
        return path if tail is None else [*path, tail]

    def begin(self) -> None:
        """Take blocks and places. RequestError when the running requests leave too few."""
        memory = self._memory
        for block_id in self._ids:
            memory.pool.retain(block_id)
        needed = memory.num_blocks(self._num_rows) - len(self._ids)
        if not memory.pool.reserve(needed):
            raise RequestError(
                f"the session needs {needed} more cache blocks, running requests leave {memory.pool.num_available} of "
                f"{memory.pool.num_blocks}",
                "wait until the running requests have ended",
            )
        try:
            while needed:
                self._ids.append(memory.pool.take())
                needed -= 1
        finally:
            memory.pool.unreserve(needed)
        if memory.frontiers.is_needed:
            self._reserve_places()

    def _reserve_places(self) -> None:
        """The end always gets a place, then the border before it; earlier ones only where nobody has to make room."""
        frontiers = self._memory.frontiers
        known = {}
        end = 0
        for node in self._known:
            end += node.num_tokens
            if node.snapshot is not None:
                frontiers.touch(node.snapshot)
                known[end] = node.snapshot
        for count, rows in enumerate((self._num_rows, *reversed(self._snapshots))):
            is_wanted = count < min(2, frontiers.num_snapshots) or frontiers.num_free > 0
            if is_wanted and rows not in known:
                self._places[rows] = frontiers.reserve()

    def buffers(self) -> Iterator[Bytes]:
        """Yield buffers to be filled with the saved blocks, then the saved frontiers, in the order of the file."""
        block = np.empty(self._store.block_bytes, np.uint8)
        for index, block_id in enumerate(self._ids):
            yield block
            if index >= len(self._known):
                self._store.restore_block(block_id, block)
        frontiers = self._memory.frontiers
        if frontiers.is_needed:
            passed_over = np.empty(frontiers.frontier_bytes, np.uint8)
            for rows in (*self._snapshots, self._num_rows):
                place = self._places.get(rows)
                yield passed_over if place is None else frontiers.data(place)

    def publish(self) -> None:
        """Make everything findable. To be called when all buffers were filled and found right."""
        memory = self._memory
        node = memory.tree.root
        for index, block_id in enumerate(self._ids):
            end = min((index + 1) * memory.block_tokens, self._num_rows)
            key = self._tokens[index * memory.block_tokens : end].tobytes()
            is_full = end == (index + 1) * memory.block_tokens
            node = (memory.tree.insert if is_full else memory.tree.insert_tail)(node, key, block_id)
            if end in self._places:
                memory.frontiers.attach(node, self._places.pop(end))

    def end(self) -> None:
        """Let everything go. What was published stays in the tree as long as there is room; the rest is free again."""
        for place in self._places.values():
            self._memory.frontiers.unreserve(place)
        # Deepest first, so that the pool gives up the end of a prefix before its beginning.
        for block_id in reversed(self._ids):
            self._memory.pool.release(block_id)


@contextmanager
def restore(
    memory: CacheMemory, store: CacheStore, tokens: Tokens, num_rows: int, snapshots: Sequence[int]
) -> Iterator[Restoration]:
    """Hold room for the rows of ``tokens[:num_rows]`` and for snapshots at these positions, for a ``with`` block."""
    restoration = Restoration(memory, store, tokens, num_rows, snapshots)
    try:
        restoration.begin()
        yield restoration
    finally:
        restoration.end()
