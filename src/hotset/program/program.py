"""The program: a flat list of ops over named buffers. Every reader of a model reads this list.

A buffer is a float32 matrix with one row per token of the step (or per wanted output); the number of
tokens is a run-time argument and never part of the program. Ops name weights by key; the model's
tensor declarations say which checkpoint tensor a key is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hotset.program.buffers import Buffer as Buffer
from hotset.program.buffers import Rows as Rows
from hotset.program.buffers import Weight as Weight
from hotset.program.cache import CacheGroup, FrontierGroup
from hotset.program.latent import AttendLatent as AttendLatent
from hotset.program.latent import LatentNorm as LatentNorm
from hotset.program.latent import LatentQuery as LatentQuery
from hotset.program.latent import LatentValue as LatentValue
from hotset.program.latent import LayerNorm as LayerNorm
from hotset.program.latent import StoreRows as StoreRows


@dataclass(frozen=True)
class Embed:
    """out[t] = row tokens[t] of ``table``, ``copies`` times one after another."""

    table: Weight
    out: Buffer
    copies: int = 1


@dataclass(frozen=True)
class RopeAngles:
    """out[t] = (cos(p f_i), sin(p f_i)) for the ``width/2`` float32 frequencies f, p = position of token t.

    The product p f is formed in float32, as the reference implementations do.
    """

    frequencies: tuple[float, ...]
    out: Buffer


@dataclass(frozen=True)
class RmsNorm:
    """out = weight * x / sqrt(mean(x^2) + eps), over the whole row, in float32."""

    x: Buffer
    weight: Weight
    eps: float
    out: Buffer


@dataclass(frozen=True)
class Linear:
    """out = W x, or out += W x when ``add``.

    With ``groups`` above 1 the matrix is block-diagonal: its rows, and the columns of ``x``, are cut into that many
    equal runs, and rows of run g see only columns of run g (``weight.in_width`` is the width of one run).
    """

    x: Buffer
    weight: Weight
    out: Buffer
    add: bool = False
    groups: int = 1


@dataclass(frozen=True)
class GatedLinear:
    """out = silu(gate x) * (up x); with ``limit`` L: out = silu(min(gate x, L)) * clamp(up x, -L, L).

    One op, because both products of an output element belong to the same thread and the intermediate
    rows then never leave registers.
    """

    x: Buffer
    gate: Weight
    up: Weight
    out: Buffer
    limit: float | None = None


@dataclass(frozen=True)
class Rope:
    """Rotate every head of ``x`` in place by the angles of its token, or back by them when ``is_inverse``.

    Rotated are the ``rotary_dim`` channels from ``first`` on; the others pass through. ``pairs`` is ``"adjacent"`` for
    pairs (2i, 2i+1) or ``"halves"`` for (i, i + rotary/2), counted from ``first``.
    """

    x: Buffer
    angles: Buffer
    num_heads: int
    head_dim: int
    rotary_dim: int
    pairs: Literal["adjacent", "halves"]
    first: int = 0
    is_inverse: bool = False


@dataclass(frozen=True)
class StoreKV:
    """Write the token's key and value rows of one layer into its cache block."""

    k: Buffer
    v: Buffer
    group: str
    layer: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Attend:
    """Causal attention of each token over the cached rows 0..position of its own sequence.

    out_h = softmax(q_h . k * scale) v over the rows of kv head ``h // (num_heads / num_kv_heads)``. Partial
    results of 256-token blocks are merged in order inside spans of 1024 tokens, and spans in order.
    """

    q: Buffer
    out: Buffer
    group: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class HeadNorm:
    """Divide every head of ``x`` by its root mean square, in place: x_h / sqrt(mean(x_h^2) + eps). No weight."""

    x: Buffer
    num_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class HyperMix:
    """From n residual streams to the input of a sublayer (manifold-constrained hyper-connections).

    ``x`` holds n streams of D channels one after another, ``mix`` = fn vec(x) has n (2 + n) columns, or n in the head.
    With r = 1 / sqrt(mean(vec(x)^2) + norm_eps) and m = mix * r (specs/deepseek_v4.md section 2.3):

        pre_j  = sigmoid(m_j scale_0 + base_j) + eps
        post_j = 2 sigmoid(m_{n+j} scale_1 + base_{n+j})
        C_jk   = m_{2n+nj+k} scale_2 + base_{2n+nj+k}; softmax over k, + eps; columns / (sums + eps);
                 then ``iterations - 1`` times rows / (sums + eps), columns / (sums + eps)
        out    = sum_j pre_j x_j

    ``coefficients`` [n + n n] receives post, then C by rows; it is None in the head, which has ``pre`` only.
    """

    x: Buffer
    mix: Buffer
    base: Weight
    scale: Weight
    num_streams: int
    iterations: int
    eps: float
    norm_eps: float
    out: Buffer
    coefficients: Buffer | None


