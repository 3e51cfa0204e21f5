"""How fast files come from storage, and from the page cache, where the models are kept."""

from __future__ import annotations

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotset.machine.samples import MIN_SAMPLES, Effort, Samples
from hotset.units import MIB, format_bytes

BLOCK_BYTES = 4 * MIB
#: Reads on their way at once: what a solid-state disk needs to be busy.
NUM_READERS = 4
#: A file of the models that is smaller says little; then a file is written.
LEAST_FILE_BYTES = 256 * MIB
MIN_FREE_SHARE = 2


@dataclass(frozen=True)
class StorageReport:
    """Bytes per second of one file, read in order; ``absence`` says why there are none.

    ``method`` is "O_DIRECT", or "page cache dropped" where the file system refuses that.
    """

    folder: str
    num_bytes: int
    method: str
    read: Samples | None
    cached: Samples | None
    absence: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": self.folder,
            "num_bytes": self.num_bytes,
            "method": self.method,
            "read_bytes_per_s": self.read.to_json() if self.read else None,
            "page_cache_bytes_per_s": self.cached.to_json() if self.cached else None,
            "absence": self.absence,
        }


def measure_storage(folder: Path, effort: Effort) -> StorageReport:
    """Read the largest file in ``folder``, or one written for it there and deleted. Never fails: says why instead."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    try:
        largest = _largest_file(folder) if place == folder.absolute() else None
        with _some_file(largest, place, effort.file_bytes) as (path, num_bytes):
            method, read = _read_storage(path, num_bytes, effort.file_seconds)
            cached = _read_cached(path, num_bytes, effort.row_seconds)
    except OSError as error:
        return StorageReport(str(place), 0, "", None, None, f"{place}: {error.strerror}")
    return StorageReport(str(place), num_bytes, method, read, cached)


def _largest_file(folder: Path) -> Path | None:
    # Symbolic links may lead to another file system.
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return max(files, key=lambda path: path.stat().st_size, default=None)


@contextmanager
def _some_file(largest: Path | None, folder: Path, wanted: int) -> Iterator[tuple[Path, int]]:
    """A file and how much of it to read; written here and deleted in the end where ``largest`` is too small."""
    size = largest.stat().st_size if largest is not None else 0
    if largest is not None and size >= min(wanted, LEAST_FILE_BYTES):
        yield largest, min(wanted, size) // BLOCK_BYTES * BLOCK_BYTES
        return
    num_bytes = min(wanted, shutil.disk_usage(folder).free // MIN_FREE_SHARE) // BLOCK_BYTES * BLOCK_BYTES
    if num_bytes < MIN_SAMPLES * BLOCK_BYTES:
        raise OSError(0, f"{format_bytes(shutil.disk_usage(folder).free)} are free, too little to measure")
    path = folder / f".hotset-probe-{os.getpid()}"
    try:
        with path.open("wb") as file:
            block = os.urandom(BLOCK_BYTES)  # a file system that compresses must not gain from it
            for _ in range(num_bytes // BLOCK_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        yield path, num_bytes
    finally:
        path.unlink(missing_ok=True)


def _read_storage(path: Path, num_bytes: int, seconds: float) -> tuple[str, Samples]:
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        method = "O_DIRECT"
    except OSError:  # tmpfs and some network file systems
        file, method = os.open(path, os.O_RDONLY), "page cache dropped"
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return method, _sample(file, num_bytes, seconds, wrap=False)
    finally:
        os.close(file)


def _read_cached(path: Path, num_bytes: int, seconds: float) -> Samples:
    file = os.open(path, os.O_RDONLY)
    try:
        _sample(file, num_bytes, seconds=1e9, wrap=False)  # fills the page cache
        return _sample(file, num_bytes, seconds, wrap=True)
    finally:
        os.close(file)


def _sample(file: int, num_bytes: int, seconds: float, *, wrap: bool) -> Samples:
    """Rates of rounds of blocks, read by several threads, until the file or the time is over.

    With ``wrap`` the file is read again and again until the time is over.
    """
    num_blocks = num_bytes // BLOCK_BYTES
    round_blocks = max(1, min(4 * NUM_READERS, num_blocks // MIN_SAMPLES))
    values: list[float] = []
    with ThreadPoolExecutor(NUM_READERS) as pool, _buffers(NUM_READERS) as buffers:
        read = _reader(file, buffers)
        begin = time.perf_counter()
        first = 0
        while True:
            start = time.perf_counter()
            jobs = [pool.submit(read, thread, first, first + round_blocks) for thread in range(NUM_READERS)]
            amount = sum(job.result() for job in jobs)
            values.append(amount / (time.perf_counter() - start))
            first += round_blocks
            if first + round_blocks > num_blocks:
                if not wrap:
                    break
                first = 0
            if len(values) >= MIN_SAMPLES and time.perf_counter() - begin >= seconds:
                break
    return Samples(tuple(values))


def _reader(file: int, buffers: list[mmap.mmap]) -> Callable[[int, int, int], int]:
    def read(thread: int, first: int, last: int) -> int:
        blocks = range(first + thread, last, NUM_READERS)
        return sum(os.preadv(file, [buffers[thread]], block * BLOCK_BYTES) for block in blocks)

    return read


@contextmanager
def _buffers(count: int) -> Iterator[list[mmap.mmap]]:
    """Whole pages, as O_DIRECT needs them."""
    buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(count)]
    try:
        yield buffers
    finally:
        for buffer in buffers:
            buffer.close()
