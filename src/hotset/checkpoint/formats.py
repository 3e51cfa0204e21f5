"""The one table of number formats: names, sizes, ids in files, and how to expand them to float32.

A file may hold tensors in formats that hotset cannot run; they still have a name and a size here,
so that their place in the file can be checked and a refusal can name them.

Layouts of the GGUF blocks: ggml's ``ggml-common.h``. All numbers are little-endian, "half" is IEEE F16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hotset.errors import CheckpointError

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Format:
    """How numbers are stored: ``block_weights`` of them in every ``block_bytes`` bytes.

    ``ggml_type`` is the type id in GGUF files, ``safetensors_dtype`` the dtype name in safetensors
    headers; None where the format does not exist in that kind of file.
    """

    name: str
    block_weights: int
    block_bytes: int
    ggml_type: int | None = None
    safetensors_dtype: str | None = None

    @property
    def is_runnable(self) -> bool:
        """Whether hotset can compute with it (see :data:`RUNNABLE`)."""
        return self.name in _DECODERS

    def row_bytes(self, num_weights: int) -> int:
        """Return the bytes of one row; CheckpointError when it does not fill whole blocks."""
        if num_weights % self.block_weights:
            raise CheckpointError(
                f"a row of {num_weights} weights does not fill whole {self.name} blocks of {self.block_weights}"
            )
        return num_weights // self.block_weights * self.block_bytes

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a tensor whose rows are its last dimension (a scalar is one row of one)."""
        if not shape:
            return self.row_bytes(1)
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1])


_TABLE = (
    # name, weights per block, bytes per block, GGUF type id, safetensors dtype
    Format("F32", 1, 4, 0, "F32"),
    Format("F16", 1, 2, 1, "F16"),
    Format("BF16", 1, 2, 30, "BF16"),
    Format("Q4_0", 32, 18, 2),
    Format("Q4_1", 32, 20, 3),
    Format("Q5_0", 32, 22, 6),
    Format("Q5_1", 32, 24, 7),
    Format("Q8_0", 32, 34, 8),
    Format("Q8_1", 32, 36, 9),
    Format("Q2_K", 256, 84, 10),
    Format("Q3_K", 256, 110, 11),
    Format("Q4_K", 256, 144, 12),
    Format("Q5_K", 256, 176, 13),
    Format("Q6_K", 256, 210, 14),
    Format("Q8_K", 256, 292, 15),
    Format("IQ2_XXS", 256, 66, 16),
    Format("IQ2_XS", 256, 74, 17),
    Format("IQ3_XXS", 256, 98, 18),
    Format("IQ1_S", 256, 50, 19),
    Format("IQ4_NL", 32, 18, 20),
    Format("IQ3_S", 256, 110, 21),
    Format("IQ2_S", 256, 82, 22),
    Format("IQ4_XS", 256, 136, 23),
    Format("IQ1_M", 256, 56, 29),
    Format("TQ1_0", 256, 54, 34),
    Format("TQ2_0", 256, 66, 35),
    Format("MXFP4", 32, 17, 39),
    Format("NVFP4", 64, 36, 40),
    Format("Q1_0", 128, 18, 41),
    Format("F64", 1, 8, 28, "F64"),
    Format("I8", 1, 1, 24, "I8"),
    Format("I16", 1, 2, 25, "I16"),
    Format("I32", 1, 4, 26, "I32"),
    Format("I64", 1, 8, 27, "I64"),
    Format("U8", 1, 1, None, "U8"),
    Format("U16", 1, 2, None, "U16"),
    Format("U32", 1, 4, None, "U32"),
    Format("U64", 1, 8, None, "U64"),
    Format("BOOL", 1, 1, None, "BOOL"),
    Format("F4", 2, 1, None, "F4"),
    Format("F6_E2M3", 4, 3, None, "F6_E2M3"),
    Format("F6_E3M2", 4, 3, None, "F6_E3M2"),
    Format("F8_E4M3", 1, 1, None, "F8_E4M3"),
    Format("F8_E5M2", 1, 1, None, "F8_E5M2"),
    Format("F8_E8M0", 1, 1, None, "F8_E8M0"),
    Format("F8_E4M3FNUZ", 1, 1, None, "F8_E4M3FNUZ"),
    Format("F8_E5M2FNUZ", 1, 1, None, "F8_E5M2FNUZ"),
    Format("C64", 1, 8, None, "C64"),
    # A program's name for F8_E4M3 weights with one F8_E8M0 scale per 128x128 of them; the scales, a tensor of their
    # own in files, are not counted here. No file names a tensor so.
    Format("FP8", 1, 1),
    # The same with F32 scales, which are not powers of two (specs/glm_5_2.md section 3.2).
    Format("FP8_F32", 1, 1),
    # Names for "pack-quantized" tensors together: eight weights of 4 bits to an I32, a BF16 scale and, if not
    # symmetric, a 4-bit zero point per 32 weights of a row (specs/glm_5_2.md section 3.3).
    Format("INT4", 64, 37),
    Format("INT4_SYM", 32, 18),
)

FORMATS: dict[str, Format] = {format.name: format for format in _TABLE}
BY_GGML_TYPE: dict[int, Format] = {f.ggml_type: f for f in _TABLE if f.ggml_type is not None}
BY_SAFETENSORS_DTYPE: dict[str, Format] = {f.safetensors_dtype: f for f in _TABLE if f.safetensors_dtype is not None}

# Ids that once had a meaning in ggml and were taken back; files with them are too old to be read.
REMOVED_GGML_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


