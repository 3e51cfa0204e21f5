"""A small builder with which a model family emits its program once, at load."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeVar

from hotset.errors import InternalError
from hotset.program import program as p
from hotset.program.cache import CacheGroup, FrontierGroup
from hotset.program.rows import state_row_bytes

_Group = TypeVar("_Group", CacheGroup, FrontierGroup)


class Builder:
    """Collects ops; checks that widths fit when an op is added, so a wrong program fails where it is written."""

    def __init__(self, groups: tuple[CacheGroup, ...], frontier: tuple[FrontierGroup, ...] = ()) -> None:
        self._groups = groups
        self._frontier = frontier
        self._ops: list[p.Op] = []
        self._weights: dict[str, p.Weight] = {}
        self._num_buffers = 0

    def buffer(self, name: str, width: int, rows: p.Rows = "tokens") -> p.Buffer:
        """A new buffer; the name is made unique by a running number."""
        self._num_buffers += 1
        return p.Buffer(f"{name}.{self._num_buffers}", width, rows)

    def weight(self, key: str, out_width: int, in_width: int, count: int = 1, is_table: bool = False) -> p.Weight:
        """The weight of that key; a second use (a tied embedding) must agree on the shape."""
        weight = p.Weight(key, out_width, in_width, count, is_table)
        if self._weights.setdefault(key, weight) != weight:
            raise InternalError(f"weight {key} used with two shapes: {self._weights[key]} and {weight}")
        return weight

    def vector(self, key: str, width: int) -> p.Weight:
        """A weight of one column."""
        return self.weight(key, width, 1)

    def embed(self, key: str, vocab_size: int, width: int, copies: int = 1) -> p.Buffer:
        out = self.buffer("x", width * copies)
        self._ops.append(p.Embed(self.weight(key, vocab_size, width), out, copies))
        return out

    def rope_angles(self, frequencies: tuple[float, ...]) -> p.Buffer:
        out = self.buffer("angles", 2 * len(frequencies))
        self._ops.append(p.RopeAngles(frequencies, out))
        return out

    def rms_norm(self, x: p.Buffer, key: str, eps: float) -> p.Buffer:
        out = self.buffer("norm", x.width, x.rows)
        self._ops.append(p.RmsNorm(x, self.vector(key, x.width), eps, out))
        return out

    def layer_norm(self, x: p.Buffer, key: str, eps: float) -> p.Buffer:
        """Norm with mean, by ``KEY.weight`` and ``KEY.bias``."""
        out = self.buffer("norm", x.width, x.rows)
        weight, bias = self.vector(f"{key}.weight", x.width), self.vector(f"{key}.bias", x.width)
        self._ops.append(p.LayerNorm(x, weight, bias, eps, out))
        return out

    def head_norm(self, x: p.Buffer, num_heads: int, head_dim: int, eps: float) -> None:
        _check(num_heads * head_dim == x.width, f"head_norm: {num_heads} heads of {head_dim} on a row of {x.width}")
        self._ops.append(p.HeadNorm(x, num_heads, head_dim, eps))

    def linear(
        self, x: p.Buffer, key: str, out_width: int, add_to: p.Buffer | None = None, groups: int = 1
    ) -> p.Buffer:
        _check(
            groups > 0 and x.width % groups == 0 and out_width % groups == 0,
            f"{key}: {x.width} inputs and {out_width} outputs do not divide into {groups} groups",
        )
        weight = self.weight(key, out_width, x.width // groups)
        if add_to is not None and (add_to.width, add_to.rows) != (out_width, x.rows):
            raise InternalError(f"{key}: adds {out_width} columns to buffer {add_to}")
        out = add_to if add_to is not None else self.buffer("linear", out_width, x.rows)
        self._ops.append(p.Linear(x, weight, out, add_to is not None, groups))
        return out

    def gated_linear(self, x: p.Buffer, gate: str, up: str, out_width: int, limit: float | None = None) -> p.Buffer:
        out = self.buffer("gated", out_width, x.rows)
        pair = self.weight(gate, out_width, x.width), self.weight(up, out_width, x.width)
        self._ops.append(p.GatedLinear(x, *pair, out, limit))
        return out

    def rope(
        self, x: p.Buffer, angles: p.Buffer, num_heads: int, head_dim: int, pairs: Literal["adjacent", "halves"],
        first: int = 0, is_inverse: bool = False,
    ) -> None:  # fmt: skip
        if num_heads * head_dim != x.width or first < 0 or first + angles.width > head_dim:
            raise InternalError(
                f"rope: {num_heads} heads of {head_dim}, {angles.width} angles from {first}, on a row of {x.width}"
            )
        self._ops.append(p.Rope(x, angles, num_heads, head_dim, angles.width, pairs, first, is_inverse))

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

    def hyper_mix(
        self, x: p.Buffer, key: str, num_streams: int, iterations: int, eps: float, norm_eps: float
    ) -> tuple[p.Buffer, p.Buffer]:
        """The product with ``KEY.fn`` and the mix of the streams: the sublayer's input, and the coefficients."""
        n = num_streams
        coefficients = self.buffer("coefficients", n + n * n, x.rows)
        return self._mix(x, key, n, iterations, eps, norm_eps, n * (2 + n), 3, coefficients), coefficients

    def hyper_head(self, x: p.Buffer, key: str, num_streams: int, eps: float, norm_eps: float) -> p.Buffer:
        """The same before the head, where nothing is merged back."""
        return self._mix(x, key, num_streams, 0, eps, norm_eps, num_streams, 1, None)

    def _mix(
        self, x: p.Buffer, key: str, num_streams: int, iterations: int, eps: float, norm_eps: float, columns: int,
        num_scales: int, coefficients: p.Buffer | None,
    ) -> p.Buffer:  # fmt: skip
        _check(x.width % num_streams == 0, f"{key}: {num_streams} streams in a row of {x.width}")
        mix = self.linear(x, f"{key}.fn", columns)
        base, scale = self.vector(f"{key}.base", columns), self.vector(f"{key}.scale", num_scales)
        out = self.buffer("mixed", x.width // num_streams, x.rows)
        self._ops.append(p.HyperMix(x, mix, base, scale, num_streams, iterations, eps, norm_eps, out, coefficients))
        return out

    def hyper_merge(self, x: p.Buffer, y: p.Buffer, coefficients: p.Buffer, num_streams: int) -> None:
        _check(
            y.width * num_streams == x.width and coefficients.width == num_streams * (1 + num_streams),
            f"hyper_merge: {y.width} columns and {coefficients.width} coefficients into {num_streams} streams of {x}",
        )
        self._ops.append(p.HyperMerge(x, y, coefficients, num_streams))

    def window_rows(self, x: p.Buffer, group: str, layer: int, plain: int) -> None:
        _check(plain <= x.width, f"window_rows: {plain} plain channels of {x.width}")
        self._frontier_group(group, layer)
        self._ops.append(p.WindowRows(x, group, layer, plain))

    def compress(
        self, k: p.Buffer, g: p.Buffer, key: str, eps: float, frequencies: tuple[float, ...], ratio: int,
        group: str, state: str, layer: int, *, overlap: bool, hadamard: bool,
    ) -> None:  # fmt: skip
        """Pool ``k`` by ``g`` with ``KEY.ape`` and ``KEY.norm`` into rows of ``group``."""
        copies = 2 if overlap else 1
        width = k.width // copies
        rows = self._cache_group(group, layer)
        _check(
            g.width == k.width == copies * width and 2 * len(frequencies) <= width and rows.tokens_per_row == ratio,
            f"{key}: rows of {k.width} and {g.width}, {2 * len(frequencies)} rotary, {ratio} tokens into {rows}",
        )
        ring = self._frontier_group(state, layer)
        _check(
            ring.num_rows >= copies * ratio and ring.row_bytes == state_row_bytes(k.width),
            f"{key}: state of {copies * ratio} rows of {k.width} values and scores in {ring}",
        )
        ape, norm = self.vector(key + ".ape", ratio * k.width), self.vector(key + ".norm", width)
        self._ops.append(
            p.Compress(k, g, ape, norm, eps, frequencies, ratio, overlap, width, hadamard, group, state, layer)
        )

    def index_rows(
        self, q: p.Buffer, weights: p.Buffer, group: str, layer: int, num_heads: int, head_dim: int, ratio: int,
        top_k: int, scale: float,
    ) -> p.Buffer:  # fmt: skip
        _check(
            q.width == num_heads * head_dim and weights.width == num_heads and top_k > 0,
            f"index_rows: {num_heads} heads of {head_dim}, best {top_k}, on rows of {q.width} and {weights.width}",
        )
        rows = self._cache_group(group, layer)
        _check(rows.tokens_per_row == ratio, f"index_rows: {ratio} tokens per row of {rows}")
        out = self.buffer("chosen", top_k)
        self._ops.append(p.IndexRows(q, weights, out, group, layer, num_heads, head_dim, ratio, top_k, scale))
        return out

    def attend_rows(
        self, q: p.Buffer, window: str, group: str | None, chosen: p.Buffer | None, ratio: int, sink: str, layer: int,
        num_heads: int, head_dim: int, scale: float,
    ) -> p.Buffer:  # fmt: skip
        """Attention over the window (all its rows) and over rows of ``group``, all visible ones or the chosen."""
        _check(q.width == num_heads * head_dim, f"attend_rows: {num_heads} heads of {head_dim} on a row of {q.width}")
        ring = self._frontier_group(window, layer)
        if group is None:
            _check(chosen is None and ratio == 0, f"attend_rows: no group, but chosen {chosen}, ratio {ratio}")
        else:
            rows = self._cache_group(group, layer)
            _check(rows.tokens_per_row == ratio, f"attend_rows: {ratio} tokens per row of {rows}")
        out = self.buffer("attend", q.width)
        self._ops.append(
            p.AttendRows(
                q, out, window, ring.num_rows, group, chosen, ratio, self.vector(sink, num_heads), layer, num_heads,
                head_dim, scale,
            )
        )  # fmt: skip
        return out

    def latent_norm(self, x: p.Buffer, key: str, latent: int, eps: float) -> p.Buffer:
        _check(0 < latent < x.width, f"{key}: {latent} latent channels of {x.width}")
        out = self.buffer("latent", x.width)
        self._ops.append(p.LatentNorm(x, self.vector(key, latent), eps, out))
        return out

    def store_rows(self, x: p.Buffer, group: str, layer: int, plain: int, *, hadamard: bool = False) -> None:
        _check(0 < plain <= x.width, f"store_rows: {plain} plain channels of {x.width}")
        rows = self._cache_group(group, layer)
        _check(rows.tokens_per_row == 1, f"store_rows: a row per token into {rows}")
        self._ops.append(p.StoreRows(x, group, layer, plain, hadamard))

    def latent_query(self, x: p.Buffer, key: str, num_heads: int, plain: int, value_dim: int, latent: int) -> p.Buffer:
        """Heads of plain + rotary channels into the latent space, by the matrix that :meth:`latent_value` shares."""
        head_dim = x.width // num_heads
        _check(
            x.width == num_heads * head_dim and 0 < plain < head_dim,
            f"{key}: {num_heads} heads with {plain} plain channels on a row of {x.width}",
        )
        out = self.buffer("latent_query", num_heads * (latent + head_dim - plain))
        weight = self.weight(key, num_heads * (plain + value_dim), latent)
        self._ops.append(p.LatentQuery(x, weight, out, num_heads, plain, value_dim))
        return out

    def attend_latent(
        self, q: p.Buffer, chosen: p.Buffer, group: str, layer: int, num_heads: int, latent: int, scale: float
    ) -> p.Buffer:
        """Attention over the chosen rows of ``group``, their first ``latent`` channels being the values."""
        key_dim = q.width // num_heads
        _check(
            q.width == num_heads * key_dim and latent < key_dim and chosen.rows == q.rows,
            f"attend_latent: {num_heads} heads, {latent} latent channels, rows {chosen} on a row of {q.width}",
        )
        rows = self._cache_group(group, layer)
        _check(rows.tokens_per_row == 1, f"attend_latent: rows of single tokens, not {rows}")
        out = self.buffer("attend", num_heads * latent)
        self._ops.append(p.AttendLatent(q, chosen, out, group, layer, num_heads, key_dim, latent, scale))
        return out

    def latent_value(self, x: p.Buffer, key: str, num_heads: int, plain: int, value_dim: int) -> p.Buffer:
        latent = x.width // num_heads
        _check(x.width == num_heads * latent, f"{key}: {num_heads} heads on a row of {x.width}")
        weight = self.weight(key, num_heads * (plain + value_dim), latent)
        out = self.buffer("values", num_heads * value_dim)
        self._ops.append(p.LatentValue(x, weight, out, num_heads, plain, value_dim))
        return out

    def route(
        self, scores: p.Buffer, top_k: int, scaling: float, *, bias: str = "", table: str = "", vocab_size: int = 0,
        gate: Literal["sqrtsoftplus", "sigmoid"] = "sqrtsoftplus", num_groups: int = 1, top_groups: int = 1,
    ) -> p.Buffer:  # fmt: skip
        """Experts by score with the choice ``bias``, or by token with ``table`` [vocab_size, top_k]."""
        _check(bool(bias) != bool(table), f"route: bias {bias!r} and table {table!r}, expected one of them")
        _check(0 < top_k <= scores.width, f"route: {top_k} of {scores.width} experts")
        _check(
            0 < top_groups <= num_groups and scores.width % num_groups == 0
            and top_k <= scores.width // num_groups * top_groups and (num_groups == 1 or not table),
            f"route: {top_k} of {scores.width} experts from {top_groups} of {num_groups} groups",
        )  # fmt: skip
        by_score = self.vector(bias, scores.width) if bias else None
        by_token = self.weight(table, vocab_size, top_k, is_table=True) if table else None
        out = self.buffer("route", 2 * top_k)
        self._ops.append(
            p.Route(scores, by_score, by_token, out, scores.width, top_k, scaling, gate, num_groups, top_groups)
        )
        return out

    def expert_gated(
        self, x: p.Buffer, route: p.Buffer, gate: str, up: str, num_experts: int, out_width: int,
        limit: float | None = None,
    ) -> p.Buffer:  # fmt: skip
        """Gated products of every (token, expert) pair; one row per pair."""
        _check(x.rows == route.rows == "tokens", f"expert_gated: rows of {x} and {route}")
        gates, ups = (self.weight(key, out_width, x.width, num_experts) for key in (gate, up))
        out = self.buffer("pairs", out_width, "pairs")
        self._ops.append(p.ExpertGated(x, route, gates, ups, out, route.width // 2, limit))
        return out

    def expert_down(
        self, x: p.Buffer, route: p.Buffer, down: str, num_experts: int, out_width: int, add_to: p.Buffer | None = None
    ) -> p.Buffer:
        """Products of every pair, summed by token."""
        _check(x.rows == "pairs" and route.rows == "tokens", f"expert_down: rows of {x} and {route}")
        fits = add_to is None or (add_to.width, add_to.rows) == (out_width, "tokens")
        _check(fits, f"{down}: adds {out_width} columns to buffer {add_to}")
        out = add_to if add_to is not None else self.buffer("experts", out_width)
        weight = self.weight(down, out_width, x.width, num_experts)
        self._ops.append(p.ExpertDown(x, route, weight, out, route.width // 2, add_to is not None))
        return out

    def select_outputs(self, x: p.Buffer) -> p.Buffer:
        out = self.buffer("selected", x.width, "outputs")
        self._ops.append(p.SelectOutputs(x, out))
        return out

    def finish(self, logits: p.Buffer) -> p.Program:
        if logits.rows != "outputs":
            raise InternalError("a program must end in a buffer of the wanted outputs")
        return p.Program(tuple(self._ops), logits, self._groups, dict(self._weights), self._frontier)

    def _cache_group(self, name: str, layer: int) -> CacheGroup:
        return _owner(self._groups, name, layer)

    def _frontier_group(self, name: str, layer: int) -> FrontierGroup:
        return _owner(self._frontier, name, layer)


def _owner(groups: Iterable[_Group], name: str, layer: int) -> _Group:
    for group in groups:
        if group.name == name and layer in group.layers:
            return group
    raise InternalError(f"layer {layer} has no rows in a group {name!r}")


def _check(fits: bool, problem: str) -> None:
    if not fits:
        raise InternalError(problem)
