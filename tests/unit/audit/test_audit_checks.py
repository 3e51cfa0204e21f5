"""The lines of an audit over made-up runs: each planted fault is found by its line and by no other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from audit_records import COUNTERS, FILE, GIB, MIB, RECORD, SEATS, SEEN, groups, moment, region, sample, thread

from hotset.audit import checks
from hotset.audit.checks import Line
from hotset.audit.observe import Neighbour, Observed, Unknown
from hotset.audit.record import Moment, Region, RunRecord


def red(record: RunRecord = RECORD, seen: Observed = SEEN) -> dict[str, Line]:
    return {line.name: line for line in checks.audit(record, seen) if line.state == "red"}


def states(record: RunRecord = RECORD, seen: Observed = SEEN) -> dict[str, str]:
    return {line.name: line.state for line in checks.audit(record, seen)}


def with_region(index: int, **fields: object) -> Observed:
    regions: list[Region] = list(RECORD.regions)
    regions[index] = replace(regions[index], **fields)
    return replace(SEEN, regions=tuple(regions))


def with_thread(number: int, **fields: object) -> Observed:
    threads = tuple(thread(seat, **(fields if seat.thread == number else {})) for seat in SEATS)
    return replace(SEEN, moment=moment(threads=threads))


def only(lines: dict[str, Line], name: str) -> Line:
    """The one red line, which has a hint."""
    assert list(lines) == [name]
    assert lines[name].hint
    return lines[name]


def test_a_run_as_planned_is_green_in_every_line() -> None:
    """No false alarm, and no line that stays grey although everything is known."""
    assert set(states().values()) == {"green"}
    kinds = ["rate" if name.startswith("rate") else name for name in states()]
    assert tuple(kinds) == checks.LINE_NAMES
    assert all(line.hint is None for line in checks.audit(RECORD, SEEN))


# ---- memory --------------------------------------------------------------------------------------------------


def test_a_region_on_the_wrong_node() -> None:
    line = only(red(seen=with_region(1, pages={0: 12288})), "pages")
    assert line.found == "weights of thread 2 was planned on node 1, of 12,288 pages are 12,288 on node 0"
    assert "99%" in line.expected


@pytest.mark.parametrize(("away", "is_red"), [(122, False), (123, True)])
def test_one_page_in_a_hundred_may_stray(away: int, is_red: bool) -> None:
    seen = with_region(1, pages={1: 12288 - away, 2: away})
    assert ("pages" in red(seen=seen)) is is_red


def test_samples_are_told_from_counts() -> None:
    seen = with_region(1, located_by="sample")
    line = next(line for line in checks.audit(RECORD, seen) if line.name == "pages")
    assert line.state == "green" and line.found.endswith("regions on their node (1 by a sample of 65,536 pages)")


def test_a_small_stray_region_is_not_averaged_away() -> None:
    """Guards against one share over all regions: a cache on the wrong node beside a terabyte of weights."""
    regions = (region("weights", 1 << 40, 400 * GIB, 0), region("cache", 1 << 45, MIB, 1, pages={0: 256}))
    assert "pages" in red(seen=replace(SEEN, regions=regions))


@pytest.mark.parametrize(("policy", "word"), [("BIND", "cpuset"), ("TOUCH", "numa_balancing"), ("PREFER", "prefer")])
def test_the_hint_follows_from_how_memory_was_placed(policy: str, word: str) -> None:
    record = replace(RECORD, policy=policy)
    hint = only(red(record, with_region(0, pages={1: 12288})), "pages").hint
    assert hint is not None and word in hint


def test_swapped_and_absent_pages() -> None:
    line = only(red(seen=with_region(2, swapped_bytes=4096)), "absent")
    assert line.found == "4.00 KiB of cache are in swap"
    line = only(red(seen=with_region(2, pages={0: 8000, -2: 192})), "absent")
    assert line.found == "192 of 8,192 pages of cache are not in memory"
    assert not red(seen=with_region(2, pages={0: 8191, -2: 1})), "a page that is being moved"


def test_absent_pages_are_not_stray() -> None:
    """Pages that are nowhere are on no wrong node, and the hint for them is another."""
    assert list(red(seen=with_region(2, pages={0: 100, -2: 8092}))) == ["absent"]


def test_half_the_huge_pages_missing() -> None:
    line = only(red(seen=with_region(2, huge_bytes=16 * MIB)), "huge pages")
    assert line.found == "cache has 16.00 MiB of 32.00 MiB in huge pages"


@pytest.mark.parametrize(("found", "is_red"), [(30, False), (28, True)])
def test_one_huge_page_or_a_tenth_may_be_missing(found: int, is_red: bool) -> None:
    assert ("huge pages" in red(seen=with_region(2, huge_bytes=found * MIB))) is is_red


def test_huge_pages_that_were_not_planned_or_are_not_told_are_grey() -> None:
    small = tuple(replace(r, planned_huge_bytes=0, huge_bytes=0) for r in RECORD.regions)
    assert states(seen=replace(SEEN, regions=small))["huge pages"] == "grey"
    assert states(seen=with_region(0, huge_bytes=None))["huge pages"] == "grey"


def test_pages_that_nobody_tells_are_grey() -> None:
    seen = replace(SEEN, regions=Unknown("/proc/1/numa_maps cannot be read"))
    lines = {line.name: line for line in checks.audit(RECORD, seen)}
    assert [lines[name].state for name in ("pages", "absent", "huge pages")] == ["grey"] * 3
    assert lines["pages"].found == "/proc/1/numa_maps cannot be read"


# ---- threads and limits --------------------------------------------------------------------------------------


def test_a_thread_that_escaped_from_its_team() -> None:
    line = only(red(seen=with_thread(2, allowed_cpus=(0, 1, 8, 9), last_cpu=1)), "threads")
    assert line.found == "thread 2 of CPU 8 may run on 0-1,8-9 and ran last on 1"


def test_a_thread_that_may_escape_is_found_before_it_does() -> None:
    assert "threads" in red(seen=with_thread(3, allowed_cpus=(8, 9), last_cpu=9))


def test_a_thread_on_another_cpu_although_its_mask_is_right() -> None:
    assert "threads" in red(seen=with_thread(3, last_cpu=0))


def test_a_thread_that_is_gone() -> None:
    threads = tuple(thread(seat) for seat in SEATS[:3])
    assert only(red(seen=replace(SEEN, moment=moment(threads=threads))), "threads").found == "thread 3 of CPU 9 is gone"


def test_the_caller_is_free_between_steps_but_must_be_able_to_go_to_its_cpu() -> None:
    """Thread 0 is the program's own: pinned during steps only, and it may be another one by now."""
    assert not red(seen=with_thread(0, allowed_cpus=(0, 1, 8, 9), last_cpu=9))
    assert not red(seen=replace(SEEN, moment=moment(threads=tuple(thread(seat) for seat in SEATS[1:]))))
    assert "threads" in red(seen=with_thread(0, allowed_cpus=(1, 8)))


