"""Where memory really is, held against where it was planned.

A return code proves nothing here: the kernel says that it moved pages which it left alone, ignores policies for pages
of files, and moves bound pages itself when a cpuset shrinks. So the pages are asked for, by move_pages, or by
/proc/self/numa_maps where a container forbids that call.
"""

from __future__ import annotations

import errno
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from hotset.errors import MachineError
from hotset.machine.files import ROOT, format_cpu_list, read_int, read_table, read_text
from hotset.machine.nodes import read_allowed_nodes
from hotset.machine.numa_calls import nodes_of_pages
from hotset.machine.teams import Policy
from hotset.units import align_up, format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    AskPages = Callable[[NDArray[np.int64]], NDArray[np.int32]]
    """Node by address of a page, as :func:`hotset.machine.numa_calls.nodes_of_pages`."""

ABSENT = -errno.ENOENT
"""Key of pages that are not in memory: swapped out, or never written."""
OFF_SHARE = 0.01
"""Pages off their node that are let pass: a page at the border of two regions, one that the kernel moved to mend it."""
MANY_PAGES = 1 << 20
"""A region with more of them is not asked for page by page: a terabyte in pages of 4 KiB would take minutes."""
SAMPLE_PAGES = 1 << 16
"""Of a larger region where /proc/self/numa_maps does not tell its pages from those of others."""
DOUBT = 3.29
"""Standard deviations of a sample's share around :data:`OFF_SHARE` in which every page is asked for all the same:
99.9 % of samples lie within."""

LocatedBy = Literal["move_pages", "numa_maps", "sample"]
"""How the pages of a region were found: each asked for, the kernel's count of its mappings, or a sample's shares."""


