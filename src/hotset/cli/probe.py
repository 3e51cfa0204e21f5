"""``hotset probe``: measures the ceilings of this machine."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotset.cli.options import size
from hotset.cli.tables import format_table, plural
from hotset.units import format_bytes

if TYPE_CHECKING:
    from hotset.machine.memory import MemoryState
    from hotset.machine.probe import ProbeReport
    from hotset.machine.samples import Samples
    from hotset.machine.topology import Topology


@click.command(name="probe")
@click.option(
    "--threads", type=click.IntRange(min=1), metavar="N", help="Measure up to N threads a node [default: one a core]."
)
@click.option("--quick", is_flag=True, help="Measure for a few seconds only: smaller buffers, fewer samples.")
@click.option(
    "--chunk",
    callback=size,
    default="6MiB",
    metavar="SIZE",
    help="Bytes of one matrix of an expert, read at random places [default: 6MiB].",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write the profile to FILE as well."
)
@click.option(
    "--svg", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Draw the paths as a picture."
)
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write it with all numbers."
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, with all samples.")
def command(
    threads: int | None,
    quick: bool,
    chunk: int,
    out: Path | None,
    svg: Path | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Measure what this machine can do: memory paths, caches, arithmetic, storage, GPU copies.

    The CPUs of each NUMA node read and write the memory of each node, with 1, 2, 4, ... threads as long as more gain.
    Reading DRAM bounds the speed of an answer: every token reads all active weights once. The int8 and bf16 rates bound
    the reading of a prompt. `hotset bench` compares a model with these ceilings.

    Each number is the median of several short runs, followed by the lowest and the highest. On a machine that other
    programs or virtual machines share, a wide spread means that they were busy: repeat it.

    The result is kept as the profile of this machine: `hotset plan` says from it how fast a model should be, and nodes
    and threads are chosen by it. --quick keeps nothing, unless --out says where.
    """
    from hotset.config import load_settings
    from hotset.log import progress, warn
    from hotset.machine.advice import huge_page_advice
    from hotset.machine.draw import html_page, svg_matrix
    from hotset.machine.measured import measured_profile, write_profile, write_text
    from hotset.machine.memory import read_memory
    from hotset.machine.probe import plan_probe, probe
    from hotset.machine.samples import FULL, QUICK
    from hotset.machine.topology import read_topology

    topology, memory, settings = read_topology(), read_memory(), load_settings()
    plan = plan_probe(
        topology, memory, settings.models_dir, threads=threads, chunk_bytes=chunk, effort=QUICK if quick else FULL
    )
    topology = plan.topology  # with what the GPUs' driver says of nodes
    with progress(plan.num_steps) as step:
        report = probe(plan, step)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    profile = measured_profile(report, topology, memory, now)
    targets = [*([] if quick else [settings.profile_path]), *([out] if out else [])]
    for path in targets:
        write_profile(profile, path)
    for picture, content in ((svg, svg_matrix), (html, html_page)):
        if picture is not None:
            write_text(picture, content(profile))
    if as_json:
        parts = {"probe": report.to_json(), "profile": profile.to_json(), "profile_id": profile.id}
        click.echo(json.dumps(machine_json(topology, memory) | parts, indent=2))
    else:
        kept = f"profile: {profile.id}" + (f", kept in {' and '.join(map(str, targets))}" if targets else ", not kept")
        click.echo("\n".join([*_text(topology, memory, report), kept]))
    for line in report.notes:
        warn(line)
    advice = huge_page_advice(topology.huge_pages)
    if advice is not None:
        warn(advice.line)


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
    lines += _path_lines(report)
    lines.append("")
    rows = [
        (f"L{row.level}", str(row.num_threads), format_bytes(row.bytes_per_thread), *_cells(row.bytes_per_s))
        for row in report.caches
    ]
    lines += format_table(("cache read", "threads", "each", "GB/s", "(min..max)"), rows)
    lines.append("")
    has_nodes = len({row.node_id for row in report.computes}) > 1
    rows = [
        (row.kind + f", node {row.node_id}" * has_nodes, row.instruction, str(row.num_threads), *_cells(row.ops_per_s))
        for row in report.computes
    ]
    lines += format_table(("arithmetic", "instruction", "threads", "Gop/s", "(min..max)"), rows, left=2)
    lines.append("")
    steps = [
        (
            f"node {row.node_id}",
            str(row.num_threads),
            *(cell for part in (row.exchange_s, row.barrier_s, row.run_s) for cell in _cells(part, 1e6, 2)),
        )
        for row in report.steps
    ]
    header = ("team of", "threads", "us an op", "(min..max)", "barrier", "(min..max)", "job", "(min..max)")
    lines += format_table(header, steps)
    lines.append("")
    lines += [*_storage_lines(report), *_gpu_lines(report)]
    lines.append(f"ceiling: {report.ceiling.median / 1e9:.1f} GB/s DRAM read with {plural(len(report.cpus), 'thread')}")
    return lines


def _path_lines(report: ProbeReport) -> list[str]:
    header = ("CPUs of", "memory of", "threads", "read GB/s", "(min..max)", "chunks", "write", "copy", "latency")
    rows = [
        (
            f"node {row.node_id}",
            f"node {row.target.node_id}",
            str(row.threads),
            *_cells(row.read),
            *(f"{samples.median / 1e9:.1f}" for samples in (row.chunks, row.write, row.copy)),
            f"{row.latency_s.median * 1e9:.0f} ns",
        )
        for row in report.paths
    ]
    lines = format_table(header, rows, left=2)
    for row in report.paths:
        reads = ", ".join(f"{count}: {samples.median / 1e9:.1f}" for count, samples in row.reads)
        lines.append(f"node {row.node_id} from node {row.target.node_id} by threads: {reads} GB/s")
    chunk = format_bytes(report.chunk_bytes)
    lines.append(f"chunks: {chunk} each, at random places; writes and copies: {report.write_instruction}")
    return lines


def _storage_lines(report: ProbeReport) -> list[str]:
    storage = report.storage
    if storage.read is None or storage.cached is None:
        return [f"storage     not measured: {storage.absence}"]
    read, cached = (" ".join(_cells(samples)) for samples in (storage.read, storage.cached))
    size = format_bytes(storage.num_bytes)
    return [f"storage     {read} GB/s ({storage.method}), page cache {cached} GB/s, {size} in {storage.folder}"]


def _gpu_lines(report: ProbeReport) -> list[str]:
    if report.gpus.absence is not None:
        return [f"GPUs        none: {report.gpus.absence}"]
    rows = [
        (f"GPU {path.gpu_id}", f"{path.memory}{path.memory_id}", *_cells(path.read), *_cells(path.write or path.read))
        for path in report.gpus.paths
    ]
    return format_table(("GPU", "memory", "read GB/s", "(min..max)", "write GB/s", "(min..max)"), rows, left=2)


def _cells(samples: Samples, scale: float = 1e-9, digits: int = 1) -> tuple[str, str]:
    low, middle, high = (f"{value * scale:.{digits}f}" for value in (samples.low, samples.median, samples.high))
    return middle, f"({low}..{high})"