@dataclass(frozen=True)
class HyperMerge:
    """x_k = post_k y + sum_j C_jk x_j for all streams k, in place. ``coefficients`` come from :class:`HyperMix`."""

    x: Buffer
    y: Buffer
    coefficients: Buffer
    num_streams: int


@dataclass(frozen=True)
class WindowRows:
    """The row of every token (key and value in one) enters the sliding window of one layer.

    The row is rounded as the group's format says: channels before ``plain`` in groups of 64 as e4m3 with power-of-two
    scales, the others as BF16. It is visible to :class:`AttendRows` of the same layer, in this step and later ones.
    ``group`` names a :class:`~hotset.program.cache.FrontierGroup`.
    """

    x: Buffer
    group: str
    layer: int
    plain: int


@dataclass(frozen=True)
class Compress:
    """Pools tokens into one row per ``ratio`` of them, and appends every row that the step completes.

    ``k`` and ``g`` [n, c width] are the token's values and scores, c = 2 when ``overlap`` else 1. Scores get
    ``ape[t mod ratio]`` added. Entry j is a softmax per channel over its tokens' scores times their values: tokens
    ratio j .. ratio j + ratio - 1 (with overlap: second halves of these and first halves of the ratio tokens before
    them; for j = 0 the latter are absent). Then BF16, RMSNorm(norm), rotation of the last 2 len(frequencies) channels
    at position ratio j (adjacent pairs), with ``hadamard`` the normalised Walsh-Hadamard matrix, and the rounding of
    the group's format. Source: specs/deepseek_v4.md sections 2.0, 2.5, 2.6.

    ``state`` names the frontier group that keeps k and g of the tokens that later entries need, by absolute position.
    """

    k: Buffer
    g: Buffer
    ape: Weight
    norm: Weight
    eps: float
    frequencies: tuple[float, ...]
    ratio: int
    overlap: bool
    width: int
    hadamard: bool
    group: str
    state: str
    layer: int


@dataclass(frozen=True)
class IndexRows:
    """For every token, the ``top_k`` visible rows of ``group`` with the best scores (the lightning indexer).

    score_j = sum_h weights_h scale max(0, q_h . key_j), with q Hadamard-transformed and rounded as the group's format
    says. Visible are rows j < (t + 1) // ratio. Ties go to the lower j. ``out`` [top_k] holds the chosen j in rising
    order as floats, then -1.
    """

    q: Buffer
    weights: Buffer
    out: Buffer
    group: str
    layer: int
    num_heads: int
    head_dim: int
    ratio: int
    top_k: int
    scale: float


@dataclass(frozen=True)
class AttendRows:
    """Attention of each token over its window and over compressed rows, keys and values being the same rows.

    Rows: compressed rows of ``group`` (those in ``chosen``, or all visible ones j < (t + 1) // ratio when ``chosen``
    is None, or none when ``group`` is None), then the rows of positions max(0, t - window + 1) .. t. One softmax over
    all of them, with exp(sink_h) added to the denominator. Compressed rows are cut at every 64th (chosen ones by their
    rank), window rows at every 64th position; the pieces' results are merged in order, the window's last.
    """

    q: Buffer
    out: Buffer
    window: str
    window_tokens: int
    group: str | None
    chosen: Buffer | None
    ratio: int
    sink: Weight
    layer: int
    num_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class Route:
    """Choose ``top_k`` of ``num_experts`` experts for every token, and weigh them.

    s = sqrt(softplus(scores)) or sigmoid(scores), by ``gate``. Chosen are the best of s + bias (ties to the lower
    expert), or the ids in row tokens[t] of ``table``. The weight of expert e is scaling s_e / sum of the chosen s.
    ``out`` [2 top_k]: expert ids as floats in rising order, then their weights. Pairs of the step are ordered by
    expert, then by token.

    With ``num_groups`` above 1 the experts are that many equal runs. A run scores the sum of its two best s + bias, and
    experts are chosen from the best ``top_groups`` runs only (ties to the lower run; specs/glm_5_2.md section 2.6).
    """

    scores: Buffer
    bias: Weight | None
    table: Weight | None
    out: Buffer
    num_experts: int
    top_k: int
    scaling: float
    gate: Literal["sqrtsoftplus", "sigmoid"] = "sqrtsoftplus"
    num_groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class ExpertGated:
    """For every pair (t, e) of ``route``, w being its weight: out = w silu(gate_e x) (up_e x).

    With ``limit`` L: out = w silu(min(gate_e x, L)) clamp(up_e x, -L, L).
    """

    x: Buffer
    route: Buffer
    gate: Weight
    up: Weight
    out: Buffer
    top_k: int
    limit: float | None = None


