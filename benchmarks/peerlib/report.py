"""The record (JSON, all raw samples) and the page (markdown) of one run."""

from __future__ import annotations

import statistics
from typing import Any

from peerlib.schedule import ModelResult, Sample

METRICS = {
    "decode_128": ("decode at 128 tokens", "tok/s", 1.0),
    "decode_4096": ("decode at 4,096 tokens", "tok/s", 1.0),
    "batch_8": ("eight sequences together", "tok/s in all", 1.0),
    "prefill_512": ("prefill of 512 tokens", "tok/s", 1.0),
    "prefill_4096": ("prefill of 4,096 tokens", "tok/s", 1.0),
    "load_s": ("load", "s", 1.0),
    "load_to_first_token_s": ("load to first token", "s", 1.0),
    "peak_rss_bytes": ("peak resident memory, one sequence", "GiB", 1.0 / (1 << 30)),
}
LOWER_IS_BETTER = {"load_s", "load_to_first_token_s", "peak_rss_bytes"}
QUIET_CORES = 0.1  # samples taken while others used more than this are counted in the report


def median(samples: list[Sample]) -> float:
    return statistics.median(sample.value for sample in samples)


def number(value: float) -> str:
    """Three significant digits, no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def cell(samples: list[Sample] | None, scale: float) -> str:
    """``median (smallest..largest)``."""
    if not samples:
        return "-"
    values = [sample.value * scale for sample in samples]
    if len(values) == 1:
        return f"{number(values[0])} (one sample)"
    return f"**{number(statistics.median(values))}** ({number(min(values))}..{number(max(values))})"


def medians(result: ModelResult, metric: str) -> dict[str, float]:
    """Return the median of each engine that has samples of this metric."""
    return {engine: median(metrics[metric]) for engine, metrics in result.samples.items() if metrics.get(metric)}


def ratio_cell(metric: str, result: ModelResult) -> str:
    """hotset over the best of the others, so that more than 1 is better for hotset whatever the unit."""
    values = medians(result, metric)
    ours = values.pop("hotset", None)
    if ours is None or not values:
        return "-"
    if metric in LOWER_IS_BETTER:
        return f"{min(values.values()) / ours:.2f}x"
    return f"{ours / max(values.values()):.2f}x"


def model_table(result: ModelResult, engines: list[str]) -> list[str]:
    """Return the lines of one model's table."""
    rows = ["| | " + " | ".join(engines) + " | hotset / best peer |", "|---|" + "---|" * (len(engines) + 1)]
    for metric, (title, unit, scale) in METRICS.items():
        if not medians(result, metric):
            continue
        cells = [cell(result.samples.get(engine, {}).get(metric), scale) for engine in engines]
        rows.append(f"| {title}, {unit} | " + " | ".join(cells) + f" | {ratio_cell(metric, result)} |")
    return rows + share_rows(result, engines)


def share_rows(result: ModelResult, engines: list[str]) -> list[str]:
    """Return medians as shares of what ``hotset probe`` measured between the repeats (without it, as plain rates).

    Decode reads every weight once a token; a prompt token multiplies by every weight of the layers (two operations).
    """
    decode = {engine: rate * result.facts.bytes_per_token for engine, rate in medians(result, "decode_128").items()}
    prefill = {engine: rate * 2 * result.facts.layer_weights for engine, rate in medians(result, "prefill_512").items()}
    read, int8 = ceiling(result, "read_bytes_per_s"), ceiling(result, "int8_ops_per_s")
    what = "bytes of the plan" if result.model.card else "weights"
    rows = [share_row(f"{what} read in decode at 128, GB/s", decode, read, engines)]
    if result.model.format != "F16":
        rows.append(share_row("matrix products in prefill of 512, Gop/s", prefill, int8, engines))
    return rows


def ceiling(result: ModelResult, key: str) -> float | None:
    """Return the median of a ceiling over the repeats, None when it was not measured."""
    return statistics.median(found[key] for found in result.ceilings) if result.ceilings else None


def share_row(title: str, rates: dict[str, float], top: float | None, engines: list[str]) -> str:
    of = f", of {number(top / 1e9)}" if top else ""
    cells = []
    for engine in engines:
        share = f" ({100 * rates[engine] / top:.0f} %)" if top and engine in rates else ""
        cells.append(f"{number(rates[engine] / 1e9)}{share}" if engine in rates else "-")
    return f"| {title}{of} | " + " | ".join(cells) + " | |"


