"""Cache memory as a sequence sees it: a block table that grows, shares full blocks and gives everything back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hotset.errors import InternalError
from hotset.kv.blocks import BlockPool
from hotset.kv.frontier import Frontier, FrontierMemory, NoFrontier
from hotset.kv.lookups import Lookups
from hotset.kv.prefix import Node, PrefixTree
from hotset.kv.store import CacheStore
from hotset.program.cache import BLOCK_TOKENS

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Found:
    """What the tree has of a sequence.

    Attributes:
        path: full blocks to share, from the beginning on.
        tail: a block that is not full and follows them, to be copied; or None.
        num_rows: positions that these hold: where a sequence resumes.
        num_found: positions up to which the tree has blocks, whether or not a sequence can resume after them.
    """

    path: list[Node]
    tail: Node | None
    num_rows: int
    num_found: int


class CacheMemory:
    """The blocks and frontiers of one executor, the prefix tree over them, and the tables of the live sequences.

    Not thread-safe: the engine's driver is the only caller.
    """

    def __init__(
        self,
        num_blocks: int,
        block_tokens: int = BLOCK_TOKENS,
        store: CacheStore | None = None,
        num_snapshots: int = 0,
    ) -> None:
        """``store`` holds the bytes; without one there are no frontiers, and no blocks can be copied."""
        self.pool = BlockPool(num_blocks)
        self.frontiers = FrontierMemory(store, num_snapshots, block_tokens)
        self.tree = PrefixTree(self.pool, self.frontiers.forget)
        self.lookups = Lookups(block_tokens)
        self.block_tokens = block_tokens
        self.store = store

    @property
    def num_rows(self) -> int:
        """Token positions that all blocks together can hold."""
        return self.pool.num_blocks * self.block_tokens

    def num_blocks(self, num_rows: int) -> int:
        """Blocks that hold ``num_rows`` token positions."""
        return -(-num_rows // self.block_tokens)

    def open(self, tokens: Tokens, num_known: int, num_rows: int, reuse: bool = True) -> BlockTable | None:
        """Open a table that may grow to ``num_rows`` positions, or ``None`` when blocks or a frontier are not there.

        ``tokens[:num_known]`` is the prompt; with ``reuse`` its longest cached prefix is used, but never all of it: the
        last token is left to compute, because its logits are wanted. The array is read again when blocks fill, so
        later tokens must be written into it.
        """
        found = self.find(tokens, num_known - 1) if reuse else Found([], None, 0, 0)
        # Blocks of the incoming prompt are referenced before the rest is reserved: making room must not evict them.
        for node in found.path:
            self.pool.retain(node.block_id)
        frontier = None
        count = self.num_blocks(num_rows) - len(found.path)
        if self.pool.reserve(count):
            frontier = self.frontiers.open(num_known, reuse)
            if frontier is None:
                self.pool.unreserve(count)
        if frontier is None:
            for node in reversed(found.path):
                self.pool.release(node.block_id)
            return None
        table = BlockTable(self, tokens, found, self.num_blocks(num_rows), frontier, is_shared=reuse)
        try:
            table.resume(found)
        except BaseException:
            table.release()
            raise
        if reuse:
            self.lookups.count(tokens, num_known, found.num_rows)
        return table

    def walk(self, node: Node, tokens: Tokens, start: int, limit: int) -> list[Node]:
        """Return the full blocks cached after ``node`` for ``tokens[start:limit]``; ``node`` ends at ``start``."""
        path: list[Node] = []
        for begin in range(start, limit - self.block_tokens + 1, self.block_tokens):
            child = node.children.get(tokens[begin : begin + self.block_tokens].tobytes())
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def find(self, tokens: Tokens, limit: int) -> Found:
        """Return what is cached of ``tokens[:limit]`` up to the last place from which a sequence can resume."""
        path = self.walk(self.tree.root, tokens, 0, limit)
        num_found = len(path) * self.block_tokens
        for depth in range(len(path), -1, -1):
            node = path[depth - 1] if depth else self.tree.root
            num_rows = depth * self.block_tokens
            tail = self._find_tail(node, tokens, num_rows, limit)
            if tail is not None:
                return Found(path[:depth], tail, num_rows + tail.num_tokens, num_found)
            if depth and self.frontiers.can_resume(node):
                return Found(path[:depth], None, num_rows, num_found)
        return Found([], None, 0, num_found)

    def _find_tail(self, node: Node, tokens: Tokens, start: int, limit: int) -> Node | None:
        best = None
        for tail in node.tails.values():
            end = start + tail.num_tokens
            is_longer = best is None or tail.num_tokens > best.num_tokens
            if end <= limit and is_longer and self.frontiers.can_resume(tail):
                best = tail if tokens[start:end].tobytes() == tail.key else best
        return best

    def copy_block(self, source: int, target: int) -> None:
        """Overwrite one block with another."""
        if self.store is None:
            raise InternalError("blocks cannot be copied without their memory")
        data = np.empty(self.store.block_bytes, np.uint8)
        self.store.copy_block(source, data)
        self.store.restore_block(target, data)

    def forget(self) -> None:
        """Give up every cached block that no table uses, and every snapshot."""
        self.frontiers.drop_all()
        self.pool.evict_all()

    def accounts(self) -> str:
        """Return the accounts in words, for messages."""
        frontiers = f"; {self.frontiers.accounts()}" if self.frontiers.is_needed else ""
        return self.pool.accounts() + frontiers

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Hold every account against the live tables; InternalError names what is wrong."""
        tables = list(tables)
        self.pool.check_integrity(block_id for table in tables for block_id in table.held())
        self.tree.check_integrity()
        if self.pool.num_reserved != sum(table.num_reserved for table in tables):
            raise InternalError(f"reservations do not add up to those of the tables, {self.pool.accounts()}")
        self.frontiers.check_integrity((table.frontier.slot for table in tables), self.tree.walk())


