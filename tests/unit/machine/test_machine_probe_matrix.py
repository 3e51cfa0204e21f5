"""Which pairs the path matrix has, and what is left out with a reason; and the native measurements behind it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_probe import FakeNative, use_native
from hypothesis import given
from hypothesis import strategies as st
from machine_trees import GIB, FakeNode, FakeRoot, epyc_9354_nps4, gh200, write_cpus, write_nodes

from hotset.errors import MachineError
from hotset.machine.matrix import (
    MIN_BUFFER_BYTES,
    SATURATED,
    WORTHWHILE_GAIN,
    MatrixPlan,
    PathRow,
    Target,
    chunk_size,
    doublings,
    measure_matrix,
    plan_matrix,
    saturate,
)
from hotset.machine.memory import MemoryState, MemoryTerm
from hotset.machine.native import native_module
from hotset.machine.numa_calls import NumaCalls
from hotset.machine.samples import Effort, Samples
from hotset.machine.topology import Topology, read_topology
from hotset.units import MIB

PLENTY = MemoryState((MemoryTerm("test", 4096 * GIB, 4096 * GIB),))
WORKS = NumaCalls(None, None, None, True)
REFUSED = NumaCalls("refused (EPERM)", "refused (EPERM)", "refused (EPERM)", True)
TINY = Effort(64 * MIB, 0.0, 0.0, 0, 0.0)
ONE = Samples((1.0,))


def names(plan: MatrixPlan) -> list[tuple[int, int]]:
    return [(node_id, target.node_id) for target, node_id in plan.pairs()]


def measure(plan: MatrixPlan, isa: str = "avx2") -> tuple[tuple[PathRow, ...], tuple[str, ...], list[str]]:
    steps: list[str] = []
    rows, problems = measure_matrix(plan, isa=isa, prefetch_bytes=0, chunk_bytes=MIB, effort=TINY, step=steps.append)
    return rows, problems, steps


def two_nodes(machine: FakeRoot) -> Topology:
    """CPU 0 and its memory, CPU 1 and its memory: a machine that this host can act."""
    write_cpus(machine, [(0,), (1,)], ["0-1"])
    write_nodes(machine, [FakeNode(0, "0", 4096, "10 20"), FakeNode(1, "1", 4096, "20 10")])
    return read_topology(machine.path)


def test_every_node_reads_every_memory_but_gpus_read_none(machine: FakeRoot) -> None:
    """Empty nodes (those for MIG) must not be bound to, and the HBM node has no CPUs to read with."""
    gh200(machine)
    plan = plan_matrix(read_topology(machine.path), PLENTY, None, GIB, WORKS)
    assert names(plan) == [(0, 0), (0, 1)]
    assert len(plan.consumers[0]) == 72 and plan.skipped == ()
    epyc_9354_nps4(machine)
    plan = plan_matrix(read_topology(machine.path), PLENTY, None, GIB, WORKS)
    assert sorted(names(plan)) == [(a, b) for a in range(8) for b in range(8)]
    assert plan.consumers[3] == tuple(range(24, 32)), "one CPU a core, of the own node"


def test_threads_are_limited_on_each_node(machine: FakeRoot) -> None:
    epyc_9354_nps4(machine)
    plan = plan_matrix(read_topology(machine.path), PLENTY, 2, GIB, WORKS)
    assert plan.consumers == {node: (8 * node, 8 * node + 1) for node in range(8)}


def test_without_binding_only_the_own_memory_is_measured_and_it_is_said(machine: FakeRoot) -> None:
    """Pages that nobody may bind lie where they are written first: a matrix of them would be all alike."""
    plan = plan_matrix(two_nodes(machine), PLENTY, None, GIB, REFUSED)
    assert names(plan) == [(0, 0), (1, 1)] and not any(target.is_bound for target in plan.targets)
    assert plan.skipped == (
        "only the memory of the own node is measured, memory cannot be bound here: refused (EPERM)",
    )
    gh200(machine)
    plan = plan_matrix(read_topology(machine.path), PLENTY, None, GIB, REFUSED)
    assert names(plan) == [(0, 0)]
    assert plan.skipped == ("memory of node 1 is not measured: it has no CPUs, and memory cannot be bound here",)


def test_a_node_that_is_short_of_memory_is_left_out(machine: FakeRoot) -> None:
    """The kernel kills who binds more than a node has."""
    topology = two_nodes(machine)
    first, second = topology.nodes
    topology = replace(topology, nodes=(first, replace(second, available_bytes=100 * MIB)))
    plan = plan_matrix(topology, PLENTY, None, GIB, WORKS)
    assert names(plan) == [(0, 0), (1, 0)]
    assert plan.skipped == ("memory of node 1 is not measured: 100.00 MiB available there, measuring needs 128.00 MiB",)
    half = replace(second, available_bytes=800 * MIB)
    targets = plan_matrix(replace(topology, nodes=(first, half)), PLENTY, None, GIB, WORKS).targets
    assert [target.buffer_bytes for target in targets] == [GIB, 400 * MIB]
    with pytest.raises(MachineError, match="measuring needs"):
        plan_matrix(topology, MemoryState((MemoryTerm("test", GIB, MIB),)), None, GIB, WORKS)


def test_nodes_that_the_cpuset_forbids_are_left_out(machine: FakeRoot) -> None:
    two_nodes(machine)
    machine.set_affinity("0-1", "Mems_allowed_list:\t0\n")
    plan = plan_matrix(read_topology(machine.path), PLENTY, None, GIB, WORKS)
    assert names(plan) == [(0, 0), (1, 0)] and "forbids it (Mems_allowed_list)" in plan.skipped[0]


def test_latency_is_measured_before_the_circle_is_written_over(
    machine: FakeRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = FakeNative()
    use_native(monkeypatch, native)
    rows, problems, steps = measure(plan_matrix(two_nodes(machine), PLENTY, None, GIB, WORKS))
    assert len(rows) == len(steps) == 4 and problems == ()
    one_target = ["allocate", "link", "chase", "chase", *["chunks", "write", "copy"] * 2]
    assert native.calls == one_target * 2
    assert [made[1] for made in native.made] == [[0], [1]], "bound to the target"


def test_a_binding_that_is_refused_or_not_kept_is_a_note(machine: FakeRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """mbind says yes and the pages are elsewhere: the matrix would show the wrong node."""
    use_native(monkeypatch, FakeNative(refused=(1,)))
    plan = plan_matrix(two_nodes(machine), PLENTY, None, GIB, WORKS)
    rows, problems, steps = measure(plan)
    assert [row.target.node_id for row in rows] == [0, 0] and len(steps) == 4
    assert problems == ("memory of node 1 is not measured: mbind of the probe's buffer: Invalid argument",)
    stray = FakeNative()
    monkeypatch.setattr(stray, "pages", lambda region: {0: 98, 1: 2})
    use_native(monkeypatch, stray)
    assert measure(plan)[1] == (
        "2% of the buffer for node 0 lie elsewhere: {0: 98, 1: 2}",
        "98% of the buffer for node 1 lie elsewhere: {0: 98, 1: 2}",
    )

    def refuse(region: int) -> dict[int, int]:
        raise RuntimeError("move_pages: Operation not permitted")

    monkeypatch.setattr(stray, "pages", refuse)
    assert measure(plan)[1] == tuple(
        f"where the buffer for node {node_id} lies is not known: move_pages: Operation not permitted"
        for node_id in (0, 1)
    )


def test_the_search_ends_where_a_doubling_gains_little() -> None:
    """On a 72-core socket 32 threads saturate memory and more are slower (D036); all cores are a team as well."""
    rates = {1: 30.0, 2: 58.0, 4: 60.0, 8: 60.5, 16: 100.0}
    reads = saturate(lambda count: Samples((rates[count],)), 16)
    assert [count for count, _ in reads] == [1, 2, 4, 8, 16]


@given(st.integers(1, 300))
def test_thread_counts_double_and_end_with_the_most(most: int) -> None:
    counts = list(doublings(most))
    assert counts[0] == 1 and counts[-1] == most
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(counts))


@given(st.lists(st.floats(1, 100), min_size=1, max_size=6))
def test_saturating_threads_are_the_fewest_that_come_close(rates: list[float]) -> None:
    counts = list(doublings(2 ** (len(rates) - 1)))
    by_count = dict(zip(counts, rates, strict=True))
    reads = saturate(lambda count: Samples((by_count[count],)), counts[-1])
    row = PathRow(0, Target(0, "cpu", 1, 1, False), reads, ONE, ONE, ONE, ONE)
    best = max(samples.median for _, samples in reads)
    assert row.read.median == best
    for count, samples in reads:
        assert count >= row.threads or samples.median < SATURATED * best
    searched = reads[:-1] if reads[-1][0] == counts[-1] else reads
    assert all(b[1].median >= WORTHWHILE_GAIN * a[1].median for a, b in itertools.pairwise(searched[:-1]))
    assert reads[-1][0] == counts[-1]


@given(st.integers(1, 64 * MIB), st.integers(1, 300))
def test_a_chunk_is_whole_steps_for_every_thread(wanted: int, num_threads: int) -> None:
    size = chunk_size(wanted, num_threads, MIN_BUFFER_BYTES)
    assert size % 1024 == 0 and size >= 1024 * num_threads and size <= max(wanted, 1024 * num_threads)


# The native part, on this host's one node.


@pytest.fixture
def buffers() -> Callable[..., Any]:
    native = native_module()

    def make(cpus: list[int], num_bytes: int) -> Any:
        return native.ProbeBuffers([cpus], [native.ANY_NODE], num_bytes)

    return make


def host_cpus(count: int) -> list[int]:
    cpus = read_topology().affinity
    if len(cpus) < count:
        pytest.skip(f"needs {count} CPUs")
    return list(cpus[:count])


def test_the_latency_circle_visits_every_line_once(buffers: Callable[..., Any]) -> None:
    """A random permutation has short circles: the chase would stay in a cache and call it memory."""
    (cpu,) = host_cpus(1)
    memory = buffers([cpu], 4 * MIB)
    with pytest.raises(RuntimeError, match="not linked"):
        memory.walk()
    assert memory.link(MIB) == memory.walk() == MIB // 64
    assert memory.link(64 * MIB) == memory.walk() == memory.bytes_per_region // 64, "no further than the buffer"
    assert all(rate > 0 for rate in memory.chase(cpu, 0.0, 5))
    memory.write(native_module().isas()[0], [cpu], 0.0, 1)
    with pytest.raises(RuntimeError, match="not linked"):
        memory.chase(cpu, 0.0, 1)


@pytest.mark.parametrize("chunk", [1024, 5120, 96 << 10])
def test_random_chunks_cover_the_buffer_once(buffers: Callable[..., Any], chunk: int) -> None:
    """All threads together read whole chunks, each once in a round, and not in order."""
    cpus = host_cpus(2)
    memory = buffers(cpus, 2 * MIB)
    plan = memory.plan_chunks(cpus, chunk)
    num_chunks = memory.bytes_per_region // chunk
    covered = sorted(read for reads in plan for read in reads)
    at = 0
    for offset, num_bytes in covered:
        assert offset == at and num_bytes % 1024 == 0
        at += num_bytes
    assert at == num_chunks * chunk
    first = [offset for offset, _ in plan[1]]
    assert len(first) == num_chunks and first != sorted(first)
    assert [offset // chunk for offset, _ in plan[1]] == [offset // chunk for offset, _ in plan[0] or plan[1]]


def test_chunks_that_do_not_fit_are_refused(buffers: Callable[..., Any]) -> None:
    (cpu,) = host_cpus(1)
    memory = buffers([cpu], MIB)
    for chunk in (0, 1000, 2 * MIB):
        with pytest.raises(RuntimeError, match="a chunk of the probe is a multiple of 1024 bytes"):
            memory.plan_chunks([cpu], chunk)


class OneNode:
    """The native module of this host, whose one node acts every node of a faked machine."""

    def __init__(self) -> None:
        self.native = native_module()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def ProbeBuffers(self, cpus: list[list[int]], nodes: list[int], num_bytes: int) -> Any:
        return self.native.ProbeBuffers(cpus, [0 if node >= 0 else node for node in nodes], num_bytes)


def test_two_nodes_acted_by_this_host_give_a_full_matrix(machine: FakeRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way with the real module: every pair is there, and every median lies within its spread."""
    if host_cpus(2) != [0, 1]:
        pytest.skip("needs CPUs 0 and 1")
    use_native(monkeypatch, OneNode())
    plan = plan_matrix(two_nodes(machine), PLENTY, None, 64 * MIB, WORKS)
    try:
        native_module().ProbeBuffers([[0]], [0], MIB)
    except RuntimeError:
        plan = replace(plan, targets=tuple(replace(target, is_bound=False) for target in plan.targets))
        assert names(plan) == [(0, 0), (1, 1)]
    rows, _, _ = measure(plan, native_module().isas()[0])
    assert [(row.node_id, row.target.node_id) for row in rows] == names(plan)
    for row in rows:
        for samples in (*(reads for _, reads in row.reads), row.chunks, row.write, row.copy, row.latency_s):
            assert 0 < samples.low <= samples.median <= samples.high
            assert len(samples.values) >= 5
