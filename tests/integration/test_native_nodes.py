"""Execution over nodes: the same bits as on one, and every byte on the node that the plan names.

This machine may have one node only, so the nodes are made up: they change the layout of memory and the order of
threads, and nothing binds. The guests of tests/guest have real ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dsv4_native import v4_described, v4_native
from helpers import FORMATS, Described, described, native, plan_of, random_tokens, team, tiny
from test_native_v4_plan import MODELS

import hotset
from hotset.engine.batch import Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.machine import verify
from hotset.machine.native import available_isas
from hotset.machine.thp import read_page_bytes
from hotset.machine.verify import ABSENT, locate
from hotset.plan.budget import Plan
from hotset.plan.nodes import split_plan


def by_node(executor: NativeExecutor) -> dict[int, Counter[str]]:
    """Allocated bytes by node and the plan's names of terms."""
    names = {
        "weights of thread": "weights",
        "vectors": "weights",
        "scratch of thread": "thread scratch",
        "cache": "cache",
    }
    out: dict[int, Counter[str]] = {}
    for region in executor.regions():
        term = next((term for prefix, term in names.items() if region.name.startswith(prefix)), region.name)
        out.setdefault(region.node, Counter())[term] += region.num_bytes
    return out


def planned(plan: Plan, d: Described, num_nodes: int) -> dict[int, Counter[str]]:
    """What the executor allocates of the plan's split."""
    kept = {"weights", "cache", "thread scratch", "workspace", "attention partials", "frontier"}
    ids = list(range(num_nodes))
    nodes = split_plan(plan, d.spec, d.formats, ids, dict.fromkeys(ids, 1 << 40), read_page_bytes())
    assert sum(node.total_bytes for node in nodes) == plan.total_bytes
    return {n.node_id: Counter({name: size for name, size in n.terms.items() if size and name in kept}) for n in nodes}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("threads", "nodes"), [(2, 1), (2, 2), (4, 2), (6, 3), (3, 3)])
def test_nodes_hold_what_the_plan_says(format: str, threads: int, nodes: int, tmp_path: Path) -> None:
    """Bug class: a node that is full although the plan fits, and so a process that the kernel kills."""
    d = described(tmp_path, tiny(format, is_tied=False))
    with d.checkpoint:
        plan = plan_of(d, threads, context=1100, max_sequences=2, prefill_chunk=20)
        executor = NativeExecutor(d.spec, d.formats, plan, team(threads, nodes), available_isas()[0])
        assert by_node(executor) == planned(plan, d, nodes)


@pytest.mark.parametrize("name", MODELS)
def test_nodes_hold_what_the_plan_says_with_experts(name: str, tmp_path: Path) -> None:
    """Stacks of experts, tables and frontiers."""
    d = v4_described(tmp_path, MODELS[name])
    with d.checkpoint:
        plan = plan_of(d, 4, context=600, max_sequences=2, prefill_chunk=32)
        executor = NativeExecutor(d.spec, d.formats, plan, team(4, 2), available_isas()[0])
        assert by_node(executor) == planned(plan, d, 2)


