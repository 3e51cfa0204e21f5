"""The processors that this process may use: affinity, cores, quota, caches, NUMA nodes, page sizes."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path

from hotset.errors import MachineError, RequestError
from hotset.machine.cgroups import cgroup_path
from hotset.machine.files import ROOT, format_cpu_list, parse_cpu_list, read_int, read_table, read_text, require_text
from hotset.machine.thp import HugePages, read_huge_pages
from hotset.units import GIB, KIB, MIB

CPUS = "/sys/devices/system/cpu"
NODES = "/sys/devices/system/node"
AT_PAGESZ = 6  # the page size's key in the auxiliary vector, from elf.h


@dataclass(frozen=True)
class Cache:
    """A data or unified cache and the CPUs that share it."""

    level: int
    num_bytes: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Node:
    """A NUMA node: CPUs with memory of their own. ``distances`` are the firmware's, own node first to last node."""

    node_id: int
    cpus: tuple[int, ...]
    total_bytes: int
    free_bytes: int
    distances: tuple[int, ...]


@dataclass(frozen=True)
class Quota:
    """Processor time that a cgroup allows, in CPUs."""

    num_cpus: float
    source: str


@dataclass(frozen=True)
class Topology:
    """What :func:`read_topology` found. CPU numbers are the kernel's."""

    model: str
    online: tuple[int, ...]
    affinity: tuple[int, ...]
    #: Physical cores inside the affinity mask: for each, its CPUs that may be used (two or more with SMT).
    cores: tuple[tuple[int, ...], ...]
    quota: Quota | None
    caches: tuple[Cache, ...]
    nodes: tuple[Node, ...]
    page_bytes: int
    huge_pages: HugePages

    def cache_bytes(self, level: int, cpu: int) -> int | None:
        """Size of the cache of ``level`` that ``cpu`` uses; ``None`` when there is none or the kernel hides it."""
        sizes = [cache.num_bytes for cache in self.caches if cache.level == level and cpu in cache.cpus]
        return sizes[0] if sizes else None

    def last_level_bytes(self, cpus: tuple[int, ...]) -> int:
        """Bytes of all last-level caches that ``cpus`` use together (0 when the kernel hides the caches)."""
        used = [cache for cache in self.caches if set(cache.cpus) & set(cpus)]
        last = max((cache.level for cache in used), default=0)
        return sum(cache.num_bytes for cache in used if cache.level == last)

    def cpus_by_node(self, cpus: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Split ``cpus`` by NUMA node, leaving out nodes with none of them."""
        parts = (tuple(cpu for cpu in cpus if cpu in node.cpus) for node in self.nodes)
        return tuple(part for part in parts if part)


def read_topology(root: Path = ROOT) -> Topology:
    """Read the topology. MachineError when /proc does not say which CPUs may be used."""
    status = require_text(root, "/proc/self/status")
    lines = [line for line in status.splitlines() if line.startswith("Cpus_allowed_list:")]
    if not lines:
        raise MachineError("/proc/self/status has no Cpus_allowed_list line", "hotset needs Linux with /proc mounted")
    affinity = parse_cpu_list(lines[0].partition(":")[2])
    online = parse_cpu_list(read_text(root, f"{CPUS}/online") or "") or affinity
    return Topology(
        model=_model(root),
        online=online,
        affinity=affinity,
        cores=_cores(root, affinity),
        quota=_quota(root),
        caches=_caches(root, online),
        nodes=_nodes(root, online),
        page_bytes=_page_bytes(root),
        huge_pages=read_huge_pages(root),
    )


def default_threads(topology: Topology) -> tuple[int, str]:
    """Return how many threads to use and why: one per physical core, never more than the quota pays for.

    A second thread on a core adds nothing to bandwidth, and a thread above the quota is stopped in the
    middle of a step while the others wait for it.
    """
    num_cores = len(topology.cores)
    cores = f"{num_cores} physical core{'s' * (num_cores != 1)}"
    if len(topology.affinity) != len(topology.online):
        cores += f" in the affinity mask {format_cpu_list(topology.affinity)}"
    quota = topology.quota
    if quota is not None and math.floor(quota.num_cpus) < num_cores:
        return max(1, math.floor(quota.num_cpus)), f"quota of {quota.num_cpus:g} CPUs in {quota.source}; {cores}"
    return num_cores, f"one for each of {cores}"


def pick_cpus(topology: Topology, num_threads: int) -> tuple[int, ...]:
    """Return the CPU for each thread: first one per core, then second SMT threads. Node by node.

    RequestError when there are fewer CPUs in the affinity mask.
    """
    if not 1 <= num_threads <= len(topology.affinity):
        raise RequestError(
            f"{num_threads} threads asked for, this process may use {len(topology.affinity)} CPUs",
            f"--threads {default_threads(topology)[0]}",
        )
    by_rank = [
        cpu
        for rank in range(max(len(core) for core in topology.cores))
        for core in topology.cores
        if rank < len(core)
        for cpu in (core[rank],)
    ]
    return tuple(by_rank[:num_threads])


def _model(root: Path) -> str:
    fields: dict[str, str] = {}
    for line in (read_text(root, "/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    if "model name" in fields:
        return fields["model name"]
    if "CPU part" in fields:
        return f"Arm implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return "unknown processor"


def _cores(root: Path, affinity: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in affinity:
        directory = f"{CPUS}/cpu{cpu}/topology"
        # The first name is from Linux 5.2 on. Where neither is there, every CPU counts as a core of its own.
        text = read_text(root, f"{directory}/core_cpus_list") or read_text(root, f"{directory}/thread_siblings_list")
        siblings = parse_cpu_list(text) if text else (cpu,)
        cores.setdefault(siblings, []).append(cpu)
    return tuple(tuple(cpus) for cpus in cores.values())


def _quota(root: Path) -> Quota | None:
    found = []
    for group in cgroup_path(root, "cpu"):
        if group.version == 2:
            source = f"{group.directory}/cpu.max"
            quota_text, _, period_text = (read_text(root, source) or "max").partition(" ")
            quota = None if quota_text == "max" else int(quota_text)
            period = int(period_text or 100_000)
        else:
            source = f"{group.directory}/cpu.cfs_quota_us"
            quota = read_int(root, source)
            period = read_int(root, f"{group.directory}/cpu.cfs_period_us") or 100_000
        if quota is not None and quota > 0:
            found.append(Quota(quota / period, source))
    return min(found, key=lambda quota: quota.num_cpus, default=None)


def _caches(root: Path, online: tuple[int, ...]) -> tuple[Cache, ...]:
    found: dict[Cache, None] = {}
    for cpu in online:
        for index in range(8):
            directory = f"{CPUS}/cpu{cpu}/cache/index{index}"
            level, size = read_int(root, f"{directory}/level"), read_text(root, f"{directory}/size")
            if level is None:
                break
            if size and read_text(root, f"{directory}/type") != "Instruction":
                cpus = parse_cpu_list(read_text(root, f"{directory}/shared_cpu_list") or str(cpu))
                found[Cache(level, _cache_size(size), cpus)] = None
    return tuple(found)


def _cache_size(text: str) -> int:
    """``"32768K"`` and ``"114M"`` in bytes."""
    for suffix, scale in (("K", KIB), ("M", MIB), ("G", GIB)):
        if text.endswith(suffix):
            return int(text.removesuffix(suffix)) * scale
    return int(text)


def _nodes(root: Path, online: tuple[int, ...]) -> tuple[Node, ...]:
    text = read_text(root, f"{NODES}/online")
    if not text:  # a kernel without NUMA: one node with everything
        memory = read_table(require_text(root, "/proc/meminfo"))
        return (Node(0, online, memory.get("MemTotal", 0), memory.get("MemFree", 0), (10,)),)
    nodes = []
    for node_id in parse_cpu_list(text):
        directory = f"{NODES}/node{node_id}"
        memory_text = (read_text(root, f"{directory}/meminfo") or "").replace(f"Node {node_id} ", "")
        memory = read_table(memory_text)
        distances = tuple(int(word) for word in (read_text(root, f"{directory}/distance") or "").split())
        cpus = parse_cpu_list(read_text(root, f"{directory}/cpulist") or "")
        nodes.append(Node(node_id, cpus, memory.get("MemTotal", 0), memory.get("MemFree", 0), distances))
    return tuple(nodes)


def _page_bytes(root: Path) -> int:
    """The page size from the process's auxiliary vector: pairs of native words (key, value)."""
    try:
        vector = (root / "proc/self/auxv").read_bytes()
    except OSError as error:
        raise MachineError(f"cannot read /proc/self/auxv: {error.strerror}", "run hotset with /proc mounted") from None
    for key, value in struct.iter_unpack("=QQ", vector[: len(vector) // 16 * 16]):
        if key == AT_PAGESZ:
            return int(value)
    raise MachineError("/proc/self/auxv does not give the page size", "run hotset with /proc mounted")
