"""Processors that this process may use, and how many threads follow from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_trees import FakeRoot

from hotset.errors import MachineError, RequestError
from hotset.machine.files import format_cpu_list, parse_cpu_list
from hotset.machine.topology import default_threads, pick_cpus, read_topology


def test_one_thread_per_physical_core(machine: FakeRoot) -> None:
    """A thread on each SMT sibling halves the private cache of both and adds no bandwidth."""
    topology = read_topology(machine.path)
    assert topology.cores == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert default_threads(topology) == (4, "one for each of 4 physical cores")
    assert pick_cpus(topology, 4) == (0, 1, 2, 3)
    assert pick_cpus(topology, 6) == (0, 1, 2, 3, 4, 5)


def test_affinity_of_a_container_with_cpuset(machine: FakeRoot) -> None:
    """Threads were counted over all online CPUs and shared the two that the cpuset allows."""
    machine.set_affinity("2-3,6")
    topology = read_topology(machine.path)
    assert topology.cores == ((2, 6), (3,))
    assert default_threads(topology) == (2, "one for each of 2 physical cores in the affinity mask 2-3,6")
    assert pick_cpus(topology, 3) == (2, 3, 6)
    assert topology.cpus_by_node((2, 3, 6)) == ((2, 3, 6),)


@pytest.mark.parametrize(("cpu_max", "threads"), [("150000 100000", 1), ("50000 100000", 1), ("300000 100000", 3)])
def test_quota_is_rounded_down_but_not_to_zero(machine: FakeRoot, cpu_max: str, threads: int) -> None:
    """With 2 threads on 1.5 CPUs one is stopped in every period while the other waits at the barrier."""
    machine.mount_v2("/job")
    machine.write("/sys/fs/cgroup/job/cpu.max", cpu_max)
    number, reason = default_threads(read_topology(machine.path))
    assert number == threads
    quota = int(cpu_max.split()[0]) / 100_000
    assert reason == f"quota of {quota:g} CPUs in /sys/fs/cgroup/job/cpu.max; 4 physical cores"


def test_the_smallest_quota_on_the_way_up_holds(machine: FakeRoot) -> None:
    machine.mount_v2("/pod/job")
    machine.write("/sys/fs/cgroup/pod/job/cpu.max", "300000 100000")
    machine.write("/sys/fs/cgroup/pod/cpu.max", "200000 100000")
    topology = read_topology(machine.path)
    assert topology.quota is not None and topology.quota.num_cpus == 2
    assert default_threads(topology)[0] == 2


def test_v1_quota(machine: FakeRoot) -> None:
    machine.mount_v1("/job")
    machine.write("/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "200000")
    machine.write("/sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    machine.write("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    assert default_threads(read_topology(machine.path))[0] == 2


def test_a_quota_above_the_cores_does_not_matter(machine: FakeRoot) -> None:
    machine.mount_v2("/job")
    machine.write("/sys/fs/cgroup/job/cpu.max", "800000 100000")
    assert default_threads(read_topology(machine.path)) == (4, "one for each of 4 physical cores")


def test_too_many_threads_name_a_number_that_works(machine: FakeRoot) -> None:
    with pytest.raises(RequestError) as caught:
        pick_cpus(read_topology(machine.path), 9)
    assert caught.value.message == "9 threads asked for, this process may use 8 CPUs"
    assert caught.value.hint == "--threads 4"


def test_hidden_topology_counts_every_cpu(machine: FakeRoot, tmp_path: Path) -> None:
    """Some sandboxes hide /sys/devices: then every allowed CPU is a core, one node has all, caches are unknown."""
    import shutil

    shutil.rmtree(tmp_path / "sys/devices")
    topology = read_topology(machine.path)
    assert default_threads(topology)[0] == 8
    assert topology.nodes[0].cpus == tuple(range(8))
    assert topology.last_level_bytes((0, 1)) == 0 and topology.cache_bytes(1, 0) is None


def test_caches_without_instruction_caches(machine: FakeRoot) -> None:
    topology = read_topology(machine.path)
    assert [topology.cache_bytes(level, 5) for level in (1, 2, 3)] == [32 << 10, 1 << 20, 16 << 20]
    assert {cache.num_bytes for cache in topology.caches if cache.level == 1} == {32 << 10}
    assert topology.last_level_bytes((0, 1, 2)) == 16 << 20, "a shared cache counts once"


def test_nodes(machine: FakeRoot) -> None:
    machine.write("/sys/devices/system/node/online", "0-1")
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        directory = f"/sys/devices/system/node/node{node}"
        machine.write(f"{directory}/cpulist", cpus)
        machine.write(f"{directory}/distance", "10 32" if node == 0 else "32 10")
        machine.write(f"{directory}/meminfo", f"Node {node} MemTotal: {node + 1} kB\nNode {node} MemFree: 1 kB")
    topology = read_topology(machine.path)
    assert [node.total_bytes for node in topology.nodes] == [1024, 2048]
    assert topology.nodes[1].distances == (32, 10)
    assert topology.cpus_by_node(pick_cpus(topology, 4)) == ((0, 1), (2, 3))
    assert topology.cpus_by_node((3,)) == ((3,),)


def test_a_node_without_cpus_is_kept(machine: FakeRoot) -> None:
    """HBM of a Grace-Hopper module is such a node: skipping it would lose its memory."""
    machine.write("/sys/devices/system/node/online", "0,2")
    machine.write("/sys/devices/system/node/node0/cpulist", "0-7")
    machine.write("/sys/devices/system/node/node2/cpulist", "")
    machine.write("/sys/devices/system/node/node2/meminfo", "Node 2 MemTotal: 8 kB\nNode 2 MemFree: 8 kB")
    assert [(node.node_id, node.cpus, node.total_bytes) for node in read_topology(machine.path).nodes][1] == (
        2,
        (),
        8192,
    )


def test_arm_processors_are_named_by_their_part(machine: FakeRoot) -> None:
    machine.write("/proc/cpuinfo", "processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n")
    assert read_topology(machine.path).model == "Arm implementer 0x41 part 0xd4f"


def test_page_size_comes_from_the_kernel(machine: FakeRoot) -> None:
    """64 KiB pages (many AArch64 kernels) were assumed to be 4 KiB."""
    import struct

    machine.write_bytes("/proc/self/auxv", struct.pack("=QQQQ", 6, 65536, 0, 0))
    assert read_topology(machine.path).page_bytes == 65536


def test_no_proc_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="cannot read /proc/self/status"):
        read_topology(tmp_path)


def test_this_machine_agrees_with_python() -> None:
    topology = read_topology()
    assert set(topology.affinity) == os.sched_getaffinity(0)
    assert topology.page_bytes == os.sysconf("SC_PAGE_SIZE")
    assert 1 <= default_threads(topology)[0] <= len(topology.affinity)


@given(st.sets(st.integers(0, 300), min_size=1))
def test_cpu_lists_survive_the_round_trip(cpus: set[int]) -> None:
    ordered = tuple(sorted(cpus))
    assert parse_cpu_list(format_cpu_list(ordered)) == ordered
