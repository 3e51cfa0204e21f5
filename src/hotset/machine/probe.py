"""The ceilings: what this process can read per second and compute per second, with the threads it may use.

Engines are judged against these numbers, so the read loop must be the best one known (its source is
native/kernels/probe_kernels.h), and every number is a median of samples with its spread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hotset.errors import InternalError, MachineError
from hotset.machine import cuda
from hotset.machine.cuda import GpuReport, measure_gpus
from hotset.machine.files import ROOT, read_table, read_text
from hotset.machine.gpus import Gpus, read_gpus
from hotset.machine.matrix import (
    CACHES_PER_BUFFER,
    CHUNK_BYTES,
    MIN_BUFFER_BYTES,
    READ_STEP_BYTES,
    MatrixPlan,
    PathRow,
    measure_matrix,
    plan_matrix,
)
from hotset.machine.memory import MemoryState, read_memory
from hotset.machine.native import isa_in_use, native_module
from hotset.machine.numa_calls import try_numa_calls
from hotset.machine.samples import FULL, MIN_SAMPLES, Effort, Samples, machine_errors
from hotset.machine.storage import StorageReport, measure_storage
from hotset.machine.teams import Seats, has_many_nodes, pick_teams
from hotset.machine.topology import Topology, default_threads, pick_cpus, read_topology
from hotset.units import MIB, format_bytes

#: Distances of the software prefetch that are tried; 0 leaves it to the hardware.
PREFETCH_BYTES = (0, 1024, 2048, 4096)
METER_BUFFER_BYTES = 512 * MIB
#: A few of thousands of samples are far off (the thread was stopped), so medians of as many groups are what is kept.
NUM_GROUPS = 10


@dataclass(frozen=True)
class CacheRow:
    """Bytes read per second from a cache, by all threads together."""

    level: int
    num_threads: int
    bytes_per_thread: int
    bytes_per_s: Samples


@dataclass(frozen=True)
class ComputeRow:
    """Operations per second (a multiply and its add are two), by threads of one node together."""

    node_id: int
    kind: str
    instruction: str
    num_threads: int
    ops_per_s: Samples


@dataclass(frozen=True)
class StepRow:
    """What a team of one node costs, in seconds: to start and end a job (``run_s``), to meet once (``barrier_s``), and
    to hand a vector of 4 KiB around, which is what an op costs however small it is (``exchange_s``)."""

    node_id: int
    num_threads: int
    run_s: Samples
    barrier_s: Samples
    exchange_s: Samples


@dataclass(frozen=True)
class ProbeReport:
    """Everything that one probe measured.

    ``ceiling`` are bytes per second read by all threads at once, each from its own node; ``notes`` say what was not
    measured and why.
    """

    isa: str
    threads_reason: str
    cpus: tuple[int, ...]
    buffer_bytes: int
    huge_bytes: int  # of the buffer, how much lies in huge pages
    prefetch_bytes: int
    chunk_bytes: int
    write_instruction: str
    ceiling: Samples
    paths: tuple[PathRow, ...]
    caches: tuple[CacheRow, ...]
    computes: tuple[ComputeRow, ...]
    steps: tuple[StepRow, ...]
    storage: StorageReport
    gpus: GpuReport
    notes: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "isa": self.isa,
            "num_threads": len(self.cpus),
            "threads_reason": self.threads_reason,
            "cpus": list(self.cpus),
            "buffer_bytes": self.buffer_bytes,
            "huge_bytes": self.huge_bytes,
            "prefetch_bytes": self.prefetch_bytes,
            "chunk_bytes": self.chunk_bytes,
            "write_instruction": self.write_instruction,
            "ceiling_bytes_per_s": self.ceiling.to_json(),
            "paths": [row.to_json() for row in self.paths],
            "caches": [_row_json(row) for row in self.caches],
            "computes": [_row_json(row) for row in self.computes],
            "steps": [_row_json(row) for row in self.steps],
            "storage": self.storage.to_json(),
            "gpu_paths": [path.to_json() for path in self.gpus.paths],
            "no_gpu": self.gpus.absence,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def _row_json(row: CacheRow | ComputeRow | StepRow) -> dict[str, Any]:
    return {name: value.to_json() if isinstance(value, Samples) else value for name, value in vars(row).items()}


class Buffers(Protocol):
    """``hotset._native.ProbeBuffers``; see native/src/probe.h for the rules."""

    def read(
        self, isa: str, cpus: list[int], bytes: int, prefetch_bytes: int, seconds: float, min_samples: int
    ) -> list[float]: ...


class CeilingMeter:
    """Measures read bandwidth and arithmetic rates again and again, with a buffer that stays allocated.

    A context manager. Between measurements its threads do not exist, so it can be interleaved with the
    work that it is the ceiling of: ``cpus`` are those of that work, one thread each.
    """

    def __init__(
        self,
        cpus: Sequence[int],
        *,
        buffer_bytes: int = METER_BUFFER_BYTES,
        choice_seconds: float = FULL.choice_seconds,
        topology: Topology | None = None,
    ) -> None:
        self.topology = topology or read_topology()
        self.cpus = tuple(cpus)
        self.isa = isa_in_use()
        nodes = self.topology.cpus_by_node(self.cpus)
        self.buffer_bytes = buffer_size(self.topology, self.cpus, buffer_bytes, read_memory())
        before = _huge_bytes()
        with machine_errors():
            native = native_module()
            self._buffers: Buffers | None = native.ProbeBuffers(
                [list(cpus) for cpus in nodes], [native.ANY_NODE] * len(nodes), self.buffer_bytes // len(nodes)
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
        return measure_compute(self.isa, kind, self.cpus[:num_threads], seconds)

    def _read(self, cpus: tuple[int, ...], num_bytes: int, prefetch: int, seconds: float) -> Samples:
        if self._buffers is None:
            raise InternalError("a closed meter was asked to measure")
        with machine_errors():
            values = self._buffers.read(self.isa, list(cpus), num_bytes, prefetch, seconds, MIN_SAMPLES)
        return Samples(tuple(values))

    def close(self) -> None:
        """Give the memory back."""
        self._buffers = None

    def __enter__(self) -> CeilingMeter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def measure_compute(isa: str, kind: str, cpus: Sequence[int], seconds: float) -> Samples:
    """Operations per second of ``kind`` by a thread on each of ``cpus`` together."""
    with machine_errors():
        return Samples(tuple(native_module().probe_compute(isa, kind, list(cpus), seconds, MIN_SAMPLES)))


@dataclass(frozen=True)
class Probe:
    """What :func:`probe` measures: planned first, so that the number of steps is known, and what will be left out.

    ``threads`` is what the user asked for, on each node.
    """

    topology: Topology
    matrix: MatrixPlan
    gpus: Gpus
    models: Path
    threads: int | None = None
    chunk_bytes: int = CHUNK_BYTES
    effort: Effort = FULL

    @property
    def num_steps(self) -> int:
        """How often :func:`probe` calls ``step``, with GPUs once more for each."""
        return 5 + len(self.matrix.pairs()) + len(self.gpus.found)

    def ceiling_cpus(self) -> tuple[tuple[int, ...], str]:
        """CPUs that read at once, those of a run with all cores or the threads asked for, and why so many."""
        if self.threads is not None:
            return tuple(cpu for cpus in self.matrix.consumers.values() for cpu in cpus), "asked for"
        return Seats(pick_teams(self.topology)).cpus, default_threads(self.topology)[1]


def plan_probe(
    topology: Topology,
    memory: MemoryState,
    models: Path,
    *,
    threads: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    effort: Effort = FULL,
) -> Probe:
    """Plan a probe of this machine. ``models`` is a folder on the file system to measure; it need not exist yet.

    Raises:
        RequestError: more threads than this process may use.
        MachineError: nothing can be measured, for want of memory.
    """
    pick_cpus(topology, threads or 1)
    calls = try_numa_calls(topology.allowed_nodes[0]) if has_many_nodes(topology) else None
    gpus = read_gpus(topology)
    topology = topology.with_gpu_memory(gpus.memory_nodes)
    matrix = plan_matrix(topology, memory, threads, effort.buffer_bytes, calls)
    return Probe(topology, matrix, gpus, models, threads, chunk_bytes, effort)


def probe(plan: Probe, step: Callable[[str], None] = lambda label: None) -> ProbeReport:
    """Measure everything; ``step`` is told what is measured."""
    begin = time.perf_counter()
    topology, effort = plan.topology, plan.effort
    cpus, reason = plan.ceiling_cpus()
    step(f"placing the buffer and choosing a prefetch distance, threads: {len(cpus)}")
    with CeilingMeter(
        cpus, buffer_bytes=effort.buffer_bytes, choice_seconds=effort.choice_seconds, topology=topology
    ) as meter:
        ceiling = meter.measure_read(effort.row_seconds)
        step("cache read")
        caches = tuple(
            CacheRow(level, count, num_bytes, meter.measure_cached(num_bytes, effort.row_seconds, count))
            for level, count, num_bytes in _cache_rows(topology, meter)
        )
    paths, problems = measure_matrix(
        plan.matrix, isa=meter.isa, prefetch_bytes=meter.prefetch_bytes, chunk_bytes=plan.chunk_bytes,
        effort=effort, step=step,
    )  # fmt: skip
    step("arithmetic")
    computes = _compute_rows(plan, meter)
    step("fixed costs of a team")
    steps = _step_rows(plan, meter.isa)
    step(f"storage of {plan.models}")
    storage = measure_storage(plan.models, effort)
    gpus = measure_gpus(
        cuda.load_library(), plan.gpus, [target.node_id for target in plan.matrix.targets if target.kind == "cpu"],
        _HostBuffers(plan.matrix).open, effort.row_seconds, step,
    )  # fmt: skip
    return ProbeReport(
        isa=meter.isa,
        threads_reason=reason,
        cpus=meter.cpus,
        buffer_bytes=meter.buffer_bytes,
        huge_bytes=meter.huge_bytes,
        prefetch_bytes=meter.prefetch_bytes,
        chunk_bytes=plan.chunk_bytes,
        write_instruction=native_module().probe_write_instruction(meter.isa),
        ceiling=ceiling,
        paths=paths,
        caches=caches,
        computes=computes,
        steps=steps,
        storage=storage,
        gpus=gpus,
        notes=(*plan.matrix.skipped, *problems, *gpus.problems),
        seconds=time.perf_counter() - begin,
    )


@dataclass(frozen=True)
class _HostBuffers:
    """Host memory for copies of GPUs: in a target's node as the matrix has it."""

    matrix: MatrixPlan

    def open(self, node_id: int, num_bytes: int) -> tuple[Any, int]:
        target = next(target for target in self.matrix.targets if target.node_id == node_id)
        native = native_module()
        # First touch by CPUs of the node itself where it has some.
        cpus = self.matrix.consumers.get(node_id) or next(iter(self.matrix.consumers.values()))
        node = node_id if target.is_bound else native.ANY_NODE
        buffers = native.ProbeBuffers([list(cpus)], [node], num_bytes)
        return buffers, buffers.address(0)


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