class Place(Protocol):
    """Memory of one kind on one node, as the executor allocated it."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def node(self) -> int: ...


AnyPlace = TypeVar("AnyPlace", bound=Place)


@dataclass(frozen=True)
class RegionPages:
    """One region: where it was planned, and where its pages are.

    ``pages`` counts pages by node; a negative key is an errno (:data:`ABSENT`). ``huge_bytes`` is what of it lies in
    huge pages, ``swapped_bytes`` what was swapped out; None where the kernel does not say. Where they were found by a
    sample, ``pages`` are its shares of all pages.
    """

    name: str
    address: int
    num_bytes: int
    node: int
    pages: Mapping[int, int] = field(default_factory=dict)
    huge_bytes: int | None = None
    swapped_bytes: int | None = None
    located_by: LocatedBy = "move_pages"

    @property
    def num_pages(self) -> int:
        return sum(self.pages.values())

    @property
    def num_off(self) -> int:
        """Pages that are not on the planned node."""
        return self.num_pages - self.pages.get(self.node, 0)

    @property
    def is_off(self) -> bool:
        return self.num_off > OFF_SHARE * self.num_pages


def locate(
    places: Sequence[AnyPlace],
    page_bytes: int,
    ask: Callable[[AnyPlace], Mapping[int, int]],
    root: Path = ROOT,
    ask_pages: AskPages = nodes_of_pages,
) -> tuple[RegionPages, ...]:
    """Find the pages of every place. ``ask`` is move_pages without targets; RuntimeError when it is refused.

    Pages of a place that has more than :data:`MANY_PAGES` are counted by /proc/self/numa_maps, or where that does not
    tell them from others', by a random page of each of :data:`SAMPLE_PAGES` equal pieces. Whether such a place has more
    than :data:`OFF_SHARE` of its pages elsewhere is then known with 99.9 % confidence: nearer to it every page is asked
    for.

    Raises:
        MachineError: neither way is open.
    """
    regions = [RegionPages(p.name, p.address, p.num_bytes, p.node) for p in places]
    smaps = read_text(root, "/proc/self/smaps")
    try:
        found = _ask(regions, places, page_bytes, ask, root, ask_pages)
    except RuntimeError as error:
        text = read_text(root, "/proc/self/numa_maps")
        if text is None:
            raise MachineError(
                f"nobody tells where pages lie: {error}, and there is no /proc/self/numa_maps",
                "run the container with a seccomp profile that allows move_pages",
            ) from error
        return locate_by_maps(regions, page_bytes, text, smaps)
    return tuple(found if smaps is None else _with_smaps(found, smaps))


def _ask(
    regions: Sequence[RegionPages],
    places: Sequence[AnyPlace],
    page_bytes: int,
    ask: Callable[[AnyPlace], Mapping[int, int]],
    root: Path,
    ask_pages: AskPages,
) -> list[RegionPages]:
    are_large = [_count_pages(region, page_bytes) > MANY_PAGES for region in regions]
    maps = read_text(root, "/proc/self/numa_maps") if any(are_large) else None
    counted = {} if maps is None else _counted_alone(regions, _numa_maps(maps), page_bytes)
    found = []
    for region, place, is_large in zip(regions, places, are_large, strict=True):
        result = None
        if is_large:
            result = counted.get(region.address) or _sampled(region, page_bytes, ask_pages)
        found.append(replace(region, pages=dict(ask(place))) if result is None else result)
    return found


def _count_pages(region: RegionPages, page_bytes: int) -> int:
    return align_up(region.num_bytes, page_bytes) // page_bytes


def _counted_alone(
    regions: Sequence[RegionPages], maps: Mapping[int, Counter[int]], page_bytes: int
) -> dict[int, RegionPages]:
    """Regions, by address, whose pages the kernel's counts tell from all others.

    They have mappings of their own, or share some whose pages are all in memory and on one node.
    """
    out: dict[int, RegionPages] = {}
    for members, starts in _mappings(regions, list(maps)):
        total = sum((maps[start] for start in starts), Counter[int]())
        is_plain = len(total) == 1 and total.total() >= sum(_count_pages(region, page_bytes) for region in members)
        if starts and (len(members) == 1 or is_plain):
            out |= {region.address: region for region in _by_maps(members, maps, page_bytes)}
    return out


def _sampled(region: RegionPages, page_bytes: int, ask_pages: AskPages) -> RegionPages | None:
    """``region`` by a sample; None when it is too near to the limit to tell."""
    import numpy as np

    count = _count_pages(region, page_bytes)
    # A random page of each piece: pages in turn over the nodes would all look alike at even distances.
    edges = np.arange(SAMPLE_PAGES + 1, dtype=np.int64) * count // SAMPLE_PAGES
    chosen = np.random.default_rng(region.address).integers(edges[:-1], edges[1:])
    nodes = ask_pages(region.address // page_bytes * page_bytes + chosen * page_bytes)
    shares = Counter(nodes.tolist())
    off = 1 - shares[region.node] / SAMPLE_PAGES
    if abs(off - OFF_SHARE) < DOUBT * math.sqrt(OFF_SHARE * (1 - OFF_SHARE) / SAMPLE_PAGES):
        return None
    pages = {node: found * count // SAMPLE_PAGES for node, found in shares.items()}
    pages[max(pages, key=lambda node: pages[node])] += count - sum(pages.values())
    return replace(region, pages=pages, located_by="sample")


def locate_by_maps(
    places: Sequence[Place], page_bytes: int, numa_maps: str, smaps: str | None
) -> tuple[RegionPages, ...]:
    """Find the pages of every place from the texts of these files of /proc, of this process or of another one."""
    regions = [RegionPages(p.name, p.address, p.num_bytes, p.node) for p in places]
    found = _by_maps(regions, _numa_maps(numa_maps), page_bytes)
    return tuple(found if smaps is None else _with_smaps(found, smaps))


def _numa_maps(text: str) -> dict[int, Counter[int]]:
    """Pages by node of every mapping, by its first address."""
    maps = {}
    for line in text.splitlines():
        words = line.split()
        nodes = (re.fullmatch(r"N(\d+)=(\d+)", word) for word in words[2:])
        maps[int(words[0], 16)] = Counter({int(match[1]): int(match[2]) for match in nodes if match})
    return maps


def _smaps(text: str, name: str) -> dict[int, int]:
    """What smaps says under ``name``, in bytes, of every mapping by its first address."""
    maps, start = {}, 0
    for line in text.splitlines():
        head = re.match(r"([0-9a-f]+)-[0-9a-f]+ ", line)
        if head:
            start = int(head[1], 16)
        elif line.startswith(f"{name}:"):
            maps[start] = read_table(line)[name]
    return maps


def _mappings(regions: Sequence[RegionPages], starts: Sequence[int]) -> list[tuple[list[RegionPages], list[int]]]:
    """Regions that share mappings, with the first addresses of these.

    A region is one mapping or several (one for each policy), and has its own; only pieces of one allocation that no
    policy tells apart lie in one mapping together.
    """
    groups: list[tuple[list[RegionPages], list[int]]] = []
    end = 0
    for region in sorted(regions, key=lambda region: region.address):
        own = [start for start in starts if region.address <= start < region.address + region.num_bytes]
        if own or region.address != end:
            groups.append(([region], own))
        else:
            groups[-1][0].append(region)
        end = region.address + region.num_bytes
    return groups


def _by_maps(regions: Sequence[RegionPages], maps: Mapping[int, Counter[int]], page_bytes: int) -> list[RegionPages]:
    out = {}
    for members, starts in _mappings(regions, list(maps)):
        left = sum((maps[start] for start in starts), Counter[int]())
        wanted = {}
        # Every piece gets the pages on its own node first; what is elsewhere goes to those that lack some.
        for region in members:
            count = align_up(region.num_bytes, page_bytes) // page_bytes
            here = min(count, left[region.node])
            left[region.node] -= here
            out[region.address] = Counter({region.node: here})
            wanted[region.address] = count - here
        for address, count in wanted.items():
            for node in sorted(left):
                taken = min(count, left[node])
                out[address][node] += taken
                left[node] -= taken
                count -= taken
            out[address][ABSENT] += count
    return [
        replace(region, pages={n: count for n, count in out[region.address].items() if count}, located_by="numa_maps")
        for region in regions
    ]


def _with_smaps(regions: Sequence[RegionPages], smaps: str) -> list[RegionPages]:
    huge, swapped = _shares(regions, _smaps(smaps, "AnonHugePages")), _shares(regions, _smaps(smaps, "Swap"))
    return [
        replace(region, huge_bytes=huge.get(region.address), swapped_bytes=swapped.get(region.address))
        for region in regions
    ]


def _shares(regions: Sequence[RegionPages], maps: Mapping[int, int]) -> dict[int, int]:
    """What each region, by its address, has of its mappings' bytes; nothing where the kernel does not say."""
    out = {}
    for members, starts in _mappings(regions, list(maps)):
        total, size = sum(maps[start] for start in starts), sum(region.num_bytes for region in members)
        for region in members if starts else ():
            out[region.address] = total * region.num_bytes // size
    return out


