"""The options that say where a run lies; shared by verbs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])


def _nodes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Parse ``0``, ``0,1`` or ``0-3``."""
    from hotset.machine.files import parse_cpu_list

    if value is None:
        return None
    if not re.fullmatch(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*", value) or not parse_cpu_list(value):
        raise click.BadParameter(f"{value!r} is not a list of nodes such as 0,1", ctx, param)
    return parse_cpu_list(value)


def nodes_option(command: Command) -> Command:
    """``--nodes``, as a tuple of node ids or None."""
    return click.option(
        "--nodes",
        callback=_nodes,
        metavar="N,...",
        help="NUMA nodes that hold the model and compute it, an equal share each [default: all with CPUs and memory].",
    )(command)


def numa_option(command: Command) -> Command:
    """``--numa``, a :data:`hotset.machine.teams.NumaMode`."""
    return click.option(
        "--numa",
        type=click.Choice(["bind", "strict", "prefer"]),
        default="bind",
        show_default=True,
        help="Memory that cannot lie on its node: an error, or first touch where binding is forbidden (bind); an error "
        "(strict); a warning (prefer).",
    )(command)
