"""The processors that this process may use: affinity, cores, quota, caches, NUMA nodes, page sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from hotset.errors import MachineError, RequestError
from hotset.machine.cgroups import cgroup_path
from hotset.machine.files import ROOT, format_cpu_list, parse_cpu_list, read_int, read_text, require_text
from hotset.machine.nodes import UNREACHABLE, Node, read_allowed_nodes, read_nodes
from hotset.machine.thp import HugePages, read_huge_pages, read_page_bytes
from hotset.units import GIB, KIB, MIB

CPUS = "/sys/devices/system/cpu"


@dataclass(frozen=True)
class Cache:
    """A data or unified cache and the CPUs that share it."""

    level: int
    num_bytes: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Socket:
    """A processor package, by the kernel's number (any number: Arm firmware does not count from 0)."""

    socket_id: int
    cpus: tuple[int, ...]


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
    #: CPUs of one core, inside the mask or not: 2 where SMT is on.
    threads_per_core: int
    #: Empty when the kernel does not say.
    sockets: tuple[Socket, ...]
    quota: Quota | None
    caches: tuple[Cache, ...]
    nodes: tuple[Node, ...]
    #: Nodes whose memory the cpuset of this process allows.
    allowed_nodes: tuple[int, ...]
    page_bytes: int
    huge_pages: HugePages

    @property
    def cpu_nodes(self) -> tuple[int, ...]:
        """Ids of the nodes that have CPUs and memory: what weights are spread over, never "all nodes"."""
        return tuple(node.node_id for node in self.nodes if node.kind == "cpu" and node.total_bytes)

    @property
    def gpu_nodes(self) -> tuple[int, ...]:
        """Ids of the nodes that are the memory of a GPU."""
        return tuple(node.node_id for node in self.nodes if node.kind == "gpu")

    def with_gpu_memory(self, node_ids: Collection[int]) -> Topology:
        """The same machine where a driver says that these nodes are the memory of GPUs."""
        nodes = tuple(
            replace(node, kind="gpu", is_kind_guessed=False)
            if node.node_id in node_ids and node.kind in ("memory", "gpu")
            else node
            for node in self.nodes
        )
        return replace(self, nodes=nodes)

    def node(self, node_id: int) -> Node:
        """Return a node by its id, which is not its place in ``nodes``. RequestError when there is none."""
        for node in self.nodes:
            if node.node_id == node_id:
                return node
        known = ", ".join(str(node.node_id) for node in self.nodes if node.kind != "empty")
        raise RequestError(f"this machine has no NUMA node {node_id}", f"nodes with CPUs or memory: {known}")

    def node_cpus(self, node_id: int) -> tuple[int, ...]:
        """CPUs of a node inside the affinity mask: the first one of each core, then the second ones (SMT)."""
        cpus = set(self.node(node_id).cpus)
        return _first_of_each_core(tuple(cpu for cpu in core if cpu in cpus) for core in self.cores)

    def distance(self, from_id: int, to_id: int) -> int | None:
        """The firmware's distance between two nodes, UNREACHABLE where no way leads; ``None`` when it is not told."""
        distances = self.node(from_id).distances
        place = self.nodes.index(self.node(to_id))
        return distances[place] if len(distances) == len(self.nodes) else None

    def nearest_cpu_node(self, node_id: int) -> int:
        """Return the node with CPUs and memory that is nearest to ``node_id``; itself when it is one."""
        if not self.cpu_nodes:
            raise MachineError("no NUMA node has both CPUs and memory", "hotset machine shows the nodes")
        # Distances that are not told count as no way; among equal ones the lower id wins.
        return min(self.cpu_nodes, key=lambda other: (other != node_id, self.distance(node_id, other) or UNREACHABLE))

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
    cores = _cores(root, affinity)
    nodes = read_nodes(root, online)
    node_ids = tuple(node.node_id for node in nodes)
    allowed = read_allowed_nodes(root)
    return Topology(
        model=_model(root),
        online=online,
        affinity=affinity,
        cores=tuple(tuple(cpus) for cpus in cores.values()),
        threads_per_core=max(len(siblings) for siblings in cores),
        sockets=_sockets(root, online),
        quota=_quota(root),
        caches=_caches(root, online),
        nodes=nodes,
        allowed_nodes=node_ids if allowed is None else tuple(node_id for node_id in node_ids if node_id in allowed),
        page_bytes=read_page_bytes(root),
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
    return _first_of_each_core(topology.cores)[:num_threads]


def _first_of_each_core(cores: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    ranked = [(rank, place, cpu) for place, core in enumerate(cores) for rank, cpu in enumerate(core)]
    return tuple(cpu for _, _, cpu in sorted(ranked))


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


def _cores(root: Path, affinity: tuple[int, ...]) -> dict[tuple[int, ...], list[int]]:
    """For each core, by all its CPUs, those inside the affinity mask."""
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in affinity:
        directory = f"{CPUS}/cpu{cpu}/topology"
        # The first name is from Linux 5.2 on. Where neither is there, every CPU counts as a core of its own.
        text = read_text(root, f"{directory}/core_cpus_list") or read_text(root, f"{directory}/thread_siblings_list")
        siblings = parse_cpu_list(text) if text else (cpu,)
        cores.setdefault(siblings, []).append(cpu)
    return cores


def _sockets(root: Path, online: tuple[int, ...]) -> tuple[Socket, ...]:
    sockets: dict[int, list[int]] = {}
    for cpu in online:
        socket_id = read_int(root, f"{CPUS}/cpu{cpu}/topology/physical_package_id")
        if socket_id is not None and socket_id >= 0:  # -1: the firmware does not say
            sockets.setdefault(socket_id, []).append(cpu)
    return tuple(Socket(socket_id, tuple(cpus)) for socket_id, cpus in sorted(sockets.items()))


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
