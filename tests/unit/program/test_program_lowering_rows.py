"""Order, barriers and slots of DeepSeek-V4 programs, held against a model of every byte that every thread touches."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
from byte_model import Case, errors
from byte_model_rows import RowsModel
from dsv4_files import TinyV4
from dsv4_headers import v4_program
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.models.deepseek_v4 import FORMS
from hotset.models.spec import with_cache_format
from hotset.program import lower_order
from hotset.program.cache import BLOCK_TOKENS, block_bytes, group_offset
from hotset.program.lower import Lowered, NativeOp, lower
from hotset.program.rows import index_row, kv_row

MAX_TOKENS, MAX_OUTPUTS = 48, 6

MODELS = {
    "float": TinyV4(ratios=(0, 4, 128, 4), window=16),
    "official": TinyV4(ratios=(4, 128), formats="official", heads=3, window=8, index_heads=5, o_groups=1, hidden=64),
    "fp8": TinyV4(ratios=(128, 4, 0), formats="fp8", hash_layers=3, experts=5, top_k=3, streams=2),
}

CASES = [
    Case(threads, n, outputs, is_merged, start)
    for threads in (1, 2, 3, 4, 5)
    for n, outputs, start in (
        (1, (0,), 0), (1, (), 131), (1, (0,), 255), (2, (1,), 254), (2, (0, 1), 6), (3, (2,), 125), (7, (0, 6), 250),
        (33, (8, 32), 0), (48, (), 230),
    )
    if threads in (2, 3) or n in (1, 2, 33)
    for is_merged in ((False, True) if n in (1, 2, 3, 7) else (False,))
]  # fmt: skip


@cache
def lowered(name: str) -> Lowered:
    model, _, form = name.partition(" in ")
    spec, formats = v4_program(MODELS[model])
    return lower(with_cache_format(spec, formats, form or None).program, formats, MAX_TOKENS, MAX_OUTPUTS)


def found(low: Lowered, case: Case, dropped: int = -1) -> list[str]:
    return errors(low, case, dropped, RowsModel)


@pytest.mark.parametrize("name", [*MODELS, "float in FP4+FP8", "official in BF16-exact"])
def test_no_race_and_no_stale_value(name: str) -> None:
    """Guards against a missing barrier, an op moved before its input, and slots shared by buffers alive together."""
    for case in CASES:
        assert found(lowered(name), case) == [], case


@pytest.mark.parametrize("form", [name for name, _, _ in FORMS])
@pytest.mark.parametrize("name", MODELS)
def test_rows_of_every_form_fill_a_block(name: str, form: str) -> None:
    """The places of all layers' rows in a block, as their ops have them, follow one another without a gap, each as long
    as the table of rows says: a block's stride is what the plan and the allocator count."""
    _, kv_format, index_format = next(f for f in FORMS if f[0] == form)
    m = MODELS[name]
    spec, formats = v4_program(m)
    groups = with_cache_format(spec, formats, form).groups
    places = {}
    for op in lowered(f"{name} in {form}").ops:
        if op.kind == "compress":
            is_index = op.head_dim == m.index_dim != m.head_dim
            plain = m.head_dim - m.rotary
            row = index_row(index_format, m.index_dim) if is_index else kv_row(kv_format, m.head_dim, plain)
            assert is_index or (op.row_bytes, op.scale_bytes) == (row.data_bytes, row.scale_bytes)
            places[op.cache_offset] = BLOCK_TOKENS // op.ratio * row.row_bytes
            assert RowsModel(lowered(f"{name} in {form}"), CASES[0]).group_bytes(op) == places[op.cache_offset]
    assert set(places) == {group_offset(groups, g.name, layer) for g in groups for layer in g.layers}
    end = 0
    for offset in sorted(places):
        assert offset == end
        end += places[offset]
    assert end == block_bytes(groups)


