"""The byte model of ops over streams, window rows, compressed rows, index rows and experts.

One sequence whose first token of the step stands at ``case.start``, in blocks 0, 1, 2, ... and frontier 0. Experts are
chosen by a fixed rule, some of them by several tokens and some by none.
"""

from __future__ import annotations

import numpy as np
from byte_model import Access, ByteModel, Indices, Touch, Units, share, spread

from hotset.program.cache import BLOCK_TOKENS
from hotset.program.lower import FEW_TOKENS, TILE_ROWS, NativeOp
from hotset.program.lower_types import INDEX_KIND, INDEX_ROWS

NUM_BLOCKS = 3
MXFP4_BLOCK_BYTES = 272  # of sixteen rows and 32 channels

ANY_THREAD = frozenset({"attend_rows", "index_select"})
"""Ops whose tokens are dealt out by cost where there are many; of attention, spans where there are few."""


def index_tile(op: NativeOp) -> tuple[int, Indices]:
    """Bytes of sixteen index rows, and places of the first row's units. Units that rows share are left out: scale bytes
    of MXFP4 rows, numbers of FP8 rows."""
    dim, kind = op.head_dim, op.row_kind - INDEX_ROWS
    if kind == INDEX_KIND["MXFP4"]:
        blocks = MXFP4_BLOCK_BYTES * np.arange(dim // 32)
        return len(blocks) * MXFP4_BLOCK_BYTES, (blocks[:, None] + 16 + 64 * np.arange(4)).reshape(-1)
    if kind == INDEX_KIND["FP8"]:
        return TILE_ROWS * (dim + 4), np.array([TILE_ROWS * dim])
    return TILE_ROWS * 2 * dim, 64 * np.arange(dim // 2)


class RowsModel(ByteModel):
    """Adds the ops of native/src/executor_rows.cpp, executor_index.cpp and executor_experts.cpp."""

    def sizes(self) -> dict[str, int]:
        ops = self.low.ops
        self.block_bytes = max((op.cache_offset + self.group_bytes(op) for op in ops), default=0)
        rings = (op.ring_offset + op.ring_rows * (op.ring_row_bytes + op.ring_scale_bytes) for op in ops)
        return super().sizes() | {
            "cache": NUM_BLOCKS * self.block_bytes, "frontier": max(rings, default=0),
            "candidates": 64 * self.case.threads * FEW_TOKENS, "partials": 8,
        }  # fmt: skip

    def group_bytes(self, op: NativeOp) -> int:
        """Bytes of one layer's rows in a block, 0 for an op that touches none."""
        if op.ratio == 0:
            return 0
        rows = BLOCK_TOKENS // op.ratio
        if op.row_kind >= INDEX_ROWS:
            return rows // TILE_ROWS * index_tile(op)[0]
        return rows * (op.row_bytes + op.scale_bytes)

    # ---- places ----

    def seen(self, op: NativeOp, token: int) -> int:
        return (self.case.start + token + 1) // op.ratio

    def cached_rows(self, op: NativeOp, index: Indices) -> Units:
        """Bytes of compressed rows or index rows."""
        rows = BLOCK_TOKENS // op.ratio
        block, r = np.divmod(np.asarray(index, np.int64), rows)
        base = block * self.block_bytes + op.cache_offset
        if op.row_kind >= INDEX_ROWS:
            num_bytes, places = index_tile(op)
            row = base + r // TILE_ROWS * num_bytes + r % TILE_ROWS * 4
            return spread((row[:, None] + places).reshape(-1), 4)
        data = spread(base + r * op.row_bytes, op.row_bytes)
        return np.concatenate([data, spread(base + rows * op.row_bytes + r * op.scale_bytes, op.scale_bytes)])

    def ring_rows(self, op: NativeOp, positions: Indices) -> Units:
        r = np.asarray(positions, np.int64) % op.ring_rows
        data = spread(op.ring_offset + r * op.ring_row_bytes, op.ring_row_bytes)
        scales = op.ring_offset + op.ring_rows * op.ring_row_bytes + r * op.ring_scale_bytes
        return np.concatenate([data, spread(scales, op.ring_scale_bytes)])

    def header(self, b: int) -> Units:
        return spread(np.array([self.base(b)]), self.low.buffers[b].header_bytes)

    def everything(self, b: int) -> Units:
        """A buffer with its header."""
        return np.concatenate([self.header(b), self.all_rows(b)])

    def pairs(self, op: NativeOp) -> list[tuple[int, int]]:
        """(expert, token) of every pair in order."""
        return sorted(
            ((3 * token + i) % op.num_experts, token) for token in range(self.case.num_tokens) for i in range(op.top_k)
        )

    # ---- touches ----

    def touches(self, op: NativeOp) -> list[Touch]:
        if op.kind == "index_merge" and not self.case.is_few:
            return []
        case, is_attention = self.case, op.kind == "attend_rows"
        if op.kind in ANY_THREAD and (not case.is_few or (is_attention and case.is_merged)):
            self.num_ops += 1
            touches = [touch for t in range(case.threads) for touch in self.inputs(op, t, np.arange(case.num_tokens))]
            if is_attention and case.is_merged:
                touches.append(Touch("partials", self.anyone(), True, np.arange(4)))
            if not case.is_few:
                touches.append(Touch(self.memory(op.out, 0), self.anyone(), True, self.all_rows(op.out), op.out))
            return touches
        return super().touches(op)

    def inputs(self, op: NativeOp, thread: int, tokens: Indices) -> list[Touch]:
        """What index_select and attend_rows read for these tokens, but for heads that a thread of a small step has."""
        out = []
        if op.ratio and len(tokens):
            most = max(self.seen(op, int(t)) for t in tokens)
            out.append(Touch("cache", thread, False, self.cached_rows(op, np.arange(most))))
        if op.kind == "attend_rows" and len(tokens):
            start = self.case.start
            old = np.arange(max(0, start + int(tokens.min()) - op.window + 1), start)
            out.append(Touch("frontier", thread, False, self.ring_rows(op, old)))
            rows = [op.z] if op.y < 0 else [op.z, op.y]
            out += [Touch(self.memory(b, thread), thread, False, self.all_rows(b), b) for b in rows]
        if op.kind == "index_select" or not self.case.is_few or self.case.is_merged:
            out.append(Touch(self.memory(op.x, thread), thread, False, self.all_rows(op.x), op.x))
        return out

    def of_thread(self, op: NativeOp, thread: int) -> list[Touch]:
        def read(b: int, units: Units) -> Touch:
            return Touch(self.memory(b, thread), thread, False, units, b)

        def write(b: int, units: Units) -> Touch:
            return Touch(self.memory(b, thread), thread, True, units, b)

        match op.kind:
            case "head_norm" | "hyper_mix" | "hyper_merge" | "encode_rows" | "route" | "index_pack":
                return self.row_wise(op, thread, read, write)
            case "compress" | "store_state" | "store_window":
                return self.storing(op, thread, read)
            case "index_select" | "index_merge" | "attend_rows" | "attend_rows_merge":
                return self.choosing(op, thread, read, write)
            case "pair_order" | "pack_pairs" | "expert_gated" | "expert_down":
                return self.experts(op, thread, read, write)
        return super().of_thread(op, thread)

    def row_wise(self, op: NativeOp, thread: int, read: Access, write: Access) -> list[Touch]:
        n, threads = self.case.num_tokens, self.case.threads
        if op.kind == "head_norm":
            items = np.arange(n * op.num_heads) if self.is_own(op.x) else share(n * op.num_heads, thread, threads)
            t, h = np.divmod(items, op.num_heads)
            heads = self.heads(op.x, t, h * op.head_dim, op.head_dim)
            return [read(op.x, heads), write(op.x, heads)]
        if op.kind == "hyper_merge":
            width, rows = self.low.buffers[op.y].width, np.arange(self.rows_of(op.x))
            if self.is_own(op.x):
                everything = [read(b, self.all_rows(b)) for b in (op.y, op.z, op.x)]
                return [*everything, write(op.x, self.all_rows(op.x))]
            y = self.columns(op.y, rows, width, thread)
            first = share(width // TILE_ROWS, thread, threads)
            count = len(first) * TILE_ROWS
            if not count or not len(rows):
                return []
            at = [self.heads(op.x, rows, np.full(len(rows), s * width + first[0] * TILE_ROWS), count)
                  for s in range(op.num_heads)]  # fmt: skip
            x = np.concatenate(at)
            touches = (read(op.y, y), read(op.z, self.all_rows(op.z)), read(op.x, x), write(op.x, x))
            return [self.claimed(touch) for touch in touches]
        rows = np.arange(self.rows_of(op.x)) if self.case.is_few else share(self.rows_of(op.x), thread, threads)
        ins = [b for b in (op.x, op.y, op.z) if b >= 0]
        outs = [b for b in (op.out, op.out2) if b >= 0]
        return [*(read(b, self.rows(b, rows)) for b in ins), *(write(b, self.rows(b, rows)) for b in outs)]

    def storing(self, op: NativeOp, thread: int, read: Access) -> list[Touch]:
        case, n, start = self.case, self.case.num_tokens, self.case.start
        if op.kind == "compress":
            first = start // op.ratio
            entries = first + share((start + n) // op.ratio - first, thread, case.threads)
            if not len(entries):
                return []
            oldest = max(0, int(entries[0]) * op.ratio - (op.ratio if op.overlap else 0))
            positions = np.arange(oldest, (int(entries[-1]) + 1) * op.ratio)
            own = positions[positions >= start] - start
            return [
                *(read(b, self.rows(b, own)) for b in (op.x, op.y)),
                Touch("frontier", thread, False, self.ring_rows(op, positions[positions < start])),
                Touch("cache", thread, True, self.cached_rows(op, entries)),
            ]
        tokens = share(n, thread, case.threads)
        tokens = tokens[tokens >= n - op.ring_rows]
        ins = [b for b in (op.x, op.y) if b >= 0]
        ring = Touch("frontier", thread, True, self.ring_rows(op, start + tokens))
        return [*(read(b, self.rows(b, tokens)) for b in ins), ring]

    def choosing(self, op: NativeOp, thread: int, read: Access, write: Access) -> list[Touch]:
        """Choosing in a small step, and the sum over spans."""
        case, tokens = self.case, np.arange(self.case.num_tokens)
        own = np.arange(4) + 4 * thread
        if op.kind == "index_merge":
            found = Touch("candidates", thread, False, np.arange(4 * case.threads))
            return [found, write(op.out, self.rows(op.out, tokens))]
        if op.kind == "index_select":
            return [*self.inputs(op, thread, tokens), Touch("candidates", thread, True, own)]
        items = share(case.num_tokens * op.num_heads, thread, case.threads)
        t, h = np.divmod(items, op.num_heads)
        out = write(op.out, self.heads(op.out, t, h * op.head_dim, op.head_dim))
        if op.kind == "attend_rows_merge":
            return [Touch("partials", thread, False, np.arange(4 if len(items) else 0)), out]
        q = read(op.x, self.heads(op.x, t, h * op.head_dim, op.head_dim))
        return [q, *self.inputs(op, thread, np.unique(t)), out]

    def experts(self, op: NativeOp, thread: int, read: Access, write: Access) -> list[Touch]:
        case, pairs = self.case, self.pairs(op)
        if op.kind == "pair_order":
            if not case.is_few and thread != 0:
                return []
            return [read(op.x, self.all_rows(op.x)), write(op.out, self.everything(op.out))]
        order = read(op.y, self.everything(op.y))
        if op.kind == "pack_pairs":
            mine = np.arange(len(pairs)) if case.is_few else share(len(pairs), thread, case.threads)
            source = mine if op.by_pair else np.array([pairs[i][1] for i in mine], np.int64)
            return [order, read(op.x, self.rows(op.x, source)), write(op.out, self.pair_rows(op, op.out, mine))]
        out = self.columns(op.out, np.arange(self.rows_of(op.out)), self.low.weights[op.weight].out_width, thread)
        if not len(out):
            return []
        rows = read(op.x, self.pair_rows(op, op.x, np.arange(len(pairs))))
        return [order, rows, self.claimed(write(op.out, out), op.is_lent)]

    def pair_rows(self, op: NativeOp, b: int, indices: Indices) -> Units:
        """Packed rows of pairs: groups are counted inside an expert's pairs; a single token's input is packed once."""
        room = FEW_TOKENS if self.is_own(b) else self.low.max_tokens
        if self.case.num_tokens == 1 and not self.is_by_pair(b):
            return self.packed_at(b, self.base(b), np.array([[0, 1]]), np.zeros(1, np.int64), room)
        experts = np.array([expert for expert, _ in self.pairs(op)])
        groups = []
        for i in indices:
            first = int(np.searchsorted(experts, experts[i]))
            count = int(np.count_nonzero(experts == experts[i]))
            at, size = first, 0
            while True:  # find_group, counted from the expert's first pair
                size = next(s for s in (16, 8, 4, 2, 1) if first + count - at >= s)
                if i < at + size:
                    break
                at += size
            groups.append((at, size))
        return self.packed_at(b, self.base(b), np.array(groups, np.int64).reshape(-1, 2), indices, room)

    def is_by_pair(self, b: int) -> bool:
        return any(op.by_pair for op in self.low.ops if op.kind == "pack_pairs" and op.out == b)
