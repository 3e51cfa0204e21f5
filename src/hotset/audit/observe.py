"""Reading a process of a run from outside: its pages, its threads, its cgroups, and who else takes the memory.

Nothing here stops the process or needs root, but /proc shows numa_maps and smaps of a process to its owner only. What
cannot be read is :class:`Unknown`, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import hotset
from hotset.audit.record import (
    GroupState,
    ModelFile,
    Moment,
    ProcessId,
    Region,
    RunRecord,
    Seat,
    ThreadState,
)
from hotset.errors import MachineError
from hotset.machine.cgroups import cgroup_path
from hotset.machine.files import ROOT, list_names, read_int, read_table, read_text
from hotset.machine.memory import UNLIMITED_BYTES
from hotset.machine.tasks import read_boot_id, read_task
from hotset.machine.verify import locate_by_maps
from hotset.units import KIB, MIB

EVENTS = ("high", "max", "oom", "oom_kill", "oom_group_kill")
"""Of memory.events: kept back above memory.high, pages given up at memory.max, no memory, processes ended for it."""
LEAST_NEIGHBOUR_BYTES = 256 * MIB
"""Smaller processes are not looked at."""


@dataclass(frozen=True)
class Unknown:
    """What cannot be known here, and why."""

    reason: str


@dataclass(frozen=True)
class Neighbour:
    """Another process and its memory by node, without file cache; None where the kernel does not tell which node."""

    pid: int
    name: str
    num_bytes: int
    by_node: Mapping[int, int] | None


@dataclass(frozen=True)
class Observed:
    """What was seen of a run. ``ended`` is None while the process lives; otherwise the record stands for it."""

    ended: str | None
    regions: tuple[Region, ...] | Unknown
    moment: Moment
    hotset: str
    files: Mapping[str, ModelFile | None] | Unknown
    cgroup_limits: Mapping[str, int] | Unknown
    profile_id: str | Unknown | None
    neighbours: tuple[Neighbour, ...] | Unknown


def observe(record: RunRecord, profile_id: str | None, root: Path = ROOT) -> Observed:
    """Look at the run of ``record`` now. ``profile_id`` is that of this machine's measured profile."""
    is_here = record.process.boot_id == read_boot_id(root)
    ended, regions = _ended(record, is_here, root), record.regions
    found: tuple[Region, ...] | Unknown = regions
    if ended is None:
        found = read_regions(record, root)
        if not isinstance(found, Unknown) and regions and not any(_num_present(region) for region in found):
            ended, found = f"process {record.process.pid} closed its engine", regions
    past = Unknown(ended or "")
    pid = str(record.process.pid)
    return Observed(
        ended=ended,
        regions=found,
        moment=read_moment(pid, record.seats, root) if ended is None else record.latest,
        hotset=hotset.__version__,
        files=_files(record, is_here),
        cgroup_limits=read_limits(pid, root) if ended is None else past,
        profile_id=profile_id if is_here else Unknown("the run was before the last boot, or on another machine"),
        neighbours=read_neighbours(record, root) if ended is None else past,
    )


def read_process(pid: int | None = None, root: Path = ROOT) -> ProcessId:
    """Name a process so that it is not mistaken later; this one without ``pid``. MachineError when there is none."""
    process: int | str = "self" if pid is None else pid
    number = pid
    if number is None:
        number = int((read_text(root, "/proc/self/stat") or "0").split()[0])
    task = read_task(process, number, root)
    if task is None:
        raise MachineError(f"there is no process {number}")
    return ProcessId(number, task.start_ticks, read_boot_id(root))


def _ended(record: RunRecord, is_here: bool, root: Path) -> str | None:
    if not is_here:
        return "the run was before the last boot, or on another machine"
    pid = record.process.pid
    task = read_task(pid, pid, root)
    if task is None:
        return f"process {pid} has ended"
    return (
        None if task.start_ticks == record.process.start_ticks else f"process {pid} has ended, another has its number"
    )


def _num_present(region: Region) -> int:
    return sum(count for node, count in region.pages.items() if node >= 0)


def read_regions(record: RunRecord, root: Path = ROOT) -> tuple[Region, ...] | Unknown:
    """Where the pages of the record's regions are now."""
    directory = f"/proc/{record.process.pid}"
    numa_maps, smaps = read_text(root, f"{directory}/numa_maps"), read_text(root, f"{directory}/smaps")
    if numa_maps is None:
        return Unknown(f"{directory}/numa_maps cannot be read: another user's process, or a kernel without NUMA")
    found = locate_by_maps(record.regions, record.machine.page_bytes, numa_maps, smaps)
    planned = [region.planned_huge_bytes for region in record.regions]
    return tuple(
        Region(r.name, r.address, r.num_bytes, r.node, huge, dict(r.pages), r.huge_bytes, r.swapped_bytes, r.located_by)
        for r, huge in zip(found, planned, strict=True)
    )


