"""How much memory this process can still take, and what sets that limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotset.errors import MachineError
from hotset.machine.cgroups import Cgroup, cgroup_path
from hotset.machine.files import ROOT, read_int, read_table, read_text, require_text
from hotset.machine.nodes import name_nodes, read_allowed_nodes, read_nodes
from hotset.units import format_bytes

#: Version 1 of cgroups writes "no limit" as the largest multiple of the page size.
UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True)
class MemoryTerm:
    """One limit: what it allows in all, and what it leaves."""

    source: str
    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class MemoryState:
    """Every limit that holds for this process; the smallest decides."""

    terms: tuple[MemoryTerm, ...]

    @property
    def tightest(self) -> MemoryTerm:
        """The limit that leaves least."""
        return min(self.terms, key=lambda term: term.available_bytes)

    @property
    def available_bytes(self) -> int:
        return self.tightest.available_bytes

    @property
    def total_bytes(self) -> int:
        """What the process could have if it were alone."""
        return min(term.limit_bytes for term in self.terms)

    @property
    def source(self) -> str:
        """The name of the limit that leaves least."""
        return self.tightest.source

    def describe(self) -> str:
        """Say in one line what is available and why."""
        total = format_bytes(self.total_bytes)
        return f"{format_bytes(self.available_bytes)} available of {total} (limit: {self.source})"


def read_memory(root: Path = ROOT) -> MemoryState:
    """Read the limits: the machine's, the nodes', every cgroup's on the way up, and the address space of ``ulimit -v``.

    Nodes that the cpuset forbids do not count, nor does the memory of GPUs, which the kernel adds to MemTotal and
    MemAvailable of a Grace-Hopper machine. File cache counts as free, as the kernel gives it back on demand; shared
    memory (/dev/shm) does not. Swap is not memory here: a model that reads its weights for every token cannot live in
    it.
    """
    terms = [_machine_term(root), *_node_terms(root)]
    for group in cgroup_path(root, "memory"):
        terms.extend(_cgroup_terms(root, group))
    terms.extend(_address_space_terms(root))
    return MemoryState(tuple(terms))


def _machine_term(root: Path) -> MemoryTerm:
    table = read_table(require_text(root, "/proc/meminfo"))
    if "MemTotal" not in table or "MemAvailable" not in table:
        raise MachineError("/proc/meminfo has no MemTotal or MemAvailable line", "hotset needs Linux 3.14 or newer")
    return MemoryTerm("MemAvailable in /proc/meminfo", table["MemTotal"], table["MemAvailable"])


def _node_terms(root: Path) -> list[MemoryTerm]:
    """One term when some of the machine's memory is not for this process to plan with."""
    nodes = [node for node in read_nodes(root, ()) if node.total_bytes]
    allowed = read_allowed_nodes(root)
    usable = [node for node in nodes if node.kind != "gpu" and (allowed is None or node.node_id in allowed)]
    if len(usable) == len(nodes):
        return []
    names = name_nodes(tuple(node.node_id for node in usable))
    are_forbidden = any(node.kind != "gpu" for node in nodes if node not in usable)
    reason = "the others are not in the cpuset" if are_forbidden else "the others are GPU memory"
    total = sum(node.total_bytes for node in usable)
    return [MemoryTerm(f"NUMA {names}, {reason}", total, sum(node.available_bytes for node in usable))]


def _cgroup_terms(root: Path, group: Cgroup) -> list[MemoryTerm]:
    limit_names: tuple[str, ...]
    if group.version == 2:
        # Above memory.high the kernel slows the process down to keep it there, so it is a limit as well.
        limit_names, usage_name, prefix = ("memory.max", "memory.high"), "memory.current", ""
    else:
        limit_names, usage_name, prefix = ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"
    usage = read_int(root, f"{group.directory}/{usage_name}")
    if usage is None:
        return []
    stat = read_table(read_text(root, f"{group.directory}/memory.stat") or "")
    file_cache = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    used = max(0, usage - file_cache)
    terms = []
    for name in limit_names:
        limit = read_int(root, f"{group.directory}/{name}")
        if limit is not None and limit < UNLIMITED_BYTES:
            terms.append(MemoryTerm(f"{group.directory}/{name}", limit, max(0, limit - used)))
    return terms


def _address_space_terms(root: Path) -> list[MemoryTerm]:
    for line in (read_text(root, "/proc/self/limits") or "").splitlines():
        if line.startswith("Max address space"):
            soft = line.removeprefix("Max address space").split()[0]
            if soft == "unlimited":
                return []
            used = read_table(require_text(root, "/proc/self/status")).get("VmSize", 0)
            return [MemoryTerm("address space limit (ulimit -v)", int(soft), max(0, int(soft) - used))]
    return []
