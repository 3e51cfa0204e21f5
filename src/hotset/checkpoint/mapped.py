"""Model files as read-only memory maps, and the small checks that come before one may be trusted."""

from __future__ import annotations

import errno
import mmap
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from hotset.errors import CheckpointError

_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class MappedFile:
    """One file, mapped read-only. ``size`` is in bytes and greater than zero."""

    path: Path
    data: mmap.mmap
    size: int


def cannot_read(path: Path, error: OSError) -> CheckpointError:
    """Return the error for a file that the system does not let us read."""
    if error.errno == errno.ENOENT and path.is_symlink():
        return CheckpointError(
            f"{path} is a symbolic link to {path.readlink()}, which does not exist",
            "files of a hub snapshot are links: copy them with 'cp -rL' instead of linking them",
        )
    return CheckpointError(f"cannot read {path}: {error.strerror or error}")


def map_file(path: Path) -> MappedFile:
    """Map a regular, non-empty file; CheckpointError for anything else. Reads no more than its first bytes."""
    try:
        # Without O_NONBLOCK opening a named pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise cannot_read(path, error) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file")
        if status.st_size == 0:
            raise CheckpointError(f"{path} is empty", "download it again")
        data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot map {path}: {error}") from error
    finally:
        os.close(descriptor)
    if data[: len(_LFS_POINTER)] == _LFS_POINTER:
        raise CheckpointError(
            f"{path} is a Git LFS pointer of {status.st_size} bytes, not the file itself", "run 'git lfs pull' there"
        )
    return MappedFile(path, data, status.st_size)


def read_small(path: Path, max_bytes: int) -> bytes:
    """Return the contents of a small regular file; CheckpointError when it is larger than ``max_bytes``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file")
            if status.st_size > max_bytes:
                raise CheckpointError(f"{path} has {status.st_size} bytes, expected at most {max_bytes}")
            return file.read(status.st_size)
    except OSError as error:
        raise cannot_read(path, error) from error
