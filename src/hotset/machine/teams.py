"""Which CPUs run a model: one team of threads on each node, in the order of the nodes.

Rows of every matrix are split evenly over all threads, so teams of equal size in that order make the row split a node
split, and each node holds and reads the same number of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from hotset.errors import MachineError, RequestError
from hotset.machine.files import format_cpu_list
from hotset.machine.nodes import name_nodes
from hotset.machine.numa_calls import NumaCalls
from hotset.machine.topology import Topology, default_threads, pick_cpus

NumaMode = Literal["bind", "strict", "prefer"]
"""What happens when memory cannot lie where it was planned.

* "bind": memory is bound to its node; where a container forbids that, the thread that uses it writes it first, which is
  said, and pages that lie elsewhere all the same are an error;
* "strict": no binding, no start;
* "prefer": a node is asked for and others are taken when it is full; pages elsewhere are a warning.
"""
NUMA_MODES: tuple[NumaMode, ...] = get_args(NumaMode)
Policy = Literal["TOUCH", "BIND", "PREFER"]


@dataclass(frozen=True)
class NodeTeam:
    """Threads of one node, one for each of ``cpus``, and the node their memory lies on."""

    node_id: int
    cpus: tuple[int, ...]


@dataclass(frozen=True)
class Seats:
    """Where threads run and their memory lies, and how it is put there.

    ``notes`` are for the user: what was asked and what is done instead, because of what.
    """

    teams: tuple[NodeTeam, ...]
    policy: Policy = "TOUCH"
    notes: tuple[str, ...] = ()

    @property
    def cpus(self) -> tuple[int, ...]:
        """CPU of every thread."""
        return tuple(cpu for team in self.teams for cpu in team.cpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Node of every thread."""
        return tuple(team.node_id for team in self.teams for _ in team.cpus)

    @property
    def node_ids(self) -> tuple[int, ...]:
        return tuple(team.node_id for team in self.teams)


def pick_teams(
    topology: Topology, num_threads: int | None = None, node_ids: tuple[int, ...] | None = None
) -> tuple[NodeTeam, ...]:
    """Choose nodes and CPUs. How many threads pay is decided by :mod:`hotset.plan.teams`.

    Args:
        num_threads: of all nodes together; None for one a core, no more than the quota pays for.
        node_ids: exactly these nodes; None for those that give most threads, more nodes among equals.

    Raises:
        RequestError: nodes or a number of threads that this process cannot have.
    """
    usable = {
        node_id: cpus
        for node_id in topology.cpu_nodes
        if node_id in topology.allowed_nodes and (cpus := topology.node_cpus(node_id))
    }
    if node_ids is not None:
        _check_nodes(topology, node_ids, usable)
        usable = {node_id: usable[node_id] for node_id in sorted(node_ids)}
    elif not usable:
        # A kernel without NUMA, or CPUs of one node and memory of another: the memory that there is.
        nearest = (
            topology.nearest_cpu_node(topology.allowed_nodes[0]) if topology.cpu_nodes else topology.nodes[0].node_id
        )
        home = nearest if nearest in topology.allowed_nodes else topology.allowed_nodes[0]
        return (NodeTeam(home, pick_cpus(topology, num_threads or default_threads(topology)[0])),)
    if num_threads is None:
        each, chosen = _default_size(topology, usable, node_ids is not None)
    else:
        each, chosen = _asked_size(num_threads, usable, node_ids is not None)
    return tuple(NodeTeam(node_id, usable[node_id][:each]) for node_id in chosen)


