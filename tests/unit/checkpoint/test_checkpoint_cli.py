"""check, pull and list as a user meets them: what is printed where, and the exit codes."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import pytest
from checkpoint_files import gguf_bytes
from click.testing import CliRunner, Result

from hotset.checkpoint import Checkpoint, TensorDecl
from hotset.checkpoint.store import Record, StoredFile, write_record
from hotset.cli.main import cli

DECLARATIONS = (
    TensorDecl("norm", "norm", (8,), "norm", ("F32",)),
    TensorDecl("wq", "wq", (4, 32), "linear", ("Q8_0",)),
    TensorDecl("head", "wq", (4, 32), "linear", ("Q8_0",)),
    TensorDecl("bias", "bias", (4,), "norm", ("F32",), need="maybe", reason="this model has none"),
    TensorDecl("wk", "wk", (2, 32), "linear", (), need="ignored", reason="draft head, not used"),
)


@dataclass(frozen=True)
class Spec:
    tensors: tuple[TensorDecl, ...]
    family: str = "llama"
    name: str = "Tiny"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of three tensors, and a family that declares it."""
    registry = types.ModuleType("hotset.models.registry")

    def describe(checkpoint: Checkpoint) -> Spec:
        return Spec(DECLARATIONS)

    registry.describe = describe  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hotset.models.registry", registry)
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    return path


def hotset(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def test_check_prints_the_account(model: Path) -> None:
    """A tied tensor is counted once: the sum of the formats is what lies in the file."""
    result = hotset("check", str(model))
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.splitlines() == [
        f"{model}: Tiny (llama)",
        f"  gguf, 1 file, {model.stat().st_size} B, {model}",
        "",
        "loaded           2 tensors        168 B",
        "  Q8_0           1 tensors        136 B",
        "  F32            1 tensors         32 B",
        "absent           1 optional",
        "  bias: this model has none",
        "ignored          1 not needed",
        "  wk: draft head, not used",
        "every tensor is accounted for",
    ]


def test_check_json(model: Path) -> None:
    """The same account for programs."""
    found = json.loads(hotset("check", str(model), "--json").stdout)
    assert found["loaded"] == {
        "tensors": 2,
        "bytes": 168,
        "formats": {"Q8_0": {"tensors": 1, "bytes": 136}, "F32": {"tensors": 1, "bytes": 32}},
    }
    assert found["absent"] == [{"name": "bias", "key": "bias", "reason": "this model has none"}]
    assert found["ignored"] == [{"name": "wk", "bytes": 36, "format": "Q4_0", "reason": "draft head, not used"}]
    assert (found["family"], found["kind"], found["files"]) == ("llama", "gguf", [str(model)])


def test_check_of_damaged_and_absent_files(model: Path) -> None:
    """Your files: exit code 3. Your request: exit code 2. One line and a hint, nothing on standard output."""
    model.write_bytes(gguf_bytes()[:-30])
    damaged = hotset("check", str(model))
    assert damaged.exit_code == 3 and damaged.stdout == ""
    assert damaged.stderr.startswith(f"error: {model}: tensor wk covers bytes")
    absent = hotset("check", "smollm2-135m")
    assert absent.exit_code == 2
    assert absent.stderr == ("error: smollm2-135m is not on this machine yet\n\nhint: hotset pull smollm2-135m\n")


def test_list(model: Path, tmp_path: Path) -> None:
    """A table on standard output; an incomplete model is marked; an empty store says what to do, and prints nothing."""
    empty = hotset("list")
    assert empty.stdout == "" and "hotset pull smollm2-135m" in empty.stderr
    assert json.loads(hotset("list", "--json").stdout) == []
    folder = tmp_path / "home" / "models" / "org" / "tiny"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(model.read_bytes())
    size = model.stat().st_size
    write_record(
        folder, Record("org/tiny", "hub", "main", "c" * 40, "GGUF Q8_0", ("m.gguf",), (StoredFile("m.gguf", size),))
    )
    assert hotset("list").stdout.splitlines() == [
        "NAME      FORMAT      SIZE  PATH",
        f"org/tiny  GGUF Q8_0  {size} B  {folder}",
    ]
    (entry,) = json.loads(hotset("list", "--json").stdout)
    assert entry["name"] == "org/tiny" and entry["bytes"] == size and entry["is_complete"]
    (folder / "m.gguf").unlink()
    assert "incomplete" in hotset("list").stdout


def test_pull_prints_the_path_alone_on_standard_output(model: Path, tmp_path: Path) -> None:
    """So that $(hotset pull NAME) works; talk goes to standard error."""
    folder = tmp_path / "home" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(model.read_bytes())
    files = (StoredFile("m.gguf", model.stat().st_size),)
    write_record(folder, Record("smollm2-135m", "package", "1", "c" * 40, "GGUF Q8_0", ("m.gguf",), files))
    result = hotset("pull", "smollm2-135m")
    assert result.exit_code == 0
    assert result.stdout == f"{folder / 'm.gguf'}\n"
    assert result.stderr.startswith("smollm2-135m is here already (GGUF Q8_0, ")
    assert json.loads(hotset("pull", "smollm2-135m", "--json").stdout)["was_here"] is True


@pytest.mark.parametrize("name", ["nonsense", "../x", "a\\b/c"])
def test_pull_of_no_name(model: Path, name: str) -> None:
    """Refused before anything is asked of a network."""
    result = hotset("pull", name)
    assert result.exit_code == 2 and result.stdout == ""
    assert "error: " in result.stderr and "\n\nhint: " in result.stderr


@pytest.mark.parametrize("verb", ["check", "pull", "list"])
def test_help(verb: str) -> None:
    """Help needs no model and no import of the engine."""
    result = hotset(verb, "--help")
    assert result.exit_code == 0 and f"Usage: cli {verb}" in result.stdout