#: Twice the values of e2m1 (4 bits: sign, 2 exponent, 1 mantissa), which makes them integers. OCP MX, table 5.
E2M1_DOUBLED = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)


def _e4m3_values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8.0 + mantissa, exponent - 10))
    size[(code & 127) == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


#: Value of every e4m3 byte: largest 448, smallest step 2^-9, no infinities, 0x7F and 0xFF are NaN. OCP FP8, table 1.
E4M3 = _e4m3_values()
#: Value of every e8m0 byte: 2^(byte - 127), 255 is NaN. OCP MX, table 7.
E8M0 = np.concatenate((np.ldexp(np.float32(1), np.arange(-127, 128)), [np.nan])).astype(np.float32)


def _half(blocks: Bytes, start: int) -> Floats:
    """Return the half at byte ``start`` of every block as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Split ``packed`` [..., m] into nibbles [..., 2, m]: the low ones first, then the high ones."""
    return np.stack((packed & 0x0F, packed >> 4), axis=-2)


def _decode_f32(blocks: Bytes) -> Floats:
    return blocks.view("<f4")


def _decode_f16(blocks: Bytes) -> Floats:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: Bytes) -> Floats:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q8_0(blocks: Bytes) -> Floats:
    """Half d; int8 q[32]. y = d q."""
    return _half(blocks, 0) * np.ascontiguousarray(blocks[:, 2:]).view(np.int8)


def _decode_q4_0(blocks: Bytes) -> Floats:
    """Half d; 16 bytes: low nibbles are y[0:16], high nibbles y[16:32]. y = d (q - 8)."""
    q = _nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * q


def _decode_q4_1(blocks: Bytes) -> Floats:
    """Half d, half m; nibbles as in Q4_0. y = d q + m."""
    q = _nibbles(blocks[:, 4:]).reshape(-1, 32)
    return _half(blocks, 0) * q + _half(blocks, 2)


def _decode_mxfp4(blocks: Bytes) -> Floats:
    """Byte e; nibbles as in Q4_0, each an e2m1 code. y = e2m1 2^(e - 127); as in ggml, e = 255 is no NaN."""
    q = E2M1_DOUBLED[_nibbles(blocks[:, 1:]).reshape(-1, 32)].astype(np.float32)
    return np.ldexp(q, blocks[:, :1].astype(np.int32) - 128)


def _decode_q4_k(blocks: Bytes) -> Floats:
    """Half d, half dmin, 12 bytes of eight 6-bit scales and minima, 128 bytes of nibbles.

    Each 32 bytes of nibbles hold two runs of 32 weights: low ones first. y = (d sc) q - (dmin m).
    """
    s = blocks[:, 4:16]
    scales = np.concatenate((s[:, 0:4] & 63, (s[:, 8:12] & 15) | (s[:, 0:4] >> 6) << 4), axis=1)
    minima = np.concatenate((s[:, 4:8] & 63, (s[:, 8:12] >> 4) | (s[:, 4:8] >> 6) << 4), axis=1)
    d = (_half(blocks, 0) * scales)[:, :, None]
    m = (_half(blocks, 2) * minima)[:, :, None]
    q = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return d * q - m


def _decode_q6_k(blocks: Bytes) -> Floats:
    """Low nibbles ql[128], upper two bits qh[64], int8 scales[16], half d. y = (d sc) (q - 32).

    Each half of the block (64 bytes of ql, 32 of qh) holds four runs of 32 weights.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    q = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    d = (_half(blocks, 208) * scales)[:, :, None]
    return d * q.reshape(-1, 16, 16)


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "F32": _decode_f32,
    "F16": _decode_f16,
    "BF16": _decode_bf16,
    "Q8_0": _decode_q8_0,
    "Q4_0": _decode_q4_0,
    "Q4_1": _decode_q4_1,
    "Q4_K": _decode_q4_k,
    "Q6_K": _decode_q6_k,
    "MXFP4": _decode_mxfp4,
}

RUNNABLE: tuple[str, ...] = tuple(_DECODERS)

# Weights expanded at a time: keeps the integer temporaries of a large tensor within the caches.
_CHUNK_WEIGHTS = 1 << 18


def refusal(name: str, format: Format) -> str:
    """Return the one-line reason why a tensor in a format outside :data:`RUNNABLE` is refused."""
    return f"tensor {name} is {format.name}; hotset runs {', '.join(RUNNABLE)}"


def dequantize(format: Format, raw: Bytes, shape: tuple[int, ...]) -> Floats:
    """Expand the bytes of a tensor to a new float32 array of ``shape``.

    ``raw`` is uint8 [format.nbytes(shape)]. CheckpointError when its length does not match or the
    format is not runnable. The result equals gguf-py's ``dequantize`` bit for bit.
    """
    decode = _DECODERS.get(format.name)
    if decode is None:
        raise CheckpointError(f"{format.name} cannot be expanded; hotset runs {', '.join(RUNNABLE)}")
    expected = format.nbytes(shape)
    if raw.dtype != np.uint8 or raw.size != expected:
        raise CheckpointError(f"{format.name} of shape {shape} takes {expected} bytes, found {raw.nbytes}")
    blocks = np.ascontiguousarray(raw).reshape(-1, format.block_bytes)
    out = np.empty((len(blocks), format.block_weights), np.float32)
    step = max(1, _CHUNK_WEIGHTS // format.block_weights)
    # Any bytes are valid blocks; infinite scales give infinities and NaN, as in ggml, without a warning.
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, len(blocks), step):
            part = blocks[first : first + step]
            out[first : first + step] = decode(part).reshape(len(part), format.block_weights)
    return out.reshape(shape)
