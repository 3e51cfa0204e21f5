"""``hotset machine``: what this machine is, read without root and without measuring anything."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotset.cli.tables import format_table, plural
from hotset.units import format_bytes, format_rate

if TYPE_CHECKING:
    from hotset.machine.gpus import Gpus
    from hotset.machine.memory import MemoryState
    from hotset.machine.nodes import Initiators, Node
    from hotset.machine.topology import Topology


@click.command(name="machine")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Read /proc and /sys below DIR: a snapshot of another machine.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(root: Path | None, as_json: bool) -> None:
    """Show this machine as hotset sees it: processor, NUMA nodes, memory, GPUs.

    A node is cpu (has CPUs), memory (memory without CPUs), gpu (the memory of a GPU) or empty. Its memory is followed
    by what of it can be taken, by shared memory (/dev/shm), and by pages that cannot be moved or swapped. Distances are
    the firmware's: 10 is the node itself, 255 means that no way leads there.

    The last lines say which settings cost speed or break a plan, and the command that changes each. hotset changes none
    of them.
    """
    from hotset.cli.probe import machine_json
    from hotset.machine.advice import advise, read_settings
    from hotset.machine.files import ROOT
    from hotset.machine.gpus import Gpus, read_gpus
    from hotset.machine.memory import read_memory
    from hotset.machine.numa_calls import try_numa_calls
    from hotset.machine.topology import read_topology

    is_snapshot = root is not None
    tree = root or ROOT
    topology, memory = read_topology(tree), read_memory(tree)
    gpus = Gpus((), "not part of a snapshot") if is_snapshot else read_gpus(topology)
    topology = topology.with_gpu_memory(gpus.memory_nodes)
    calls = None if is_snapshot or not topology.allowed_nodes else try_numa_calls(topology.allowed_nodes[0])
    advice = advise(topology, memory, read_settings(topology, tree))
    if as_json:
        report = machine_json(topology, memory) | {
            "gpus": asdict(gpus),
            "numa_calls": asdict(calls) if calls else None,
            "advice": [asdict(item) for item in advice],
        }
        click.echo(json.dumps(report, indent=2))
        return
    lines = [*_processor(topology, memory), "", *_nodes(topology), "", *_gpus(gpus)]
    if calls is not None:
        lines.append(f"NUMA calls  {calls.describe()}")
    lines += ["", *(f"advice: {item.line}" for item in advice)]
    click.echo("\n".join(lines).rstrip())


def _processor(topology: Topology, memory: MemoryState) -> list[str]:
    from hotset.machine import thp
    from hotset.machine.files import format_cpu_list
    from hotset.machine.nodes import name_nodes

    shape = [plural(len(topology.online), "CPU"), f"{plural(topology.threads_per_core, 'thread')} per core"]
    if topology.sockets:
        shape.insert(1, plural(len(topology.sockets), "socket"))
    use = f"CPUs {format_cpu_list(topology.affinity)}, memory of {name_nodes(topology.allowed_nodes)}"
    if topology.quota is not None:
        use += f", {topology.quota.num_cpus:g} CPUs' time ({topology.quota.source})"
    lines = [f"processor   {topology.model}, {', '.join(shape)}", f"may use     {use}"]
    caches = {
        cache.level: f"L{cache.level} {format_bytes(cache.num_bytes)} for {plural(len(cache.cpus), 'CPU')}"
        for cache in topology.caches
    }
    if caches:
        lines.append(f"caches      {', '.join(caches[level] for level in sorted(caches))}")
    return [
        *lines,
        f"pages       {format_bytes(topology.page_bytes)}; huge pages {thp.describe(topology.huge_pages)}",
        f"memory      {memory.describe()}",
    ]


def _nodes(topology: Topology) -> list[str]:
    from hotset.machine.files import format_cpu_list

    nodes = [node for node in topology.nodes if node.kind != "empty"]
    header: tuple[str, ...] = ("node", "kind", "CPUs", "memory", "available", "shared", "unevictable", "firmware says")
    rows: list[tuple[str, ...]] = [
        (
            str(node.node_id),
            node.kind,
            format_cpu_list(node.cpus) or "none",
            *map(format_bytes, (node.total_bytes, node.available_bytes, node.shared_bytes, node.unevictable_bytes)),
            _firmware(node.initiators),
        )
        for node in nodes
    ]
    if not any(node.initiators for node in nodes):  # most machines: no such table
        header, rows = header[:-1], [row[:-1] for row in rows]
    lines = format_table(header, rows, left=3)
    empty = tuple(node.node_id for node in topology.nodes if node.kind == "empty")
    if empty:
        lines.append(f"empty: {format_cpu_list(empty)}")
    lines += [line for node in nodes for line in _pools(node)]
    if len(nodes) > 1:
        lines += ["", *_distances(topology, nodes)]
    return lines


def _firmware(initiators: Initiators | None) -> str:
    if initiators is None:
        return "nothing"
    rate, latency = initiators.read_bytes_per_s, initiators.read_latency_s
    known = [format_rate(rate)] if rate else []
    if latency:
        known.append(f"{latency * 1e9:.0f} ns")
    return ", ".join(known)


def _pools(node: Node) -> list[str]:
    return [
        f"node {node.node_id}: {plural(pool.num_pages, 'huge page')} of {format_bytes(pool.page_bytes)} set aside, "
        f"{pool.num_free} free"
        for pool in node.pools
        if pool.num_pages
    ]


def _distances(topology: Topology, nodes: list[Node]) -> list[str]:
    def cell(value: int | None) -> str:
        return "?" if value is None else str(value)

    header = ("distance to", *(str(node.node_id) for node in nodes))
    rows = [
        (f"from {node.node_id}", *(cell(topology.distance(node.node_id, other.node_id)) for other in nodes))
        for node in nodes
    ]
    return format_table(header, rows)


def _gpus(gpus: Gpus) -> list[str]:
    if not gpus.found:
        return [f"GPUs        none: {gpus.absence}"]

    def cell(value: int | None) -> str:
        return "none" if value is None else str(value)

    rows = [
        (
            str(gpu.gpu_id),
            gpu.name,
            gpu.pci_address,
            "shared" if gpu.total_bytes is None else format_bytes(gpu.total_bytes),
            cell(gpu.cpu_node),
            cell(gpu.memory_node),
            ", ".join(map(str, gpu.peers)) or "none",
        )
        for gpu in gpus.found
    ]
    return format_table(("GPU", "name", "PCI address", "memory", "CPU node", "own node", "reads GPUs"), rows, left=3)
