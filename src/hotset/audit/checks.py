"""The lines of an audit: pure functions of the record and of what was seen. Every threshold is named here and is said.

A line is green, red, or grey where it cannot be known, with the reason. Red comes with a hint.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hotset.audit.observe import Observed, Unknown
from hotset.audit.record import ClassSample, GroupState, Region, RunRecord, Seat, ThreadState
from hotset.machine.files import format_cpu_list
from hotset.machine.verify import OFF_SHARE, SAMPLE_PAGES
from hotset.units import MIB, format_bytes, format_rate

HUGE_SHARE = 0.9
"""Of the huge pages that a region could have. A region may also lack a single one: memory was in pieces there."""
PRESSURE_PERCENT = 10.0
"""Of ten seconds in which everything waited for memory."""
THROTTLED_SHARE = 0.01
"""Of the periods of the CPU quota."""
RATE_SHARE = 0.5
"""Of the bytes per second that the machine's profile lets expect."""
LEAST_CLASS_BYTES = 8 * MIB
"""A class that reads less in a step is not timed: caches and barriers decide how long it takes."""
LEAST_REPEATS = 4
"""Prompts with a known beginning before a cache without a hit is a fault."""
NEIGHBOUR_SHARE = 0.1
"""Of a node's memory, held by one other process."""

State = Literal["green", "red", "grey"]


@dataclass(frozen=True)
class Line:
    """One line of the audit."""

    name: str
    state: State
    found: str
    expected: str
    hint: str | None = None


Check = Callable[[RunRecord, Observed], tuple[Line, ...]]


