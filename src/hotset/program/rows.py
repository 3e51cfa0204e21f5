"""Formats of compressed, window and index rows: the one table of their bytes.

A *kv row* is key and value in one: ``plain`` channels, then rotary ones. An *index row* is a key of the indexer. Within
a block, or a ring, the scale bytes of all kv rows come after the data bytes of all of them; index rows lie in tiles of
sixteen (``IndexKind`` in native/src/types.h).

    kv rows     FP8         plain e4m3, rotary BF16; one e8m0 scale per 64 plain channels, padded to 8 bytes
                BF16        every channel BF16, values first rounded as FP8 rows are: the same bits in every product
                FP4         plain e2m1 nibbles (even channel low), rotary BF16; one e8m0 scale per 32, padded to 16
                BF16-exact  every channel BF16, no other rounding
                FP8-F32     plain e4m3, one float scale per 128 plain channels, rotary BF16 ("fp8_ds_mla" elsewhere)
    index rows  MXFP4       e2m1 nibbles, one e8m0 scale per 32 channels
                FP8         e4m3 and one float scale, a power of two
                BF16-exact  every channel BF16, no Hadamard transform

Source: specs/deepseek_v4.md sections 2.0 and 4.2, specs/glm_5_2.md section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotset.errors import InternalError
from hotset.units import align_up

KV_FORMATS = ("FP8", "BF16", "FP4", "BF16-exact")
"""Those that rows can be rounded to; FP8-F32 is planned only."""
INDEX_FORMATS = ("MXFP4", "FP8", "BF16-exact")
TRANSFORMED = ("MXFP4", "FP8")
"""Index rows that a Hadamard transform comes before."""
FP8_GROUP = 64
"""Plain channels of a kv row that share a scale."""
FP8_F32_GROUP = 128
"""The same for rows with float scales."""
FP4_GROUP = 32
"""Channels of a 4-bit row that share a scale."""


@dataclass(frozen=True)
class RowLayout:
    """Bytes of one row: its channels, and the scales that lie apart from them."""

    data_bytes: int
    scale_bytes: int

    @property
    def row_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


def kv_row(format: str, width: int, plain: int) -> RowLayout:
    """Layout of a kv row of ``width`` channels, the first ``plain`` of them not rotated."""
    if not 0 < plain <= width or plain % FP8_GROUP:
        raise InternalError(f"a kv row of {width} channels with {plain} plain ones, expected a multiple of {FP8_GROUP}")
    rotary = 2 * (width - plain)
    match format:
        case "FP8":
            return RowLayout(plain + rotary, align_up(plain // FP8_GROUP, 8))
        case "FP4":
            return RowLayout(plain // 2 + rotary, align_up(plain // FP4_GROUP, 16))
        case "BF16" | "BF16-exact":
            return RowLayout(2 * width, 0)
        case "FP8-F32" if plain % FP8_F32_GROUP == 0:
            return RowLayout(plain + rotary, plain // FP8_F32_GROUP * 4)
    raise InternalError(f"kv rows in {format}, expected one of {', '.join(KV_FORMATS)} or FP8-F32")


def index_row(format: str, width: int) -> RowLayout:
    """Layout of an index row of ``width`` channels."""
    if width < 1 or width % FP4_GROUP:
        raise InternalError(f"an index row of {width} channels, expected a multiple of {FP4_GROUP}")
    match format:
        case "MXFP4":
            return RowLayout(width // 2, width // FP4_GROUP)
        case "FP8":
            return RowLayout(width, 4)
        case "BF16-exact":
            return RowLayout(2 * width, 0)
    raise InternalError(f"index rows in {format}, expected one of {', '.join(INDEX_FORMATS)}")


def state_row_bytes(width: int) -> int:
    """A row of compressor state: ``width`` values, then as many scores, as floats."""
    return 2 * width * 4
