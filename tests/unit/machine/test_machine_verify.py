"""Pages against the plan: what is off its node is found, named and explained."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from machine_trees import FakeRoot

from hotset.errors import MachineError
from hotset.machine.verify import ABSENT, RegionPages, find_problems, locate, summarize

PAGE = 4096


@dataclass(frozen=True)
class Piece:
    name: str
    address: int
    num_bytes: int
    node: int


def refuse(_: object) -> dict[int, int]:
    raise RuntimeError("move_pages: Operation not permitted")


def region(pages: dict[int, int], node: int = 0, name: str = "weights of thread 0") -> RegionPages:
    return RegionPages(name, 0x10000, sum(pages.values()) * PAGE, node, pages)


def test_one_page_in_a_hundred_is_let_pass(machine: FakeRoot) -> None:
    """And not one more."""
    assert find_problems([region({0: 100}), region({0: 99, 1: 1})], "BIND", machine.path) == []
    (line,) = find_problems([region({0: 98, 1: 2})], "BIND", machine.path)
    assert line.startswith("weights of thread 0 (400.00 KiB) was planned on node 0, its 100 pages are: ")
    assert "2 on node 1, 98 on node 0; " in line


@pytest.mark.parametrize(
    ("policy", "pages", "status", "balancing", "reason"),
    [
        ("BIND", {0: 1, 1: 9}, "0-1", "0", "somebody moves them: migrate_pages, a cpuset that changed"),
        ("BIND", {0: 1, 1: 9}, "1", "0", "the cpuset of this process has nodes 1 only"),
        ("PREFER", {1: 10}, "0-1", "0", "--numa prefer takes other nodes when one is full"),
        ("TOUCH", {1: 10}, "0-1", "1", "automatic NUMA balancing moves pages"),
        ("TOUCH", {1: 10}, "0-1", "0", "the node was full when its threads wrote them"),
        ("BIND", {0: 5, ABSENT: 5}, "0-1", "0", "5 not in memory; pages that are not in memory were swapped out"),
    ],
)
def test_the_likely_reason_is_said(machine: FakeRoot, policy, pages, status: str, balancing: str, reason: str) -> None:
    """Rows of what kernels really do (docs/concepts/placement.md)."""
    machine.set_affinity("0-7", f"Mems_allowed_list:\t{status}")
    machine.write("/proc/sys/kernel/numa_balancing", balancing)
    (line,) = find_problems([region(pages)], policy, machine.path)
    assert reason in line


def test_maps_tell_where_move_pages_may_not(machine: FakeRoot) -> None:
    """Two regions of one mapping each, one of two mappings, and pages that were never touched."""
    places = [
        Piece("a", 0x10000, 8 * PAGE, 0), Piece("b", 0x40000, 4 * PAGE - 100, 1), Piece("c", 0x80000, 6 * PAGE, 1),
    ]  # fmt: skip
    machine.write(
        "/proc/self/numa_maps",
        "00010000 bind:0 anon=8 dirty=8 N0=7 N1=1 kernelpagesize_kB=4\n"
        "00040000 bind:1 anon=3 dirty=3 N1=3 kernelpagesize_kB=4\n"
        "00060000 default file=/x mapped=9 N0=9 kernelpagesize_kB=4\n"
        "00080000 bind:1 anon=4 N1=4 kernelpagesize_kB=4\n"
        "00084000 default anon=2 N0=2 kernelpagesize_kB=4\n",
    )
    machine.write(
        "/proc/self/smaps",
        "00010000-00018000 rw-p 00000000 00:00 0\nSize: 32 kB\nAnonHugePages:        16 kB\n"
        "00040000-00044000 rw-p 00000000 00:00 0\nAnonHugePages:         0 kB\n"
        "00080000-00084000 rw-p 00000000 00:00 0\nAnonHugePages:         8 kB\n"
        "00084000-00086000 rw-p 00000000 00:00 0\nAnonHugePages:         4 kB\n",
    )
    a, b, c = locate(places, PAGE, refuse, machine.path)
    assert (a.pages, b.pages, c.pages) == ({0: 7, 1: 1}, {1: 3, ABSENT: 1}, {1: 4, 0: 2})
    assert (a.num_off, b.num_off, c.num_off) == (1, 1, 2)
    assert (a.huge_bytes, b.huge_bytes, c.huge_bytes) == (16384, 0, 12288)


def test_pieces_of_one_mapping_are_told_apart_by_their_nodes(machine: FakeRoot) -> None:
    """A cache whose parts were placed by first touch is one mapping: pages on a part's node count as that part's."""
    places = [Piece("cache of node 0", 0x10000, 4 * PAGE, 0), Piece("cache of node 1", 0x14000, 4 * PAGE, 1)]
    machine.write("/proc/self/numa_maps", "00010000 default anon=8 N0=5 N1=3 kernelpagesize_kB=4\n")
    first, second = locate(places, PAGE, refuse, machine.path)
    assert (first.pages, second.pages) == ({0: 4}, {1: 3, 0: 1})


def test_no_way_to_tell_is_an_error(machine: FakeRoot) -> None:
    """Never a pass without a look."""
    with pytest.raises(MachineError, match="nobody tells where pages lie: move_pages: Operation not permitted"):
        locate([Piece("a", 0x10000, PAGE, 0)], PAGE, refuse, machine.path)


def test_a_line_for_every_node() -> None:
    lines = summarize([region({0: 100}), region({1: 49, 0: 1}, 1, "cache of node 1"), region({0: 50}, 0, "vectors")])
    assert lines == [
        "node 0: 600.00 KiB in 2 regions, 100.00% of 150 pages on it",
        "node 1: 200.00 KiB in 1 regions, 98.00% of 50 pages on it",
    ]
