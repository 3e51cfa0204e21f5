"""The folder of fetched models: names, records of what was fetched, and what is there.

``<models>/NAME`` or ``<models>/ORG/REPO`` holds the files of one model and ``hotset.json``, the record. A folder
appears under its name only when it is complete; until then its files are in ``<models>/.partial``.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hotset.checkpoint.mapped import read_small
from hotset.checkpoint.strict_json import parse_json
from hotset.errors import CheckpointError, RequestError
from hotset.units import MIB

RECORD_NAME = "hotset.json"
PARTIAL_NAME = ".partial"
RECORD_VERSION = 1

_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")


@dataclass(frozen=True)
class HubName:
    """``ORG/REPO`` on a hub, with the revision if one was given."""

    repo: str
    revision: str | None


def parse_hub_name(name: str) -> HubName:
    """Return the parts of ``ORG/REPO[@REVISION]``; RequestError when it is anything else, path tricks included."""
    match = _HUB_ID.fullmatch(name)
    if match is None or ".." in name:
        raise RequestError(
            f"{name!r} is not the name of a model", "names look like smollm2-135m or ORG/REPO[@REVISION]"
        )
    return HubName(match["repo"], match["revision"])


def is_safe_relative(path: str) -> bool:
    """Whether a path from a hub stays within the model's folder and can be printed."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and all(part not in ("", ".", "..") for part in parts)


@dataclass(frozen=True)
class StoredFile:
    """One file of a fetched model; ``path`` relative to its folder, with forward slashes."""

    path: str
    size_bytes: int


@dataclass(frozen=True)
class Record:
    """What was fetched: ``source`` in words, ``revision`` as asked for, ``commit`` as found.

    ``models`` are the paths to open, relative to the folder: "." for safetensors, the (first) file of each GGUF model.
    ``format`` is for people, such as "GGUF Q4_1".
    """

    name: str
    source: str
    revision: str
    commit: str
    format: str
    models: tuple[str, ...]
    files: tuple[StoredFile, ...]

    @property
    def total_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def first_missing(self, folder: Path) -> str | None:
        """Return the path of the first file that is not there in its right size, or None."""
        for file in self.files:
            path = folder / file.path
            if not path.is_file() or path.stat().st_size != file.size_bytes:
                return file.path
        return None


def write_record(folder: Path, record: Record) -> None:
    """Write the record into the model's folder."""
    content = {"version": RECORD_VERSION, **asdict(record)}
    (folder / RECORD_NAME).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Record | None:
    """Return the record of a model's folder, None when there is none; CheckpointError when it is damaged."""
    path = folder / RECORD_NAME
    if not path.exists():
        return None
    content = parse_json(read_small(path, 64 * MIB), str(path))
    try:
        return _record(content)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a record of this version of hotset ({error})",
            f"remove the folder {folder} and pull the model again",
        ) from error


def _record(content: dict[str, Any]) -> Record:
    if content["version"] != RECORD_VERSION:
        raise ValueError(f"version {content['version']}, expected {RECORD_VERSION}")
    texts = {key: content[key] for key in ("name", "source", "revision", "commit", "format")}
    files = tuple(StoredFile(file["path"], file["size_bytes"]) for file in content["files"])
    models = tuple(content["models"])
    paths = [file.path for file in files] + [model for model in models if model != "."]
    if not all(isinstance(value, str) for value in (*texts.values(), *paths)):
        raise TypeError("a text field is not text")
    if not models or not all(is_safe_relative(path) for path in paths):
        raise ValueError("unsafe or missing paths")
    if not all(type(file.size_bytes) is int and file.size_bytes >= 0 for file in files):
        raise TypeError("a size is not a number")
    return Record(**texts, models=models, files=files)


def stored_models(models_dir: Path) -> Iterator[tuple[Path, Record]]:
    """Yield the folder and record of every fetched model, by name."""
    paths = [*models_dir.glob(f"*/{RECORD_NAME}"), *models_dir.glob(f"*/*/{RECORD_NAME}")]
    for path in sorted(paths):
        relative = PurePosixPath(path.parent.relative_to(models_dir))
        record = None if relative.parts[0] == PARTIAL_NAME else read_record(path.parent)
        if record is not None:
            yield path.parent, record


def put_in_place(staging: Path, folder: Path) -> None:
    """Make a complete staging folder the model's folder, in the place of an older one if there is one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        staging.rename(folder)
        return
    with tempfile.TemporaryDirectory(prefix="old-", dir=staging.parent) as old:
        folder.rename(Path(old) / "folder")
        staging.rename(folder)


def check_free_space(models_dir: Path, needed_bytes: int) -> None:
    """Raise MachineError before a download that the disk cannot hold."""
    from hotset.errors import MachineError
    from hotset.units import format_bytes

    free = shutil.disk_usage(models_dir).free
    if needed_bytes > free:
        raise MachineError(
            f"{format_bytes(needed_bytes)} to fetch, {format_bytes(free)} free in {models_dir}",
            "set HOTSET_HOME to a folder on a larger disk",
        )
