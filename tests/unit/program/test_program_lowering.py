"""Barriers and slots of the lowered program, held against a model of every byte that every thread touches."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
from byte_model import Case, errors
from helpers import Tiny, spec_and_formats
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.models.spec import with_cache_format
from hotset.program import lower_order
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup
from hotset.program.lower import FEW_TOKENS, Lowered, NativeBuffer, NativeOp, NativeWeight, lower
from hotset.program.lower_order import mark_lent

MAX_TOKENS, MAX_OUTPUTS = 40, 6

MODELS = {
    # Heads and tiles that no thread count divides, and every packing of input rows.
    "F32": Tiny("F32", heads=3, kv_heads=1, head_dim=32, layers=2),
    "BF16": Tiny("BF16", heads=6, kv_heads=2, head_dim=16, layers=2, is_tied=False),
    "Q8_0": Tiny("Q8_0", heads=4, kv_heads=2, head_dim=16, layers=2),
    "Q4_1": Tiny("Q4_1", heads=5, kv_heads=5, head_dim=32, ffn=32, layers=2, embed_format="Q8_0"),
    "Q6_K": Tiny("Q6_K", hidden=256, ffn=256, heads=16, kv_heads=2, head_dim=16, layers=2),
}
# Formats per tensor: one row packed in several ways, and a gate and an up matrix that run apart.
MIXED = {"wk": "Q4_0", "wv": "F16", "up": "Q4_1"}

CASES = [
    Case(threads, n, outputs, is_merged)
    for threads in (1, 2, 3, 4, 5)
    for n, outputs in (
        (1, (0,)), (1, ()), (2, (1,)), (2, (0, 1)), (3, (2,)), (5, (0, 2, 3, 4)), (17, (16,)), (23, (3, 8, 20, 21, 22)),
        (40, ()),
    )
    for is_merged in (False, True)
    if threads in (2, 3) or not is_merged
]  # fmt: skip


@cache
def lowered(name: str) -> Lowered:
    spec, formats = spec_and_formats(MODELS["Q8_0" if name == "mixed" else name])
    spec = with_cache_format(spec, formats)
    if name == "mixed":
        formats |= {key: format for key in formats for end, format in MIXED.items() if key.endswith("." + end)}
    return lower(spec.program, formats, MAX_TOKENS, MAX_OUTPUTS)


def late_user() -> Lowered:
    """A program in which nothing reads attention's result at once, and the next op needs what was made beside it."""
    b = Builder((CacheGroup("kv", (0,), 2 * 2 * 32),))
    x = b.embed("embed", 40, 64)
    q, k, v = b.linear(x, "wq", 64), b.linear(x, "wk", 32), b.linear(x, "wv", 32)
    b.store_kv(k, v, "kv", 0, 2, 16)
    o = b.attend(q, "kv", 0, 4, 2, 16, 0.25)
    late = x
    for key in ("late.0", "late.1", "late.2", "late.3"):
        late = b.linear(late, key, 64)
    b.linear(o, "wo", 64, add_to=late)
    made = b.finish(b.linear(b.select_outputs(late), "embed", 40))
    return lower(made, dict.fromkeys(made.weights, "Q8_0"), MAX_TOKENS, MAX_OUTPUTS)


def test_what_came_before_a_merge_that_was_skipped_still_counts() -> None:
    """No segment was split, so the merge and its barrier did not run: the queries may still be read by a neighbour."""
    low = late_user()
    for case in CASES:
        assert errors(low, case) == [], case
    index = next(i for i, op in enumerate(low.ops) if op.kind == "attend_merge") + 1
    assert low.ops[index].barrier_few and low.ops[index].barrier_many


def test_columns_are_not_lent_over_a_barrier_that_may_be_skipped() -> None:
    """The second product adds to columns of the first: with the merge between them skipped, who made them matters."""
    made = NativeOp("linear", x=0, out=1, weight=0)
    merge = NativeOp("attend_merge", out=2, barrier_few=True)
    low = Lowered(
        [made, merge, replace(made, add=True), NativeOp("pack", x=1, out=3, barrier_few=True)],
        [NativeBuffer(64, False, slot=slot) for slot in range(4)],
        [NativeWeight("w", "Q8_0", 64, 64)],
    )
    mark_lent(low)
    assert not any(op.is_lent for op in low.ops)
    low.ops[1] = NativeOp("rms_norm", x=2, out=2, barrier_few=True)
    mark_lent(low)
    assert [op.is_lent for op in low.ops] == [True, False, True, False]


@pytest.mark.parametrize("name", [*MODELS, "mixed"])
def test_no_race_and_no_stale_value(name: str) -> None:
    """Guards against a missing barrier and against slots shared by buffers that are alive together."""
    for case in CASES:
        assert errors(lowered(name), case) == [], case


