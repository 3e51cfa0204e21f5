"""Cache memory as a sequence sees it: a block table that grows, shares full blocks and gives everything back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from hotset.errors import InternalError
from hotset.kv.blocks import BlockPool
from hotset.kv.frontier import EmptyFrontier, Frontier
from hotset.kv.prefix import Node, PrefixTree
from hotset.program.cache import BLOCK_TOKENS

Tokens = NDArray[np.int32]


class CacheMemory:
    """The blocks of one executor, the prefix tree over them, and the tables of the live sequences.

    Not thread-safe: the engine's driver is the only caller.
    """

    def __init__(self, num_blocks: int, frontier: Frontier | None = None, block_tokens: int = BLOCK_TOKENS) -> None:
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self.pool)
        self.frontier: Frontier = frontier or EmptyFrontier()
        self.block_tokens = block_tokens

    @property
    def num_rows(self) -> int:
        """Token positions that all blocks together can hold."""
        return self.pool.num_blocks * self.block_tokens

    def num_blocks(self, num_rows: int) -> int:
        """Blocks that hold ``num_rows`` token positions."""
        return -(-num_rows // self.block_tokens)

    def open(self, tokens: Tokens, num_prompt: int, num_rows: int, reuse: bool = True) -> BlockTable | None:
        """Open a table that may grow to ``num_rows`` positions, or ``None`` when the blocks for it are not there.

        ``tokens[:num_prompt]`` is the prompt; with ``reuse`` its longest cached prefix of full blocks is shared,
        but never all of it: the last token is left to compute, because its logits are wanted. The array is read
        again when blocks fill, so later tokens must be written into it.
        """
        # Blocks of the incoming prompt are referenced before the rest is reserved: making room must not evict them.
        path = self.match(self.tree.root, tokens, 0, num_prompt - 1) if reuse else []
        for node in path:
            self.pool.retain(node.block_id)
        if not self.pool.reserve(self.num_blocks(num_rows) - len(path)):
            for node in reversed(path):
                self.pool.release(node.block_id)
            return None
        return BlockTable(self, tokens, path, self.num_blocks(num_rows), is_shared=reuse)

    def match(self, node: Node, tokens: Tokens, start: int, limit: int) -> list[Node]:
        """Return the blocks cached after ``node`` for ``tokens[start:limit]`` from which a sequence can resume.

        ``start`` is the block border at which ``node`` ends.
        """
        path: list[Node] = []
        for begin in range(start, limit - self.block_tokens + 1, self.block_tokens):
            child = node.children.get(tokens[begin : begin + self.block_tokens].tobytes())
            if child is None:
                break
            path.append(child)
            node = child
        return path[: self.frontier.resumable_blocks(path)]

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Hold every account against the live tables; InternalError names what is wrong."""
        tables = list(tables)
        self.pool.check_integrity(block_id for table in tables for block_id in table.held())
        self.tree.check_integrity()
        if self.pool.num_reserved != sum(table.num_reserved for table in tables):
            raise InternalError(f"reservations do not add up to those of the tables, {self.pool.accounts()}")


class BlockTable:
    """The blocks of one sequence, in order of position. Full blocks are immutable and may be shared."""

    __slots__ = ("_ids", "_is_shared", "_memory", "_next_full", "_node", "_tokens", "blocks", "num_blocks", "num_rows")

    def __init__(
        self, memory: CacheMemory, tokens: Tokens, path: list[Node], max_blocks: int, *, is_shared: bool
    ) -> None:
        self._memory = memory
        self._tokens = tokens
        self._is_shared = is_shared
        self._ids: NDArray[np.int32] = np.full(max_blocks, -1, np.int32)
        self._ids[: len(path)] = [node.block_id for node in path]
        self._node = path[-1] if path else memory.tree.root
        self._next_full = (len(path) + 1) * memory.block_tokens
        self.num_blocks = len(path)
        #: int32 [num_blocks], a view: valid until the table grows, shares or is released.
        self.blocks = self._ids[: self.num_blocks]
        #: Positions whose rows are valid.
        self.num_rows = len(path) * memory.block_tokens

    @property
    def num_reserved(self) -> int:
        return len(self._ids) - self.num_blocks

    def held(self) -> Iterator[int]:
        """Yield the id of every block that this table references."""
        return iter(self.blocks.tolist())

    def cover(self, num_rows: int) -> NDArray[np.int32]:
        """Take blocks until positions ``0..num_rows-1`` have one, and return their ids, int32."""
        needed = self._memory.num_blocks(num_rows)
        if needed > self.num_blocks:
            if needed > len(self._ids):
                raise InternalError(f"{num_rows} rows asked of a table of {len(self._ids)} blocks")
            for index in range(self.num_blocks, needed):
                self._ids[index] = self._memory.pool.take()
            self.num_blocks = needed
            self.blocks = self._ids[:needed]
        return self.blocks

    def commit(self, num_rows: int) -> None:
        """Say that the rows of positions ``0..num_rows-1`` are written; blocks that became full are made findable."""
        self.num_rows = num_rows
        while num_rows >= self._next_full and self._is_shared:
            self._commit_block(self._next_full)
            self._next_full += self._memory.block_tokens

    def _commit_block(self, end: int) -> None:
        memory = self._memory
        index = end // memory.block_tokens - 1
        own = int(self._ids[index])
        self._node = memory.tree.insert(self._node, self._tokens[end - memory.block_tokens : end].tobytes(), own)
        if self._node.block_id != own:
            # Another sequence computed the same tokens first. Sharing its block frees ours, and keeps the rule that
            # whoever uses a block uses the whole prefix of that block in the tree.
            self._swap(index, self._node.block_id)

    def adopt(self, num_prompt: int) -> int:
        """Skip to where another sequence has got to with the same prompt, and return the number of rows skipped.

        Looks for the full block that this table would fill next and for those after it, up to the last prompt token.
        """
        memory = self._memory
        if not self._is_shared or self._next_full >= num_prompt:
            return 0
        before = self.num_rows
        index = self._next_full // memory.block_tokens - 1
        for node in memory.match(self._node, self._tokens, index * memory.block_tokens, num_prompt - 1):
            if index < self.num_blocks:
                self._swap(index, node.block_id)
            else:
                memory.pool.retain(node.block_id)
                memory.pool.unreserve(1)
                self._ids[index] = node.block_id
                self.num_blocks += 1
                self.blocks = self._ids[: self.num_blocks]
            index += 1
            self._node = node
            self.num_rows = index * memory.block_tokens
            self._next_full = self.num_rows + memory.block_tokens
        return self.num_rows - before

    def _swap(self, index: int, block_id: int) -> None:
        pool = self._memory.pool
        pool.retain(block_id)
        pool.release(int(self._ids[index]))
        self._ids[index] = block_id

    def release(self) -> None:
        """Give every block and reservation back. The table is empty afterwards; a second call does nothing."""
        pool = self._memory.pool
        pool.unreserve(self.num_reserved)
        # Deepest first, so that the pool gives up the end of a prefix before its beginning.
        for block_id in reversed(self.blocks.tolist()):
            pool.release(block_id)
        self._ids = self._ids[:0]
        self.num_blocks = self.num_rows = 0
        self.blocks = self._ids
