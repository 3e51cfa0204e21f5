"""What the parts of the emulator share: its errors, its cache folder, its architectures, running programs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHON_VERSION = (3, 11)
#: The guest's programs come from the Debian release with that Python; the newer kernel and emulator from the next one.
GUEST_SUITE = "bookworm"
NEW_SUITE = "trixie"
_DONE = ".done"


class NotHere(Exception):
    """This host cannot have the emulated machine: no network, no package, no tool. ``hint`` says what helps."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Failed(Exception):
    """Something that should work did not: a build, a boot. The text has all there is to say."""


@dataclass(frozen=True)
class Arch:
    """One guest architecture by its names: hotset's, Debian's, the compilers'."""

    name: str
    debian: str
    machine: str
    qemu: str
    console: str


ARCHES = {
    "x86-64": Arch("x86-64", "amd64", "x86_64", "qemu-system-x86_64", "ttyS0"),
    "arm64": Arch("arm64", "arm64", "aarch64", "qemu-system-aarch64", "ttyAMA0"),
}
HOST = ARCHES["x86-64"]


def cache_folder() -> Path:
    """Where images, packages and wheels are kept: ``$NUMA_CACHE``, else ``~/.cache/hotset-numa``. Never in git.

    The variable has no HOTSET_ in front: hotset refuses variables with that beginning that it does not know.
    """
    return Path(os.environ.get("NUMA_CACHE") or Path.home() / ".cache" / "hotset-numa").absolute()


@contextmanager
def only_one(cache: Path) -> Iterator[None]:
    """Hold the cache while it is changed: two runs on one machine wait for each other."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run(command: Sequence[str | Path], *, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a program and return what it printed; Failed with the last lines of it when it fails.

    ``env`` is added to this process's environment.
    """
    words = [str(word) for word in command]
    try:
        ended = subprocess.run(
            words, cwd=cwd, env=os.environ | dict(env or {}), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise NotHere(f"no program {words[0]} here", "on Debian: apt-get install apt dpkg e2fsprogs tar") from error
    if ended.returncode != 0:
        tail = "\n".join((ended.stdout + ended.stderr).splitlines()[-30:])
        raise Failed(f"{' '.join(words[:6])} ... ended with status {ended.returncode}:\n{tail}")
    return ended.stdout


def part(cache: Path, name: str, recipe: Sequence[str]) -> tuple[Path, bool]:
    """The folder of something in the cache, and whether it is still to be made; :func:`done` ends that.

    The folder's name has a hash of the recipe. A changed recipe makes a new folder and removes those of older ones.
    """
    key = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()[:10]
    folder = cache / f"{name}-{key}"
    if (folder / _DONE).is_file():
        return folder, False
    for old in cache.glob(f"{name}-*"):
        if re.fullmatch(rf"{re.escape(name)}-[0-9a-f]{{10}}", old.name):
            shutil.rmtree(old)
    print(f"making {folder}", file=sys.stderr)
    folder.mkdir(parents=True)
    return folder, True


def done(folder: Path) -> None:
    """Say that a folder of :func:`part` is complete."""
    (folder / _DONE).touch()
