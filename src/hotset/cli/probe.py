"""``hotset probe``: measures the ceilings of this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from hotset.cli.tables import format_table, plural
from hotset.units import format_bytes

if TYPE_CHECKING:
    from hotset.machine.memory import MemoryState
    from hotset.machine.probe import ProbeReport, Samples
    from hotset.machine.topology import Topology


@click.command(name="probe")
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Measure up to N threads [default: one a core]."
)
@click.option(
    "--quick", is_flag=True, help="Measure for at most 3 seconds instead of 10: smaller buffer, fewer samples."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, with all samples.")
def command(threads: int | None, quick: bool, as_json: bool) -> None:
    """Measure what this machine can do: memory, caches, arithmetic.

    These are the ceilings that `hotset bench` compares a model with. Reading DRAM bounds the speed of an answer: every
    token reads all active weights once. The int8 and bf16 rates bound the reading of a prompt.

    Each number is the median of several short runs, followed by the lowest and the highest. On a machine that other
    programs or virtual machines share, a wide spread means that they were busy: repeat it.
    """
    from hotset.log import progress, warn
    from hotset.machine import thp
    from hotset.machine.memory import read_memory
    from hotset.machine.probe import FULL, QUICK, num_steps, probe
    from hotset.machine.topology import pick_cpus, read_topology

    topology = read_topology()
    memory = read_memory()
    if threads is not None:
        pick_cpus(topology, threads)  # refuses too many before the bar appears
    with progress(num_steps(topology, threads)) as step:
        report = probe(topology, threads=threads, effort=QUICK if quick else FULL, step=step)
    if as_json:
        click.echo(json.dumps(machine_json(topology, memory) | {"probe": report.to_json()}, indent=2))
    else:
        click.echo("\n".join(_text(topology, memory, report)))
    advice = thp.advice(topology.huge_pages)
    if advice is not None:
        warn(advice)


def machine_json(topology: Topology, memory: MemoryState) -> dict[str, Any]:
    """The machine as this process sees it, for JSON outputs."""
    from dataclasses import asdict

    return {
        "machine": asdict(topology),
        "memory": {
            "available_bytes": memory.available_bytes,
            "total_bytes": memory.total_bytes,
            "source": memory.source,
            "limits": [asdict(term) for term in memory.terms],
        },
    }


def _text(topology: Topology, memory: MemoryState, report: ProbeReport) -> list[str]:
    from hotset.machine import thp
    from hotset.machine.files import format_cpu_list

    cpus = format_cpu_list(tuple(sorted(report.cpus)))
    lines = [
        f"processor   {topology.model}, kernels for {report.isa}",
        f"threads     {len(report.cpus)} on CPUs {cpus} ({report.threads_reason})",
        f"memory      {memory.describe()}, {plural(len(topology.nodes), 'NUMA node')}",
        f"huge pages  {thp.describe(topology.huge_pages)}; "
        f"{format_bytes(report.huge_bytes)} of the {format_bytes(report.buffer_bytes)} buffer lie in them",
        "",
    ]
    rows = [
        (row.level, str(row.num_threads), format_bytes(row.bytes_per_thread), *_cells(row.bytes_per_s))
        for row in report.reads
    ]
    lines += format_table(("read", "threads", "each", "GB/s", "(min..max)"), rows)
    lines.append("")
    rows = [(row.kind, row.instruction, str(row.num_threads), *_cells(row.ops_per_s)) for row in report.computes]
    lines += format_table(("arithmetic", "instruction", "threads", "Gop/s", "(min..max)"), rows, left=2)
    lines.append("")
    lines.append(
        f"ceiling: {report.read_bytes_per_s / 1e9:.1f} GB/s DRAM read with {plural(len(report.cpus), 'thread')}"
    )
    if report.saturating_threads < len(report.cpus):
        lines.append(f"enough for it: {plural(report.saturating_threads, 'thread')} (within 3 %)")
    return lines


def _cells(samples: Samples) -> tuple[str, str]:
    return f"{samples.median / 1e9:.1f}", f"({samples.low / 1e9:.1f}..{samples.high / 1e9:.1f})"
