"""What every native op touches, and what follows from it: the order of ops, memory slots, barriers.

Every native op is run by all threads, each on its own share. A share is a range of rows of the step ("rows"), a range
of output columns ("columns"), or of (row, head) items ("heads"); anything else is ANY. Two ops are free of each other
when none of them writes what the other touches, or when both touch the same buffer in equal shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hotset.errors import InternalError
from hotset.program.lower_types import FEW_TOKENS, PLANNED_KINDS, Lowered, NativeOp

# (kind, size, buffer): two accesses to one slot are free of each other only when they cut the same buffer alike.
# Two buffers that share a slot have different layouts, so equal shares of them overlap.
Share = tuple[str, int, int]
ANY: Share = ("any", 0, -1)
PRIVATE: Share = ("private", 0, -1)
Access = tuple[object, bool, Share]
"""(memory, is_write, share); memory is a slot, or the name of cache rows, a ring or a scratch."""


SKIPPED = frozenset({"attend_merge", "attend_rows_merge"})
"""A merge is skipped when nothing was cut by spans, and its barrier with it: what came before it still counts for what
comes after it."""


class _Touch:
    """Accesses to the buffers of one op, in steps of few tokens or of many."""

    def __init__(self, low: Lowered, few: bool) -> None:
        self.low, self.few = low, few

    def _is_own(self, b: int) -> bool:
        return self.few and self.low.buffers[b].is_private

    def _access(self, b: int, is_write: bool, share: Share) -> Access:
        is_own = self._is_own(b)
        return ("private" if is_own else "slot", self.low.buffers[b].slot), is_write, PRIVATE if is_own else share

    def rows(self, b: int, is_write: bool) -> Access:
        """Whole rows of the thread's share; in a small step replicated ops read every row."""
        buffer = self.low.buffers[b]
        share: Share = ("rows", int(buffer.is_outputs) if buffer.rows_per_token == 1 else 2, b)
        return self._access(b, is_write, ANY if self.few and not is_write else share)

    def own_rows(self, b: int, is_write: bool) -> Access:
        """Whole rows of the thread's share, however many tokens there are."""
        return self._access(b, is_write, ("rows", int(self.low.buffers[b].is_outputs), b))

    def whole(self, b: int, is_write: bool = False) -> Access:
        return self._access(b, is_write, ANY)

    def heads(self, b: int, num_heads: int, is_write: bool) -> Access:
        """(row, head) items; with one head these are the rows."""
        return self._access(b, is_write, ("rows", 0, b) if num_heads == 1 else ("heads", num_heads, b))

    def columns(self, b: int, width: int, is_write: bool) -> Access:
        """Tiles of columns. With many tokens, a thread that is done takes columns of those that are not."""
        return self._access(b, is_write, ("columns", width, b) if self.few else ANY)


def _accesses(low: Lowered, op: NativeOp, few: bool) -> list[Access]:
    """Everything that one op touches."""
    at = _Touch(low, few)
    cache: object = ("cache", op.cache_offset)
    match op.kind:
        case "embed" | "angles":
            return [at.own_rows(op.out, True)]
        case "rms_norm" | "pack" | "encode_rows":
            return [at.rows(op.x, False), at.rows(op.out, True)]
        case "silu_mul":
            return [at.rows(op.x, False), at.rows(op.y, False), at.rows(op.out, True)]
        case "select":
            return [at.whole(op.x), at.own_rows(op.out, True)]
        case "linear" | "gated":
            return [at.whole(op.x), at.columns(op.out, low.weights[op.weight].out_width, True)]
        case "rope":
            return [at.heads(op.x, op.num_heads, True), at.whole(op.y)]
        case "store_kv":
            k, v = (at.heads(b, op.num_kv_heads, False) for b in (op.x, op.y))
            return [k, v, (cache, True, ANY)]
        case "attend":
            return [at.whole(op.x), (cache, False, ANY), at.whole(op.out, True), ("partials", True, ANY)]
        case "attend_merge":
            return [("partials", False, ANY), at.whole(op.out, True)]
        case "head_norm":
            return [at.heads(op.x, op.num_heads, True)]
        case "hyper_mix":
            outs = [at.rows(b, True) for b in (op.out, op.out2) if b >= 0]
            return [at.rows(op.x, False), at.rows(op.y, False), *outs]
        case "hyper_merge":
            # Each thread's own copy in a small step.
            return [at.columns(op.x, low.buffers[op.y].width, True), at.whole(op.y), at.whole(op.z)]
        case "route":
            return [at.rows(op.x, False), at.rows(op.out, True)]
        case "pair_order":
            return [at.whole(op.x), at.whole(op.out, True)]
        case "pack_pairs":
            return [at.whole(op.x), at.whole(op.y), at.rows(op.out, True)]
        case "expert_gated" | "expert_down":
            return [at.whole(op.x), at.whole(op.y), at.columns(op.out, low.weights[op.weight].out_width, True)]
    return _row_accesses(at, op, cache)


