"""The ceilings: what this process can read per second and compute per second, with the threads it may use.

Engines are judged against these numbers, so the read loop must be the best one known (its source is
native/kernels/probe_kernels.h), and every number is a median of samples with its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hotset.errors import InternalError, MachineError
from hotset.machine.files import ROOT, read_table, read_text
from hotset.machine.memory import MemoryState, read_memory
from hotset.machine.native import isa_in_use, native_module
from hotset.machine.topology import Topology, default_threads, pick_cpus, read_topology
from hotset.units import GIB, MIB, format_bytes

#: A buffer of this many times the last-level cache leaves little of it cached from one pass to the next.
CACHES_PER_BUFFER = 4
#: Distances of the software prefetch that are tried; 0 leaves it to the hardware.
PREFETCH_BYTES = (0, 1024, 2048, 4096)
MIN_SAMPLES = 5
#: Fewer threads that reach this share of the best bandwidth are enough.
SATURATED = 0.97
MIN_BUFFER_BYTES = 64 * MIB
METER_BUFFER_BYTES = 512 * MIB
READ_STEP_BYTES = 1024


@dataclass(frozen=True)
class Effort:
    """How much the probe may cost: buffer size and seconds per measured row."""

    buffer_bytes: int
    row_seconds: float
    choice_seconds: float


FULL = Effort(buffer_bytes=GIB, row_seconds=0.3, choice_seconds=0.15)
QUICK = Effort(buffer_bytes=256 * MIB, row_seconds=0.06, choice_seconds=0.03)


@dataclass(frozen=True)
class Samples:
    """Rates per second from several short runs, in the order in which they were taken."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.low, "max": self.high, "samples": list(self.values)}


@dataclass(frozen=True)
class ReadRow:
    """Bytes read per second from one level, by all threads together."""

    level: str
    num_threads: int
    bytes_per_thread: int
    bytes_per_s: Samples


@dataclass(frozen=True)
class ComputeRow:
    """Operations per second (a multiply and its add are two), by all threads together."""

    kind: str
    instruction: str
    num_threads: int
    ops_per_s: Samples


@dataclass(frozen=True)
class ProbeReport:
    """Everything that one probe measured."""

    isa: str
    threads_reason: str
    cpus: tuple[int, ...]
    buffer_bytes: int
    huge_bytes: int  # of the buffer, how much lies in huge pages
    prefetch_bytes: int
    reads: tuple[ReadRow, ...]
    computes: tuple[ComputeRow, ...]
    seconds: float

    @property
    def read_bytes_per_s(self) -> float:
        """The ceiling: DRAM read bandwidth with all threads."""
        return [row for row in self.reads if row.level == "DRAM"][-1].bytes_per_s.median

    @property
    def saturating_threads(self) -> int:
        """Fewest threads whose DRAM read bandwidth is within 3 % of the best."""
        rows = [row for row in self.reads if row.level == "DRAM"]
        best = max(row.bytes_per_s.median for row in rows)
        return next(row.num_threads for row in rows if row.bytes_per_s.median >= SATURATED * best)

    def to_json(self) -> dict[str, Any]:
        return {
            "isa": self.isa,
            "num_threads": len(self.cpus),
            "threads_reason": self.threads_reason,
            "cpus": list(self.cpus),
            "buffer_bytes": self.buffer_bytes,
            "huge_bytes": self.huge_bytes,
            "prefetch_bytes": self.prefetch_bytes,
            "saturating_threads": self.saturating_threads,
            "reads": [
                {
                    "level": row.level,
                    "num_threads": row.num_threads,
                    "bytes_per_thread": row.bytes_per_thread,
                    "bytes_per_s": row.bytes_per_s.to_json(),
                }
                for row in self.reads
            ],
            "computes": [
                {
                    "kind": row.kind,
                    "instruction": row.instruction,
                    "num_threads": row.num_threads,
                    "ops_per_s": row.ops_per_s.to_json(),
                }
                for row in self.computes
            ],
            "seconds": self.seconds,
        }


