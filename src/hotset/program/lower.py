"""Lowering: from a program to the native op list, with memory slots and barriers.

Two decisions are made here and nowhere else.

*Slots.* Buffers that are never alive at the same time share memory. Sizes are exact functions of the step's
largest token and output counts; the plan prints their sum as workspace.

*Barriers.* Every native op is run by all threads, each on its own share. A share is either a range of rows of the
step ("rows"), a range of output columns ("columns"), or of (row, head) items ("heads"). An op waits for the team only
if it touches memory that another thread may have written, or may still be reading, since the last barrier. In a step
of very few tokens, norms and packing are replicated: every thread computes its own private copy, which is cheaper than
waiting for a neighbour's share. So there are two barrier sets, for few and for many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotset.checkpoint.formats import FORMATS, Format
from hotset.errors import InternalError
from hotset.program import program as p
from hotset.program.cache import group_offset
from hotset.units import align_up

FEW_TOKENS = 2
"""Largest step whose norms and packing are replicated on every thread."""

TILE_ROWS = 16
ATTEND_ROWS = 48
SPAN_TOKENS = 1024

NUM_ACT_KINDS = 6
ACT_F32, ACT_BF16, ACT_Q8_OFFSET_8, ACT_Q8_OFFSET_128, ACT_Q8_OFFSET_32, ACT_Q8_SUM = range(NUM_ACT_KINDS)
ACT_KIND = {
    "F32": ACT_F32, "F16": ACT_F32, "BF16": ACT_BF16, "Q8_0": ACT_Q8_OFFSET_128, "Q4_0": ACT_Q8_OFFSET_8,
    "Q4_1": ACT_Q8_SUM, "Q4_K": ACT_Q8_SUM, "Q6_K": ACT_Q8_OFFSET_32,
}  # fmt: skip
"""How a product with weights of this format wants its input rows (``ActKind`` in native/src/types.h)."""


CACHE_KIND = {"F16": 0, "BF16": 1}
"""Format of cache rows (``CacheKind`` in native/src/types.h)."""


def act_bytes(kind: int, width: int, rows: int) -> int:
    """Bytes of ``rows`` packed input rows; int8 rows carry a float scale per 32 inputs and a term per 32 (or 16)."""
    if kind in (ACT_F32, ACT_BF16):
        return rows * width * (4 if kind == ACT_F32 else 2)
    return rows * (width + width // 32 * 4 + width // (16 if kind == ACT_Q8_OFFSET_32 else 32) * 4)


def row_floats(width: int) -> int:
    """Floats from one row of a buffer to the next."""
    return align_up(width, TILE_ROWS)


def weight_bytes(weight: p.Weight, fmt: Format) -> int:
    """Bytes of a packed matrix: rows padded to whole tiles, the same bits per weight as in the file."""
    return align_up(weight.out_width, TILE_ROWS) * fmt.row_bytes(weight.in_width)


@dataclass
class NativeOp:
    """One op of the native executor; the fields mirror ``OpSpec`` in native/src/executor.h."""

    kind: str
    x: int = -1
    y: int = -1
    out: int = -1
    weight: int = -1
    weight2: int = -1
    barrier_few: bool = False
    barrier_many: bool = False
    add: bool = False
    value: float = 0.0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rotary_dim: int = 0
    adjacent: bool = False
    cache_kind: int = 0
    cache_offset: int = 0
    source: int = -1  # index of the program op it came from


@dataclass
class NativeBuffer:
    """A buffer of the native executor; mirrors ``BufferSpec``."""

    width: int
    is_outputs: bool
    is_packed: bool = False
    act: int = 0
    is_private: bool = False
    slot: int = -1

    def num_bytes(self, rows: int) -> int:
        """Bytes for ``rows`` rows, 64-byte aligned."""
        if self.is_packed:
            return align_up(act_bytes(self.act, self.width, rows), 64)
        return rows * row_floats(self.width) * 4


@dataclass
class NativeWeight:
    """A weight of the native executor; mirrors ``WeightSpec``. ``pair`` is the up matrix of a gate."""

    key: str
    format: str
    out_width: int
    in_width: int
    pair: int = -1


@dataclass
class Lowered:
    """Everything the native executor needs but the weights' bytes."""

    ops: list[NativeOp] = field(default_factory=list)
    buffers: list[NativeBuffer] = field(default_factory=list)
    weights: list[NativeWeight] = field(default_factory=list)
    frequencies: tuple[float, ...] = ()
    slot_bytes: list[int] = field(default_factory=list)
    private_slot_bytes: list[int] = field(default_factory=list)
    logits: int = -1
    max_tokens: int = 0
    max_outputs: int = 0
    attend_rows: int = 0
    attend_head_dim: int = 0
    partial_floats: int = 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of one thread's scratch: private buffers and attention workspace (``place_buffers`` in C++)."""
        dim = self.attend_head_dim
        attend = self.attend_rows * (2 * dim + 256 + 2 * (dim + 2)) * 4 + 512
        return sum(self.private_slot_bytes) + attend