def read_moment(process: str, seats: tuple[Seat, ...], root: Path = ROOT) -> Moment:
    """Threads and cgroups of a process ("self" for this one); threads that are gone are left out."""
    threads = []
    for seat in seats:
        task = read_task(process, seat.thread_id, root)
        if task is not None:
            threads.append(
                ThreadState(
                    seat.thread, task.allowed_cpus, task.last_cpu, task.minor_faults, task.major_faults,
                    task.num_switches, task.num_preemptions,
                )
            )  # fmt: skip
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Moment(now, tuple(threads), read_groups(process, root))


def read_groups(process: str, root: Path = ROOT) -> GroupState:
    """What the memory and CPU cgroups of a process count, those around them included."""
    events: dict[str, int] = {}
    pressure: dict[str, float] = {}
    for group in cgroup_path(root, "memory", process):
        name = "memory.events" if group.version == 2 else "memory.oom_control"
        table = read_table(read_text(root, f"{group.directory}/{name}") or "")
        events |= {f"{group.directory}/{name} {event}": table[event] for event in EVENTS if event in table}
        text = read_text(root, f"{group.directory}/memory.pressure")
        if text is not None and not pressure:
            pressure[f"{group.directory}/memory.pressure"] = _full_pressure(text)
    text = read_text(root, "/proc/pressure/memory")
    if not pressure and text is not None:
        pressure["/proc/pressure/memory"] = _full_pressure(text)
    periods, throttled = {}, {}
    for group in cgroup_path(root, "cpu", process):
        name = f"{group.directory}/cpu.stat"
        table = read_table(read_text(root, name) or "")
        if "nr_periods" in table:
            periods[name], throttled[name] = table["nr_periods"], table.get("nr_throttled", 0)
    return GroupState(events, periods, throttled, pressure)


def _full_pressure(text: str) -> float:
    """Percent of the last ten seconds in which every task waited for memory."""
    match = re.search(r"^full avg10=([0-9.]+)", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


def read_limits(process: str, root: Path = ROOT) -> dict[str, int]:
    """Limits of memory in bytes, by the file that sets each."""
    limits = {}
    for group in cgroup_path(root, "memory", process):
        names = ("memory.max", "memory.high") if group.version == 2 else ("memory.limit_in_bytes",)
        for name in names:
            limit = read_int(root, f"{group.directory}/{name}")
            if limit is not None and limit < UNLIMITED_BYTES:
                limits[f"{group.directory}/{name}"] = limit
    return limits


def _files(record: RunRecord, is_here: bool) -> Mapping[str, ModelFile | None] | Unknown:
    found: dict[str, ModelFile | None] = {}
    for file in record.files:
        try:
            stat = Path(file.path).stat()
        except OSError:
            found[file.path] = None
        else:
            found[file.path] = ModelFile(file.path, stat.st_size, stat.st_mtime_ns)
    if not is_here and not any(found.values()):
        return Unknown("the model's files are not here")
    return found


def read_neighbours(record: RunRecord, root: Path = ROOT) -> tuple[Neighbour, ...]:
    """Processes that hold much memory, the largest first; the audited one is left out."""
    nodes = [node.node_id for node in record.machine.nodes if node.total_bytes]
    found = []
    for name in list_names(root, "/proc"):
        if name.isdecimal() and int(name) != record.process.pid:
            status = read_text(root, f"/proc/{name}/status") or ""
            table = read_table(status)
            num_bytes = sum(table.get(field, 0) for field in ("RssAnon", "RssShmem", "HugetlbPages"))
            if num_bytes >= LEAST_NEIGHBOUR_BYTES:
                title = status.partition("\n")[0].partition(":")[2].strip()
                by_node = {nodes[0]: num_bytes} if len(nodes) == 1 else _by_node(root, name)
                found.append(Neighbour(int(name), title, num_bytes, by_node))
    return tuple(sorted(found, key=lambda neighbour: -neighbour.num_bytes))


def _by_node(root: Path, pid: str) -> dict[int, int] | None:
    text = read_text(root, f"/proc/{pid}/numa_maps")
    if text is None:
        return None
    found: dict[int, int] = {}
    for line in text.splitlines():
        size = re.search(r" kernelpagesize_kB=(\d+)", line)
        if size and (" anon=" in line or " huge " in line):
            for node, count in re.findall(r" N(\d+)=(\d+)", line):
                found[int(node)] = found.get(int(node), 0) + int(count) * int(size[1]) * KIB
    return found
