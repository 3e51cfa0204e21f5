"""The run record: what a run planned, what it got, and what it counted. Versioned JSON, no prompts and no texts.

It is enough to audit a run that has ended, or one on another machine, and it says where to look while the run lives.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hotset.audit.strict import read_as
from hotset.checkpoint.strict_json import parse_json
from hotset.config import load_settings
from hotset.errors import MachineError, RequestError
from hotset.machine.teams import Policy
from hotset.machine.verify import LocatedBy

VERSION = 1


@dataclass(frozen=True)
class ProcessId:
    """A process, told from a later one of the same number: ``start_ticks`` after the boot ``boot_id``."""

    pid: int
    start_ticks: int
    boot_id: str


@dataclass(frozen=True)
class ModelFile:
    """A file of the model as it was when it was loaded."""

    path: str
    num_bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class NodeSummary:
    """A NUMA node of the machine. ``kind`` as in :class:`hotset.machine.nodes.Node`."""

    node_id: int
    kind: str
    num_cpus: int
    total_bytes: int


@dataclass(frozen=True)
class MachineSummary:
    """The machine of the run. ``cgroup_limits`` are bytes by the file that sets them."""

    model: str
    affinity: tuple[int, ...]
    nodes: tuple[NodeSummary, ...]
    page_bytes: int
    huge_page_bytes: int
    huge_pages: str
    cgroup_limits: Mapping[str, int]
    profile_id: str | None


@dataclass(frozen=True)
class PlanTerm:
    """One term of the plan, as in :class:`hotset.plan.budget.Term`."""

    name: str
    num_bytes: int
    kind: str
    detail: str


@dataclass(frozen=True)
class PlanNode:
    """What the plan puts on one node, by term."""

    node_id: int
    num_threads: int
    terms: Mapping[str, int]


@dataclass(frozen=True)
class PlanSummary:
    """The plan that the run was started with. ``nodes`` is empty where there is one."""

    model: str
    context: int
    max_sequences: int
    prefill_chunk: int
    num_threads: int
    num_blocks: int
    block_bytes: int
    terms: tuple[PlanTerm, ...]
    nodes: tuple[PlanNode, ...]
    available_bytes: int
    available_source: str


@dataclass(frozen=True)
class Setting:
    """What was asked for, None for nothing, and what is used."""

    name: str
    asked: str | None
    used: str


@dataclass(frozen=True)
class Region:
    """One allocation: where it was planned and where its pages are.

    ``pages`` counts pages by node; a negative key is an errno (:data:`hotset.machine.verify.ABSENT`). ``huge_bytes``
    lie in huge pages, ``swapped_bytes`` in swap; None where the kernel does not say. ``located_by`` says how the pages
    were found (:data:`hotset.machine.verify.LocatedBy`).
    """

    name: str
    address: int
    num_bytes: int
    node: int
    planned_huge_bytes: int
    pages: Mapping[int, int]
    huge_bytes: int | None
    swapped_bytes: int | None
    located_by: LocatedBy


@dataclass(frozen=True)
class Seat:
    """A thread of the team and the CPU that it was given. Thread 0 is whoever asks for answers, pinned during steps."""

    thread: int
    thread_id: int
    cpu: int
    node: int


@dataclass(frozen=True)
class ThreadState:
    """A thread as the kernel knows it: where it may run, where it ran last, and counts since it began."""

    thread: int
    allowed_cpus: tuple[int, ...]
    last_cpu: int
    minor_faults: int
    major_faults: int
    num_switches: int
    num_preemptions: int


@dataclass(frozen=True)
class GroupState:
    """What the cgroups of the process say, by file: counts of events, periods of the CPU quota, pressure in percent."""

    memory_events: Mapping[str, int]
    cpu_periods: Mapping[str, int]
    cpu_throttled: Mapping[str, int]
    memory_pressure: Mapping[str, float]


@dataclass(frozen=True)
class Moment:
    """Threads and cgroups of the process at one time (ISO)."""

    time: str
    threads: tuple[ThreadState, ...]
    groups: GroupState


@dataclass(frozen=True)
class ClassSample:
    """One op class of a profiled step: bytes read by the model's declaration, seconds of thread 0 with its waiting.

    ``expected_seconds`` is the prediction on the machine's measured profile; None where there is no profile.
    """

    name: str
    num_bytes: float
    seconds: float
    expected_seconds: float | None


@dataclass(frozen=True)
class Sample:
    """One profiled step: ``num_tokens`` of each of ``num_sequences``, with ``context`` tokens cached on average."""

    num_tokens: int
    num_sequences: int
    context: int
    seconds: float
    classes: tuple[ClassSample, ...]


@dataclass(frozen=True)
class Counters:
    """What the engine counted. Tokens are those of ended requests.

    ``num_lookups`` prompts of more than a block were looked up in the prefix cache, ``num_repeats`` of them began with
    a block that an earlier one began with, ``num_hits`` found something. Faults and preemptions are those of the thread
    that runs the engine, during steps and after the first :data:`hotset.audit.recorder.WARM_UP` of them.
    """

    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_generated_tokens: int
    num_lookups: int
    num_repeats: int
    num_hits: int
    num_snapshots: int
    num_used_snapshots: int
    minor_faults: int
    major_faults: int
    num_preemptions: int


@dataclass(frozen=True)
class RunRecord:
    """One run. ``baseline`` was taken when the model was loaded and the first steps were done, ``latest`` when the
    record was made; None before the first steps."""

    version: int
    hotset: str
    commit: str | None
    started: str
    process: ProcessId
    isa: str
    policy: Policy
    files: tuple[ModelFile, ...]
    machine: MachineSummary
    plan: PlanSummary
    settings: tuple[Setting, ...]
    seats: tuple[Seat, ...]
    regions: tuple[Region, ...]
    baseline: Moment | None
    latest: Moment
    samples: tuple[Sample, ...]
    counters: Counters

    def to_json(self) -> dict[str, object]:
        """The record as plain JSON values."""
        return asdict(self)


def parse_record(text: bytes, source: str) -> RunRecord:
    """Read a record's JSON text; ``source`` names it in errors.

    Raises:
        MachineError: no JSON, another version, or a field that is missing, unknown or of another type.
    """
    content = parse_json(text, source)
    version = content.get("version") if isinstance(content, dict) else None
    if version != VERSION:
        raise MachineError(f"{source}: not a run record of version {VERSION}", "hotset run MODEL --record FILE")
    return read_as(RunRecord, content, source)


def write_record(record: RunRecord, path: Path) -> None:
    """Write a record, readable by its owner only, and make it findable by the process's number.

    Raises:
        MachineError: it cannot be written; an older file of that name is then still whole.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(record.to_json(), file, indent=1)
                file.write("\n")
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror}", "choose another place") from error
    _register(path.absolute(), record.process.pid)