@dataclass(frozen=True)
class ExpertDown:
    """out[t] = sum over its experts, in rising order, of down_e x[pair], or out[t] += that sum when ``add``."""

    x: Buffer
    route: Buffer
    down: Weight
    out: Buffer
    top_k: int
    add: bool = False


@dataclass(frozen=True)
class SelectOutputs:
    """out[i] = x[outputs[i]]: keep only the rows whose logits are wanted."""

    x: Buffer
    out: Buffer


Op = (
    Embed | RopeAngles | RmsNorm | Linear | GatedLinear | Rope | StoreKV | Attend | HeadNorm | HyperMix | HyperMerge
    | WindowRows | Compress | IndexRows | AttendRows | Route | ExpertGated | ExpertDown | SelectOutputs | LayerNorm
    | LatentNorm | StoreRows | LatentQuery | AttendLatent | LatentValue
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """An ordered list of ops, the buffers and weights they name, and the cache and frontier groups they use."""

    ops: tuple[Op, ...]
    logits: Buffer
    groups: tuple[CacheGroup, ...]
    weights: dict[str, Weight] = field(default_factory=dict)
    frontier: tuple[FrontierGroup, ...] = ()


def reads(op: Op) -> tuple[Buffer, ...]:
    """Buffers an op reads, a buffer that it updates in place among them."""
    match op:
        case Embed() | RopeAngles():
            return ()
        case RmsNorm() | GatedLinear() | SelectOutputs() | HeadNorm() | WindowRows():
            return (op.x,)
        case LayerNorm() | LatentNorm() | StoreRows() | LatentQuery() | LatentValue():
            return (op.x,)
        case Linear():
            return (op.x, op.out) if op.add else (op.x,)
        case Rope():
            return (op.x, op.angles)
        case StoreKV():
            return (op.k, op.v)
        case Attend():
            return (op.q,)
        case HyperMix():
            return (op.x, op.mix)
        case HyperMerge():
            return (op.x, op.y, op.coefficients)
        case Compress():
            return (op.k, op.g)
        case IndexRows():
            return (op.q, op.weights)
        case AttendRows():
            return (op.q,) if op.chosen is None else (op.q, op.chosen)
        case Route():
            return (op.scores,)
        case AttendLatent():
            return (op.q, op.chosen)
        case ExpertGated():
            return (op.x, op.route)
        case ExpertDown():
            return (op.x, op.route, op.out) if op.add else (op.x, op.route)


def writes(op: Op) -> tuple[Buffer, ...]:
    """Buffers an op writes."""
    match op:
        case Rope() | HeadNorm() | HyperMerge():
            return (op.x,)
        case StoreKV() | WindowRows() | Compress() | StoreRows():
            return ()
        case HyperMix():
            return (op.out,) if op.coefficients is None else (op.out, op.coefficients)
        case _:
            return (op.out,)


def weights_of(op: Op) -> tuple[Weight, ...]:
    """Weights an op reads."""
    match op:
        case Embed():
            return (op.table,)
        case RmsNorm() | Linear() | LatentNorm() | LatentQuery() | LatentValue():
            return (op.weight,)
        case LayerNorm():
            return (op.weight, op.bias)
        case GatedLinear() | ExpertGated():
            return (op.gate, op.up)
        case ExpertDown():
            return (op.down,)
        case HyperMix():
            return (op.base, op.scale)
        case Compress():
            return (op.ape, op.norm)
        case AttendRows():
            return (op.sink,)
        case Route():
            return tuple(weight for weight in (op.bias, op.table) if weight is not None)
        case _:
            return ()
