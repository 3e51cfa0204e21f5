"""What each op reads and computes, as functions of tokens and context. Plan, bench and audit read these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hotset.checkpoint.formats import FORMATS
from hotset.program import program as p
from hotset.program.cache import CacheGroup, FrontierGroup
from hotset.program.lower import weight_bytes

#: Arithmetic that products with weights or cache rows of a format are made of, the fastest first. FP8 becomes BF16
#: before it is multiplied (native/kernels/mx.h); a processor without BF16 products widens both to float.
ARITHMETIC = {
    "F32": ("f32",),
    "F16": ("f32",),
    "BF16": ("bf16", "f32"),
    "BF16-exact": ("bf16", "f32"),
    "FP8": ("bf16", "f32"),
    "FP8_F32": ("bf16", "f32"),
    "FP8-F32": ("bf16", "f32"),
    "FP4": ("bf16", "f32"),
    "MXFP4": ("int8_matrix", "int8"),
}
INT8_KINDS = ("int8_matrix", "int8")
"""Of every other format: integer codes times int8 inputs."""


def arithmetic(format_name: str) -> tuple[str, ...]:
    """Kinds of arithmetic that a product with a format can use, the fastest first."""
    return ARITHMETIC.get(format_name, INT8_KINDS)


@dataclass(frozen=True)
class Cost:
    """Bytes read from weights and from the cache, bytes written to the cache, and arithmetic (a multiply-add is 2).

    Bytes of weights are those that a step is *expected* to read: of a stack of experts, the mean number of different
    ones that its tokens choose (:func:`expected_experts`); everything else is exact.
    """

    weight_bytes: int = 0
    cache_bytes: int = 0
    store_bytes: int = 0
    num_ops: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
            self.store_bytes + other.store_bytes,
            self.num_ops + other.num_ops,
        )

    def times(self, count: int) -> Cost:
        """The cost of as many sequences alike, none of which shares anything."""
        return Cost(*(value * count for value in (self.weight_bytes, self.cache_bytes, self.store_bytes, self.num_ops)))


def expected_experts(num_tokens: int, top_k: int, num_experts: int) -> float:
    """How many different experts that many tokens choose on average, each ``top_k`` of them: E (1 - (1 - k / E)^t).

    For routing that is uniform and independent from token to token, which is the worst case: tokens of one text share
    experts. ``top_k`` exactly for one token; at most ``min(t k, E)``.
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def op_class(op: p.Op) -> str:
    """The line of a cost table that an op belongs to."""
    match op:
        case p.Linear() | p.GatedLinear():
            return "linear"
        case p.ExpertGated() | p.ExpertDown():
            return "experts"
        case p.Attend() | p.StoreKV() | p.WindowRows() | p.AttendRows() | p.AttendLatent():
            return "attention"
        case p.LatentQuery() | p.LatentValue():
            return "linear"
        case p.Compress() | p.StoreRows():
            return "indexer" if op.hadamard else "attention"
        case p.IndexRows():
            return "indexer"
        case p.HyperMix() | p.HyperMerge():
            return "streams"
        case _:
            return "other"


def op_cost(
    op: p.Op,
    formats: Mapping[str, str],
    groups: Iterable[CacheGroup | FrontierGroup],
    num_tokens: int,
    num_outputs: int,
    context: int,
    num_sequences: int = 1,
) -> Cost:
    """Cost of one op in a step of ``num_tokens`` tokens of each of ``num_sequences`` sequences.

    Each sequence has ``context`` tokens in the cache and wants ``num_outputs`` outputs. A weight is counted once
    however many tokens of whatever sequence share it; rows of a last tile that is not full are counted, since they are
    read. Of a stack of experts as many are counted as the step's tokens are expected to choose. Attention of token i
    reads the rows of ``context + i + 1`` tokens; a chunk reads them once, as it reads rows that several of its tokens
    may choose; the cache of every sequence is read on its own. ``groups`` are those of the cache and of the frontier.
    """
    match op:
        case p.Embed():
            row = FORMATS[formats[op.table.key]].row_bytes(op.table.in_width)
            return Cost(weight_bytes=num_sequences * num_tokens * row)
        case p.Linear() | p.GatedLinear():
            rows = num_sequences * (num_outputs if op.x.rows == "outputs" else num_tokens)
            weights = p.weights_of(op)
            size = sum(weight_bytes(w, FORMATS[formats[w.key]]) for w in weights)
            num_ops = sum(2 * rows * w.out_width * w.in_width for w in weights)
            return Cost(weight_bytes=size if rows else 0, num_ops=num_ops)
        case p.LatentQuery() | p.LatentValue():
            # One matrix, half of it read by either op: the rows of W_UK, then those of W_UV.
            size = weight_bytes(op.weight, FORMATS[formats[op.weight.key]])
            first = size * op.plain // (op.plain + op.value_dim)
            is_query = isinstance(op, p.LatentQuery)
            columns = op.num_heads * (op.plain if is_query else op.value_dim)
            num_ops = 2 * num_sequences * num_tokens * columns * op.weight.in_width
            return Cost(weight_bytes=first if is_query else size - first, num_ops=num_ops)
        case p.ExpertGated() | p.ExpertDown():
            return _expert_cost(op, formats, num_sequences * num_tokens)
        case _:
            row_bytes = {group.name: group.row_bytes for group in groups}
            return _sequence_cost(op, row_bytes, num_tokens, num_outputs, context).times(num_sequences)


