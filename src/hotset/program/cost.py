"""What each op reads and computes, as functions of tokens and context. Plan, bench and audit read these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotset.checkpoint.formats import FORMATS
from hotset.program import program as p
from hotset.program.cache import CacheGroup
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
        case p.Attend() | p.StoreKV():
            return "attention"
        case _:
            return "other"


def op_cost(
    op: p.Op,
    formats: Mapping[str, str],
    groups: tuple[CacheGroup, ...],
    num_tokens: int,
    num_outputs: int,
    context: int,
) -> Cost:
    """Cost of one op in a step of ``num_tokens`` tokens of one sequence that has ``context`` tokens in the cache.

    A weight is counted once however many tokens share it; rows of a last tile that is not full are counted, since
    they are read. Attention of token i reads the rows of ``context + i + 1`` tokens; a chunk reads them once.
    """
    by_name = {group.name: group for group in groups}
    match op:
        case p.Embed():
            return Cost(weight_bytes=num_tokens * FORMATS[formats[op.table.key]].row_bytes(op.table.in_width))
        case p.Linear() | p.GatedLinear():
            rows = num_outputs if op.x.rows == "outputs" else num_tokens
            weights = p.weights_of(op)
            size = sum(weight_bytes(w, FORMATS[formats[w.key]]) for w in weights)
            num_ops = sum(2 * rows * w.out_width * w.in_width for w in weights)
            return Cost(weight_bytes=size if rows else 0, num_ops=num_ops)
        case p.StoreKV():
            return Cost(store_bytes=num_tokens * by_name[op.group].row_bytes)
        case p.Attend():
            keys = num_tokens * context + num_tokens * (num_tokens + 1) // 2
            return Cost(
                cache_bytes=(context + num_tokens) * by_name[op.group].row_bytes,
                num_ops=4 * keys * op.num_heads * op.head_dim,
            )
        case _:
            return Cost()


def step_cost(
    program: p.Program, formats: Mapping[str, str], num_tokens: int, num_outputs: int, context: int
) -> dict[str, Cost]:
    """Cost per op class of one step of one sequence."""
    total: dict[str, Cost] = {}
    for op in program.ops:
        name = op_class(op)
        cost = op_cost(op, formats, program.groups, num_tokens, num_outputs, context)
        total[name] = total.get(name, Cost()) + cost
    return total


def decode_bytes(program: p.Program, formats: Mapping[str, str], context: int) -> int:
    """Bytes that one decoded token reads with ``context`` tokens in the cache: weights and cache rows."""
    costs = step_cost(program, formats, 1, 1, context).values()
    return sum(c.weight_bytes + c.cache_bytes for c in costs)
