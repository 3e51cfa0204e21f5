"""The first file system of a guest, a cpio archive: busybox, the modules that reach the root image, and ``init``."""

from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterable
from pathlib import Path

_INIT = Path(__file__).with_name("guest_init.sh")
_FOLDERS = ("bin", "modules", "proc", "sys", "dev", "root")


def write(path: Path, busybox: Path, modules: Iterable[Path]) -> None:
    """Write the archive to ``path``. ``modules`` are loaded in their order."""
    entries: list[tuple[str, int, bytes]] = [(name, stat.S_IFDIR | 0o755, b"") for name in _FOLDERS]
    entries.append(("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()))
    entries.append(("init", stat.S_IFREG | 0o755, _INIT.read_bytes()))
    for index, module in enumerate(modules):
        name = f"modules/{index:02d}-{module.name.removesuffix('.xz')}"
        entries.append((name, stat.S_IFREG | 0o644, _contents(module)))
    path.write_bytes(archive(entries))


def archive(entries: Iterable[tuple[str, int, bytes]]) -> bytes:
    """A cpio archive in the format "newc" of (name, mode, contents)."""
    out = bytearray()
    for inode, (name, mode, contents) in enumerate([*entries, ("TRAILER!!!", 0, b"")], start=1):
        # inode, mode, owner, group, links, time, size, device (2), device that it is (2), length of the name, checksum
        fields = (inode, mode, 0, 0, 1, 0, len(contents), 0, 0, 0, 0, len(name) + 1, 0)
        out += b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        out += bytes(-len(out) % 4) + contents
        out += bytes(-len(out) % 4)
    return bytes(out)


def find_modules(folder: Path, names: Iterable[str]) -> list[Path]:
    """Files of kernel modules in the order of loading, each after those that it depends on.

    ``folder`` holds the modules of one kernel. Names that are not there are compiled into the kernel.
    """
    files = {_name(path.name): path for path in sorted(folder.glob("**/*.ko*"))}
    found: dict[Path, None] = {}

    def add(name: str) -> None:
        path = files.get(_name(name))
        if path is None or path in found:
            return
        depends = re.search(rb"\0depends=([^\0]*)\0", _contents(path))
        for other in depends[1].decode().split(",") if depends else ():
            add(other)
        found[path] = None

    for name in names:
        add(name)
    return list(found)


def _name(text: str) -> str:
    """``virtio-rng.ko.xz`` and ``virtio_rng`` are one module."""
    return text.partition(".")[0].replace("-", "_")


def _contents(path: Path) -> bytes:
    return lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