def _sequence_cost(op: p.Op, row_bytes: Mapping[str, int], num_tokens: int, num_outputs: int, context: int) -> Cost:
    """Cost of an op that reads or writes one sequence's own rows."""
    match op:
        case p.StoreKV() | p.WindowRows() | p.StoreRows():
            return Cost(store_bytes=num_tokens * row_bytes[op.group])
        case p.Attend():
            keys = num_tokens * context + num_tokens * (num_tokens + 1) // 2
            return Cost(
                cache_bytes=(context + num_tokens) * row_bytes[op.group],
                num_ops=4 * keys * op.num_heads * op.head_dim,
            )
        case p.Compress():
            return _compress_cost(op, row_bytes, num_tokens, context)
        case p.IndexRows():
            return Cost(
                cache_bytes=(context + num_tokens) // op.ratio * row_bytes[op.group],
                num_ops=2 * _rows_seen(context, num_tokens, op.ratio) * op.num_heads * op.head_dim,
            )
        case p.AttendRows():
            return _attend_cost(op, row_bytes, num_tokens, context)
        case p.AttendLatent():
            keys = _rows_seen(context, num_tokens, 1, op.chosen.width)
            return Cost(
                cache_bytes=min(context + num_tokens, num_tokens * op.chosen.width) * row_bytes[op.group],
                num_ops=2 * keys * op.num_heads * (op.key_dim + op.latent),
            )
        case p.HyperMix() | p.HyperMerge():
            rows = num_outputs if op.x.rows == "outputs" else num_tokens
            return Cost(num_ops=2 * rows * op.x.width * (2 if isinstance(op, p.HyperMix) else op.num_streams + 1))
        case _:
            return Cost()


def _rows_seen(context: int, num_tokens: int, ratio: int, most: int | None = None) -> int:
    """Sum over a chunk's tokens of the rows that each sees: one per ``ratio`` tokens up to its own, at most
    ``most``."""

    def upto(tokens: int) -> int:
        """The sum of j // ratio for j in 0 .. tokens."""
        whole, rest = divmod(tokens + 1, ratio)
        return ratio * whole * (whole - 1) // 2 + whole * rest

    end = context + num_tokens
    full = end if most is None else min(end, most * ratio)  # later tokens see ``most``
    full = max(full, context)
    return upto(full) - upto(context) + (end - full) * (most or 0)


def _expert_cost(op: p.ExpertGated | p.ExpertDown, formats: Mapping[str, str], num_tokens: int) -> Cost:
    weights = p.weights_of(op)
    num_read = expected_experts(num_tokens, op.top_k, weights[0].count)
    size = sum(weight_bytes(replace(w, count=1), FORMATS[formats[w.key]]) for w in weights)
    num_ops = sum(2 * num_tokens * op.top_k * w.out_width * w.in_width for w in weights)
    return Cost(weight_bytes=round(num_read * size), num_ops=num_ops)


def _compress_cost(op: p.Compress, row_bytes: Mapping[str, int], num_tokens: int, context: int) -> Cost:
    """Every token enters the ring; completed rows read what the ring holds of their tokens, and are written."""
    num_rows = (context + num_tokens) // op.ratio - context // op.ratio
    start = max(0, context // op.ratio - int(op.overlap)) * op.ratio
    return Cost(
        cache_bytes=(context - start) * row_bytes[op.state] if num_rows else 0,
        store_bytes=num_tokens * row_bytes[op.state] + num_rows * row_bytes[op.group],
        num_ops=4 * num_rows * op.ratio * op.k.width,
    )


def _attend_cost(op: p.AttendRows, row_bytes: Mapping[str, int], num_tokens: int, context: int) -> Cost:
    keys = _rows_seen(context, num_tokens, 1, op.window_tokens)
    num_bytes = (min(context, op.window_tokens - 1) + num_tokens) * row_bytes[op.window]
    if op.group is not None:
        most = op.chosen.width if op.chosen is not None else context + num_tokens
        keys += _rows_seen(context, num_tokens, op.ratio, most)
        num_bytes += min((context + num_tokens) // op.ratio, num_tokens * most) * row_bytes[op.group]
    return Cost(cache_bytes=num_bytes, num_ops=4 * keys * op.num_heads * op.head_dim)


def step_cost(
    program: p.Program,
    formats: Mapping[str, str],
    num_tokens: int,
    num_outputs: int,
    context: int,
    num_sequences: int = 1,
) -> dict[str, Cost]:
    """Cost per op class of one step, see :func:`op_cost`."""
    total: dict[str, Cost] = {}
    groups: tuple[CacheGroup | FrontierGroup, ...] = (*program.groups, *program.frontier)
    for op in program.ops:
        name = op_class(op)
        cost = op_cost(op, formats, groups, num_tokens, num_outputs, context, num_sequences)
        total[name] = total.get(name, Cost()) + cost
    return total


def decode_bytes(program: p.Program, formats: Mapping[str, str], context: int) -> int:
    """Bytes that one decoded token reads with ``context`` tokens in the cache: weights and cache rows."""
    costs = step_cost(program, formats, 1, 1, context).values()
    return sum(c.weight_bytes + c.cache_bytes for c in costs)
