"""What each op reads and computes, as functions of tokens and context. Plan, bench and audit read these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hotset.checkpoint.formats import FORMATS
from hotset.program import program as p
from hotset.program.cache import CacheGroup, FrontierGroup
from hotset.program.lower import weight_bytes


@dataclass(frozen=True)
class Cost:
    """Bytes read from weights and from the cache, bytes written to the cache, and arithmetic (a multiply-add is 2)."""

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


def op_class(op: p.Op) -> str:
    """The line of a cost table that an op belongs to."""
    match op:
        case p.Linear() | p.GatedLinear():
            return "linear"
        case p.ExpertGated() | p.ExpertDown():
            return "experts"
        case p.Attend() | p.StoreKV() | p.WindowRows() | p.AttendRows():
            return "attention"
        case p.Compress():
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
) -> Cost:
    """Cost of one op in a step of ``num_tokens`` tokens of one sequence that has ``context`` tokens in the cache.

    A weight is counted once however many tokens share it; rows of a last tile that is not full are counted, since
    they are read. Of a stack of experts as many are counted as the step's tokens can choose at most. Attention of token
    i reads the rows of ``context + i + 1`` tokens; a chunk reads them once, as it reads rows that several of its tokens
    may choose. ``groups`` are those of the cache and of the frontier.
    """
    row_bytes = {group.name: group.row_bytes for group in groups}
    match op:
        case p.Embed():
            return Cost(weight_bytes=num_tokens * FORMATS[formats[op.table.key]].row_bytes(op.table.in_width))
        case p.Linear() | p.GatedLinear():
            rows = num_outputs if op.x.rows == "outputs" else num_tokens
            weights = p.weights_of(op)
            size = sum(weight_bytes(w, FORMATS[formats[w.key]]) for w in weights)
            num_ops = sum(2 * rows * w.out_width * w.in_width for w in weights)
            return Cost(weight_bytes=size if rows else 0, num_ops=num_ops)
        case p.ExpertGated() | p.ExpertDown():
            return _expert_cost(op, formats, num_tokens)
        case p.StoreKV() | p.WindowRows():
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
            seen = sum((context + i + 1) // op.ratio for i in range(num_tokens))
            return Cost(
                cache_bytes=(context + num_tokens) // op.ratio * row_bytes[op.group],
                num_ops=2 * seen * op.num_heads * op.head_dim,
            )
        case p.AttendRows():
            return _attend_cost(op, row_bytes, num_tokens, context)
        case p.HyperMix() | p.HyperMerge():
            rows = num_outputs if op.x.rows == "outputs" else num_tokens
            return Cost(num_ops=2 * rows * op.x.width * (2 if isinstance(op, p.HyperMix) else op.num_streams + 1))
        case _:
            return Cost()


def _expert_cost(op: p.ExpertGated | p.ExpertDown, formats: Mapping[str, str], num_tokens: int) -> Cost:
    weights = p.weights_of(op)
    num_read = min(num_tokens * op.top_k, weights[0].count)
    size = sum(weight_bytes(replace(w, count=1), FORMATS[formats[w.key]]) for w in weights)
    num_ops = sum(2 * num_tokens * op.top_k * w.out_width * w.in_width for w in weights)
    return Cost(weight_bytes=num_read * size, num_ops=num_ops)


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
    keys = sum(min(context + i + 1, op.window_tokens) for i in range(num_tokens))
    num_bytes = (min(context, op.window_tokens - 1) + num_tokens) * row_bytes[op.window]
    if op.group is not None:
        most = op.chosen.width if op.chosen is not None else context + num_tokens
        keys += sum(min((context + i + 1) // op.ratio, most) for i in range(num_tokens))
        num_bytes += min((context + num_tokens) // op.ratio, num_tokens * most) * row_bytes[op.group]
    return Cost(cache_bytes=num_bytes, num_ops=4 * keys * op.num_heads * op.head_dim)


def step_cost(
    program: p.Program, formats: Mapping[str, str], num_tokens: int, num_outputs: int, context: int
) -> dict[str, Cost]:
    """Cost per op class of one step of one sequence."""
    total: dict[str, Cost] = {}
    for op in program.ops:
        name = op_class(op)
        cost = op_cost(op, formats, (*program.groups, *program.frontier), num_tokens, num_outputs, context)
        total[name] = total.get(name, Cost()) + cost
    return total


def decode_bytes(program: p.Program, formats: Mapping[str, str], context: int) -> int:
    """Bytes that one decoded token reads with ``context`` tokens in the cache: weights and cache rows."""
    costs = step_cost(program, formats, 1, 1, context).values()
    return sum(c.weight_bytes + c.cache_bytes for c in costs)
