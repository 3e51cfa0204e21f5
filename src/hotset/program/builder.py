"""A small builder with which a model family emits its program once, at load."""

from __future__ import annotations

from typing import Literal

from hotset.errors import InternalError
from hotset.program import program as p
from hotset.program.cache import CacheGroup


class Builder:
    """Collects ops; checks that widths fit when an op is added, so a wrong program fails where it is written."""

    def __init__(self, groups: tuple[CacheGroup, ...]) -> None:
        self._groups = groups
        self._ops: list[p.Op] = []
        self._weights: dict[str, p.Weight] = {}
        self._num_buffers = 0

    def buffer(self, name: str, width: int, rows: Literal["tokens", "outputs"] = "tokens") -> p.Buffer:
        """A new buffer; the name is made unique by a running number."""
        self._num_buffers += 1
        return p.Buffer(f"{name}.{self._num_buffers}", width, rows)

    def weight(self, key: str, out_width: int, in_width: int) -> p.Weight:
        """The weight of that key; a second use (a tied embedding) must agree on the shape."""
        weight = p.Weight(key, out_width, in_width)
        if self._weights.setdefault(key, weight) != weight:
            raise InternalError(f"weight {key} used with two shapes: {self._weights[key]} and {weight}")
        return weight

    def embed(self, key: str, vocab_size: int, width: int) -> p.Buffer:
        out = self.buffer("x", width)
        self._ops.append(p.Embed(self.weight(key, vocab_size, width), out))
        return out

    def rope_angles(self, frequencies: tuple[float, ...]) -> p.Buffer:
        out = self.buffer("angles", 2 * len(frequencies))
        self._ops.append(p.RopeAngles(frequencies, out))
        return out

    def rms_norm(self, x: p.Buffer, key: str, eps: float) -> p.Buffer:
        out = self.buffer("norm", x.width, x.rows)
        self._ops.append(p.RmsNorm(x, self.weight(key, x.width, 1), eps, out))
        return out

    def linear(self, x: p.Buffer, key: str, out_width: int, add_to: p.Buffer | None = None) -> p.Buffer:
        weight = self.weight(key, out_width, x.width)
        if add_to is not None and (add_to.width, add_to.rows) != (out_width, x.rows):
            raise InternalError(f"{key}: adds {out_width} columns to buffer {add_to}")
        out = add_to if add_to is not None else self.buffer("linear", out_width, x.rows)
        self._ops.append(p.Linear(x, weight, out, add=add_to is not None))
        return out

    def gated_linear(self, x: p.Buffer, gate: str, up: str, out_width: int) -> p.Buffer:
        out = self.buffer("gated", out_width, x.rows)
        pair = self.weight(gate, out_width, x.width), self.weight(up, out_width, x.width)
        self._ops.append(p.GatedLinear(x, *pair, out))
        return out

    def rope(
        self, x: p.Buffer, angles: p.Buffer, num_heads: int, head_dim: int, pairs: Literal["adjacent", "halves"]
    ) -> None:
        if num_heads * head_dim != x.width or angles.width > head_dim:
            raise InternalError(f"rope: {num_heads} heads of {head_dim}, angles {angles.width}, on a row of {x.width}")
        self._ops.append(p.Rope(x, angles, num_heads, head_dim, angles.width, pairs))

    def store_kv(self, k: p.Buffer, v: p.Buffer, group: str, layer: int, num_kv_heads: int, head_dim: int) -> None:
        if k.width != num_kv_heads * head_dim or v.width != k.width:
            raise InternalError(f"store_kv: {num_kv_heads} heads of {head_dim}, rows of {k.width} and {v.width}")
        self._ops.append(p.StoreKV(k, v, group, layer, num_kv_heads, head_dim))

    def attend(
        self, q: p.Buffer, group: str, layer: int, num_heads: int, num_kv_heads: int, head_dim: int, scale: float
    ) -> p.Buffer:
        if q.width != num_heads * head_dim or num_heads % num_kv_heads:
            raise InternalError(f"attend: {num_heads} heads over {num_kv_heads}, head {head_dim}, row of {q.width}")
        out = self.buffer("attend", q.width)
        self._ops.append(p.Attend(q, out, group, layer, num_heads, num_kv_heads, head_dim, scale))
        return out

    def select_outputs(self, x: p.Buffer) -> p.Buffer:
        out = self.buffer("selected", x.width, "outputs")
        self._ops.append(p.SelectOutputs(x, out))
        return out

    def finish(self, logits: p.Buffer) -> p.Program:
        if logits.rows != "outputs":
            raise InternalError("a program must end in a buffer of the wanted outputs")
        return p.Program(tuple(self._ops), logits, self._groups, dict(self._weights))
