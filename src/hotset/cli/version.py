"""``hotset version``: which hotset this is, and which kernels it runs."""

from __future__ import annotations

import json
import platform

import click

import hotset


@click.command(name="version")
@click.option("--json", "as_json", is_flag=True, help="Print the versions as JSON.")
def command(as_json: bool) -> None:
    """Show the versions of hotset and Python, and the instruction set of the kernels.

    The best set that the processor reports is used; the variable HOTSET_ISA names a lower one.
    """
    from hotset.machine.native import available_isas, isa_in_use

    report = {
        "hotset": hotset.__version__,
        "isa": isa_in_use(),
        "available_isas": list(available_isas()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(f"hotset  {report['hotset']}")
    click.echo(f"kernels {report['isa']} (available: {', '.join(available_isas())})")
    click.echo(f"python  {report['python']}")
    click.echo(f"system  {report['system']}")