def _row_accesses(at: _Touch, op: NativeOp, cache: object) -> list[Access]:
    """Ops over window rows, compressed rows and index rows."""
    ring: object = ("frontier", op.ring_offset)
    match op.kind:
        case "compress":
            return [at.whole(op.x), at.whole(op.y), (ring, False, ANY), (cache, True, ANY)]
        case "store_state":
            return [at.own_rows(op.x, False), at.own_rows(op.y, False), (ring, True, ANY)]
        case "store_window":
            return [at.own_rows(op.x, False), (ring, True, ANY)]
        case "index_pack":
            inputs = [at.rows(op.x, False), at.rows(op.z, False), at.rows(op.out, True)]
            return inputs if op.y < 0 else [*inputs, at.whole(op.y)]
        case "index_select":
            if at.few:
                return [at.whole(op.x), (cache, False, ANY), ("candidates", True, ANY)]
            return [at.whole(op.x), (cache, False, ANY), at.whole(op.out, True)]
        case "index_merge":
            return [("candidates", False, ANY), at.whole(op.out, True)] if at.few else []
        case "attend_rows":
            # In a small step a thread has the heads that it has normed and turned, or where they are cut by spans the
            # executor waits before it; with many tokens, tokens by cost.
            q, out = (at.heads(b, op.num_heads, b == op.out) for b in (op.x, op.out))
            if not at.few:
                q, out = at.whole(op.x), at.whole(op.out, True)
            chosen = [] if op.y < 0 else [at.whole(op.y)]
            rows = [] if op.ratio == 0 else [(cache, False, ANY)]
            return [q, out, ("partials", True, ANY), *chosen, at.whole(op.z), (ring, False, ANY), *rows]
        case "attend_rows_merge":
            return [("partials", False, ANY), at.heads(op.out, op.num_heads, True)]
    if op.kind in PLANNED_KINDS:
        # No kernel cuts these into shares yet: each takes whole buffers, which is what a slot must allow for.
        touched = [at.whole(b) for b in (op.x, op.y, op.z) if b >= 0]
        if op.out >= 0:
            touched.append(at.whole(op.out, True))
        if op.kind in ("store_rows", "index_rows", "attend_latent"):
            touched.append((cache, op.kind == "store_rows", ANY))
        return touched
    raise InternalError(f"no access rule for native op {op.kind}")


def _conflict(accesses: Iterable[Access], since: dict[object, list[tuple[bool, Share]]]) -> bool:
    return any(
        (is_write or old_write) and not (share == old_share and share != ANY)
        for memory, is_write, share in accesses
        for old_write, old_share in since.get(memory, ())
    )


def _note(accesses: Iterable[Access], since: dict[object, list[tuple[bool, Share]]]) -> None:
    for memory, is_write, share in accesses:
        since.setdefault(memory, []).append((is_write, share))


def order_ops(low: Lowered) -> list[int]:
    """Move ops forward so that a step of few tokens needs few barriers; return how many barriers precede each op.

    Of the ops whose inputs are there, the next one is the first (in the program's order) that needs no barrier, and
    when all of them do, the first. A model file can so keep the order in which it reads best. Weights are numbered
    anew, as their place in memory follows the order in which they are read.
    """
    for b, buffer in enumerate(low.buffers):
        buffer.slot = b  # a memory of its own: slots are given out afterwards
    accesses = [_accesses(low, op, True) for op in low.ops]
    followers, num_waits = _dependencies(accesses)
    ready = [index for index, count in enumerate(num_waits) if count == 0]
    since: dict[object, list[tuple[bool, Share]]] = {}
    order: list[int] = []
    phases: list[int] = []
    phase = 0
    while ready:
        index = next((i for i in sorted(ready) if not _conflict(accesses[i], since)), -1)
        if index < 0:
            index = min(ready)
            if low.ops[index].kind not in SKIPPED:
                since, phase = {}, phase + 1
        ready.remove(index)
        _note(accesses[index], since)
        order.append(index)
        phases.append(phase)
        for follower in followers[index]:
            num_waits[follower] -= 1
            if num_waits[follower] == 0:
                ready.append(follower)
    low.ops = [low.ops[index] for index in order]
    _number_weights(low)
    return phases


