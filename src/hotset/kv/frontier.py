"""What the next token needs besides blocks, and where a sequence can therefore resume.

Blocks hold the rows that are addressed by token. A family with sliding windows or compressor rings also keeps a
fixed-size *frontier* per live sequence, which moves on with every token. A prefix found in the tree is reusable only
from a place whose frontier was kept: a *snapshot*, which hangs at the tree node that ends there.

Snapshots come from a pool of a planned number. When it is full, a new one takes the place of that one among the half
used longest ago which saves the fewest tokens, counted from the snapshot before it: a chat of many short turns then
does not push out the few that its long beginning has. They are taken when a step ends at a block border. Those that
stay:

    spacing   one every 2,048 tokens of a sequence, or more where the pool is small for the prompt (see ``spacing``)
    border    the last block border before the end of a prompt, and the last one that an answer reached
    branch    where the tree knew a prompt no further: others will part from each other there again

Steps of a prefill are cut to end there. Between them the newest snapshot of a sequence moves on with it, so that what
a cancelled prompt computed, and what neighbours with the same prompt compute, can be used too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from hotset.errors import InternalError, RequestError
from hotset.kv.prefix import Node, Snapshot
from hotset.kv.store import Bytes, CacheStore

SPACING_BLOCKS = 8
"""Blocks between two snapshots that stay: 2,048 tokens."""
LEAST_BLOCKS = 1
"""A step is cut at a border or branch only if that keeps at least this many blocks from being computed again."""


class NoFrontier:
    """The frontier of a family whose rows are all addressed by token (Llama): every block border will do."""

    slot = 0
    is_torn = False

    def limit(self, start: int, count: int) -> int:
        return count

    def begin(self) -> None: ...

    def commit(self, node: Node, num_rows: int) -> None: ...

    def resume(self, node: Node, num_rows: int, num_found: int) -> None: ...

    def adopt(self, node: Node, num_rows: int) -> None: ...

    def close(self) -> None: ...


class LiveFrontier:
    """One live sequence's frontier slot, and the rules by which snapshots of it are taken."""

    __slots__ = ("_border", "_branch", "_kept", "_last", "_memory", "_rolling", "_spacing", "is_torn", "slot")

    def __init__(self, memory: FrontierMemory, slot: int, num_known: int, is_shared: bool) -> None:
        self._memory = memory
        self.slot = slot
        #: A step was begun and not committed: the slot belongs to no known position, and is lost with that step.
        self.is_torn = False
        self._spacing = memory.spacing(num_known) if is_shared else 0
        self._border = (num_known - 1) // memory.block_tokens * memory.block_tokens
        self._branch = 0
        # Positions of the latest snapshot on the way here, and of the latest one that stays; 0 is as good as one.
        self._last = self._kept = 0
        self._rolling: Snapshot | None = None

    def limit(self, start: int, count: int) -> int:
        """Return how many of the ``count`` tokens from position ``start`` on the next step may compute."""
        if not self._spacing:
            return count
        block = self._memory.block_tokens
        end = start + count
        if end >= self._kept + self._spacing and end // block * block > start:
            end = end // block * block
        for stop in (self._branch, self._border):
            if start < stop < end and stop - self._last >= LEAST_BLOCKS * block:
                end = stop
        return end - start

    def begin(self) -> None:
        """Say that a step is about to change the slot."""
        self.is_torn = True

    def commit(self, node: Node, num_rows: int) -> None:
        """Say that the slot stands at ``num_rows``; ``node`` ends there when that is a block border."""
        if self._spacing and num_rows % self._memory.block_tokens == 0:
            self._snapshot(node, num_rows)
        self.is_torn = False

    def _snapshot(self, node: Node, num_rows: int) -> None:
        stays = num_rows in (self._branch, self._border) or num_rows - self._kept >= self._spacing
        rolling, self._rolling = self._rolling, None
        if rolling is not None and rolling.is_rolling:
            self._memory.drop(rolling)
        if node.snapshot is None:
            snapshot = self._memory.take(node, self.slot)
            if not stays:
                snapshot.is_rolling = True
                self._rolling = snapshot
        else:
            self._memory.touch(node.snapshot)
            if stays:
                node.snapshot.is_rolling = False
        self._last = num_rows
        if stays:
            self._kept = num_rows

    def resume(self, node: Node, num_rows: int, num_found: int) -> None:
        """Start from the snapshot of ``node``, at ``num_rows``. The tree knows the sequence up to ``num_found``."""
        self._branch = num_found
        if num_rows:
            self.adopt(node, num_rows)
            self._kept = num_rows // self._memory.block_tokens * self._memory.block_tokens
            if node.snapshot is not None:
                node.snapshot.is_rolling = False

    def adopt(self, node: Node, num_rows: int) -> None:
        """Go on from the snapshot of ``node``, at ``num_rows``."""
        self._memory.restore(node, self.slot)
        self._last = num_rows
        self.is_torn = False

    def close(self) -> None:
        """Give the slot back. The newest snapshot stays: it is the end of this text."""
        self._memory.release(self.slot)