def test_major_faults_during_steps() -> None:
    line = only(red(seen=with_thread(1, major_faults=5)), "faults")
    assert line.found.startswith("2 major, 4 minor")
    record = replace(RECORD, counters=replace(COUNTERS, major_faults=1))
    assert list(red(record)) == ["faults"]


def test_faults_of_the_caller_outside_steps_do_not_count() -> None:
    """Python loads modules from the disk; that is no step."""
    assert not red(seen=with_thread(0, major_faults=50, minor_faults=9000))


def test_faults_before_the_first_steps_are_not_known() -> None:
    lines = states(replace(RECORD, baseline=None))
    assert lines["faults"] == lines["cpu"] == "grey"


@pytest.mark.parametrize("event", ["high", "oom_kill"])
def test_a_memory_limit_that_was_reached(event: str) -> None:
    events = dict(groups().memory_events) | {f"/cg/memory.events {event}": 9}
    line = only(red(seen=replace(SEEN, moment=moment(groups=groups(memory_events=events)))), "memory")
    assert f"memory.events {event}" in line.found


def test_file_cache_that_was_given_up_is_no_fault() -> None:
    events = dict(groups().memory_events) | {"/cg/memory.events max": 900}
    assert not red(seen=replace(SEEN, moment=moment(groups=groups(memory_events=events))))


def test_memory_pressure() -> None:
    line = only(
        red(seen=replace(SEEN, moment=moment(groups=groups(memory_pressure={"/cg/memory.pressure": 12.5})))), "memory"
    )
    assert line.found == "12.5 % in /cg/memory.pressure"


@pytest.mark.parametrize(("throttled", "is_red"), [(109, False), (110, True)])
def test_a_quota_that_stops_threads(throttled: int, is_red: bool) -> None:
    """What was counted before the run does not matter: 100 of 1,000 periods here."""
    now = groups(cpu_periods={"/cg/cpu.stat": 2000}, cpu_throttled={"/cg/cpu.stat": throttled})
    assert ("cpu" in red(seen=replace(SEEN, moment=moment(groups=now)))) is is_red


def test_machines_without_counters_are_grey() -> None:
    now = moment(groups=groups(memory_events={}, memory_pressure={}, cpu_periods={}, cpu_throttled={}))
    lines = states(seen=replace(SEEN, moment=now))
    assert lines["memory"] == lines["cpu"] == "grey"


