"""Keeping the run record while an engine runs.

The recorder runs the engine's steps. Every step costs it two calls of getrusage. A step is timed op by op only on
request, a few of them spread over the run; what these read and should have taken is computed when the record is made.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

import hotset
from hotset.audit.expected import StepShape, class_samples
from hotset.audit.observe import read_limits, read_moment, read_process
from hotset.audit.record import (
    VERSION,
    Counters,
    MachineSummary,
    ModelFile,
    Moment,
    NodeSummary,
    PlanNode,
    PlanSummary,
    PlanTerm,
    Region,
    RunRecord,
    Sample,
    Seat,
    Setting,
)
from hotset.bench.conditions import commit
from hotset.checkpoint.checkpoint import Checkpoint
from hotset.engine.batch import StepBatch
from hotset.engine.engine import EngineStats
from hotset.engine.native import NativeExecutor
from hotset.machine.measured import read_measured
from hotset.machine.thp import HugePages
from hotset.machine.topology import Topology
from hotset.machine.verify import RegionPages
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Plan

WARM_UP = 4
"""Steps before faults are counted and ops are timed: the first ones load code and tables."""
SAMPLE_EVERY = 4
"""Of the steps that could be timed, one in this many is."""


@dataclass(frozen=True)
class Timed:
    """A step that was timed: its shape, its seconds, and (ns in the op, ns waiting before it) of every native op."""

    shape: StepShape
    seconds: float
    ops: tuple[tuple[int, int], ...]


class RunRecorder:
    """Implements :class:`hotset.engine.recorder.Recorder` for a native executor. Not thread-safe, as the executor."""

    def __init__(
        self,
        executor: NativeExecutor,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        formats: Mapping[str, str],
        plan: Plan,
        topology: Topology,
        asked: Mapping[str, object],
    ) -> None:
        """``asked`` are the settings by name as they were given to ``hotset.load``."""
        self._executor = executor
        self._spec = spec
        self._formats = formats
        self._plan = plan
        self._topology = topology
        self._asked = asked
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._files = tuple(_file(path) for path in checkpoint.files)
        self._limits = read_limits("self")
        self._caller = threading.get_native_id()
        self._baseline: Moment | None = None
        self._num_steps = 0
        self._counts: Counter[str] = Counter()
        self._wanted = self._eligible = 0
        self._timed: list[Timed] = []

    # Steps

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step of the executor, and time its ops when that was asked for."""
        self._num_steps += 1
        shape = self._shape_to_time(batch) if self._wanted else None
        before = resource.getrusage(resource.RUSAGE_THREAD)
        logits = self._executor.step(batch) if shape is None else self._time(batch, shape)
        after = resource.getrusage(resource.RUSAGE_THREAD)
        if self._num_steps > WARM_UP:
            self._counts["minor_faults"] += after.ru_minflt - before.ru_minflt
            self._counts["major_faults"] += after.ru_majflt - before.ru_majflt
            self._counts["preemptions"] += after.ru_nivcsw - before.ru_nivcsw
        elif self._num_steps == WARM_UP:
            self._baseline = self._moment()
        return logits

    def request_samples(self, count: int) -> None:
        """Time the ops of ``count`` of the steps to come."""
        self._wanted += count

    def _shape_to_time(self, batch: StepBatch) -> StepShape | None:
        """The shape of a step that is to be timed: all sequences of it alike, so that it can be predicted."""
        counts = {segment.count for segment in batch.segments}
        if self._num_steps <= WARM_UP or len(counts) != 1:
            return None
        self._eligible += 1
        if self._eligible % SAMPLE_EVERY:
            return None
        context = round(sum(segment.position for segment in batch.segments) / len(batch.segments))
        return StepShape(counts.pop(), len(batch.segments), context, len(batch.outputs) // len(batch.segments))

    def _time(self, batch: StepBatch, shape: StepShape) -> NDArray[np.float32]:
        self._executor.profile(True)
        begin = perf_counter()
        try:
            logits = self._executor.step(batch)
            seconds = perf_counter() - begin
            ops = tuple((ns, wait) for _, ns, wait in self._executor.op_times())
        finally:
            self._executor.profile(False)
        self._timed.append(Timed(shape, seconds, ops))
        self._wanted -= 1
        return logits

    # The record

    def _moment(self) -> Moment:
        self._caller = threading.get_native_id()
        return read_moment("self", self._seats())

    def _seats(self) -> tuple[Seat, ...]:
        seats = self._executor.seats
        thread_ids = {0: self._caller} | self._executor.thread_ids()
        # A thread that is gone has number 0, which no thread has.
        return tuple(
            Seat(thread, thread_ids.get(thread, 0), cpu, node)
            for thread, (cpu, node) in enumerate(zip(seats.cpus, seats.nodes, strict=True))
        )

    def record(self, stats: EngineStats) -> RunRecord:
        """The run record of this moment. MachineError when the measured profile of the machine is damaged."""
        profile = read_measured()
        node_ids = self._executor.seats.node_ids
        samples = tuple(
            Sample(
                timed.shape.num_tokens,
                timed.shape.num_sequences,
                timed.shape.context,
                timed.seconds,
                class_samples(
                    self._spec, self._formats, self._executor.low.ops, timed.shape, timed.ops, profile, node_ids,
                    self._plan.num_threads,
                ),
            )
            for timed in self._timed
        )  # fmt: skip
        seats = self._seats()
        return RunRecord(
            version=VERSION,
            hotset=hotset.__version__,
            commit=commit(),
            started=self._started,
            process=read_process(),
            isa=self._executor.isa,
            policy=self._executor.seats.policy,
            files=self._files,
            machine=self._machine(profile.id if profile is not None else None),
            plan=_plan_summary(self._plan),
            settings=self._settings(),
            seats=seats,
            regions=tuple(_region(region, self._topology.huge_pages) for region in self._executor.regions()),
            baseline=self._baseline,
            latest=read_moment("self", seats),
            samples=samples,
            counters=self._counters(stats),
        )

    def _machine(self, profile_id: str | None) -> MachineSummary:
        topology = self._topology
        pages = topology.huge_pages
        return MachineSummary(
            printable(topology.model),
            topology.affinity,
            tuple(NodeSummary(node.node_id, node.kind, len(node.cpus), node.total_bytes) for node in topology.nodes),
            topology.page_bytes,
            pages.page_bytes,
            pages.mode if pages.is_offered or pages.mode not in ("always", "madvise") else "off for this process",
            self._limits,
            profile_id,
        )

    def _settings(self) -> tuple[Setting, ...]:
        plan = self._plan
        formats = [group.format for group in self._spec.groups] + [group.format for group in self._spec.frontier]
        used: dict[str, object] = {
            "context": plan.context,
            "max_sequences": plan.max_sequences,
            "prefill_chunk": plan.prefill_chunk,
            "threads": plan.num_threads,
            "snapshots": plan.num_snapshots,
            "cache_format": ", ".join(dict.fromkeys(formats)),
            "nodes": ", ".join(str(node_id) for node_id in self._executor.seats.node_ids),
            "numa": self._executor.seats.policy.lower(),
        }
        names = (*self._asked, *(name for name in used if name not in self._asked))
        return tuple(
            Setting(name, _text(self._asked.get(name)), _text(used.get(name, self._asked.get(name))) or "")
            for name in names
        )

    def _counters(self, stats: EngineStats) -> Counters:
        return Counters(
            num_steps=stats.num_steps,
            num_prompt_tokens=stats.num_prompt_tokens,
            num_cached_tokens=stats.num_cached_tokens,
            num_recomputed_tokens=stats.num_recomputed_tokens,
            num_generated_tokens=stats.num_generated_tokens,
            num_lookups=stats.num_lookups,
            num_repeats=stats.num_repeats,
            num_hits=stats.num_hits,
            num_snapshots=stats.num_snapshots,
            num_used_snapshots=stats.num_used_snapshots,
            minor_faults=self._counts["minor_faults"],
            major_faults=self._counts["major_faults"],
            num_preemptions=self._counts["preemptions"],
        )


def printable(text: str) -> str:
    """``text`` on one line, without anything that a terminal obeys."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def _text(value: object) -> str | None:
    if value is None:
        return None
    return printable(", ".join(str(item) for item in value) if isinstance(value, tuple) else str(value))


def _file(path: Path) -> ModelFile:
    stat = path.stat()
    return ModelFile(printable(str(path.absolute())), stat.st_size, stat.st_mtime_ns)


def _region(region: RegionPages, pages: HugePages) -> Region:
    huge = planned_huge_bytes(region.address, region.num_bytes, pages.page_bytes) if pages.is_offered else 0
    return Region(
        region.name, region.address, region.num_bytes, region.node, huge, dict(region.pages), region.huge_bytes,
        region.swapped_bytes, region.located_by,
    )  # fmt: skip


def planned_huge_bytes(address: int, num_bytes: int, huge_page_bytes: int) -> int:
    """Bytes of the whole huge pages that lie in a region: what it can have in huge pages (``Region`` in memory.cpp)."""
    first = -(-address // huge_page_bytes)
    return max(0, (address + num_bytes) // huge_page_bytes - first) * huge_page_bytes


def _plan_summary(plan: Plan) -> PlanSummary:
    return PlanSummary(
        printable(plan.model),
        plan.context,
        plan.max_sequences,
        plan.prefill_chunk,
        plan.num_threads,
        plan.num_blocks,
        plan.block_bytes,
        tuple(PlanTerm(term.name, term.num_bytes, term.kind, printable(term.detail)) for term in plan.terms),
        tuple(PlanNode(node.node_id, node.num_threads, dict(node.terms)) for node in plan.nodes),
        plan.available_bytes,
        printable(plan.available_source),
    )
