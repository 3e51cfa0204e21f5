"""Weights with scales of their own: values, refusals, and their place in the account."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import entry, safetensors_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.checkpoint import Account, Checkpoint, TensorDecl, account, open_checkpoint
from hotset.checkpoint.manifest import declared_formats, formats_of
from hotset.checkpoint.scaled import check_ids, check_scales, expand, scale_shape, weight_array
from hotset.errors import CheckpointError, InternalError


def bytes_of(seed: int, *shape: int, low: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, shape, np.uint8)


def plain_fp8(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """W[o, i] = e4m3 scale[o // 128, i // 128], one element at a time."""
    values = weight.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    factors = scale.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    return np.array(
        [[values[o, i] * factors[o // 128, i // 128] for i in range(weight.shape[1])] for o in range(weight.shape[0])]
    )


def plain_mxfp4(weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Input 2i is the low nibble of byte i; sign, then a code into the eight magnitudes."""
    magnitudes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    out = np.zeros((weight.shape[0], 2 * weight.shape[1]))
    for o, i in np.ndindex(out.shape):
        nibble = int(weight[o, i // 2]) >> (4 * (i % 2)) & 15
        value = magnitudes[nibble & 7] * (-1 if nibble & 8 else 1)
        out[o, i] = value * 2.0 ** (int(scale[o, i // 32]) - 127)
    return out


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 260), columns=st.integers(1, 300))
@settings(max_examples=15, deadline=None)
def test_fp8_with_ragged_edges(seed: int, rows: int, columns: int) -> None:
    """Blocks that the matrix does not fill; guards against a scale of the neighbouring block."""
    weight = bytes_of(seed, rows, columns)
    scale = bytes_of(seed + 1, *scale_shape("FP8", (rows, columns)), low=67, high=188)
    found = expand("FP8", weight, scale, (rows, columns))
    np.testing.assert_array_equal(found, plain_fp8(weight, scale).astype(np.float32))
    assert found.dtype == np.float32


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 140), runs=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_mxfp4_nibble_order_and_scales(seed: int, rows: int, runs: int) -> None:
    """Guards against high nibbles first, halves instead of neighbours, and scales by column."""
    weight, scale = bytes_of(seed, rows, 16 * runs), bytes_of(seed + 1, rows, runs, low=67, high=188)
    found = expand("MXFP4", weight, scale, (rows, 32 * runs))
    np.testing.assert_array_equal(found, plain_mxfp4(weight, scale).astype(np.float32))


def test_known_values() -> None:
    """By hand: 0x38 is 1 in e4m3, 0x7E is 448; nibbles 2 and 0xF are 1 and -6."""
    fp8 = expand("FP8", np.array([[0x38, 0x7E]], np.uint8), np.array([128], np.uint8), (1, 2))
    assert fp8.tolist() == [[2, 896]]
    packed = np.full((1, 16), 0xF2, np.uint8)
    assert expand("MXFP4", packed, np.array([126], np.uint8), (1, 32))[0, :4].tolist() == [0.5, -3, 0.5, -3]


def test_wrong_sizes_are_refused() -> None:
    weight = np.zeros(64, np.uint8)
    for stored_as, num_scales, shape in (("FP8", 2, (1, 64)), ("MXFP4", 5, (1, 128)), ("MXFP4", 4, (1, 130))):
        with pytest.raises(CheckpointError, match=f"a {stored_as} matrix of 1x{shape[1]} takes"):
            expand(stored_as, weight, np.full(num_scales, 127, np.uint8), shape)
    with pytest.raises(InternalError, match="Q4_0 weights have no scales"):
        expand("Q4_0", weight, weight, (1, 64))


@pytest.mark.parametrize(("byte", "words"), [(255, "NaN"), (188, r"2\^61")])
def test_bad_scales_are_named(byte: int, words: str) -> None:
    """One such byte turns every product of its block into NaN or infinity, long after the load. A block of zeros
    may have any small scale."""
    scales = np.full(1000, 127, np.uint8)
    scales[:2] = 0, 187
    check_scales(scales, "w.scale")
    scales[777] = byte
    with pytest.raises(CheckpointError, match=rf"1 of the 1000 scales in w\.scale are {words}"):
        check_scales(scales, "w.scale")
    check_scales(scales[:0], "empty")
    with pytest.raises(CheckpointError, match=r"2 of the 3 scales in hole are 2\^-127"):
        check_scales(np.array([0, 0, 127], np.uint8), "hole")


def test_expert_ids_out_of_range_are_refused() -> None:
    """The executor addresses memory with them."""
    assert check_ids(np.array([[0, 7]]), 8, "t").dtype == np.int32
    for bad in (-1, 8, 1 << 40):
        with pytest.raises(CheckpointError, match=f"t holds expert ids from .*{bad}.* expected 0 to 7"):
            check_ids(np.array([[3, bad]]), 8, "t")


# A model of one FP8 matrix, two MXFP4 experts, a norm and a table.
SHAPES: dict[str, tuple[str, list[int]]] = {
    "wq.weight": ("F8_E4M3", [256, 160]),
    "wq.scale": ("F8_E8M0", [2, 2]),
    "experts.0.w1.weight": ("I8", [4, 16]),
    "experts.0.w1.scale": ("F8_E8M0", [4, 1]),
    "experts.1.w1.weight": ("I8", [4, 16]),
    "experts.1.w1.scale": ("F8_E8M0", [4, 1]),
    "norm.weight": ("F32", [4]),
    "tid2eid": ("I64", [3, 2]),
    "mtp.0.norm.weight": ("F32", [4]),
}
SIZES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "F32": 4, "I64": 8}


def scaled(key: str, name: str, shape: tuple[int, int], stored_as: str) -> tuple[TensorDecl, TensorDecl]:
    file_shape, format = (shape, "F8_E4M3") if stored_as == "FP8" else ((shape[0], shape[1] // 2), "I8")
    weight = TensorDecl(
        key, f"{name}.weight", file_shape, "linear", (format,), stored_as=stored_as, scale=f"{key}.scale"
    )
    scales = scale_shape(stored_as, shape)
    return weight, TensorDecl(f"{key}.scale", f"{name}.scale", scales, "scale", ("F8_E8M0",))


DECLARATIONS = (
    *scaled("layers.0.wq", "wq", (256, 160), "FP8"),
    *scaled("layers.0.experts.w1.0", "experts.0.w1", (4, 32), "MXFP4"),
    *scaled("layers.0.experts.w1.1", "experts.1.w1", (4, 32), "MXFP4"),
    TensorDecl("norm", "norm.weight", (4,), "norm", ("F32",)),
    TensorDecl("tid2eid", "tid2eid", (3, 2), "table", ("I64", "I32")),
    TensorDecl("mtp.0.norm", "mtp.0.norm.weight", (4,), "norm", ("F32",), need="spare", reason="draft head, not used"),
)


def write(folder: Path, shapes: dict[str, tuple[str, list[int]]], *, hole: str = "") -> Path:
    """Write a checkpoint; a byte 127 everywhere is a scale of one. ``hole`` names a tensor with 8 bytes before it."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in shapes.items():
        at += 8 if name == hole else 0
        size = SIZES[dtype] * int(np.prod(shape))
        header[name] = entry(dtype, shape, at, at + size)
        at += size
    folder.mkdir(exist_ok=True)
    data = np.full(at, 127, np.uint8)
    ids = header["tid2eid"]["data_offsets"]
    data[slice(*ids)] = np.arange(6, dtype="<i8").view(np.uint8)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data.tobytes()))
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    return folder


def opened(folder: Path) -> tuple[Checkpoint, Account]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, account(checkpoint, DECLARATIONS)


def test_formats_and_arrays_of_a_model(tmp_path: Path) -> None:
    """Scales belong to their weight, a stack has its parts' format, a spare tensor is there and not loaded."""
    checkpoint, result = opened(write(tmp_path / "m", SHAPES))
    expected = {
        "layers.0.wq": "FP8", "layers.0.experts.w1.0": "MXFP4", "layers.0.experts.w1.1": "MXFP4",
        "layers.0.experts.w1": "MXFP4", "norm": "F32", "tid2eid": "I64",
    }  # fmt: skip
    assert formats_of(DECLARATIONS, result) == expected
    assert declared_formats(DECLARATIONS) == expected
    assert [(info.name, reason) for info, reason in result.ignored] == [("mtp.0.norm.weight", "draft head, not used")]
    assert "mtp.0.norm" not in result.loaded and "layers.0.wq.scale" in result.loaded
    wq = weight_array(checkpoint, result, "layers.0.wq")
    assert wq.shape == (256, 160) and np.isnan(wq).all()  # e4m3 0x7F
    assert weight_array(checkpoint, result, "layers.0.experts.w1.1").tolist() == [[-6, 6] * 16] * 4
    ids = weight_array(checkpoint, result, "tid2eid")
    assert (ids.dtype, ids.tolist()) == (np.int32, [[0, 1], [2, 3], [4, 5]])


def test_bad_scales_stop_the_expansion(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", SHAPES)
    file = folder / "model.safetensors"
    checkpoint, result = opened(folder)
    data = bytearray(file.read_bytes())
    data[result.loaded["layers.0.wq.scale"].offset + 3] = 255
    checkpoint.close()
    file.write_bytes(data)
    checkpoint, result = opened(folder)
    with pytest.raises(CheckpointError, match=r"1 of the 4 scales in wq\.scale are NaN"):
        weight_array(checkpoint, result, "layers.0.wq")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"wq.scale": None}, r"1 missing: wq\.scale$"),
        ({"mtp.0.norm.weight": None}, r"1 missing: mtp\.0\.norm\.weight$"),
        ({"mtp.0.norm.weight": ("F32", [5])}, r"1 wrong shape: mtp\.0\.norm\.weight is 5, expected 4$"),
        (
            {"wq.weight": ("F8_E4M3", [160, 256])},
            r"1 wrong shape: wq\.weight is 160x256, expected 256x160 \(the same dimensions in another order\)$",
        ),
        (
            {"experts.1.w1.weight": ("F8_E4M3", [4, 16])},
            r"1 wrong format: experts\.1\.w1\.weight is F8_E4M3, expected I8, the form of MXFP4 weights$",
        ),
        ({"wq.scale": ("I8", [2, 2])}, r"1 wrong format: wq\.scale is I8, expected F8_E8M0$"),
        ({"wq.weight_scale_inv": ("F32", [1])}, r"1 not expected: wq\.weight_scale_inv$"),
    ],
)
def test_defects_are_named(tmp_path: Path, change: dict[str, tuple[str, list[int]] | None], words: str) -> None:
    """Other engines load such files and answer with noise, or fail with a key of their own."""
    shapes = {name: value for name, value in {**SHAPES, **change}.items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        opened(write(tmp_path / "m", shapes))
    assert re.search(words, caught.value.message)


def test_a_hole_in_a_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"8 unused bytes before tensor experts\.1\.w1\.weight"):
        open_checkpoint(write(tmp_path / "m", SHAPES, hole="experts.1.w1.weight"))


def test_experts_in_two_formats_are_refused(tmp_path: Path) -> None:
    """A stack has one kernel; the first part must not decide for the others."""
    shapes = {"experts.0.w1.weight": ("BF16", [4, 32]), "experts.1.w1.weight": ("F32", [4, 32])}
    header, at = {}, 0
    for name, (dtype, shape) in shapes.items():
        size = 128 * (2 if dtype == "BF16" else 4)
        header[name] = entry(dtype, shape, at, at + size)
        at += size
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(header, bytes(at)))
    (tmp_path / "config.json").write_text("{}")
    declarations = [
        TensorDecl(f"w1.{e}", f"experts.{e}.w1.weight", (4, 32), "linear", ("F32", "BF16")) for e in range(2)
    ]
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.1\.w1\.weight is F32 and others of w1 are BF16"):
        formats_of(declarations, account(checkpoint, declarations))