@settings(max_examples=15)
@given(st.data())
def test_no_race_with_any_formats_and_shapes(data: st.DataObject) -> None:
    """The same for shapes and formats per tensor that nobody thought of."""
    group = data.draw(st.integers(1, 3))
    kv_heads = data.draw(st.integers(1, 3))
    m = Tiny(
        "F32",
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=32,
        layers=1,
        ffn=data.draw(st.sampled_from((32, 96))),
    )
    spec, formats = spec_and_formats(m)
    some = st.sampled_from(("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"))
    formats = {key: data.draw(some) if not key.endswith("norm") else format for key, format in formats.items()}
    low = lower(spec.program, formats, MAX_TOKENS, MAX_OUTPUTS)
    for case in data.draw(st.lists(st.sampled_from(CASES), min_size=4, max_size=6, unique=True)):
        assert errors(low, case) == [], case


@pytest.mark.parametrize("is_few", [True, False])
@pytest.mark.parametrize("name", [*MODELS, "mixed"])
def test_every_barrier_is_needed(name: str, is_few: bool) -> None:
    """Without any one of them there is a race. Guards against barriers that only cost time, and proves that the model
    of bytes sees a missing one."""
    low = lowered(name)
    cases = [case for case in CASES if case.is_few == is_few and case.threads in (2, 3)]
    for index, op in enumerate(low.ops):
        if op.barrier_few if is_few else op.barrier_many:
            assert any(errors(low, case, dropped=index) for case in cases), (index, op.kind)


def test_a_buffer_in_the_slot_of_another_is_not_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug that these tests were written for: two buffers of one slot counted as free of each other because both
    were cut by rows. Rows of different width lie elsewhere, so equal shares overlap. Slots are here reused at once, not
    only past a barrier."""
    accesses = lower_order._accesses

    def without_buffer(low: Lowered, op: NativeOp, few: bool) -> list[lower_order.Access]:
        shared = [(memory, is_write, share) for memory, is_write, share in accesses(low, op, few)]
        return [(memory, is_write, (*share[:2], -1)) for memory, is_write, share in shared]

    def crowded() -> Lowered:
        low = deepcopy(lowered("Q8_0"))
        low.slot_bytes, low.private_slot_bytes = [], []
        lower_order.assign_slots(low, list(range(len(low.ops))), MAX_TOKENS, MAX_OUTPUTS)
        for few in (True, False):
            lower_order.place_barriers(low, few)
        return low

    low = crowded()
    assert not any(errors(low, case) for case in CASES)
    monkeypatch.setattr(lower_order, "_accesses", without_buffer)
    low = crowded()
    assert any(errors(low, case) for case in CASES)


@pytest.mark.parametrize("name", [*MODELS, "mixed"])
def test_buffers_alive_at_once_have_slots_of_their_own(name: str) -> None:
    """A buffer lives from the op that first writes it to the last that reads it, both included; logits to the end."""
    low = lowered(name)
    lives: dict[int, range] = {}
    for index, op in enumerate(low.ops):
        for b in {op.x, op.y, op.out} - {-1}:
            lives[b] = range(lives[b].start if b in lives else index, index + 1)
    lives[low.logits] = range(lives[low.logits].start, len(low.ops) + 1)
    assert lives.keys() == set(range(len(low.buffers)))
    for a, life in lives.items():
        for b, other in lives.items():
            if a < b and low.buffers[a].slot == low.buffers[b].slot:
                assert life.stop <= other.start or other.stop <= life.start, (a, b)


@pytest.mark.parametrize("name", [*MODELS, "mixed"])
def test_slots_hold_their_buffers(name: str) -> None:
    """Every buffer fits its slot at the largest step, private ones at the largest small step, on whole cache lines."""
    low = lowered(name)
    for buffer in low.buffers:
        assert buffer.num_bytes(MAX_OUTPUTS if buffer.is_outputs else MAX_TOKENS) <= low.slot_bytes[buffer.slot]
        if buffer.is_private:
            assert buffer.num_bytes(FEW_TOKENS) <= low.private_slot_bytes[buffer.slot]
    assert all(size % 64 == 0 for size in (*low.slot_bytes, *low.private_slot_bytes))


def test_the_byte_model_sees_a_slot_given_away_too_early() -> None:
    """An op's output in the slot of its input is found. Proves that the tests above can fail."""
    low = deepcopy(lowered("Q8_0"))
    op = next(op for op in low.ops if op.kind == "gated")
    low.buffers[op.out].slot = low.buffers[op.x].slot
    low.slot_bytes = [max(low.slot_bytes)] * len(low.slot_bytes)
    assert any(errors(low, case) for case in CASES)
