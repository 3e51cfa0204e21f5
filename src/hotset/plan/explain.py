"""A plan in words: every term, then what a token reads."""

from __future__ import annotations

from hotset.plan.budget import Plan
from hotset.units import format_bytes, format_rate


def explain(plan: Plan, read_bandwidth: float | None = None) -> list[str]:
    """Lines that print the plan. ``read_bandwidth`` (bytes/s, measured) adds the decode ceiling it sets."""
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
        ceiling = ""
        if read_bandwidth:
            ceiling = f": at most {read_bandwidth / num_bytes:,.1f} tok/s at {format_rate(read_bandwidth)}"
        lines.append(f"a token at context {context:,} reads {num_bytes / 1e6:,.1f} MB{ceiling}")
    lines.extend(plan.changes)
    return lines
