"""Ops of attention over a latent cache: one row per token is the key of all heads, and a part of it their value.

Source: specs/glm_5_2.md section 2. Nothing runs these ops yet (:mod:`hotset.program.pending`); plans count them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotset.program.buffers import Buffer, Weight


@dataclass(frozen=True)
class LayerNorm:
    """out = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias, over the whole row, in float32; var is the mean square.

    Source: specs/glm_5_2.md section 2.1 (``indexer.k_norm``).
    """

    x: Buffer
    weight: Weight
    bias: Weight
    eps: float
    out: Buffer


@dataclass(frozen=True)
class LatentNorm:
    """Row of a latent cache before its rotation: the first channels normed, the others passed through.

    ``x`` and ``out`` [latent + rotary]. With L = ``weight.out_width`` channels of the latent c:
    out[:L] = weight * c / sqrt(mean(c^2) + eps), out[L:] = x[L:], in float32. Source: specs/glm_5_2.md section 2.4,
    step 3.
    """

    x: Buffer
    weight: Weight
    eps: float
    out: Buffer


@dataclass(frozen=True)
class StoreRows:
    """The row of every token enters the cache of one layer, one row per token, and is visible from then on.

    ``x`` [width] is rounded as the group's format says: with ``hadamard`` an index row, which gets the normalised
    Walsh-Hadamard matrix where that format has it, as queries do in :class:`IndexRows`; else a row that is key and
    value in one, its first ``plain`` channels apart from the rotary ones. ``group`` names a
    :class:`~hotset.program.cache.CacheGroup` of one token per row.
    """

    x: Buffer
    group: str
    layer: int
    plain: int
    hadamard: bool


@dataclass(frozen=True)
class LatentQuery:
    """Queries moved into the space of the latent cache (absorbed multi-head latent attention, first half).

    ``x`` holds heads of plain + rotary channels, ``out`` heads of latent + rotary. ``weight`` [heads (plain + value),
    latent] has ``plain`` rows W_UK and then ``value_dim`` rows W_UV for every head h in turn:

        out_h = (x_h[:plain] W_UK[h], x_h[plain:])

    Source: specs/glm_5_2.md section 2.4.
    """

    x: Buffer
    weight: Weight
    out: Buffer
    num_heads: int
    plain: int
    value_dim: int


@dataclass(frozen=True)
class AttendLatent:
    """Attention of each token over chosen rows of a latent cache that all heads share.

    ``q`` holds heads of ``key_dim`` = latent + rotary channels, a cache row is one key of that width, and its first
    ``latent`` channels are the value: out_h = sum_s p_s row_s[:latent] with p = softmax over s of q_h . row_s scale.
    The rows are those in ``chosen``, positions in rising order and then -1, made by :class:`IndexRows` for the same
    tokens, in this layer or an earlier one. They are cut at every 64th by rank; the pieces' results are merged in
    order. ``out`` holds heads of ``latent`` channels. Source: specs/glm_5_2.md section 2.4, steps 5 and 6.
    """

    q: Buffer
    chosen: Buffer
    out: Buffer
    group: str
    layer: int
    num_heads: int
    key_dim: int
    latent: int
    scale: float


@dataclass(frozen=True)
class LatentValue:
    """Mixed latents back to heads of values (second half of :class:`LatentQuery`): out_h = W_UV[h] x_h.

    ``x`` holds heads of latent channels, ``out`` heads of ``value_dim``; ``weight`` is that of :class:`LatentQuery`.
    """

    x: Buffer
    weight: Weight
    out: Buffer
    num_heads: int
    plain: int
    value_dim: int
