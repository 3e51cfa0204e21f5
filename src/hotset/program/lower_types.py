"""What the native executor is told: ops, buffers and weights by number, and the bytes that each of them takes.

The dataclasses mirror the structs of native/src/executor.h field by field. Constants and byte formulas that the C++
side has too name their twin there; tests hold the executor's allocations against them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hotset.checkpoint.formats import Format
from hotset.program import program as p
from hotset.units import align_up

FEW_TOKENS = 2
"""Largest step whose norms and packing are replicated on every thread."""

TILE_ROWS = 16
ATTEND_ROWS = 48
SPAN_TOKENS = 1024
SCALE_INPUTS = 128
"""Inputs that share an FP8 scale (kScaleInputs in native/src/types.h)."""
TILE_KEYS = 64
"""Rows of one tile of attention over rows (kTileKeys)."""
UNIT_TOKENS = 4
"""Neighbouring tokens that share a tile when all of them read the same rows."""
MAX_EXPERTS, MAX_TOP_K = 4096, 64
"""Experts of a layer and of a token (kMaxExperts, kMaxTopK)."""
MAX_POOLED = 256
"""Most tokens that one compressed row pools (kMaxPooled)."""
SELECT_SLACK = 256
"""Room beside four times the wanted rows, so that a block's rows always fit (kSelectSlack)."""

ITEMS_PER_THREAD, LEAST_HEADS = 4, 8
"""Tokens are cut by spans when there are fewer items than this per thread (kItemsPerThread, kLeastHeads)."""

NUM_ACT_KINDS = 7
ACT_F32, ACT_BF16, ACT_Q8_OFFSET_8, ACT_Q8_OFFSET_128, ACT_Q8_OFFSET_32, ACT_Q8_SUM, ACT_Q8_OFFSET_12 = range(
    NUM_ACT_KINDS
)
ACT_KIND = {
    "F32": ACT_F32, "F16": ACT_F32, "BF16": ACT_BF16, "FP8": ACT_BF16, "Q8_0": ACT_Q8_OFFSET_128,
    "Q4_0": ACT_Q8_OFFSET_8, "Q4_1": ACT_Q8_SUM, "Q4_K": ACT_Q8_SUM, "Q6_K": ACT_Q8_OFFSET_32,
    "MXFP4": ACT_Q8_OFFSET_12, "FP8_F32": ACT_BF16, "INT4": ACT_Q8_SUM, "INT4_SYM": ACT_Q8_OFFSET_8,
}  # fmt: skip
"""How a product with weights of this format wants its input rows (``ActKind`` in native/src/types.h)."""

CACHE_KIND = {"F16": 0, "BF16": 1}
"""Format of cache rows (``CacheKind`` in native/src/types.h)."""

ROW_KIND = {"FP8": 0, "BF16": 1, "BF16-exact": 2, "FP4": 3}
"""Format of rows that are key and value in one (``RowKind`` in native/src/types.h)."""
INDEX_KIND = {"MXFP4": 0, "FP8": 1, "BF16-exact": 2}
"""Format of index rows, which lie in tiles (``IndexKind`` in native/src/types.h)."""
INDEX_ROWS = len(ROW_KIND)
"""In place of a row kind, this and an index kind (``kIndexRows`` in native/src/executor.h)."""
INDEX_ACT = {"MXFP4": ACT_Q8_OFFSET_12, "FP8": ACT_BF16, "BF16-exact": ACT_BF16}
"""How the query heads that meet index rows are packed (``index_act`` in native/src/types.h)."""

OP_KINDS = (
    "embed", "angles", "rms_norm", "pack", "linear", "gated", "silu_mul", "rope", "store_kv", "attend", "attend_merge",
    "select", "head_norm", "hyper_mix", "hyper_merge", "encode_rows", "compress", "store_state", "store_window",
    "index_pack", "index_select", "index_merge", "attend_rows", "attend_rows_merge", "route", "pair_order",
    "pack_pairs", "expert_gated", "expert_down",
)  # fmt: skip
"""Order of ``OpKind`` in native/src/executor.h."""
PLANNED_KINDS = (
    "layer_norm", "latent_norm", "store_rows", "latent_query", "index_rows", "attend_latent", "latent_value",
)  # fmt: skip
"""Ops that have a place in memory and no kernels yet (:mod:`hotset.program.pending`)."""


