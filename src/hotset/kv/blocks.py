"""Block ids, their references and reservations: who may use which block, and how many are left.

The pool deals in integers; the memory behind a block belongs to the executor. Every block is in exactly one state:

    free     nobody needs its rows
    used     referenced by at least one sequence
    cached   referenced by nobody, its rows kept because the prefix tree can still serve them

so ``free + used + cached == num_blocks`` at all times. A sequence *reserves* blocks when it is admitted and *takes*
them one by one as it grows, so cached rows are given up only when a block is really needed, and a sequence that was
admitted can never run out.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable

from hotset.errors import InternalError, RequestError


class BlockPool:
    """The accounts of ``num_blocks`` blocks. Not thread-safe: the engine's driver is the only caller."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise RequestError(f"a cache of {num_blocks} blocks holds nothing", "at least 1 block")
        self.num_blocks = num_blocks
        self.num_reserved = 0
        # Taken from the end, so blocks are first handed out in rising order: neighbours in memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        # Oldest first. Sequences release their deepest block first, so a block always stands before its prefix.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._is_kept = bytearray(num_blocks)
        self._num_used = 0
        self._forget: Callable[[int], None] | None = None

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self._num_used

    @property
    def num_available(self) -> int:
        """Blocks that a new sequence may still reserve: free and cached ones that nobody has reserved."""
        return len(self._free) + len(self._cached) - self.num_reserved

    def reserve(self, count: int) -> bool:
        """Set ``count`` blocks aside for later :meth:`take`; ``False``, and nothing changed, when too few are left."""
        if count > self.num_available:
            return False
        self.num_reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """Give back ``count`` blocks that were reserved and not taken."""
        if count > self.num_reserved:
            raise InternalError(f"{count} reserved blocks given back, {self.accounts()}")
        self.num_reserved -= count

    def take(self) -> int:
        """Turn one reserved block into a used one and return its id. Its old rows are lost."""
        if not self.num_reserved:
            raise InternalError(f"a block was taken without a reservation, {self.accounts()}")
        if not self._free:
            self._evict()
        block_id = self._free.pop()
        self.num_reserved -= 1
        self._references[block_id] = 1
        self._num_used += 1
        return block_id

    def claim(self, block_id: int) -> None:
        """Turn a cached block into a used one, in the place of a reserved one. The tree forgets it, its rows stay."""
        if not self.num_reserved or block_id not in self._cached or self._forget is None:
            raise InternalError(f"block {block_id} is not cached, or was claimed unreserved, {self.accounts()}")
        del self._cached[block_id]
        self._forget(block_id)
        self._is_kept[block_id] = 0
        self.num_reserved -= 1
        self._references[block_id] = 1
        self._num_used += 1

    def retain(self, block_id: int) -> None:
        """Add a reference to a block whose rows are valid: a used or a cached one."""
        if not self._references[block_id]:
            if block_id not in self._cached:
                raise InternalError(f"block {block_id} is free and was to be shared, {self.accounts()}")
            del self._cached[block_id]
            self._num_used += 1
        self._references[block_id] += 1

    def release(self, block_id: int) -> None:
        """Drop a reference. The last one makes the block cached when the prefix tree keeps it, free otherwise."""
        references = self._references[block_id] - 1
        if references < 0:
            raise InternalError(f"block {block_id} was released more often than it was taken, {self.accounts()}")
        self._references[block_id] = references
        if references:
            return
        self._num_used -= 1
        if self._is_kept[block_id]:
            self._cached[block_id] = None
        else:
            self._free.append(block_id)

    def on_evict(self, forget: Callable[[int], None]) -> None:
        """Name the one function that is told when a kept block is given up, before its id is used again."""
        self._forget = forget

    def keep(self, block_id: int) -> None:
        """Say that the prefix tree can serve this used block later."""
        if not self._references[block_id] or self._is_kept[block_id]:
            raise InternalError(f"block {block_id} cannot be kept: not in use, or kept already, {self.accounts()}")
        self._is_kept[block_id] = 1

    def evict_all(self) -> None:
        """Give up every cached block."""
        while self._cached:
            self._evict()

    def _evict(self) -> None:
        if not self._cached or self._forget is None:
            raise InternalError(f"no block is left to give up, {self.accounts()}")
        block_id, _ = self._cached.popitem(last=False)
        self._forget(block_id)
        self._is_kept[block_id] = 0
        self._free.append(block_id)

    def accounts(self) -> str:
        """Return the accounts in words, for messages."""
        return (
            f"blocks: {self.num_free} free + {self.num_used} used + {self.num_cached} cached of {self.num_blocks}, "
            f"{self.num_reserved} reserved"
        )

    def check_integrity(self, held: Iterable[int]) -> None:
        """Hold the accounts against the truth: ``held`` lists the block of every live reference, once per reference.

        InternalError on a lost, doubled or miscounted block. Costs one pass over all blocks: run when idle.
        """
        free, cached, truth = set(self._free), set(self._cached), Counter(held)
        if len(free) != len(self._free) or free & cached:
            raise InternalError(f"a block is free twice, or free and cached, {self.accounts()}")
        if self.num_free + self.num_used + self.num_cached != self.num_blocks:
            raise InternalError(f"free + used + cached is not the number of blocks, {self.accounts()}")
        if not 0 <= self.num_reserved <= self.num_free + self.num_cached:
            raise InternalError(f"more blocks are reserved than are left, {self.accounts()}")
        for block_id, references in enumerate(self._references):
            if references != truth[block_id]:
                raise InternalError(f"block {block_id} counts {references} references, has {truth[block_id]}")
            if (references == 0) != (block_id in free or block_id in cached):
                raise InternalError(f"block {block_id} with {references} references is in the wrong state")
            if (block_id in cached and not self._is_kept[block_id]) or (block_id in free and self._is_kept[block_id]):
                raise InternalError(f"block {block_id} is kept and free, or cached and not kept")

    def is_kept(self, block_id: int) -> bool:
        """Say whether the prefix tree serves this block."""
        return bool(self._is_kept[block_id])
