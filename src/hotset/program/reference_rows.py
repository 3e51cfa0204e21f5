"""Rows that outlive a step, for the reference executor: rows in blocks, rings in frontiers.

Everything is addressed as the native executor does it: a row of a block by block id, a ring row by frontier index and
position modulo the ring's length. Rows never written are NaN, and every ring row knows the position that it holds, so
that a wrong address shows. Rows are float32 whatever their format: rounding happened before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.engine.batch import Segment, StepBatch
from hotset.errors import InternalError
from hotset.program import program as p
from hotset.program.cache import BLOCK_TOKENS
from hotset.program.rounding import Floats

Indices = NDArray[np.int64]
Bytes = NDArray[np.uint8]


def _widths(program: p.Program) -> dict[tuple[str, int], int]:
    """Floats of one row by group and layer, as the ops that write them say."""
    out = {}
    for op in program.ops:
        match op:
            case p.StoreKV():
                out[op.group, op.layer] = 2 * op.k.width
            case p.WindowRows():
                out[op.group, op.layer] = op.x.width
            case p.Compress():
                out[op.group, op.layer] = op.width
                out[op.state, op.layer] = 2 * op.k.width
    return out


class RowStore:
    """Rows of all groups and layers; implements :class:`hotset.kv.store.CacheStore` over its float32 arrays.

    Rows that a step brings to a ring are kept aside until :meth:`commit`: a long step would overwrite what its own
    first tokens still read.
    """

    def __init__(self, program: p.Program, num_blocks: int, num_frontiers: int) -> None:
        self._format = {g.name: g.format for g in program.groups} | {g.name: g.format for g in program.frontier}
        self._per_block = {g.name: BLOCK_TOKENS // g.tokens_per_row for g in program.groups}
        num_rows = {g.name: g.num_rows for g in program.frontier}
        self._blocks: dict[tuple[str, int], Floats] = {}
        self._rings: dict[tuple[str, int], tuple[Floats, Indices]] = {}
        self._pending: dict[tuple[str, int], Floats] = {}
        for (group, layer), width in _widths(program).items():
            if group in num_rows:
                shape = num_frontiers, num_rows[group]
                self._rings[group, layer] = np.full((*shape, width), np.nan, np.float32), np.full(shape, -1, np.int64)
            else:
                self._blocks[group, layer] = np.full((num_blocks * self._per_block[group], width), np.nan, np.float32)
        self.num_frontiers = num_frontiers if program.frontier else 0
        self.block_bytes = sum(part.nbytes for part in self._block_parts(0))
        self.frontier_bytes = sum(part.nbytes for part in self._frontier_parts(0)) if self.num_frontiers else 0

    def format_of(self, group: str) -> str:
        """Format of the rows of a cache or frontier group."""
        return self._format[group]

    # ---- a step ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget what a step that failed had brought."""
        self._pending = {}

    def commit(self, batch: StepBatch) -> None:
        """Move the step's rows into the rings: of every segment the last that fit."""
        for key, rows in self._pending.items():
            ring, held = self._rings[key]
            num_rows = ring.shape[1]
            for s in batch.segments:
                positions = np.arange(s.position, s.position + s.count)[-num_rows:]
                ring[s.frontier, positions % num_rows] = rows[s.first + positions - s.position]
                held[s.frontier, positions % num_rows] = positions
        self._pending = {}

    def put(self, group: str, layer: int, rows: Floats) -> None:
        """The step's rows [n, width], one per token, for the ring of that group and layer."""
        self._pending[group, layer] = rows

    def ring_rows(self, group: str, layer: int, s: Segment, start: int, stop: int) -> Floats:
        """Rows of positions start .. stop - 1 of a sequence: from the ring before the segment, then the step's own."""
        new = self._pending[group, layer]
        ring, held = self._rings[group, layer]
        old = np.arange(start, min(stop, s.position))
        if (held[s.frontier, old % ring.shape[1]] != old).any():
            raise InternalError(f"ring {group} of layer {layer} no longer holds positions {start} to {s.position - 1}")
        own = np.arange(max(start, s.position), stop)
        return np.concatenate([ring[s.frontier, old % ring.shape[1]], new[s.first + own - s.position]])

    def write(self, group: str, layer: int, s: Segment, indices: Indices, rows: Floats) -> None:
        """Write rows of a sequence's blocks by index (of the token, or of the compressed row)."""
        self._blocks[group, layer][self._slots(group, s, indices)] = rows

    def rows(self, group: str, layer: int, s: Segment, indices: Indices) -> Floats:
        """Rows of a sequence's blocks by index."""
        return self._blocks[group, layer][self._slots(group, s, indices)]

    def _slots(self, group: str, s: Segment, indices: Indices) -> Indices:
        per_block = self._per_block[group]
        return s.blocks[indices // per_block].astype(np.int64) * per_block + indices % per_block

    # ---- copies ----------------------------------------------------------------------------------------------

    def copy_block(self, block_id: int, out: Bytes) -> None:
        """Copy a block into ``out``."""
        _pack(self._block_parts(block_id), out)

    def restore_block(self, block_id: int, data: Bytes) -> None:
        """Overwrite a block with ``data``."""
        _unpack(self._block_parts(block_id), data)

    def copy_frontier(self, slot: int, out: Bytes) -> None:
        """Copy the frontier in ``slot`` into ``out``."""
        _pack(self._frontier_parts(slot), out)

    def restore_frontier(self, slot: int, data: Bytes) -> None:
        """Overwrite the frontier in ``slot`` with ``data``."""
        _unpack(self._frontier_parts(slot), data)

    def _block_parts(self, block_id: int) -> Iterator[NDArray[Any]]:
        for (group, _), rows in self._blocks.items():
            per_block = self._per_block[group]
            yield rows[block_id * per_block : (block_id + 1) * per_block]

    def _frontier_parts(self, slot: int) -> Iterator[NDArray[Any]]:
        for arrays in self._rings.values():
            yield from (array[slot] for array in arrays)


def _pack(parts: Iterator[NDArray[Any]], out: Bytes) -> None:
    at = 0
    for part in parts:
        out[at : at + part.nbytes] = part.reshape(-1).view(np.uint8)
        at += part.nbytes


def _unpack(parts: Iterator[NDArray[Any]], data: Bytes) -> None:
    at = 0
    for part in parts:
        part[...] = data[at : at + part.nbytes].view(part.dtype).reshape(part.shape)
        at += part.nbytes
