"""Reading a process from a tree of /proc and /sys files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from audit_records import BOOT, FILE, GIB, MIB, PID, RECORD, SEATS, START

import hotset
from hotset.audit.observe import Neighbour, Unknown, observe, read_process
from hotset.audit.record import ProcessId

NUMA_MAPS = """\
7eff00000000 default file=/usr/lib/libc.so.6 mapped=10 N0=10 kernelpagesize_kB=4
7f0000000000 bind:0 anon=12288 dirty=12288 N0=12288 kernelpagesize_kB=4
7f1000000000 bind:1 anon=12288 dirty=12288 N0=12000 N1=288 kernelpagesize_kB=4
7f2000000000 bind:0 anon=8000 dirty=8000 N0=8000 kernelpagesize_kB=4
"""
SMAPS = "".join(
    f"{start:x}-{start + size:x} rw-p 00000000 00:00 0\nRss: {size >> 10} kB\nAnonHugePages: {huge >> 10} kB\n"
    f"Swap: {swap} kB\n"
    for start, size, huge, swap in (
        (0x7F0000000000, 48 * MIB, 48 * MIB, 0),
        (0x7F1000000000, 48 * MIB, 24 * MIB, 0),
        (0x7F2000000000, 32 * MIB, 0, 768),
    )
)


class Tree:
    """A machine on which the run of ``RECORD`` lives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("/proc/sys/kernel/random/boot_id", BOOT)
        self.write("/proc/self/mountinfo", "30 23 0:26 / /cg rw - cgroup2 cgroup2 rw")
        self.write(f"/proc/{PID}/cgroup", "0::/job")
        self.write("/cg/job/memory.max", str(6 * GIB))
        self.write("/cg/job/memory.events", "low 0\nhigh 2\nmax 5\noom 0\noom_kill 0")
        self.write(
            "/cg/job/memory.pressure", "some avg10=9.00 avg60=1 avg300=1 total=1\nfull avg10=3.50 avg60=0 total=1"
        )
        self.write("/cg/job/cpu.stat", "usage_usec 5\nnr_periods 40\nnr_throttled 4\nthrottled_usec 9")
        self.write(f"/proc/{PID}/numa_maps", NUMA_MAPS)
        self.write(f"/proc/{PID}/smaps", SMAPS)
        for seat in SEATS:
            self.task(seat.thread_id, f"hotset-{seat.thread}", str(seat.cpu), seat.cpu)

    def write(self, name: str, text: str) -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def task(self, task_id: int, name: str, allowed: str, last_cpu: int, start: int = START, pid: int = PID) -> None:
        numbers = ["S", *(["0"] * 49)]
        numbers[7], numbers[9], numbers[19], numbers[36] = "11", "2", str(start), str(last_cpu)
        directory = f"/proc/{pid}/task/{task_id}"
        self.write(f"{directory}/stat", f"{task_id} ({name}) {' '.join(numbers)}")
        self.write(
            f"{directory}/status",
            f"Name:\t{name}\nCpus_allowed_list:\t{allowed}\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t3",
        )

    def other(self, pid: int, name: str, num_bytes: int) -> None:
        self.write(f"/proc/{pid}/status", f"Name:\t{name}\nRssAnon:\t{num_bytes >> 10} kB\nRssFile:\t{GIB >> 10} kB")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "root")


def test_pages_threads_and_groups_of_a_live_process(tree: Tree) -> None:
    seen = observe(RECORD, "abcdef012345", tree.root)
    assert seen.ended is None and seen.hotset == hotset.__version__
    assert not isinstance(seen.regions, Unknown)
    assert [dict(r.pages) for r in seen.regions] == [{0: 12288}, {0: 12000, 1: 288}, {0: 8000, -2: 192}]
    assert [r.huge_bytes for r in seen.regions] == [48 * MIB, 24 * MIB, 0]
    assert [r.swapped_bytes for r in seen.regions] == [0, 0, 768 << 10]
    assert [r.planned_huge_bytes for r in seen.regions] == [r.planned_huge_bytes for r in RECORD.regions]
    assert [(t.thread, t.allowed_cpus, t.last_cpu) for t in seen.moment.threads] == [
        (seat.thread, (seat.cpu,), seat.cpu) for seat in SEATS
    ]
    first = seen.moment.threads[0]
    assert (first.minor_faults, first.major_faults, first.num_switches, first.num_preemptions) == (11, 2, 7, 3)
    groups = seen.moment.groups
    assert dict(groups.memory_events) == {
        f"/cg/job/memory.events {event}": count
        for event, count in (("high", 2), ("max", 5), ("oom", 0), ("oom_kill", 0))
    }
    assert dict(groups.memory_pressure) == {"/cg/job/memory.pressure": 3.5}
    assert dict(groups.cpu_periods) == {"/cg/job/cpu.stat": 40} and dict(groups.cpu_throttled) == {
        "/cg/job/cpu.stat": 4
    }
    assert seen.cgroup_limits == {"/cg/job/memory.max": 6 * GIB}