def test_a_large_process_on_the_same_node() -> None:
    others = (Neighbour(7, "postgres", 2 * GIB, {1: 2 * GIB}),)
    line = only(red(seen=replace(SEEN, neighbours=others)), "neighbours")
    assert line.found == "postgres (7) holds 2.00 GiB of node 1"


def test_a_large_process_on_a_node_that_is_not_used() -> None:
    assert not red(seen=replace(SEEN, neighbours=(Neighbour(7, "torch", 4 * GIB, {2: 4 * GIB}),)))


def test_a_large_process_of_another_user_is_grey() -> None:
    assert states(seen=replace(SEEN, neighbours=(Neighbour(7, "java", 4 * GIB, None),)))["neighbours"] == "grey"


# ---- what the run did ----------------------------------------------------------------------------------------


def test_reading_at_less_than_half_of_the_predicted_rate() -> None:
    line = only(red(replace(RECORD, samples=(sample(1.01),))), "rate linear")
    assert line.found == "5.0 GB/s in 1 timed step"
    assert line.expected == "at least 5.0 GB/s, 50% of 10.0 GB/s predicted"
    assert not red(replace(RECORD, samples=(sample(0.99),)))


def test_one_slow_step_is_no_slow_run() -> None:
    """Another program took the processor once: the median stands."""
    assert not red(replace(RECORD, samples=(sample(), sample(30.0), sample(), sample(0.9))))


def test_small_classes_and_prompts_are_not_timed() -> None:
    """The class "attention" of the sample is fifty times too slow, and reads a megabyte."""
    assert "rate attention" not in states()
    lines = states(replace(RECORD, samples=(sample(9.0, num_tokens=512),)))
    assert lines["rate"] == "grey"


def test_a_machine_that_was_not_measured_is_grey() -> None:
    classes = tuple(replace(part, expected_seconds=None) for part in sample(9.0).classes)
    record = replace(RECORD, samples=(replace(sample(), classes=classes),))
    assert states(record)["rate"] == "grey"


def test_a_cache_that_never_hits() -> None:
    record = replace(RECORD, counters=replace(COUNTERS, num_hits=0, num_repeats=4))
    line = only(red(record), "cache")
    assert line.found == "0 hits in 6 lookups, 4 with a known beginning"


def test_prompts_that_do_not_repeat_cannot_hit() -> None:
    record = replace(RECORD, counters=replace(COUNTERS, num_lookups=1000, num_repeats=3, num_hits=0))
    assert states(record)["cache"] == "grey"


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"hotset": "9.9.10"}, "made by hotset 9.9.9, this is 9.9.10"),
        ({"files": {FILE.path: replace(FILE, num_bytes=1001)}}, "has 1,001 bytes, it had 1,000"),
        ({"files": {FILE.path: replace(FILE, mtime_ns=6)}}, "was written since"),
        ({"files": {FILE.path: None}}, "is gone"),
        ({"profile_id": "ffffff012345"}, "made for machine profile abcdef012345, it is ffffff012345 now"),
        ({"profile_id": None}, "it is gone now"),
        ({"cgroup_limits": {"/cg/memory.max": 3 * GIB}}, "/cg/memory.max is 3.00 GiB, it was 6.00 GiB"),
        ({"cgroup_limits": {}}, "/cg/memory.max is no limit, it was 6.00 GiB"),
    ],
)
def test_a_stale_plan(fields: dict[str, object], found: str) -> None:
    assert found in only(red(seen=replace(SEEN, **fields)), "plan").found


def test_what_was_not_measured_then_cannot_be_stale() -> None:
    record = replace(RECORD, machine=replace(RECORD.machine, profile_id=None))
    assert not red(record, replace(SEEN, profile_id="ffffff012345"))


def test_a_run_that_has_ended_is_judged_by_its_record() -> None:
    past = Unknown("process 4242 has ended")
    seen = replace(SEEN, ended=past.reason, neighbours=past, cgroup_limits=past)
    lines = states(seen=seen)
    assert lines.pop("neighbours") == "grey"
    assert set(lines.values()) == {"green"}
    stray = replace(seen, regions=(replace(RECORD.regions[0], pages={1: 12288}),))
    assert list(red(seen=stray)) == ["pages"]


def test_ignored_lines_are_grey_and_say_so() -> None:
    seen = replace(SEEN, moment=Moment("", (), groups()), hotset="1")
    lines = checks.ignore(checks.audit(replace(RECORD, samples=(sample(9.0),)), seen), ("threads", "rate"))
    shown = {line.name: line for line in lines if line.state != "green"}
    assert {name: line.state for name, line in shown.items()} == {
        "threads": "grey",
        "rate linear": "grey",
        "plan": "red",
    }
    assert shown["threads"].found.endswith("(ignored, as asked)")
