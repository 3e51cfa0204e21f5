"""The NUMA nodes: what kind of memory each one is, how far apart they are, and what of it can be taken.

On Grace-Hopper the memory of a GPU is a node without CPUs, next to nodes for MIG that are always empty. So the number
of nodes says nothing, node numbers have gaps, and "all nodes" would put weights into GPU memory: always go by ``kind``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotset.machine.files import (
    ROOT,
    format_cpu_list,
    list_names,
    parse_cpu_list,
    read_int,
    read_table,
    read_text,
    require_text,
)
from hotset.machine.thp import POOLS, HugePagePool, read_page_bytes, read_pools
from hotset.units import MIB

NODES = "/sys/devices/system/node"
#: The distance that firmware gives for nodes with no way between them (the GPU nodes of one GH200 to each other).
UNREACHABLE = 255
#: NVIDIA's driver names here the node that a GPU's memory is; the kernel the node that a DAX or CXL device becomes when
#: its memory is brought online.
NVIDIA_GPUS = "/proc/driver/nvidia/gpus"
MEMORY_DEVICES = ("/sys/bus/dax/devices", "/sys/bus/cxl/devices")

Kind = Literal["cpu", "memory", "gpu", "empty"]


@dataclass(frozen=True)
class Initiators:
    """What the firmware (HMAT) says of reaching a node's memory from the nodes that are nearest to it.

    ``None``: not known. Hot-added memory has 0 in these files, and firmware may leave fields out.
    """

    nodes: tuple[int, ...]
    read_bytes_per_s: int | None
    write_bytes_per_s: int | None
    read_latency_s: float | None
    write_latency_s: float | None


@dataclass(frozen=True)
class Node:
    """A NUMA node. Distances are the firmware's, in the order of the online nodes; 10 is the node itself.

    ``kind`` is "cpu" (has CPUs), "memory" (memory and no CPUs: CXL, persistent memory), "gpu" (the memory of a GPU), or
    "empty" (neither CPUs nor memory). Without CPUs it is a GPU's when a device is listed as the node's own or NVIDIA's
    driver names the node, and plain memory when a DAX or CXL device names it. Where nobody does, movable pages decide,
    as drivers bring GPU memory online: ``is_kind_guessed``.
    """

    node_id: int
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    distances: tuple[int, ...]
    kind: Kind = "cpu"
    #: What a process could take: free pages and file cache, less what the kernel keeps back (as in MemAvailable).
    available_bytes: int = 0
    #: Shared memory (/dev/shm, tmpfs) and pages that nothing can move or swap out, of all processes.
    shared_bytes: int = 0
    unevictable_bytes: int = 0
    mlocked_bytes: int = 0
    is_kind_guessed: bool = False
    #: A device is listed as an initiator of its own in this node: GPUs of Grace-Hopper, also while they have no memory.
    has_generic_initiator: bool = False
    #: From the nearest initiators of any kind (access class 0), and from the nearest CPUs (access class 1).
    initiators: Initiators | None = None
    cpu_initiators: Initiators | None = None
    #: Huge pages that the administrator set aside here.
    pools: tuple[HugePagePool, ...] = ()


def read_nodes(root: Path, online: tuple[int, ...]) -> tuple[Node, ...]:
    """Read all online nodes. ``online`` are the CPUs of the one node of a kernel without NUMA, or of a sandbox.

    Where only one node is listed, and nothing of it can be read, it has everything.
    """
    node_ids = parse_cpu_list(read_text(root, f"{NODES}/online") or "") or (0,)
    if len(node_ids) == 1 and read_text(root, f"{NODES}/node{node_ids[0]}/meminfo") is None:
        memory = read_table(require_text(root, "/proc/meminfo"))
        total, free = memory.get("MemTotal", 0), memory.get("MemFree", 0)
        claims = _claims(memory)
        pools = read_pools(root, POOLS)
        available = memory.get("MemAvailable", free)
        return (Node(node_ids[0], online, total, free, (10,), "cpu", available, *claims, pools=pools),)
    states = {name: _state(root, name) for name in ("has_memory", "has_normal_memory", "has_generic_initiator")}
    reserves, devices = _reserves(root), _read_devices(root, states["has_generic_initiator"] or ())
    return tuple(_read_node(root, node_id, states, reserves, devices) for node_id in node_ids)


def read_allowed_nodes(root: Path = ROOT) -> tuple[int, ...] | None:
    """Nodes whose memory this process may use, as its cpuset says; ``None`` for a kernel without cpusets."""
    for line in require_text(root, "/proc/self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return parse_cpu_list(line.partition(":")[2])
    return None


def name_nodes(node_ids: tuple[int, ...]) -> str:
    """``"node 0"``, ``"nodes 0-2,10"``."""
    return f"node{'s' * (len(node_ids) != 1)} {format_cpu_list(node_ids)}"


def _state(root: Path, name: str) -> tuple[int, ...] | None:
    text = read_text(root, f"{NODES}/{name}")
    return None if text is None else parse_cpu_list(text)


@dataclass(frozen=True)
class _Devices:
    """Nodes that some device names as its memory: GPUs, and plain memory on DAX and CXL devices."""

    gpu_nodes: frozenset[int]
    memory_nodes: frozenset[int]


def _read_devices(root: Path, initiators: tuple[int, ...]) -> _Devices:
    told = (read_text(root, f"{NVIDIA_GPUS}/{name}/numa_status") or "" for name in list_names(root, NVIDIA_GPUS))
    by_driver = [int(match[1]) for text in told if (match := re.search(r"^Node:\s*(\d+)", text, re.MULTILINE))]
    targets = (
        read_int(root, f"{folder}/{name}/target_node") for folder in MEMORY_DEVICES for name in list_names(root, folder)
    )
    return _Devices(frozenset((*initiators, *by_driver)), frozenset(node for node in targets if node is not None))


def _read_node(
    root: Path,
    node_id: int,
    states: dict[str, tuple[int, ...] | None],
    reserves: dict[int, tuple[int, int]],
    devices: _Devices,
) -> Node:
    directory = f"{NODES}/node{node_id}"
    memory = read_table((read_text(root, f"{directory}/meminfo") or "").replace(f"Node {node_id} ", ""))
    cpus = parse_cpu_list(read_text(root, f"{directory}/cpulist") or "")
    total = memory.get("MemTotal", 0)
    kind, is_guessed = _kind(node_id, cpus, total, states, devices)
    return Node(
        node_id,
        cpus,
        total,
        memory.get("MemFree", 0),
        tuple(int(word) for word in (read_text(root, f"{directory}/distance") or "").split()),
        kind,
        _available(memory, *reserves.get(node_id, (0, 0))),
        *_claims(memory),
        is_guessed,
        node_id in (states["has_generic_initiator"] or ()),
        _initiators(root, f"{directory}/access0/initiators"),
        _initiators(root, f"{directory}/access1/initiators"),
        read_pools(root, f"{directory}/hugepages"),
    )


def _kind(
    node_id: int, cpus: tuple[int, ...], total: int, states: dict[str, tuple[int, ...] | None], devices: _Devices
) -> tuple[Kind, bool]:
    """The kind of a node, and whether it is a guess."""
    if cpus:
        return "cpu", False
    has_memory = states["has_memory"]
    if total == 0 or (has_memory is not None and node_id not in has_memory):
        return "empty", False
    # A GPU's memory may have come online as normal pages, CXL memory as movable ones: devices tell better than pages.
    if node_id in devices.gpu_nodes:
        return "gpu", False
    normal = states["has_normal_memory"]
    if node_id in devices.memory_nodes or normal is None or node_id in normal:
        return "memory", False
    return "gpu", True


def _claims(memory: dict[str, int]) -> tuple[int, int, int]:
    return memory.get("Shmem", 0), memory.get("Unevictable", 0), memory.get("Mlocked", 0)


def _available(memory: dict[str, int], reserve_bytes: int, low_bytes: int) -> int:
    """The kernel's formula for MemAvailable (si_mem_available in mm/show_mem.c), for one node."""
    cache = memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0)
    slab = memory.get("KReclaimable", memory.get("SReclaimable", 0))
    kept = min(cache // 2, low_bytes) + min(slab // 2, low_bytes)
    return max(0, memory.get("MemFree", 0) - reserve_bytes + cache + slab - kept)


def _reserves(root: Path) -> dict[int, tuple[int, int]]:
    """For each node the bytes that the kernel keeps free, and the sum of its low watermarks, from /proc/zoneinfo."""
    zones: dict[int, list[dict[str, int]]] = {}
    zone: dict[str, int] = {}
    for line in (read_text(root, "/proc/zoneinfo") or "").splitlines():
        name, *values = line.replace(",", " ").split() or [""]
        if name == "Node" and values[1:2] == ["zone"]:
            zone = {"low": 0, "high": 0, "managed": 0, "protection": 0}
            zones.setdefault(int(values[0]), []).append(zone)
        elif name == "protection:":
            zone["protection"] = max(int(value.strip("()")) for value in values)
        elif name in ("low", "high", "managed"):
            zone[name] = int(values[0])
    page_bytes = read_page_bytes(root) if zones else 0
    return {
        node_id: (
            page_bytes * sum(min(zone["managed"], zone["high"] + zone["protection"]) for zone in parts),
            page_bytes * sum(zone["low"] for zone in parts),
        )
        for node_id, parts in zones.items()
    }


def _initiators(root: Path, directory: str) -> Initiators | None:
    names = list_names(root, directory)
    # MiB/s and nanoseconds: Documentation/admin-guide/mm/numaperf.rst
    read_rate, write_rate = (read_int(root, f"{directory}/{way}_bandwidth") for way in ("read", "write"))
    read_time, write_time = (read_int(root, f"{directory}/{way}_latency") for way in ("read", "write"))
    if not any((read_rate, write_rate, read_time, write_time)):
        return None
    nodes = sorted(int(name.removeprefix("node")) for name in names if name.removeprefix("node").isdigit())
    return Initiators(
        tuple(nodes),
        read_rate * MIB if read_rate else None,
        write_rate * MIB if write_rate else None,
        read_time / 1e9 if read_time else None,
        write_time / 1e9 if write_time else None,
    )
