"""The prefix tree: full blocks found again by the tokens they hold and the tokens before them.

A node is one full block. Its key under its parent is the block's token ids themselves, as bytes, compared exactly: a
hash collision cannot hand a sequence the rows of other tokens. Whoever references a block references all blocks of its
prefix, so a block that nobody uses has only descendants that nobody uses, and giving up the oldest cached block always
gives up a leaf (see the order in BlockPool).

A restored session may also leave a *tail*: a block that is not full, findable by the tokens it holds. Nothing follows a
tail, and nobody shares its block: whoever resumes there copies it, because the copy is going to grow, or takes it over
when there is no room for two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hotset.errors import InternalError
from hotset.kv.blocks import BlockPool

ROOT_BLOCK = -1
TOKEN_BYTES = 4


class Snapshot:
    """The frontier of a sequence at the end of a node, in place ``index`` of the pool of snapshots.

    ``is_rolling``: the live sequence that took it may give it up when it takes the next one.
    """

    __slots__ = ("index", "is_rolling", "node")

    def __init__(self, index: int, node: Node) -> None:
        self.index = index
        self.node = node
        self.is_rolling = False


class Node:
    """One block in the tree, or the root (block id -1), which stands for the empty prefix."""

    __slots__ = ("block_id", "children", "key", "parent", "snapshot", "tails")

    def __init__(self, parent: Node | None, key: bytes, block_id: int) -> None:
        self.parent = parent
        self.key = key
        self.block_id = block_id
        self.children: dict[bytes, Node] = {}
        self.tails: dict[bytes, Node] = {}
        self.snapshot: Snapshot | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of this block alone; fewer than a block holds in a tail."""
        return len(self.key) // TOKEN_BYTES


class PrefixTree:
    """Blocks by content. The pool tells the tree when it gives a block up, and the tree tells ``forget``."""

    def __init__(self, pool: BlockPool, forget: Callable[[Node], None]) -> None:
        self.root = Node(None, b"", ROOT_BLOCK)
        self._pool = pool
        self._forget_state = forget
        self._nodes: dict[int, Node] = {}
        pool.on_evict(self._forget)

    def __len__(self) -> int:
        return len(self._nodes)

    def insert(self, parent: Node, key: bytes, block_id: int) -> Node:
        """Make a full block findable after ``parent`` and return its node.

        When the same tokens are already there, the node found is returned and ``block_id`` is not kept: the caller
        shares the older block instead, whose rows are the same bit for bit.
        """
        return self._insert(parent, parent.children, key, block_id)

    def insert_tail(self, parent: Node, key: bytes, block_id: int) -> Node:
        """Make a block that is not full findable after ``parent``; otherwise as :meth:`insert`."""
        return self._insert(parent, parent.tails, key, block_id)

    def _insert(self, parent: Node, siblings: dict[bytes, Node], key: bytes, block_id: int) -> Node:
        node = siblings.get(key)
        if node is None:
            self._pool.keep(block_id)
            node = siblings[key] = self._nodes[block_id] = Node(parent, key, block_id)
        return node

    def _forget(self, block_id: int) -> None:
        node = self._nodes.pop(block_id)
        if node.children or node.tails or node.parent is None:
            raise InternalError(f"block {block_id} was given up before the blocks that follow it")
        self._forget_state(node)
        siblings = node.parent.tails if node.parent.tails.get(node.key) is node else node.parent.children
        del siblings[node.key]

    def walk(self) -> Iterator[Node]:
        """Yield every node but the root, parents first."""
        stack = [*self.root.children.values(), *self.root.tails.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
            stack.extend(node.tails.values())

    def check_integrity(self) -> None:
        """Hold the tree against the pool: every kept block has one node, every node a kept block."""
        reached = {}
        for node in self.walk():
            if node.parent is None or node not in (
                node.parent.children.get(node.key), node.parent.tails.get(node.key)
            ):  # fmt: skip
                raise InternalError(f"the node of block {node.block_id} is not where its key says")
            reached[node.block_id] = node
        kept = {block_id for block_id in range(self._pool.num_blocks) if self._pool.is_kept(block_id)}
        if reached != self._nodes or set(reached) != kept:
            raise InternalError(f"the prefix tree reaches {len(reached)} blocks, {len(kept)} are kept")
