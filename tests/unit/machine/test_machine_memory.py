"""Memory that this process may take: the tightest limit decides, wherever it is written.

The bug class: engines that read MemTotal or one cgroup file, start in a container, and are killed at load.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from machine_trees import GIB, FakeRoot

from hotset.errors import MachineError
from hotset.machine.memory import read_memory


def test_without_cgroup_the_kernel_says(machine: FakeRoot) -> None:
    memory = read_memory(machine.path)
    assert (memory.available_bytes, memory.total_bytes) == (12 * GIB, 16 * GIB)
    assert memory.describe() == "12.00 GiB available of 16.00 GiB (limit: MemAvailable in /proc/meminfo)"


def test_v2_limit_counts_file_cache_as_free(machine: FakeRoot) -> None:
    """Page cache of the model file itself was counted as used by others, and a second start was refused (D011)."""
    machine.mount_v2("/job")
    machine.write("/sys/fs/cgroup/job/memory.max", str(4 * GIB))
    machine.write("/sys/fs/cgroup/job/memory.current", str(3 * GIB))
    machine.write("/sys/fs/cgroup/job/memory.stat", f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\nshmem 5")
    memory = read_memory(machine.path)
    assert memory.source == "/sys/fs/cgroup/job/memory.max"
    assert memory.available_bytes == 4 * GIB - (3 * GIB - GIB - GIB // 2)
    assert memory.total_bytes == 4 * GIB


def test_a_limit_of_a_parent_holds(machine: FakeRoot) -> None:
    """Only the innermost group was read; the limit of the pod above it killed the process."""
    machine.mount_v2("/pod/job")
    machine.write("/sys/fs/cgroup/pod/job/memory.max", "max")
    machine.write("/sys/fs/cgroup/pod/job/memory.current", "0")
    machine.write("/sys/fs/cgroup/pod/memory.max", str(8 * GIB))
    machine.write("/sys/fs/cgroup/pod/memory.current", str(6 * GIB))
    memory = read_memory(machine.path)
    assert (memory.source, memory.available_bytes) == ("/sys/fs/cgroup/pod/memory.max", 2 * GIB)


def test_memory_high_is_a_limit(machine: FakeRoot) -> None:
    """A process above memory.high is not killed but crawls, which looks like a hang."""
    machine.mount_v2("/job")
    machine.write("/sys/fs/cgroup/job/memory.max", str(8 * GIB))
    machine.write("/sys/fs/cgroup/job/memory.high", str(2 * GIB))
    machine.write("/sys/fs/cgroup/job/memory.current", "0")
    assert read_memory(machine.path).source == "/sys/fs/cgroup/job/memory.high"


def test_a_loose_limit_does_not_decide(machine: FakeRoot) -> None:
    """A 64 GiB limit on a 16 GiB machine was taken for memory that is there."""
    machine.mount_v2("/job")
    machine.write("/sys/fs/cgroup/job/memory.max", str(64 * GIB))
    machine.write("/sys/fs/cgroup/job/memory.current", "0")
    memory = read_memory(machine.path)
    assert (memory.available_bytes, memory.total_bytes) == (12 * GIB, 16 * GIB)


def test_v1_limit_with_its_own_names(machine: FakeRoot) -> None:
    machine.mount_v1("/docker/abc")
    directory = "/sys/fs/cgroup/memory/docker/abc"
    machine.write(f"{directory}/memory.limit_in_bytes", str(2 * GIB))
    machine.write(f"{directory}/memory.usage_in_bytes", str(GIB))
    machine.write(f"{directory}/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB // 4}\ntotal_active_file 0")
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    machine.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", str(9 * GIB))
    memory = read_memory(machine.path)
    assert memory.source == f"{directory}/memory.limit_in_bytes"
    assert memory.available_bytes == 2 * GIB - 3 * GIB // 4
    assert len(memory.terms) == 2, "the root's 'no limit' number is not a limit"


def test_container_sees_its_part_of_the_hierarchy(machine: FakeRoot) -> None:
    """Docker without a cgroup namespace mounts /docker/abc at the top: joining the two paths finds nothing."""
    machine.mount_v1("/docker/abc", mount_root="/docker/abc")
    machine.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", str(2 * GIB))
    machine.write("/sys/fs/cgroup/memory/memory.usage_in_bytes", "0")
    assert read_memory(machine.path).available_bytes == 2 * GIB


def test_path_outside_the_mount_falls_back_to_the_mount_point(machine: FakeRoot) -> None:
    """In a cgroup namespace of its own a process can be at /../job; the mount point is all it can see."""
    machine.mount_v2("/../job")
    machine.write("/sys/fs/cgroup/memory.max", str(3 * GIB))
    machine.write("/sys/fs/cgroup/memory.current", "0")
    machine.write("/sys/fs/job/memory.max", str(GIB))  # where joining the paths would lead
    machine.write("/sys/fs/job/memory.current", "0")
    assert read_memory(machine.path).available_bytes == 3 * GIB


def test_used_up_limit_leaves_nothing_rather_than_a_negative(machine: FakeRoot) -> None:
    machine.mount_v2("/job")
    machine.write("/sys/fs/cgroup/job/memory.max", str(GIB))
    machine.write("/sys/fs/cgroup/job/memory.current", str(2 * GIB))
    assert read_memory(machine.path).available_bytes == 0


def test_address_space_limit_counts(machine: FakeRoot) -> None:
    """Under ulimit -v the first large mmap failed although /proc/meminfo had room."""
    machine.write("/proc/self/limits", f"Limit  Soft  Hard  Units\nMax address space  {3 * GIB}  unlimited  bytes")
    memory = read_memory(machine.path)
    assert (memory.source, memory.available_bytes) == ("address space limit (ulimit -v)", 2 * GIB)
    machine.write("/proc/self/limits", "Max address space         unlimited   unlimited   bytes")
    assert read_memory(machine.path).available_bytes == 12 * GIB


def test_no_proc_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot read /proc/meminfo"):
        read_memory(tmp_path)


def test_nonsense_in_a_limit_file_is_named(machine: FakeRoot) -> None:
    machine.mount_v2("/job")
    machine.write("/sys/fs/cgroup/job/memory.current", "plenty")
    with pytest.raises(MachineError, match=r"memory\.current holds 'plenty', expected a number"):
        read_memory(machine.path)


def test_this_machine_can_be_read() -> None:
    memory = read_memory()
    assert 0 < memory.available_bytes <= memory.total_bytes
