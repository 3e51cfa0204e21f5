"""A plan in words: every term, then what a token reads, and how fast that should be."""

from __future__ import annotations

from hotset.machine.profile import Profile
from hotset.plan.budget import Plan
from hotset.plan.expect import Expectation, explain_expectation
from hotset.plan.nodes import explain_nodes
from hotset.plan.placement import Placement, explain_placement
from hotset.units import format_bytes


def explain(
    plan: Plan,
    profile: Profile | None = None,
    placement: Placement | None = None,
    expectation: Expectation | None = None,
) -> list[str]:
    """Lines that print the plan, and by the machine's profile the layouts that it was among and its expected speeds."""
    width = max(len(term.name) for term in plan.terms)
    lines = [
        f"{plan.model}: context {plan.context:,}, {plan.max_sequences} sequences, prefill chunk {plan.prefill_chunk}, "
        f"{plan.num_threads} threads"
    ]
    for term in plan.terms:
        lines.append(f"  {term.name:<{width}}  {format_bytes(term.num_bytes):>11}  {term.kind:<12}  {term.detail}")
    verdict = "fits" if plan.fits else "does NOT fit"
    lines.append(
        f"  {'total':<{width}}  {format_bytes(plan.total_bytes):>11}  {verdict} in "
        f"{format_bytes(plan.available_bytes)} ({plan.available_source})"
    )
    lines.append(
        f"cache: {plan.cache_bytes_per_token:,.2f} B per token, {plan.block_bytes:,} B per block of 256 tokens"
    )
    for context, num_bytes in plan.decode_bytes.items():
        lines.append(f"a token at context {context:,} reads {num_bytes / 1e6:,.1f} MB")
    lines.extend(explain_nodes(plan.nodes))
    lines.extend(plan.changes)
    if profile is not None:
        lines.append(f"by profile {profile.id} of this machine, measured {profile.measured} by `hotset probe`:")
    if placement is not None:
        lines.extend(explain_placement(placement))
    return lines + (explain_expectation(expectation) if expectation is not None else [])
