"""Weights whose scales are a tensor of their own: FP8 with 128x128 blocks and packed MXFP4, as DeepSeek releases them.

* FP8: e4m3 bytes ``[out, in]``, e8m0 scales ``[ceil(out/128), ceil(in/128)]``; W[o, i] = e4m3 scale[o/128, i/128].
* MXFP4: bytes ``[out, in/2]``, input 2i in the low nibble of byte i, e8m0 scales ``[out, in/32]``.

Weights of other forms ("FP8_F32", "INT4", "INT4_SYM": specs/glm_5_2.md sections 3.2 and 3.3) are checked here and not
expanded yet.

Source: specs/deepseek_v4.md section 3. (The MXFP4 blocks of GGUF files hold their scale inside and order nibbles
otherwise: :func:`hotset.checkpoint.formats.dequantize`.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.formats import E2M1_DOUBLED, E4M3, E8M0, Bytes, Floats
from hotset.checkpoint.manifest import Account
from hotset.checkpoint.tensor import TensorInfo, shown
from hotset.errors import CheckpointError, InternalError

BLOCK = 128
"""Rows and columns that share one FP8 scale."""
RUN = 32
"""Inputs that share one MXFP4 scale."""
PACK_WORD = 8
"""4-bit weights in one I32."""
LARGEST_EXPONENT = 60
"""Kernels multiply scales of weights and inputs as floats; up to 2^60 no product leaves their range."""

_IDS = {"I64": "<i8", "I32": "<i4"}
# Rows expanded at a time: keeps temporaries small beside the result.
_BAND = BLOCK

# Both weights of a packed byte at once: [256, 2] of e2m1 values, the even input first.
_PAIRS = E2M1_DOUBLED[np.stack((np.arange(256) & 15, np.arange(256) >> 4), axis=1)].astype(np.float32) / 2


def scale_shape(stored_as: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the scales of a matrix ``[out, in]``."""
    out_width, in_width = shape
    if stored_as == "FP8":
        return -(-out_width // BLOCK), -(-in_width // BLOCK)
    return out_width, in_width // RUN


def expand(stored_as: str, weight: Bytes, scale: Bytes, shape: tuple[int, ...]) -> Floats:
    """Expand a scaled matrix to a new float32 array.

    Args:
        stored_as: "FP8" or "MXFP4".
        weight: uint8, the bytes of the weight tensor.
        scale: uint8, the bytes of its scales.
        shape: ``(out, in)`` of the matrix; ``in`` of MXFP4 is a multiple of 32.

    Raises:
        CheckpointError: byte counts that do not belong to ``shape``.
    """
    out_width, in_width = shape
    if stored_as not in ("FP8", "MXFP4"):
        raise InternalError(f"{stored_as} weights have no scales of their own")
    width = in_width if stored_as == "FP8" else in_width // 2
    rows, columns = scale_shape(stored_as, shape)
    if (weight.size, scale.size) != (out_width * width, rows * columns) or (width != in_width and in_width % RUN):
        raise CheckpointError(
            f"a {stored_as} matrix of {out_width}x{in_width} takes {out_width * width} bytes and {rows * columns} "
            f"scales, found {weight.size} and {scale.size}"
        )
    weight, factors = weight.reshape(out_width, width), E8M0[scale].reshape(rows, columns)
    out = np.empty((out_width, in_width), np.float32)
    for first in range(0, out_width, _BAND):
        band = slice(first, min(first + _BAND, out_width))
        if stored_as == "FP8":
            out[band] = E4M3[weight[band]] * np.repeat(factors[first // BLOCK], BLOCK)[:in_width]
        else:
            values = _PAIRS[weight[band]].reshape(-1, columns, RUN)
            out[band] = (values * factors[band, :, None]).reshape(-1, in_width)
    return out


def check_scales(scales: Bytes, name: str) -> None:
    """Refuse e8m0 bytes that are NaN or above 2^60, and a tensor most of which is zero; CheckpointError names it.

    Writers give the smallest scales to blocks of zeros, so some are in order. Most of a tensor is a part of a file that
    nobody wrote.
    """
    if not scales.size:
        return
    high, num_unwritten = int(scales.max()), scales.size - int(np.count_nonzero(scales))
    if high > 127 + LARGEST_EXPONENT:
        count = int(np.count_nonzero(scales > 127 + LARGEST_EXPONENT))
        value = "NaN (byte 255)" if high == 255 else f"2^{high - 127}"
    elif 2 * num_unwritten > scales.size:
        count, value = num_unwritten, "2^-127, zero bytes,"
    else:
        return
    raise CheckpointError(
        f"{count} of the {scales.size} scales in {shown(name)} are {value} or the like,"
        f" expected at most 2^{LARGEST_EXPONENT}, and zero bytes for zeros alone",
        "the file is damaged: download it again",
    )


def check_float_scales(scales: Floats, name: str) -> None:
    """Refuse scales that are not finite, or larger than 2^60. CheckpointError names the tensor."""
    bad = ~(np.abs(scales) <= np.float32(2.0**LARGEST_EXPONENT))
    if bad.any():
        count, first = np.count_nonzero(bad), scales[bad].flat[0]
        raise CheckpointError(
            f"{count} of the {scales.size} scales in {shown(name)} are {first} or the like,"
            f" expected finite numbers up to 2^{LARGEST_EXPONENT}",
            "the file is damaged: download it again",
        )


def _check_shape(checkpoint: Checkpoint, account: Account, key: str) -> None:
    """Hold the shape that a packed weight states against the one that it has."""
    info = account.loaded[key]
    packed = account.loaded[key.removesuffix(".shape")].shape
    expected = (packed[0], packed[1] * PACK_WORD)
    found = tuple(np.frombuffer(checkpoint.raw(info.name).tobytes(), "<i8").tolist())
    if found != expected:
        raise CheckpointError(f"{shown(info.name)} says {found}, the weights beside it are {expected}")


def has_block_scales(info: TensorInfo) -> bool:
    """Whether the tensor is MXFP4 in GGUF blocks, whose first byte is an e8m0 scale."""
    return info.format.name == "MXFP4"


def check_block_scales(raw: Bytes, info: TensorInfo) -> None:
    """Refuse GGUF blocks with scales as :func:`check_scales` refuses them; ``raw``: uint8, whole blocks of ``info``."""
    if not has_block_scales(info):
        return
    check_scales(raw.reshape(-1, info.format.block_bytes)[:, 0], info.name)


def check_ids(ids: NDArray[np.int64], num_experts: int, name: str) -> NDArray[np.int32]:
    """Return expert ids as int32; CheckpointError when one is not in ``0 .. num_experts - 1``."""
    if ids.size and (ids.min() < 0 or ids.max() >= num_experts):
        raise CheckpointError(
            f"{shown(name)} holds expert ids from {ids.min()} to {ids.max()}, expected 0 to {num_experts - 1}",
            "the file is damaged: download it again",
        )
    return ids.astype(np.int32)


def check_values(checkpoint: Checkpoint, account: Account) -> int:
    """Check every loaded tensor of scales or ids, or with scales in it; return how many. Raises CheckpointError."""
    count = 0
    for key, decl in account.declared.items():
        info = account.loaded[key]
        if decl.role == "scale" and info.format.name == "F8_E8M0":
            check_scales(checkpoint.raw(info.name), info.name)
        elif decl.role == "scale":
            check_float_scales(checkpoint.values(info), info.name)
        elif decl.role == "shape":
            _check_shape(checkpoint, account, key)
        elif decl.role == "zero":
            continue  # any four bits are a zero point
        elif has_block_scales(info):
            check_block_scales(checkpoint.raw(info.name), info)
        elif info.format.name in _IDS and not decl.stored_as:
            weight_array(checkpoint, account, key)
        else:
            continue
        count += 1
    return count


def weight_array(checkpoint: Checkpoint, account: Account, key: str) -> NDArray[Any]:
    """Return a loaded tensor, or part of a stacked one, expanded: float32 of its shape, or int32 for a table of ids.

    Scales are checked before a weight is multiplied with them. Raises CheckpointError.
    """
    info, decl = account.find(key)
    if decl.stored_as:
        scale = checkpoint.raw(account.loaded[decl.scale].name)
        check_scales(scale, account.loaded[decl.scale].name)
        out_width, width = info.shape
        shape = (out_width, width if decl.stored_as == "FP8" else 2 * width)
        return expand(decl.stored_as, checkpoint.raw(info.name), scale, shape)
    if info.format.name in _IDS:
        # A copy, because an array of 8-byte numbers may not start at any byte of a file.
        ids = np.frombuffer(checkpoint.raw(info.name).tobytes(), _IDS[info.format.name])
        return check_ids(ids.reshape(info.shape).astype(np.int64), np.iinfo(np.int32).max, info.name)
    check_block_scales(checkpoint.view(info), info)
    return checkpoint.values(info)
