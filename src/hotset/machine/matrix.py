"""The path matrix: how fast the CPUs of each node read and write the memory of each node.

Every pair is measured with 1, 2, 4, ... threads until more of them gain little, in memory that is bound to its node.
Where binding is refused, the pages go where the threads run that write them first, so only the memory of the own node
can be measured; :attr:`MatrixPlan.skipped` says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.errors import MachineError
from hotset.machine.memory import MemoryState
from hotset.machine.native import native_module
from hotset.machine.nodes import Node, name_nodes
from hotset.machine.numa_calls import NumaCalls
from hotset.machine.samples import MIN_SAMPLES, Effort, Samples, machine_errors
from hotset.machine.teams import has_many_nodes
from hotset.machine.topology import Topology, default_threads
from hotset.machine.verify import OFF_SHARE
from hotset.units import MIB, format_bytes

#: A buffer of this many times the last-level cache leaves little of it cached from one pass to the next.
CACHES_PER_BUFFER = 4
MIN_BUFFER_BYTES = 64 * MIB
#: The bytes of one matrix of one expert: 2,048 x 6,144 weights of 4 bits, as in GLM-5.2.
CHUNK_BYTES = 6 * MIB
READ_STEP_BYTES = 1024
#: A doubling of the threads that gains less ends the search for more.
WORTHWHILE_GAIN = 1.03
#: Fewer threads that reach this share of the best bandwidth are enough.
SATURATED = 0.97


@dataclass(frozen=True)
class Target:
    """A node whose memory is measured, in a buffer of ``buffer_bytes``; ``is_bound`` or placed by first touch."""

    node_id: int
    kind: str
    total_bytes: int
    buffer_bytes: int
    is_bound: bool


@dataclass(frozen=True)
class MatrixPlan:
    """What will be measured: for each consumer (a node with CPUs) its CPUs, the targets, what is left out and why."""

    consumers: Mapping[int, tuple[int, ...]]
    targets: tuple[Target, ...]
    skipped: tuple[str, ...]

    def pairs(self) -> list[tuple[Target, int]]:
        """(target, node of the CPUs) in the order of measuring: all consumers of a target, then the next target."""
        return [(target, node_id) for target in self.targets for node_id in self.readers(target)]

    def readers(self, target: Target) -> list[int]:
        """Nodes whose CPUs can be measured on this target: only its own where pages are placed by first touch."""
        own = [node_id for node_id in self.consumers if node_id == target.node_id]
        return list(self.consumers) if target.is_bound or len(self.consumers) == 1 else own


@dataclass(frozen=True)
class PathRow:
    """One pair. Bytes per second; ``latency_s`` are seconds of one read that needs the one before.

    ``reads`` are by number of threads. Chunks, writes and copies use the number that read fastest.
    """

    node_id: int
    target: Target
    reads: tuple[tuple[int, Samples], ...]
    chunks: Samples
    write: Samples
    copy: Samples
    latency_s: Samples

    @property
    def read(self) -> Samples:
        """With the number of threads that reads fastest."""
        return max((samples for _, samples in self.reads), key=lambda samples: samples.median)

    @property
    def threads(self) -> int:
        """Fewest threads whose read bandwidth is within 3 % of the best."""
        return next(count for count, samples in self.reads if samples.median >= SATURATED * self.read.median)

    def to_json(self) -> dict[str, Any]:
        return {
            "cpus_of_node": self.node_id,
            "memory_of_node": self.target.node_id,
            "is_bound": self.target.is_bound,
            "buffer_bytes": self.target.buffer_bytes,
            "threads": self.threads,
            "reads": [{"num_threads": count, "bytes_per_s": samples.to_json()} for count, samples in self.reads],
            "chunk_bytes_per_s": self.chunks.to_json(),
            "write_bytes_per_s": self.write.to_json(),
            "copy_bytes_per_s": self.copy.to_json(),
            "latency_s": self.latency_s.to_json(),
        }


def plan_matrix(
    topology: Topology, memory: MemoryState, threads: int | None, buffer_bytes: int, calls: NumaCalls | None
) -> MatrixPlan:
    """Decide what to measure. ``threads`` is the most for each node; ``calls`` is None where there is one node only.

    Raises:
        MachineError: no node with CPUs and memory that can be measured.
    """
    consumers = find_consumers(topology, threads)
    cpus = tuple(cpu for own in consumers.values() for cpu in own)
    skipped: list[str] = []
    targets: list[Target] = []
    can_bind = calls is None or calls.can_bind
    for node in topology.nodes:
        reason = _obstacle(topology, node, can_bind)
        if reason == "":
            continue
        least = max(buffer_bytes, CACHES_PER_BUFFER * topology.last_level_bytes(cpus))
        room = min(node.free_bytes if node.kind == "gpu" else node.available_bytes, memory.available_bytes)
        # A bound buffer beyond what its node has is not refused: the kernel kills the process.
        size = min(least, room // 2)
        if reason is None and size < MIN_BUFFER_BYTES:
            reason = f"{format_bytes(room)} available there, measuring needs {format_bytes(2 * MIN_BUFFER_BYTES)}"
        if reason is not None:
            skipped.append(f"memory of {name_nodes((node.node_id,))} is not measured: {reason}")
            continue
        targets.append(Target(node.node_id, node.kind, node.total_bytes, size, has_many_nodes(topology) and can_bind))
    if calls is not None and not can_bind and len(consumers) > 1:
        skipped.append(f"only the memory of the own node is measured, memory cannot be bound here: {calls.mbind}")
    plan = MatrixPlan(consumers, tuple(targets), tuple(skipped))
    if not plan.pairs():
        raise MachineError("; ".join(skipped) or "no node has both CPUs and memory", "stop other programs first")
    return plan


def find_consumers(topology: Topology, threads: int | None) -> dict[int, tuple[int, ...]]:
    """For each node with CPUs that this process may use: one CPU a core, at most ``threads`` or what the quota pays."""
    found = {}
    for node in topology.nodes:
        cpus = topology.node_cpus(node.node_id) if node.cpus else ()
        if not cpus:
            continue
        num_cores = sum(bool(set(core) & set(cpus)) for core in topology.cores)
        most = min(num_cores, default_threads(topology)[0]) if threads is None else threads
        found[node.node_id] = cpus[:most]
    if not found:
        raise MachineError("no node has CPUs that this process may use", "hotset machine shows the nodes")
    return found


def _obstacle(topology: Topology, node: Node, can_bind: bool) -> str | None:
    """Why the memory of a node cannot be measured; None when it can, "" when there is nothing to say."""
    if node.total_bytes == 0:
        return ""
    if node.node_id not in topology.allowed_nodes:
        return "the cpuset of this process forbids it (Mems_allowed_list)"
    if not node.cpus and not can_bind:
        return "it has no CPUs, and memory cannot be bound here"
    return None


def measure_matrix(
    plan: MatrixPlan,
    *,
    isa: str,
    prefetch_bytes: int,
    chunk_bytes: int,
    effort: Effort,
    step: Callable[[str], None],
) -> tuple[tuple[PathRow, ...], tuple[str, ...]]:
    """Measure every pair of the plan; ``step`` is told each. The second result says what went wrong on the way."""
    effort = effort.shared(len(plan.pairs()))
    rows: list[PathRow] = []
    problems: list[str] = []
    for target in plan.targets:
        readers = plan.readers(target)
        cpus = [cpu for node_id in readers for cpu in plan.consumers[node_id]]
        native = native_module()
        node = target.node_id if target.is_bound else native.ANY_NODE
        try:
            buffers = native.ProbeBuffers([cpus], [node], target.buffer_bytes)
        except RuntimeError as error:
            problems.append(f"memory of {name_nodes((target.node_id,))} is not measured: {error}")
            for _ in readers:
                step(f"memory of {name_nodes((target.node_id,))}: refused")
            continue
        problem = _misplaced(buffers, target)
        problems += [problem] if problem else []
        pair = _Pair(buffers, isa, prefetch_bytes, chunk_bytes, effort.row_seconds)
        with machine_errors():
            # The circle of the latency lies in the buffer itself, so everyone walks it before anybody writes.
            buffers.link(target.buffer_bytes // 2)
            latencies = {node_id: pair.latency(plan.consumers[node_id]) for node_id in readers}
            for node_id in readers:
                step(f"memory of {name_nodes((target.node_id,))}, CPUs of {name_nodes((node_id,))}")
                rows.append(pair.measure(node_id, target, plan.consumers[node_id], latencies[node_id]))
        del buffers, pair  # before the next ones are made
    return tuple(rows), tuple(problems)


def _misplaced(buffers: Any, target: Target) -> str | None:
    """What to say when the kernel put the buffer elsewhere in spite of the binding, or does not tell; else None."""
    if not target.is_bound:
        return None
    try:
        pages: Mapping[int, int] = buffers.pages(0)
    except RuntimeError as error:  # containers may allow mbind and refuse move_pages
        return f"where the buffer for {name_nodes((target.node_id,))} lies is not known: {error}"
    off = 1 - pages.get(target.node_id, 0) / sum(pages.values())
    if off <= OFF_SHARE:
        return None
    return f"{off:.0%} of the buffer for {name_nodes((target.node_id,))} lie elsewhere: {dict(pages)}"


@dataclass(frozen=True)
class _Pair:
    """The measurements on one buffer."""

    buffers: Any
    isa: str
    prefetch_bytes: int
    chunk_bytes: int
    seconds: float

    def latency(self, cpus: Sequence[int]) -> Samples:
        return Samples(tuple(self.buffers.chase(cpus[0], self.seconds, MIN_SAMPLES))).inverse()

    def measure(self, node_id: int, target: Target, cpus: Sequence[int], latency_s: Samples) -> PathRow:
        def read(count: int) -> Samples:
            few, buffers = list(cpus[:count]), self.buffers
            return Samples(tuple(buffers.read(self.isa, few, 0, self.prefetch_bytes, self.seconds, MIN_SAMPLES)))

        reads = saturate(read, len(cpus))
        best = max(reads, key=lambda row: row[1].median)[0]
        team = list(cpus[:best])
        size = chunk_size(self.chunk_bytes, best, target.buffer_bytes)
        buffers, seconds = self.buffers, self.seconds
        chunks = buffers.read_chunks(self.isa, team, size, self.prefetch_bytes, seconds, MIN_SAMPLES)
        write = buffers.write(self.isa, team, seconds, MIN_SAMPLES)
        copy = buffers.copy(self.isa, team, seconds, MIN_SAMPLES)
        return PathRow(
            node_id, target, reads, Samples(tuple(chunks)), Samples(tuple(write)), Samples(tuple(copy)), latency_s
        )


def saturate(measure: Callable[[int], Samples], most: int) -> tuple[tuple[int, Samples], ...]:
    """Measure with 1, 2, 4, ... threads until more of them gain under 3 %, and with ``most``.

    A team of all cores may read slower than a smaller one (Grace: 348 GB/s with 32, 330 with 72), and it is the one
    that prompts want.
    """
    rows: list[tuple[int, Samples]] = []
    for count in doublings(most):
        rows.append((count, measure(count)))
        if len(rows) > 1 and rows[-1][1].median < WORTHWHILE_GAIN * rows[-2][1].median:
            break
    if rows[-1][0] < most:
        rows.append((most, measure(most)))
    return tuple(rows)


def doublings(most: int) -> Iterator[int]:
    """1, 2, 4, ... below ``most``, and ``most``."""
    yield from (1 << power for power in range(math.ceil(math.log2(most))))
    yield most


def chunk_size(wanted: int, num_threads: int, buffer_bytes: int) -> int:
    """Bytes of a chunk: whole read steps, at least one for each thread, and at least four chunks in the buffer."""
    size = min(wanted, buffer_bytes // 4) // READ_STEP_BYTES
    return max(size, num_threads) * READ_STEP_BYTES
