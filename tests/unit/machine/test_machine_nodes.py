"""NUMA nodes of machines as they really are: GPU memory that looks like a node, nodes without memory, cpusets.

The snapshots were taken inside machines under QEMU that number their nodes as real ones do; the trees of
machine_trees.py follow published descriptions of machines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from machine_trees import GIB, FakeNode, FakeRoot, epyc_9354_nps4, gh200, laptop, write_nodes

from hotset.errors import RequestError
from hotset.machine.memory import read_memory
from hotset.machine.nodes import UNREACHABLE, read_nodes
from hotset.machine.topology import default_threads, read_topology

Snapshot = Callable[[str], Path]
MIB = 1 << 20


@pytest.mark.parametrize("name", ["arm64-64k-gh200x2-mig-hotadd", "x86-gh200x2-mig-hotadd"])
def test_dual_gh200(snapshot: Snapshot, name: str) -> None:
    """Engines counted 18 nodes here, bound threads to node 2, or interleaved weights over GPU memory."""
    topology = read_topology(snapshot(name))
    assert (topology.cpu_nodes, topology.gpu_nodes) == ((0, 1), (2, 10))
    kinds = {node.node_id: node.kind for node in topology.nodes}
    assert len(kinds) == 18 and set(kinds.values()) == {"cpu", "gpu", "empty"}
    assert [node_id for node_id, kind in kinds.items() if kind == "empty"] == [*range(3, 10), *range(11, 18)]
    assert [node.node_id for node in topology.nodes if node.has_generic_initiator] == list(range(2, 18))
    assert not any(node.is_kind_guessed for node in topology.nodes)
    assert [topology.nearest_cpu_node(node_id) for node_id in (0, 1, 2, 9, 10, 17)] == [0, 1, 0, 0, 1, 1]
    assert topology.distance(0, 1) == 40 and topology.distance(1, 10) == 80 and topology.distance(1, 2) == 120
    assert topology.allowed_nodes == (0, 1, 2, 10)
    assert topology.node_cpus(1) == (2, 3) and topology.node_cpus(10) == ()
    assert len(topology.sockets) == 2


@pytest.mark.parametrize("name", ["arm64-64k-gh200x2-mig-static", "x86-gh200x2-mig-static"])
def test_gpu_memory_that_came_online_as_normal_memory(snapshot: Snapshot, name: str) -> None:
    """With auto_online_blocks=online the pages are not movable; only the list of devices tells it is a GPU's."""
    topology = read_topology(snapshot(name))
    assert (topology.cpu_nodes, topology.gpu_nodes) == ((0, 1), (2, 10))


def test_gpu_memory_without_an_entry_for_the_device(machine: FakeRoot) -> None:
    """A driver that finds its nodes in properties of the device: firmware lists none, movable pages tell it."""
    nodes = [
        FakeNode(0, "0-7", 1024, "10 80 80"),
        FakeNode(1, "", 512, "80 10 11"),
        FakeNode(5, "", 512, "80 11 10", True),
    ]
    write_nodes(machine, nodes)
    assert [node.kind for node in read_topology(machine.path).nodes] == ["cpu", "memory", "gpu"]


@pytest.mark.parametrize(
    ("evidence", "kind", "is_guessed"),
    [
        ({}, "gpu", True),
        ({"/sys/bus/dax/devices/dax4.0/target_node": "4"}, "memory", False),
        ({"/sys/bus/cxl/devices/dax_region0/target_node": "4"}, "memory", False),
        ({"/sys/bus/dax/devices/dax0.0/target_node": "-1"}, "gpu", True),
        ({"/proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node:      4\nStatus:    online"}, "gpu", False),
        ({"/proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node:      -1\nStatus:    offline"}, "gpu", True),
        (
            {
                "/proc/driver/nvidia/gpus/0009:01:00.0/numa_status": "Node: 4",
                "/sys/bus/dax/devices/dax4.0/target_node": "4",
            },
            "gpu",
            False,
        ),
    ],
)
def test_movable_memory_is_what_its_device_says(machine: FakeRoot, evidence, kind: str, is_guessed: bool) -> None:
    """CXL memory that was brought online as movable was a GPU's: not counted, and named hbm in profiles."""
    write_nodes(machine, [FakeNode(0, "0-7", 1024, "10 20"), FakeNode(4, "", 512, "20 10", is_movable=True)])
    for path, text in evidence.items():
        machine.write(path, text)
    topology = read_topology(machine.path)
    assert (topology.node(4).kind, topology.node(4).is_kind_guessed) == (kind, is_guessed)
    named = topology.with_gpu_memory((4,))
    assert (named.node(4).kind, named.node(4).is_kind_guessed, named.node(0).kind) == ("gpu", False, "cpu")
    assert topology.with_gpu_memory(()) == topology
    counted = 1024 + 512 if kind == "memory" else 1024
    assert read_memory(machine.path).total_bytes == counted * MIB


