"""Names of models, records of what was fetched, and the way from a name to files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import gguf_bytes

from hotset.checkpoint.package import PACKAGED
from hotset.checkpoint.resolve import resolve_model
from hotset.checkpoint.store import (
    Record,
    StoredFile,
    is_safe_relative,
    put_in_place,
    read_record,
    stored_models,
    write_record,
)
from hotset.config import Settings
from hotset.errors import CheckpointError, HotsetError, RequestError

SIZE = len(gguf_bytes())
RECORD = Record("smollm2-135m", "package x", "1", "c" * 40, "GGUF Q8_0", ("m.gguf",), (StoredFile("m.gguf", SIZE),))


def store(models_dir: Path, record: Record) -> Path:
    folder = models_dir / record.name
    folder.mkdir(parents=True)
    for file in record.files:
        (folder / file.path).write_bytes(gguf_bytes())
    write_record(folder, record)
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home")


def test_record_comes_back_as_it_was_written(settings: Settings) -> None:
    """Guards against a field lost between a pull and the next start."""
    folder = store(settings.models_dir, RECORD)
    assert read_record(folder) == RECORD
    assert RECORD.total_bytes == SIZE
    assert RECORD.first_missing(folder) is None
    assert read_record(settings.models_dir) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"name": 5},
        {"models": []},
        {"models": ["../../etc/passwd"]},
        {"files": [{"path": "/etc/passwd", "size_bytes": 1}]},
        {"files": [{"path": "m.gguf", "size_bytes": -1}]},
        {"files": [{"path": "m.gguf"}]},
        {"files": 3},
    ],
)
def test_damaged_record_is_named(settings: Settings, change: dict[str, object]) -> None:
    """A record that was edited or written by another version must not send hotset to other files."""
    folder = store(settings.models_dir, RECORD)
    content = json.loads((folder / "hotset.json").read_text())
    (folder / "hotset.json").write_text(json.dumps({**content, **change}))
    with pytest.raises(CheckpointError, match=r"hotset\.json is not a record of this version of hotset"):
        read_record(folder)


def test_list_finds_both_kinds_of_names_and_no_unfinished_ones(settings: Settings) -> None:
    """Short names, ORG/REPO, and nothing from the folder for unfinished models."""
    store(settings.models_dir, RECORD)
    store(settings.models_dir, replace(RECORD, name="org/repo"))
    store(settings.models_dir, replace(RECORD, name=".partial/org--repo"))
    assert [record.name for _, record in stored_models(settings.models_dir)] == ["org/repo", "smollm2-135m"]
    assert list(stored_models(settings.home / "nothing")) == []


def test_new_folder_replaces_the_old_one_whole(tmp_path: Path) -> None:
    """Nothing of the old model is left among the files of the new one, and no spare copy stays."""
    folder, staging = tmp_path / "org" / "m", tmp_path / ".partial" / "m"
    for path, name in ((folder, "old"), (staging, "new")):
        path.mkdir(parents=True)
        (path / name).touch()
    put_in_place(staging, folder)
    assert [path.name for path in folder.iterdir()] == ["new"]
    assert list((tmp_path / ".partial").iterdir()) == []


def test_safe_paths() -> None:
    """Paths that a hub may name: only those that stay inside, on every system."""
    assert all(is_safe_relative(path) for path in ("a.json", "encoding/x.py", "..a/b..c", ".gitattributes"))
    for path in ("", "/", "/a", "a/", "a//b", "..", "../a", "a/../b", "./a", "a\\b", "a\nb", "a\x1b[2J"):
        assert not is_safe_relative(path), path


def test_resolve(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path wins over a name; a pulled name and a hub id lead to what there is to open."""
    folder = store(settings.models_dir, RECORD)
    hub = store(settings.models_dir, replace(RECORD, name="org/repo", models=(".",), revision="main"))
    assert resolve_model("smollm2-135m", settings) == folder / "m.gguf"
    assert resolve_model("org/repo", settings) == resolve_model("org/repo@main", settings) == hub
    assert resolve_model(f"org/repo@{'c' * 40}", settings) == hub
    assert resolve_model(str(folder / "m.gguf"), settings) == folder / "m.gguf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m").mkdir()
    assert resolve_model("smollm2-135m", settings) == Path("smollm2-135m")


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("", "the model's name is empty", "try smollm2-135m"),
        ("smollm2-135m", "smollm2-135m is not on this machine yet", "hotset pull smollm2-135m"),
        ("smollm-135m", "no model and no file is named smollm-135m", "did you mean smollm2-135m?"),
        ("gpt", "no model and no file is named gpt", "give a path, ORG/REPO, or a name that 'hotset list' shows"),
        ("org/repo", "org/repo is neither a file nor a fetched model", "hotset pull org/repo"),
        ("org/repo@v1", "org/repo@v1 is neither a file nor a fetched model", "hotset pull org/repo@v1"),
        ("org/repo/a.gguf", "org/repo is neither", "hotset pull org/repo --file a.gguf"),
        ("model.gguf", "no such file: model.gguf", None),
        ("./org/repo", "no such file or folder: ./org/repo", None),
        ("/no/such", "no such file or folder: /no/such", None),
        ("../x/y", "no such file or folder", None),
        ("a/../b", "is not the name of a model", "names look like smollm2-135m or ORG/REPO[@REVISION]"),
        ("a/b/../c.gguf", "no such file", None),
        ("a/b/c", "is not the name of a model", "names look like smollm2-135m or ORG/REPO[@REVISION]"),
    ],
)
def test_names_that_lead_nowhere(settings: Settings, name: str, message: str, hint: str | None) -> None:
    """The user's request is what is wrong (exit code 2), and the hint is the command that would help."""
    with pytest.raises(RequestError) as caught:
        resolve_model(name, settings)
    assert message in caught.value.message
    assert caught.value.hint == hint


def test_pulled_model_that_was_damaged(settings: Settings) -> None:
    """A file that is gone or has another length is named before anything opens it."""
    folder = store(settings.models_dir, RECORD)
    (folder / "m.gguf").write_bytes(b"x")
    with pytest.raises(HotsetError) as caught:
        resolve_model("smollm2-135m", settings)
    assert caught.value.exit_code == 3
    assert caught.value.hint == "hotset pull smollm2-135m --force"


def test_packaged_names_are_valid() -> None:
    """A short name must not look like a path or a hub id, or it could never be resolved."""
    for name, model in PACKAGED.items():
        assert name == model.name and "/" not in name and not name.startswith(".")
        assert len(model.sha256) == 64 and "==" in model.requirement
