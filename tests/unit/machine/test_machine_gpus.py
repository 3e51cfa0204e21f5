"""GPUs as NVML describes them: which node has the CPUs next to each, and which node is its own memory."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
from machine_trees import GIB, FakeNode, FakeRoot, write_nodes

from hotset.machine.gpus import FUNCTION_NOT_FOUND, NOT_SUPPORTED, P2P_OK, PCI_DEVICES, SUCCESS, Gpu, Gpus, read_gpus
from hotset.machine.topology import Topology, read_topology

NO_DRIVER = 9
P2P_NOT_SUPPORTED = 1


class FakeNvml(SimpleNamespace):
    """NVML with ``num_gpus`` GPUs. Functions are plain ones, as ctypes needs a restype on one of them."""

    def __init__(self, num_gpus: int, memory_nodes: tuple[int, ...] = (), *, has_memory: bool = True) -> None:
        super().__init__()
        self.is_open = False
        self.peers: set[tuple[int, int]] = set()

        def init() -> int:
            self.is_open = True
            return SUCCESS

        def shutdown() -> int:
            self.is_open = False
            return SUCCESS

        def put(reference: Any, value: int) -> int:
            reference._obj.value = value
            return SUCCESS

        def name(handle: Any, text: Any, length: Any) -> int:
            assert len(text) == length.value
            text.value = f"NVIDIA GH200 {handle.value - 100}".encode()
            return SUCCESS

        def pci(handle: Any, reference: Any) -> int:
            reference._obj.domain, reference._obj.bus = 9 + handle.value - 100, 1
            return SUCCESS

        def memory(handle: Any, reference: Any) -> int:
            if not has_memory:
                return NOT_SUPPORTED
            reference._obj.total, reference._obj.free = 96 * GIB, 95 * GIB
            return SUCCESS

        def peer(handle: Any, other: Any, index: Any, reference: Any) -> int:
            pair = (handle.value - 100, other.value - 100)
            return put(reference, P2P_OK if pair in self.peers else P2P_NOT_SUPPORTED)

        def error(code: int) -> bytes:
            return {NO_DRIVER: b"Driver Not Loaded"}[code]

        self.nvmlInit_v2, self.nvmlShutdown, self.nvmlErrorString = init, shutdown, error
        self.nvmlDeviceGetCount_v2 = lambda count: put(count, num_gpus)
        self.nvmlDeviceGetHandleByIndex_v2 = lambda index, handle: put(handle, 100 + index.value)
        self.nvmlDeviceGetName, self.nvmlDeviceGetPciInfo_v3 = name, pci
        self.nvmlDeviceGetMemoryInfo, self.nvmlDeviceGetP2PStatus = memory, peer
        if memory_nodes:
            self.nvmlDeviceGetNumaNodeId = lambda handle, node: put(node, memory_nodes[handle.value - 100])


@pytest.fixture
def dual_gh200(machine: FakeRoot) -> Topology:
    nodes = [
        FakeNode(0, "0-3", 4096, "10 40 80 120"),
        FakeNode(1, "4-7", 4096, "40 10 120 80"),
        FakeNode(2, "", 1024, "80 120 10 40", True, True),
        FakeNode(10, "", 1024, "120 80 40 10", True, True),
    ]
    write_nodes(machine, nodes)
    return read_topology(machine.path)


@pytest.mark.parametrize("pci_nodes", [(0, 1), (2, 10), (-1, -1), ()])
def test_both_nodes_of_each_gpu(machine: FakeRoot, dual_gh200: Topology, pci_nodes: tuple[int, ...]) -> None:
    """vLLM took the memory's node for the CPUs' and failed in sched_setaffinity (PR 39361)."""
    for gpu_id, node in enumerate(pci_nodes):
        machine.write(f"{PCI_DEVICES}/{9 + gpu_id:04x}:01:00.0/numa_node", str(node))
    library = FakeNvml(2, (2, 10))
    gpus = read_gpus(dual_gh200, machine.path, library)
    assert gpus.absence is None and not library.is_open
    assert gpus.found[1] == Gpu(1, "NVIDIA GH200 1", "000a:01:00.0", 96 * GIB, 95 * GIB, 1, 10, ())
    assert [(gpu.cpu_node, gpu.memory_node) for gpu in gpus.found] == [(0, 2), (1, 10)]


def test_peers_are_asked_in_each_direction(machine: FakeRoot, dual_gh200: Topology) -> None:
    library = FakeNvml(3)
    library.peers = {(0, 2), (2, 0), (1, 2)}
    assert [gpu.peers for gpu in read_gpus(dual_gh200, machine.path, library).found] == [(2,), (2,), (0,)]


def test_a_driver_older_than_the_library(machine: FakeRoot, dual_gh200: Topology) -> None:
    library = FakeNvml(2, (2, 10))
    library.nvmlDeviceGetNumaNodeId = lambda handle, node: FUNCTION_NOT_FOUND
    assert [gpu.memory_node for gpu in read_gpus(dual_gh200, machine.path, library).found] == [None, None]


def test_a_gpu_that_shares_the_memory_of_the_cpu(machine: FakeRoot) -> None:
    """GB10, and a driver too old to know the node of a GPU; the only node with CPUs is next to it."""
    machine.write(f"{PCI_DEVICES}/0009:01:00.0/numa_node", "-1")
    (gpu,) = read_gpus(read_topology(machine.path), machine.path, FakeNvml(1, has_memory=False)).found
    assert (gpu.total_bytes, gpu.cpu_node, gpu.memory_node) == (None, 0, None)


@pytest.mark.parametrize("name", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_driver_that_does_not_answer_is_stated(machine: FakeRoot, dual_gh200: Topology, name: str) -> None:
    library = FakeNvml(1)
    setattr(library, name, lambda *arguments: NO_DRIVER)
    assert read_gpus(dual_gh200, machine.path, library) == Gpus((), f"{name}: Driver Not Loaded")
    assert not library.is_open


def test_no_gpu_and_no_library(machine: FakeRoot, dual_gh200: Topology, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_gpus(dual_gh200, machine.path, FakeNvml(0)) == Gpus((), "the driver has no GPU")
    monkeypatch.setattr("hotset.machine.gpus.LIBRARY", "libnvidia-ml-of-nobody.so.1")
    absence = read_gpus(dual_gh200, machine.path).absence
    assert absence == "libnvidia-ml-of-nobody.so.1 is not installed (it comes with NVIDIA's driver)"


def test_structures_have_the_sizes_of_nvml_h() -> None:
    from hotset.machine.gpus import MemoryInfo, PciInfo

    assert (ctypes.sizeof(PciInfo), ctypes.sizeof(MemoryInfo)) == (68, 24)
