"""What the reference executor computes row by row: functions of arrays, without state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.program.rounding import Floats

Ints = NDArray[Any]


def rms_norm(x: Floats, weight: Floats | None, eps: float) -> Floats:
    """weight * x / sqrt(mean(x^2) + eps) over the last axis; no weight for None."""
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(eps))
    return x * scale if weight is None else x * scale * weight


def silu(x: Floats) -> Floats:
    """x / (1 + exp(-x)), computed so that it neither overflows nor warns."""
    return x / (1 + np.exp(-np.maximum(x, -80.0)))


def sigmoid(x: Floats) -> Floats:
    return np.reciprocal(1 + np.exp(-np.maximum(x, -80.0)))


def gated(gate: Floats, up: Floats, limit: float | None) -> Floats:
    """silu(gate) up; with a limit L: silu(min(gate, L)) clamp(up, -L, L)."""
    if limit is None:
        return silu(gate) * up
    top = np.float32(limit)
    return silu(np.minimum(gate, top)) * np.clip(up, -top, top)


def angles_of(positions: Ints, frequencies: Sequence[float]) -> Floats:
    """[n, 2 len(frequencies)]: cosines, then sines, of position times frequency, a product in float32."""
    product = positions.astype(np.float32)[:, None] * np.array(frequencies, dtype=np.float32)
    angle = product.astype(np.float64)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def rotate(x: Floats, angles: Floats, rotary_dim: int, pairs: str, first: int = 0, is_inverse: bool = False) -> Floats:
    """Rotate heads: x [n, heads, head_dim] from channel ``first`` on, angles [n, rotary_dim] = cosines, sines."""
    half = rotary_dim // 2
    cos, sin = angles[:, None, :half], angles[:, None, half:]
    if is_inverse:
        sin = -sin
    a = first + (np.arange(half) * 2 if pairs == "adjacent" else np.arange(half))
    b = a + (1 if pairs == "adjacent" else half)
    out = x.copy()
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def sinkhorn(logits: Floats, iterations: int, eps: float) -> Floats:
    """[n, streams, streams] made nearly doubly stochastic: softmax over rows, then columns, rows, columns, ..."""
    e = np.float32(eps)
    c = np.exp(logits - logits.max(-1, keepdims=True))
    c = c / c.sum(-1, keepdims=True) + e
    c = c / (c.sum(-2, keepdims=True) + e)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdims=True) + e)
        c = c / (c.sum(-2, keepdims=True) + e)
    return c


def hyper_mix(
    x: Floats, mix: Floats, base: Floats, scale: Floats, num_streams: int, iterations: int, eps: float,
    norm_eps: float, is_head: bool,
) -> tuple[Floats, Floats]:  # fmt: skip
    """See :class:`hotset.program.program.HyperMix`: the mixed row [n, D], and post, C as [n, streams (1 + streams)]."""
    n = num_streams
    m = mix / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(norm_eps))
    pre = sigmoid(m[:, :n] * scale[0] + base[:n]) + np.float32(eps)
    out = (pre[:, :, None] * x.reshape(len(x), n, -1)).sum(1)
    if is_head:
        return out, np.zeros((len(x), 0), np.float32)
    post = 2 * sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    c = sinkhorn((m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n), iterations, eps)
    return out, np.concatenate([post, c.reshape(-1, n * n)], axis=1)


def hyper_merge(x: Floats, y: Floats, coefficients: Floats, num_streams: int) -> Floats:
    """x_k = post_k y + sum over j of C_jk x_j: the sum runs over the first index of C."""
    n = num_streams
    streams = x.reshape(len(x), n, -1)
    post, c = coefficients[:, :n], coefficients[:, n:].reshape(-1, n, n)
    mixed = np.einsum("tjk,tjd->tkd", c, streams)
    return (post[:, :, None] * y[:, None] + mixed).reshape(x.shape)


def route(scores: Floats, bias: Floats | None, chosen: Ints | None, top_k: int, scaling: float) -> Floats:
    """See :class:`hotset.program.program.Route`: [n, 2 top_k], expert ids in rising order, then their weights.

    ``chosen`` [n, top_k] are the ids of the tokens' table rows; without them the best of score + ``bias`` are chosen.
    """
    s = np.sqrt(np.maximum(scores, 0) + np.log1p(np.exp(-np.abs(scores))))
    if chosen is None:
        ranked = s if bias is None else s + bias
        chosen = np.argsort(-ranked, axis=1, kind="stable")[:, :top_k]
    ids = np.sort(chosen, axis=1)
    picked = np.take_along_axis(s, ids, axis=1)
    weights = picked / picked.sum(-1, keepdims=True) * np.float32(scaling)
    return np.concatenate([ids, weights], axis=1).astype(np.float32)


def pairs_of(routed: Floats, top_k: int) -> list[tuple[int, int, np.float32]]:
    """(expert, token, weight) of every pair, by expert, then by token."""
    return sorted(
        (int(routed[token, i]), token, routed[token, top_k + i]) for token in range(len(routed)) for i in range(top_k)
    )


def pool(k: Floats, g: Floats) -> Floats:
    """Softmax per channel over the tokens' scores g [tokens, width], times their values k."""
    weights = np.exp(g - g.max(0))
    return (weights * k).sum(0) / weights.sum(0)
