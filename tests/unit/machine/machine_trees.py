"""A small tree of /proc and /sys files in place of a machine's own."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotset.machine.files import parse_cpu_list

GIB = 1 << 30


class FakeRoot:
    """Begins as a machine with 8 CPUs, 2 SMT threads a core (0 and 4, 1 and 5, ...), 16 GiB, and no cgroup."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write("/proc/meminfo", "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 12582912 kB\n")
        self.set_affinity("0-7")
        self.write("/proc/cpuinfo", "processor : 0\nmodel name : Test CPU\n")
        self.write_bytes("/proc/self/auxv", struct.pack("=QQQQQQ", 33, 7, 6, 4096, 0, 0))
        self.write("/sys/devices/system/cpu/online", "0-7")
        for cpu in range(8):
            core = cpu % 4
            directory = f"/sys/devices/system/cpu/cpu{cpu}"
            self.write(f"{directory}/topology/core_cpus_list", f"{core},{core + 4}")
            for index, (level, kind, size, shared) in enumerate(
                ((1, "Data", "32K", f"{core},{core + 4}"), (1, "Instruction", "64K", f"{core},{core + 4}"),
                 (2, "Unified", "1M", f"{core},{core + 4}"), (3, "Unified", "16384K", "0-7"))
            ):  # fmt: skip
                self.write(f"{directory}/cache/index{index}/level", str(level))
                self.write(f"{directory}/cache/index{index}/type", kind)
                self.write(f"{directory}/cache/index{index}/size", size)
                self.write(f"{directory}/cache/index{index}/shared_cpu_list", shared)

    def write(self, name: str, text: str) -> None:
        self.write_bytes(name, (text + "\n").encode())

    def write_bytes(self, name: str, content: bytes) -> None:
        path = self.path / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def set_affinity(self, cpus: str, more: str = "") -> None:
        self.write("/proc/self/status", f"Name: test\nVmSize: 1048576 kB\nCpus_allowed_list:\t{cpus}\n{more}")

    def mount_v2(self, group: str, mount_root: str = "/", mount_point: str = "/sys/fs/cgroup") -> None:
        self.write("/proc/self/cgroup", f"0::{group}")
        self.write("/proc/self/mountinfo", f"30 23 0:26 {mount_root} {mount_point} rw - cgroup2 cgroup2 rw")

    def mount_v1(self, group: str, mount_root: str = "/") -> None:
        """Hybrid, as systemd mounts it: controllers in version 1, version 2 without any."""
        self.write("/proc/self/cgroup", f"4:memory:{group}\n2:cpu,cpuacct:{group}\n0::{group}")
        self.write(
            "/proc/self/mountinfo",
            f"31 23 0:27 {mount_root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
            f"32 23 0:28 {mount_root} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
            f"33 23 0:29 {mount_root} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        )


@dataclass(frozen=True)
class FakeNode:
    node_id: int
    cpus: str
    total_mib: int
    distances: str
    is_movable: bool = False
    has_device: bool = False
    file_cache_mib: int = 0


def write_nodes(machine: FakeRoot, nodes: Sequence[FakeNode]) -> None:
    """Give the machine these nodes; half of each node's memory is free."""
    lists = {
        "online": [node for node in nodes],
        "has_cpu": [node for node in nodes if node.cpus],
        "has_memory": [node for node in nodes if node.total_mib],
        "has_normal_memory": [node for node in nodes if node.total_mib and not node.is_movable],
        "has_generic_initiator": [node for node in nodes if node.has_device],
    }
    for name, members in lists.items():
        machine.write(f"/sys/devices/system/node/{name}", ",".join(str(node.node_id) for node in members))
    for node in nodes:
        directory = f"/sys/devices/system/node/node{node.node_id}"
        machine.write(f"{directory}/cpulist", node.cpus)
        machine.write(f"{directory}/distance", node.distances)
        fields = {"MemTotal": node.total_mib, "MemFree": node.total_mib // 2, "Inactive(file)": node.file_cache_mib}
        text = "\n".join(f"Node {node.node_id} {name}: {mib * 1024} kB" for name, mib in fields.items())
        machine.write(f"{directory}/meminfo", text)
    total = sum(node.total_mib for node in nodes) * 1024
    machine.write("/proc/meminfo", f"MemTotal: {total} kB\nMemFree: {total // 2} kB\nMemAvailable: {total // 2} kB")


def write_cpus(machine: FakeRoot, cores: Sequence[Sequence[int]], sockets: Sequence[str]) -> None:
    """Give the machine these cores (the CPUs of each), in the sockets whose CPU lists are given. No caches."""
    shutil.rmtree(machine.path / "sys/devices/system/cpu")
    last = max(cpu for core in cores for cpu in core)
    machine.write("/sys/devices/system/cpu/online", f"0-{last}")
    machine.set_affinity(f"0-{last}")
    socket_of = {cpu: number for number, cpus in enumerate(sockets) for cpu in parse_cpu_list(cpus)}
    for core in cores:
        for cpu in core:
            directory = f"/sys/devices/system/cpu/cpu{cpu}/topology"
            machine.write(f"{directory}/core_cpus_list", ",".join(map(str, core)))
            machine.write(f"{directory}/physical_package_id", str(socket_of[cpu]))


def epyc_9354_nps4(machine: FakeRoot) -> None:
    """Two sockets of 32 cores with SMT, each socket cut into four nodes of 96 GiB."""
    write_cpus(machine, [(core, core + 64) for core in range(64)], ["0-31,64-95", "32-63,96-127"])
    rows = [[10 if a == b else 12 if a // 4 == b // 4 else 32 for b in range(8)] for a in range(8)]
    write_nodes(
        machine,
        [
            FakeNode(node, f"{8 * node}-{8 * node + 7},{64 + 8 * node}-{71 + 8 * node}", 96 * 1024, join(rows[node]))
            for node in range(8)
        ],
    )


def gh200(machine: FakeRoot) -> None:
    """One GH200 as a kernel commit message shows it: 9 nodes, the GPU's are unreachable from each other."""
    write_cpus(machine, [(cpu,) for cpu in range(72)], ["0-71"])
    rows = [[10 if a == b else 80 if 0 in (a, b) else 255 for b in range(9)] for a in range(9)]
    nodes = [FakeNode(0, "0-71", 490037, join(rows[0])), FakeNode(1, "", 97280, join(rows[1]), True, True)]
    write_nodes(machine, [*nodes, *(FakeNode(node, "", 0, join(rows[node]), False, True) for node in range(2, 9))])


def laptop(machine: FakeRoot) -> None:
    """One node of 32 GiB; two fast cores with SMT and four slow ones without."""
    write_cpus(machine, [(0, 1), (2, 3), (4,), (5,), (6,), (7,)], ["0-7"])
    write_nodes(machine, [FakeNode(0, "0-7", 32 * 1024, "10")])


def join(row: Sequence[int]) -> str:
    return " ".join(map(str, row))