class _Lowering:
    def __init__(self, program: p.Program, formats: Mapping[str, str]) -> None:
        self.program = program
        self.formats = formats
        self.out = Lowered()
        self.buffer_ids: dict[p.Buffer, int] = {}
        self.packed_ids: dict[tuple[p.Buffer, int], int] = {}
        self.weight_ids: dict[str, int] = {}
        self.source = 0

    def buffer(self, buffer: p.Buffer, is_private: bool = False) -> int:
        if buffer not in self.buffer_ids:
            self.buffer_ids[buffer] = len(self.out.buffers)
            self.out.buffers.append(NativeBuffer(buffer.width, buffer.rows == "outputs", is_private=is_private))
        return self.buffer_ids[buffer]

    def weight(self, weight: p.Weight) -> int:
        if weight.key not in self.weight_ids:
            self.weight_ids[weight.key] = len(self.out.weights)
            is_vector = weight.in_width == 1
            fmt = "F32" if is_vector else self.formats[weight.key]
            in_width = 0 if is_vector else weight.in_width
            self.out.weights.append(NativeWeight(weight.key, fmt, weight.out_width, in_width))
        return self.weight_ids[weight.key]

    def cache_kind(self, group: str) -> int:
        return CACHE_KIND[next(g.format for g in self.program.groups if g.name == group)]

    def emit(self, kind: str, **fields: object) -> None:
        self.out.ops.append(NativeOp(kind, source=self.source, **fields))  # type: ignore[arg-type]

    def packed(self, x: p.Buffer, weight: p.Weight) -> int:
        """The packed form of ``x`` that this weight multiplies; emitted once per buffer value and kind."""
        kind = ACT_KIND[self.formats[weight.key]]
        if (x, kind) not in self.packed_ids:
            self.packed_ids[(x, kind)] = len(self.out.buffers)
            self.out.buffers.append(NativeBuffer(x.width, x.rows == "outputs", True, kind, is_private=True))
            self.emit("pack", x=self.buffer(x), out=self.packed_ids[(x, kind)])
        return self.packed_ids[(x, kind)]

    def lower(self, op: p.Op) -> None:
        match op:
            case p.Embed():
                self.emit("embed", weight=self.weight(op.table), out=self.buffer(op.out))
            case p.RopeAngles():
                self.out.frequencies = op.frequencies
                self.emit("angles", out=self.buffer(op.out, is_private=True))
            case p.RmsNorm():
                out = self.buffer(op.out, is_private=True)
                self.emit("rms_norm", x=self.buffer(op.x), weight=self.weight(op.weight), value=op.eps, out=out)
            case p.Linear():
                x = self.packed(op.x, op.weight)
                self.emit("linear", x=x, weight=self.weight(op.weight), out=self.buffer(op.out), add=op.add)
            case p.GatedLinear():
                self.lower_gated(op)
            case p.Rope():
                self.emit(
                    "rope", x=self.buffer(op.x), y=self.buffer(op.angles), num_heads=op.num_heads,
                    head_dim=op.head_dim, rotary_dim=op.rotary_dim, adjacent=op.pairs == "adjacent",
                )  # fmt: skip
            case p.StoreKV():
                self.emit(
                    "store_kv", x=self.buffer(op.k), y=self.buffer(op.v), num_kv_heads=op.num_kv_heads,
                    head_dim=op.head_dim, cache_kind=self.cache_kind(op.group),
                    cache_offset=group_offset(self.program.groups, op.group, op.layer),
                )  # fmt: skip
            case p.Attend():
                offset = group_offset(self.program.groups, op.group, op.layer)
                for kind in ("attend", "attend_merge"):
                    self.emit(
                        kind, x=self.buffer(op.q), out=self.buffer(op.out), num_heads=op.num_heads,
                        num_kv_heads=op.num_kv_heads, head_dim=op.head_dim, cache_kind=self.cache_kind(op.group),
                        cache_offset=offset, value=op.scale,
                    )  # fmt: skip
            case p.SelectOutputs():
                self.emit("select", x=self.buffer(op.x), out=self.buffer(op.out))
        for buffer in p.writes(op):  # a new value makes older packed forms stale
            for key in [k for k in self.packed_ids if k[0] == buffer]:
                del self.packed_ids[key]

    def lower_gated(self, op: p.GatedLinear) -> None:
        if self.formats[op.gate.key] != self.formats[op.up.key]:
            # Tiles of different size cannot alternate: two products, then the gate.
            halves = [p.Buffer(f"{op.out.name}.{side}", op.out.width, op.out.rows) for side in ("gate", "up")]
            for weight, half in zip((op.gate, op.up), halves, strict=True):
                self.lower(p.Linear(op.x, weight, half))
            x, y = (self.buffer(half) for half in halves)
            self.emit("silu_mul", x=x, y=y, out=self.buffer(op.out, is_private=True))
            return
        x = self.packed(op.x, op.gate)
        gate, up = self.weight(op.gate), self.weight(op.up)
        self.out.weights[gate].pair = up
        self.emit("gated", x=x, weight=gate, weight2=up, out=self.buffer(op.out))


