"""The reference executor: the program in NumPy float32. Slow, obvious, the judge of all others.

It runs the same op list over the same block tables as the native executor. With ``rounding=True`` it also applies the
input rounding that products with quantised weights use (int8 per 32 inputs) or BF16 weights use (BF16 inputs), and
half-precision cache rows, so that a native result can be held against it closely; with ``rounding=False`` it says
what exact arithmetic on the stored weights gives, which is how that rounding's cost is measured.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from hotset.engine.batch import StepBatch
from hotset.errors import InternalError
from hotset.models.spec import ModelSpec
from hotset.program import program as p
from hotset.program.cache import BLOCK_TOKENS
from hotset.program.lower import ACT_BF16, ACT_F32, ACT_KIND

Floats = NDArray[np.float32]


def round_bf16(x: Floats) -> Floats:
    """Nearest BF16, ties to even, as float32 (finite inputs)."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


SMALLEST_RUN = np.float32(1e-30)
HALF_MAX = np.float32(65504)


def round_q8(x: Floats) -> Floats:
    """Each run of 32 inputs as int8 times one float scale, max |x| / 127; ties to even; runs below 1e-30 are zero."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(-1, keepdims=True)
    top = np.where(top < SMALLEST_RUN, np.float32(0), top)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    q = np.rint(blocks * inverse)
    return (q * (top / np.float32(127))).reshape(x.shape).astype(np.float32)


def rotate(x: Floats, angles: Floats, rotary_dim: int, pairs: str) -> Floats:
    """Rotate heads: x [n, heads, head_dim], angles [n, rotary_dim] = cosines, sines."""
    half = rotary_dim // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    first = np.arange(half) * 2 if pairs == "adjacent" else np.arange(half)
    second = first + (1 if pairs == "adjacent" else half)
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x)), computed so that it neither overflows nor warns."""
    return x / (1 + np.exp(-np.maximum(x, -80.0)))


class ReferenceExecutor:
    """Implements :class:`hotset.engine.batch.Executor` in NumPy.

    Args:
        weights: float32 arrays by key, ``[out, in]`` matrices and ``[n]`` vectors (see ``Checkpoint.array``).
        formats: the stored format of every matrix by key; decides the input rounding.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Floats], formats: Mapping[str, str], *, num_blocks: int = 16,
        max_tokens: int = 512, max_outputs: int = 512, rounding: bool = True,
    ) -> None:  # fmt: skip
        self.num_blocks, self.max_tokens, self.max_outputs = num_blocks, max_tokens, max_outputs
        self._program = spec.program
        self._weights = weights
        self._formats = formats
        self._rounding = rounding
        self._buffers: dict[p.Buffer, Floats] = {}
        self._cache: dict[tuple[str, int], tuple[Floats, Floats]] = {}

    def step(self, batch: StepBatch) -> Floats:
        """Run one step; float32 [m, vocab]."""
        self._buffers = {}
        self._positions = np.concatenate([s.position + np.arange(s.count) for s in batch.segments])
        for op in self._program.ops:
            self._run(op, batch)
        return self._buffers[self._program.logits]

    def close(self) -> None:
        """Nothing to free."""

    def _product(self, x: Floats, weight: p.Weight) -> Floats:
        kind = ACT_KIND[self._formats[weight.key]]
        if self._rounding and kind != ACT_F32:
            x = round_bf16(x) if kind == ACT_BF16 else round_q8(x)
        return x @ self._weights[weight.key].T

    def _run(self, op: p.Op, batch: StepBatch) -> None:
        b = self._buffers
        match op:
            case p.Embed():
                b[op.out] = self._weights[op.table.key][batch.tokens].astype(np.float32)
            case p.RopeAngles():
                product = self._positions.astype(np.float32)[:, None] * np.array(op.frequencies, dtype=np.float32)
                angle = product.astype(np.float64)
                b[op.out] = np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)
            case p.RmsNorm():
                x = b[op.x]
                scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(op.eps))
                b[op.out] = x * scale * self._weights[op.weight.key]
            case p.Linear():
                y = self._product(b[op.x], op.weight)
                b[op.out] = b[op.out] + y if op.add else y
            case p.GatedLinear():
                b[op.out] = silu(self._product(b[op.x], op.gate)) * self._product(b[op.x], op.up)
            case p.Rope():
                x = b[op.x].reshape(len(batch.tokens), op.num_heads, op.head_dim)
                b[op.x] = rotate(x, b[op.angles], op.rotary_dim, op.pairs).reshape(b[op.x].shape)
            case p.StoreKV():
                self._store(op, batch)
            case p.Attend():
                b[op.out] = self._attend(op, batch)
            case p.SelectOutputs():
                b[op.out] = b[op.x][batch.outputs]

    def _rows(self, group: str, layer: int, heads: int, dim: int) -> tuple[Floats, Floats]:
        shape = (self.num_blocks * BLOCK_TOKENS, heads, dim)
        if (group, layer) not in self._cache:
            self._cache[(group, layer)] = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        return self._cache[(group, layer)]

    def _slots(self, blocks: NDArray[np.int32], start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop)
        return blocks[positions // BLOCK_TOKENS].astype(np.int64) * BLOCK_TOKENS + positions % BLOCK_TOKENS

    def _store(self, op: p.StoreKV, batch: StepBatch) -> None:
        for rows, source in zip(
            self._rows(op.group, op.layer, op.num_kv_heads, op.head_dim), (op.k, op.v), strict=True
        ):
            values = self._buffers[source]
            if self._rounding:
                values = self._round_cache(op.group, values)
            for s in batch.segments:
                slots = self._slots(s.blocks, s.position, s.position + s.count)
                rows[slots] = values[s.first : s.first + s.count].reshape(s.count, op.num_kv_heads, op.head_dim)

    def _is_bf16(self, group: str) -> bool:
        """BF16 cache rows are multiplied with BF16 queries and weights, F16 rows as floats."""
        return self._rounding and next(g.format for g in self._program.groups if g.name == group) == "BF16"

    def _round_cache(self, group: str, values: Floats) -> Floats:
        if self._is_bf16(group):
            return round_bf16(values)
        return np.clip(values, -HALF_MAX, HALF_MAX).astype(np.float16).astype(np.float32)

    def _attend(self, op: p.Attend, batch: StepBatch) -> Floats:
        keys, values = self._rows(op.group, op.layer, op.num_kv_heads, op.head_dim)
        group = op.num_heads // op.num_kv_heads
        is_bf16 = self._is_bf16(op.group)
        out = np.empty((len(batch.tokens), op.num_heads, op.head_dim), np.float32)
        for s in batch.segments:
            stop = s.position + s.count
            slots = self._slots(s.blocks, 0, stop)
            k = np.repeat(keys[slots], group, axis=1)
            v = np.repeat(values[slots], group, axis=1)
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
