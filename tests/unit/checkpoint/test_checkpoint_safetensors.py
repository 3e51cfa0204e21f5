"""The safetensors reader: one file, several with an index, and a table of defects with the message of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import HEADER, VALUES, entry, safetensors_bytes, safetensors_folder

from hotset.checkpoint import open_checkpoint
from hotset.checkpoint.safetensors import INDEX_NAME
from hotset.errors import CheckpointError


def test_reads_tensors_and_config(tmp_path: Path) -> None:
    """Shapes, values and the config come through, from the folder and from the file."""
    folder = safetensors_folder(tmp_path / "m")
    for path in (folder, folder / "model.safetensors"):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.kind == "safetensors"
            assert checkpoint.metadata == {"model_type": "llama"}
            assert checkpoint.array("a").tolist() == [[1, 2], [3, 4]]
            assert checkpoint.array("b").tolist() == [1, 2, -2, 0]
            assert checkpoint.tensors["b"].format.name == "BF16"
            assert not checkpoint.notes


def test_bf16_and_f16_against_ml_dtypes(tmp_path: Path) -> None:
    """An independent encoder of both 16-bit formats; tensors may come in any order in the header."""
    weights = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    bf16, f16 = weights.astype(ml_dtypes.bfloat16), weights.astype(np.float16)
    header = {"h": entry("F16", [3, 5], 30, 60), "b": entry("BF16", [3, 5], 0, 30)}
    folder = safetensors_folder(tmp_path / "m", safetensors_bytes(header, bf16.tobytes() + f16.tobytes()))
    checkpoint = open_checkpoint(folder)
    assert np.array_equal(checkpoint.array("b"), bf16.astype(np.float32))
    assert np.array_equal(checkpoint.array("h"), f16.astype(np.float32))


def test_header_padding_scalars_and_empty_tensors(tmp_path: Path) -> None:
    """What the format allows: spaces behind the header, tensors without dimensions and without elements."""
    header = {"s": entry("F32", [], 0, 4), "e": entry("F32", [0, 4], 4, 4), "t": entry("U8", [3], 4, 7)}
    raw = json.dumps(header).encode() + b"   "
    checkpoint = open_checkpoint(safetensors_folder(tmp_path / "m", safetensors_bytes(raw=raw, data=b"\0" * 7)))
    assert checkpoint.array("s").shape == ()
    assert checkpoint.array("e").shape == (0, 4)
    assert checkpoint.raw("t").size == 3


def test_sub_byte_formats_have_a_size(tmp_path: Path) -> None:
    """Two F4 weights share a byte, four F6 ones three bytes; half a byte at the end is refused."""
    header = {"f4": entry("F4", [2, 6], 0, 6), "f6": entry("F6_E2M3", [8], 6, 12)}
    checkpoint = open_checkpoint(safetensors_folder(tmp_path / "m", safetensors_bytes(header, b"\0" * 12)))
    assert {name: info.nbytes for name, info in checkpoint.tensors.items()} == {"f4": 6, "f6": 6}
    odd = safetensors_bytes({"f4": entry("F4", [5], 0, 3)}, b"\0" * 3)
    with pytest.raises(CheckpointError, match=r"tensor f4 of shape \[5\] does not fill whole bytes in F4"):
        open_checkpoint(safetensors_folder(tmp_path / "m", odd))


def one(**changes: Any) -> bytes:
    """A file of one tensor, 16 bytes, with changed fields."""
    return safetensors_bytes({"a": {**entry("F32", [4], 0, 16), **changes}}, b"\0" * 16)


def raw_header(text: str | bytes) -> bytes:
    return safetensors_bytes(raw=text.encode() if isinstance(text, str) else text, data=b"\0" * 16)


ENTRY = '{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
DEFECTS = {
    "too short": (b"abc", r"header of 6513249 bytes, expected at most 0: not a safetensors file, or truncated"),
    "header longer than the file": (safetensors_bytes(HEADER, length=10_000), r"header of 10000 bytes, expected at"),
    "absurd header": (safetensors_bytes(HEADER, length=2**63), r"header of 9223372036854775808 bytes"),
    "empty header": (safetensors_bytes(HEADER, length=0), r"the header starts with b'', expected b'\{'"),
    "a list": (raw_header("[1]"), r"the header starts with b'\[', expected b'\{'"),
    "not JSON": (raw_header('{"a": }'), r"header: not valid JSON \(Expecting value"),
    "not UTF-8": (raw_header(b'{"\xff": 1}'), r"header: not UTF-8 text at byte 2"),
    "two objects": (raw_header("{}{}"), r"header: not valid JSON \(Extra data"),
    "deep": (raw_header('{"a":' + "[" * 5000 + "]" * 5000 + "}"), r"header: nested too deeply"),
    "huge integer": (raw_header('{"a":' + "9" * 6000 + "}"), r"header: not valid JSON \(Exceeds the limit"),
    "name twice": (raw_header(f'{{"a":{ENTRY},"a":{ENTRY}}}'), r"header: the key a appears twice"),
    "field twice": (raw_header('{"a":{"dtype":"F32","dtype":"F16"}}'), r"header: the key dtype appears twice"),
    "NaN": (raw_header('{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,16]}}'), r"NaN is not a JSON number"),
    "1e999": (raw_header('{"a":{"dtype":"F32","shape":[1e999],"data_offsets":[0,16]}}'), r"number 1e999 is too large"),
    "metadata not text": (
        safetensors_bytes({"__metadata__": {"a": 1}, **{"a": entry("F32", [4], 0, 16)}}, b"\0" * 16),
        r"__metadata__ must be an object of strings",
    ),
    "no tensors": (safetensors_bytes({}), r"holds no tensors"),
    "only data": (safetensors_bytes({}, b"\0" * 4), r"4 bytes of data and no tensor"),
    "entry is a list": (raw_header('{"a":[1]}'), r"tensor a must have exactly dtype, shape and data_offsets"),
    "unknown field": (one(stride=[1]), r"tensor a must have exactly dtype, shape and data_offsets"),
    "unknown dtype": (one(dtype="F12"), r"tensor a has the unknown dtype 'F12'"),
    "dtype a list": (one(dtype=["F32"]), r"tensor a has the unknown dtype"),
    "shape a number": (one(shape=4), r"tensor a needs a shape of at most 8 dimensions"),
    "nine dimensions": (one(shape=[1] * 9), r"tensor a needs a shape of at most 8 dimensions"),
    "negative dimension": (one(shape=[-4]), r"tensor a has the dimension -4"),
    "dimension 4.0": (one(shape=[4.0]), r"tensor a has the dimension 4\.0"),
    "dimension true": (one(shape=[True, 4]), r"tensor a has the dimension True"),
    "absurd dimension": (one(shape=[2**60]), r"tensor a has the dimension 1152921504606846976"),
    "three offsets": (one(data_offsets=[0, 8, 16]), r"data_offsets of tensor a must be two integers"),
    "offsets of text": (one(data_offsets=["0", 16]), r"data_offsets of tensor a must be two integers"),
    "offset bool": (one(data_offsets=[False, 16]), r"data_offsets of tensor a must be two integers"),
    "negative offset": (one(data_offsets=[-16, 0]), r"tensor a covers data bytes -16 to 0, expected within 0 to 16"),
    "backwards": (one(data_offsets=[16, 0]), r"tensor a covers data bytes 16 to 0"),
    "past the end": (one(data_offsets=[16, 32]), r"tensor a covers data bytes 16 to 32, expected within 0 to 16"),
    "too short for the shape": (one(shape=[3]), r"shape \[3\] and dtype F32 takes 12 bytes, data_offsets give 16"),
    "overlap": (
        safetensors_bytes({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 12, 28)}, b"\0" * 28),
        r"tensors a and b overlap",
    ),
    "same place": (
        safetensors_bytes({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 0, 16)}, b"\0" * 16),
        r"tensors a and b overlap",
    ),
    "hole at the start": (
        safetensors_bytes({"a": entry("F32", [4], 4, 20)}, b"\0" * 20),
        r"4 unused bytes before tensor a",
    ),
    "hole between": (
        safetensors_bytes({"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 20, 36)}, b"\0" * 36),
        r"4 unused bytes before tensor b",
    ),
    "bytes at the end": (one() + b"\0\0", r"2 unused bytes after the last tensor"),
    "data cut off": (safetensors_bytes(HEADER, VALUES[:-1]), r"tensor b covers data bytes 16 to 24, expected within"),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_defects(tmp_path: Path, name: str) -> None:
    """Every defect is one line that names the file and what is wrong, with the exit code for files."""
    content, message = DEFECTS[name]
    folder = safetensors_folder(tmp_path / "m", content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.exit_code == 3


NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def sharded(folder: Path, weight_map: Any = None, **shards: bytes) -> Path:
    """Write a model of two files, a and b in the first, c in the second, and an index."""
    folder.mkdir()
    first = safetensors_bytes(HEADER, VALUES)
    second = safetensors_bytes({"c": entry("F32", [1], 0, 4)}, np.float32(7).tobytes())
    (folder / NAMES[0]).write_bytes(shards.get("first", first))
    (folder / NAMES[1]).write_bytes(shards.get("second", second))
    (folder / "config.json").write_text("{}")
    names = {"a": NAMES[0], "b": NAMES[0], "c": NAMES[1]} if weight_map is None else weight_map
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": names}))
    return folder


@pytest.mark.parametrize("given", ["", INDEX_NAME, NAMES[1]])
def test_sharded_model_opens_by_folder_index_or_shard(tmp_path: Path, given: str) -> None:
    """Guards against tensors read from the wrong file, and against one shard passing for a whole model."""
    folder = sharded(tmp_path / "m")
    checkpoint = open_checkpoint(folder / given)
    assert [path.name for path in checkpoint.files] == list(NAMES)
    assert checkpoint.array("c").tolist() == [7]
    assert checkpoint.array("a").tolist() == [[1, 2], [3, 4]]


def test_files_outside_the_index_are_noted(tmp_path: Path) -> None:
    """Some repositories hold the weights twice; the second copy is not read, and that is said."""
    folder = sharded(tmp_path / "m")
    (folder / "consolidated.safetensors").write_bytes(b"not even a header")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == ("not part of this model, not read: consolidated.safetensors",)


INDEX_DEFECTS: dict[str, tuple[Any, str]] = {
    "file missing": ({"a": "x.safetensors"}, r"lists files that are not there: x\.safetensors"),
    "tensor missing": (
        {"a": NAMES[0], "b": NAMES[0], "c": NAMES[1], "d": NAMES[1]},
        r"1 tensors are not in the file that the index names, first d in model-00002",
    ),
    "tensor elsewhere": (
        {"a": NAMES[0], "b": NAMES[1], "c": NAMES[1]},
        r"1 tensors are not in the file that the index names, first b in model-00002",
    ),
    "tensor not listed": ({"a": NAMES[0], "c": NAMES[1]}, r"tensors in the files but not in the index: b"),
    "not an object": ([], r"expected a JSON object with a weight_map"),
    "empty": ({}, r"expected a JSON object with a weight_map"),
    "file not text": ({"a": 1}, r"the file of tensor a is not a string"),
    "path up": ({"a": "../model.safetensors"}, r"\.\./model\.safetensors is not the name of a safetensors file in"),
    "absolute path": ({"a": "/etc/passwd.safetensors"}, r"is not the name of a safetensors file in this folder"),
    "other kind": ({"a": "pytorch_model.bin"}, r"pytorch_model\.bin is not the name of a safetensors file"),
}


@pytest.mark.parametrize("name", INDEX_DEFECTS)
def test_index_defects(tmp_path: Path, name: str) -> None:
    """An index and its files that do not agree is an incomplete download, or an attack."""
    weight_map, message = INDEX_DEFECTS[name]
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(sharded(tmp_path / "m", weight_map))


def test_name_in_two_shards(tmp_path: Path) -> None:
    """Which of two tensors of one name is meant cannot be known."""
    second = safetensors_bytes({"a": entry("F32", [1], 0, 4)}, b"\0" * 4)
    with pytest.raises(CheckpointError, match="2 tensors are named a"):
        open_checkpoint(sharded(tmp_path / "m", second=second))


def test_config_is_required_and_strict(tmp_path: Path) -> None:
    """What a config says twice or as NaN has no meaning; which fields it needs is for the model to say."""
    folder = safetensors_folder(tmp_path / "m")
    for text, message in (
        ('{"a": 1, "a": 2}', r"config\.json: the key a appears twice"),
        ('{"a": NaN}', r"config\.json: NaN is not a JSON number"),
        ('{"a": -Infinity}', r"config\.json: -Infinity is not a JSON number"),
        ("[]", r"config\.json: expected a JSON object"),
        ('{"a"', r"config\.json: not valid JSON"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json in"):
        open_checkpoint(folder)