Frontier = NoFrontier | LiveFrontier
_NONE = NoFrontier()


def _num_saved(snapshot: Snapshot) -> int:
    """Tokens that would have to be computed again, in order to resume here, if there were only the snapshots before."""
    num_tokens = 0
    node: Node | None = snapshot.node
    while node is not None and (node.snapshot is None or node is snapshot.node):
        num_tokens += node.num_tokens
        node = node.parent
    return num_tokens


class FrontierMemory:
    """The frontier slots of one executor, and the pool of snapshots. Not thread-safe: the driver is the only caller."""

    def __init__(self, store: CacheStore | None, num_snapshots: int, block_tokens: int) -> None:
        """Allocate ``num_snapshots`` times ``store.frontier_bytes``. Without a store there are no frontiers."""
        self.frontier_bytes = store.frontier_bytes if store is not None else 0
        if num_snapshots < 0 or (num_snapshots and not self.frontier_bytes):
            raise RequestError(
                f"num_snapshots is {num_snapshots}, a model without a frontier needs none", "0 snapshots"
            )
        self.num_snapshots = num_snapshots
        self.block_tokens = block_tokens
        self._store = store
        self._slots = list(range(store.num_frontiers - 1, -1, -1)) if store is not None and self.frontier_bytes else []
        self._num_slots = len(self._slots)
        # Written here, so that no later step waits for a page.
        self._data = np.full((num_snapshots, self.frontier_bytes), 0, np.uint8)
        self._free = list(range(num_snapshots - 1, -1, -1))
        # By last use, the longest ago first.
        self._order: OrderedDict[Snapshot, None] = OrderedDict()

    @property
    def is_needed(self) -> bool:
        """Sequences of this model have a frontier."""
        return self.frontier_bytes > 0

    @property
    def num_free_slots(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        """Places for snapshots that hold none."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Snapshots that stand in the tree."""
        return len(self._order)

    def spacing(self, num_tokens: int) -> int:
        """Tokens between two snapshots that stay, for a prompt of ``num_tokens``; 0 when there are no snapshots.

        One prompt leaves at most half of the pool that way: 2,048 is doubled until it does.
        """
        if not self.num_snapshots:
            return 0
        spacing = SPACING_BLOCKS * self.block_tokens
        while num_tokens > spacing * max(1, self.num_snapshots // 2):
            spacing *= 2
        return spacing

    def open(self, num_known: int, is_shared: bool) -> Frontier | None:
        """Return the frontier of a new sequence with ``num_known`` tokens, or ``None`` when no slot is left.

        A sequence that starts at position 0 finds whatever is in the slot, and never reads it.
        """
        if not self.is_needed:
            return _NONE
        return LiveFrontier(self, self._slots.pop(), num_known, is_shared) if self._slots else None

    def release(self, slot: int) -> None:
        """Take a slot back."""
        if slot in self._slots or not 0 <= slot < self._num_slots:
            raise InternalError(f"frontier slot {slot} was given back and is not in use, {self.accounts()}")
        self._slots.append(slot)

    def can_resume(self, node: Node) -> bool:
        """Whether a sequence can go on after ``node`` without computing anything before it."""
        return not self.is_needed or node.snapshot is not None

    def restore(self, node: Node, slot: int) -> None:
        """Write the snapshot of ``node`` into a slot."""
        snapshot = node.snapshot
        if snapshot is None:
            raise InternalError(f"block {node.block_id} has no snapshot to resume from, {self.accounts()}")
        self._backing().restore_frontier(slot, self._data[snapshot.index])
        self.touch(snapshot)

    def take(self, node: Node, slot: int) -> Snapshot:
        """Keep the frontier in ``slot`` as the snapshot of ``node``, which must have none."""
        index = self.reserve()
        try:
            self._backing().copy_frontier(slot, self._data[index])
        except BaseException:
            self.unreserve(index)
            raise
        return self.attach(node, index)

    def reserve(self) -> int:
        """Return the index of a free place in the pool, after giving up a snapshot when there is none."""
        if not self._free:
            if not self._order:
                raise InternalError(f"no place for a snapshot, {self.accounts()}")
            oldest = islice(self._order, (len(self._order) + 1) // 2)
            self.drop(min(oldest, key=_num_saved))
        return self._free.pop()

    def unreserve(self, index: int) -> None:
        """Give back a place that was reserved and not used."""
        self._free.append(index)

    def attach(self, node: Node, index: int) -> Snapshot:
        """Make the bytes in a reserved place the snapshot of ``node``."""
        if node.snapshot is not None:
            raise InternalError(f"block {node.block_id} has a snapshot already, {self.accounts()}")
        snapshot = node.snapshot = Snapshot(index, node)
        self._order[snapshot] = None
        return snapshot

    def data(self, index: int) -> Bytes:
        """The bytes of one place of the pool, a view."""
        return self._data[index]

    def touch(self, snapshot: Snapshot) -> None:
        """Make a snapshot the last one to be given up."""
        self._order.move_to_end(snapshot)

    def drop(self, snapshot: Snapshot) -> None:
        """Give a snapshot up. Its node stays: a later snapshot may still make it useful."""
        del self._order[snapshot]
        snapshot.node.snapshot = None
        snapshot.is_rolling = False
        self._free.append(snapshot.index)

    def forget(self, node: Node) -> None:
        """The tree has given ``node`` up."""
        if node.snapshot is not None:
            self.drop(node.snapshot)

    def drop_all(self) -> None:
        """Give every snapshot up."""
        for snapshot in tuple(self._order):
            self.drop(snapshot)

    def _backing(self) -> CacheStore:
        if self._store is None:
            raise InternalError("a model without a frontier was to save or restore one")
        return self._store

    def accounts(self) -> str:
        """Return the accounts in words, for messages."""
        return (
            f"frontiers: {self.num_free_slots} of {self._num_slots} slots free; snapshots: {len(self._free)} free + "
            f"{self.num_used} used of {self.num_snapshots}"
        )

    def check_integrity(self, slots: Iterable[int], nodes: Iterator[Node]) -> None:
        """Hold the accounts against the truth: slots of live sequences, nodes of the tree. InternalError otherwise."""
        if not self.is_needed:
            return
        if Counter(slots) + Counter(self._slots) != Counter(range(self._num_slots)):
            raise InternalError(f"a frontier slot is lost, or free and in use, {self.accounts()}")
        found = {node: node.snapshot for node in nodes if node.snapshot is not None}
        if set(found.values()) != set(self._order) or any(node is not found[node].node for node in found):
            raise InternalError(f"the tree has {len(found)} snapshots, {self.accounts()}")
        places = Counter(self._free) + Counter(snapshot.index for snapshot in found.values())
        if places != Counter(range(self.num_snapshots)):
            raise InternalError(f"a snapshot's place is lost, or used twice, {self.accounts()}")