def act_bytes(kind: int, width: int, rows: int) -> int:
    """Bytes of ``rows`` packed input rows; int8 rows carry a float scale per 32 inputs and a term per 32 (or 16)."""
    if kind in (ACT_F32, ACT_BF16):
        return rows * width * (4 if kind == ACT_F32 else 2)
    return rows * (width + width // 32 * 4 + width // (16 if kind == ACT_Q8_OFFSET_32 else 32) * 4)


def row_floats(width: int) -> int:
    """Floats from one row of a buffer to the next."""
    return align_up(width, TILE_ROWS)


def tile_bytes(fmt: Format, in_width: int) -> int:
    """Bytes of sixteen packed rows (``tile_bytes`` in C++): as in the file, and for FP8 a header of their scales."""
    scale_bytes = {"FP8": 1, "FP8_F32": 4}.get(fmt.name, 0)
    header = align_up(-(-in_width // SCALE_INPUTS) * scale_bytes, 64)
    return header + TILE_ROWS * fmt.row_bytes(in_width)


def row_spans(num_rows: int) -> int:
    """Spans of that many compressed rows: four of two tiles, then four to every doubling (``num_row_spans`` in C++)."""
    tiles = -(-num_rows // TILE_KEYS)
    if tiles <= 8:
        return -(-tiles // 2)
    doubling = (tiles - 1).bit_length() - 3
    return 4 * doubling + ((tiles - 1) >> doubling) - 3


def weight_bytes(weight: p.Weight, fmt: Format) -> int:
    """Bytes of a packed matrix, or of a stack: rows padded to whole tiles, the same bits per weight as in the file."""
    return weight.count * (align_up(weight.out_width, TILE_ROWS) // TILE_ROWS) * tile_bytes(fmt, weight.in_width)


def table_bytes(weight: p.Weight) -> int:
    """Bytes of a float vector or an integer table, 64-byte aligned."""
    return align_up(weight.out_width * weight.in_width * 4, 64)


@dataclass
class NativeOp:
    """One op of the native executor; the fields mirror ``OpSpec`` in native/src/executor.h, which explains them."""

    kind: str
    x: int = -1
    y: int = -1
    z: int = -1
    out: int = -1
    out2: int = -1
    weight: int = -1
    weight2: int = -1
    barrier_few: bool = False
    barrier_many: bool = False
    is_lent: bool = False
    add: bool = False
    value: float = 0.0
    value2: float = 0.0
    limit: float = 0.0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0
    adjacent: bool = False
    first: int = 0
    inverse: bool = False
    groups: int = 1
    copies: int = 1
    frequency: int = 0
    iterations: int = 0
    cache_kind: int = 0
    cache_offset: int = 0
    row_kind: int = 0
    row_bytes: int = 0
    scale_bytes: int = 0
    plain: int = 0
    ratio: int = 0
    overlap: bool = False
    hadamard: bool = False
    top_k: int = 0
    num_experts: int = 0
    by_pair: bool = False
    unit_tokens: int = 0
    window: int = 0
    ring_offset: int = 0
    ring_rows: int = 0
    ring_kind: int = 0
    ring_row_bytes: int = 0
    ring_scale_bytes: int = 0
    source: int = -1  # index of the program op it came from

    @property
    def buffers(self) -> tuple[int, ...]:
        """The buffers that it reads or writes."""
        return tuple(b for b in (self.x, self.y, self.z, self.out, self.out2) if b >= 0)


@dataclass
class NativeBuffer:
    """A buffer of the native executor; mirrors ``BufferSpec``.

    ``rows_per_token`` is 1, or the experts of a token in a buffer of pairs. A packed buffer of ``groups`` holds as many
    runs of columns, packed one after another. ``header_bytes`` come before the rows.
    """

    width: int
    is_outputs: bool
    is_packed: bool = False
    act: int = 0
    is_private: bool = False
    slot: int = -1
    rows_per_token: int = 1
    groups: int = 1
    header_bytes: int = 0

    def num_bytes(self, tokens: int) -> int:
        """Bytes for that many tokens (or outputs), 64-byte aligned."""
        rows = tokens * self.rows_per_token
        if self.is_packed:
            return self.groups * align_up(act_bytes(self.act, self.width // self.groups, rows), 64)
        return self.header_bytes + rows * row_floats(self.width) * 4


@dataclass
class NativeWeight:
    """A weight of the native executor; mirrors ``WeightSpec``. ``pair`` is the up matrix of a gate.

    Vectors have ``in_width`` 0; a table holds ``in_width`` expert ids below ``num_ids`` for each of ``out_width``
    tokens.
    """

    key: str
    format: str
    out_width: int
    in_width: int
    pair: int = -1
    count: int = 1
    is_table: bool = False
    num_ids: int = 0


@dataclass
class Lowered:
    """Everything the native executor needs but the weights' bytes."""

    ops: list[NativeOp] = field(default_factory=list)
    buffers: list[NativeBuffer] = field(default_factory=list)
    weights: list[NativeWeight] = field(default_factory=list)
    frequencies: list[float] = field(default_factory=list)
    slot_bytes: list[int] = field(default_factory=list)
    private_slot_bytes: list[int] = field(default_factory=list)
    logits: int = -1
    max_tokens: int = 0
    max_outputs: int = 0
    attend_rows: int = 0
    attend_head_dim: int = 0

    @property
    def work_bytes(self) -> int:
        """Bytes of one thread's workspace: what the op with the largest need takes (``executor_setup.cpp``)."""
        return max((_op_work_bytes(self, op) for op in self.ops), default=0)

    @property
    def candidate_bytes(self) -> int:
        """Bytes of the rows that one thread puts forward in a small step, for other threads to read."""
        top_k = max((op.top_k for op in self.ops if op.kind in ("index_select", "index_rows")), default=0)
        return align_up(FEW_TOKENS * (top_k + 1) * 8, 64) if top_k else 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of one thread's scratch: private buffers, workspace, candidates (``place_buffers`` in C++)."""
        return sum(self.private_slot_bytes) + self.work_bytes + self.candidate_bytes


def _op_work_bytes(low: Lowered, op: NativeOp) -> int:
    if op.kind == "attend":
        dim = low.attend_head_dim
        return align_up(low.attend_rows * (2 * dim + 256 + 2 * (dim + 2)) * 4 + 512, 64)
    if op.kind in ("attend_rows", "attend_latent"):
        dim, rows = op.head_dim, op.unit_tokens * op.num_heads
        sums = rows * (dim + 2) * 4
        parts = (rows * dim * 2, sums, sums, rows * (TILE_KEYS + 4) * 4)
        return sum(align_up(part, 64) for part in parts)
    if op.kind in ("index_select", "index_merge", "index_rows"):
        return align_up(3 * (4 * op.top_k + SELECT_SLACK) * 8, 64)
    return 0
