"""The audit as one HTML page: a memory map drawn to scale, the lines, the plan. No scripts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from hotset.audit.checks import Line
from hotset.audit.observe import Observed, Unknown
from hotset.audit.record import NodeSummary, Region, RunRecord
from hotset.machine.verify import OFF_SHARE
from hotset.units import format_bytes, format_rate

WIDTH = 960
"""Of the map, in its own units; the largest node is as wide."""
BAR_HEIGHT = 18
ENLARGED_HEIGHT = 24
ROW = 78
FILLS = ("#4c78a8", "#72b7b2", "#54a24b", "#b279a2", "#9d755d", "#eeca3b")
"""Colours of what holds memory, by the first word of a region's name, in order of appearance."""
STRAY = "#d62728"
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem; color: #1b1b1b;
  background: #fff }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem } svg { width: 100%; height: auto }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top;
  border-bottom: 1px solid #ddd } td.n { text-align: right; white-space: nowrap }
.green { color: #1a7f37 } .red { color: #c0202a; font-weight: 600 } .grey { color: #767676 } small { color: #555 }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #e4e4e4 } td, th { border-color: #3a3a3a }
  .green { color: #4ac26b } .red { color: #ff7b72 } .grey, small { color: #9a9a9a } svg text { fill: #e4e4e4 } }
"""


def html_report(record: RunRecord, seen: Observed, lines: Sequence[Line]) -> str:
    """The whole page."""
    plan = record.plan
    state = "red" if any(line.state == "red" for line in lines) else "green"
    counts = ", ".join(f"{sum(line.state == s for line in lines)} {s}" for s in ("green", "red", "grey"))
    when = f"seen {seen.moment.time}" if seen.ended is None else f"{seen.ended}; as recorded {seen.moment.time}"
    about = f"hotset {record.hotset}, {record.isa}, process {record.process.pid}, started {record.started}; {when}"
    parts = [
        f"<h1>Audit of {escape(plan.model)}: <span class={state}>{state}</span> <small>({counts})</small></h1>",
        f"<p><small>{escape(about)}</small></p>",
        "<h2>Memory</h2>",
        *_memory(record, seen),
        "<h2>Lines</h2>",
        _lines_table(lines),
        "<h2>Plan</h2>",
        _plan_table(record),
        "<h2>Settings</h2>",
        _table(("", "asked", "used"), [(s.name, s.asked or "-", s.used) for s in record.settings]),
        "<h2>Timed steps</h2>",
        _samples_table(record),
    ]
    title = escape(f"hotset audit: {plan.model}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = "\n".join(parts)
    return (
        f"<!DOCTYPE html>\n<html lang=en><head>{head}<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=n' if i in numbers and tag == 'td' else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        ) + "</tr>"  # fmt: skip

    return "<table>" + row(header, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def _lines_table(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        hint = f"<br><small>{escape(line.hint)}</small>" if line.hint else ""
        rows.append(
            f"<tr><td class={line.state}>{line.state}</td><td>{escape(line.name)}</td>"
            f"<td>{escape(line.found)}{hint}</td><td>{escape(line.expected)}</td></tr>"
        )
    return "<table><tr><th></th><th></th><th>found</th><th>expected</th></tr>" + "".join(rows) + "</table>"


def _plan_table(record: RunRecord) -> str:
    plan = record.plan
    rows = [(term.name, format_bytes(term.num_bytes), term.kind, term.detail) for term in plan.terms]
    total = sum(term.num_bytes for term in plan.terms)
    available = f"of {format_bytes(plan.available_bytes)} ({plan.available_source})"
    rows.append(("total", format_bytes(total), "", available))
    return _table(("term", "bytes", "", ""), rows, (1,))


def _samples_table(record: RunRecord) -> str:
    rows = []
    for sample in record.samples:
        shape = f"{sample.num_sequences} x {sample.num_tokens} tokens at {sample.context:,}"
        for part in sample.classes:
            expected = "-" if part.expected_seconds is None else f"{part.expected_seconds * 1e3:.3f}"
            rate = format_rate(part.num_bytes / part.seconds) if part.num_bytes and part.seconds else "-"
            rows.append((shape, part.name, f"{part.num_bytes / 1e6:,.1f}", f"{part.seconds * 1e3:.3f}", expected, rate))
            shape = ""
    if not rows:
        return "<p>No step was timed.</p>"
    return _table(("step", "op class", "MB", "ms", "ms expected", ""), rows, (2, 3, 4, 5))


# The map


def _memory(record: RunRecord, seen: Observed) -> list[str]:
    if isinstance(seen.regions, Unknown):
        return [f"<p>{escape(seen.regions.reason)}</p>"]
    nodes = [node for node in record.machine.nodes if node.total_bytes]
    kinds = list(dict.fromkeys(_kind(region) for region in seen.regions))
    fills = {kind: FILLS[index % len(FILLS)] for index, kind in enumerate(kinds)}
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="background:{fill};display:inline-block;width:.8em;height:.8em">'
        f"</span> {escape(kind)}</span>"
        for kind, fill in [*fills.items(), ("off its node", STRAY)]
    )
    rows = [(r.name, format_bytes(r.num_bytes), f"node {r.node}", _where(r), _huge(r)) for r in seen.regions]
    return [
        memory_map(nodes, seen.regions, fills),
        f"<p>{legend}<br><small>Upper bars: the memory of the nodes, all to one scale. Lower bars: what the run has of "
        "it, enlarged.</small></p>",
        _table(("region", "bytes", "planned", "pages", "in huge pages"), rows, (1,)),
    ]


def _kind(region: Region) -> str:
    return region.name.partition(" ")[0]


def _where(region: Region) -> str:
    pages = sorted(region.pages.items(), reverse=True)
    where = ", ".join(f"{count:,} {'not in memory' if node < 0 else f'on node {node}'}" for node, count in pages)
    return f"{where} (by a sample)" if region.located_by == "sample" else where


def _huge(region: Region) -> str:
    if not region.planned_huge_bytes:
        return "-"
    found = "?" if region.huge_bytes is None else format_bytes(region.huge_bytes)
    return f"{found} of {format_bytes(region.planned_huge_bytes)}"


def memory_map(nodes: Sequence[NodeSummary], regions: Sequence[Region], fills: Mapping[str, str]) -> str:
    """Nodes as bars, as wide as their memory; in each the regions whose pages lie there, all to one scale.

    Under every bar the run's part of it once more, as wide as the page: regions of gigabytes would be lines on a node
    of a terabyte. A red frame marks pages that were planned on another node.
    """
    largest = max((node.total_bytes for node in nodes), default=1)
    out, top = [], 0
    for node in nodes:
        parts = [(r, part) for r in regions if (part := _bytes_on(r, node.node_id))]
        held = sum(part for _, part in parts)
        width = WIDTH * node.total_bytes / largest
        title = f"node {node.node_id} ({node.kind}): {format_bytes(round(held))} of {format_bytes(node.total_bytes)}"
        out.append(f'<text x="0" y="{top + 14}" font-size="13">{escape(title)}</text>')
        out.append(f'<rect x="0" y="{top + 20}" width="{width:.2f}" height="{BAR_HEIGHT}" fill="none" stroke="#888"/>')
        out += _rects(parts, node.node_id, top + 20, BAR_HEIGHT, WIDTH / largest, fills)
        if held:
            out += _rects(parts, node.node_id, top + 42, ENLARGED_HEIGHT, WIDTH / held, fills)
        top += ROW
    inner = "".join(out)
    return f'<svg viewBox="-1 0 {WIDTH + 2} {top}" role="img" aria-label="memory map" fill="#1b1b1b">{inner}</svg>'


def _rects(
    parts: Sequence[tuple[Region, float]], node: int, y: int, height: int, scale: float, fills: Mapping[str, str]
) -> list[str]:
    out, x = [], 0.0
    for region, num_bytes in parts:
        width = num_bytes * scale
        is_stray = region.node != node and num_bytes > OFF_SHARE * region.num_bytes
        frame = f'stroke="{STRAY}" stroke-width="3"' if is_stray else 'stroke="#fff" stroke-width=".5"'
        tip = f"{region.name}: {format_bytes(round(num_bytes))} here, planned on node {region.node}"
        fill = fills[_kind(region)]
        out.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{fill}" {frame}>'
            f"<title>{escape(tip)}</title></rect>"
        )
        x += width
    return out


def _bytes_on(region: Region, node: int) -> float:
    total = sum(region.pages.values())
    return region.num_bytes * region.pages.get(node, 0) / total if total else 0.0
