"""``hotset plan``: the bytes of a run, before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotset.cli.options import size
from hotset.cli.placement import nodes_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotset.models.spec import ModelSpec
    from hotset.plan.budget import Wish
    from hotset.plan.devices import WeightBytes


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
    metavar="NAME",
    help="Format of the cache rows: BF16, F16 (Llama); FP8, BF16, FP4, with +FP8 for the indexer's too, or BF16-exact "
    "(DeepSeek-V4) [default: suits the weights].",
)
@click.option(
    "--snapshots",
    type=click.IntRange(min=0),
    metavar="N",
    help="Frontiers kept for prefix reuse, for models that have one [default: 8, and 8 a sequence].",
)
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Threads [default: one a core].")
@click.option(
    "--machine",
    metavar="NAME",
    help="Plan for this machine instead of the one here: dual-gh200, gh200, dgx-spark, strix-halo, epyc-9004-2s, "
    "xeon-6430-2s, `this`, or the .json file of a profile.",
)
@nodes_option
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="CLASS=MEMORY",
    help="With --machine: all weights of a class (dense, experts, sparse) in one memory, as experts=node1; may be "
    "given several times.",
)
@click.option(
    "--max-hbm", callback=size, metavar="SIZE", help="With --machine: most memory to use of each GPU, such as 80GiB."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(
    model: str,
    context: int | None,
    sequences: int | None,
    prefill_chunk: int | None,
    cache_format: str | None,
    snapshots: int | None,
    threads: int | None,
    machine: str | None,
    nodes: tuple[int, ...] | None,
    pins: tuple[str, ...],
    max_hbm: int | None,
    as_json: bool,
) -> None:
    """Show the memory that MODEL needs, held against what this process may use.

    Only headers are read, so this takes seconds for a model of any size, and the plan is what `hotset run` and
    `hotset.load` allocate. MODEL may also be one that is not here: deepseek-v4-flash, deepseek-v4-pro, and glm-5.2,
    which is planned and not run yet. A plan that does not fit is printed as well; the error after it (exit code 3)
    names the largest term and a setting that fits.

    Once `hotset probe` has measured this machine, a table of layouts follows, with bytes and expected speed, the best
    first; nodes and threads are chosen by it.

    With --machine the plan is for another machine: weights, the cache in every form, the workspace of every chunk, what
    the paged layout of other engines would take, and the same table. --nodes, --pin and --max-hbm fix parts of it; what
    cannot be had with them is refused.

    Expected speeds follow from bytes and arithmetic over the machine's measured paths and rates, of other machines as
    published. They say what the time goes to, and what drafts would cost.
    """
    from hotset.checkpoint.checkpoint import collector_paused
    from hotset.plan.budget import Wish
    from hotset.program.pending import pending

    wish = Wish(
        context, sequences, prefill_chunk, threads, snapshots=snapshots, nodes=nodes, pins=pins, max_hbm=max_hbm
    )
    if machine is not None and threads is not None:
        raise click.BadParameter("is for this machine, not for another", param_hint="'--threads'")
    for option, value in (("--pin", pins), ("--max-hbm", max_hbm)):
        if machine is None and value:
            raise click.BadParameter("is for another machine, see --machine", param_hint=f"'{option}'")
    with collector_paused():
        spec, formats, weights = _described(model, cache_format)
        missing = pending(spec.program, formats)
        if missing:
            what = f"{spec.name} is planned here, and runs in a later release; missing: {', '.join(missing)}"
            click.echo(f"note: {what}", err=True)
        if machine is None:
            _plan_here(spec, formats, wish, as_json)
        else:
            _plan_devices(spec, formats, weights, machine, wish, as_json)


def _described(model: str, cache_format: str | None) -> tuple[ModelSpec, Mapping[str, str], WeightBytes]:
    """A model by its files, or by its card when there are none of that name."""
    from hotset.api import describe_model
    from hotset.checkpoint.manifest import declared_formats
    from hotset.models.spec import with_cache_format
    from hotset.plan.cards import describe_config, is_card, read_card
    from hotset.plan.devices import WeightBytes, declared_bytes

    if is_card(model) and not Path(model).exists():
        spec = describe_config(model, read_card(model).config)
        formats = declared_formats(spec.tensors)
        return with_cache_format(spec, formats, cache_format), formats, declared_bytes(spec.tensors)
    described = describe_model(model, cache_format)
    with described.checkpoint:
        loaded = {info.name: info for info in described.account.loaded.values()}
        spare = described.account.ignored
        weights = WeightBytes(
            len(loaded), sum(info.nbytes for info in loaded.values()),
            len(spare), sum(info.nbytes for info, _ in spare), spare[0][1] if spare else "",
        )  # fmt: skip
        return described.spec, described.formats, weights


def _plan_here(spec: ModelSpec, formats: Mapping[str, str], wish: Wish, as_json: bool) -> None:
    from hotset.api import plan_here
    from hotset.machine.measured import read_measured
    from hotset.plan.budget import require_fit
    from hotset.plan.expect import expect_run
    from hotset.plan.explain import explain
    from hotset.plan.nodes import require_nodes_fit

    plan, placement = plan_here(spec, formats, wish)
    profile = read_measured()
    if profile is None:
        expectation, last = None, "layouts and expected speed: not known, `hotset probe` measures what they take"
    else:
        expectation, last = expect_run(spec, formats, profile, plan)
    if as_json:
        content = plan.to_json() | {
            "placement": placement.to_json() if placement else None,
            "expected": expectation.to_json() if expectation else None,
        }
        click.echo(json.dumps(content, indent=2))
    else:
        click.echo("\n".join([*explain(plan, profile, placement, expectation), *([last] if last else [])]))
    require_fit(plan)
    require_nodes_fit(plan.nodes)


def _plan_devices(
    spec: ModelSpec, formats: Mapping[str, str], weights: WeightBytes, machine: str, wish: Wish, as_json: bool
) -> None:
    from hotset.machine.measured import find_profile
    from hotset.plan.devices import explain_devices, plan_devices
    from hotset.plan.placement import require_winner

    plan = plan_devices(spec, formats, weights, find_profile(machine), wish)
    click.echo(json.dumps(plan.to_json(), indent=2) if as_json else "\n".join(explain_devices(plan)))
    require_winner(plan.placement)
