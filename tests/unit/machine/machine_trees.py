"""A small tree of /proc and /sys files in place of a machine's own."""

from __future__ import annotations

import struct
from pathlib import Path

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
