"""Lowering: from a program to the native op list, with memory slots and barriers.

Three decisions are made here and nowhere else (``lower_emit`` says which native ops a program op becomes,
``lower_order`` makes the decisions, ``lower_types`` has what comes out).

*Order.* Ops that need no barrier go before those that do.

*Slots.* Buffers that are never alive at the same time share memory. Sizes are exact functions of the step's
largest token and output counts; the plan prints their sum as workspace.

*Barriers.* An op waits for the team only if it touches memory that another thread may have written, or may still be
reading, since the last barrier. In a step of very few tokens, norms and packing are replicated: every thread computes
its own private copy, which is cheaper than waiting for a neighbour's share. So there are two barrier sets, for few and
for many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hotset.checkpoint.formats import FORMATS
from hotset.errors import InternalError
from hotset.program import program as p
from hotset.program.lower_emit import emit
from hotset.program.lower_order import assign_slots, mark_lent, order_ops, place_barriers
from hotset.program.lower_types import (
    ACT_BF16,
    ACT_F32,
    ACT_KIND,
    ACT_Q8_OFFSET_8,
    ACT_Q8_OFFSET_12,
    ACT_Q8_OFFSET_32,
    ACT_Q8_OFFSET_128,
    ACT_Q8_SUM,
    ATTEND_ROWS,
    CACHE_KIND,
    FEW_TOKENS,
    INDEX_KIND,
    ITEMS_PER_THREAD,
    LEAST_HEADS,
    NUM_ACT_KINDS,
    OP_KINDS,
    ROW_KIND,
    SPAN_TOKENS,
    TILE_KEYS,
    TILE_ROWS,
    Lowered,
    NativeBuffer,
    NativeOp,
    NativeWeight,
    act_bytes,
    row_floats,
    row_spans,
    table_bytes,
    tile_bytes,
    weight_bytes,
)

__all__ = [
    "ACT_BF16", "ACT_F32", "ACT_KIND", "ACT_Q8_OFFSET_8", "ACT_Q8_OFFSET_12", "ACT_Q8_OFFSET_32", "ACT_Q8_OFFSET_128",
    "ACT_Q8_SUM", "CACHE_KIND", "FEW_TOKENS", "INDEX_KIND", "NUM_ACT_KINDS", "OP_KINDS", "ROW_KIND", "TILE_KEYS",
    "TILE_ROWS", "Lowered", "NativeBuffer", "NativeOp", "NativeWeight", "act_bytes", "lower", "partial_floats",
    "row_floats", "step_bytes", "table_bytes", "tile_bytes", "weight_bytes",
]  # fmt: skip


def lower(program: p.Program, formats: Mapping[str, str], max_tokens: int, max_outputs: int) -> Lowered:
    """Lower ``program`` for weights in ``formats`` (by key) and steps of at most that many tokens and outputs.

    Raises:
        CheckpointError: weights in a mixture of formats that no op takes.
    """
    low, phases = _ordered(program, formats)
    low.max_tokens, low.max_outputs = max_tokens, max_outputs
    attends = [op for op in low.ops if op.kind == "attend"]
    low.attend_head_dim = max((op.head_dim for op in attends), default=0)
    low.attend_rows = ATTEND_ROWS if attends else 0
    assign_slots(low, phases, max_tokens, max_outputs)
    for few in (True, False):
        place_barriers(low, few)
    mark_lent(low)
    return low


def step_bytes(
    program: p.Program, formats: Mapping[str, str], chunks: Iterable[int], max_outputs: int
) -> dict[int, int]:
    """Bytes of the buffers of steps of at most so many tokens, by number: the slots that :func:`lower` gives, summed.

    The ops and their order do not depend on the tokens, so they are made once for all sizes. Errors as :func:`lower`.
    """
    low, phases = _ordered(program, formats)
    out = {}
    for chunk in chunks:
        low.slot_bytes, low.private_slot_bytes = [], []
        assign_slots(low, phases, chunk, max_outputs)
        out[chunk] = sum(low.slot_bytes)
    return out


def _ordered(program: p.Program, formats: Mapping[str, str]) -> tuple[Lowered, list[int]]:
    for name in set(formats.values()):
        if name not in FORMATS:
            raise InternalError(f"unknown format {name}")
    low = emit(program, formats)
    return low, order_ops(low)


def partial_floats(program: p.Program, num_rows: int, context: int, num_threads: int) -> int:
    """Floats of attention's partial results.

    Ordinary attention: of ``num_rows`` tokens whose context is cut into spans of 1,024 tokens. Attention over rows: of
    as many tokens as are cut by spans (``plan_costs`` in C++), one span for the window and some for compressed rows.
    """
    most = 0
    for op in program.ops:
        if isinstance(op, p.Attend):
            spans = -(-context // SPAN_TOKENS)
            most = max(most, num_rows * spans * op.num_heads * (op.head_dim + 2) if spans > 1 else 0)
        elif isinstance(op, p.AttendRows):
            seen = context // op.ratio if op.group else 0
            spans = row_spans(seen if op.chosen is None else min(seen, op.chosen.width)) + 1
            most = max(most, _most_cut(op.num_heads, num_threads) * spans * op.num_heads * (op.head_dim + 2))
    return most


def _most_cut(num_heads: int, num_threads: int) -> int:
    """Tokens of the largest step that is cut by spans."""
    parts = max(1, num_heads // LEAST_HEADS)

    def is_cut(num_tokens: int) -> bool:
        wanted = 1 if num_tokens <= FEW_TOKENS else ITEMS_PER_THREAD
        return num_tokens * parts < wanted * num_threads

    return max((n for n in range(1, ITEMS_PER_THREAD * num_threads) if is_cut(n)), default=0)
