"""hotset's wheel for a guest, from the sources as they are now, kept in the cache by a hash of them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from common import GUEST_SUITE, HOST, REPOSITORY, Arch, Failed, NotHere, done, part, run
from debian import Packages, unpack

_SOURCES = ("pyproject.toml", "README.md", "LICENSE", "native", "src")
_KEPT = 4  # wheels of each architecture: going back to a commit costs nothing


def build_wheel(cache: Path, arch: Arch) -> Path:
    """Return the wheel, building it when these sources have none yet. Objects of `make build` are used again."""
    folder = cache / "wheels" / f"{arch.name}-{_hash_sources()}"
    if not list(folder.glob("*.whl")):
        print(f"building the wheel for {arch.name}", file=sys.stderr)
        _forget_old(folder.parent, arch)
        fresh = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        options, env = ([], {}) if arch is HOST else _cross(cache, arch)
        run(
            [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
             "--wheel-dir", fresh, *options, REPOSITORY],
            env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"} | env,
        )  # fmt: skip
        fresh.rename(folder)
    return next(folder.glob("*.whl"))


def unpacked(wheel: Path) -> Path:
    """The folder with the wheel's packages, beside it, for running it on the host."""
    folder = wheel.parent / "site"
    if not folder.is_dir():
        run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-index",
             "--target", folder, wheel])  # fmt: skip
    return folder


def host_python(wheel: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run Python on the host with this wheel's hotset.

    Without -S the editable install of `make build` would be found first.
    """
    path = f"{unpacked(wheel)}:{sysconfig.get_paths()['purelib']}"
    return [sys.executable, "-S"], {"PYTHONPATH": path}


def _hash_sources() -> str:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *_SOURCES],
        cwd=REPOSITORY, capture_output=True, check=False,
    )  # fmt: skip
    if listed.returncode != 0:
        raise Failed(f"git ls-files: {listed.stderr.decode().strip()}")
    digest = hashlib.sha256()
    for name in sorted(set(listed.stdout.decode().split("\0")) - {""}):
        path = REPOSITORY / name
        if path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _forget_old(folder: Path, arch: Arch) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wheels = sorted(folder.glob(f"{arch.name}-*"), key=lambda path: path.stat().st_mtime)
    for old in wheels[: max(0, len(wheels) - _KEPT + 1)]:
        shutil.rmtree(old)


def _cross(cache: Path, arch: Arch) -> tuple[list[str], dict[str, str]]:
    """Options and environment of a build for another architecture: its compiler, and its Python's headers."""
    if shutil.which(f"{arch.machine}-linux-gnu-g++") is None:
        raise NotHere(
            f"no {arch.machine}-linux-gnu-g++ here", f"apt-get install g++-{arch.machine.replace('_', '-')}-linux-gnu"
        )
    names = ("libpython3.11-dev", "libpython3.11-stdlib", "libpython3.11-minimal")
    headers, is_new = part(cache, f"python-{arch.name}", [GUEST_SUITE, *names])
    if is_new:
        unpack(Packages(cache, GUEST_SUITE, arch.debian).fetch_alone(*names), headers)
        done(headers)
    triplet = f"{arch.machine}-linux-gnu"
    include = headers / "usr" / "include"
    # The facts about the guest's Python, in a folder without the rest of its standard library.
    facts = headers / "facts"
    facts.mkdir(exist_ok=True)
    name = f"_sysconfigdata__{triplet}"
    shutil.copy(next(headers.glob(f"usr/lib/python3.11/{name}.py")), facts)
    defines = {
        "CMAKE_TOOLCHAIN_FILE": REPOSITORY / "native" / "toolchains" / f"{triplet}.cmake",
        "Python_INCLUDE_DIR": include / "python3.11",
        "NB_SUFFIX": f".cpython-311-{triplet}.so",
    }
    options = [f"--config-settings=cmake.define.{key}={value}" for key, value in defines.items()]
    env = {
        "PYTHONPATH": str(facts),
        "_PYTHON_SYSCONFIGDATA_NAME": name,
        "_PYTHON_HOST_PLATFORM": f"linux-{arch.machine}",
        "CXXFLAGS": f"-I{include}",
    }
    return options, env