def _compute_rows(plan: Probe, meter: CeilingMeter) -> tuple[ComputeRow, ...]:
    """One thread of the first node, and all of each."""
    rows = []
    effort = plan.effort.shared(len(plan.matrix.consumers))
    for place, (node_id, cpus) in enumerate(plan.matrix.consumers.items()):
        for kind, instruction in meter.compute_kinds():
            for count in sorted({1, len(cpus)} if place == 0 else {len(cpus)}):
                rate = measure_compute(meter.isa, kind, cpus[:count], effort.row_seconds / 2)
                rows.append(ComputeRow(node_id, kind, instruction, count, rate))
    return tuple(rows)


def _step_rows(plan: Probe, isa: str) -> tuple[StepRow, ...]:
    rows = []
    effort = plan.effort.shared(len(plan.matrix.consumers))
    for node_id, cpus in plan.matrix.consumers.items():
        with machine_errors():
            found = native_module().probe_steps(isa, list(cpus), effort.row_seconds, 100 * NUM_GROUPS)
        medians = [_group_medians(values) for values in (found.run_s, found.barrier_s, found.exchange_s)]
        rows.append(StepRow(node_id, len(cpus), *medians))
    return tuple(rows)


def _group_medians(values: Sequence[float]) -> Samples:
    size = len(values) // NUM_GROUPS
    return Samples(tuple(statistics.median(values[i * size : (i + 1) * size]) for i in range(NUM_GROUPS)))


def _huge_bytes() -> int:
    """Bytes of this process's anonymous memory that lie in huge pages (0 where the kernel does not say)."""
    return read_table(read_text(ROOT, "/proc/self/smaps_rollup") or "").get("AnonHugePages", 0)
