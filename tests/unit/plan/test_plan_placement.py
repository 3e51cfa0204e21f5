"""Layouts of a model on a machine: exact bytes, constraints that hold, and the order that was measured."""

from __future__ import annotations

import json
from functools import cache
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotset.checkpoint.manifest import declared_formats
from hotset.errors import MachineError, RequestError
from hotset.machine.presets import preset_names, read_preset
from hotset.plan.budget import Wish
from hotset.plan.cards import describe_config, read_card
from hotset.plan.layouts import busiest_share
from hotset.plan.placement import (
    Candidate,
    Placement,
    explain_placement,
    place,
    require_winner,
    split_exactly,
)
from hotset.program.classes import WEIGHT_CLASSES, class_bytes
from hotset.units import GIB

MODELS = ("glm-5.2", "deepseek-v4-flash", "deepseek-v4-pro")


@cache
def model(name: str):
    spec = describe_config(name, read_card(name).config)
    return spec, declared_formats(spec.tensors)


@cache
def placement(name: str = "glm-5.2", machine: str = "dual-gh200", wish: Wish = Wish()) -> Placement:  # noqa: B008
    return place(*model(name), read_preset(machine), wish, 8192, 2048)


def candidate(of: Placement, name: str) -> Candidate:
    return next(found for found in of.candidates if found.layout.name.startswith(name))


@pytest.mark.parametrize("machine", preset_names())
@pytest.mark.parametrize("name", MODELS)
def test_shares_are_the_weights_to_the_byte(name: str, machine: str) -> None:
    """Of every class, in every layout: a split that loses bytes is a plan that does not hold. Copies are whole."""
    sizes = class_bytes(*(model(name)[0].program, model(name)[1]))
    for found in placement(name, machine).candidates:
        for kind in WEIGHT_CLASSES:
            held = [entry.terms.get(kind, 0) for entry in found.held]
            copies = sum(size > 0 for size in held) if found.layout.name.startswith("copies") else 1
            assert sum(held) == copies * sizes[kind], found.layout.name
            for homes in (found.layout.decode, found.layout.prefill):
                assert sum(share.share for share in homes.of(kind)) == pytest.approx(1.0)


@pytest.mark.parametrize("machine", preset_names())
@pytest.mark.parametrize("name", MODELS)
def test_no_memory_is_planned_beyond_its_bytes(name: str, machine: str) -> None:
    """Every layout that fits, above all those that fill the GPUs to the brim."""
    profile = read_preset(machine)
    for found in placement(name, machine).candidates:
        over = [held for held in found.held if held.total_bytes > profile.memory(held.memory).usable_bytes]
        assert found.fits == (not over and found.decode is not None)


def test_layouts_come_in_the_order_that_was_measured() -> None:
    """specs/reference_systems.md: 20.31 with local experts, less by every byte that crosses, interleaved CPUs last."""
    names = [found.layout.name for found in placement().candidates if found.fits]
    local, rows, crossing, worst = (
        names.index(name)
        for name in (
            "GPUs, experts beside them", "rows over node0, node1", "GPUs, experts interleaved",
            "interleaved over node0, node1",
        )
    )  # fmt: skip
    assert local == 0 and local < rows < worst == len(names) - 1 and local < crossing
    flash = [found.layout.name for found in placement("deepseek-v4-flash").candidates if found.fits]
    assert flash[0] == "rows over hbm0, hbm1"
    assert flash.index("all in node0") < flash.index("interleaved over node0, node1")
    assert require_winner(placement("deepseek-v4-pro")).layout.name == "GPUs, experts beside them"


def test_speeds_are_those_that_were_measured() -> None:
    """20.31 tok/s with 270 GiB a rank outside, 92.9 from HBM, within a quarter."""
    assert candidate(placement(), "GPUs, experts beside").decode.tokens_per_s == pytest.approx(20.31, rel=0.25)
    flash = candidate(placement("deepseek-v4-flash"), "rows over hbm0")
    assert flash.decode.tokens_per_s == pytest.approx(92.9, rel=0.25)


def test_offloaded_experts_fill_the_gpus_first() -> None:
    """What is outside is what has no room inside, and no byte more than a few."""
    found = candidate(placement(), "GPUs, experts beside")
    inside = [held for held in found.held if held.memory.startswith("hbm")]
    assert all(0 <= held.usable_bytes - held.total_bytes < 64 for held in inside)


def test_pins_hold_in_every_layout() -> None:
    """Bug class: one explicit option turns the planner off, or is ignored by some layouts (D038)."""
    found = placement(wish=Wish(pins=("experts=node1",), max_hbm=40 * GIB))
    assert found.winner is None  # 676 GiB of experts are more than one Grace has
    for entry in found.candidates:
        assert {share.memory for share in entry.layout.decode.experts} == {"node1"}
        assert {held.memory for held in entry.held if "experts" in held.terms} == {"node1"}
    with pytest.raises(
        MachineError, match=r"no layout fits dual-gh200 with experts in node1 \(--pin\); at most 40\.00 GiB"
    ):
        require_winner(found)
    smaller = placement("deepseek-v4-flash", wish=Wish(pins=("experts=node1", "dense=hbm0")))
    winner = require_winner(smaller)
    assert {share.memory for share in winner.layout.decode.dense} == {"hbm0"}
    assert {held.memory for held in winner.held if "experts" in held.terms} == {"node1"}
    assert "fixed by you: experts in node1 (--pin)" in "\n".join(explain_placement(smaller))


