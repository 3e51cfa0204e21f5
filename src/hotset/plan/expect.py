"""What a plan says about speed: decode by context, a prompt's chunk, where the time goes, and what drafts would
cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.machine.profile import Profile
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Plan
from hotset.plan.homes import Homes, default_homes
from hotset.plan.layouts import cpu_layout
from hotset.plan.predict import Prediction, count_ops, model_step, predict_step
from hotset.program.classes import class_bytes
from hotset.units import format_rate

MAX_DRAFTS = 4
"""Draft depths of the table."""


@dataclass(frozen=True)
class DraftDepth:
    """A step that verifies ``num_drafts`` drafted tokens beside the one that is known.

    Attributes:
        ratio: its time over that of a step without drafts, reading included of every expert that its rows choose.
        draft_ratio: the drafting itself, taken as one layer and the head for each token.
        acceptance: the share of drafts that must be accepted, each on its own, for the tokens to come faster than
        without;
            None when not even all of them are enough.
    """

    num_drafts: int
    ratio: float
    draft_ratio: float
    acceptance: float | None


@dataclass(frozen=True)
class Expectation:
    """Expected speeds on one machine. ``decode`` is one sequence by context; the table of classes is of ``context``."""

    profile: Profile
    homes: Homes
    decode: Mapping[int, Prediction]
    context: int
    prefill_chunk: int
    prefill: Prediction
    drafts: tuple[DraftDepth, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.profile.name,
            "profile": self.profile.id,
            "measured": self.profile.measured,
            "homes": self.homes.name,
            "decode": {str(context): entry.to_json() for context, entry in self.decode.items()},
            "prefill": self.prefill.to_json(),
            "drafts": [vars(entry) for entry in self.drafts],
        }


def expect(
    spec: ModelSpec,
    formats: Mapping[str, str],
    profile: Profile,
    contexts: Sequence[int],
    prefill_chunk: int,
    homes: Homes | None = None,
    threads: Mapping[str, int] | None = None,
) -> Expectation:
    """Expected speeds of ``spec`` on ``profile``, its weights in ``homes`` or where :func:`default_homes` puts them.

    ``threads`` are the sizes of CPUs' teams, as in :func:`hotset.plan.predict.predict_step`.

    Raises:
        MachineError: a path that nobody measured, or no room.
    """
    homes = homes or default_homes(profile, class_bytes(spec.program, formats))
    num_ops = count_ops(spec, formats)

    def predict(context: int, num_tokens: int = 1, num_outputs: int | None = None) -> Prediction:
        step = model_step(spec, formats, num_ops, context=context, num_tokens=num_tokens, num_outputs=num_outputs)
        return predict_step(step, profile, homes, threads)

    decode = {context: predict(context) for context in contexts}
    middle = sorted(contexts)[len(contexts) // 2]
    drafts = draft_depths(
        [decode[middle], *(predict(middle, 1 + n) for n in range(1, MAX_DRAFTS + 1))], spec.num_layers
    )
    return Expectation(profile, homes, decode, middle, prefill_chunk, predict(0, prefill_chunk, 1), drafts)


def expect_run(
    spec: ModelSpec, formats: Mapping[str, str], profile: Profile, plan: Plan
) -> tuple[Expectation | None, str]:
    """Expected speeds of a plan with teams on nodes of the machine that ``profile`` is of, or why there are none."""
    threads: dict[str, int] = {}
    for node in plan.nodes:
        cpu, count = profile.cpu_of(node.node_id), node.num_threads
        if cpu is None:
            return None, f"expected speed: the profile knows no CPUs of node {node.node_id}: `hotset probe`"
        is_known = count == cpu.num_cores or profile.path(cpu.name, cpu.near).read_by(count) is not None
        if count > cpu.num_cores or not is_known:
            found = f"the profile is of {cpu.num_cores} threads of node {node.node_id}, the plan of {count}"
            return None, f"expected speed: {found}: `hotset probe --threads {count}`"
        threads[cpu.name] = count
    homes = cpu_layout([profile.consumer(name) for name in threads]).decode
    return expect(spec, formats, profile, sorted(plan.decode_bytes), plan.prefill_chunk, homes, threads), ""


def draft_depths(steps: Sequence[Prediction], num_layers: int) -> tuple[DraftDepth, ...]:
    """Economics of drafting from the predictions of steps of 1, 2, 3, ... rows of one sequence.

    With every draft accepted on its own with probability a, a step of k drafts yields 1 + a + ... + a^k tokens
    (specs/glm_5_2.md section 5); it gains when that is more than what the step costs.
    """
    one = steps[0]
    head = one.class_seconds("head")
    draft = ((one.seconds - head) / num_layers + head) / one.seconds
    return tuple(
        DraftDepth(k, step.seconds / one.seconds, k * draft, _acceptance(k, step.seconds / one.seconds + k * draft))
        for k, step in enumerate(steps[1:], 1)
    )


def tokens_per_step(num_drafts: int, acceptance: float) -> float:
    """Tokens that a step of ``num_drafts`` drafts yields on average."""
    return sum(acceptance**i for i in range(num_drafts + 1))


def _acceptance(num_drafts: int, cost: float) -> float | None:
    if cost >= num_drafts + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if tokens_per_step(num_drafts, middle) > cost else (middle, high)
    return high


def explain_expectation(expectation: Expectation) -> list[str]:
    """Lines that print it."""
    profile = expectation.profile
    known = f"measured {profile.measured}" if profile.measured else "published figures"
    lines = [f"expected on {profile.name} ({profile.about}; profile {profile.id}, {known}), {expectation.homes.name}:"]
    for context, entry in expectation.decode.items():
        lines.append(
            f"  decode at {context:,}: {entry.tokens_per_s:,.1f} tok/s, {entry.num_bytes / 1e6:,.1f} MB read at "
            f"{format_rate(entry.num_bytes / entry.seconds)}"
        )
    has_rates = any(profile.consumer(name).rates for name in expectation.homes.consumers)
    chunk = f"  prompt of {expectation.prefill_chunk:,} tokens in one chunk: "
    rate = f"{expectation.prefill.tokens_per_s:,.0f} tok/s" if has_rates else "no arithmetic rate is known"
    lines.append(chunk + rate)
    lines.append(f"where the time of a decode step goes, at {expectation.context:,}:")
    lines += _class_table(expectation.decode[expectation.context])
    if has_rates:
        lines.append("and of the prompt's chunk:")
        lines += _class_table(expectation.prefill)
    unknown = expectation.decode[expectation.context].unknown
    if unknown:
        lines.append(f"counted as nothing, since nobody published it: {'; '.join(unknown)}")
    return [
        *lines,
        "a step that verifies drafts, each of them one layer and the head:",
        *_draft_table(expectation.drafts),
    ]


def _class_table(entry: Prediction) -> list[str]:
    rows = [("", "MB", "Gop", "ms", "", "bound by")]
    for part in sorted(entry.classes, key=lambda part: -part.seconds):
        if part.seconds:
            share = f"{part.seconds / entry.seconds:.0%}"
            numbers = (f"{part.num_bytes / 1e6:,.1f}", f"{part.num_ops / 1e9:,.2f}", f"{part.seconds * 1e3:,.3f}")
            rows.append((part.name, *numbers, share, part.bound))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    return [
        "  " + "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 5)), row[5]])
        for row in rows
    ]


def _draft_table(drafts: Sequence[DraftDepth]) -> list[str]:
    lines = []
    for depth in drafts:
        needed = "never gains" if depth.acceptance is None else f"gains above {depth.acceptance:.0%} accepted"
        noun = "draft " if depth.num_drafts == 1 else "drafts"
        lines.append(
            f"  {depth.num_drafts} {noun}  {depth.ratio:.2f} + {depth.draft_ratio:.2f} of a plain step: {needed}"
        )
    return lines