class Buffers(Protocol):
    """``hotset._native.ProbeBuffers``; see native/src/probe.h for the rules."""

    def read(
        self, isa: str, cpus: list[int], bytes: int, prefetch_bytes: int, seconds: float, min_samples: int
    ) -> list[float]: ...


class CeilingMeter:
    """Measures read bandwidth and arithmetic rates again and again, with a buffer that stays allocated.

    A context manager. Between measurements its threads do not exist, so it can be interleaved with the
    work that it is the ceiling of.
    """

    def __init__(
        self,
        threads: int | None = None,
        *,
        buffer_bytes: int = METER_BUFFER_BYTES,
        choice_seconds: float = FULL.choice_seconds,
        topology: Topology | None = None,
    ) -> None:
        self.topology = topology or read_topology()
        self.cpus = pick_cpus(self.topology, threads or default_threads(self.topology)[0])
        self.isa = isa_in_use()
        nodes = self.topology.cpus_by_node(self.cpus)
        self.buffer_bytes = buffer_size(self.topology, self.cpus, buffer_bytes, read_memory())
        before = _huge_bytes()
        with _machine_errors():
            self._buffers: Buffers | None = native_module().ProbeBuffers(
                [list(cpus) for cpus in nodes], self.buffer_bytes // len(nodes), self.topology.huge_pages.page_bytes
            )
        self.huge_bytes = max(0, _huge_bytes() - before)
        self.prefetch_bytes = max(
            PREFETCH_BYTES, key=lambda distance: self._read(self.cpus, 0, distance, choice_seconds).median
        )

    def measure_read(self, seconds: float = 0.3, num_threads: int | None = None) -> Samples:
        """Bytes read per second by ``num_threads`` (default: all) threads together, each its own contiguous part."""
        return self._read(self.cpus[:num_threads], 0, self.prefetch_bytes, seconds)

    def measure_cached(self, bytes_per_thread: int, seconds: float, num_threads: int) -> Samples:
        """The same for a part of each thread that stays in a cache."""
        return self._read(self.cpus[:num_threads], bytes_per_thread, 0, seconds)

    def compute_kinds(self) -> list[tuple[str, str]]:
        """(kind, instruction) of every arithmetic rate that this processor has: int8, int8_matrix, bf16, f32."""
        return list(native_module().probe_computes(self.isa))

    def measure_compute(self, kind: str, seconds: float = 0.1, num_threads: int | None = None) -> Samples:
        """Operations per second of ``kind`` by ``num_threads`` (default: all) threads together."""
        cpus = list(self.cpus[:num_threads])
        with _machine_errors():
            return Samples(tuple(native_module().probe_compute(self.isa, kind, cpus, seconds, MIN_SAMPLES)))

    def _read(self, cpus: tuple[int, ...], num_bytes: int, prefetch: int, seconds: float) -> Samples:
        if self._buffers is None:
            raise InternalError("a closed meter was asked to measure")
        with _machine_errors():
            values = self._buffers.read(self.isa, list(cpus), num_bytes, prefetch, seconds, MIN_SAMPLES)
        return Samples(tuple(values))

    def close(self) -> None:
        """Give the memory back."""
        self._buffers = None

    def __enter__(self) -> CeilingMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_bandwidth(threads: int | None = None, seconds: float = 0.5) -> Samples:
    """Measure DRAM read bandwidth once, in bytes per second. For repeated measurements keep a :class:`CeilingMeter`."""
    with CeilingMeter(threads) as meter:
        return meter.measure_read(seconds)