def _assign_slots(low: Lowered, max_tokens: int, max_outputs: int) -> None:
    """Give every buffer a slot; a slot is reused once its last reader is past. Private copies get slots alike."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, op in enumerate(low.ops):
        for b in (op.x, op.y, op.out):
            if b >= 0:
                first.setdefault(b, i)
                last[b] = i
    last[low.logits] = len(low.ops)
    busy_until: list[int] = []
    for b in sorted(first, key=lambda b: first[b]):
        buffer = low.buffers[b]
        size = buffer.num_bytes(max_outputs if buffer.is_outputs else max_tokens)
        free = [s for s in range(len(busy_until)) if busy_until[s] < first[b]]
        # The free slot that needs the least growth.
        slot = min(free, key=lambda s: (max(0, size - low.slot_bytes[s]), abs(low.slot_bytes[s] - size)), default=-1)
        if slot < 0:
            slot = len(busy_until)
            busy_until.append(-1)
            low.slot_bytes.append(0)
            low.private_slot_bytes.append(0)
        busy_until[slot] = last[b]
        buffer.slot = slot
        low.slot_bytes[slot] = max(low.slot_bytes[slot], size)
        if buffer.is_private:
            low.private_slot_bytes[slot] = max(low.private_slot_bytes[slot], buffer.num_bytes(FEW_TOKENS))


# (kind, size, buffer): two accesses to one slot are free of each other only when they cut the same buffer alike.
# Two buffers that share a slot have different layouts, so equal shares of them overlap.
Share = tuple[str, int, int]
ANY: Share = ("any", 0, -1)
PRIVATE: Share = ("private", 0, -1)


def _accesses(low: Lowered, op: NativeOp, few: bool) -> list[tuple[object, bool, Share]]:
    """(memory, is_write, share) of one op. Memory is a slot index or a cache key."""

    def rows(b: int) -> Share:
        buffer = low.buffers[b]
        if few and buffer.is_private:
            return PRIVATE
        return ("rows", int(buffer.is_outputs), b)

    def slot(b: int) -> object:
        return ("private" if few and low.buffers[b].is_private else "slot", low.buffers[b].slot)

    def whole(b: int) -> Share:
        return PRIVATE if few and low.buffers[b].is_private else ANY

    cache = ("cache", op.cache_offset)
    match op.kind:
        case "embed" | "angles":
            return [(slot(op.out), True, rows(op.out))]
        case "rms_norm" | "pack":
            # Replicated in a small step: every thread reads whole rows.
            share = rows(op.x) if not few else whole(op.x)
            return [(slot(op.x), False, share), (slot(op.out), True, rows(op.out))]
        case "silu_mul":
            shares = [rows(b) if not few else whole(b) for b in (op.x, op.y)]
            return [(slot(op.x), False, shares[0]), (slot(op.y), False, shares[1]), (slot(op.out), True, rows(op.out))]
        case "select":
            return [(slot(op.x), False, ANY), (slot(op.out), True, rows(op.out))]
        case "linear" | "gated":
            # With many tokens, a thread that is done takes columns of those that are not.
            columns = ("columns", low.weights[op.weight].out_width, op.out) if few else ANY
            return [(slot(op.x), False, whole(op.x)), (slot(op.out), True, columns)]
        case "rope":
            heads = ("heads", op.num_heads, op.x)
            return [(slot(op.x), True, heads), (slot(op.y), False, whole(op.y))]
        case "store_kv":
            k, v = (("heads", op.num_kv_heads, b) for b in (op.x, op.y))
            return [(slot(op.x), False, k), (slot(op.y), False, v), (cache, True, ANY)]
        case "attend":
            return [(slot(op.x), False, ANY), (cache, False, ANY), (slot(op.out), True, ANY), ("partials", True, ANY)]
        case "attend_merge":
            return [("partials", False, ANY), (slot(op.out), True, ANY)]
    raise InternalError(f"no access rule for native op {op.kind}")


def _place_barriers(low: Lowered, few: bool) -> None:
    since: list[tuple[object, bool, Share]] = []
    for op in low.ops:
        accesses = _accesses(low, op, few)
        conflict = any(
            memory == old_memory and (is_write or old_write) and not (share == old_share and share != ANY)
            for memory, is_write, share in accesses
            for old_memory, old_write, old_share in since
        )
        if few:
            op.barrier_few = conflict
        else:
            op.barrier_many = conflict
        # A merge is skipped when no segment was cut by spans, and its barrier with it, so what came before it
        # still counts for what comes after it.
        if conflict and op.kind != "attend_merge":
            since = []
        since = since + accesses


def lower(program: p.Program, formats: Mapping[str, str], max_tokens: int, max_outputs: int) -> Lowered:
    """Lower ``program`` for weights in ``formats`` (by key) and steps of at most that many tokens and outputs."""
    work = _Lowering(program, formats)
    for index, op in enumerate(program.ops):
        work.source = index
        work.lower(op)
    low = work.out
    low.max_tokens, low.max_outputs = max_tokens, max_outputs
    low.logits = work.buffer_ids[program.logits]
    attends = [op for op in program.ops if isinstance(op, p.Attend)]
    low.attend_head_dim = max((op.head_dim for op in attends), default=0)
    low.attend_rows = ATTEND_ROWS if attends else 0
    _assign_slots(low, max_tokens, max_outputs)
    for few in (True, False):
        _place_barriers(low, few)
    for name in set(formats.values()):
        if name not in FORMATS:
            raise InternalError(f"unknown format {name}")
    return low


def partial_floats(program: p.Program, num_rows: int, context: int) -> int:
    """Floats of attention partials for ``num_rows`` tokens whose context is cut into spans of 1,024 tokens."""
    attends = [op for op in program.ops if isinstance(op, p.Attend)]
    spans = -(-context // SPAN_TOKENS)
    if not attends or spans < 2:
        return 0
    return num_rows * spans * max(op.num_heads * (op.head_dim + 2) for op in attends)
