"""Pages against the plan: what is off its node is found, named and explained."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from machine_trees import FakeRoot
from numpy.typing import NDArray

from hotset.errors import MachineError
from hotset.machine.numa_calls import nodes_of_pages, try_numa_calls
from hotset.machine.topology import read_topology
from hotset.machine.verify import (
    ABSENT,
    MANY_PAGES,
    OFF_SHARE,
    SAMPLE_PAGES,
    RegionPages,
    find_problems,
    locate,
    summarize,
)

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


@dataclass
class LargeRegion:
    """A region of a million pages on node 0, of which every address says where it is by ``node_of`` (page number)."""

    node_of: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    num_asked: int = 0
    was_asked_whole: bool = False

    def whole(self, place: Piece) -> dict[int, int]:
        self.was_asked_whole = True
        nodes, counts = np.unique(self.node_of(np.arange(place.num_bytes // PAGE)), return_counts=True)
        return dict(zip(nodes.tolist(), counts.tolist(), strict=True))

    def pages(self, addresses: NDArray[np.int64]) -> NDArray[np.int32]:
        assert (addresses % PAGE == 0).all() and (np.diff(addresses) > 0).all()
        assert addresses[0] >= 0x10000000 and addresses[-1] < 0x10000000 + LARGE.num_bytes
        self.num_asked += len(addresses)
        return self.node_of((addresses - 0x10000000) // PAGE).astype(np.int32)


LARGE = Piece("weights of thread 0", 0x10000000, (MANY_PAGES + 3) * PAGE, 0)


def locate_large(machine: FakeRoot, region: LargeRegion) -> RegionPages:
    (found,) = locate([LARGE], PAGE, region.whole, machine.path, region.pages)
    assert found.num_pages == MANY_PAGES + 3
    return found


@pytest.mark.parametrize("share", [0.0, 0.002, 0.005, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("layout", ["scattered", "one run", "in turn"])
def test_large_regions_are_sampled(machine: FakeRoot, layout: str, share: float) -> None:
    """A terabyte was asked for page by page, which takes minutes. Pages in turn are no trap for evenly spaced ones."""

    def node_of(page: NDArray[np.int64]) -> NDArray[np.int64]:
        # A sample of evenly spaced pages takes every 16th.
        period = {"scattered": 997, "one run": MANY_PAGES, "in turn": 1000 if share * 16 % 1 else 16}[layout]
        place = page * 7919 % period if layout == "scattered" else page % period
        return (place < share * period).astype(np.int64)

    region = LargeRegion(node_of)
    found = locate_large(machine, region)
    assert (found.located_by, region.num_asked, region.was_asked_whole) == ("sample", SAMPLE_PAGES, False)
    assert found.num_off / found.num_pages == pytest.approx(share, abs=0.005)
    assert found.is_off == (share > OFF_SHARE)
    problems = find_problems([found], "BIND", machine.path)
    assert len(problems) == (share > OFF_SHARE)
    assert all(f"pages are, by a sample of {SAMPLE_PAGES:,}: " in line for line in problems)


@pytest.mark.parametrize("off", [MANY_PAGES // 100 - 50, MANY_PAGES // 100 + 50])
def test_what_a_sample_cannot_tell_is_counted(machine: FakeRoot, off: int) -> None:
    """The rule of 1 % holds to the page near the limit, where a sample would be wrong every other time."""
    region = LargeRegion(lambda page: (page < off).astype(np.int64))
    found = locate_large(machine, region)
    assert (found.located_by, found.num_off, region.was_asked_whole) == ("move_pages", off, True)
    assert found.is_off == (off > MANY_PAGES // 100)


def test_maps_count_large_regions_of_their_own(machine: FakeRoot) -> None:
    """Exact, and without asking for a single page; small regions beside it are asked for as ever."""
    count = MANY_PAGES + 3
    small = Piece("vectors", 0x1000, PAGE, 0)
    machine.write(
        "/proc/self/numa_maps",
        f"10000000 bind:0 anon={count} N0={count - 7} N1=7 kernelpagesize_kB=4\n00001000 bind:0 anon=1 N1=1\n",
    )
    region = LargeRegion(np.zeros_like)
    first, second = locate([LARGE, small], PAGE, region.whole, machine.path, region.pages)
    assert (first.located_by, first.pages, region.num_asked) == ("numa_maps", {0: count - 7, 1: 7}, 0)
    assert (second.located_by, second.pages) == ("move_pages", {0: 1})


@pytest.mark.parametrize(("nodes", "located_by"), [("N0={all}", "numa_maps"), ("N0={most} N1=9", "sample")])
def test_maps_of_several_regions_count_only_what_is_plain(machine: FakeRoot, nodes: str, located_by: str) -> None:
    """One mapping, two regions: counts that fit both ways would hide two regions that lie on each other's node."""
    count = MANY_PAGES + 3
    other = Piece("cache of node 1", LARGE.address + LARGE.num_bytes, PAGE, 0)
    told = nodes.format(all=count + 1, most=count - 8)
    machine.write("/proc/self/numa_maps", f"10000000 default anon={count + 1} {told} kernelpagesize_kB=4\n")
    region = LargeRegion(np.zeros_like)
    first, second = locate([LARGE, other], PAGE, region.whole, machine.path, region.pages)
    assert (first.located_by, first.pages) == (located_by, {0: count})
    assert second.located_by == "move_pages"


def test_pages_of_this_process(monkeypatch: pytest.MonkeyPatch, machine: FakeRoot) -> None:
    """The call itself, with pages that were never written; a refusal is one for all."""
    calls = try_numa_calls(read_topology().allowed_nodes[0])
    with mmap.mmap(-1, 8 * mmap.PAGESIZE) as memory:
        memory[: 4 * mmap.PAGESIZE] = b"1" * (4 * mmap.PAGESIZE)
        first = ctypes.c_char.from_buffer(memory)
        addresses = ctypes.addressof(first) + np.arange(0, 8, dtype=np.int64) * mmap.PAGESIZE
        del first
        if calls.move_pages is None:
            nodes = nodes_of_pages(addresses).tolist()
            assert set(nodes[:4]) <= set(read_topology().allowed_nodes) and set(nodes[4:]) == {ABSENT}
    monkeypatch.setattr("hotset.machine.numa_calls._syscall", lambda *_: errno.EPERM)
    with pytest.raises(MachineError, match="nobody tells where pages lie: move_pages: Operation not permitted"):
        locate([LARGE], PAGE, refuse, machine.path)


def test_a_line_for_every_node() -> None:
    lines = summarize([region({0: 100}), region({1: 49, 0: 1}, 1, "cache of node 1"), region({0: 50}, 0, "vectors")])
    assert lines == [
        "node 0: 600.00 KiB in 2 regions, 100.00% of 150 pages on it",
        "node 1: 200.00 KiB in 1 regions, 98.00% of 50 pages on it",
    ]