def probe(
    topology: Topology,
    *,
    threads: int | None = None,
    effort: Effort = FULL,
    step: Callable[[str], None] = lambda label: None,
) -> ProbeReport:
    """Measure every ceiling; ``step`` is told what is measured, ``num_steps`` times."""
    begin = time.perf_counter()
    default, reason = default_threads(topology)
    step(f"placing the buffer and choosing a prefetch distance, threads: {threads or default}")
    with CeilingMeter(
        threads, buffer_bytes=effort.buffer_bytes, choice_seconds=effort.choice_seconds, topology=topology
    ) as meter:
        counts = thread_counts(len(meter.cpus))
        reads = []
        for count in counts:
            step(f"DRAM read, threads: {count}")
            samples = meter.measure_read(effort.row_seconds, count)
            reads.append(ReadRow("DRAM", count, meter.buffer_bytes // count, samples))
        step("cache read")
        for level, count, num_bytes in _cache_rows(topology, meter):
            samples = meter.measure_cached(num_bytes, effort.row_seconds, count)
            reads.append(ReadRow(f"L{level}", count, num_bytes, samples))
        step("arithmetic")
        computes = _compute_rows(meter, effort)
        return ProbeReport(
            isa=meter.isa,
            threads_reason=reason if threads is None else "asked for",
            cpus=meter.cpus,
            buffer_bytes=meter.buffer_bytes,
            huge_bytes=meter.huge_bytes,
            prefetch_bytes=meter.prefetch_bytes,
            reads=tuple(reads),
            computes=tuple(computes),
            seconds=time.perf_counter() - begin,
        )


def num_steps(topology: Topology, threads: int | None) -> int:
    """How often :func:`probe` calls ``step``."""
    return 3 + len(thread_counts(threads or default_threads(topology)[0]))


def thread_counts(most: int) -> list[int]:
    """Thread counts to measure: every one up to 8, then 12, 16, 24, 32, 48, ..., and the most."""
    counts = list(range(1, min(most, 8) + 1))
    power = 8
    while power < most:
        counts += [count for count in (power * 3 // 2, power * 2) if count < most]
        power *= 2
    return counts if counts[-1] == most else [*counts, most]


def buffer_size(topology: Topology, cpus: tuple[int, ...], wanted_bytes: int, memory: MemoryState) -> int:
    """Bytes to read from: far more than the caches, and at most half of what is available.

    MachineError when that is too little to measure DRAM at all.
    """
    size = max(wanted_bytes, CACHES_PER_BUFFER * topology.last_level_bytes(cpus))
    size = min(size, memory.available_bytes // 2)
    if size < MIN_BUFFER_BYTES:
        raise MachineError(
            f"{memory.describe()}, measuring needs {format_bytes(2 * MIN_BUFFER_BYTES)}", "stop other programs first"
        )
    return size


def _cache_rows(topology: Topology, meter: CeilingMeter) -> list[tuple[int, int, int]]:
    """(level, threads, bytes per thread), each part well inside its cache, for one thread and for all."""
    rows = []
    for level in (1, 2, 3):
        for count in sorted({1, len(meter.cpus)}):
            cpus = meter.cpus[:count]
            cache = next((c for c in topology.caches if c.level == level and cpus[0] in c.cpus), None)
            if cache is None:
                continue
            sharers = len(set(cache.cpus) & set(cpus))
            # Half of a private cache; of a shared one a quarter at most, because others use it as well.
            part = min(cache.num_bytes // 2, cache.num_bytes // (4 if level == 3 else 2)) // max(1, sharers // 2)
            rows.append((level, count, max(READ_STEP_BYTES, part // READ_STEP_BYTES * READ_STEP_BYTES)))
    return rows


def _compute_rows(meter: CeilingMeter, effort: Effort) -> list[ComputeRow]:
    return [
        ComputeRow(kind, instruction, count, meter.measure_compute(kind, effort.row_seconds / 2, count))
        for kind, instruction in meter.compute_kinds()
        for count in sorted({1, len(meter.cpus)})
    ]


@contextmanager
def _machine_errors() -> Iterator[None]:
    """What the native probe raises is about memory and CPUs that the system refuses."""
    try:
        yield
    except RuntimeError as error:
        raise MachineError(str(error)) from error


def _huge_bytes() -> int:
    """Bytes of this process's anonymous memory that lie in huge pages (0 where the kernel does not say)."""
    return read_table(read_text(ROOT, "/proc/self/smaps_rollup") or "").get("AnonHugePages", 0)
