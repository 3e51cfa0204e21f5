"""The GGUF reader: files that gguf-py writes, split files, and a table of defects with the message of each."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_files import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    DATA_BYTES,
    F32,
    GGML_F32,
    GGML_Q5_K,
    GGML_Q8_0,
    KEYS,
    STRING,
    TENSORS,
    U8,
    U32,
    U64,
    Tensor,
    array,
    gguf_bytes,
    key,
    string,
)

from hotset.checkpoint import open_checkpoint
from hotset.checkpoint.gguf import StringArray
from hotset.errors import CheckpointError


def write(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_reads_what_gguf_py_writes(tmp_path: Path) -> None:
    """Guards against dimensions in the wrong order, wrong offsets and misread value types."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 65535)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -5)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**62))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("yes", True)
    writer.add_bool("no", False)
    writer.add_string("text", "héllo\n")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("floats", [0.5, 1.5])
    writer.add_array("flags", [True, False])
    writer.add_array("words", ["a", "", "ü"])
    rng = np.random.default_rng(1)
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in (("w", (6, 64)), ("n", (7,)))}
    writer.add_tensor("w", weights["w"])
    writer.add_tensor("n", weights["n"])
    quantised = gguf.quantize(weights["w"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        found = checkpoint.metadata
        scalars = {
            "general.architecture": "llama",
            "u8": 200,
            "i8": -3,
            "u16": 65535,
            "i16": -300,
            "u32": 4_000_000_000,
            "i32": -5,
            "u64": 2**63,
            "i64": -(2**62),
            "f32": 0.5,
            "f64": 1e300,
            "yes": True,
            "no": False,
            "text": "héllo\n",
        }
        assert {name: found[name] for name in scalars} == scalars
        assert {name: type(found[name]) for name in scalars} == {name: type(value) for name, value in scalars.items()}
        assert found["numbers"].tolist() == [1, 2, 3]
        assert found["floats"].tolist() == [0.5, 1.5]
        assert found["flags"].dtype == np.bool_ and found["flags"].tolist() == [True, False]
        assert list(found["words"]) == ["a", "", "ü"]
        assert checkpoint.kind == "gguf" and len(checkpoint.files) == 1
        assert checkpoint.tensors["w"].shape == (6, 64)
        for name, expected in weights.items():
            assert np.array_equal(checkpoint.array(name), expected)
        assert checkpoint.tensors["q"].format.name == "Q8_0"
        assert checkpoint.raw("q").tobytes() == quantised.tobytes()
        assert np.array_equal(checkpoint.array("q"), gguf.dequantize(quantised, gguf.GGMLQuantizationType.Q8_0))


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_and_nested_arrays(tmp_path: Path, version: int) -> None:
    """Version 2 differs in nothing that hotset reads. Arrays in arrays are legal, if rare."""
    inner = array(U8, 2, b"\1\2") + array(STRING, 1, string("x"))
    keys = (*KEYS, key("nested", ARRAY, array(ARRAY, 2, inner)))
    checkpoint = open_checkpoint(write(tmp_path, gguf_bytes(keys, version=version)))
    numbers, words = checkpoint.metadata["nested"]
    assert numbers.tolist() == [1, 2] and list(words) == ["x"]
    assert [info.shape for info in checkpoint.tensors.values()] == [(8,), (4, 32), (2, 32)]


def test_alignment_moves_the_data(tmp_path: Path) -> None:
    """Guards against the default of 32 being used for the start of the data of a file that says otherwise."""
    keys = (*KEYS, key("general.alignment", U32, struct.pack("<I", 256)))
    tensors = (Tensor("a", (4,), GGML_F32, 0), Tensor("b", (4,), GGML_F32, 256))
    data = np.zeros(68, "<f4")
    data[:4], data[64:] = 1, 2
    path = write(tmp_path, gguf_bytes(keys, tensors, data=data.tobytes(), alignment=256))
    checkpoint = open_checkpoint(path)
    assert checkpoint.array("a").tolist() == [1] * 4
    assert checkpoint.array("b").tolist() == [2] * 4
    assert checkpoint.tensors["b"].offset % 256 == 0


def test_string_arrays_are_decoded_on_first_use(tmp_path: Path) -> None:
    """A vocabulary that planning never reads costs nothing; a bad entry is an error with its key when it is read."""
    bad = key("words", ARRAY, array(STRING, 2, string("ok") + string(b"\xff")))
    checkpoint = open_checkpoint(write(tmp_path, gguf_bytes((*KEYS, bad))))
    tokens = checkpoint.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray) and tokens._items is None
    assert len(tokens) == 3 and tokens._items is None
    assert tokens[1] == "bc" and tokens[0:2] == ["a", "bc"] and "bc" in tokens and tokens[-1] == ""
    with pytest.raises(CheckpointError, match=r"^key words: entry 1 is not UTF-8 text"):
        list(checkpoint.metadata["words"])


def split_bytes(number: int, count: int, names: tuple[str, ...], total: int) -> bytes:
    keys = (
        *((ARCHITECTURE,) if number == 0 else ()),
        key("split.no", 2, struct.pack("<H", number)),
        key("split.count", 2, struct.pack("<H", count)),
        key("split.tensors.count", 5, struct.pack("<i", total)),
    )
    tensors = tuple(Tensor(name, (8,), GGML_F32, 32 * i) for i, name in enumerate(names))
    values = b"".join(np.full(8, number * 10 + i, "<f4").tobytes() for i in range(len(names)))
    return gguf_bytes(keys, tensors, data=values)


def write_split(folder: Path, total: int = 3) -> list[Path]:
    shards = ((), ("a", "b"), ("c",))
    return [
        write(folder, split_bytes(i, 3, names, total), f"big-{i + 1:05d}-of-00003.gguf")
        for i, names in enumerate(shards)
    ]


@pytest.mark.parametrize("given", [0, 2])
def test_split_model_opens_from_any_of_its_files(tmp_path: Path, given: int) -> None:
    """Guards against tensors read from the wrong file; the first file may hold no tensor at all."""
    checkpoint = open_checkpoint(write_split(tmp_path)[given])
    assert [path.name for path in checkpoint.files] == [f"big-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    assert checkpoint.metadata["general.architecture"] == "llama"
    assert {name: checkpoint.array(name)[0] for name in checkpoint.tensors} == {"a": 10, "b": 11, "c": 20}


def test_split_defects(tmp_path: Path) -> None:
    """A missing, foreign or doubled file of a split model must never load as a smaller model."""
    shards = write_split(tmp_path)
    missing = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=r"one of 3 files; not found beside it: big-00002-of-00003\.gguf"):
        open_checkpoint(shards[0])
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(CheckpointError, match=r"split\.no says file 2 \(from 0\), the name says 1"):
        open_checkpoint(shards[0])
    shards[1].write_bytes(split_bytes(1, 3, ("a", "c"), 3))
    with pytest.raises(CheckpointError, match="2 tensors are named c"):
        open_checkpoint(shards[0])
    shards[1].write_bytes(split_bytes(1, 3, ("a",), 3))
    with pytest.raises(CheckpointError, match=r"hold 2 tensors, split\.tensors\.count says 3"):
        open_checkpoint(shards[0])
    renamed = write(tmp_path, missing, "renamed.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count says 3 files, the name says 1"):
        open_checkpoint(renamed)
    unsplit = write(tmp_path, gguf_bytes(), "x-00001-of-00002.gguf")
    write(tmp_path, gguf_bytes(), "x-00002-of-00002.gguf")
    with pytest.raises(CheckpointError, match=r"split\.count says 1 files, the name says 2"):
        open_checkpoint(unsplit)
    odd = write(tmp_path, gguf_bytes(), "x-00003-of-00002.gguf")
    with pytest.raises(CheckpointError, match="is named as file 3 of 2"):
        open_checkpoint(odd)


def with_key(*more: bytes, **overrides: int) -> bytes:
    return gguf_bytes((*KEYS, *more), **overrides)


def with_tensor(*more: Tensor) -> bytes:
    return gguf_bytes(tensors=(*TENSORS, *more))


DEFECTS = {
    "no magic": (gguf_bytes(magic=b"GGML"), r"starts with b'GGML', expected b'GGUF': not a GGUF file"),
    "version 1": (gguf_bytes(version=1), r"is GGUF version 1; hotset reads versions 2 and 3"),
    "version 4": (gguf_bytes(version=4), r"is GGUF version 4"),
    "big-endian": (gguf_bytes(version=3 << 24), r"is a big-endian GGUF file; hotset reads little-endian ones"),
    "only magic": (b"GGUF", r"the file ends inside its header \(4 bytes\)"),
    "too many tensors": (gguf_bytes(num_tensors=2**40), r"says it has 1099511627776 tensors, expected at most"),
    "too many keys": (gguf_bytes(num_keys=2**63), r"says it has 9223372036854775808 keys, expected at most"),
    "one tensor short": (gguf_bytes(num_tensors=4, data=b""), r"the file ends inside its header|expected"),
    "ends in a key": (gguf_bytes()[:40], r"the file ends inside its header|expected at most"),
    "ends in the table": (gguf_bytes(data=b"")[:-60], r"the file ends inside its header"),
    "key too long": (with_key(key("k" * 2000, U8, b"\0")), r"name of key 3 of 2000 bytes, expected at most 1024"),
    "key not text": (with_key(key(b"\xff\xfe", U8, b"\0")), r"name of key 3 is not UTF-8 text at byte 0"),
    "key twice": (with_key(ARCHITECTURE), r"key general\.architecture: appears twice"),
    "unknown value type": (with_key(key("x", 13, b"\0" * 8)), r"key x: value type 13, expected 0 to 12"),
    "string too long": (
        with_key(key("x", STRING, struct.pack("<Q", 2**62) + b"abc")),
        r"key x: string of 4611686018427387904 bytes, expected at most",
    ),
    "string past the end": (
        with_key(key("x", STRING, struct.pack("<Q", 500))),
        r"key x: string of 500 bytes, expected at most [123]\d\d",
    ),
    "string not text": (with_key(key("x", STRING, string(b"a\xc3"))), r"key x: string is not UTF-8 text at byte 1"),
    "bool of 2": (with_key(key("x", BOOL, b"\2")), r"key x: bool with the value 2, expected 0 or 1"),
    "bools of 2": (with_key(key("x", ARRAY, array(BOOL, 2, b"\1\2"))), r"key x: array of bools with a value above 1"),
    "array too long": (
        with_key(key("x", ARRAY, array(F32, 2**61, b""))),
        r"key x: array of 2305843009213693952 values, expected at most",
    ),
    "array past the end": (
        with_key(key("x", ARRAY, array(U64, 200, b""))),
        r"key x: array of 1600 bytes, expected at most",
    ),
    "array of nothing known": (with_key(key("x", ARRAY, array(99, 1, b"\0"))), r"key x: array of value type 99"),
    "strings past the end": (
        with_key(key("x", ARRAY, array(STRING, 2, struct.pack("<Q", 2**64 - 1)))),
        r"the file ends inside its header",
    ),
    "deep arrays": (
        with_key(key("x", ARRAY, array(ARRAY, 1, b"") * 40)),
        r"key x: arrays nested more than 4 deep",
    ),
    "alignment 0": (with_key(key("general.alignment", U32, struct.pack("<I", 0))), r"general\.alignment is 0"),
    "alignment 48": (
        with_key(key("general.alignment", U32, struct.pack("<I", 48))),
        r"general\.alignment is 48, expected a power of two",
    ),
    "alignment text": (with_key(key("general.alignment", STRING, string("32"))), r"general\.alignment is '32'"),
    "tensor twice": (with_tensor(Tensor("wq", (8,), GGML_F32, 0)), r"2 tensors are named wq"),
    "tensor name too long": (with_tensor(Tensor("t" * 1025, (8,), GGML_F32, 0)), r"name of tensor 3 has 1025 bytes"),
    "tensor name not text": (with_tensor(Tensor(b"\xff", (8,), GGML_F32, 0)), r"name of tensor 3 is not UTF-8"),
    "no dimensions": (with_tensor(Tensor("x", (), GGML_F32, 0)), r"tensor x has 0 dimensions, expected 1 to 4"),
    "five dimensions": (with_tensor(Tensor("x", (1,) * 5, GGML_F32, 0)), r"tensor x has 5 dimensions"),
    "absurd number of dimensions": (
        with_tensor(Tensor("x", (1,), GGML_F32, 0, num_dims=2**32 - 1)),
        r"tensor x has 4294967295 dimensions",
    ),
    "zero dimension": (with_tensor(Tensor("x", (8, 0), GGML_F32, 0)), r"tensor x has a dimension of 0: \[8, 0\]"),
    "absurd dimensions": (
        with_tensor(Tensor("x", (2**63, 2**63), GGML_F32, 0)),
        r"tensor x of dimensions \[9223372036854775808, 9223372036854775808\] takes \d+ bytes, the file has",
    ),
    "broken block": (
        with_tensor(Tensor("x", (48,), GGML_Q8_0, 0)),
        r"tensor x has rows of 48 weights, expected a multiple of 32 for Q8_0",
    ),
    "unknown type": (with_tensor(Tensor("x", (8,), 99, 0)), r"tensor x is type 99, which this hotset does not know"),
    "removed type": (with_tensor(Tensor("x", (8,), 31, 0)), r"tensor x is Q4_0_4_4, which ggml has removed"),
    "crooked offset": (
        with_tensor(Tensor("x", (8,), GGML_F32, 8)),
        r"tensor x starts at data byte 8, expected a multiple of 32",
    ),
    "offset outside": (with_tensor(Tensor("x", (8,), GGML_F32, 2**63)), r"tensor x starts at data byte 92233720368"),
    "tensor over the end": (
        with_tensor(Tensor("x", (8,), GGML_F32, 224)),
        r"tensor x covers bytes \d+ to \d+, expected within \d+ to \d+",
    ),
    "overlap": (with_tensor(Tensor("x", (8,), GGML_F32, 160)), r"tensors wq and x overlap"),
    "overlap of a later one": (with_tensor(Tensor("x", (8,), GGML_F32, 192)), r"tensors x and wk overlap"),
    "no tensors": (gguf_bytes(tensors=()), r"holds no tensors"),
    "data cut off": (gguf_bytes(data=b"\0" * (DATA_BYTES - 1)), r"tensor wk covers bytes \d+ to \d+"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects(tmp_path: Path, name: str) -> None:
    """Every defect is one line that names the file and what is wrong, with the exit code for files."""
    content, message = DEFECTS[name]
    path = write(tmp_path, content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 3


def test_names_from_files_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    """A name with a line break or an escape sequence is shown quoted, a huge one cut."""
    evil = Tensor("a\n\x1b[2Jb", (8,), 99, 0)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write(tmp_path, with_tensor(evil)))
    assert r"tensor 'a\n\x1b[2Jb' is type 99" in caught.value.message
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(write(tmp_path, with_tensor(Tensor("x" * 1000, (8,), 99, 0))))
    assert len(caught.value.message) < 400


def test_a_format_that_cannot_run_is_named_and_has_a_place(tmp_path: Path) -> None:
    """Q5_K opens (its bytes are accounted for), and its use is refused with the formats that would work."""
    tensors = (Tensor("w", (256,), GGML_Q5_K, 0), Tensor("n", (8,), GGML_F32, 192))
    checkpoint = open_checkpoint(write(tmp_path, gguf_bytes(tensors=tensors)))
    assert checkpoint.tensors["w"].nbytes == 176
    assert checkpoint.raw("w").nbytes == 176
    with pytest.raises(CheckpointError, match=r"^tensor w is Q5_K; hotset runs F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K"):
        checkpoint.array("w")
