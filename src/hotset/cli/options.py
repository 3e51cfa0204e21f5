"""Values of options that several verbs take."""

from __future__ import annotations

import re

import click

from hotset.units import GIB, KIB, MIB


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Callback that parses ``80GiB``."""
    if value is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(GiB|MiB|KiB|B)", value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"{value!r} is not a size such as 80GiB (GiB, MiB, KiB or B)", ctx, param)
    return int(float(match[1]) * {"GiB": GIB, "MiB": MIB, "KiB": KIB, "B": 1}[match[2]])
