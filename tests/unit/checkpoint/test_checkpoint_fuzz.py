"""Damaged files: whatever is done to a file, it opens or ends in CheckpointError, soon and without much memory."""

from __future__ import annotations

import json
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_files import (
    ARRAY,
    HEADER,
    KEYS,
    STRING,
    U8,
    U32,
    VALUES,
    array,
    gguf_bytes,
    key,
    safetensors_bytes,
    string,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.checkpoint import open_checkpoint
from hotset.checkpoint.gguf import StringArray
from hotset.errors import CheckpointError

MAX_SECONDS = 0.5
MAX_BYTES = 4 << 20

GGUF = gguf_bytes(
    (
        *KEYS,
        key("general.alignment", U32, struct.pack("<I", 32)),
        key("nested", ARRAY, array(ARRAY, 2, array(U8, 2, b"\1\2") + array(STRING, 1, string("x")))),
    )
)
SAFETENSORS = safetensors_bytes(HEADER, VALUES)
CONFIG = json.dumps({"model_type": "llama", "hidden_size": 64, "list": [1, 2.5, None, True], "s": "é"}).encode()

# Lengths and counts where arithmetic goes wrong: around 0, signs, word sizes, and the size of a small file.
NUMBERS = [0, 1, 7, 255, 600, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 9, 2**64 - 1]
JSON_PIECES = [
    *(b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\u0000", b"\\ud800", b"\xff", b"null", b"NaN", b"1e999", b"-1"),
    *(b'"a":', b"[" * 3000, b"9" * 5000, b"99999999999999999999", b"0.5", b'"__metadata__":', b"18446744073709551615"),
]


@st.composite
def damages(draw: st.DrawFn, pieces: list[bytes]) -> list[Callable[[bytes], bytes]]:
    """One to four changes: flipped bits, blown-up fields, cuts, insertions, repeated and lost stretches."""

    def flip(at: int, bit: int) -> Callable[[bytes], bytes]:
        return lambda b: b[: at % len(b)] + bytes([b[at % len(b)] ^ (1 << bit)]) + b[at % len(b) + 1 :] if b else b

    def put(at: int, piece: bytes) -> Callable[[bytes], bytes]:
        return lambda b: b[: at % (len(b) + 1)] + piece + b[at % (len(b) + 1) + len(piece) :]

    def insert(at: int, piece: bytes) -> Callable[[bytes], bytes]:
        return lambda b: b[: at % (len(b) + 1)] + piece + b[at % (len(b) + 1) :]

    def cut(at: int) -> Callable[[bytes], bytes]:
        return lambda b: b[: at % (len(b) + 1)]

    def lose(at: int, count: int) -> Callable[[bytes], bytes]:
        return lambda b: b[: at % (len(b) + 1)] + b[at % (len(b) + 1) + count :]

    def repeat(at: int, count: int) -> Callable[[bytes], bytes]:
        return lambda b: b[: at % (len(b) + 1)] + b[at % (len(b) + 1) :][:count] * 2 + b[at % (len(b) + 1) + count :]

    at = st.integers(0, 1 << 16)
    small = st.integers(1, 64)
    number = st.sampled_from(NUMBERS).flatmap(
        lambda n: st.sampled_from([struct.pack("<Q", n), struct.pack("<I", n & 0xFFFFFFFF)])
    )
    garbage = st.one_of(st.binary(min_size=1, max_size=24), st.sampled_from(pieces), number)
    one = st.one_of(
        st.builds(flip, at, st.integers(0, 7)),
        st.builds(put, at, number),
        st.builds(put, at, garbage),
        st.builds(insert, at, garbage),
        st.builds(cut, at),
        st.builds(lose, at, small),
        st.builds(repeat, at, small),
    )
    return draw(st.lists(one, min_size=1, max_size=4))


def damaged(content: bytes, changes: list[Callable[[bytes], bytes]]) -> bytes:
    for change in changes:
        content = change(content)
    return content


def use(path: Path) -> None:
    """Open a file and touch all that it claims to hold; CheckpointError is the only way to fail."""
    start = time.process_time()
    try:
        with open_checkpoint(path) as checkpoint:
            for value in checkpoint.metadata.values():
                if isinstance(value, StringArray):
                    list(value)
            for name, info in checkpoint.tensors.items():
                assert checkpoint.raw(name).nbytes == info.nbytes
                if info.format.is_runnable:
                    assert checkpoint.array(name).shape == info.shape
    except CheckpointError as error:
        assert "\n" not in error.message and len(error.message) < 2000
    assert time.process_time() - start < MAX_SECONDS


def replace(path: Path, content: bytes) -> None:
    """Give the path to a new file: an array of the last example may still have the old one mapped."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "config.json").write_bytes(CONFIG)
    return folder


def test_the_undamaged_files_open(folder: Path) -> None:
    """Without this, every example could fail at the first byte and the fuzzing would prove nothing."""
    for name, content, count in (("m.gguf", GGUF, 3), ("m.safetensors", SAFETENSORS, 2)):
        replace(folder / name, content)
        assert len(open_checkpoint(folder / name).tensors) == count


@given(changes=damages([b"GGUF", string("general.alignment"), struct.pack("<IQ", ARRAY, 2**20)]))
@settings(max_examples=600, deadline=None)
def test_damaged_gguf(folder: Path, changes: list[Callable[[bytes], bytes]]) -> None:
    """Guards against every other exception, hangs, and reads past what is mapped."""
    replace(folder / "m.gguf", damaged(GGUF, changes))
    use(folder / "m.gguf")


@given(changes=damages(JSON_PIECES), fix_length=st.booleans())
@settings(max_examples=600, deadline=None)
def test_damaged_safetensors(folder: Path, changes: list[Callable[[bytes], bytes]], fix_length: bool) -> None:
    """With the length made right again the damage reaches the checks behind the parser."""
    if fix_length:
        header = damaged(SAFETENSORS[8 : -len(VALUES)], changes)
        content = safetensors_bytes(raw=header, data=VALUES)
    else:
        content = damaged(SAFETENSORS, changes)
    replace(folder / "m.safetensors", content)
    use(folder / "m.safetensors")


@given(changes=damages(JSON_PIECES))
@settings(max_examples=200, deadline=None)
def test_damaged_config(folder: Path, changes: list[Callable[[bytes], bytes]]) -> None:
    """config.json comes from the same strangers as the weights."""
    replace(folder / "m.safetensors", SAFETENSORS)
    try:
        replace(folder / "config.json", damaged(CONFIG, changes))
        use(folder / "m.safetensors")
    finally:
        replace(folder / "config.json", CONFIG)


def test_no_field_makes_a_small_file_take_much_memory(folder: Path) -> None:
    """Every aligned and unaligned field of both files is blown up in turn; lengths are checked before they are used."""
    tracemalloc.start()
    try:
        for name, content in (("m.gguf", GGUF), ("m.safetensors", SAFETENSORS)):
            for at in range(len(content) - 8):
                for number in (2**31 - 1, 2**40, 2**64 - 1):
                    blown = content[:at] + struct.pack("<Q", number) + content[at + 8 :]
                    replace(folder / name, blown)
                    use(folder / name)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_BYTES
