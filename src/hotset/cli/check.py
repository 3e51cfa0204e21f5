"""``hotset check``: holds a model's files against what the model needs, without reading a weight."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from hotset.units import format_bytes

if TYPE_CHECKING:
    from hotset.checkpoint import Account, Checkpoint, TensorInfo
    from hotset.models.spec import ModelSpec

# More lines than this of absent or ignored tensors say nothing new; --json has them all.
_MAX_LINES = 20


@click.command(name="check")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print the account as JSON, with every tensor.")
def command(model: str, as_json: bool) -> None:
    """Hold the files of MODEL against what the model needs.

    MODEL is a .gguf or .safetensors file, a folder, a name that `hotset list` shows, or ORG/REPO after
    `hotset pull ORG/REPO`.

    Every tensor in the files is accounted for: loaded, optional and absent, or ignored for a stated reason. A tensor
    that is missing, unexpected, or of another shape or format is an error that names it (exit code 3). Only headers
    are read, so this takes less than a second for any size of model.
    """
    from hotset.checkpoint import account, open_checkpoint
    from hotset.checkpoint.resolve import resolve_model
    from hotset.models.registry import describe

    with open_checkpoint(resolve_model(model)) as checkpoint:
        spec = describe(checkpoint)
        report = _report(model, checkpoint, spec, account(checkpoint, spec.tensors))
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(_text(report))


def _report(model: str, checkpoint: Checkpoint, spec: ModelSpec, result: Account) -> dict[str, Any]:
    # Tied weights are loaded under several keys and lie in the file once.
    loaded = list({info.name: info for info in result.loaded.values()}.values())
    return {
        "model": model,
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "family": spec.family,
        "name": spec.name,
        "files": [str(path) for path in checkpoint.files],
        "bytes": checkpoint.total_bytes,
        "loaded": {"tensors": len(loaded), "bytes": sum(i.nbytes for i in loaded), "formats": _by_format(loaded)},
        "absent": [{"name": decl.name, "key": decl.key, "reason": decl.reason} for decl in result.absent],
        "ignored": [
            {"name": info.name, "bytes": info.nbytes, "format": info.format.name, "reason": reason}
            for info, reason in result.ignored
        ],
        "notes": list(checkpoint.notes),
    }


def _by_format(infos: list[TensorInfo]) -> dict[str, dict[str, int]]:
    """Return the number of tensors and bytes of every format, the largest first."""
    formats: dict[str, dict[str, int]] = {}
    for info in infos:
        entry = formats.setdefault(info.format.name, {"tensors": 0, "bytes": 0})
        entry["tensors"] += 1
        entry["bytes"] += info.nbytes
    return dict(sorted(formats.items(), key=lambda item: -item[1]["bytes"]))


def _text(report: dict[str, Any]) -> str:
    num_files = len(report["files"])
    plural = "s" if num_files > 1 else ""
    lines = [
        f"{report['model']}: {report['name']} ({report['family']})",
        f"  {report['kind']}, {num_files} file{plural}, {format_bytes(report['bytes'])}, {report['path']}",
        "",
        _line("loaded", report["loaded"]),
        *(_line(f"  {name}", entry) for name, entry in report["loaded"]["formats"].items()),
        f"{'absent':<10} {len(report['absent']):>7} optional",
        *_reasons(report["absent"]),
        f"{'ignored':<10} {len(report['ignored']):>7} not needed",
        *_reasons(report["ignored"]),
        *(f"note: {note}" for note in report["notes"]),
        "every tensor is accounted for",
    ]
    return "\n".join(lines)


def _line(title: str, entry: dict[str, Any]) -> str:
    return f"{title:<10} {entry['tensors']:>7} tensors {format_bytes(entry['bytes']):>12}"


def _reasons(entries: list[dict[str, Any]]) -> list[str]:
    lines = [f"  {entry['name']}: {entry['reason']}" for entry in entries[:_MAX_LINES]]
    if len(entries) > _MAX_LINES:
        lines.append(f"  and {len(entries) - _MAX_LINES} more (--json shows all)")
    return lines