def _dependencies(accesses: list[list[Access]]) -> tuple[list[list[int]], list[int]]:
    """For every op, the ops that wait for it, and how many it waits for: readers for writers, writers for both."""
    last_write: dict[object, int] = {}
    reads_since: dict[object, list[int]] = {}
    followers: list[list[int]] = [[] for _ in accesses]
    num_waits = [0] * len(accesses)
    for index, touched in enumerate(accesses):
        waits = set()
        for memory, is_write, _ in touched:
            if memory in last_write:
                waits.add(last_write[memory])
            if is_write:
                waits.update(reads_since.get(memory, ()))
        for memory, is_write, _ in touched:
            if is_write:
                last_write[memory], reads_since[memory] = index, []
            else:
                reads_since.setdefault(memory, []).append(index)
        waits.discard(index)
        for other in waits:
            followers[other].append(index)
        num_waits[index] = len(waits)
    return followers, num_waits


def _number_weights(low: Lowered) -> None:
    first: dict[int, int] = {}
    for op in low.ops:
        for weight in (op.weight, op.weight2):
            if weight >= 0:
                first.setdefault(weight, len(first))
    old = low.weights
    low.weights = [old[weight] for weight in first]
    for entry in low.weights:
        entry.pair = first[entry.pair] if entry.pair >= 0 else -1
    for op in low.ops:
        op.weight = first.get(op.weight, -1)
        op.weight2 = first.get(op.weight2, -1)


def assign_slots(low: Lowered, phases: list[int], max_tokens: int, max_outputs: int) -> None:
    """Give every buffer a slot; private copies get slots alike.

    A slot is reused once its last reader is past and, by ``phases``, a barrier lies in between: reuse costs none of its
    own in a step of few tokens.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for i, op in enumerate(low.ops):
        for b in op.buffers:
            first.setdefault(b, i)
            last[b] = i
    last[low.logits] = len(low.ops)
    phases = [*phases, phases[-1] + 1]
    busy_until: list[int] = []
    for b in sorted(first, key=lambda b: first[b]):
        buffer = low.buffers[b]
        size = buffer.num_bytes(max_outputs if buffer.is_outputs else max_tokens)
        free = [s for s in range(len(busy_until)) if phases[busy_until[s]] < phases[first[b]]]
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


def place_barriers(low: Lowered, few: bool) -> None:
    """Mark the ops before which the team must wait, in steps of few tokens or of many."""
    since: dict[object, list[tuple[bool, Share]]] = {}
    for op in low.ops:
        accesses = _accesses(low, op, few)
        conflict = _conflict(accesses, since)
        if few:
            op.barrier_few = conflict
        else:
            op.barrier_many = conflict
        if conflict and op.kind not in SKIPPED:
            since = {}
        _note(accesses, since)


LENDING = frozenset({"linear", "gated", "expert_gated"})
"""Products whose columns any thread can make in a small step: all have the inputs."""


def mark_lent(low: Lowered) -> None:
    """Mark the products of small steps whose columns threads may take from each other (``lend`` in C++).

    The last product before each barrier, if no other op since the barrier before it touches the memory that it writes:
    then nothing relies on who makes a column. Barriers that may be skipped do not count.
    """
    starts = [i for i, op in enumerate(low.ops) if op.barrier_few and op.kind not in SKIPPED]
    for begin, end in pairwise([0, *starts, len(low.ops)]):
        touches = [_accesses(low, op, True) for op in low.ops[begin:end]]
        last = next((i for i in reversed(range(end - begin)) if low.ops[begin + i].kind in LENDING), -1)
        if last >= 0:
            written = {memory for memory, is_write, _ in touches[last] if is_write}
            others = {memory for i, touched in enumerate(touches) if i != last for memory, _, _ in touched}
            low.ops[begin + last].is_lent = not written & others