def test_a_thread_name_with_parentheses_and_spaces(tree: Tree) -> None:
    """Fields of stat are counted from the last parenthesis."""
    tree.task(PID + 1, "a) R (b", "1", 1)
    assert observe(RECORD, None, tree.root).moment.threads[1].last_cpu == 1


def test_a_thread_that_is_gone_is_left_out(tree: Tree) -> None:
    (tree.root / f"proc/{PID}/task/{PID + 3}/stat").unlink()
    assert [t.thread for t in observe(RECORD, None, tree.root).moment.threads] == [0, 1, 2]


def test_a_process_that_has_ended(tree: Tree) -> None:
    """The record stands for it; what only a live process shows is not known."""
    (tree.root / f"proc/{PID}/task/{PID}/stat").unlink()
    seen = observe(RECORD, None, tree.root)
    assert seen.ended == f"process {PID} has ended"
    assert seen.regions == RECORD.regions and seen.moment == RECORD.latest
    assert isinstance(seen.neighbours, Unknown) and isinstance(seen.cgroup_limits, Unknown)


def test_another_process_with_its_number(tree: Tree) -> None:
    """Guards against judging a stranger: numbers are used again."""
    tree.task(PID, "python", "0", 0, start=START + 1)
    seen = observe(RECORD, None, tree.root)
    assert seen.ended == f"process {PID} has ended, another has its number"
    assert seen.moment == RECORD.latest


def test_a_run_of_another_boot_or_machine(tree: Tree) -> None:
    tree.write("/proc/sys/kernel/random/boot_id", "other")
    seen = observe(RECORD, "abcdef012345", tree.root)
    assert seen.ended == "the run was before the last boot, or on another machine"
    assert isinstance(seen.files, Unknown) and isinstance(seen.profile_id, Unknown)


def test_an_engine_that_was_closed_in_a_living_process(tree: Tree) -> None:
    tree.write(f"/proc/{PID}/numa_maps", NUMA_MAPS.splitlines()[0])
    seen = observe(RECORD, None, tree.root)
    assert seen.ended == f"process {PID} closed its engine" and seen.regions == RECORD.regions


def test_maps_that_cannot_be_read(tree: Tree) -> None:
    (tree.root / f"proc/{PID}/numa_maps").unlink()
    seen = observe(RECORD, None, tree.root)
    assert isinstance(seen.regions, Unknown) and "numa_maps cannot be read" in seen.regions.reason
    assert seen.ended is None and seen.moment.threads


def test_pages_in_pieces_of_a_region_with_several_mappings(tree: Tree) -> None:
    """The kernel cuts a mapping where policies or advice differ; the counts belong to one region all the same."""
    lines = NUMA_MAPS.replace(
        "7f0000000000 bind:0 anon=12288 dirty=12288 N0=12288", "7f0000000000 bind:0 anon=9000 N0=9000"
    )
    tree.write(f"/proc/{PID}/numa_maps", lines + "7f0000800000 bind:0 anon=3288 N1=3288 kernelpagesize_kB=4")
    seen = observe(RECORD, None, tree.root)
    assert not isinstance(seen.regions, Unknown)
    assert dict(seen.regions[0].pages) == {0: 9000, 1: 3288}


def test_files_of_the_model(tree: Tree, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"12345")
    os.utime(path, ns=(7, 7))
    gone = str(tmp_path / "gone.gguf")
    record = replace(RECORD, files=(replace(FILE, path=str(path)), replace(FILE, path=gone)))
    files = observe(record, None, tree.root).files
    assert not isinstance(files, Unknown)
    found = files[str(path)]
    assert found is not None and (found.num_bytes, found.mtime_ns) == (5, 7)
    assert files[gone] is None


def test_neighbours_by_node(tree: Tree) -> None:
    """File cache is not theirs, small ones are left out, and so is the run itself."""
    tree.other(PID, "hotset", 4 * GIB)
    tree.other(10, "small", 100 * MIB)
    tree.other(11, "large", 2 * GIB)
    tree.other(12, "secret", 1 * GIB)
    tree.write(
        "/proc/11/numa_maps",
        "7f00 default anon=100 N0=60 N1=40 kernelpagesize_kB=4\n"
        "7f01 default file=/x mapped=9 N0=9 kernelpagesize_kB=4\n"
        "7f02 default huge anon=2 N1=2 kernelpagesize_kB=2048",
    )
    seen = observe(RECORD, None, tree.root)
    assert seen.neighbours == (
        Neighbour(11, "large", 2 * GIB, {0: 60 * 4096, 1: 40 * 4096 + 4 * MIB}),
        Neighbour(12, "secret", 1 * GIB, None),
    )


def test_this_process_names_itself() -> None:
    own = read_process()
    assert own.pid == os.getpid() and own.start_ticks > 0
    assert read_process(os.getpid()) == own
    assert own == ProcessId(own.pid, own.start_ticks, own.boot_id)
