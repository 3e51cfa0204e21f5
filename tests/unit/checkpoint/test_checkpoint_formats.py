"""The format table and the decoders, with gguf-py as the judge."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.checkpoint.formats import (
    BY_GGML_TYPE,
    E2M1_DOUBLED,
    E4M3,
    E8M0,
    FORMATS,
    REMOVED_GGML_TYPES,
    RUNNABLE,
    dequantize,
)
from hotset.errors import CheckpointError

QUANTISED = ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4"]
HALF_SCALED = ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]
# Where the half-precision scales lie in a block.
SCALES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}
# Zero, smallest and largest subnormal, smallest normal, largest, infinity, and the NaN that is all ones.
EXTREME_HALVES = [0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0xFFFF]


def oracle(name: str, raw: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.dequantize(raw, GGMLQuantizationType[name])


def assert_equal_bits(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal as bits, except that any NaN equals any NaN; array_equal would take -0 for 0."""
    assert found.dtype == expected.dtype == np.float32
    assert found.shape == expected.shape
    different = (found.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(found) & np.isnan(expected))
    assert not different.any()


@pytest.mark.parametrize("name", QUANTISED)
@given(seed=st.integers(0, 2**32 - 1), num_rows=st.integers(1, 5), num_blocks=st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_decoders_equal_gguf_py(name: str, seed: int, num_rows: int, num_blocks: int) -> None:
    """Any bytes are valid blocks. Guards against a nibble, sub-block or scale taken from the wrong place."""
    format = FORMATS[name]
    raw = np.random.default_rng(seed).integers(0, 256, (num_rows, num_blocks * format.block_bytes), np.uint8)
    shape = (num_rows, num_blocks * format.block_weights)
    assert_equal_bits(dequantize(format, raw.reshape(-1), shape), oracle(name, raw))


@pytest.mark.parametrize("name", HALF_SCALED)
def test_decoders_equal_gguf_py_at_extreme_scales(name: str) -> None:
    """Guards against another order of the products: it shows at subnormal scales, infinities and overflow."""
    format = FORMATS[name]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (len(EXTREME_HALVES) ** len(SCALES[name]), format.block_bytes), np.uint8)
    grid = np.meshgrid(*[np.array(EXTREME_HALVES, "<u2")] * len(SCALES[name]))
    for start, halves in zip(SCALES[name], grid, strict=True):
        blocks[:, start : start + 2] = halves.reshape(-1, 1).view(np.uint8)
    assert_equal_bits(dequantize(format, blocks.reshape(-1), (len(blocks), format.block_weights)), oracle(name, blocks))


def test_every_mxfp4_scale_and_code() -> None:
    """All 256 scale bytes with all 16 codes; guards against a scale off by the factor two that hides in the table."""
    blocks = np.zeros((256, 17), np.uint8)
    blocks[:, 0] = np.arange(256)
    blocks[:, 1:] = np.arange(16) | np.arange(16)[::-1] << 4
    found = dequantize(FORMATS["MXFP4"], blocks.reshape(-1), (256, 32))
    assert_equal_bits(found, oracle("MXFP4", blocks))
    assert found[127, :8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found[128, 16:20].tolist() == [-12, -8, -6, -4]


def test_small_floats_equal_ml_dtypes() -> None:
    """Every e4m3, e2m1 and e8m0 code against another implementation: subnormals, NaN, the largest of each."""
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(E4M3, codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(E2M1_DOUBLED / 2, codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    np.testing.assert_array_equal(E8M0, codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))
    assert (np.nanmax(E4M3), E4M3[1], E2M1_DOUBLED.max(), E8M0[0]) == (448, 2.0**-9, 12, 2.0**-127)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1"])
def test_weights_quantised_by_gguf_py(name: str) -> None:
    """A block that gguf-py wrote comes back within half a step of the weights, not only equal to its decoder."""
    weights = np.random.default_rng(3).standard_normal((16, 96)).astype(np.float32)
    raw = gguf.quantize(weights, GGMLQuantizationType[name])
    found = dequantize(FORMATS[name], raw.reshape(-1), weights.shape)
    assert_equal_bits(found, oracle(name, raw))
    step = np.abs(weights).max() / (127 if name == "Q8_0" else 7)
    assert np.abs(found - weights).max() <= step


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_16_bit_number(name: str) -> None:
    """All 65,536 values: subnormals, infinities, negative zero."""
    raw = np.arange(65536, dtype="<u2").view(np.uint8)
    assert_equal_bits(dequantize(FORMATS[name], raw, (256, 256)), oracle(name, raw).reshape(256, 256))


def test_large_tensors_are_decoded_in_parts() -> None:
    """Guards against a lost or doubled block where one part ends and the next begins."""
    format = FORMATS["Q4_0"]
    raw = np.random.default_rng(5).integers(0, 256, (3000, 10 * format.block_bytes), np.uint8)
    assert_equal_bits(dequantize(format, raw.reshape(-1), (3000, 320)), oracle("Q4_0", raw))


def test_f32_is_a_copy() -> None:
    """Guards against handing out a view: raw bytes of a closed file must not be reachable through an array."""
    raw = np.arange(4, dtype="<f4").view(np.uint8)
    found = dequantize(FORMATS["F32"], raw, (2, 2))
    raw[:] = 255
    assert found.tolist() == [[0, 1], [2, 3]]
    assert dequantize(FORMATS["F32"], np.zeros(4, np.uint8), ()).shape == ()


def test_every_ggml_type_is_named_with_its_size() -> None:
    """A type that the table does not know is refused as unknown, and offsets behind it cannot be checked."""
    assert {type_id: f.name for type_id, f in BY_GGML_TYPE.items()} == {t.value: t.name for t in GGMLQuantizationType}
    # gguf-py 0.19 gives Q8_1 two floats; ggml's block_q8_1 has had two halves since 2024. No file holds it.
    sizes = {**GGML_QUANT_SIZES, GGMLQuantizationType.Q8_1: (32, 2 + 2 + 32)}
    for type_id, size in sizes.items():
        format = BY_GGML_TYPE[type_id]
        assert (format.block_weights, format.block_bytes) == size, format.name
    assert not REMOVED_GGML_TYPES.keys() & BY_GGML_TYPE.keys()
    assert set(RUNNABLE) == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K", "MXFP4"}


def test_sizes() -> None:
    """Byte counts that plans rest on; a row that does not fill its blocks has no byte count."""
    assert FORMATS["Q4_K"].row_bytes(512) == 288
    assert FORMATS["Q4_1"].nbytes((576, 576)) == 576 * 18 * 20
    assert FORMATS["F4"].nbytes((3, 8)) == 12
    assert FORMATS["F32"].nbytes(()) == 4
    with pytest.raises(CheckpointError, match="a row of 576 weights does not fill whole Q4_K blocks of 256"):
        FORMATS["Q4_K"].row_bytes(576)


def test_refusals() -> None:
    """Formats without a decoder and wrong lengths are refused, not read as something else."""
    with pytest.raises(CheckpointError, match="Q5_K cannot be expanded; hotset runs F32, F16, BF16, Q8_0"):
        dequantize(FORMATS["Q5_K"], np.zeros(176, np.uint8), (256,))
    with pytest.raises(CheckpointError, match="takes 34 bytes, found 35"):
        dequantize(FORMATS["Q8_0"], np.zeros(35, np.uint8), (32,))