def _check_nodes(topology: Topology, node_ids: tuple[int, ...], usable: Mapping[int, tuple[int, ...]]) -> None:
    if not node_ids or len(set(node_ids)) != len(node_ids):
        raise RequestError(f"nodes are {list(node_ids)}, expected each node once", f"--nodes {_listed(usable)}")
    for node_id in node_ids:
        node = topology.node(node_id)
        if node_id in usable:
            continue
        if node_id not in topology.allowed_nodes:
            allowed = format_cpu_list(topology.allowed_nodes)
            why = f"the cpuset of this process allows memory of nodes {allowed} (Mems_allowed_list)"
        elif node.cpus and node.total_bytes:
            mask = format_cpu_list(topology.affinity)
            why = f"its CPUs {format_cpu_list(node.cpus)} are outside the affinity mask {mask}"
        else:
            kinds = {"gpu": "the memory of a GPU", "memory": "memory without CPUs", "empty": "empty"}
            why = f"it is {kinds.get(node.kind, 'without memory')}"
        raise RequestError(f"no threads can run on node {node_id}: {why}", f"--nodes {_listed(usable)}")


def _listed(usable: Mapping[int, tuple[int, ...]]) -> str:
    return ",".join(str(node_id) for node_id in usable) or "left out"


def _default_size(topology: Topology, usable: Mapping[int, tuple[int, ...]], are_fixed: bool) -> tuple[int, list[int]]:
    limit = math.floor(topology.quota.num_cpus) if topology.quota is not None else len(topology.affinity)
    sizes = {node_id: sum(bool(set(core) & set(cpus)) for core in topology.cores) for node_id, cpus in usable.items()}
    most_first = sorted(sizes, key=lambda node_id: (-sizes[node_id], node_id))
    best: tuple[int, int] = (0, 0)
    for count in [len(sizes)] if are_fixed else range(1, len(sizes) + 1):
        each = min(sizes[most_first[count - 1]], max(1, limit) // count)
        if each and each * count >= best[0] * best[1]:
            best = (each, count)
    each, count = best
    if not each:
        raise RequestError(
            f"a quota of {limit} CPUs gives no thread to each of {name_nodes(tuple(sizes))}",
            f"--nodes {most_first[0]}",
        )
    return each, sorted(most_first[:count])


def _asked_size(num_threads: int, usable: Mapping[int, tuple[int, ...]], are_fixed: bool) -> tuple[int, list[int]]:
    most_first = sorted(usable, key=lambda node_id: (-len(usable[node_id]), node_id))
    for count in [len(usable)] if are_fixed else range(len(usable), 0, -1):
        each = num_threads // count
        if num_threads > 0 and num_threads % count == 0 and each <= len(usable[most_first[count - 1]]):
            return each, sorted(most_first[:count])
    least, count = len(usable[most_first[-1]]), len(usable)
    hint = f"--threads {count * max(1, min(least, num_threads // count))}"
    if count == 1:
        where = f" of node {most_first[0]}" if are_fixed else ""
        raise RequestError(f"{num_threads} threads asked for, this process may use {least} CPUs{where}", hint)
    have = ", ".join(f"{len(cpus)} CPUs of node {node_id}" for node_id, cpus in usable.items())
    raise RequestError(
        f"{num_threads} threads asked for, each node takes the same number, and this process may use {have}", hint
    )


def choose_policy(topology: Topology, calls: NumaCalls | None, mode: NumaMode) -> tuple[Policy, tuple[str, ...]]:
    """How memory is put on its nodes, with notes on what could not be as asked.

    ``calls`` may be None where only one node has memory: there is nothing to bind.

    Raises:
        MachineError: "strict", and the kernel refuses to bind.
    """
    if calls is None or not has_many_nodes(topology):
        return "TOUCH", ()
    if calls.can_bind:
        return ("PREFER" if mode == "prefer" else "BIND"), ()
    if mode == "strict":
        raise MachineError(f"--numa strict, and memory cannot be bound to a node: mbind: {calls.mbind}", "--numa bind")
    return "TOUCH", (
        f"--numa {mode} -> placed by first touch, because memory cannot be bound to a node: mbind: {calls.mbind}",
    )


def has_many_nodes(topology: Topology) -> bool:
    """Whether memory could lie on a wrong node at all."""
    return sum(node.total_bytes > 0 for node in topology.nodes) > 1
