"""Pages and huge pages: with 4 KiB pages a machine reads its memory 20 to 30 % slower, so their state is said."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from hotset.errors import MachineError
from hotset.machine.files import ROOT, list_names, read_int, read_table, read_text
from hotset.units import KIB, MIB, format_bytes

THP = "/sys/kernel/mm/transparent_hugepage"
POOLS = "/sys/kernel/mm/hugepages"
#: What x86-64 and 4 KiB-page AArch64 use where the kernel does not say (before Linux 4.20).
USUAL_HUGE_PAGE_BYTES = 2 * MIB
AT_PAGESZ = 6  # the page size's key in the auxiliary vector, from elf.h


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
    return HugePages(mode, page_bytes, status.get("THP_enabled") == 0, read_pools(root, POOLS))


def read_page_bytes(root: Path = ROOT) -> int:
    """The page size, from the process's auxiliary vector: pairs of native words (key, value).

    A snapshot of another machine has no vector. There it follows from the size of a huge page: one page of 8-byte
    entries maps it, so it has page_bytes * page_bytes / 8 bytes (2, 32 and 512 MiB for pages of 4, 16 and 64 KiB).
    """
    try:
        vector = (root / "proc/self/auxv").read_bytes()
    except OSError as error:
        huge_bytes = read_int(root, f"{THP}/hpage_pmd_size")
        if huge_bytes is not None:
            return math.isqrt(8 * huge_bytes)
        raise MachineError(f"cannot read /proc/self/auxv: {error.strerror}", "run hotset with /proc mounted") from None
    for key, value in struct.iter_unpack("=QQ", vector[: len(vector) // 16 * 16]):
        if key == AT_PAGESZ:
            return int(value)
    raise MachineError("/proc/self/auxv does not give the page size", "run hotset with /proc mounted")


def read_pools(root: Path, directory: str) -> tuple[HugePagePool, ...]:
    """Read the pools of ``directory``: the whole machine's, or those of one node."""
    pools = []
    for name in list_names(root, directory):
        if name.startswith("hugepages-"):
            num_bytes = int(name.removeprefix("hugepages-").removesuffix("kB")) * KIB
            num_pages = read_int(root, f"{directory}/{name}/nr_hugepages") or 0
            num_free = read_int(root, f"{directory}/{name}/free_hugepages") or 0
            pools.append(HugePagePool(num_bytes, num_pages, num_free))
    return tuple(sorted(pools, key=lambda pool: pool.page_bytes))


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