def manners_table(result: ModelResult, engines: list[str]) -> list[str]:
    rows = ["| | alone, tok/s | one busy process per core, tok/s | share kept |", "|---|---|---|---|"]
    for engine in (name for name in engines if name in result.samples):
        metrics = result.samples[engine]
        share = "-"
        if metrics.get("quiet") and metrics.get("busy"):
            share = f"{median(metrics['busy']) / median(metrics['quiet']):.2f}"
        rows.append(f"| {engine} | {cell(metrics.get('quiet'), 1.0)} | {cell(metrics.get('busy'), 1.0)} | {share} |")
    return rows


def disturbance(results: list[ModelResult]) -> str:
    """Say in one sentence how quiet the machine was."""
    samples = [s for r in results for metrics in r.samples.values() for values in metrics.values() for s in values]
    if not samples:
        return "No sample was taken."
    loud = [sample for sample in samples if sample.others_cores > QUIET_CORES]
    most = max(sample.others_cores for sample in samples)
    return (
        f"Other processes used more than {QUIET_CORES} cores during {len(loud)} of {len(samples)} samples "
        f"(at most {most:.2f} cores)."
    )


def page(record: dict[str, Any], results: list[ModelResult], manners: ModelResult | None) -> str:
    """Return the markdown page; every number in it comes from this one run."""
    machine, engines = record["machine"], record["engines"]
    lines = [
        "# hotset beside other engines",
        "",
        f"This page is written by the command below; do not edit it. Raw samples: `{record['file']}` beside it.",
        "",
        f"- command: `{record['command']}`",
        f"- date: {record['date']}, hotset at commit {machine['hotset_commit'] or 'unknown'}",
        f"- machine: {machine['cpu']} (family/model {machine['cpu_family_model']}), {machine['num_cpus']} CPUs"
        f"{', virtual' if machine['is_virtual'] else ''}, {', '.join(machine['features'])}, "
        f"{machine['memory_bytes'] / (1 << 30):.1f} GiB, huge pages {machine['huge_pages']}, Linux {machine['kernel']}",
        f"- {record['threads']} threads for every engine; every repeat starts fresh workers; "
        "cells are median (smallest..largest)",
        f"- {disturbance(results)}"
        + (" Workers ran in a scheduling autogroup of their own at -20." if record["has_priority"] else ""),
        "- prompts are random token ids, new in every repeat and the same for all engines, so no prefix cache can hit; "
        "greedy decoding, end-of-text ignored, the same number of new tokens for all engines of a table",
    ]
    settings = {name: text for result in results for name, text in result.settings.items()}
    versions = {name: text for result in results for name, text in result.versions.items()}
    lines += [f"- {name}: {versions[name]}. {settings[name]}" for name in engines if name in versions]
    for result in results:
        order = "alternate item by item" if result.is_interleaved else "take turns, one in memory at a time"
        what = "as the plan says" if result.model.card else "of weights"
        size = f"{result.facts.bytes_per_token / 1e6:,.1f} MB {what} per token"
        lines += ["", f"## {result.model.title}", ""]
        lines += [f"{size}; {result.num_repeats} repeats, {result.model.new_tokens} new tokens; engines {order}.", ""]
        lines += model_table(result, engines)
        lines += [f"\n{name} failed: {reason}" for name, reason in result.failures.items()]
    if manners:
        lines += ["", "## Manners on a shared machine", ""]
        lines += [f"{manners.model.title}, decode at 128 tokens. A fair scheduler leaves one half.", ""]
        lines += manners_table(manners, engines)
        lines += [f"\n{name} failed: {reason}" for name, reason in manners.failures.items()]
    return "\n".join(lines) + "\n"


def result_record(result: ModelResult) -> dict[str, Any]:
    """Return one model's part of the record, with every sample as [value, cores used by others]."""
    return {
        "model": result.model.key,
        "bytes_per_token": result.facts.bytes_per_token,
        "layer_weights": result.facts.layer_weights,
        "new_tokens": result.model.new_tokens,
        "num_repeats": result.num_repeats,
        "is_interleaved": result.is_interleaved,
        "ceilings": result.ceilings,
        "versions": result.versions,
        "settings": result.settings,
        "failures": result.failures,
        "samples": {
            engine: {
                metric: [[float(f"{sample.value:.6g}"), round(sample.others_cores, 3)] for sample in samples]
                for metric, samples in metrics.items()
            }
            for engine, metrics in result.samples.items()
        },
    }
