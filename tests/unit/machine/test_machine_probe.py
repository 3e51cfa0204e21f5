"""What the probe asks of the native module, and what it makes of the answers. The numbers themselves are not tested."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_probe import FakeNative, use_native
from machine_trees import GIB, FakeRoot, epyc_9354_nps4, gh200

from hotset.errors import MachineError, RequestError
from hotset.machine.gpus import Gpus
from hotset.machine.matrix import plan_matrix
from hotset.machine.measured import measured_profile
from hotset.machine.memory import MemoryState, MemoryTerm, read_memory
from hotset.machine.numa_calls import NumaCalls
from hotset.machine.probe import FULL, CeilingMeter, Probe, buffer_size, plan_probe, probe
from hotset.machine.profile import Profile
from hotset.machine.samples import QUICK, Effort, Samples
from hotset.machine.topology import Topology, read_topology
from hotset.units import MIB

SMALL = Effort(GIB, 0.01, 0.01, 20 * MIB, 0.01)
WORKS = NumaCalls(None, None, None, True)
PLENTY = MemoryState((MemoryTerm("test", 16 * GIB, 16 * GIB),))


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNative]:
    fake = FakeNative()
    use_native(monkeypatch, fake)
    yield fake


def planned(topology: Topology, memory: MemoryState, models: Path) -> Probe:
    matrix = plan_matrix(topology, memory, None, SMALL.buffer_bytes, WORKS)
    return Probe(topology, matrix, Gpus((), "none"), models, effort=SMALL)


def test_probe_measures_every_row_and_tells_each_step(machine: FakeRoot, native: FakeNative, tmp_path: Path) -> None:
    topology = read_topology(machine.path)
    plan = planned(topology, read_memory(machine.path), tmp_path / "models")
    steps: list[str] = []
    report = probe(plan, steps.append)
    assert len(steps) == plan.num_steps
    assert [(row.level, row.num_threads) for row in report.caches] == [(1, 1), (1, 4), (2, 1), (2, 4), (3, 1), (3, 4)]
    assert report.prefetch_bytes == 2048, "the distance that read fastest"
    assert report.ceiling == Samples((40.0, 42.0, 41.0))
    assert [(row.kind, row.num_threads, row.ops_per_s.median) for row in report.computes] == [
        ("int8", 1, 100.0), ("int8", 4, 400.0), ("f32", 1, 100.0), ("f32", 4, 400.0),
    ]  # fmt: skip
    (path,) = report.paths
    assert [(count, samples.median) for count, samples in path.reads] == [(1, 11.0), (2, 21.0), (4, 41.0)]
    assert (path.threads, path.latency_s.median) == (4, 1e-7)
    assert report.storage.num_bytes == SMALL.file_bytes and not list(tmp_path.glob("*hotset*")), "the file is gone"


def test_the_profile_of_two_modules_has_every_pair(machine: FakeRoot, native: FakeNative, tmp_path: Path) -> None:
    """CPUs of one node, memory of a node and of a GPU: names, kinds, nodes and rates of each arrive in the profile."""
    gh200(machine)
    topology, memory = read_topology(machine.path), read_memory(machine.path)
    report = probe(planned(topology, memory, tmp_path))
    profile = measured_profile(report, topology, memory, "2026-11-30T00:00:00+00:00")
    assert [(m.name, m.kind, m.node, m.num_bytes) for m in profile.memories] == [
        ("node0", "ddr", 0, 490037 * MIB), ("hbm0", "hbm", 1, 97280 * MIB),
    ]  # fmt: skip
    (consumer,) = profile.consumers
    assert (consumer.name, consumer.near, consumer.num_cores) == ("cpu0", "node0", 72)
    assert (consumer.rates, consumer.step_s) == ({"int8": 7200.0, "f32": 7200.0}, 3e-6)
    assert {(path.consumer, path.memory) for path in profile.paths} == {("cpu0", "node0"), ("cpu0", "hbm0")}
    for path in profile.paths:
        assert path.spread is not None and path.spread[0] <= path.read_bytes_per_s <= path.spread[1]
        assert (path.chunk_bytes_per_s, path.write_bytes_per_s, path.latency_s) == (9 * 72, 7 * 72, 1e-7)
        assert path.reads == tuple((count, 10.0 * count + 1) for count in (1, 2, 4, 8, 16, 32, 64, 72))
    assert Profile.from_json(profile.to_json(), "test") == profile and profile.storage_bytes_per_s


def test_cached_parts_fit_their_cache_together(machine: FakeRoot, native: FakeNative, tmp_path: Path) -> None:
    """A part as large as the shared cache, times the threads, measures DRAM and calls it L3."""
    probe(planned(read_topology(machine.path), read_memory(machine.path), tmp_path))
    parts = {(len(cpus), num_bytes) for _, cpus, num_bytes, _ in native.reads if num_bytes}
    assert parts == {(1, 16 << 10), (4, 16 << 10), (1, 512 << 10), (4, 512 << 10), (1, 4 * MIB), (4, 2 * MIB)}
    assert all(num_bytes % 1024 == 0 for _, num_bytes in parts)


def test_every_node_gets_its_own_buffer(machine: FakeRoot, native: FakeNative) -> None:
    """One buffer on one node measures the link between sockets."""
    machine.write("/sys/devices/system/node/online", "0-1")
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        machine.write(f"/sys/devices/system/node/node{node}/cpulist", cpus)
    CeilingMeter((0, 1, 2, 3), topology=read_topology(machine.path), buffer_bytes=GIB)
    assert native.made == [([[0, 1], [2, 3]], [-1, -1], GIB // 2)]


def test_meter_uses_the_cpus_of_the_team(machine: FakeRoot, native: FakeNative) -> None:
    """A run on other CPUs than the first ones (--nodes 1) was held against the ceiling of the first ones."""
    with CeilingMeter((2, 3), topology=read_topology(machine.path)) as meter:
        assert meter.cpus == (2, 3)
        assert meter.measure_read(0.1).median == 21.0
        assert meter.measure_compute("f32").median == 200.0
        assert native.reads[-1] == ("avx2", [2, 3], 0, 2048)


def test_the_ceiling_is_that_of_a_team_on_every_node(machine: FakeRoot, native: FakeNative, tmp_path: Path) -> None:
    """As many threads as asked for on each node; without a number, those of a run with all cores."""
    epyc_9354_nps4(machine)
    topology = read_topology(machine.path)
    plan = replace(planned(topology, PLENTY, tmp_path), threads=None)
    assert plan.ceiling_cpus()[0] == tuple(range(64))
    two = replace(plan, threads=2, matrix=plan_matrix(topology, PLENTY, 2, GIB, None))
    assert two.ceiling_cpus() == (tuple(cpu for node in range(8) for cpu in (8 * node, 8 * node + 1)), "asked for")


def test_buffer_is_far_larger_than_the_cache_and_at_most_half_of_memory(machine: FakeRoot) -> None:
    topology = read_topology(machine.path)
    assert buffer_size(topology, (0, 1), FULL.buffer_bytes, PLENTY) == GIB
    assert buffer_size(topology, (0, 1), MIB, PLENTY) == 4 * 16 * MIB
    little = MemoryState((MemoryTerm("test", GIB, 200 * MIB),))
    assert buffer_size(topology, (0, 1), FULL.buffer_bytes, little) == 100 * MIB
    with pytest.raises(MachineError, match=r"measuring needs 128\.00 MiB"):
        buffer_size(topology, (0, 1), FULL.buffer_bytes, MemoryState((MemoryTerm("test", GIB, 100 * MIB),)))


def test_too_many_threads_are_refused_before_anything_is_measured(machine: FakeRoot, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="9 threads asked for, this process may use 8 CPUs"):
        plan_probe(read_topology(machine.path), PLENTY, tmp_path, threads=9)


def test_many_rows_share_the_time_of_a_few() -> None:
    """Sixty-four pairs of an eight-node machine at full length would take minutes."""
    assert FULL.shared(1) == FULL.shared(8) == FULL and FULL.shared(64).row_seconds == FULL.row_seconds / 8
    assert QUICK.shared(64).buffer_bytes == QUICK.buffer_bytes


def test_samples_keep_order_and_spread() -> None:
    samples = Samples((4.0, 1.0, 2.0))
    assert samples.to_json() == {"median": 2.0, "min": 1.0, "max": 4.0, "samples": [4.0, 1.0, 2.0]}
    assert samples.inverse() == Samples((0.25, 1.0, 0.5)) and samples.times(2) == Samples((8.0, 2.0, 4.0))
