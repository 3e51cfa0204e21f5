"""Reading the kernel's small text files, from the real root or from a tree that a test made."""

from __future__ import annotations

import gzip
from pathlib import Path

from hotset.errors import MachineError

#: The root of the tree that every function of this package reads.
ROOT = Path("/")


def read_text(root: Path, name: str) -> str | None:
    """Return the stripped text of ``root/name``, or ``None`` when the file is absent or cannot be read.

    Absence is ordinary here: containers hide parts of /sys, and kernels are built without features.
    """
    try:
        return (root / name.lstrip("/")).read_text(errors="replace").strip()
    except OSError:
        return None


def require_text(root: Path, name: str) -> str:
    """Return the stripped text of ``root/name``; MachineError when it cannot be read."""
    text = read_text(root, name)
    if text is None:
        raise MachineError(
            f"cannot read {name}, which every Linux system has", "hotset runs on Linux with /proc mounted"
        )
    return text


def read_int(root: Path, name: str) -> int | None:
    """Return the number in a one-number file, or ``None`` when it is absent or says ``max``."""
    text = read_text(root, name)
    if text is None or text == "max":
        return None
    try:
        return int(text)
    except ValueError:
        raise MachineError(f"{name} holds {text[:40]!r}, expected a number") from None


def read_table(text: str) -> dict[str, int]:
    """Parse lines ``name value`` or ``name: value kB`` into bytes (kB lines) or plain numbers."""
    table = {}
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            table[words[0]] = int(words[1]) * (1024 if words[2:3] == ["kB"] else 1)
    return table


def list_names(root: Path, name: str) -> tuple[str, ...]:
    """Return the sorted names in the directory ``root/name``; none when it is absent or cannot be read."""
    try:
        return tuple(sorted(entry.name for entry in (root / name.lstrip("/")).iterdir()))
    except OSError:
        return ()


def read_kernel_config(root: Path) -> str | None:
    """Return the configuration that the running kernel was built with, or ``None`` when it is not published."""
    try:
        return gzip.decompress((root / "proc/config.gz").read_bytes()).decode()
    except OSError:
        release = read_text(root, "/proc/sys/kernel/osrelease")
        return read_text(root, f"/boot/config-{release}") if release else None


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse the kernel's list format: ``"0-3,8,10-11"`` gives ``(0, 1, 2, 3, 8, 10, 11)``."""
    cpus: list[int] = []
    for part in text.replace(",", " ").split():
        first, _, last = part.partition("-")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def format_cpu_list(cpus: tuple[int, ...]) -> str:
    """The inverse of :func:`parse_cpu_list` for sorted CPUs: ``(0, 1, 2, 8)`` gives ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
