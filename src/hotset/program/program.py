"""The program: a flat list of ops over named buffers. Every reader of a model reads this list.

A buffer is a float32 matrix with one row per token of the step (or per wanted output); the number of
tokens is a run-time argument and never part of the program. Ops name weights by key; the model's
tensor declarations say which checkpoint tensor a key is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hotset.program.cache import CacheGroup


@dataclass(frozen=True)
class Buffer:
    """Float32 matrix ``[rows, width]``; ``rows`` is the step's tokens, or the step's wanted outputs."""

    name: str
    width: int
    rows: Literal["tokens", "outputs"] = "tokens"


@dataclass(frozen=True)
class Weight:
    """A matrix ``[out_width, in_width]`` (linear) or a vector (``in_width`` 1) named by key."""

    key: str
    out_width: int
    in_width: int


@dataclass(frozen=True)
class Embed:
    """out[t] = row tokens[t] of ``table``."""

    table: Weight
    out: Buffer


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
    """out = W x, or out += W x when ``add``."""

    x: Buffer
    weight: Weight
    out: Buffer
    add: bool = False


@dataclass(frozen=True)
class GatedLinear:
    """out = silu(gate x) * (up x).

    One op, because both products of an output element belong to the same thread and the intermediate
    rows then never leave registers.
    """

    x: Buffer
    gate: Weight
    up: Weight
    out: Buffer


@dataclass(frozen=True)
class Rope:
    """Rotate every head of ``x`` in place by the angles of its token.

    ``pairs`` is ``"adjacent"`` for pairs (2i, 2i+1) or ``"halves"`` for (i, i + rotary/2); channels from
    ``rotary_dim`` on pass through.
    """

    x: Buffer
    angles: Buffer
    num_heads: int
    head_dim: int
    rotary_dim: int
    pairs: Literal["adjacent", "halves"]


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
class SelectOutputs:
    """out[i] = x[outputs[i]]: keep only the rows whose logits are wanted."""

    x: Buffer
    out: Buffer


Op = Embed | RopeAngles | RmsNorm | Linear | GatedLinear | Rope | StoreKV | Attend | SelectOutputs


@dataclass(frozen=True)
class Program:
    """An ordered list of ops, the buffers and weights they name, and the cache groups they use."""

    ops: tuple[Op, ...]
    logits: Buffer
    groups: tuple[CacheGroup, ...]
    weights: dict[str, Weight] = field(default_factory=dict)


def reads(op: Op) -> tuple[Buffer, ...]:
    """Buffers an op reads, a buffer that it updates in place among them."""
    match op:
        case Embed() | RopeAngles():
            return ()
        case RmsNorm() | GatedLinear() | SelectOutputs():
            return (op.x,)
        case Linear():
            return (op.x, op.out) if op.add else (op.x,)
        case Rope():
            return (op.x, op.angles)
        case StoreKV():
            return (op.k, op.v)
        case Attend():
            return (op.q,)


def writes(op: Op) -> tuple[Buffer, ...]:
    """Buffers an op writes."""
    match op:
        case Rope():
            return (op.x,)
        case StoreKV():
            return ()
        case _:
            return (op.out,)


def weights_of(op: Op) -> tuple[Weight, ...]:
    """Weights an op reads."""
    match op:
        case Embed():
            return (op.table,)
        case RmsNorm() | Linear():
            return (op.weight,)
        case GatedLinear():
            return (op.gate, op.up)
        case _:
            return ()
