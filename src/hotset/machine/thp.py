"""Huge pages: with 4 KiB pages a machine reads its memory 20 to 30 % slower, so their state is always said."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotset.machine.files import ROOT, read_int, read_table, read_text
from hotset.units import KIB, MIB, format_bytes

THP = "/sys/kernel/mm/transparent_hugepage"
POOLS = "/sys/kernel/mm/hugepages"
#: What x86-64 and 4 KiB-page AArch64 use where the kernel does not say (before Linux 4.20).
USUAL_HUGE_PAGE_BYTES = 2 * MIB


@dataclass(frozen=True)
class HugePagePool:
    """Pages set aside by the administrator (hugetlbfs); hotset reports them and does not use them yet."""

    page_bytes: int
    num_pages: int
    num_free: int


@dataclass(frozen=True)
class HugePages:
    """What the kernel offers to a process that asks for huge pages with madvise."""

    mode: str  # "always", "madvise", "never", or "absent": the kernel was built without them
    page_bytes: int
    is_disabled_for_process: bool  # prctl(PR_SET_THP_DISABLE), inherited from a parent
    pools: tuple[HugePagePool, ...]

    @property
    def is_offered(self) -> bool:
        return self.mode in ("always", "madvise") and not self.is_disabled_for_process


def read_huge_pages(root: Path = ROOT) -> HugePages:
    """Read the transparent huge page mode, the size of such a page, and the administrator's pools."""
    page_bytes = read_int(root, f"{THP}/hpage_pmd_size") or USUAL_HUGE_PAGE_BYTES
    mode = _chosen(read_text(root, f"{THP}/enabled")) or "absent"
    # Since Linux 6.8 each size has its own switch, "inherit" by default.
    own_mode = _chosen(read_text(root, f"{THP}/hugepages-{page_bytes // KIB}kB/enabled"))
    if own_mode is not None and own_mode != "inherit":
        mode = own_mode
    status = read_table(read_text(root, "/proc/self/status") or "")
    return HugePages(mode, page_bytes, status.get("THP_enabled") == 0, _pools(root))


def advice(pages: HugePages) -> str | None:
    """Say in plain words what to do when huge pages are off; ``None`` when they are offered."""
    if pages.is_offered:
        return None
    cost = "reading memory is then 20 to 30 % slower"
    if pages.is_disabled_for_process:
        return f"huge pages are switched off for this process by what started it (PR_SET_THP_DISABLE); {cost}"
    if pages.mode == "absent":
        return f"this kernel has no transparent huge pages; {cost}"
    return f"huge pages are off; {cost}. Turn them on, as root: echo madvise > {THP}/enabled"


def describe(pages: HugePages) -> str:
    """Say in one line what is offered."""
    state = f"{format_bytes(pages.page_bytes)}, {pages.mode}" if pages.is_offered else "off"
    pools = [f"{pool.num_pages} x {format_bytes(pool.page_bytes)} set aside" for pool in pages.pools if pool.num_pages]
    return ", ".join([state, *pools])


def _chosen(text: str | None) -> str | None:
    """The word in brackets: ``"always [madvise] never"`` gives ``"madvise"``."""
    if text is None or "[" not in text:
        return None
    return text[text.index("[") + 1 : text.index("]")]


def _pools(root: Path) -> tuple[HugePagePool, ...]:
    directory = root / POOLS.lstrip("/")
    pools = []
    for entry in sorted(directory.glob("hugepages-*kB")) if directory.is_dir() else []:
        name = f"{POOLS}/{entry.name}"
        size = int(entry.name.removeprefix("hugepages-").removesuffix("kB")) * KIB
        pools.append(
            HugePagePool(
                size, read_int(root, f"{name}/nr_hugepages") or 0, read_int(root, f"{name}/free_hugepages") or 0
            )
        )
    return tuple(sorted(pools, key=lambda pool: pool.page_bytes))