def test_the_limit_of_gpu_memory_holds() -> None:
    """What is taken away from the GPUs lies beside them."""
    free, limited = placement(), placement(wish=Wish(max_hbm=80 * GIB))
    for entry in limited.candidates:
        for held in entry.held:
            if held.memory.startswith("hbm") and entry.fits:
                assert held.total_bytes <= 80 * GIB
    outside = [sum(terms_of(require_winner(found), "experts", "node0").values()) for found in (free, limited)]
    assert outside[1] - outside[0] == pytest.approx((92.16 - 80) * GIB, rel=0.01)
    assert require_winner(limited).decode.seconds > require_winner(free).decode.seconds


def test_nodes_leave_the_other_module_out() -> None:
    """Neither its CPU nor its GPU takes part, and its memory stays empty."""
    found = placement("deepseek-v4-flash", wish=Wish(nodes=(1,)))
    for entry in found.candidates:
        memories = {held.memory for held in entry.held}
        assert memories <= {"node1", "hbm1"} and set(entry.layout.decode.consumers) <= {"cpu1", "gpu1"}
    assert require_winner(found).layout.name == "GPUs, experts beside them"
    with pytest.raises(MachineError, match="nodes 0 only"):
        require_winner(placement(wish=Wish(nodes=(0,))))
    crossing = placement("deepseek-v4-flash", wish=Wish(nodes=(0,), pins=("experts=node1",)))
    with pytest.raises(MachineError, match="node1 is not among the chosen nodes"):
        require_winner(crossing)


@pytest.mark.parametrize(
    ("machine", "wish", "message"),
    [
        ("dual-gh200", Wish(nodes=(2,)), "has no node 2 with CPUs"),
        ("dgx-spark", Wish(nodes=(7,)), "has no node 7 with CPUs"),
        ("xeon-6430-2s", Wish(max_hbm=GIB), "has no memory of a GPU alone"),
        (
            "dual-gh200",
            Wish(pins=("experts",)),
            "pin is 'experts', expected one of dense, experts, sparse, =, and one of",
        ),
        ("dual-gh200", Wish(pins=("experts=node7",)), "pin is 'experts=node7'"),
        ("dual-gh200", Wish(pins=("all=node1",)), "pin is 'all=node1'"),
        ("dual-gh200", Wish(pins=("dense=hbm0", "dense=hbm1")), "dense are pinned to hbm0 and to hbm1"),
    ],
)
def test_what_a_machine_does_not_have_is_refused(machine: str, wish: Wish, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        placement(machine=machine, wish=wish)
    assert caught.value.hint


def test_the_table_says_what_won_and_why() -> None:
    text = "\n".join(explain_placement(placement()))
    assert "GPUs, experts beside them: 76% of them in node0, node1; each GPU reads them" in text
    assert "it wins by 1.1" in text and "over GPUs, CPUs compute experts" in text
    assert "all in hbm0 (89.7 tok/s): cannot be, hbm0 would hold 696" in text
    content = json.loads(json.dumps(placement().to_json()))
    assert content["winner"] == "GPUs, experts beside them" and content["candidates"][0]["decode"]["tokens_per_s"] > 0
    copies = "\n".join(explain_placement(placement("deepseek-v4-flash", "xeon-6430-2s")))
    assert "rows over node0, node1" in copies


def test_unmeasured_paths_are_no_layout() -> None:
    """A layout over a path that nobody measured is said to be unknown, not to be fast."""
    profile = read_preset("xeon-6430-2s")
    found = place(*model("deepseek-v4-flash"), profile, Wish(), 8192, 2048)
    crossing = candidate(found, "interleaved")
    assert crossing.decode is None and "nobody measured on xeon-6430-2s how fast" in crossing.problem


@given(st.integers(0, 1 << 50), st.lists(st.integers(1, 1000), min_size=1, max_size=9))
def test_splits_are_exact(total: int, weights: list[int]) -> None:
    parts = [weight / sum(weights) for weight in weights]
    sizes = split_exactly(total, parts)
    assert sum(sizes) == total
    assert all(abs(size - total * part) <= 2 + total * 1e-12 for size, part in zip(sizes, parts, strict=True))


def test_the_busiest_node_of_eight_experts() -> None:
    """Two nodes, by the binomial distribution; one has all, many have one each."""
    two = sum(comb(8, k) * max(k, 8 - k) for k in range(9)) / 2**8 / 8
    assert busiest_share(8, 2) == pytest.approx(two) == pytest.approx(0.637, abs=1e-3)
    assert busiest_share(8, 1) == pytest.approx(1.0)
    assert busiest_share(1, 4) == pytest.approx(1.0)
    assert 0.25 < busiest_share(8, 4) < busiest_share(6, 4)


def test_sequences_and_context_cost_room_for_experts() -> None:
    """Every GPU has a copy of the cache, so experts make room for it twice."""
    spec, formats = model("glm-5.2")
    profile = read_preset("dual-gh200")
    one = require_winner(place(spec, formats, profile, Wish(), 8192, 2048))
    many = require_winner(place(spec, formats, profile, Wish(max_sequences=8), 131_072, 2048))
    small, large = (terms_of(found, "cache", "hbm0", "hbm1") for found in (one, many))
    assert large["hbm0"] == 128 * small["hbm0"] and large["hbm0"] == large["hbm1"]
    outside = [sum(terms_of(found, "experts", "node0", "node1").values()) for found in (one, many)]
    assert outside[1] - outside[0] >= 2 * 127 * small["hbm0"]


def terms_of(found: Candidate, name: str, *memories: str) -> dict[str, int]:
    """Bytes of one term by memory."""
    return {held.memory: held.terms.get(name, 0) for held in found.held if held.memory in memories}
