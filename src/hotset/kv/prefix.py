"""The prefix tree: full blocks found again by the tokens they hold and the tokens before them.

A node is one full block. Its key under its parent is the block's token ids themselves, as bytes, compared exactly: a
hash collision cannot hand a sequence the rows of other tokens. Whoever references a block references all blocks of its
prefix, so a block that nobody uses has only descendants that nobody uses, and giving up the oldest cached block always
gives up a leaf (see the order in BlockPool).
"""

from __future__ import annotations

from collections.abc import Iterator

from hotset.errors import InternalError
from hotset.kv.blocks import BlockPool

ROOT_BLOCK = -1


class Node:
    """One full block in the tree, or the root (block id -1), which stands for the empty prefix."""

    __slots__ = ("block_id", "children", "key", "parent")

    def __init__(self, parent: Node | None, key: bytes, block_id: int) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id
        self.children: dict[bytes, Node] = {}


class PrefixTree:
    """Full blocks by content. The pool tells the tree when it gives a block up."""

    def __init__(self, pool: BlockPool) -> None:
        self.root = Node(None, b"", ROOT_BLOCK)
        self._pool = pool
        self._nodes: dict[int, Node] = {}
        pool.on_evict(self._forget)

    def __len__(self) -> int:
        return len(self._nodes)

    def insert(self, parent: Node, key: bytes, block_id: int) -> Node:
        """Make a full block findable after ``parent`` and return its node.

        When the same tokens are already there, the node found is returned and ``block_id`` is not kept: the caller
        shares the older block instead, whose rows are the same bit for bit.
        """
        node = parent.children.get(key)
        if node is None:
            self._pool.keep(block_id)
            node = parent.children[key] = self._nodes[block_id] = Node(parent, key, block_id)
        return node

    def _forget(self, block_id: int) -> None:
        node = self._nodes.pop(block_id)
        if node.children or node.parent is None:
            raise InternalError(f"block {block_id} was given up before the blocks that follow it")
        del node.parent.children[node.key]

    def walk(self) -> Iterator[Node]:
        """Yield every node but the root, parents first."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_integrity(self) -> None:
        """Hold the tree against the pool: every kept block has one node, every node a kept block."""
        reached = {}
        for node in self.walk():
            if node.parent is None or node.parent.children.get(node.key) is not node:
                raise InternalError(f"the node of block {node.block_id} is not where its key says")
            reached[node.block_id] = node
        kept = {block_id for block_id in range(self._pool.num_blocks) if self._pool.is_kept(block_id)}
        if reached != self._nodes or set(reached) != kept:
            raise InternalError(f"the prefix tree reaches {len(reached)} blocks, {len(kept)} are kept")
