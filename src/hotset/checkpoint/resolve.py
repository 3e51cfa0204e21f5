"""From what a user types to files on this machine."""

from __future__ import annotations

import difflib
from pathlib import Path

from hotset.checkpoint.package import PACKAGED
from hotset.checkpoint.store import Record, is_safe_relative, parse_hub_name, read_record, stored_models
from hotset.config import Settings, load_settings
from hotset.errors import CheckpointError, RequestError

_FILE_ENDINGS = (".gguf", ".safetensors", ".json", ".bin")


def resolve_model(name: str, settings: Settings | None = None) -> Path:
    """Return the file or folder to open for a path, a fetched name, or ``ORG/REPO[@REVISION]`` that was fetched.

    ``ORG/REPO/FILE.gguf`` picks one of several GGUF models of a repository. Nothing is fetched: RequestError with the
    command that would, when the model is not on this machine.
    """
    if not name:
        raise RequestError("the model's name is empty", "try smollm2-135m")
    path = Path(name).expanduser()
    if path.exists() or path.is_symlink():
        return path
    if name.startswith((".", "/", "~")) or "\\" in name:
        raise RequestError(f"no such file or folder: {name}")
    models_dir = (settings or load_settings()).models_dir
    if "/" not in name:
        return _resolve_plain(name, models_dir)
    return _resolve_hub(name, models_dir)


def _resolve_plain(name: str, models_dir: Path) -> Path:
    if name in PACKAGED:
        record = read_record(models_dir / name)
        if record is None:
            raise RequestError(f"{name} is not on this machine yet", f"hotset pull {name}")
        return _path(name, models_dir / name, record, None)
    if name.endswith(_FILE_ENDINGS):
        raise RequestError(f"no such file: {name}")
    known = [*PACKAGED, *(record.name for _, record in stored_models(models_dir))]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "give a path, ORG/REPO, or a name that 'hotset list' shows"
    raise RequestError(f"no model and no file is named {name}", hint)


def _resolve_hub(name: str, models_dir: Path) -> Path:
    parts = name.split("/")
    file = None
    if len(parts) > 2 and name.endswith(".gguf") and "@" not in name:
        name, file = "/".join(parts[:2]), "/".join(parts[2:])
        if not is_safe_relative(file):
            raise RequestError(f"no such file: {name}/{file}")
    hub = parse_hub_name(name)
    folder = models_dir / hub.repo
    record = read_record(folder)
    option = f" --file {file}" if file else ""
    if record is None:
        raise RequestError(f"{name} is neither a file nor a fetched model", f"hotset pull {name}{option}")
    if hub.revision is not None and hub.revision not in (record.revision, record.commit):
        raise RequestError(
            f"{hub.repo} is here at {record.revision} ({record.commit[:12]}), not at {hub.revision}",
            f"hotset pull {name}",
        )
    if file is not None and file not in record.models:
        raise RequestError(f"{file} of {hub.repo} is not on this machine", f"hotset pull {name}{option}")
    return _path(hub.repo, folder, record, file)


def _path(name: str, folder: Path, record: Record, file: str | None) -> Path:
    missing = record.first_missing(folder)
    if missing is not None:
        raise CheckpointError(
            f"{name}: {folder / missing} is missing or was changed since it was fetched", f"hotset pull {name} --force"
        )
    if file is None and len(record.models) > 1:
        raise RequestError(
            f"{name} holds {len(record.models)} models: {', '.join(record.models)}",
            f"give one: {name}/{record.models[0]}",
        )
    model = file or record.models[0]
    return folder if model == "." else folder / model
