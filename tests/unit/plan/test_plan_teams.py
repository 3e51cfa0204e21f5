"""How many threads take part: predicted for decoding and for prompts, chosen by a request of both, and said."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hotset.checkpoint.manifest import declared_formats
from hotset.machine.presets import read_preset
from hotset.machine.profile import Path, Profile
from hotset.plan.budget import NodeBytes, Plan, Wish, make_plan
from hotset.plan.cards import describe_config, read_card
from hotset.plan.devices import declared_bytes, plan_devices
from hotset.plan.expect import expect_run
from hotset.plan.placement import Placement, explain_placement, place
from hotset.plan.teams import WORTHWHILE, Team, explain_teams, order_teams, team_sizes

CORES, FEW = 72, 32


@cache
def model():
    spec = describe_config("deepseek-v4-flash", read_card("deepseek-v4-flash").config)
    return spec, declared_formats(spec.tensors)


def graces(rate: float | None = None) -> Profile:
    """Two Grace CPUs whose cores together compute ``rate`` operations per second; None where nobody published it."""
    machine = read_preset("dual-gh200").with_consumers(("cpu0", "cpu1"))
    rates = {} if rate is None else dict.fromkeys(("int8", "bf16", "f32"), rate)
    return replace(machine, consumers=tuple(replace(c, rates=rates, step_s=1e-6) for c in machine.consumers))


def rows(profile: Profile, wish: Wish = Wish()) -> tuple[tuple[Team, ...], Placement]:  # noqa: B008
    """Teams of the layout over both nodes."""
    placement = place(*model(), profile, wish, 8192, 512)
    return next(c.teams for c in placement.candidates if c.layout.name.startswith("rows over")), placement


def plan_of(*sizes: int) -> Plan:
    """A plan with so many threads on node 0, 1, ..."""
    plan = make_plan(*model(), Wish(context=4096), sum(sizes), 1 << 50, "a test")
    return replace(plan, nodes=tuple(NodeBytes(node, size, {}, 1 << 50) for node, size in enumerate(sizes)))


def test_both_sizes_are_predicted() -> None:
    """Fewer threads decode faster by what they read more, 348 against 330 (and 328) GB/s, and compute less."""
    (used, other), _ = rows(graces(20e12))
    assert (used.threads, other.threads) == ({"cpu0": 72, "cpu1": 72}, {"cpu0": 32, "cpu1": 32})

    reading = [team.decode.class_seconds("linear") for team in (used, other)]
    assert reading[0] / reading[1] == pytest.approx(348 / 328, rel=1e-3)
    products = [team.prefill.class_seconds("linear") for team in (used, other)]
    assert products[1] / products[0] == pytest.approx(CORES / FEW, rel=1e-3)


@pytest.mark.parametrize("rate", [1e12, 20e12, 100e12, 1e15, 20e15])
def test_all_cores_unless_a_request_takes_longer(rate: float) -> None:
    """The rule: a request of 2,048 tokens in and 512 out, and 3 % that medians differ by."""
    (used, other), _ = rows(graces(rate))
    everyone, few = (used, other) if used.each == CORES else (other, used)
    assert (used is few) == (everyone.request_s > WORTHWHILE * few.request_s)
    assert used.each == (FEW if rate > 100e12 else CORES)


def test_the_choice_is_said_with_both_figures() -> None:
    """Asked, used, because: for all cores, for fewer, and where nobody knows the arithmetic."""
    texts = {rate: "\n".join(explain_placement(rows(graces(rate))[1])) for rate in (20e12, 20e15, None)}
    assert "threads: 72 a node, one a core, though 32 saturate its memory: a request of 2,048 tokens in" in texts[20e12]
    assert (
        "threads: 72 a node, one a core -> 32, because a request of 2,048 tokens in and 512 out takes" in texts[20e15]
    )
    assert "prompts are bound by arithmetic, of which no rate is known (decode " in texts[None]
    (used, other), _ = rows(graces(20e12))
    (line,) = explain_teams((used, other))
    for team in (used, other):
        assert f"{team.decode.tokens_per_s:,.1f}" in line and f"{team.prefill.tokens_per_s:,.0f}" in line
        assert f"{team.request_s:,.1f} s" in line
    assert explain_teams((used,)) == []


def test_without_arithmetic_rates_all_cores_take_part() -> None:
    """Arithmetic that counts as nothing would let the smaller team win on every published machine."""
    teams, placement = rows(graces())
    assert [team.each for team in teams] == [CORES, FEW] and teams[0].request_s > WORTHWHILE * teams[1].request_s
    assert all(c.teams[0].each == CORES for c in placement.candidates if c.teams)


def test_a_number_of_threads_leaves_no_choice() -> None:
    """--threads N wins: the profile is one of such teams then."""
    teams, placement = rows(graces(20e15).with_teams({"cpu0": 48, "cpu1": 48}), Wish(threads=96))
    assert [team.each for team in teams] == [48]
    assert "fixed by you: 96 threads (--threads)" in "\n".join(explain_placement(placement))


def test_sizes_are_the_same_on_every_node() -> None:
    """Rows are split evenly, so the smaller node decides; a team that saturates the slower one serves both."""
    machine = graces()
    uneven = replace(machine, consumers=(replace(machine.consumers[0], num_cores=40), machine.consumers[1]))
    assert [dict(size) for size in team_sizes(uneven, ("cpu0", "cpu1"))] == [
        {"cpu0": 40, "cpu1": 40}, {"cpu0": 32, "cpu1": 32},
    ]  # fmt: skip
    assert team_sizes(read_preset("xeon-6430-2s"), ("cpu0",)) == [{"cpu0": 32}]
    assert team_sizes(machine, ()) == [{}]
    teams = rows(graces(20e15))[0]
    assert order_teams(teams[:1], are_rates_known=True) == teams[:1]


def test_gpus_alone_have_no_teams() -> None:
    placement = place(*model(), read_preset("dual-gh200"), Wish(), 8192, 2048)
    assert placement.winner is not None and [dict(team.threads) for team in placement.winner.teams] == [{}]


def test_another_machine_is_expected_with_the_chosen_teams() -> None:
    """The table and the speeds below it disagreed."""
    spec, formats = model()
    for rate in (20e12, 20e15):
        plan = plan_devices(spec, formats, declared_bytes(spec.tensors), graces(rate), Wish(context=4096))
        assert plan.expected is not None and plan.placement.winner is not None
        assert plan.expected.decode[4096].seconds == pytest.approx(plan.placement.winner.decode.seconds)


@pytest.mark.parametrize(("sizes", "seconds_of"), [((72, 72), 72), ((32, 32), 32), ((30, 30), 30)])
def test_a_plan_on_two_nodes_is_expected_by_its_teams(sizes: tuple[int, ...], seconds_of: int) -> None:
    """Bug class: threads of both nodes together were compared with the cores of both, or with what saturates both, and
    any other team had no expected speed."""
    profile = graces(20e12)
    plan = plan_of(*sizes)
    expectation, reason = expect_run(*model(), profile, plan)
    assert expectation is not None and reason == ""
    assert expectation.homes.name == "rows over node0, node1" and expectation.profile.id == profile.id
    (team,), _ = rows(profile.with_teams({"cpu0": seconds_of, "cpu1": seconds_of}), Wish(threads=2 * seconds_of))
    assert expectation.decode[4096].seconds == pytest.approx(team.decode.seconds)


def test_one_node_of_two_is_expected_alone() -> None:
    plan = replace(plan_of(72), nodes=(NodeBytes(1, 72, {}, 1 << 50),))
    expectation, _ = expect_run(*model(), graces(20e12), plan)
    assert expectation is not None and expectation.homes.name == "all in node1"


def test_teams_that_nobody_measured_have_no_expected_speed() -> None:
    """The command that would measure them takes threads of one node."""
    profile = graces(20e12)
    more = expect_run(*model(), profile, plan_of(80, 80))
    assert more == (
        None,
        "expected speed: the profile is of 72 threads of node 0, the plan of 80: `hotset probe --threads 80`",
    )
    plain = tuple(Path(path.consumer, path.memory, path.read_bytes_per_s) for path in profile.paths)
    unknown = replace(profile, paths=plain)
    assert "the plan of 40: `hotset probe --threads 40`" in expect_run(*model(), unknown, plan_of(40, 40))[1]
    assert expect_run(*model(), unknown, plan_of(72, 72))[0] is not None
    assert "the profile knows no CPUs of node 2" in expect_run(*model(), profile, plan_of(72, 72, 72))[1]


def test_predictions_name_the_profile_that_was_measured() -> None:
    """A machine with smaller teams has another id; a record would never match its profile."""
    profile = graces(20e12)
    team = rows(profile)[0][1]
    assert team.decode.profile_id == team.prefill.profile_id == profile.id
