"""Reading files at speed: what is read, and what is left behind. No rates are asserted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hotset.machine import storage
from hotset.machine.samples import Effort
from hotset.machine.storage import BLOCK_BYTES, measure_storage
from hotset.units import MIB

EFFORT = Effort(0, 0.01, 0.0, 24 * MIB, 10.0)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of every read."""
    done: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(file: int, buffers: list[Any], offset: int) -> int:
        count = real(file, buffers, offset)
        done.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return done


def test_a_file_is_written_read_whole_and_deleted(tmp_path: Path, reads: list[tuple[int, int]]) -> None:
    report = measure_storage(tmp_path / "models", EFFORT)
    assert report.read is not None and report.cached is not None and report.absence is None
    assert (report.folder, report.num_bytes) == (str(tmp_path), 24 * MIB)
    assert min(report.read.low, report.cached.low) > 0
    blocks = [(first * BLOCK_BYTES, BLOCK_BYTES) for first in range(6)]
    assert sorted(reads[:6]) == blocks, "from storage, each block once"
    assert sorted(reads[6:12]) == blocks, "once more to fill the page cache"
    assert list(tmp_path.iterdir()) == []


def test_a_large_model_is_read_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LEAST_FILE_BYTES", 20 * MIB)
    (tmp_path / "org").mkdir()
    model, small = tmp_path / "org" / "model.gguf", tmp_path / "small.gguf"
    model.write_bytes(b"\1" * (23 * MIB))
    small.write_bytes(b"\1" * MIB)
    (tmp_path / "elsewhere").symlink_to("/proc/kcore")
    monkeypatch.setattr(os, "urandom", lambda count: pytest.fail("a file was written"))
    assert measure_storage(tmp_path, EFFORT).num_bytes == 20 * MIB
    assert model.stat().st_size == 23 * MIB and len(list(tmp_path.iterdir())) == 3


def test_without_direct_reads_the_page_cache_is_dropped_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tmpfs refuses O_DIRECT; a file just written would come from memory."""
    dropped: list[int] = []
    real = os.open

    def refuse(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, length, advice: dropped.append(advice))
    assert measure_storage(tmp_path, EFFORT).method == "page cache dropped"
    assert dropped == [os.POSIX_FADV_DONTNEED]


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    report = measure_storage(tmp_path, EFFORT)
    assert report.read is None and report.absence == f"{tmp_path}: No space left on device"
    assert report.to_json()["read_bytes_per_s"] is None and list(tmp_path.iterdir()) == []
