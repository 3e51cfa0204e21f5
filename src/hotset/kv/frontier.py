"""What the next token needs besides blocks, and where a sequence can therefore resume.

Blocks hold the rows that are addressed by token. A family with sliding windows or compressor rings also keeps a
fixed-size *frontier* per sequence; a prefix found in the tree is reusable only up to a block border at which a snapshot
of the frontier was kept. The cache memory asks one question, and the answer is all that differs between families.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hotset.kv.prefix import Node


class Frontier(Protocol):
    """The frontier of one model's cache groups."""

    def resumable_blocks(self, path: Sequence[Node]) -> int:
        """Return after how many blocks of ``path``, a run of consecutive cached blocks, a sequence can resume.

        0 means after none of them. A family with state of its own looks for the last node that has a snapshot.
        """
        ...


class EmptyFrontier:
    """The frontier of a family whose rows are all addressed by token (Llama): every block border will do."""

    def resumable_blocks(self, path: Sequence[Node]) -> int:
        return len(path)