@settings(max_examples=10)
@given(st.data())
def test_no_race_with_any_shape(data: st.DataObject) -> None:
    """The same for shapes that nobody thought of."""
    draw = data.draw
    groups = draw(st.integers(1, 2))
    m = TinyV4(
        ratios=tuple(draw(st.lists(st.sampled_from((0, 4, 128)), min_size=1, max_size=3))),
        formats=draw(st.sampled_from(("float", "official", "fp8"))), hidden=32 * draw(st.integers(1, 3)),
        heads=groups * draw(st.integers(1, 3)), o_groups=groups, window=draw(st.sampled_from((1, 5, 32))),
        index_heads=draw(st.integers(1, 4)), index_top_k=draw(st.integers(1, 9)), streams=draw(st.integers(2, 4)),
        experts=draw(st.integers(3, 9)), top_k=draw(st.integers(1, 3)), inter=32 * draw(st.integers(1, 3)),
        hash_layers=draw(st.integers(0, 1)),
    )  # fmt: skip
    spec, formats = v4_program(m)
    low = lower(spec.program, formats, MAX_TOKENS, MAX_OUTPUTS)
    for case in draw(st.lists(st.sampled_from(CASES), min_size=3, max_size=5, unique=True)):
        assert found(low, case) == [], case


@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_barrier_is_needed(name: str, is_few: bool) -> None:
    """Without any one of them there is a race. Proves that the model of bytes sees a missing one."""
    low = lowered(name)
    cases = [case for case in CASES if case.is_few == is_few and case.threads in (2, 3)]
    for index, op in enumerate(low.ops):
        if op.barrier_few if is_few else op.barrier_many:
            assert any(found(low, case, index) for case in cases), (index, op.kind)


@pytest.mark.parametrize(("ratio", "most"), [(0, 10), (128, 10), (4, 11)])
def test_barriers_of_a_layer_in_a_small_step(ratio: int, most: int) -> None:
    """The program may list ops as they read best; lowering moves those forward that need no barrier. A merge runs only
    when a token is cut by spans."""
    counts = [
        sum(
            op.barrier_few and op.kind != "attend_rows_merge"
            for op in lower(*program_of((ratio,) * layers), MAX_TOKENS, MAX_OUTPUTS).ops
        )
        for layers in (2, 3)
    ]
    assert counts[1] - counts[0] == most


def program_of(ratios: tuple[int, ...]) -> tuple:
    spec, formats = v4_program(replace(MODELS["float"], ratios=ratios))
    return spec.program, formats


def test_the_order_is_the_programs_but_for_barriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same ops, each after those whose values it reads; and fewer barriers than in the order of the program."""
    low = lowered("float")

    def keep(low: Lowered) -> list[int]:
        return list(range(len(low.ops)))

    monkeypatch.setattr("hotset.program.lower.order_ops", keep)
    plain = lower(*program_of(MODELS["float"].ratios), MAX_TOKENS, MAX_OUTPUTS)
    assert Counter(op.kind for op in low.ops) == Counter(op.kind for op in plain.ops)
    assert sum(op.barrier_few for op in low.ops) < 0.8 * sum(op.barrier_few for op in plain.ops)
    assert found(plain, CASES[10]) == []


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_numbered_as_they_are_read(name: str) -> None:
    """A thread's share of all matrices is one stream; a gate knows its up matrix."""
    low = lowered(name)
    used = [weight for op in low.ops for weight in (op.weight, op.weight2) if weight >= 0]
    assert list(dict.fromkeys(used)) == list(range(len(low.weights)))
    for op in low.ops:
        if op.kind in ("gated", "expert_gated"):
            assert low.weights[op.weight].pair == op.weight2
            assert low.weights[op.weight].key.replace("w1", "w3") == low.weights[op.weight2].key


def test_the_byte_model_sees_a_ring_written_too_early() -> None:
    """Proves that the tests above can fail: a ring is written right after attention, in the same phase."""
    low = deepcopy(lowered("float"))
    index = next(i for i, op in enumerate(low.ops) if op.kind == "store_window")
    attend = next(i for i, op in enumerate(low.ops) if op.kind == "attend_rows")
    op = low.ops.pop(index)
    op.barrier_few = op.barrier_many = False
    low.ops.insert(attend + 1, op)
    assert any(found(low, case) for case in CASES)


def test_the_byte_model_sees_a_ring_that_no_barrier_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves the same for barrier placement: with accesses to rings left out, a race is found."""
    accesses = lower_order._accesses

    def without_rings(low: Lowered, op: NativeOp, few: bool) -> list[lower_order.Access]:
        return [a for a in accesses(low, op, few) if not (isinstance(a[0], tuple) and a[0][0] == "frontier")]

    monkeypatch.setattr(lower_order, "_accesses", without_rings)
    low = lower(*program_of(MODELS["float"].ratios), MAX_TOKENS, MAX_OUTPUTS)
    assert any(found(low, case) for case in CASES)