def find_problems(regions: Sequence[RegionPages], policy: Policy, root: Path = ROOT) -> list[str]:
    """One line for every region with too many pages off its node: what was planned, what was found, and likely why."""
    problems = []
    for region in regions:
        if region.is_off:
            where = ", ".join(
                f"{count:,} {'not in memory' if node < 0 else f'on node {node}'}"
                for node, count in sorted(region.pages.items(), reverse=True)
            )
            sample = f", by a sample of {SAMPLE_PAGES:,}" if region.located_by == "sample" else ""
            problems.append(
                f"{region.name} ({format_bytes(region.num_bytes)}) was planned on node {region.node}, its "
                f"{region.num_pages:,} pages are{sample}: {where}; {_reason(region, policy, root)}"
            )
    return problems


def _reason(region: RegionPages, policy: Policy, root: Path) -> str:
    if sum(count for node, count in region.pages.items() if node < 0) * 2 > region.num_off:
        return "pages that are not in memory were swapped out, or never written"
    allowed = read_allowed_nodes(root)
    if allowed is not None and region.node not in allowed:
        listed = format_cpu_list(allowed)
        return f"the cpuset of this process has nodes {listed} only, and the kernel moves pages when it is made smaller"
    if policy == "PREFER":
        return "--numa prefer takes other nodes when one is full"
    if policy == "TOUCH":
        if read_int(root, "/proc/sys/kernel/numa_balancing"):
            return "nothing binds them, and automatic NUMA balancing moves pages (sysctl -w kernel.numa_balancing=0)"
        return "nothing binds them: the node was full when its threads wrote them, or another thread was first"
    return "bound pages stay unless somebody moves them: migrate_pages, a cpuset that changed, memory taken offline"


def summarize(regions: Sequence[RegionPages]) -> list[str]:
    """One line a node: what was planned there, how much of it is there, and in huge pages."""
    lines = []
    for node in dict.fromkeys(region.node for region in regions):
        here = [region for region in regions if region.node == node]
        total, pages = sum(region.num_bytes for region in here), sum(region.num_pages for region in here)
        on_node = 1 - sum(region.num_off for region in here) / max(pages, 1)
        huge = [region.huge_bytes for region in here if region.huge_bytes is not None]
        in_huge = f", {sum(huge) / max(total, 1):.0%} in huge pages" if huge else ""
        in_huge += ", partly by samples" if any(region.located_by == "sample" for region in here) else ""
        what = f"{format_bytes(total)} in {len(here)} regions"
        lines.append(f"node {node}: {what}, {on_node:.2%} of {pages:,} pages on it{in_huge}")
    return lines
