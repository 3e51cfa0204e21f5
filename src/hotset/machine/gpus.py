"""The GPUs of this machine, through NVIDIA's management library (NVML) where the driver installed it.

A GPU of Grace-Hopper has two NUMA nodes: the one whose CPUs are next to it, and, unless the driver keeps the memory to
itself, one that is its own memory and has no CPUs. Binding threads to the latter is an error, so both are named here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.machine.files import ROOT, read_int
from hotset.machine.topology import Topology

LIBRARY = "libnvidia-ml.so.1"
PCI_DEVICES = "/sys/bus/pci/devices"

# nvml.h
SUCCESS = 0
NOT_SUPPORTED = 3
FUNCTION_NOT_FOUND = 13  # the library is newer than the driver
NAME_LENGTH = 96
P2P_READ = 0
P2P_OK = 0


class PciInfo(ctypes.Structure):
    """nvmlPciInfo_t, version 3."""

    _fields_ = (
        ("busIdLegacy", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("pciDeviceId", ctypes.c_uint),
        ("pciSubSystemId", ctypes.c_uint),
        ("busId", ctypes.c_char * 32),
    )


class MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``None``: the driver does not say."""

    gpu_id: int
    name: str
    pci_address: str
    #: ``None`` for a GPU without memory of its own (GB10: it shares the CPU's).
    total_bytes: int | None
    free_bytes: int | None
    #: The node with CPUs that it is attached to.
    cpu_node: int | None
    #: The node that is its own memory.
    memory_node: int | None
    #: GPUs whose memory it can read directly.
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Gpus:
    """The GPUs found, or why there are none."""

    found: tuple[Gpu, ...]
    absence: str | None = None

    @property
    def memory_nodes(self) -> tuple[int, ...]:
        """Nodes that are the memory of one of them."""
        return tuple(gpu.memory_node for gpu in self.found if gpu.memory_node is not None)


class _NvmlError(Exception):
    """A call failed; its text is what NVML says."""


def load_library() -> Any:
    """Return NVML, or ``None`` when it is not installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        return None


def read_gpus(topology: Topology, root: Path = ROOT, library: Any = None) -> Gpus:
    """Read all GPUs. Never fails: a missing library, driver or permission is stated in the result."""
    library = library or load_library()
    if library is None:
        return Gpus((), f"{LIBRARY} is not installed (it comes with NVIDIA's driver)")
    try:
        with _session(library):
            count = ctypes.c_uint()
            _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
            handles = [_handle(library, gpu_id) for gpu_id in range(count.value)]
            found = tuple(_read_gpu(library, handles, gpu_id, topology, root) for gpu_id in range(count.value))
    except _NvmlError as error:
        return Gpus((), str(error))
    return Gpus(found, None if found else "the driver has no GPU")


@contextmanager
def _session(library: Any) -> Iterator[None]:
    _call(library, "nvmlInit_v2")
    try:
        yield
    finally:
        library.nvmlShutdown()


def _call(library: Any, name: str, *arguments: Any) -> None:
    code = getattr(library, name)(*arguments)
    if code != SUCCESS:
        raise _NvmlError(f"{name}: {_error_text(library, code)}")


def _can_call(library: Any, name: str, *arguments: Any) -> bool:
    """Make a call that a GPU or an older driver may not have; whether it gave an answer."""
    if not hasattr(library, name):
        return False
    code = getattr(library, name)(*arguments)
    if code not in (SUCCESS, NOT_SUPPORTED, FUNCTION_NOT_FOUND):
        raise _NvmlError(f"{name}: {_error_text(library, code)}")
    return code == SUCCESS


def _error_text(library: Any, code: int) -> str:
    library.nvmlErrorString.restype = ctypes.c_char_p
    text = library.nvmlErrorString(code)
    return text.decode(errors="replace") if text else f"error {code}"


def _handle(library: Any, gpu_id: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(gpu_id), ctypes.byref(handle))
    return handle


def _read_gpu(library: Any, handles: list[ctypes.c_void_p], gpu_id: int, topology: Topology, root: Path) -> Gpu:
    handle = handles[gpu_id]
    name = ctypes.create_string_buffer(NAME_LENGTH)
    _call(library, "nvmlDeviceGetName", handle, name, ctypes.c_uint(NAME_LENGTH))
    pci = PciInfo()
    _call(library, "nvmlDeviceGetPciInfo_v3", handle, ctypes.byref(pci))
    memory, node = MemoryInfo(), ctypes.c_uint()
    has_memory = _can_call(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    has_node = _can_call(library, "nvmlDeviceGetNumaNodeId", handle, ctypes.byref(node))
    address = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    memory_node = node.value if has_node else None
    return Gpu(
        gpu_id=gpu_id,
        name=name.value.decode(errors="replace"),
        pci_address=address,
        total_bytes=memory.total if has_memory else None,
        free_bytes=memory.free if has_memory else None,
        cpu_node=_cpu_node(topology, read_int(root, f"{PCI_DEVICES}/{address}/numa_node"), memory_node),
        memory_node=memory_node,
        peers=tuple(
            other for other in range(len(handles)) if other != gpu_id and _is_peer(library, handles, gpu_id, other)
        ),
    )


def _is_peer(library: Any, handles: list[ctypes.c_void_p], gpu_id: int, other: int) -> bool:
    status = ctypes.c_int(-1)
    is_told = _can_call(
        library, "nvmlDeviceGetP2PStatus", handles[gpu_id], handles[other], ctypes.c_int(P2P_READ), ctypes.byref(status)
    )
    return is_told and status.value == P2P_OK


def _cpu_node(topology: Topology, pci_node: int | None, memory_node: int | None) -> int | None:
    """The node with CPUs next to a GPU. The PCI device's own node can be the one without CPUs (Grace-Blackwell)."""
    known = {node.node_id for node in topology.nodes}
    told = [node_id for node_id in (pci_node, memory_node) if node_id in known]  # -1: the firmware does not say
    if told and topology.cpu_nodes:
        return topology.nearest_cpu_node(told[0])
    return topology.cpu_nodes[0] if len(topology.cpu_nodes) == 1 else None