class BlockTable:
    """The blocks of one sequence, in order of position, and its frontier. Full blocks are immutable and may be shared.

    Between :meth:`cover` and :meth:`commit` a step writes rows and moves the frontier. When that step is never
    committed, the frontier is lost: see :attr:`is_torn`.
    """

    __slots__ = (
        "_ids", "_is_shared", "_memory", "_next_full", "_node", "_tokens", "blocks", "frontier", "num_blocks",
        "num_found", "num_recomputed", "num_rows",
    )  # fmt: skip

    def __init__(
        self, memory: CacheMemory, tokens: Tokens, found: Found, max_blocks: int, frontier: Frontier, *, is_shared: bool
    ) -> None:
        path = found.path
        self._memory = memory
        self._tokens = tokens
        self._is_shared = is_shared
        self._ids: NDArray[np.int32] = np.full(max_blocks, -1, np.int32)
        self._ids[: len(path)] = [node.block_id for node in path]
        self._node = path[-1] if path else memory.tree.root
        self._next_full = (len(path) + 1) * memory.block_tokens
        self.frontier = frontier
        self.num_blocks = len(path)
        #: int32 [num_blocks], a view: valid until the table grows, shares or is released.
        self.blocks = self._ids[: self.num_blocks]
        #: Positions whose rows are valid.
        self.num_rows = len(path) * memory.block_tokens
        #: Positions up to which the tree had blocks of this sequence.
        self.num_found = found.num_found
        #: Positions among them that were computed all the same, because no snapshot stood where they end.
        self.num_recomputed = 0

    @property
    def num_reserved(self) -> int:
        return len(self._ids) - self.num_blocks

    @property
    def is_torn(self) -> bool:
        """A step of this table was begun and never committed, so its frontier is lost. Such a table can only end."""
        return self.frontier.is_torn

    def held(self) -> Iterator[int]:
        """Yield the id of every block that this table references."""
        return iter(self.blocks.tolist())

    def path(self) -> list[Node]:
        """The full blocks of this table in the tree, from the beginning on."""
        path = []
        node = self._node
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def resume(self, found: Found) -> None:
        """Take over the state at the place that was found. To be called once, before the first step."""
        tail = found.tail
        self.frontier.resume(self._node if tail is None else tail, found.num_rows, found.num_found)
        if tail is not None:
            self._take_tail(tail.block_id)
            self.num_rows = found.num_rows

    def _take_tail(self, block_id: int) -> None:
        """Copy a block that is not full to the end of this table; where there is no room for two, take it over."""
        pool = self._memory.pool
        if not pool.num_available:
            pool.claim(block_id)
            self._append(block_id)
            return
        pool.retain(block_id)
        try:
            self._memory.copy_block(block_id, int(self._grow(self.num_blocks + 1)[-1]))
        finally:
            pool.release(block_id)

    def _append(self, block_id: int) -> None:
        self._ids[self.num_blocks] = block_id
        self.num_blocks += 1
        self.blocks = self._ids[: self.num_blocks]

    def limit(self, count: int) -> int:
        """Return how many of the next ``count`` positions one step may compute: it may have to end at a snapshot."""
        return self.frontier.limit(self.num_rows, count)

    def cover(self, num_rows: int) -> NDArray[np.int32]:
        """Take blocks until positions ``0..num_rows-1`` have one, and return their ids, int32. A step begins."""
        self.frontier.begin()
        needed = self._memory.num_blocks(num_rows)
        return self._grow(needed) if needed > self.num_blocks else self.blocks

    def _grow(self, num_blocks: int) -> NDArray[np.int32]:
        if num_blocks > len(self._ids):
            raise InternalError(f"{num_blocks} blocks asked of a table of {len(self._ids)}")
        for index in range(self.num_blocks, num_blocks):
            self._ids[index] = self._memory.pool.take()
        self.num_blocks = num_blocks
        self.blocks = self._ids[:num_blocks]
        return self.blocks

    def commit(self, num_rows: int) -> None:
        """Say that the rows of positions ``0..num_rows-1`` are written; blocks that became full are made findable."""
        if self.num_rows < self.num_found:
            self.num_recomputed += min(num_rows, self.num_found) - self.num_rows
        self.num_rows = num_rows
        while num_rows >= self._next_full and self._is_shared:
            self._commit_block(self._next_full)
            self._next_full += self._memory.block_tokens
        self.frontier.commit(self._node, num_rows)

    def _commit_block(self, end: int) -> None:
        memory = self._memory
        index = end // memory.block_tokens - 1
        own = int(self._ids[index])
        self._node = memory.tree.insert(self._node, self._tokens[end - memory.block_tokens : end].tobytes(), own)
        if self._node.block_id != own:
            # Another sequence computed the same tokens first. Sharing its block frees ours, and keeps the rule that
            # whoever uses a block uses the whole prefix of that block in the tree.
            self._swap(index, self._node.block_id)

    def adopt(self, num_known: int) -> int:
        """Skip to where another sequence has got to with the same prompt, and return the number of rows skipped.

        Looks for the full block that this table would fill next and for those after it, up to the last known token, and
        skips to the last one after which a sequence can go on.
        """
        memory = self._memory
        if not self._is_shared or self._next_full >= num_known:
            return 0
        before = self.num_rows
        index = self._next_full // memory.block_tokens - 1
        path = memory.walk(self._node, self._tokens, index * memory.block_tokens, num_known - 1)
        self.num_found = max(self.num_found, (index + len(path)) * memory.block_tokens)
        while path and not memory.frontiers.can_resume(path[-1]):
            path.pop()
        for node in path:
            if index < self.num_blocks:
                self._swap(index, node.block_id)
            else:
                memory.pool.retain(node.block_id)
                memory.pool.unreserve(1)
                self._append(node.block_id)
            index += 1
            self._node = node
            self.num_rows = index * memory.block_tokens
            self._next_full = self.num_rows + memory.block_tokens
        if path:
            self.frontier.adopt(self._node, self.num_rows)
        return self.num_rows - before

    def _swap(self, index: int, block_id: int) -> None:
        pool = self._memory.pool
        pool.retain(block_id)
        pool.release(int(self._ids[index]))
        self._ids[index] = block_id

    def release(self) -> None:
        """Give everything back. The table is empty afterwards; a second call does nothing."""
        pool = self._memory.pool
        pool.unreserve(self.num_reserved)
        # Deepest first, so that the pool gives up the end of a prefix before its beginning.
        for block_id in reversed(self.blocks.tolist()):
            pool.release(block_id)
        self._ids = self._ids[:0]
        self.num_blocks = self.num_rows = 0
        self.blocks = self._ids
        self.frontier.close()
        self.frontier = NoFrontier()
