"""The picture of a profile: well formed, complete, and readable on every shade."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from hotset.machine.draw import contrast, html_page, shade, svg_matrix
from hotset.machine.presets import preset_names, read_preset
from hotset.machine.profile import Consumer, Memory, Path, Profile
from hotset.units import GIB

SVG = "{http://www.w3.org/2000/svg}"
PROFILE = Profile(
    "this",
    "A <fast> machine & more",
    "hotset probe",
    (Memory("node0", "ddr", 512 * GIB, 1.0, 0), Memory("hbm0", "hbm", 96 * GIB, 1.0, 2)),
    (
        Consumer("cpu0", "cpu", "node0", 72, {"int8": 1234.5e9}, 1.75e-6),
        Consumer("gpu0", "gpu", "hbm0", 132, {}),
    ),
    (
        Path("cpu0", "node0", 411.3e9, 222.2e9, 399.9e9, 123e-9, 37, (401.1e9, 421.7e9), "a source"),
        Path("gpu0", "hbm0", 3871.6e9),
        Path("gpu0", "node0", 376.4e9, 288.8e9),
    ),
    17.3e9,
    "2026-11-30T00:00:00+00:00",
)


def texts(profile: Profile) -> list[str]:
    return [entry.text or "" for entry in ElementTree.fromstring(svg_matrix(profile)).iter(f"{SVG}text")]


def test_every_number_is_in_the_picture() -> None:
    shown = "\n".join(texts(PROFILE))
    for part in (
        "411.3 GB/s", "37 threads, 123 ns", "chunks 399.9", "write 222.2", "3,871.6 GB/s", "376.4 GB/s", "write 288.8",
        "512 GiB ddr, node 0", "96 GiB hbm, node 2", "72 cores", "1.8 us an op", "storage 17.3 GB/s", PROFILE.id,
        "A <fast> machine & more", "2026-11-30T00:00:00+00:00",
    ):  # fmt: skip
        assert part in shown, part
    assert shown.count("not measured") == 1, "of four pairs three were measured"


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_can_be_drawn(name: str) -> None:
    profile = read_preset(name)
    shown = texts(profile)
    for path in profile.paths:
        assert f"{path.read_bytes_per_s / 1e9:,.1f} GB/s" in shown
    assert shown.count("not measured") == len(profile.memories) * len(profile.consumers) - len(profile.paths)


def test_a_cell_is_framed_where_the_memory_is_the_consumers_own() -> None:
    root = ElementTree.fromstring(svg_matrix(PROFILE))
    frames = [(rect.get("x"), rect.get("y")) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "near"]
    assert len(frames) == 2 and len({x for x, _ in frames}) == 2 and len({y for _, y in frames}) == 2


def test_the_fastest_path_is_the_darkest_and_all_text_stands_out() -> None:
    """White on pale blue is what people print and cannot read."""
    shares = [64 ** (step / 100 - 1.2) for step in range(121)]
    light = [contrast("#000000", shade(share)[0]) for share in shares]
    assert light == sorted(light, reverse=True) and light[0] == light[1] > 2 * light[-1]
    assert all(contrast(*shade(share)) >= 4.5 for share in shares)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_text_beside_the_cells_is_readable_in_light_and_dark() -> None:
    style = svg_matrix(PROFILE).partition("<style>")[2].partition("</style>")[0]
    light, _, dark = style.partition("@media")
    for part, ground in ((light, "#ffffff"), (dark, "#161616")):
        inks = [re.search(rf"{name} {{[^}}]*fill: (#\w+)", part) for name in ("text", r"\.soft")]
        assert f".ground {{ fill: {ground} }}" in part
        assert all(ink is not None and contrast(ink[1], ground) >= 4.5 for ink in inks)


def test_the_page_has_the_picture_and_all_numbers_and_needs_nothing_else() -> None:
    page = html_page(PROFILE)
    assert svg_matrix(PROFILE) in page
    cells: list[str] = []
    parser = HTMLParser()
    parser.handle_data = cells.append  # type: ignore[method-assign]
    parser.feed(page)
    for part in ("401.1", "421.7", "37", "399.9", "222.2", "123", "a source", "int8", "1,234.5"):
        assert part in cells
    assert "<script" not in page and "src=" not in page and page.count("http") == 1, "the namespace of SVG alone"


def test_a_profile_without_a_time_is_a_published_one() -> None:
    published = replace(PROFILE, measured="", storage_bytes_per_s=None)
    assert f"profile {published.id}, published: hotset probe" in texts(published)