def logits(executor: NativeExecutor, tokens: np.ndarray, cuts: list[int], blocks: list[int]) -> list[bytes]:
    """Logits of every token, of steps that end at ``cuts``, in blocks that need not be neighbours."""
    out, start = [], 0
    for end in cuts:
        rows = np.arange(end - start, dtype=np.int32)
        count = -(-end // 256)
        segment = Segment(0, end - start, start, np.array(blocks[:count], np.int32))
        out += [row.tobytes() for row in executor.step(StepBatch(tokens[start:end], [segment], rows))]
        start = end
    return out


@pytest.mark.parametrize("format", ["F32", "Q4_K", "Q8_0"])
def test_nodes_change_no_bit(format: str, tmp_path: Path) -> None:
    """Prompt, small steps and decode over several blocks: cache rows are found again wherever their block lies."""
    tokens = random_tokens(700)
    cuts = [500, 505, *range(506, 514), 640, *range(641, 650), 700]
    d = described(tmp_path, tiny(format))
    with d.checkpoint:
        want = logits(native(d, 1, context=1024), tokens, cuts, [0, 1, 2])
        for threads, nodes, blocks in ((2, 2, [0, 1, 2]), (4, 2, [3, 0, 2]), (6, 3, [2, 3, 1])):
            executor = native(d, threads, context=1024, nodes=nodes)
            assert logits(executor, tokens, cuts, blocks) == want


@pytest.mark.parametrize("name", MODELS)
def test_nodes_change_no_bit_of_compressed_rows(name: str, tmp_path: Path) -> None:
    """Window rings, compressed rows and the indexer."""
    d = v4_described(tmp_path, MODELS[name])
    tokens = random_tokens(600, d.spec.vocab_size)
    cuts = [300, 310, *range(311, 316), 600]
    with d.checkpoint:
        want = logits(v4_native(d, 1, context=768), tokens, cuts, [0, 1, 2])
        for threads, nodes in ((2, 2), (4, 2)):
            executor = v4_native(d, threads, context=768, nodes=nodes)
            assert logits(executor, tokens, cuts, [2, 0, 1]) == want


def test_blocks_are_copied_from_where_they_lie(tmp_path: Path) -> None:
    """Prefix reuse copies blocks by number; every number names other memory, none is left out or beyond the end."""
    d = described(tmp_path, tiny("F32"))
    with d.checkpoint:
        plan = replace(plan_of(d, 4, context=512), num_blocks=7)
        executor = NativeExecutor(d.spec, d.formats, plan, team(4, 2), available_isas()[0])
        executor.load(d.checkpoint, d.account)
        for block in range(7):
            executor.restore_block(block, np.full(plan.block_bytes, block + 1, np.uint8))
        got = np.empty(plan.block_bytes, np.uint8)
        for block in range(7):
            executor.copy_block(block, got)
            assert (got == block + 1).all()


def test_maps_and_move_pages_agree(tmp_path: Path) -> None:
    """Both ways to locate pages, on memory that is touched in part: where a container forbids one the other must do."""

    def refuse(_: object) -> dict[int, int]:
        raise RuntimeError("move_pages: Operation not permitted")

    d = described(tmp_path, tiny("F32"))
    with d.checkpoint:
        executor = NativeExecutor(d.spec, d.formats, plan_of(d, 2, context=2048), team(2), available_isas()[0])
        for _ in range(2):
            asked = executor.regions()
            read = locate(asked, read_page_bytes(), refuse)
            for one, other in zip(asked, read, strict=True):
                absent = sum(count for node, count in one.pages.items() if node < 0)
                assert {node: count for node, count in one.pages.items() if node >= 0} == {
                    node: count for node, count in other.pages.items() if node >= 0
                }, one
                assert absent == other.pages.get(ABSENT, 0)
            executor.load(d.checkpoint, d.account)
        assert all(region.num_off == 0 for region in asked)


@pytest.mark.parametrize("has_maps", [True, False])
def test_large_regions_are_found_as_small_ones_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_maps: bool
) -> None:
    """By counts of the kernel or by samples, when 64 pages are many; before and after pages are written."""
    d = described(tmp_path, tiny("F32"))
    with d.checkpoint:
        executor = NativeExecutor(d.spec, d.formats, plan_of(d, 2, context=2048), team(2), available_isas()[0])
        for _ in range(2):
            asked = executor.regions()
            assert {region.located_by for region in asked} == {"move_pages"}
            with monkeypatch.context() as few:
                few.setattr(verify, "MANY_PAGES", 64)
                few.setattr(verify, "SAMPLE_PAGES", 64)
                few.setattr(verify, "DOUBT", 0.0)
                if not has_maps:
                    few.setattr(verify, "_counted_alone", lambda *_: {})
                found = executor.regions()
            large = [pair for pair in zip(asked, found, strict=True) if pair[0].num_pages > 64]
            assert large and {other.located_by for _, other in large} <= {"numa_maps", "sample"}
            assert {other.located_by for _, other in large} == {"numa_maps"} or not has_maps
            for one, other in large:
                slack = 0.2 * one.num_pages if other.located_by == "sample" else 0
                assert abs(one.num_off - other.num_off) <= slack and one.num_pages == other.num_pages
            executor.load(d.checkpoint, d.account)


def test_the_engine_tells_where_its_memory_is(tmp_path: Path) -> None:
    """After a load every page is in memory, and on a machine of one node on that."""
    d = described(tmp_path, tiny("Q8_0"))
    path = d.checkpoint.files[0]
    d.checkpoint.close()
    with hotset.load(path, threads=2, context=512) as engine:
        regions = engine.regions()
        assert {region.name for region in regions} >= {"vectors", "workspace", "weights of thread 1"}
        for region in regions:
            assert region.num_off == 0 and not region.is_off, region
            assert 0 <= region.huge_bytes <= region.num_bytes
        assert sum(node.total_bytes for node in engine.plan.nodes) == engine.plan.total_bytes
