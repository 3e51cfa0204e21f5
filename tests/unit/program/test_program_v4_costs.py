"""Costs of the ops of DeepSeek-V4: numbers worked out on paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dsv4_files import TinyV4

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.manifest import declared_formats
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec
from hotset.program import program as p
from hotset.program.cost import Cost, decode_bytes, op_class, op_cost, step_cost

M = TinyV4(ratios=(0, 4, 128), formats="official", experts=8, top_k=2, window=32, index_top_k=8)
KV_ROW, INDEX_ROW = 64 + 32 + 8, 16 + 1
CSA_STATE, INDEX_STATE, HCA_STATE = 2 * 160 * 4, 2 * 64 * 4, 2 * 80 * 4


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return describe(Checkpoint("safetensors", Path("model"), [], M.config(), {}))


def cost(spec: ModelSpec, kind: type, num_tokens: int, context: int, number: int = 0) -> Cost:
    op = [op for op in spec.program.ops if isinstance(op, kind)][number]
    groups = (*spec.groups, *spec.frontier)
    return op_cost(op, declared_formats(spec.tensors), groups, num_tokens, 1, context)


@pytest.mark.parametrize(("num_tokens", "num_read"), [(1, 2), (2, 3.5), (3, 4.625), (100, 8)])
def test_chosen_experts_are_read_and_no_others(spec: ModelSpec, num_tokens: int, num_read: float) -> None:
    """Different ones of eight on average, two by each token; each 32x32 in 17 bytes per 32 weights.

    Tokens times top_k were counted, which is more than a step of several rows reads.
    """
    one = 32 * 17
    gated, down = (cost(spec, kind, num_tokens, 0) for kind in (p.ExpertGated, p.ExpertDown))
    assert (gated.weight_bytes, down.weight_bytes) == (num_read * 2 * one, num_read * one)
    assert gated.num_ops == 2 * down.num_ops == 2 * 2 * num_tokens * 2 * 32 * 32


def test_several_sequences_share_weights_and_nothing_else(spec: ModelSpec) -> None:
    """Experts of a batch were counted as those of one token."""
    formats = declared_formats(spec.tensors)
    one, three = (step_cost(spec.program, formats, 1, 1, 200, n) for n in (1, 3))
    assert three["linear"].weight_bytes == one["linear"].weight_bytes
    assert three["linear"].num_ops == 3 * one["linear"].num_ops
    assert three["experts"].weight_bytes == pytest.approx(one["experts"].weight_bytes * 4.625 / 2)
    for name in ("attention", "indexer"):
        assert three[name].cache_bytes == 3 * one[name].cache_bytes
        assert three[name].num_ops == 3 * one[name].num_ops


@pytest.mark.parametrize(("context", "num_tokens"), [(0, 1), (5, 40), (30, 3), (31, 70), (500, 9), (1000, 300)])
def test_rows_seen_by_a_chunk_are_the_sum_over_its_tokens(spec: ModelSpec, context: int, num_tokens: int) -> None:
    """Closed forms of sums that took seconds for a chunk of 32,768."""
    attends = [cost(spec, p.AttendRows, num_tokens, context, layer).num_ops for layer in range(3)]
    tokens = range(context + 1, context + num_tokens + 1)
    window = sum(min(t, 32) for t in tokens)
    rows = [window, window + sum(min(t // 4, 8) for t in tokens), window + sum(t // 128 for t in tokens)]
    assert attends == [4 * 4 * 80 * keys for keys in rows]


def test_rows_read_by_attention(spec: ModelSpec) -> None:
    """Window rows up to 32, chosen rows up to 8 per token and no more than are visible, all rows of ratio 128."""

    def read(layer: int, num_tokens: int, context: int) -> int:
        return cost(spec, p.AttendRows, num_tokens, context, layer).cache_bytes // KV_ROW

    assert [read(0, 1, context) for context in (0, 10, 31, 500)] == [1, 11, 32, 32]
    assert [read(1, 1, context) for context in (2, 3, 20, 500)] == [3, 4 + 1, 21 + 5, 32 + 8]
    assert [read(2, 1, context) for context in (126, 127, 500)] == [32, 32 + 1, 32 + 3]
    # A chunk of ten after 500: 31 rows before it and its own; 80 choices among 127 visible rows.
    assert read(1, 10, 500) == 41 + 80
    assert read(1, 40, 500) == 71 + 135
    assert cost(spec, p.AttendRows, 2, 500, 1).num_ops == 4 * (2 * 32 + 2 * 8) * 4 * 80


def test_rows_read_by_the_indexer(spec: ModelSpec) -> None:
    assert cost(spec, p.IndexRows, 1, 402).cache_bytes == 100 * INDEX_ROW
    assert cost(spec, p.IndexRows, 1, 403).cache_bytes == 101 * INDEX_ROW
    assert cost(spec, p.IndexRows, 2, 402).num_ops == 2 * (100 + 101) * 8 * 32


def test_rows_written(spec: ModelSpec) -> None:
    """Every token enters the window and the rings; an entry is written when its last token comes."""
    assert cost(spec, p.WindowRows, 3, 0).store_bytes == 3 * KV_ROW
    orders = [(op.group, i) for i, op in enumerate(op for op in spec.program.ops if isinstance(op, p.Compress))]
    state = {"csa": (CSA_STATE, KV_ROW), "index": (INDEX_STATE, INDEX_ROW), "hca": (HCA_STATE, KV_ROW)}
    for group, number in orders:
        ring, row = state[group]
        ratio = 128 if group == "hca" else 4
        made = cost(spec, p.Compress, 1, 2 * ratio - 1, number)
        assert made.store_bytes == ring + row
        # Seven tokens before it with overlap, 127 without.
        assert made.cache_bytes == (7 if ratio == 4 else 127) * ring
        between = cost(spec, p.Compress, 1, 2 * ratio, number)
        assert (between.store_bytes, between.cache_bytes) == (ring, 0)
        first = cost(spec, p.Compress, ratio, 0, number)
        assert (first.store_bytes, first.cache_bytes) == (ratio * ring + row, 0)


def test_classes_of_ops(spec: ModelSpec) -> None:
    assert {op_class(op) for op in spec.program.ops} == {
        "linear", "experts", "attention", "indexer", "streams", "other",
    }  # fmt: skip
    costs: dict[str, Any] = step_cost(spec.program, declared_formats(spec.tensors), 1, 1, 100)
    assert sum(c.weight_bytes + c.cache_bytes for c in costs.values()) == decode_bytes(
        spec.program, declared_formats(spec.tensors), 100
    )
    assert costs["indexer"].cache_bytes == 25 * INDEX_ROW


def test_one_million_tokens_of_flash_cost_the_indexer_most() -> None:
    """21 layers scan 262,144 index rows of 68 bytes; attention reads 640 rows there and 8,320 in ratio-128 layers."""
    config = json.loads((Path(__file__).parents[1] / "models/deepseek_v4/flash_0731.json").read_text())
    flash = describe(Checkpoint("safetensors", Path("flash"), [], config, {}))
    costs = step_cost(flash.program, declared_formats(flash.tensors), 1, 1, (1 << 20) - 2)
    assert costs["indexer"].cache_bytes == 21 * 262_143 * 68
    rows = 2 * 128 + 21 * (128 + 512) + 20 * (128 + 8191)
    assert costs["attention"].cache_bytes == rows * 584
