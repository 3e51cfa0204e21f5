"""Cache groups: which rows a layer keeps per token. The only place where a cache byte is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hotset.errors import RequestError

BLOCK_TOKENS = 256
"""Tokens per cache block: the unit of sharing, of placement and of the merge of attention partials."""


@dataclass(frozen=True)
class CacheGroup:
    """Rows of one kind, kept by a set of layers.

    Attributes:
        name: e.g. ``"kv"``.
        layers: layer indices that own such rows, in the order in which they lie in a block.
        row_bytes: bytes of one row in one layer.
        tokens_per_row: 1 for a plain cache, the compression ratio otherwise; divides :data:`BLOCK_TOKENS`.
        format: storage format of the row, e.g. ``"F16"``.
    """

    name: str
    layers: tuple[int, ...]
    row_bytes: int
    tokens_per_row: int = 1
    format: str = "F16"

    def __post_init__(self) -> None:
        if self.tokens_per_row < 1 or BLOCK_TOKENS % self.tokens_per_row:
            raise RequestError(
                f"cache group {self.name}: {self.tokens_per_row} tokens per row does not divide {BLOCK_TOKENS}"
            )

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of this group in one block, for one layer."""
        return BLOCK_TOKENS // self.tokens_per_row * self.row_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of this group in one block, all layers."""
        return len(self.layers) * self.layer_block_bytes


@dataclass(frozen=True)
class FrontierGroup:
    """Rows that a live sequence keeps beside its blocks: a ring of ``num_rows`` rows per layer, by absolute position.

    Position p lies in ring row ``p % num_rows``. ``format`` is that of the row, "F32" for compressor state.
    """

    name: str
    layers: tuple[int, ...]
    num_rows: int
    row_bytes: int
    format: str

    @property
    def num_bytes(self) -> int:
        """Bytes of this group in one sequence's frontier, all layers."""
        return len(self.layers) * self.num_rows * self.row_bytes


def frontier_bytes(groups: Iterable[FrontierGroup]) -> int:
    """Bytes of one sequence's frontier."""
    return sum(group.num_bytes for group in groups)


def frontier_offset(groups: tuple[FrontierGroup, ...], name: str, layer: int) -> int:
    """Byte offset inside a frontier of the ring of one group and layer."""
    offset = 0
    for group in groups:
        if group.name == name:
            return offset + group.layers.index(layer) * group.num_rows * group.row_bytes
        offset += group.num_bytes
    raise RequestError(f"no frontier group {name!r}; this model has {', '.join(g.name for g in groups)}")


def block_bytes(groups: Iterable[CacheGroup]) -> int:
    """Bytes of one block of 256 tokens: the rows of all groups and layers, with no padding between them."""
    return sum(group.block_bytes for group in groups)


def group_offset(groups: tuple[CacheGroup, ...], name: str, layer: int) -> int:
    """Byte offset inside a block of the rows of one group and layer."""
    offset = 0
    for group in groups:
        if group.name == name:
            return offset + group.layers.index(layer) * group.layer_block_bytes
        offset += group.block_bytes
    raise RequestError(f"no cache group {name!r}; this model has {', '.join(g.name for g in groups)}")


def num_blocks(num_tokens: int) -> int:
    """Blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // BLOCK_TOKENS)
