"""The path matrix of a profile as a picture: who reads from which memory, the faster the darker. SVG and HTML.

Nothing from elsewhere, no scripts; neutral colours that follow the reader's light or dark setting. The cells keep their
colours in both, and each has the text colour that stands out more.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from html import escape

from hotset.machine.profile import Consumer, Memory, Path, Profile
from hotset.units import GIB, format_bytes

CELL_WIDTH, CELL_HEIGHT, GAP = 176, 104, 6
LEFT, BOTTOM, MARGIN, LINE = 150, 66, 20, 18
MIN_WIDTH = 860
#: Of the widest usual fonts at 13 px.
CHARACTER = 7.5
SLOW, FAST = (0xE3, 0xE8, 0xEC), (0x12, 0x3A, 0x5E)
#: A path this many times slower than the fastest has the palest shade; each halving is a step of the same size.
RANGE = 64
INKS = ("#000000", "#ffffff")

_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b1b1b } .soft { fill: #5a5a5a }
.title { font-size: 17px; font-weight: 600 } .name { font-size: 15px; font-weight: 600 }
.rate { font-size: 20px; font-weight: 600 } .ground { fill: #ffffff }
.none { fill: none; stroke: #b5b5b5; stroke-dasharray: 4 4 } .near { fill: none; stroke: #1b1b1b; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6e6e6 } .soft { fill: #a8a8a8 } .ground { fill: #161616 }
  .none { stroke: #5c5c5c } .near { stroke: #e6e6e6 } }
"""
_PAGE_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1b1b1b;
  background: #fff } svg { max-width: 100%; height: auto } table { border-collapse: collapse; margin: 1rem 0 }
