"""Where a process's control groups are: a limit anywhere on the way up to the root holds.

Two versions exist and may be mounted side by side. With version 1 each controller has its own
hierarchy; with version 2 there is one. /proc/self/cgroup gives the path inside a hierarchy, and
/proc/self/mountinfo where that hierarchy (or, in a container, a part of it) is mounted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hotset.machine.files import read_text


@dataclass(frozen=True)
class Cgroup:
    """One directory of a cgroup hierarchy, as a path that starts at the root of the tree."""

    version: int
    directory: str


def cgroup_path(root: Path, controller: str, process: str = "self") -> list[Cgroup]:
    """Return the directories whose limits of ``controller`` hold for a process (its number), innermost first.

    Empty when the process is in no cgroup that can be seen.
    """
    membership = read_text(root, f"/proc/{process}/cgroup")
    mounts = read_text(root, "/proc/self/mountinfo")
    if membership is None or mounts is None:
        return []
    version, path = _membership(membership, controller)
    if path is None:
        return []
    for mount in mounts.splitlines():
        found = _match_mount(mount, controller, version)
        if found is not None:
            mount_root, mount_point = found
            return [Cgroup(version, directory) for directory in _walk_up(path, mount_root, mount_point)]
    return []


def _membership(text: str, controller: str) -> tuple[int, str | None]:
    """Return the version and the path of the hierarchy that manages ``controller``."""
    unified = None
    for line in text.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return 1, path
        if hierarchy == "0" and not controllers:
            unified = path
    return 2, unified


def _match_mount(line: str, controller: str, version: int) -> tuple[str, str] | None:
    """Return (root inside the hierarchy, mount point) of a mountinfo line for the wanted hierarchy."""
    # 36 35 98:0 /root /mount/point rw,noatime shared:1 - type source options
    left, _, right = line.partition(" - ")
    fields, kind = left.split(), right.split()
    if len(fields) < 5 or len(kind) < 3:
        return None
    if version == 2 and kind[0] != "cgroup2":
        return None
    if version == 1 and (kind[0] != "cgroup" or controller not in kind[2].split(",")):
        return None
    return _unescape(fields[3]), _unescape(fields[4])


def _unescape(path: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _walk_up(path: str, mount_root: str, mount_point: str) -> list[str]:
    inside, top = PurePosixPath(path), PurePosixPath(mount_root)
    # Outside the mounted part (a cgroup namespace shows "/.."), only the mount point itself can be seen.
    is_visible = ".." not in inside.parts and inside.is_relative_to(top)
    parts = inside.relative_to(top).parts if is_visible else ()
    return [str(PurePosixPath(mount_point, *parts[:depth])) for depth in range(len(parts), -1, -1)]
