"""``hotset check``: holds a model's files against what the model needs, and reads no weight unless asked to."""

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
@click.option("--weights", "reads_weights", is_flag=True, help="Read all scales and expert ids as well and check them.")
@click.option("--json", "as_json", is_flag=True, help="Print the account as JSON, with every tensor.")
def command(model: str, reads_weights: bool, as_json: bool) -> None:
    """Hold the files of MODEL against what the model needs.

    MODEL is a .gguf or .safetensors file, a folder, a name that `hotset list` shows, or ORG/REPO after
    `hotset pull ORG/REPO`.

    Every tensor in the files is accounted for: loaded, optional and absent, or ignored for a stated reason. A tensor
    that is missing, unexpected, or of another shape or format is an error that names it (exit code 3). Only headers
    are read, so this takes a second or two for any size of model.
    """
    from hotset.checkpoint import account, open_checkpoint
    from hotset.checkpoint.resolve import resolve_model
    from hotset.checkpoint.scaled import check_values
    from hotset.models.registry import describe

    with open_checkpoint(resolve_model(model)) as checkpoint:
        spec = describe(checkpoint)
        result = account(checkpoint, spec.tensors)
        report = _report(model, checkpoint, spec, result)
        if reads_weights:
            report["checked"] = check_values(checkpoint, result)
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(_text(report))


def _report(model: str, checkpoint: Checkpoint, spec: ModelSpec, result: Account) -> dict[str, Any]:
    # Tied weights are loaded under several keys and lie in the file once.
    loaded = list({info.name: info for info in result.loaded.values()}.values())
    # Scales and other companions belong to the format of their weight.
    scaled = [decl for decl in result.declared.values() if decl.stored_as]
    parts = ((decl, key) for decl in scaled for key in (decl.key, decl.scale, f"{decl.key}.zero", f"{decl.key}.shape"))
    named = {result.loaded[key].name: decl.stored_as for decl, key in parts if key in result.loaded}
    return {
        "model": model,
        "path": str(checkpoint.path),
        "kind": checkpoint.kind,
        "family": spec.family,
        "name": spec.name,
        "files": [str(path) for path in checkpoint.files],
        "bytes": checkpoint.total_bytes,
        "loaded": {
            "tensors": len(loaded),
            "bytes": sum(i.nbytes for i in loaded),
            "formats": _by_format(loaded, named),
        },
        "absent": [{"name": decl.name, "key": decl.key, "reason": decl.reason} for decl in result.absent],
        "ignored": [
            {"name": info.name, "bytes": info.nbytes, "format": info.format.name, "reason": reason}
            for info, reason in result.ignored
        ],
        "notes": list(checkpoint.notes),
    }


def _by_format(infos: list[TensorInfo], named: dict[str, str]) -> dict[str, dict[str, int]]:
    """Return the number of tensors and bytes of every format, largest first. ``named`` goes before the file's name."""
    formats: dict[str, dict[str, int]] = {}
    for info in infos:
        entry = formats.setdefault(named.get(info.name, info.format.name), {"tensors": 0, "bytes": 0})
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
        *([f"checked    {report['checked']:>7} tensors of scales and ids"] if "checked" in report else []),
        "every tensor is accounted for",
    ]
    return "\n".join(lines)


def _line(title: str, entry: dict[str, Any]) -> str:
    return f"{title:<10} {entry['tensors']:>7} tensors {format_bytes(entry['bytes']):>12}"


def _reasons(entries: list[dict[str, Any]]) -> list[str]:
    """One line for every tensor, or for all with one reason when there are many."""
    if len(entries) <= _MAX_LINES:
        return [f"  {entry['name']}: {entry['reason']}" for entry in entries]
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        by_reason.setdefault(entry["reason"], []).append(entry["name"])
    lines = [f"  {len(names)}, {names[0]} to {names[-1]}: {reason}" for reason, names in by_reason.items()]
    more = [f"  and {len(lines) - _MAX_LINES} more reasons"] if len(lines) > _MAX_LINES else []
    return [*lines[:_MAX_LINES], *more, "  (--json shows all)"]
