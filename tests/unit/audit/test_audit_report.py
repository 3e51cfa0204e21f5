"""The HTML report: the map to scale, nothing from elsewhere, nothing of a record obeyed."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from audit_records import GIB, MIB, RECORD, SEEN, region, sample

from hotset.audit import checks
from hotset.audit.observe import Observed, Unknown
from hotset.audit.record import NodeSummary, RunRecord
from hotset.audit.report import STRAY, WIDTH, html_report, memory_map

FILLS = {"weights": "#111111", "cache": "#222222"}
NODES = (NodeSummary(0, "cpu", 2, 8 * GIB), NodeSummary(1, "cpu", 2, 4 * GIB))


def page(record: RunRecord = RECORD, seen: Observed = SEEN) -> str:
    return html_report(record, seen, checks.audit(record, seen))


def rects(svg: str) -> list[dict[str, str]]:
    return [dict(r.attrib) | {"tip": r.findtext("title") or ""} for r in ElementTree.fromstring(svg).iter("rect")]


def test_bars_and_regions_are_drawn_to_one_scale() -> None:
    """A node of half the memory is half as wide; a region of an eighth of the largest, an eighth."""
    regions = (region("weights", 0, 1 * GIB, 0), region("cache", 1 << 40, 2 * GIB, 1))
    drawn = rects(memory_map(NODES, regions, FILLS))
    outlines = [float(r["width"]) for r in drawn if r["fill"] == "none"]
    assert outlines == [WIDTH, WIDTH / 2]
    weights = [float(r["width"]) for r in drawn if r["fill"] == FILLS["weights"]]
    cache = [float(r["width"]) for r in drawn if r["fill"] == FILLS["cache"]]
    assert weights == [WIDTH / 8, WIDTH] and cache == [WIDTH / 4, WIDTH]  # on the node, and enlarged


def test_pages_are_drawn_where_they_are_and_strays_are_framed() -> None:
    regions = (region("weights", 0, 1 * GIB, 0, pages={0: 3, 1: 1}), region("cache", 1 << 40, 1 * GIB, 1))
    drawn = [r for r in rects(memory_map(NODES, regions, FILLS)) if r["fill"] == FILLS["weights"]]
    on_node = [r for r in drawn if r["height"] == "18"]
    assert [float(r["width"]) for r in on_node] == [WIDTH / 8 * 3 / 4, WIDTH / 8 / 4]
    assert [r["stroke"] == STRAY for r in on_node] == [False, True]
    assert "planned on node 0" in on_node[1]["tip"]


def test_regions_of_a_node_do_not_overlap() -> None:
    regions = tuple(region(f"weights {i}", i << 40, (1 + i) * MIB, 0) for i in range(9))
    drawn = [r for r in rects(memory_map(NODES, regions, FILLS)) if r["height"] == "18" and r["fill"] != "none"]
    x = 0.0
    for rect in drawn:
        assert abs(float(rect["x"]) - x) < 0.02
        x += float(rect["width"])


class Tags(HTMLParser):
    """Tags that were opened and not closed, and every attribute that names another place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [
            f"{name}={value}" for name, value in attributes if name in ("src", "href", "xlink:href", "action")
        ]
        if tag not in ("meta", "br", "rect"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    return tags


def test_the_page_stands_alone() -> None:
    text = page()
    tags = parsed(text)
    assert not tags.links and "script" not in tags.tags and "link" not in tags.tags
    assert not re.search(r"https?://|url\(|@import", text)


@pytest.mark.parametrize("where", ["model", "region", "term", "setting"])
def test_text_of_a_record_is_text(where: str) -> None:
    """A record may come from anywhere; a name in it must not become a script of the page."""
    bad = "<script>alert(1)</script>\"'&"
    plan = RECORD.plan
    record = {
        "model": replace(RECORD, plan=replace(plan, model=bad)),
        "region": RECORD,
        "term": replace(RECORD, plan=replace(plan, terms=(replace(plan.terms[0], detail=bad),))),
        "setting": replace(RECORD, settings=(replace(RECORD.settings[0], asked=bad),)),
    }[where]
    regions = (replace(RECORD.regions[0], name=bad),) if where == "region" else RECORD.regions
    text = page(record, replace(SEEN, regions=regions))
    assert "<script" not in text and "script" not in parsed(text).tags
    assert "&lt;script&gt;" in text


def test_every_line_and_term_is_there() -> None:
    seen = replace(SEEN, hotset="1.0")
    text = page(seen=seen)
    for line in checks.audit(RECORD, seen):
        assert f">{line.name}<" in text and f"class={line.state}" in text
    for term in RECORD.plan.terms:
        assert f">{term.name}<" in text
    assert "Audit of tiny: <span class=red>red" in text and "start it again" in text


def test_what_is_not_known_is_said() -> None:
    seen = replace(SEEN, regions=Unknown("numa_maps cannot be read"), ended="process 4242 has ended")
    text = page(replace(RECORD, samples=()), seen)
    assert "numa_maps cannot be read" in text and "process 4242 has ended" in text and "No step was timed" in text
    parsed(text)


def test_timed_steps_without_a_prediction() -> None:
    classes = tuple(replace(part, expected_seconds=None) for part in sample().classes)
    text = page(replace(RECORD, samples=(replace(sample(), classes=classes),)))
    assert "1 x 1 tokens at 100" in text and ">10.0 GB/s<" in text
