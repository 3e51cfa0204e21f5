"""An executor whose answers depend on everything that a DeepSeek-V4 sequence keeps, at a tiny size.

What is kept mirrors that family: a window of the last rows, two kinds of compressed rows in blocks (of 4 tokens with
overlap, and of 8), and rings with the raw material of rows that are not complete yet, all addressed by absolute
position. A row is a checksum of its token and of every row it may see, so one wrong, missing or stale byte changes
every token after it; :func:`chain_logits` says what a sequence gives without blocks, rings or steps.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np
from engine_fakes import EOS, VOCAB, FakeExecutor, prefix_logits

from hotset.engine.batch import Segment, StepBatch
from hotset.engine.engine import Engine
from hotset.engine.reference_sampler import ReferenceSampler
from hotset.kv.identity import Identity

BLOCK = 16
WINDOW = 8
FINE, COARSE = 4, 8
"""Tokens per compressed row; the fine ones overlap."""
_RINGS = {"window": WINDOW, "fine": 2 * FINE, "coarse": COARSE}
IDENTITY = Identity("fake", "weights", "program", ("rows",), "numpy")


def _mix(*parts: Any) -> int:
    return zlib.crc32(np.concatenate([np.asarray(part, np.uint64).reshape(-1) for part in parts]).tobytes())


class FrontierExecutor(FakeExecutor):
    """A :class:`FakeExecutor` with frontiers. Slots and blocks start with, and keep, whatever was in them."""

    def __init__(self, num_blocks: int, max_tokens: int, max_outputs: int, num_frontiers: int) -> None:
        super().__init__(num_blocks, max_tokens, max_outputs, BLOCK)
        self.fine = np.full((num_blocks, BLOCK // FINE), 0xA5A5, np.uint64)
        self.coarse = np.full((num_blocks, BLOCK // COARSE), 0xA5A5, np.uint64)
        self.num_frontiers = num_frontiers
        self.rings = np.full((num_frontiers, sum(_RINGS.values())), 0xA5A5, np.uint64)
        self.block_bytes = (BLOCK // FINE + BLOCK // COARSE) * 8
        self.frontier_bytes = self.rings.shape[1] * 8
        self.num_copies = self.num_restores = 0

    def step(self, batch: StepBatch) -> np.ndarray:
        self._check(batch)
        slots = [segment.frontier for segment in batch.segments]
        assert len(set(slots)) == len(slots), "two sequences share a frontier"
        assert all(0 <= slot < self.num_frontiers for slot in slots)
        self.batches.append([(segment.position, segment.count) for segment in batch.segments])
        rows = {}
        for segment in batch.segments:
            for index in range(segment.count):
                token = int(batch.tokens[segment.first + index])
                rows[segment.first + index] = self._advance(segment, segment.position + index, token)
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        return np.array([_logits(rows[int(output)]) for output in batch.outputs], np.float32).reshape(-1, VOCAB)

    def _ring(self, slot: int, name: str) -> np.ndarray:
        start = sum(length for key, length in _RINGS.items() if key < name)
        return self.rings[slot, start : start + _RINGS[name]]

    def _advance(self, s: Segment, t: int, token: int) -> int:
        window, fine, coarse = (self._ring(s.frontier, name) for name in ("window", "fine", "coarse"))
        raw = _mix(token, t, window[np.arange(max(0, t - WINDOW + 1), t) % WINDOW])
        fine[t % len(fine)] = coarse[t % len(coarse)] = raw
        if (t + 1) % FINE == 0:
            seen = np.arange(max(0, t + 1 - 2 * FINE), t + 1)
            self.fine[s.blocks[t // BLOCK], t % BLOCK // FINE] = _mix(fine[seen % len(fine)])
        if (t + 1) % COARSE == 0:
            seen = np.arange(t + 1 - COARSE, t + 1)
            self.coarse[s.blocks[t // BLOCK], t % BLOCK // COARSE] = _mix(coarse[seen % len(coarse)])
        row = _mix(
            raw,
            self.fine[s.blocks].reshape(-1)[: (t + 1) // FINE],
            self.coarse[s.blocks].reshape(-1)[: (t + 1) // COARSE],
        )
        window[t % WINDOW] = row
        return row

    def copy_block(self, block_id: int, out: np.ndarray) -> None:
        out[:] = np.concatenate([self.fine[block_id], self.coarse[block_id]]).view(np.uint8)

    def restore_block(self, block_id: int, data: np.ndarray) -> None:
        rows = data.view(np.uint64)
        self.fine[block_id], self.coarse[block_id] = rows[: BLOCK // FINE], rows[BLOCK // FINE :]

    def copy_frontier(self, slot: int, out: np.ndarray) -> None:
        self.num_copies += 1
        out[:] = self.rings[slot].view(np.uint8)

    def restore_frontier(self, slot: int, data: np.ndarray) -> None:
        self.num_restores += 1
        self.rings[slot] = data.view(np.uint64)


def _logits(row: int) -> np.ndarray:
    return prefix_logits(np.array([row & 0x7FFFFFFF], np.int32))


def chain_logits(tokens: np.ndarray) -> np.ndarray:
    """The fake model: logits of the token after ``tokens``, float32 [VOCAB], from nothing but the tokens."""
    values = tuple(int(token) for token in tokens)
    for length in range(100, len(values), 100):  # recursion over a whole prompt would be too deep
        _chain(values[:length])
    return _logits(_chain(values)[1][-1])


@lru_cache(maxsize=4096)
def _chain(tokens: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Raw rows and finished rows of every token."""
    if not tokens:
        return [], []
    raws, rows = (list(values) for values in _chain(tokens[:-1]))
    t = len(tokens) - 1
    raws.append(_mix(tokens[t], t, rows[max(0, t - WINDOW + 1) : t]))
    fine = [_mix(raws[max(0, end - 2 * FINE) : end]) for end in range(FINE, t + 2, FINE)]
    coarse = [_mix(raws[end - COARSE : end]) for end in range(COARSE, t + 2, COARSE)]
    rows.append(_mix(raws[t], fine, coarse))
    return raws, rows


def make_frontier_engine(
    num_blocks: int = 40, *, max_tokens: int = 64, max_outputs: int = 4, num_snapshots: int = 8, **options: Any
) -> tuple[Engine, FrontierExecutor]:
    settings = {
        "max_context": num_blocks * BLOCK,
        "max_sequences": 3,
        "identity": IDENTITY,
        "codec": None,
        "eos_ids": [EOS],
    } | options
    codec = settings.pop("codec")
    executor = FrontierExecutor(num_blocks, max_tokens, max_outputs, settings["max_sequences"])
    engine = Engine(
        executor,
        codec,
        ReferenceSampler(),
        vocab_size=VOCAB,
        block_tokens=BLOCK,
        num_snapshots=num_snapshots,
        **settings,
    )
    return engine, executor
