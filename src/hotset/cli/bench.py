"""``hotset bench``: tokens per second beside what the machine could do in the same minute."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

import click

from hotset.cli.placement import nodes_option, numa_option
from hotset.cli.recording import record_option, recording
from hotset.cli.tables import format_table, plural
from hotset.errors import InternalError
from hotset.log import warn

if TYPE_CHECKING:
    from pathlib import Path

    from hotset.bench.rows import Bench, Row
    from hotset.log import Step
    from hotset.machine.teams import NumaMode


def _counts(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    """Parse a list of positive numbers: ``128,4096``; empty is allowed."""
    parts = value.split(",") if value else []
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of positive numbers such as 128,4096", ctx, param)
    return tuple(int(part) for part in parts)


@click.command(name="bench")
@click.argument("model")
@click.option("--context", "contexts", callback=_counts, default="128,4096", show_default=True, metavar="N,...",
              help='Depths at which decoding is measured; "" for none.')  # fmt: skip
@click.option("--prefill", "prefills", callback=_counts, default="512,4096", show_default=True, metavar="N,...",
              help='Prompt lengths of which reading is measured; "" for none.')  # fmt: skip
@click.option("--sequences", callback=_counts, default="1", show_default=True, metavar="N,...",
              help="Sequences that decode together.")  # fmt: skip
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True, help="Samples of each row.")
@click.option(
    "--cache-format",
    metavar="NAME",
    help="Format of the cache rows: BF16, F16 (Llama); FP8, BF16, FP4, with +FP8 for the indexer's too, or BF16-exact "
    "(DeepSeek-V4) [default: suits the weights].",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads [default: one a core].")
@nodes_option
@numa_option
@record_option
@click.option("--json", "as_json", is_flag=True, help="Print conditions and all raw samples as JSON.")
def command(
    model: str,
    contexts: tuple[int, ...],
    prefills: tuple[int, ...],
    sequences: tuple[int, ...],
    repeats: int,
    cache_format: str | None,
    threads: int | None,
    nodes: tuple[int, ...] | None,
    numa: NumaMode,
    record_path: Path | None,
    as_json: bool,
) -> None:
    """Measure how fast MODEL decodes and reads prompts, as a share of what this machine can do.

    Each row gives the median of several samples with the lowest and the highest; the bytes that one token reads (from
    the plan); and those bytes per second, as a share of the read bandwidth that was measured directly before and after
    each sample. Prefill rows are also held against the arithmetic rate.

    Prompts are random tokens, so nothing is reused; a row whose prompt came from the cache is refused (exit code 4).
    """
    import numpy as np

    import hotset
    from hotset.api import describe_model
    from hotset.bench.conditions import conditions
    from hotset.bench.costs import ModelCosts
    from hotset.bench.rows import Bench, context_needed
    from hotset.cli.probe import machine_json
    from hotset.log import progress
    from hotset.machine.memory import read_memory
    from hotset.machine.probe import CeilingMeter
    from hotset.machine.topology import read_topology

    if (not contexts and not prefills) or (contexts and not sequences):
        raise click.UsageError("nothing to measure: give --context with --sequences, or --prefill")
    report = conditions() | machine_json(read_topology(), read_memory())
    seed = secrets.randbits(32)
    described = describe_model(model, cache_format)
    with described.checkpoint:
        costs = ModelCosts(described.spec, described.formats)
    chunk = 16  # the least; more slack than any chunk needs
    context = max(context_needed(contexts, sequences, repeats, chunk) if contexts else 0, *(n + 2 for n in prefills), 0)
    with (
        hotset.load(
            model,
            threads=threads,
            context=context,
            max_sequences=max(sequences, default=1),
            cache_format=cache_format,
            nodes=nodes,
            numa=numa,
        ) as engine,
        recording(engine, record_path),
        CeilingMeter(engine.plan.cpus) as meter,
    ):
        bench = Bench(engine, costs, meter, engine.plan.prefill_chunk, repeats, np.random.default_rng(seed))
        with progress(len(contexts) * len(sequences) + len(prefills)) as step:
            rows = _measure(bench, contexts, sequences, prefills, step)
        report |= {
            "model": model,
            "isa": meter.isa,
            "num_threads": engine.plan.num_threads,
            "seed": seed,
            "repeats": repeats,
            "plan": engine.plan.to_json(),
            "load_average_after": conditions()["load_average"],
            "rows": [row.to_json() for row in rows],
        }
    click.echo(json.dumps(report, indent=2) if as_json else "\n".join(_text(report, rows)))
    for row in rows:
        if row.exceeds_ceiling:
            read, ceiling = row.bytes_per_s / 1e9, row.read_ceiling / 1e9
            warn(
                f"{_name(row)} read {read:.1f} GB/s where {ceiling:.1f} GB/s were measured around it: weights that fit "
                "the caches, or a measurement held up by something else; the share says nothing"
            )
    refused = sum(row.is_refused for row in rows)
    if refused:
        raise InternalError(f"{refused} of {len(rows)} rows refused: part of a random prompt came from the cache")


def _measure(
    bench: Bench, contexts: tuple[int, ...], sequences: tuple[int, ...], prefills: tuple[int, ...], step: Step
) -> list[Row]:
    rows = []
    for num_sequences in sequences:
        for context in contexts:
            step(f"decode at context {context}, {num_sequences} together")
            rows.append(bench.decode_row(context, num_sequences))
    for num_tokens in prefills:
        step(f"prefill of {num_tokens} tokens")
        rows.append(bench.prefill_row(num_tokens))
    return rows


def _text(report: dict[str, Any], rows: list[Row]) -> list[str]:
    lines = [
        f"{report['model']}, {plural(report['num_threads'], 'thread')}, {report['isa']}, hotset {report['hotset']} "
        f"({report['commit'] or 'installed'}), {plural(report['repeats'], 'sample')} a row",
        f"{report['machine']['model']}, load average {report['load_average'][0]:.1f} before, "
        f"{report['load_average_after'][0]:.1f} after",
        "",
    ]
    header = ("test", "tok/s", "(min..max)", "MB/token", "GB/s", "read ceiling", "share", "arithmetic")
    return lines + format_table(header, [_cells(row) for row in rows])


def _name(row: Row) -> str:
    together = f" x {row.num_sequences}" if row.num_sequences > 1 else ""
    return f"{row.kind} @ {row.num_tokens}{together}" if row.kind == "decode" else f"prefill {row.num_tokens}"


def _cells(row: Row) -> tuple[str, ...]:
    name = _name(row)
    if row.is_refused:
        return (name, "refused", f"{row.cached_tokens} cached tokens", "-", "-", "-", "-", "-")
    rate = row.tokens_per_s
    compute = "-" if row.compute_share is None else f"{row.compute_share:.0%} of {row.compute_kind}"
    return (
        name,
        f"{rate.median:.1f}",
        f"({rate.low:.1f}..{rate.high:.1f})",
        f"{row.bytes_per_token / 1e6:.1f}",
        f"{row.bytes_per_s / 1e9:.1f}",
        f"{row.read_ceiling / 1e9:.1f}",
        "?" if row.exceeds_ceiling else f"{row.read_share:.0%}",
        compute,
    )
