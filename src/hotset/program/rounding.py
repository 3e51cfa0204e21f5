"""Rounding of activations to narrow formats and back, in NumPy float32.

Two uses. *Products* round their input rows: to BF16 for FP8 and BF16 weights, to int8 per 32 inputs for quantised ones.
*Rows* of the cache are rounded as DeepSeek-V4 was trained to expect ("fake quantisation"); see :func:`round_kv_row` and
:func:`round_index_row`. Source: specs/deepseek_v4.md section 2.0. Inputs are finite.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hotset.errors import InternalError
from hotset.program.rows import FP4_GROUP, FP8_GROUP, KV_FORMATS

Floats = NDArray[np.float32]

SMALLEST_RUN = np.float32(1e-30)
E4M3_MAX, E2M1_MAX = np.float32(448), np.float32(6)
BF16_MAX = np.float32(3.3895313892515355e38)
SCALED_MAX = np.float32(448 * 2.0**119)
"""The largest e4m3 times a power of two that is a BF16 number."""
NIBBLE_MAX = np.float32(6 * 2.0**125)
"""The same for e2m1."""
E4M3_FLOOR = np.float32(1e-4)
"""Rows whose largest channel is smaller get the scale of this one."""
E2M1_FLOOR = np.float32(6 * 2.0**-126)


def round_bf16(x: Floats) -> Floats:
    """Nearest BF16, ties to even, as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32)


def round_q8(x: Floats) -> Floats:
    """Each run of 32 inputs as int8 times one float scale, max |x| / 127; ties to even; runs below 1e-30 are zero."""
    blocks = x.reshape(*x.shape[:-1], -1, 32)
    top = np.abs(blocks).max(-1, keepdims=True)
    top = np.where(top < SMALLEST_RUN, np.float32(0), top)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    q = np.rint(blocks * inverse)
    return (q * (top / np.float32(127))).reshape(x.shape).astype(np.float32)


def _round_float(x: Floats, largest: np.float32, min_exponent: int, mantissa_bits: int) -> Floats:
    """Nearest number of a small float format, ties to even, saturating; ``min_exponent`` is that of subnormals."""
    x = np.clip(x, -largest, largest)
    exponent = np.maximum(np.frexp(x)[1] - 1, min_exponent)
    step = np.ldexp(np.float32(1), exponent - mantissa_bits)
    return (np.rint(x / step) * step).astype(np.float32)


def round_e4m3(x: Floats) -> Floats:
    """Nearest e4m3: 448 at most, subnormals in steps of 2^-9."""
    return _round_float(x, E4M3_MAX, -6, 3)


def round_e2m1(x: Floats) -> Floats:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    return _round_float(x, E2M1_MAX, 0, 1)


def power_scale(top: Floats, largest: np.float32, floor: np.float32) -> Floats:
    """The smallest power of two s with ``max(top, floor) <= largest s``, within e8m0 (2^-127 .. 2^127)."""
    mantissa, exponent = np.frexp(np.maximum(top, floor) / largest)
    exponent = exponent - (mantissa == 0.5)
    return np.ldexp(np.float32(1), np.clip(exponent, -127, 127))


def _round_groups(
    x: Floats, size: int, largest: np.float32, floor: np.float32, nearest: Callable[[Floats], Floats]
) -> Floats:
    groups = x.reshape(*x.shape[:-1], -1, size)
    scale = power_scale(np.abs(groups).max(-1, keepdims=True), largest, floor)
    return (nearest(groups / scale) * scale).reshape(x.shape)


def round_e4m3_groups(x: Floats, size: int) -> Floats:
    """Groups of ``size`` channels as e4m3 with a power-of-two scale."""
    return _round_groups(x, size, E4M3_MAX, E4M3_FLOOR, round_e4m3)


def round_e2m1_groups(x: Floats, size: int = FP4_GROUP) -> Floats:
    """Groups of 32 channels as e2m1 with a power-of-two scale."""
    return _round_groups(x, size, E2M1_MAX, E2M1_FLOOR, round_e2m1)


def hadamard(x: Floats) -> Floats:
    """Rows times the Walsh-Hadamard matrix in natural order, times width^-0.5; the width is a power of two."""
    width = x.shape[-1]
    out = x
    step = 1
    while step < width:
        pairs = out.reshape(*x.shape[:-1], -1, 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = np.stack((first + second, first - second), axis=-2).reshape(x.shape)
        step *= 2
    return out * np.float32(width**-0.5)


def round_kv_row(format: str, x: Floats, plain: int) -> Floats:
    """Rows [..., width] as a kv row of that format returns them.

    Every channel is rounded to BF16 first (and kept finite: an infinite row would reach other queries as 0 times
    infinity), as the rows of the official code are BF16 tensors. Then the ``plain``
    channels are rounded to e4m3 in groups of 64 ("FP8" and "BF16": these two hold the same values), to e2m1 in groups
    of 32 ("FP4"), or not at all ("BF16-exact").
    """
    if format not in KV_FORMATS:
        raise InternalError(f"kv rows in {format}")
    most = {"BF16-exact": BF16_MAX, "FP4": NIBBLE_MAX}.get(format, SCALED_MAX)
    x = round_bf16(np.clip(x, -most, most))
    if format == "BF16-exact":
        return x
    first = x[..., :plain]
    rounded = round_e2m1_groups(first) if format == "FP4" else round_e4m3_groups(first, FP8_GROUP)
    return np.concatenate([rounded, x[..., plain:]], axis=-1)


def round_index_row(format: str, x: Floats) -> Floats:
    """Rows [..., width], keys or queries of the indexer, transformed and rounded as index rows of that format.

    "MXFP4": Hadamard, then e2m1 in groups of 32; "FP8": Hadamard, then e4m3 with one scale; "BF16-exact": BF16 alone.
    In exact arithmetic the transform leaves products of keys and queries as they are.
    """
    match format:
        case "MXFP4":
            return round_e2m1_groups(hadamard(x))
        case "FP8":
            return round_e4m3_groups(hadamard(x), x.shape[-1])
        case "BF16-exact":
            return round_bf16(np.clip(x, -BF16_MAX, BF16_MAX))
    raise InternalError(f"index rows in {format}")