def test_memory_nodes_without_a_device_are_memory(snapshot: Snapshot) -> None:
    topology = read_topology(snapshot("x86-gh200x2-hmat"))
    assert [node.kind for node in topology.nodes] == ["cpu", "cpu", "memory", "memory"]


def test_cdmm_has_no_gpu_node(snapshot: Snapshot) -> None:
    topology = read_topology(snapshot("x86-gh200x2-cdmm-cdmm"))
    assert (topology.cpu_nodes, topology.gpu_nodes) == ((0, 1), ())


def test_one_unified_memory(snapshot: Snapshot) -> None:
    topology = read_topology(snapshot("x86-gb10-gb10"))
    assert (topology.cpu_nodes, topology.gpu_nodes, topology.allowed_nodes) == ((0,), (), (0,))


def test_pages_of_the_snapshots(snapshot: Snapshot) -> None:
    """A snapshot has no auxiliary vector: 64 KiB pages follow from huge pages of 512 MiB, 4 KiB from 2 MiB."""
    arm = read_topology(snapshot("arm64-64k-gh200x2-mig-hotadd"))
    assert (arm.page_bytes, arm.huge_pages.page_bytes) == (64 << 10, 512 * MIB)
    assert [pool.page_bytes for pool in arm.node(0).pools] == [2 * MIB, 512 * MIB, 16 * GIB]
    x86 = read_topology(snapshot("x86-gb10-gb10"))
    assert (x86.page_bytes, x86.huge_pages.page_bytes) == (4 << 10, 2 * MIB)


def test_16_kib_pages(machine: FakeRoot) -> None:
    (machine.path / "proc/self/auxv").unlink()
    machine.write("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", str(32 * MIB))
    assert read_topology(machine.path).page_bytes == 16 << 10


def test_hmat_values_and_their_absence(snapshot: Snapshot) -> None:
    """Hot-added memory has no entry, and one node lists every node as initiator with a bandwidth of 0."""
    static = read_topology(snapshot("x86-gh200x2-mig-static"))
    near, hbm = static.node(0).initiators, static.node(2).initiators
    assert near is not None and near.nodes == (0,) and near.read_latency_s == pytest.approx(120e-9)
    assert hbm is not None and hbm.nodes == (0,) and hbm.read_bytes_per_s == 297 * GIB
    assert static.node(10).cpu_initiators is not None and static.node(10).cpu_initiators.nodes == (1,)
    hot_added = read_topology(snapshot("x86-gh200x2-mig-hotadd"))
    assert hot_added.node(2).initiators is None and hot_added.node(17).initiators is None


@pytest.mark.parametrize(
    "name", ["arm64-64k-gh200x2-mig-hotadd", "x86-gh200x2-mig-static", "x86-gh200x2-hmat", "x86-gb10-gb10"]
)
def test_what_nodes_can_give_adds_up_to_what_the_machine_can(snapshot: Snapshot, name: str) -> None:
    """Counting MemFree as available plans 5 % too much on a small machine, and forgets the file cache on a used one."""
    root = snapshot(name)
    available = read_memory(root).terms[0].available_bytes
    nodes = read_nodes(root, ())
    assert sum(node.available_bytes for node in nodes) == pytest.approx(available, rel=0.01)
    assert sum(node.free_bytes for node in nodes) > 1.02 * available


def test_gpu_memory_is_not_memory_of_a_run(snapshot: Snapshot) -> None:
    """MemAvailable of a Grace-Hopper machine counts the HBM; planning with it fills the GPU from the CPU side."""
    memory = read_memory(snapshot("arm64-64k-gh200x2-mig-hotadd"))
    assert memory.source == "NUMA nodes 0-1, the others are GPU memory"
    assert memory.total_bytes < memory.terms[0].limit_bytes - 2 * 1024 * MIB + MIB
    assert len(read_memory(snapshot("x86-gh200x2-hmat")).terms) == 1, "memory without CPUs is memory"


def test_one_gh200(machine: FakeRoot) -> None:
    gh200(machine)
    topology = read_topology(machine.path)
    assert (topology.cpu_nodes, topology.gpu_nodes) == ((0,), (1,))
    assert topology.distance(1, 2) == UNREACHABLE and topology.distance(0, 1) == 80
    assert topology.nearest_cpu_node(8) == 0
    assert topology.node_cpus(0) == tuple(range(72))


def test_two_socket_epyc_in_nps4(machine: FakeRoot) -> None:
    epyc_9354_nps4(machine)
    topology = read_topology(machine.path)
    assert topology.cpu_nodes == tuple(range(8)) and topology.threads_per_core == 2
    assert [socket.cpus[0] for socket in topology.sockets] == [0, 32]
    assert topology.node_cpus(3) == (*range(24, 32), *range(88, 96)), "the second threads of cores come last"
    assert default_threads(topology)[0] == 64
    assert {topology.distance(0, other) for other in range(1, 4)} == {12} and topology.distance(0, 4) == 32


