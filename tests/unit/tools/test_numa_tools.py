"""The parts of tools/numa that need no emulator: archives, module order, descriptions of machines."""

from __future__ import annotations

import lzma
import stat
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "numa"))

import initramfs
from machines import MACHINES, Machine, qemu_words


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
        assert len(row) == count and row[i] == 10 and min(row) == 10
        assert all(row[j] == machine.distances[j][i] for j in range(count))
    words = qemu_words(machine)
    num_known = sum(not node.is_gpu for node in machine.nodes)
    assert sum("hmat-lb" in word for word in words) == 2 * num_known * sum(bool(node.cpus) for node in machine.nodes)
    assert sorted(cpu for node in machine.nodes for cpu in node.cpus) == list(range(machine.num_cpus))
    assert machine.num_mebibytes <= 3 << 10  # CI has 24 GiB for two of everything
