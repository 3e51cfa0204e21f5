"""A kernel of our own where Debian has none: AArch64 with pages of 64 KiB and more than 16 nodes, as on Grace."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from common import ARCHES, HOST, NEW_SUITE, Failed, NotHere, done, part, run
from debian import Packages

_SOURCE = "linux-source-6.12"
_CONFIG = Path(__file__).with_name("arm64-64k.config")
_ARCH = ARCHES["arm64"]
_COMPILER = f"{_ARCH.machine}-linux-gnu-"
_TOOLS = {"make": "make", "flex": "flex", "bison": "bison", "bc": "bc", "perl": "perl", "gcc": "gcc"}


def build_kernel_64k(cache: Path) -> Path:
    """Build it from Debian's source when it is not in the cache: 10 minutes of processor time, 2 GB while it lasts.

    Returns:
        A folder like one of Debian's kernel packages, without modules.
    """
    folder, is_new = part(cache, "kernel-arm64-64k", [NEW_SUITE, _SOURCE, _CONFIG.read_text()])
    if is_new:
        _check_tools()
        package = Packages(cache, NEW_SUITE, HOST.debian).fetch_alone(_SOURCE)[0]
        objects = folder / "objects"
        source = _unpack_source(package, folder / "source")
        make = ["make", "-s", "-C", source, "ARCH=arm64", f"CROSS_COMPILE={_COMPILER}", f"O={objects}"]
        objects.mkdir()
        run([*make, "allnoconfig"], env={"KCONFIG_ALLCONFIG": str(_CONFIG)})
        _check_config((objects / ".config").read_text())
        print("building a kernel with pages of 64 KiB, once", file=sys.stderr)
        run([*make, f"-j{len(os.sched_getaffinity(0))}", "Image"])
        (folder / "boot").mkdir()
        shutil.copy(objects / "arch" / "arm64" / "boot" / "Image", folder / "boot" / "vmlinuz-64k")
        shutil.rmtree(objects)
        shutil.rmtree(folder / "source")
        package.unlink()
        done(folder)
    return folder


def _check_tools() -> None:
    tools = _TOOLS | {f"{_COMPILER}gcc": f"gcc-{_ARCH.machine}-linux-gnu"}
    missing = {tool: package for tool, package in tools.items() if shutil.which(tool) is None}
    if missing:
        hint = f"apt-get install {' '.join(missing.values())}"
        raise NotHere(f"no {', '.join(missing)} here to build a kernel", hint)


def _unpack_source(package: Path, folder: Path) -> Path:
    """The source tree, which is an archive inside the package."""
    folder.mkdir()
    name = f"./usr/src/{_SOURCE}.tar.xz"
    command = 'dpkg-deb --fsys-tarfile "$1" | tar -x -O "$2" | xz -dc | tar -x -C "$3"'
    # Every part of the pipe has to end well, hence bash.
    ended = subprocess.run(["bash", "-o", "pipefail", "-c", command, "bash", package, name, folder], check=False)
    if ended.returncode != 0:
        raise Failed(f"{package} cannot be unpacked")
    return folder / _SOURCE


def _check_config(config: str) -> None:
    """Every wish came true; a wish whose own requirements are missing is dropped without a word."""
    missing = unmet(_CONFIG.read_text(), config)
    if missing:
        raise Failed(f"the kernel's configuration has no {', '.join(missing)}: {_CONFIG} lacks what they need")


def unmet(wishes: str, config: str) -> list[str]:
    """Lines of ``wishes`` that a kernel's configuration does not have."""
    lines = set(config.splitlines())
    return [line for line in wishes.splitlines() if re.match(r"CONFIG_\w+=", line) and line not in lines]
