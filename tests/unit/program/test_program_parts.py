"""The parts of a program: cache groups, the builder, costs."""

from __future__ import annotations

import pytest
from helpers import Tiny, spec_and_formats

from hotset.errors import InternalError, RequestError
from hotset.program import program as p
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup, block_bytes, group_offset, num_blocks
from hotset.program.cost import decode_bytes, op_class, step_cost

KV = CacheGroup("kv", (0, 1), 128)


# ---- cache ---------------------------------------------------------------------------------------------------


def test_block_bytes_of_the_design() -> None:
    """DESIGN.md section 4: DSV4-Flash with FP8 rows and MXFP4 indexer rows."""
    groups = (
        CacheGroup("c4", tuple(range(21)), 584, tokens_per_row=4),
        CacheGroup("indexer", tuple(range(21)), 68, tokens_per_row=4),
        CacheGroup("c128", tuple(range(20)), 584, tokens_per_row=128),
    )
    assert block_bytes(groups) == 899_648


def test_offsets_tile_a_block() -> None:
    """Rows of all groups and layers lie one after another, with neither holes nor overlaps."""
    groups = (CacheGroup("a", (0, 2, 5), 100), CacheGroup("b", (1, 5), 64, tokens_per_row=8))
    at = 0
    for group in groups:
        for layer in group.layers:
            assert group_offset(groups, group.name, layer) == at
            at += group.layer_block_bytes
    assert at == block_bytes(groups) == 3 * 25600 + 2 * 32 * 64
    with pytest.raises(RequestError, match="no cache group 'c'; this model has a, b"):
        group_offset(groups, "c", 0)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (255, 1), (256, 1), (257, 2), (1024, 4), (1025, 5)])
def test_num_blocks(tokens: int, blocks: int) -> None:
    assert num_blocks(tokens) == blocks


@pytest.mark.parametrize("tokens_per_row", [0, -1, 3, 512])
def test_rows_must_divide_a_block(tokens_per_row: int) -> None:
    with pytest.raises(RequestError, match=f"cache group kv: {tokens_per_row} tokens per row does not divide 256"):
        CacheGroup("kv", (0,), 128, tokens_per_row)


# ---- builder -------------------------------------------------------------------------------------------------


def test_wrong_widths_fail_where_they_are_written() -> None:
    """Guards against programs that read past a row: nothing checks a width inside a step."""
    b = Builder((KV,))
    x = b.embed("embed", 10, 64)
    angles = b.rope_angles((1.0,) * 8)
    with pytest.raises(InternalError, match="used with two shapes"):
        b.linear(x, "embed", 11)
    with pytest.raises(InternalError, match="adds 32 columns"):
        b.linear(x, "w", 32, add_to=x)
    with pytest.raises(InternalError, match="rope"):
        b.rope(x, angles, 3, 16, "halves")
    with pytest.raises(InternalError, match="rope"):
        b.rope(x, b.rope_angles((1.0,) * 9), 4, 16, "halves")
    with pytest.raises(InternalError, match="store_kv"):
        b.store_kv(x, b.linear(x, "v", 32), "kv", 0, 4, 16)
    with pytest.raises(InternalError, match="attend"):
        b.attend(x, "kv", 0, 4, 3, 16, 1.0)
    with pytest.raises(InternalError, match="wanted outputs"):
        b.finish(x)
    with pytest.raises(InternalError, match="adds 64 columns"):
        b.linear(b.select_outputs(x), "w2", 64, add_to=x)


def test_a_tied_weight_is_one_weight() -> None:
    b = Builder(())
    logits = b.linear(b.select_outputs(b.embed("embed", 10, 64)), "embed", 10)
    made = b.finish(logits)
    assert list(made.weights) == ["embed"] and [p.weights_of(op) for op in made.ops][1] == ()


def test_every_op_says_what_it_reads_and_writes() -> None:
    """Buffers are written before they are read, and every buffer but the logits is read."""
    spec, _ = spec_and_formats(Tiny("F32"))
    written: set[p.Buffer] = set()
    read: set[p.Buffer] = set()
    for op in spec.program.ops:
        assert set(p.reads(op)) <= written, op
        read |= set(p.reads(op))
        written |= set(p.writes(op))
    assert written - read == {spec.program.logits}


# ---- cost ----------------------------------------------------------------------------------------------------


def test_costs_by_hand() -> None:
    """Three tokens after ten, one output, Q8_0: numbers worked out on paper."""
    m = Tiny("Q8_0", hidden=64, ffn=160, layers=1, heads=4, kv_heads=2, head_dim=16, vocab=259)
    spec, formats = spec_and_formats(m)
    cost = step_cost(spec.program, formats, 3, 1, 10)
    products = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 160
    assert cost["linear"].num_ops == 2 * 3 * products + 2 * 259 * 64
    # Every matrix once, whole tiles (259 rows are 272), 34 bytes per 32 weights.
    assert cost["linear"].weight_bytes == (products + 272 * 64) // 32 * 34
    assert cost["attention"].store_bytes == 3 * 128
    assert cost["attention"].cache_bytes == 13 * 128
    # 11 + 12 + 13 keys, 4 heads of 16, a product with keys and one with values.
    assert cost["attention"].num_ops == 4 * 36 * 64
    assert cost["other"].weight_bytes == 3 * 68


def test_no_output_no_output_matrix() -> None:
    """A chunk in the middle of a prompt does not read the output matrix."""
    spec, formats = spec_and_formats(Tiny("Q8_0", is_tied=False))
    with_output, without = (step_cost(spec.program, formats, 4, count, 0)["linear"].weight_bytes for count in (1, 0))
    assert with_output - without == 272 * 68


def test_a_longer_context_costs_cache_rows_only() -> None:
    spec, formats = spec_and_formats(Tiny("Q4_1", embed_format="Q8_0"))
    steps = [decode_bytes(spec.program, formats, context) for context in (0, 1, 1000)]
    assert steps[1] - steps[0] == 2 * 128 and steps[2] - steps[1] == 999 * 2 * 128


def test_op_classes_cover_all_ops() -> None:
    spec, _ = spec_and_formats(Tiny("F32"))
    assert {op_class(op) for op in spec.program.ops} == {"linear", "attention", "other"}
