"""Which bytes every thread touches in a step, from the rules of native/src/executor.cpp, and what goes wrong if threads
run freely between two barriers.

Two kinds of error are found. *Races*: between two barriers one thread touches what another writes. *Stale values*: an
op reads bytes that do not hold the buffer it means, because another buffer of the slot was written over it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hotset.program.cache import BLOCK_TOKENS
from hotset.program.lower import (
    ACT_BF16,
    ACT_F32,
    ACT_Q8_OFFSET_32,
    CACHE_KIND,
    FEW_TOKENS,
    TILE_ROWS,
    Lowered,
    NativeOp,
    act_bytes,
    row_floats,
)

Units = NDArray[np.int64]
Indices = NDArray[np.int64]
UNIT = 2
"""Bytes: two threads never share a byte pair (halves of the cache are the smallest thing a thread owns)."""
KEY_GROUP = 64
"""kKeyGroup in native/src/types.h."""
ANYONE = (5, 6, 7)
"""Thread numbers that stand for one thread, nobody knows which: it takes over what others are behind with, or work is
dealt out by cost. Ops take them in turn, so that the one of an op is not the one of the next."""


@dataclass(frozen=True)
class Case:
    """A step: thread and token counts, the indices of the wanted outputs, whether attention was split into spans, and
    the position of the first token (programs with rings)."""

    threads: int
    num_tokens: int
    outputs: tuple[int, ...]
    is_merged: bool
    start: int = 0

    @property
    def is_few(self) -> bool:
        return self.num_tokens <= FEW_TOKENS


@dataclass(frozen=True)
class Touch:
    """What a thread reads or writes; ``buffer`` is the value it means by it, -1 in the cache and in partials."""

    memory: str
    thread: int
    is_write: bool
    units: Units
    buffer: int = -1


Access = Callable[[int, Units], Touch]


def share(count: int, thread: int, threads: int) -> Indices:
    return np.arange(count * thread // threads, count * (thread + 1) // threads)


def group_of(n: int, t: int) -> tuple[int, int]:
    """First token and size of the packed group of token ``t`` among ``n`` (find_group in native/src/types.h)."""
    start = 0
    while True:
        size = next(s for s in (16, 8, 4, 2, 1) if n - start >= s)
        if t < start + size:
            return start, size
        start += size


class ByteModel:
    """The touches of one lowered program in one step."""

    def __init__(self, low: Lowered, case: Case) -> None:
        self.low, self.case = low, case
        self.slot_start = np.concatenate([[0], np.cumsum(low.slot_bytes)])
        self.private_start = np.concatenate([[0], np.cumsum(low.private_slot_bytes)])
        self.num_ops = 0

    def anyone(self) -> int:
        """The thread that runs a piece of an op whose work threads take from each other."""
        return ANYONE[self.num_ops % len(ANYONE)] if self.case.threads > 1 else 0

    def rows_of(self, b: int) -> int:
        buffer = self.low.buffers[b]
        return (len(self.case.outputs) if buffer.is_outputs else self.case.num_tokens) * buffer.rows_per_token

    def is_own(self, b: int) -> bool:
        return self.case.is_few and self.low.buffers[b].is_private

    def memory(self, b: int, thread: int) -> str:
        return f"scratch {thread}" if self.is_own(b) else "workspace"

    def base(self, b: int) -> int:
        slot = self.low.buffers[b].slot
        return int(self.private_start[slot] if self.is_own(b) else self.slot_start[slot])

    def rows(self, b: int, tokens: Indices) -> Units:
        """The floats of whole rows."""
        return self.heads(b, tokens, np.zeros(1, np.int64), self.low.buffers[b].width)

    def heads(self, b: int, tokens: Indices, columns: Indices, width: int) -> Units:
        """``width`` floats from each of the columns on, in each of the rows (equal shapes, or one column for all)."""
        buffer = self.low.buffers[b]
        start = self.base(b) + buffer.header_bytes + (np.asarray(tokens) * row_floats(buffer.width) + columns) * 4
        return spread(start, width * 4)

    def packed_rows(self, b: int, tokens: Indices) -> Units:
        """Where pack_act writes these tokens (native/kernels/elementwise.h), in every group of columns."""
        buffer, n = self.low.buffers[b], self.rows_of(b)
        groups = np.array([group_of(n, int(t)) for t in tokens], np.int64).reshape(-1, 2)
        room = FEW_TOKENS if self.is_own(b) else (self.low.max_outputs if buffer.is_outputs else self.low.max_tokens)
        k = buffer.width // buffer.groups
        size = -(-act_bytes(buffer.act, k, room * buffer.rows_per_token) // 64) * 64
        bases = [self.base(b) + g * size for g in range(buffer.groups)]
        return np.concatenate([self.packed_at(b, base, groups, np.asarray(tokens), room) for base in bases])

    def packed_at(self, b: int, base: int, groups: Indices, tokens: Indices, room: int) -> Units:
        """Packed rows in groups [first, size] each; ``room`` tokens fit the buffer."""
        buffer = self.low.buffers[b]
        k, first, size = buffer.width // buffer.groups, groups[:, :1], groups[:, 1:]
        lane = np.asarray(tokens, np.int64)[:, None] - first
        room *= buffer.rows_per_token
        if buffer.act == ACT_F32:
            return spread(base + (first * k + np.arange(k) * size + lane) * 4, 4)
        if buffer.act == ACT_BF16:
            return spread(base + (first * k + np.arange(0, k, 2) * size + 2 * lane) * 2, 4)
        num_terms = k // (16 if buffer.act == ACT_Q8_OFFSET_32 else 32)
        q = base + first * k + np.arange(k // 32) * 32 * size + lane * 32
        d = base + room * k + (first * (k // 32) + np.arange(k // 32) * size + lane) * 4
        terms = base + room * k + room * (k // 32) * 4 + (first * num_terms + np.arange(num_terms) * size + lane) * 4
        return np.concatenate([spread(q, 32), spread(d, 4), spread(terms, 4)])

    def all_rows(self, b: int) -> Units:
        tokens = np.arange(self.rows_of(b))
        return self.packed_rows(b, tokens) if self.low.buffers[b].is_packed else self.rows(b, tokens)

    def cache(self, op: NativeOp, tokens: Indices, heads: Indices) -> Units:
        """Keys and values of kv heads (store_kv in native/kernels/attend.h); one block, position = token."""
        dim, r = op.head_dim, np.asarray(tokens)[:, None]
        head = op.cache_offset + np.asarray(heads)[:, None] * 2 * BLOCK_TOKENS * dim * 2
        j, start = np.arange(dim), head + r // KEY_GROUP * KEY_GROUP * dim * 2
        if op.cache_kind == CACHE_KIND["BF16"]:  # pairs: of channels in keys, of tokens in values
            key = start + (j // 2 * 2 * KEY_GROUP + r % KEY_GROUP * 2 + j % 2) * 2
            value = head + BLOCK_TOKENS * dim * 2 + (r // 2 * 2 * dim + r % 2 + 2 * j) * 2
        else:
            key = start + (j * KEY_GROUP + r % KEY_GROUP) * 2
            value = head + BLOCK_TOKENS * dim * 2 + (r * dim + j) * 2
        return spread(np.concatenate([key, value]), 2)

    def sizes(self) -> dict[str, int]:
        """Bytes of every memory."""
        low = self.low
        block = max((op.cache_offset + 4 * op.num_kv_heads * op.head_dim * BLOCK_TOKENS for op in low.ops), default=0)
        sizes = {"workspace": sum(low.slot_bytes), "cache": block, "partials": 8}
        return sizes | {f"scratch {t}": sum(low.private_slot_bytes) for t in range(self.case.threads)}

    def touches(self, op: NativeOp) -> list[Touch]:
        self.num_ops += 1
        if op.kind == "attend":
            return self.attention(op)
        return [touch for thread in range(self.case.threads) for touch in self.of_thread(op, thread)]

    def attention(self, op: NativeOp) -> list[Touch]:
        threads = range(self.case.threads)
        anyone = self.anyone()
        rows = self.cache(op, *np.divmod(np.arange(self.case.num_tokens * op.num_kv_heads), op.num_kv_heads))
        out = [Touch(self.memory(op.x, t), t, False, self.all_rows(op.x), op.x) for t in threads]
        out += [Touch("cache", t, False, rows) for t in threads]
        if self.case.is_merged:
            out.append(Touch("partials", anyone, True, np.arange(4)))
        # Rows of segments that are not split are written here even when others are.
        return [*out, Touch(self.memory(op.out, 0), anyone, True, self.all_rows(op.out), op.out)]

    def of_thread(self, op: NativeOp, thread: int) -> list[Touch]:
        def read(b: int, units: Units) -> Touch:
            return Touch(self.memory(b, thread), thread, False, units, b)

        def write(b: int, units: Units) -> Touch:
            return Touch(self.memory(b, thread), thread, True, units, b)

        case = self.case
        mine = share(self.rows_of(op.out if op.x < 0 else op.x), thread, case.threads)
        items = share(
            case.num_tokens * (op.num_kv_heads if op.kind == "store_kv" else op.num_heads), thread, case.threads
        )
        match op.kind:
            case "embed":
                is_own = self.is_own(op.out)
                return [write(op.out, self.rows(op.out, np.arange(case.num_tokens) if is_own else mine))]
            case "angles":
                return [write(op.out, self.rows(op.out, np.arange(case.num_tokens) if case.is_few else mine))]
            case "rms_norm" | "pack" | "silu_mul":
                tokens = np.arange(self.rows_of(op.x)) if case.is_few else mine
                inputs = [read(b, self.rows(b, tokens)) for b in (op.x, op.y) if b >= 0]
                one = self.packed_rows if op.kind == "pack" else self.rows
                return [*inputs, write(op.out, one(op.out, tokens))]
            case "select":
                kept = share(len(case.outputs), thread, case.threads)
                chosen = np.array(case.outputs, np.int64)[kept]
                return [read(op.x, self.rows(op.x, chosen)), write(op.out, self.rows(op.out, kept))]
            case "linear" | "gated":
                return self.product(op, thread, read, write)
            case "rope":
                t, h = np.divmod(
                    np.arange(case.num_tokens * op.num_heads) if self.is_own(op.x) else items, op.num_heads
                )
                x = self.heads(op.x, t, h * op.head_dim + op.first, op.rotary_dim)
                return [read(op.y, self.rows(op.y, t)), read(op.x, x), write(op.x, x)]
            case "store_kv":
                t, h = np.divmod(items, op.num_kv_heads)
                both = [read(b, self.heads(b, t, h * op.head_dim, op.head_dim)) for b in (op.x, op.y)]
                return [*both, Touch("cache", thread, True, self.cache(op, t, h))]
            case "attend_merge":
                t, h = np.divmod(items, op.num_heads)
                out = write(op.out, self.heads(op.out, t, h * op.head_dim, op.head_dim))
                return [Touch("partials", thread, False, np.arange(4 if len(items) else 0)), out]
        raise AssertionError(f"no rule for {op.kind}")

    def product(self, op: NativeOp, thread: int, read: Access, write: Access) -> list[Touch]:
        n = self.rows_of(op.out)
        out = self.columns(op.out, np.arange(n), self.low.weights[op.weight].out_width, thread)
        if not len(out) or n == 0:
            return []
        touches = [read(op.x, self.all_rows(op.x)), self.claimed(write(op.out, out), op.is_lent)]
        return [self.claimed(read(op.out, out), op.is_lent), *touches] if op.add else touches

    def columns(self, b: int, rows: Indices, width: int, thread: int) -> Units:
        """A thread's tiles of columns in each of the rows."""
        tiles = share(-(-width // TILE_ROWS), thread, self.case.threads)
        if not len(tiles):
            return np.zeros(0, np.int64)
        return self.heads(b, rows, np.full(len(rows), tiles[0] * TILE_ROWS), len(tiles) * TILE_ROWS)

    def claimed(self, touch: Touch, is_lent: bool = False) -> Touch:
        """With many tokens, or when columns are lent, another thread may be the one to do it."""
        return touch if self.case.is_few and not is_lent else replace(touch, thread=self.anyone())


def spread(starts: Indices, num_bytes: int) -> Units:
    """The units of ``num_bytes`` bytes from each of the starts on."""
    return (np.asarray(starts)[..., None] // UNIT + np.arange(num_bytes // UNIT)).reshape(-1)


class _Memory:
    """Who touched each unit since the last barrier (bit masks), and which buffer's value it holds."""

    def __init__(self, num_units: int) -> None:
        self.touched = np.zeros(num_units, np.uint8)
        self.written = np.zeros(num_units, np.uint8)
        self.holds = np.full(num_units, -1, np.int32)


def errors(low: Lowered, case: Case, dropped: int = -1, model: type[ByteModel] = ByteModel) -> list[str]:
    """Races and stale values of one step; ``dropped`` is the index of an op whose barrier is left out."""
    lab = model(low, case)
    memories = {name: _Memory(size // UNIT + 1) for name, size in lab.sizes().items()}
    found = []
    for index, op in enumerate(low.ops):
        if op.kind == "attend_merge" and not case.is_merged:
            continue
        if op.kind == "attend_rows_merge" and not case.is_merged:
            continue
        is_cut = case.is_few and case.is_merged and op.kind == "attend_rows"  # the executor's own barrier
        if is_cut or ((op.barrier_few if case.is_few else op.barrier_many) and index != dropped):
            for memory in memories.values():
                memory.touched[:] = 0
                memory.written[:] = 0
        touches = lab.touches(op)
        for touch in touches:
            memory = memories[touch.memory]
            bit = np.uint8(1 << touch.thread)
            if ((memory.touched if touch.is_write else memory.written)[touch.units] & ~bit).any():
                found.append(f"op {index} {op.kind}: thread {touch.thread} races in the {touch.memory}")
            memory.touched[touch.units] |= bit
            if touch.is_write:
                memory.written[touch.units] |= bit
        # An op reads its inputs before it writes.
        for touch in sorted(touches, key=lambda touch: touch.is_write):
            holds = memories[touch.memory].holds
            if touch.is_write:
                holds[touch.units] = touch.buffer
            elif touch.buffer >= 0 and (holds[touch.units] != touch.buffer).any():
                found.append(f"op {index} {op.kind}: reads stale bytes of buffer {touch.buffer} in the {touch.memory}")
    return found