td, th { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #ddd } td.n, th.n { text-align: right }
small { color: #5a5a5a } h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
@media (prefers-color-scheme: dark) { body { background: #161616; color: #e6e6e6 } td, th { border-color: #3a3a3a }
  small { color: #a8a8a8 } }
"""


def svg_matrix(profile: Profile) -> str:
    """The matrix: consumers below each other, memories side by side. A framed cell is a consumer's own memory."""
    width = max(2 * MARGIN + LEFT + len(profile.memories) * (CELL_WIDTH + GAP), MIN_WIDTH)
    head = [*textwrap.wrap(profile.about, int((width - 2 * MARGIN) / CHARACTER)), _origin(profile)]
    top = 92 + LINE * len(head)
    height = top + len(profile.consumers) * (CELL_HEIGHT + GAP) + BOTTOM
    most = max(path.read_bytes_per_s for path in profile.paths)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(_title(profile))}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        _text(MARGIN, 30, profile.name, "title"),
        *(_text(MARGIN, 52 + LINE * line, text, "soft") for line, text in enumerate(head)),
    ]
    for column, memory in enumerate(profile.memories):
        x = MARGIN + LEFT + column * (CELL_WIDTH + GAP)
        parts += [_text(x, top - 26, memory.name, "name"), _text(x, top - 9, _describe_memory(memory), "soft")]
    for row, consumer in enumerate(profile.consumers):
        y = top + row * (CELL_HEIGHT + GAP)
        parts += [
            _text(MARGIN, y + 24 + LINE * line, text, "soft" if line else "name")
            for line, text in enumerate(_describe_consumer(consumer))
        ]
        for column, memory in enumerate(profile.memories):
            x = MARGIN + LEFT + column * (CELL_WIDTH + GAP)
            parts += _cell(x, y, profile.find_path(consumer.name, memory.name), most, consumer.near == memory.name)
    parts += _legend(height - BOTTOM + 12, most)
    return "\n".join([*parts, "</svg>"]) + "\n"


def html_page(profile: Profile) -> str:
    """A page with the picture, and every number of the profile in tables."""
    title = escape(_title(profile))
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    parts = [
        f"<h1>{title}</h1>",
        f"<p><small>{escape(_origin(profile))}</small></p>",
        svg_matrix(profile),
        "<h2>Paths</h2>",
        _table(
            ("", "memory", "read GB/s", "lowest", "highest", "threads", "chunks GB/s", "write GB/s", "latency ns", ""),
            [_path_row(path) for path in profile.paths],
        ),
        "<h2>Arithmetic</h2>",
        _table(
            ("", "kind", "Gop/s"),
            [
                (each.name, kind, f"{rate / 1e9:,.1f}")
                for each in profile.consumers
                for kind, rate in each.rates.items()
            ],
        ),
    ]
    body = "\n".join(parts)
    head = f"<head>{head}<style>{_PAGE_STYLE}</style></head>"
    return f"<!DOCTYPE html>\n<html lang=en>{head}\n<body>\n{body}\n</body></html>\n"


def shade(share: float) -> tuple[str, str]:
    """Colour of a cell that carries ``share`` of the fastest, and of the text on it."""
    depth = max(0.0, 1 + math.log(share, RANGE))
    colour = tuple(round(slow + (fast - slow) * depth) for slow, fast in zip(SLOW, FAST, strict=True))
    fill = "#" + "".join(f"{part:02x}" for part in colour)
    return fill, max(INKS, key=lambda ink: contrast(fill, ink))


def contrast(a: str, b: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2): 4.5 and more is readable."""
    low, high = sorted((_luminance(a), _luminance(b)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _cell(x: int, y: int, path: Path | None, most: float, is_near: bool) -> list[str]:
    box = f'x="{x}" y="{y}" width="{CELL_WIDTH}" height="{CELL_HEIGHT}" rx="6"'
    if path is None:
        return [f'<rect class="none" {box}/>', _text(x + 14, y + 30, "not measured", "soft")]
    fill, ink = shade(path.read_bytes_per_s / most)
    lines = [f"{_rate(path.read_bytes_per_s)} GB/s", *_details(path)]
    parts = [f'<rect fill="{fill}" {box}/>', *([f'<rect class="near" {box}/>'] if is_near else [])]
    for line, text in enumerate(lines):
        at = y + 30 + (22 + 17 * (line - 1) if line else 0)
        kind = ' class="rate"' if line == 0 else ""
        parts.append(f'<text x="{x + 14}" y="{at}"{kind} style="fill:{ink}">{escape(text)}</text>')
    return parts


def _details(path: Path) -> list[str]:
    first = []
    if path.threads is not None:
        first.append(f"{path.threads} thread{'s' * (path.threads != 1)}")
    if path.latency_s is not None:
        first.append(_time(path.latency_s))
    return [
        *([", ".join(first)] if first else []),
        *([f"chunks {_rate(path.chunk_bytes_per_s)}"] if path.chunk_bytes_per_s else []),
        *([f"write {_rate(path.write_bytes_per_s)}"] if path.write_bytes_per_s else []),
    ]


def _legend(y: int, most: float) -> list[str]:
    steps, width = 13, 16
    fills = [shade(RANGE ** (step / (steps - 1) - 1))[0] for step in range(steps)]
    parts = [
        f'<rect fill="{fill}" x="{MARGIN + step * width}" y="{y}" width="{width}" height="12"/>'
        for step, fill in enumerate(fills)
    ]
    right = MARGIN + steps * width + 10
    lines = [
        f"{_rate(most / RANGE)} to {_rate(most)} GB/s read, each shade 1.4 times the one before. Framed: own memory.",
        "In a cell: threads that saturate the path, latency of one read; chunks of an expert's size, writes (GB/s).",
    ]
    return [*parts, _text(right, y + 11, lines[0], "soft"), _text(MARGIN, y + 32, lines[1], "soft")]


def _text(x: int, y: int, text: str, kind: str) -> str:
    return f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>'


def _title(profile: Profile) -> str:
    return f"{profile.name}: {profile.about}"


def _origin(profile: Profile) -> str:
    published = textwrap.shorten(profile.source, 80, placeholder=" ...")
    when = f"measured {profile.measured}" if profile.measured else f"published: {published}"
    storage = f", storage {_rate(profile.storage_bytes_per_s)} GB/s" if profile.storage_bytes_per_s else ""
    return f"profile {profile.id}, {when}{storage}"


def _describe_memory(memory: Memory) -> str:
    size = f"{memory.num_bytes / GIB:,.0f} GiB" if memory.num_bytes >= 10 * GIB else format_bytes(memory.num_bytes)
    return f"{size} {memory.kind}" + ("" if memory.node is None else f", node {memory.node}")


def _describe_consumer(consumer: Consumer) -> list[str]:
    step = [] if consumer.step_s is None else [f"{consumer.step_s * 1e6:.1f} us an op"]
    return [consumer.name, f"{consumer.num_cores} core{'s' * (consumer.num_cores != 1)}", *step]


def _path_row(path: Path) -> tuple[str, ...]:
    low, high = path.spread or (None, None)
    return (
        path.consumer,
        path.memory,
        *(_rate(value) if value else "" for value in (path.read_bytes_per_s, low, high)),
        str(path.threads or ""),
        *(_rate(value) if value else "" for value in (path.chunk_bytes_per_s, path.write_bytes_per_s)),
        f"{path.latency_s * 1e9:.0f}" if path.latency_s else "",
        path.source,
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e9:.0f} ns" if seconds < 1e-5 else f"{seconds * 1e6:.0f} us"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.1f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns from the third on are numbers, but for the last of a wide table."""
    is_number = [2 <= column < max(3, len(header) - 1) for column in range(len(header))]

    def line(cells: Sequence[str], tag: str) -> str:
        inside = "".join(
            f"<{tag}{' class=n' if number else ''}>{escape(cell)}</{tag}>"
            for cell, number in zip(cells, is_number, strict=True)
        )
        return f"<tr>{inside}</tr>"

    return "\n".join(["<table>", line(header, "th"), *(line(row, "td") for row in rows), "</table>"])
