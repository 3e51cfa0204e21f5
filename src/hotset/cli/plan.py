"""``hotset plan``: the bytes of a run, before it."""

from __future__ import annotations

import json
from typing import Literal

import click


@click.command(name="plan")
@click.argument("model")
@click.option(
    "--context",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens of one sequence, prompt and answer [default: the model's, at most 8192].",
)
@click.option("--sequences", type=click.IntRange(min=1), metavar="N", help="Sequences at the same time [default: 1].")
@click.option(
    "--prefill-chunk",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prompt tokens of one step [default: from a budget].",
)
@click.option(
    "--cache-format",
    type=click.Choice(["BF16", "F16"]),
    help="Format of the cache rows [default: BF16, or F16 where all weights are F32 or F16].",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads [default: one a core].")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    model: str,
    context: int | None,
    sequences: int | None,
    prefill_chunk: int | None,
    cache_format: Literal["BF16", "F16"] | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Show the memory that MODEL needs, held against what this process may use.

    Only headers are read, so this takes less than a second, and the plan is what `hotset run` and `hotset.load`
    allocate. A plan that does not fit is printed as well; the error after it (exit code 3) names the largest term and a
    setting that fits.
    """
    from hotset.api import describe_model, plan_model
    from hotset.machine.topology import pick_cpus, read_topology
    from hotset.plan.budget import Wish, require_fit
    from hotset.plan.explain import explain

    if threads is not None:
        pick_cpus(read_topology(), threads)  # refuses more than there are
    described = describe_model(model, cache_format)
    with described.checkpoint:
        plan = plan_model(described, Wish(context, sequences, prefill_chunk, threads))
    click.echo(json.dumps(plan.to_json(), indent=2) if as_json else "\n".join(explain(plan)))
    require_fit(plan)