def check_writable(path: Path) -> None:
    """Refuse a place for a record before a model is loaded for it. Raises RequestError."""
    if path.is_dir():
        raise RequestError(f"{path} is a folder, expected a file for the run record", f"{path}/run.json")
    if not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        raise RequestError(f"no file can be written in {path.absolute().parent}", "choose another place")


def _register(path: Path, pid: int) -> None:
    """Leave a link by the process's number, and take away those of processes that have ended."""
    folder = load_settings().runs_dir
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for link in folder.iterdir():
            if link.stem.isdecimal() and not Path("/proc", link.stem).exists():
                link.unlink(missing_ok=True)
        part = folder / f".{pid}.{secrets.token_hex(4)}"
        part.symlink_to(path)
        part.replace(folder / f"{pid}.json")
    except OSError as error:
        hint = "set HOTSET_HOME to a folder that can be written"
        raise MachineError(f"{folder}: no link to the record can be left there: {error.strerror}", hint) from error


def record_of_process(pid: int) -> Path:
    """The record that a process wrote last. Raises MachineError."""
    link = load_settings().runs_dir / f"{pid}.json"
    if not link.exists():
        raise MachineError(
            f"process {pid} wrote no run record that can be found in {link.parent}",
            "start it with --record FILE, and give HOTSET_HOME here as it has it",
        )
    return link