def test_cpuset_of_a_container(machine: FakeRoot) -> None:
    """Planning with the memory of all eight nodes in a container that may use one ends in EINVAL or the OOM killer."""
    epyc_9354_nps4(machine)
    machine.set_affinity("4-11,68", more="Mems_allowed_list:\t0")
    topology = read_topology(machine.path)
    assert topology.allowed_nodes == (0,)
    assert topology.node_cpus(0) == (4, 5, 6, 7, 68) and topology.node_cpus(1) == (8, 9, 10, 11)
    assert topology.node_cpus(2) == ()
    memory = read_memory(machine.path)
    assert (memory.source, memory.total_bytes) == ("NUMA node 0, the others are not in the cpuset", 96 * GIB)
    assert memory.available_bytes == 48 * GIB


def test_laptop(machine: FakeRoot) -> None:
    laptop(machine)
    topology = read_topology(machine.path)
    assert (topology.cpu_nodes, topology.threads_per_core, len(topology.cores)) == ((0,), 2, 6)
    assert topology.node_cpus(0) == (0, 2, 4, 5, 6, 7, 1, 3)
    assert len(read_memory(machine.path).terms) == 1


def test_node_ids_are_not_places(machine: FakeRoot) -> None:
    """nodes[8] was taken for node 8 on a machine whose nodes are 0 and 8 (POWER, disabled memory channels)."""
    write_nodes(machine, [FakeNode(0, "0-3", 1024, "10 40"), FakeNode(8, "4-7", 2048, "40 10")])
    topology = read_topology(machine.path)
    assert topology.node(8).total_bytes == 2048 * MIB and topology.distance(0, 8) == 40
    with pytest.raises(RequestError) as caught:
        topology.node(1)
    assert caught.value.hint == "nodes with CPUs or memory: 0, 8"


def test_distances_that_are_not_told(machine: FakeRoot) -> None:
    """The nearest node to node 1 was node 0."""
    write_nodes(machine, [FakeNode(0, "0-3", 1024, ""), FakeNode(1, "4-7", 1024, "")])
    topology = read_topology(machine.path)
    assert topology.distance(1, 1) is None and topology.nearest_cpu_node(1) == 1


def test_cpus_without_memory_are_no_place_for_weights(machine: FakeRoot) -> None:
    """An EPYC with empty memory channels has such nodes; binding there is EINVAL."""
    write_nodes(machine, [FakeNode(0, "0-3", 1024, "10 12"), FakeNode(1, "4-7", 0, "12 10")])
    topology = read_topology(machine.path)
    assert topology.node(1).kind == "cpu" and topology.cpu_nodes == (0,)
    assert topology.nearest_cpu_node(1) == 0


def test_file_cache_and_claims(machine: FakeRoot) -> None:
    write_nodes(machine, [FakeNode(0, "0-7", 1024, "10", file_cache_mib=256)])
    directory = "/sys/devices/system/node/node0"
    text = (machine.path / directory.lstrip("/") / "meminfo").read_text()
    machine.write(f"{directory}/meminfo", f"{text}Node 0 Shmem: 8 kB\nNode 0 Unevictable: 4 kB\nNode 0 Mlocked: 2 kB")
    node = read_topology(machine.path).node(0)
    assert node.available_bytes == (512 + 256) * MIB
    assert (node.shared_bytes, node.unevictable_bytes, node.mlocked_bytes) == (8192, 4096, 2048)
    zone = "Node 0, zone Normal\n        low      1024\n        high     2048\n        managed  99999\n"
    machine.write("/proc/zoneinfo", f"{zone}        protection: (0, 0, 512)\n  pagesets\n              high: 77")
    kept = 4096 * (2048 + 512 + 1024)
    assert read_topology(machine.path).node(0).available_bytes == (512 + 256) * MIB - kept


@pytest.mark.parametrize("online", [None, "0"])
def test_one_node_that_is_hidden_has_everything(machine: FakeRoot, online: str | None) -> None:
    """A sandbox that lists the node and hides its files was a machine without memory."""
    if online is not None:
        machine.write("/sys/devices/system/node/online", online)
    topology = read_topology(machine.path)
    assert topology.cpu_nodes == (0,) and topology.node_cpus(0)[:2] == (0, 1)
    assert topology.node(0).total_bytes == 16 * GIB and topology.node(0).available_bytes == 12 * GIB
    assert len(read_memory(machine.path).terms) == 1


def test_huge_pages_set_aside_on_a_node(machine: FakeRoot) -> None:
    write_nodes(machine, [FakeNode(0, "0-7", 1024, "10")])
    pool = "/sys/devices/system/node/node0/hugepages/hugepages-1048576kB"
    machine.write(f"{pool}/nr_hugepages", "4")
    machine.write(f"{pool}/free_hugepages", "3")
    (found,) = read_topology(machine.path).node(0).pools
    assert (found.page_bytes, found.num_pages, found.num_free) == (GIB, 4, 3)


def test_this_machine() -> None:
    topology = read_topology()
    assert {cpu for node in topology.cpu_nodes for cpu in topology.node_cpus(node)} <= os.sched_getaffinity(0)
    assert set(topology.allowed_nodes) & {node.node_id for node in topology.nodes if node.total_bytes}