def audit(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """All lines, in order."""
    return tuple(line for check in CHECKS for line in check(record, seen))


def _grey(name: str, reason: str, expected: str) -> tuple[Line, ...]:
    return (Line(name, "grey", reason, expected),)


def _line(name: str, is_red: bool, found: str, expected: str, hint: str) -> tuple[Line, ...]:
    return (Line(name, "red" if is_red else "green", found, expected, hint if is_red else None),)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _too_early(record: RunRecord) -> str:
    return f"the record was made after {_counted(record.counters.num_steps, 'step')}, the first ones are not counted"


# Memory

_STRAY_HINTS: Mapping[str, str] = {
    "BIND": "somebody moved bound pages (migrate_pages, a cpuset that was made smaller): start it again",
    "PREFER": "--numa prefer lets pages go elsewhere when a node is full; --numa bind refuses to start instead",
    "TOUCH": "nothing binds these pages: sysctl -w kernel.numa_balancing=0, or run where mbind is allowed",
}


def check_pages(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """Pages that are in memory lie on the node that was planned."""
    name, expected = "pages", f"{1 - OFF_SHARE:.0%} of every region on its node"
    if isinstance(seen.regions, Unknown):
        return _grey(name, seen.regions.reason, expected)
    off, total, strays = 0, 0, []
    for region in seen.regions:
        present = sum(count for node, count in region.pages.items() if node >= 0)
        away = present - region.pages.get(region.node, 0)
        off, total = off + away, total + present
        if away > OFF_SHARE * present:
            where = ", ".join(
                f"{count:,} on node {node}"
                for node, count in sorted(region.pages.items())
                if node >= 0 and node != region.node
            )
            strays.append(f"{region.name} was planned on node {region.node}, of {present:,} pages are {where}")
    if strays:
        return _line(name, True, _first(strays), expected, _STRAY_HINTS[record.policy])
    if not total:
        return _grey(name, "no page is in memory", expected)
    where = (
        f"{1 - off / total:.2%} of {_counted(total, 'page')} in {_counted(len(seen.regions), 'region')} on their node"
    )
    num_sampled = sum(region.located_by == "sample" for region in seen.regions)
    where += f" ({num_sampled:,} by a sample of {SAMPLE_PAGES:,} pages)" if num_sampled else ""
    return _line(name, False, where, expected, "")


def _first(texts: Sequence[str]) -> str:
    return texts[0] + (f" (and {len(texts) - 1:,} more)" if len(texts) > 1 else "")


def check_absent(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """Nothing was swapped out or given back."""
    name, expected = "absent", f"nothing swapped, at most {OFF_SHARE:.0%} of a region not in memory"
    if isinstance(seen.regions, Unknown):
        return _grey(name, seen.regions.reason, expected)
    bad = []
    for region in seen.regions:
        absent, total = _num_absent(region), sum(region.pages.values())
        if region.swapped_bytes:
            bad.append(f"{format_bytes(region.swapped_bytes)} of {region.name} are in swap")
        elif absent > OFF_SHARE * total:
            bad.append(f"{absent:,} of {total:,} pages of {region.name} are not in memory")
    hint = "swapoff -a, or leave more memory free: a model that is read for every token cannot live in swap"
    return _line(name, bool(bad), _first(bad) if bad else "all pages are in memory", expected, hint)


def _num_absent(region: Region) -> int:
    return sum(count for node, count in region.pages.items() if node < 0)


def check_huge_pages(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """Regions that can have huge pages have them."""
    name, expected = "huge pages", f"{HUGE_SHARE:.0%} of what every region can have"
    if isinstance(seen.regions, Unknown):
        return _grey(name, seen.regions.reason, expected)
    page = record.machine.huge_page_bytes
    planned = [(region, region.planned_huge_bytes) for region in seen.regions if region.planned_huge_bytes]
    if not planned:
        why = f"no region is as large as a huge page of {format_bytes(page)}, or they are off here"
        return _grey(name, f"{why} ({record.machine.huge_pages})", expected)
    known = [(region, wanted, region.huge_bytes) for region, wanted in planned if region.huge_bytes is not None]
    if len(known) < len(planned):
        return _grey(name, "the kernel does not say (no /proc/PID/smaps)", expected)
    few = [
        f"{region.name} has {format_bytes(found)} of {format_bytes(wanted)} in huge pages"
        for region, wanted, found in known
        if wanted - found > max(page, (1 - HUGE_SHARE) * wanted)
    ]
    have, want = sum(found for _, _, found in known), sum(wanted for _, wanted, _ in known)
    all_well = f"{format_bytes(min(have, want))} of {format_bytes(want)} in huge pages"
    hint = "start it again after 'sysctl -w vm.compact_memory=1' (as root): free memory was in small pieces"
    return _line(name, bool(few), _first(few) if few else all_well, expected, hint)


# Threads


def check_threads(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """Every thread of the team may run on its own CPU only, and did so last."""
    name, expected = "threads", "each on the CPU it was given"
    states = {state.thread: state for state in seen.moment.threads}
    wrong = [text for seat in record.seats if (text := _astray(seat, states.get(seat.thread)))]
    hint = "something changed the affinity (taskset -p, a cpuset, a tool): start it again, and leave the threads alone"
    if wrong:
        return _line(name, True, _first(wrong), expected, hint)
    return _line(name, False, f"{_counted(len(record.seats), 'thread')} on their CPUs", expected, "")


def _astray(seat: Seat, state: ThreadState | None) -> str | None:
    """What is wrong with a thread. Thread 0 is the caller, who is pinned during steps only."""
    if state is None:
        return None if seat.thread == 0 else f"thread {seat.thread} of CPU {seat.cpu} is gone"
    may = format_cpu_list(state.allowed_cpus)
    if seat.thread == 0:
        is_well = seat.cpu in state.allowed_cpus
    else:
        is_well = state.allowed_cpus == (seat.cpu,) and state.last_cpu == seat.cpu
    return (
        None if is_well else f"thread {seat.thread} of CPU {seat.cpu} may run on {may} and ran last on {state.last_cpu}"
    )


def check_faults(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """No step waits for a page to be read from a disk."""
    name, expected = "faults", "no major faults during steps"
    if record.baseline is None:
        return _grey(name, _too_early(record), expected)
    before = {state.thread: state for state in record.baseline.threads}
    team = [(state, before[state.thread]) for state in seen.moment.threads if state.thread and state.thread in before]
    # Thread 0 also runs Python between the steps; the engine counted what it met during them.
    major = record.counters.major_faults + sum(max(0, now.major_faults - then.major_faults) for now, then in team)
    minor = record.counters.minor_faults + sum(max(0, now.minor_faults - then.minor_faults) for now, then in team)
    waits = record.counters.num_preemptions + sum(
        max(0, now.num_preemptions - then.num_preemptions) for now, then in team
    )
    found = f"{major:,} major, {minor:,} minor, {waits:,} preemptions since the first steps"
    hint = "pages were read from a disk in the middle of steps: leave more memory free (hotset machine), no swap"
    return _line(name, major > 0, found, expected, hint)


# Limits


def check_memory(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """The memory cgroup does not hold the run back."""
    name, expected = (
        "memory",
        f"no limit reached, less than {PRESSURE_PERCENT:.0f} % of the time lost to want of memory",
    )
    groups = seen.moment.groups
    if not groups.memory_events and not groups.memory_pressure:
        return _grey(name, "the kernel counts no memory events or pressure here", expected)
    grown = _grown(record.baseline.groups.memory_events, groups.memory_events) if record.baseline else {}
    # Reaching memory.max alone costs file cache and nothing else.
    bad = [f"{count:,} x {event}" for event, count in grown.items() if event.rpartition(" ")[2] != "max"]
    bad += [f"{value:g} % in {file}" for file, value in groups.memory_pressure.items() if value >= PRESSURE_PERCENT]
    found = (
        _first(bad) if bad else "no event, " + ", ".join(f"{v:g} % in {f}" for f, v in groups.memory_pressure.items())
    )
    return _line(name, bool(bad), found.removesuffix(", "), expected, "a higher memory limit, or a smaller --context")


def _grown(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


def check_cpu(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """No quota stops threads in the middle of a step, while the others wait for them."""
    name, expected = "cpu", f"stopped by the quota in less than {THROTTLED_SHARE:.0%} of its periods"
    if record.baseline is None:
        return _grey(name, _too_early(record), expected)
    before, now = record.baseline.groups, seen.moment.groups
    if not now.cpu_periods:
        return _grey(name, "no CPU cgroup counts periods here", expected)
    worst = max(now.cpu_periods, key=lambda file: _throttled(before, now, file))
    share = _throttled(before, now, worst)
    hint = "a higher CPU quota, or --threads with no more threads than it pays for"
    return _line(name, share >= THROTTLED_SHARE, f"{share:.1%} of the periods ({worst})", expected, hint)


def _throttled(before: GroupState, now: GroupState, file: str) -> float:
    periods = now.cpu_periods[file] - before.cpu_periods.get(file, 0)
    return (now.cpu_throttled[file] - before.cpu_throttled.get(file, 0)) / periods if periods > 0 else 0.0


def check_neighbours(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """No other large process shares a node's memory and its bandwidth."""
    name, expected = "neighbours", f"no other process holds {NEIGHBOUR_SHARE:.0%} of a node's memory"
    if isinstance(seen.neighbours, Unknown):
        return _grey(name, seen.neighbours.reason, expected)
    sizes = {node.node_id: node.total_bytes for node in record.machine.nodes}
    used = sorted({seat.node for seat in record.seats})
    large, unclear, most = [], [], 0
    for other in seen.neighbours:
        if other.by_node is None:
            if other.num_bytes >= NEIGHBOUR_SHARE * min(sizes[node] for node in used):
                unclear.append(
                    f"{other.name} ({other.pid}) holds {format_bytes(other.num_bytes)}, nobody tells on which node"
                )
            continue
        for node in used:
            held = other.by_node.get(node, 0)
            most = max(most, held)
            if held >= NEIGHBOUR_SHARE * sizes[node]:
                large.append(f"{other.name} ({other.pid}) holds {format_bytes(held)} of node {node}")
    if not large and unclear:
        return _grey(name, _first(unclear), expected)
    found = _first(large) if large else f"the largest holds {format_bytes(most)} of a node"
    return _line(
        name, bool(large), found, expected, "it takes bandwidth when it runs: end it, or --nodes with other nodes"
    )


# What the run did


def check_rates(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """Decode steps read each op class nearly as fast as the machine's profile lets expect. One line a class."""
    expected = f"{RATE_SHARE:.0%} of the predicted rate"
    steps = [sample.classes for sample in record.samples if sample.num_tokens == 1]
    if not steps:
        return _grey("rate", "no decode step was timed before the record was made", expected)
    if all(part.expected_seconds is None for classes in steps for part in classes):
        return _grey("rate", "this machine was not measured when the run was recorded: hotset probe", expected)
    lines = [line for name in _class_names(steps) if (line := _rate_line(name, steps)) is not None]
    if not lines:
        return _grey("rate", f"no op class reads {format_bytes(LEAST_CLASS_BYTES)} in a step", expected)
    return tuple(lines)


def _class_names(steps: Sequence[Sequence[ClassSample]]) -> list[str]:
    return list(dict.fromkeys(part.name for classes in steps for part in classes))


def _rate_line(name: str, steps: Sequence[Sequence[ClassSample]]) -> Line | None:
    parts = [
        part for classes in steps for part in classes if part.name == name and part.expected_seconds and part.seconds
    ]
    if not parts or statistics.median(part.num_bytes for part in parts) < LEAST_CLASS_BYTES:
        return None
    found = statistics.median(part.num_bytes / part.seconds for part in parts)
    predicted = statistics.median(part.num_bytes / (part.expected_seconds or 1.0) for part in parts)
    text = f"{format_rate(found)} in {_counted(len(parts), 'timed step')}"
    hint = (
        "see the other lines; hotset bench MODEL measures the ceiling of this minute, hotset probe that of the machine"
    )
    expected = f"at least {format_rate(RATE_SHARE * predicted)}, {RATE_SHARE:.0%} of {format_rate(predicted)} predicted"
    return _line(f"rate {name}", found < RATE_SHARE * predicted, text, expected, hint)[0]


def check_cache(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """Prompts that begin like earlier ones find something in the prefix cache."""
    name = "cache"
    expected = f"a hit when {LEAST_REPEATS} prompts begin like earlier ones"
    c = record.counters
    found = f"{_counted(c.num_hits, 'hit')} in {_counted(c.num_lookups, 'lookup')}"
    found += f", {c.num_repeats:,} with a known beginning"
    if not c.num_hits and c.num_repeats < LEAST_REPEATS:
        return _grey(name, found, expected)
    hint = "prompts are pushed out before they come again: more room for them (prefix_tokens, max_sequences"
    hint += ", snapshots)" if c.num_snapshots else ")"
    return _line(name, not c.num_hits, found, expected, hint)


def check_plan(record: RunRecord, seen: Observed) -> tuple[Line, ...]:
    """The plan was made for these files, this hotset, this machine and these limits."""
    name, expected = "plan", "files, hotset, machine profile and limits as they were"
    stale, unknown = [], []
    if seen.hotset != record.hotset:
        stale.append(f"made by hotset {record.hotset}, this is {seen.hotset}")
    if isinstance(seen.files, Unknown):
        unknown.append(seen.files.reason)
    else:
        for file in record.files:
            now = seen.files[file.path]
            if now is None:
                stale.append(f"{file.path} is gone")
            elif now.num_bytes != file.num_bytes:
                stale.append(f"{file.path} has {now.num_bytes:,} bytes, it had {file.num_bytes:,}")
            elif now.mtime_ns != file.mtime_ns:
                stale.append(f"{file.path} was written since it was loaded")
    if record.machine.profile_id is not None:
        if isinstance(seen.profile_id, Unknown):
            unknown.append(seen.profile_id.reason)
        elif seen.profile_id != record.machine.profile_id:
            stale.append(f"made for machine profile {record.machine.profile_id}, it is {seen.profile_id or 'gone'} now")
    if isinstance(seen.cgroup_limits, Unknown):
        unknown.append(f"limits: {seen.cgroup_limits.reason}")
    else:
        stale += _changed_limits(record.machine.cgroup_limits, seen.cgroup_limits)
    if not stale and isinstance(seen.files, Unknown):
        return _grey(name, "; ".join(unknown), expected)
    found = _first(stale) if stale else "nothing changed" + (f" (not known: {'; '.join(unknown)})" if unknown else "")
    return _line(name, bool(stale), found, expected, "start it again: a new start makes a new plan")


def _changed_limits(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    def text(limit: int | None) -> str:
        return "no limit" if limit is None else format_bytes(limit)

    files = dict.fromkeys((*before, *now))
    return [f"{f} is {text(now.get(f))}, it was {text(before.get(f))}" for f in files if before.get(f) != now.get(f)]


CHECKS: tuple[Check, ...] = (
    check_pages,
    check_absent,
    check_huge_pages,
    check_threads,
    check_faults,
    check_memory,
    check_cpu,
    check_neighbours,
    check_rates,
    check_cache,
    check_plan,
)
LINE_NAMES = (
    "pages",
    "absent",
    "huge pages",
    "threads",
    "faults",
    "memory",
    "cpu",
    "neighbours",
    "rate",
    "cache",
    "plan",
)
"""Of all lines; "rate" is one a class, named "rate CLASS" where it is known."""


def ignore(lines: Sequence[Line], names: Sequence[str]) -> tuple[Line, ...]:
    """The lines with those of ``names`` made grey where they are red."""
    return tuple(
        Line(line.name, "grey", f"{line.found} (ignored, as asked)", line.expected)
        if line.state == "red" and _kind(line) in names
        else line
        for line in lines
    )


def _kind(line: Line) -> str:
    return "rate" if line.name.startswith("rate") else line.name
