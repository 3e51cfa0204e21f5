"""``hotset list``: the models that were fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hotset.units import format_bytes

if TYPE_CHECKING:
    from hotset.checkpoint.store import Record


@click.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def command(as_json: bool) -> None:
    """List the models that `hotset pull` has fetched: name, format, size, and where they are."""
    from hotset.checkpoint.store import stored_models
    from hotset.config import load_settings

    models_dir = load_settings().models_dir
    models = [(folder, record, record.first_missing(folder) is None) for folder, record in stored_models(models_dir)]
    if as_json:
        click.echo(json.dumps([_entry(*model) for model in models], indent=2))
        return
    if not models:
        click.echo(f"no models in {models_dir}; try: hotset pull smollm2-135m", err=True)
        return
    rows = [("NAME", "FORMAT", "SIZE", "PATH")]
    for folder, record, is_complete in models:
        size = format_bytes(record.total_bytes) if is_complete else "incomplete"
        rows.append((record.name, record.format, size, str(folder)))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, label, size, path in rows:
        click.echo(f"{name:<{widths[0]}}  {label:<{widths[1]}}  {size:>{widths[2]}}  {path}")


def _entry(folder: Path, record: Record, is_complete: bool) -> dict[str, Any]:
    return {
        "name": record.name,
        "format": record.format,
        "bytes": record.total_bytes,
        "path": str(folder),
        "models": list(record.models),
        "revision": record.revision,
        "commit": record.commit,
        "is_complete": is_complete,
    }
