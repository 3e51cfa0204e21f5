"""What the probe asks of the native module, and what it makes of the answers. The numbers themselves are not tested."""

from __future__ import annotations

from typing import Any

import pytest
from machine_trees import GIB, FakeRoot

from hotset.errors import MachineError
from hotset.machine import probe as probing
from hotset.machine.memory import MemoryState, MemoryTerm
from hotset.machine.probe import (
    FULL,
    CeilingMeter,
    ProbeReport,
    ReadRow,
    Samples,
    buffer_size,
    num_steps,
    probe,
    read_bandwidth,
    thread_counts,
)
from hotset.machine.topology import read_topology
from hotset.units import MIB


class FakeNative:
    """Bandwidth is 10 a thread; a prefetch of 2048 bytes gives 1 more."""

    def __init__(self) -> None:
        self.made: list[tuple[Any, ...]] = []
        self.reads: list[tuple[Any, ...]] = []

    def isas(self) -> list[str]:
        return ["avx2"]

    def ProbeBuffers(self, nodes: list[list[int]], num_bytes: int, huge: int) -> FakeNative:
        self.made.append((nodes, num_bytes, huge))
        return self

    def read(self, isa: str, cpus: list[int], num_bytes: int, prefetch: int, seconds: float, least: int) -> list[float]:
        self.reads.append((isa, cpus, num_bytes, prefetch))
        rate = 10.0 * len(cpus) + (prefetch == 2048)
        return [rate - 1, rate + 1, rate]

    def probe_computes(self, isa: str) -> list[tuple[str, str]]:
        return [("int8", "vpmaddubsw"), ("f32", "vfmadd")]

    def probe_compute(self, isa: str, kind: str, cpus: list[int], seconds: float, least: int) -> list[float]:
        return [100.0 * len(cpus)]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> FakeNative:
    fake = FakeNative()
    monkeypatch.setattr("hotset.machine.native.native_module", lambda: fake)
    monkeypatch.setattr(probing, "native_module", lambda: fake)
    monkeypatch.setattr(probing, "isa_in_use", lambda: "avx2")
    return fake


def test_probe_measures_every_row_and_tells_each_step(machine: FakeRoot, native: FakeNative) -> None:
    topology = read_topology(machine.path)
    steps: list[str] = []
    report = probe(topology, step=steps.append)
    assert len(steps) == num_steps(topology, None)
    assert [(row.level, row.num_threads) for row in report.reads] == [
        ("DRAM", 1), ("DRAM", 2), ("DRAM", 3), ("DRAM", 4),
        ("L1", 1), ("L1", 4), ("L2", 1), ("L2", 4), ("L3", 1), ("L3", 4),
    ]  # fmt: skip
    assert report.prefetch_bytes == 2048, "the distance that read fastest"
    assert report.read_bytes_per_s == 41.0
    assert report.reads[0].bytes_per_s == Samples((10.0, 12.0, 11.0))
    assert [(row.kind, row.num_threads, row.ops_per_s.median) for row in report.computes] == [
        ("int8", 1, 100.0), ("int8", 4, 400.0), ("f32", 1, 100.0), ("f32", 4, 400.0),
    ]  # fmt: skip


def test_cached_parts_fit_their_cache_together(machine: FakeRoot, native: FakeNative) -> None:
    """A part as large as the shared cache, times the threads, measures DRAM and calls it L3."""
    probe(read_topology(machine.path))
    parts = {(len(cpus), num_bytes) for _, cpus, num_bytes, _ in native.reads if num_bytes}
    assert parts == {(1, 16 << 10), (4, 16 << 10), (1, 512 << 10), (4, 512 << 10), (1, 4 * MIB), (4, 2 * MIB)}
    assert all(num_bytes % 1024 == 0 for _, num_bytes in parts)


def test_every_node_gets_its_own_buffer(machine: FakeRoot, native: FakeNative) -> None:
    """One buffer on one node measures the link between sockets."""
    machine.write("/sys/devices/system/node/online", "0-1")
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        machine.write(f"/sys/devices/system/node/node{node}/cpulist", cpus)
    CeilingMeter(topology=read_topology(machine.path), buffer_bytes=GIB)
    assert native.made == [([[0, 1], [2, 3]], GIB // 2, 2 * MIB)]


def test_meter_uses_the_threads_asked_for(machine: FakeRoot, native: FakeNative) -> None:
    with CeilingMeter(2, topology=read_topology(machine.path)) as meter:
        assert meter.cpus == (0, 1)
        assert meter.measure_read(0.1).median == 21.0
        assert meter.measure_compute("f32").median == 200.0
        assert native.reads[-1] == ("avx2", [0, 1], 0, 2048)


def test_read_bandwidth_measures_once(native: FakeNative) -> None:
    assert read_bandwidth(1).median == 11.0


def test_buffer_is_far_larger_than_the_cache_and_at_most_half_of_memory(machine: FakeRoot) -> None:
    topology = read_topology(machine.path)
    plenty = MemoryState((MemoryTerm("test", 16 * GIB, 16 * GIB),))
    assert buffer_size(topology, (0, 1), FULL.buffer_bytes, plenty) == GIB
    assert buffer_size(topology, (0, 1), MIB, plenty) == 4 * 16 * MIB
    little = MemoryState((MemoryTerm("test", GIB, 200 * MIB),))
    assert buffer_size(topology, (0, 1), FULL.buffer_bytes, little) == 100 * MIB
    with pytest.raises(MachineError, match=r"measuring needs 128\.00 MiB"):
        buffer_size(topology, (0, 1), FULL.buffer_bytes, MemoryState((MemoryTerm("test", GIB, 100 * MIB),)))


@pytest.mark.parametrize(
    ("most", "counts"),
    [(1, [1]), (3, [1, 2, 3]), (8, [*range(1, 9)]), (9, [*range(1, 10)]), (24, [*range(1, 9), 12, 16, 24])],
)
def test_thread_counts_end_with_the_most(most: int, counts: list[int]) -> None:
    assert thread_counts(most) == counts


def test_fewest_threads_that_saturate() -> None:
    """On a 72-core socket 32 threads saturate memory and more are slower (D036)."""
    rows = tuple(ReadRow("DRAM", n, 1, Samples((rate,))) for n, rate in ((1, 30.0), (2, 58.5), (4, 60.0), (8, 55.0)))
    report = ProbeReport("avx2", "", tuple(range(8)), 1, 0, 0, rows, (), 1.0)
    assert report.saturating_threads == 2
    assert report.read_bytes_per_s == 55.0, "the ceiling is that of the threads in use"


def test_samples_keep_order_and_spread() -> None:
    samples = Samples((3.0, 1.0, 2.0))
    assert samples.to_json() == {"median": 2.0, "min": 1.0, "max": 3.0, "samples": [3.0, 1.0, 2.0]}
