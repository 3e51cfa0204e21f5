"""Bytes of rows, and the rounding of activations: against ml_dtypes, which has the small float formats."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hotset.errors import InternalError
from hotset.program.rounding import (
    Floats,
    hadamard,
    power_scale,
    round_bf16,
    round_e2m1,
    round_e4m3,
    round_index_row,
    round_kv_row,
)
from hotset.program.rows import KV_FORMATS, index_row, kv_row, state_row_bytes


def spread(*shape: int, seed: int = 1) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("format", "num_bytes"), [("FP8", 584), ("BF16", 1024), ("FP4", 368), ("BF16-exact", 1024)])
def test_bytes_of_the_released_kv_row(format: str, num_bytes: int) -> None:
    """specs/deepseek_v4.md section 4.2: 448 plain and 64 rotary channels."""
    row = kv_row(format, 512, 448)
    assert row.row_bytes == num_bytes
    if format == "FP8":
        assert (row.data_bytes, row.scale_bytes) == (576, 8)


@pytest.mark.parametrize(("format", "num_bytes"), [("MXFP4", 68), ("FP8", 132), ("BF16-exact", 256)])
def test_bytes_of_the_released_index_row(format: str, num_bytes: int) -> None:
    assert index_row(format, 128).row_bytes == num_bytes


def test_other_rows_are_refused() -> None:
    with pytest.raises(InternalError, match="kv rows in Q8_0, expected one of FP8, BF16, FP4, BF16-exact"):
        kv_row("Q8_0", 512, 448)
    with pytest.raises(InternalError, match="80 channels with 40 plain ones, expected a multiple of 64"):
        kv_row("FP8", 80, 40)
    with pytest.raises(InternalError, match="index rows in BF16"):
        index_row("BF16", 128)
    assert state_row_bytes(1024) == 8192


def test_e4m3_is_the_nearest_with_ties_to_even() -> None:
    """All 65,536 half-way cases and their neighbours; beyond 448 it saturates where ml_dtypes gives NaN."""
    codes = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (codes[1:] + codes[:-1]) / 2
    x = np.concatenate([codes, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.float32(999))])
    x = np.concatenate([x, -x, spread(50_000) * 30])
    want = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(round_e4m3(x), want)
    assert round_e4m3(np.array([464, 1e9, -1e9], np.float32)).tolist() == [448, 448, -448]


def test_e2m1_is_the_nearest_with_ties_to_even() -> None:
    x = np.concatenate([np.arange(-6, 6.01, 1 / 64, dtype=np.float32), spread(10_000)])
    want = x.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(round_e2m1(x), want)
    assert round_e2m1(np.array([5, 2.5, 0.25, 7, -9], np.float32)).tolist() == [4, 2, 0, 6, -6]


def test_scales_are_the_smallest_power_of_two_that_does_not_clip() -> None:
    """At 448 times a power of two the scale is that power; one step above it is the next."""
    top = np.float32(448)
    x = np.array([448, np.nextafter(top, np.float32(999)), 447, 3.5, 0, 1e-5], np.float32)
    got = power_scale(x, top, np.float32(1e-4))
    assert got[:4].tolist() == [1, 2, 1, 2**-7]
    assert got[4] == got[5] == 2.0 ** np.ceil(np.log2(1e-4 / 448))
    assert power_scale(np.float32([0]), np.float32(6), np.float32(6 * 2.0**-126))[0] == 2.0**-126


@pytest.mark.parametrize("width", [16, 128])
def test_hadamard_is_the_sylvester_matrix_and_its_own_inverse(width: int) -> None:
    """Natural order: entry (i, j) has the sign of the parity of i AND j."""
    x = spread(3, width)
    signs = np.array([[(-1.0) ** (i & j).bit_count() for j in range(width)] for i in range(width)])
    np.testing.assert_allclose(hadamard(x), x @ signs / np.sqrt(width), atol=2e-6)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=2e-6)


def test_a_kv_row_is_rounded_in_groups_of_64_up_to_the_rotary_channels() -> None:
    """BF16 first, then e4m3 with one scale per group; rotary channels stay BF16; FP8 and BF16 rows hold the same."""
    x = spread(5, 144) * np.repeat(np.array([1e-6, 300, 1], np.float32), [64, 64, 16])
    got = round_kv_row("FP8", x, 128)
    np.testing.assert_array_equal(round_kv_row("BF16", x, 128), got)
    rounded = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(got[:, 128:], rounded[:, 128:])
    for row in range(5):
        for group in (slice(0, 64), slice(64, 128)):
            values = rounded[row, group]
            scale = 2.0 ** np.ceil(np.log2(max(np.abs(values).max(), 1e-4) / 448))
            want = (values / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
            np.testing.assert_array_equal(got[row, group], want.astype(np.float32))
    np.testing.assert_array_equal(round_bf16(got), got)
    np.testing.assert_array_equal(round_kv_row("BF16-exact", x, 128), rounded)


def test_a_4_bit_kv_row_has_a_scale_per_32() -> None:
    x = round_bf16(spread(4, 80) * np.repeat(np.array([1, 50, 1], np.float32), [32, 32, 16]))
    got = round_kv_row("FP4", x, 64)
    np.testing.assert_array_equal(got[:, 64:], x[:, 64:])
    for group in (slice(0, 32), slice(32, 64)):
        scale = 2.0 ** np.ceil(np.log2(np.abs(x[:, group]).max(1, keepdims=True) / 6))
        want = (x[:, group] / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
        np.testing.assert_array_equal(got[:, group], want)


def test_rows_are_finite_whatever_comes() -> None:
    """The largest floats round up in every format: rows clamp before. Guards against 0 times infinity for others."""
    x = np.array([3.4e38, -3.4e38, np.inf, *np.full(125, 1)], np.float32)
    for format in KV_FORMATS:
        assert np.isfinite(round_kv_row(format, x, 64)).all(), format
    assert np.isfinite(round_index_row("BF16-exact", x)).all()


def test_an_index_row_is_transformed_before_it_is_rounded() -> None:
    """Guards the place of the Hadamard matrix: after it values lie on the e2m1 grid, before it they do not."""
    x = spread(6, 128)
    got = round_index_row("MXFP4", x)
    turned = hadamard(x).reshape(6, 4, 32)
    scale = 2.0 ** np.ceil(np.log2(np.abs(turned).max(-1, keepdims=True) / 6))
    want = (turned / scale).astype(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale
    np.testing.assert_array_equal(got, want.reshape(6, 128))
    one_scale = 2.0 ** np.ceil(np.log2(np.abs(turned).max((1, 2)) / 448))[:, None]
    want = (hadamard(x) / one_scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * one_scale
    np.testing.assert_array_equal(round_index_row("FP8", x), want)
    np.testing.assert_array_equal(round_index_row("BF16-exact", x), round_bf16(x))
