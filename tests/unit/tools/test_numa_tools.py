"""The parts of tools/numa that need no emulator: archives, module order, descriptions of machines."""

from __future__ import annotations

import lzma
import stat
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "numa"))

import initramfs
from common import Failed
from kernel import unmet
from machines import MACHINES, Machine, qemu_words
from qemu import run_once
from vm import main


def read_archive(data: bytes) -> list[tuple[str, int, bytes]]:
    """Read a "newc" archive as the kernel does (init/initramfs.c)."""
    found, place = [], 0
    while True:
        assert data[place : place + 6] == b"070701" and place % 4 == 0
        fields = [int(data[place + 6 + 8 * i : place + 14 + 8 * i], 16) for i in range(13)]
        name_end = place + 110 + fields[11]
        name = data[place + 110 : name_end - 1].decode()
        start = -(-name_end // 4) * 4
        if name == "TRAILER!!!":
            return found
        found.append((name, fields[1], data[start : start + fields[6]]))
        place = -(-(start + fields[6]) // 4) * 4


def test_the_first_file_system_reads_back() -> None:
    """Bug class: padding that is off for some length of a name or a file, and a kernel that finds no init."""
    entries = [("f" * (1 + i), stat.S_IFREG | 0o644, bytes([i]) * (i * 3)) for i in range(9)]
    entries.insert(0, ("bin", stat.S_IFDIR | 0o755, b""))
    assert read_archive(initramfs.archive(entries)) == entries


def test_modules_come_after_what_they_need(tmp_path: Path) -> None:
    """Bug class: insmod of a module before its symbols are there; names with - for _; what is built in."""
    for name, depends in (("virtio_blk", "virtio-ring"), ("virtio-ring", "virtio"), ("virtio", ""), ("other", "")):
        (tmp_path / f"{name}.ko.xz").write_bytes(lzma.compress(f"ELF\0depends={depends}\0name={name}\0".encode()))
    found = initramfs.find_modules(tmp_path, ["virtio_blk", "ext4", "virtio"])
    assert [path.name for path in found] == ["virtio.ko.xz", "virtio-ring.ko.xz", "virtio_blk.ko.xz"]


@pytest.mark.parametrize("machine", MACHINES.values(), ids=lambda machine: machine.name)
def test_descriptions_are_complete_machines(machine: Machine) -> None:
    """Bug class: a distance or a path that QEMU fills in by itself, so that the guest differs from its description."""
    count = len(machine.nodes)
    for i, row in enumerate(machine.distances):
        # Linux throws away a table in which a node is as near to another one as to itself.
        assert len(row) == count and row[i] == 10 and min(row[:i] + row[i + 1 :]) > 10
        assert all(row[j] == machine.distances[j][i] for j in range(count))
    words = qemu_words(machine)
    num_known = sum(not node.is_gpu for node in machine.nodes)
    assert sum("hmat-lb" in word for word in words) == 2 * num_known * sum(bool(node.cpus) for node in machine.nodes)
    assert sorted(cpu for node in machine.nodes for cpu in node.cpus) == list(range(machine.num_cpus))
    assert machine.num_mebibytes <= 3 << 10  # CI has 24 GiB for two of everything


def test_a_kernel_without_what_was_wished_is_found() -> None:
    """Bug class: a wish whose requirements are off is dropped by the kernel's tool without a word."""
    wishes = "# why\nCONFIG_NUMA=y\nCONFIG_NR_CPUS=64\nCONFIG_CPUSETS=y\n"
    assert unmet(wishes, "CONFIG_NUMA=y\nCONFIG_NR_CPUS=64\nCONFIG_CPUSETS=y\nCONFIG_ACPI=y\n") == []
    assert unmet(wishes, "CONFIG_NUMA=y\nCONFIG_NR_CPUS=640\n# CONFIG_CPUSETS is not set\n") == [
        "CONFIG_NR_CPUS=64", "CONFIG_CPUSETS=y",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x86-64", "--pages", "64"], "only arm64 has pages of 64 KiB"),
        (["arm64", "--machine", "gh200x2-mig"], "18 nodes, too many for Debian's arm64: --pages 64"),
    ],
)
def test_machines_that_no_kernel_has_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bug class: a kernel that leaves nodes out without an error, and tests that pass on half a machine."""
    with pytest.raises(SystemExit):
        main(["test", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "came_up"),
    [("echo firmware; kill -ABRT $$", False), ("echo guest up after 2 s; echo done", True)],
)
def test_a_guest_that_never_came_up_may_be_tried_again(script: str, came_up: bool, tmp_path: Path) -> None:
    """QEMU 10 aborts now and then while firmware maps devices; that is no result of a test."""
    assert run_once(["sh", "-c", script], tmp_path / "log", 60) == came_up


@pytest.mark.parametrize("script", ["echo guest up after 2 s; kill -ABRT $$", "echo no such option; exit 1"])
def test_an_emulator_that_fails_for_a_reason_is_a_failure(script: str, tmp_path: Path) -> None:
    """Bug class: trials until it works, and a guest that crashes the emulator every other time is green."""
    with pytest.raises(Failed, match="QEMU ended with status"):
        run_once(["sh", "-c", script], tmp_path / "log", 60)
