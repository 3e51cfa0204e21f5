"""The reference executor: the program in NumPy float32. Slow, obvious, the judge of all others.

It runs the same op list over the same block tables as the native executor. With ``rounding=True`` it also applies the
input rounding that products with quantised weights use (int8 per 32 inputs) or FP8 and BF16 weights use (BF16 inputs),
and the rounding of cache rows, so that a native result can be held against it closely; with ``rounding=False`` it says
what exact arithmetic on the stored weights gives, which is how that rounding's cost is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.manifest import Account
from hotset.checkpoint.scaled import check_ids, weight_array
from hotset.engine.batch import StepBatch
from hotset.errors import InternalError
from hotset.machine.verify import RegionPages
from hotset.models.spec import ModelSpec
from hotset.program import program as p
from hotset.program import reference_ops as ops
from hotset.program.lower import ACT_BF16, ACT_F32, ACT_KIND, TILE_KEYS
from hotset.program.pending import require_runnable
from hotset.program.reference_rows import Bytes, RowStore
from hotset.program.rounding import Floats, round_bf16, round_index_row, round_kv_row, round_q8

HALF_MAX = np.float32(65504)


def reference_weights(checkpoint: Checkpoint, account: Account) -> dict[str, NDArray[Any]]:
    """Every loaded weight by key, expanded to float32 (tables to int32); scales are multiplied in."""
    return {key: weight_array(checkpoint, account, key) for key in account.weights()}


class ReferenceExecutor:
    """Implements :class:`hotset.engine.batch.Executor` in NumPy.

    Args:
        weights: float32 arrays by key, ``[out, in]`` matrices and ``[n]`` vectors (see :func:`reference_weights`).
        formats: the stored format of every matrix by key; decides the input rounding.
        num_frontiers: sequences that may live at once, where the model keeps frontiers.

    Attributes:
        rows: what outlives a step: compressed rows and rings.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, NDArray[Any]], formats: Mapping[str, str], *, num_blocks: int = 16,
        num_frontiers: int = 1, max_tokens: int = 512, max_outputs: int = 512, rounding: bool = True,
    ) -> None:  # fmt: skip
        require_runnable(spec.program, formats, spec.name)
        self.num_blocks, self.max_tokens, self.max_outputs = num_blocks, max_tokens, max_outputs
        self._program = spec.program
        self._weights = weights
        self._formats = formats
        self._rounding = rounding
        self._buffers: dict[p.Buffer, Floats] = {}
        self.rows = RowStore(spec.program, num_blocks, num_frontiers)
        for op in spec.program.ops:
            if isinstance(op, p.Route) and op.table is not None:
                check_ids(weights[op.table.key], op.num_experts, op.table.key)

    def step(self, batch: StepBatch) -> Floats:
        """Run one step; float32 [m, vocab]."""
        self._buffers = {}
        self.rows.begin()
        self._positions = np.concatenate([s.position + np.arange(s.count) for s in batch.segments])
        for op in self._program.ops:
            self._run(op, batch)
        self.rows.commit(batch)
        return self._buffers[self._program.logits]

    def regions(self) -> tuple[RegionPages, ...]:
        """None: its arrays are NumPy's."""
        return ()

    def close(self) -> None:
        """Nothing to free."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block here, where every row is float32."""
        return self.rows.block_bytes

    @property
    def num_frontiers(self) -> int:
        return self.rows.num_frontiers

    @property
    def frontier_bytes(self) -> int:
        return self.rows.frontier_bytes

    def copy_block(self, block_id: int, out: Bytes) -> None:
        self.rows.copy_block(block_id, out)

    def restore_block(self, block_id: int, data: Bytes) -> None:
        self.rows.restore_block(block_id, data)

    def copy_frontier(self, slot: int, out: Bytes) -> None:
        self.rows.copy_frontier(slot, out)

    def restore_frontier(self, slot: int, data: Bytes) -> None:
        self.rows.restore_frontier(slot, data)

    def _vector(self, weight: p.Weight) -> Floats:
        return self._weights[weight.key].reshape(-1)

    def _product(self, x: Floats, weight: p.Weight, part: int = 0, groups: int = 1) -> Floats:
        kind = ACT_KIND[self._formats[weight.key]]
        if self._rounding and kind != ACT_F32:
            x = round_bf16(x) if kind == ACT_BF16 else round_q8(x)
        matrix = self._weights[weight.part(part)]
        if groups == 1:
            return x @ matrix.T
        blocks = matrix.reshape(groups, -1, weight.in_width)
        return np.einsum("tgi,goi->tgo", x.reshape(len(x), groups, -1), blocks).reshape(len(x), -1)

    def _run(self, op: p.Op, batch: StepBatch) -> None:
        b = self._buffers
        match op:
            case p.Embed():
                row = self._weights[op.table.key][batch.tokens].astype(np.float32)
                b[op.out] = np.tile(row, (1, op.copies))
            case p.RopeAngles():
                b[op.out] = ops.angles_of(self._positions, op.frequencies)
            case p.RmsNorm():
                b[op.out] = ops.rms_norm(b[op.x], self._vector(op.weight), op.eps)
            case p.Linear():
                y = self._product(b[op.x], op.weight, groups=op.groups)
                b[op.out] = b[op.out] + y if op.add else y
            case p.GatedLinear():
                b[op.out] = ops.gated(self._product(b[op.x], op.gate), self._product(b[op.x], op.up), op.limit)
            case p.Rope():
                x = b[op.x].reshape(len(batch.tokens), op.num_heads, op.head_dim)
                turned = ops.rotate(x, b[op.angles], op.rotary_dim, op.pairs, op.first, op.is_inverse)
                b[op.x] = turned.reshape(b[op.x].shape)
            case p.StoreKV():
                self._store(op, batch)
            case p.Attend():
                b[op.out] = self._attend(op, batch)
            case p.SelectOutputs():
                b[op.out] = b[op.x][batch.outputs]
            case p.HeadNorm():
                heads = b[op.x].reshape(-1, op.num_heads, op.head_dim)
                b[op.x] = ops.rms_norm(heads, None, op.eps).reshape(b[op.x].shape)
            case p.HyperMix():
                b[op.out], coefficients = ops.hyper_mix(
                    b[op.x], b[op.mix], self._vector(op.base), self._vector(op.scale), op.num_streams, op.iterations,
                    op.eps, op.norm_eps, op.coefficients is None,
                )  # fmt: skip
                if op.coefficients is not None:
                    b[op.coefficients] = coefficients
            case p.HyperMerge():
                b[op.x] = ops.hyper_merge(b[op.x], b[op.y], b[op.coefficients], op.num_streams)
            case p.WindowRows():
                rows = b[op.x]
                if self._rounding:
                    rows = round_kv_row(self.rows.format_of(op.group), rows, op.plain)
                self.rows.put(op.group, op.layer, rows)
            case p.Compress():
                self._compress(op, batch)
            case p.IndexRows():
                b[op.out] = self._index(op, batch)
            case p.AttendRows():
                b[op.out] = self._attend_rows(op, batch)
            case p.Route():
                bias = None if op.bias is None else self._vector(op.bias)
                chosen = None if op.table is None else self._weights[op.table.key][batch.tokens]
                b[op.out] = ops.route(b[op.scores], bias, chosen, op.top_k, op.scaling)
            case p.ExpertGated():
                b[op.out] = self._expert_gated(op)
            case p.ExpertDown():
                b[op.out] = self._expert_down(op)

    # ---- experts ---------------------------------------------------------------------------------------------

    def _expert_gated(self, op: p.ExpertGated) -> Floats:
        pairs = ops.pairs_of(self._buffers[op.route], op.top_k)
        out = np.empty((len(pairs), op.out.width), np.float32)
        for i, (expert, token, weight) in enumerate(pairs):
            x = self._buffers[op.x][token : token + 1]
            row = ops.gated(self._product(x, op.gate, expert), self._product(x, op.up, expert), op.limit)
            out[i] = weight * row[0]
        return out

    def _expert_down(self, op: p.ExpertDown) -> Floats:
        routed = self._buffers[op.route]
        out = np.zeros((len(routed), op.out.width), np.float32)
        for i, (expert, token, _) in enumerate(ops.pairs_of(routed, op.top_k)):
            out[token] += self._product(self._buffers[op.x][i : i + 1], op.down, expert)[0]
        return out

    # ---- compressed rows and windows ---------------------------------------------------------------------------

    def _compress(self, op: p.Compress, batch: StepBatch) -> None:
        columns = op.k.width
        self.rows.put(op.state, op.layer, np.concatenate([self._buffers[op.k], self._buffers[op.g]], axis=1))
        ape = self._weights[op.ape.key].reshape(op.ratio, columns)
        for s in batch.segments:
            for j in range(s.position // op.ratio, (s.position + s.count) // op.ratio):
                # With overlap the group before counts too, by the first halves; entry 0 has none.
                start = max(op.ratio * (j - 1), 0) if op.overlap else op.ratio * j
                state = self.rows.ring_rows(op.state, op.layer, s, start, op.ratio * (j + 1))
                num_groups = len(state) // op.ratio
                k, g = state[:, :columns], state[:, columns:] + np.tile(ape, (num_groups, 1))
                if op.overlap:
                    k, g = (np.concatenate([x[: -op.ratio, : op.width], x[-op.ratio :, op.width :]]) for x in (k, g))
                row = self._finish_row(op, ops.pool(k, g), j)
                self.rows.write(op.group, op.layer, s, np.array([j]), row)

    def _finish_row(self, op: p.Compress, row: Floats, index: int) -> Floats:
        """BF16, norm, rotation at the group's first token, rounding."""
        rotary = 2 * len(op.frequencies)
        row = ops.rms_norm(round_bf16(row) if self._rounding else row, self._vector(op.norm), op.eps)
        angles = ops.angles_of(np.array([op.ratio * index]), op.frequencies)
        row = ops.rotate(row[None, None], angles, rotary, "adjacent", first=op.width - rotary)[0, 0]
        if not self._rounding:
            return row
        name = self.rows.format_of(op.group)
        return round_index_row(name, row) if op.hadamard else round_kv_row(name, row, op.width - rotary)

    def _index(self, op: p.IndexRows, batch: StepBatch) -> Floats:
        q = self._buffers[op.q].reshape(-1, op.num_heads, op.head_dim)
        if self._rounding:
            q = round_index_row(self.rows.format_of(op.group), q)
        head_weights = self._buffers[op.weights] * np.float32(op.scale)
        out = np.full((len(batch.tokens), op.top_k), -1, np.float32)
        for s in batch.segments:
            visible = np.arange((s.position + s.count) // op.ratio)
            keys = self.rows.rows(op.group, op.layer, s, visible).astype(np.float64)
            for i in range(s.count):
                t = s.first + i
                seen = keys[: (s.position + i + 1) // op.ratio]
                dots = (q[t].astype(np.float64) @ seen.T).astype(np.float32)
                scores = np.zeros(len(seen), np.float32)
                for h in range(op.num_heads):
                    scores += head_weights[t, h] * np.maximum(dots[h], 0)
                best = np.sort(np.argsort(-scores, kind="stable")[: op.top_k])
                out[t, : len(best)] = best
        return out

    def _attend_rows(self, op: p.AttendRows, batch: StepBatch) -> Floats:
        q = self._buffers[op.q].reshape(-1, op.num_heads, op.head_dim) * np.float32(op.scale)
        if self._rounding:
            q = round_bf16(q)
        sink = self._vector(op.sink)
        out = np.empty_like(q)
        for s in batch.segments:
            for i in range(s.count):
                t, position = s.first + i, s.position + i
                start = max(0, position - op.window_tokens + 1)
                rows = self.rows.ring_rows(op.window, op.layer, s, start, position + 1)
                tiles = -1 - np.arange(start, position + 1) // TILE_KEYS
                if op.group is not None:
                    indices = np.arange((position + 1) // op.ratio)
                    if op.chosen is not None:
                        chosen = self._buffers[op.chosen][t].astype(np.int64)
                        indices = chosen[chosen >= 0]
                    rows = np.concatenate([self.rows.rows(op.group, op.layer, s, indices), rows])
                    tiles = np.concatenate([np.arange(len(indices)) // TILE_KEYS, tiles])
                out[t] = self._softmax_rows(q[t], rows, tiles, sink)
        if not np.isfinite(out).all():
            raise InternalError(f"attention of layer {op.layer} is not finite")
        return out.reshape(len(batch.tokens), -1)

    def _softmax_rows(self, q: Floats, rows: Floats, tiles: NDArray[np.int64], sink: Floats) -> Floats:
        """Heads q [heads, dim], already scaled, over rows that are keys and values; the sink only divides.

        Weights are rounded to BF16 relative to the largest of their tile, as each tile gives a partial result.
        """
        scores = q @ rows.T
        top = np.maximum(scores.max(-1), sink)[:, None]
        total = np.exp(sink[:, None] - top)
        out = np.zeros_like(q)
        for tile in np.unique(tiles):
            part = scores[:, tiles == tile]
            tile_top = part.max(-1, keepdims=True)
            weights = np.exp(part - tile_top)
            factor = np.exp(tile_top - top)
            total = total + weights.sum(-1, keepdims=True) * factor
            out += (round_bf16(weights) if self._rounding else weights) @ rows[tiles == tile] * factor
        return out / total

    # ---- plain cache rows --------------------------------------------------------------------------------------

    def _store(self, op: p.StoreKV, batch: StepBatch) -> None:
        values = np.concatenate([self._buffers[op.k], self._buffers[op.v]], axis=1)
        if self._rounding:
            values = self._round_cache(op.group, values)
        for s in batch.segments:
            positions = np.arange(s.position, s.position + s.count)
            self.rows.write(op.group, op.layer, s, positions, values[s.first : s.first + s.count])

    def _is_bf16(self, group: str) -> bool:
        """BF16 cache rows are multiplied with BF16 queries and weights, F16 rows as floats."""
        return self._rounding and self.rows.format_of(group) == "BF16"

    def _round_cache(self, group: str, values: Floats) -> Floats:
        if self._is_bf16(group):
            return round_bf16(values)
        return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)

    def _attend(self, op: p.Attend, batch: StepBatch) -> Floats:
        group = op.num_heads // op.num_kv_heads
        is_bf16 = self._is_bf16(op.group)
        out = np.empty((len(batch.tokens), op.num_heads, op.head_dim), np.float32)
        for s in batch.segments:
            stop = s.position + s.count
            rows = self.rows.rows(op.group, op.layer, s, np.arange(stop)).reshape(stop, 2, op.num_kv_heads, op.head_dim)
            k, v = (np.repeat(rows[:, i], group, axis=1) for i in range(2))
            q = self._buffers[op.q][s.first : s.first + s.count].reshape(s.count, op.num_heads, op.head_dim)
            q = q * np.float32(op.scale)
            scores = np.einsum("thd,khd->htk", round_bf16(q) if is_bf16 else q, k)
            visible = np.arange(stop)[None, :] <= (s.position + np.arange(s.count))[:, None]
            scores = np.where(visible[None], scores, np.float32(-np.inf))
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = np.einsum("htk,khd->thd", round_bf16(weights) if is_bf16 else weights, v)
            out[s.first : s.first + s.count] = mixed / weights.sum(-1).T[:, :, None]
        if not np.isfinite(out).all():
            raise InternalError(f"attention of layer {op.layer} is not finite")
        return out.reshape(len(batch.tokens), -1)
