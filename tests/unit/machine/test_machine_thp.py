"""Huge pages: what is offered, and the line that says what to do when nothing is."""

from __future__ import annotations

import pytest
from machine_trees import FakeRoot

from hotset.machine.advice import huge_page_advice
from hotset.machine.thp import THP, describe, read_huge_pages


@pytest.mark.parametrize("mode", ["always", "madvise"])
def test_offered(machine: FakeRoot, mode: str) -> None:
    machine.write(f"{THP}/enabled", "always madvise never".replace(mode, f"[{mode}]"))
    machine.write(f"{THP}/hpage_pmd_size", "2097152")
    pages = read_huge_pages(machine.path)
    assert huge_page_advice(pages) is None
    assert describe(pages) == f"2.00 MiB, {mode}"


def test_never_says_the_command(machine: FakeRoot) -> None:
    machine.write(f"{THP}/enabled", "always madvise [never]")
    advice = huge_page_advice(read_huge_pages(machine.path))
    assert advice is not None
    assert advice.line == (
        "huge pages are off; reading memory is then 20 to 30 % slower. "
        "As root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )


def test_kernel_without_them(machine: FakeRoot) -> None:
    advice = huge_page_advice(read_huge_pages(machine.path))
    assert advice is not None and advice.line.startswith("huge pages are not in this kernel; ")


def test_switched_off_by_a_parent_process(machine: FakeRoot) -> None:
    """The system-wide mode says madvise, and still madvise does nothing."""
    machine.write(f"{THP}/enabled", "always [madvise] never")
    machine.set_affinity("0-7", more="THP_enabled:\t0")
    advice = huge_page_advice(read_huge_pages(machine.path))
    assert advice is not None and "PR_SET_THP_DISABLE" in advice.line


def test_the_switch_of_the_size_wins(machine: FakeRoot) -> None:
    """Since Linux 6.8 each size has its own file."""
    machine.write(f"{THP}/enabled", "[always] madvise never")
    machine.write(f"{THP}/hpage_pmd_size", "2097152")
    machine.write(f"{THP}/hugepages-2048kB/enabled", "always inherit madvise [never]")
    assert read_huge_pages(machine.path).mode == "never"
    machine.write(f"{THP}/hugepages-2048kB/enabled", "always [inherit] madvise never")
    assert read_huge_pages(machine.path).mode == "always"


def test_pools_are_reported(machine: FakeRoot) -> None:
    machine.write(f"{THP}/enabled", "[always] madvise never")
    for size, number in ((1048576, 2), (2048, 0)):
        machine.write(f"/sys/kernel/mm/hugepages/hugepages-{size}kB/nr_hugepages", str(number))
        machine.write(f"/sys/kernel/mm/hugepages/hugepages-{size}kB/free_hugepages", str(number))
    assert describe(read_huge_pages(machine.path)) == "2.00 MiB, always, 2 x 1.00 GiB set aside"
