"""Logits of given tokens, without generating: for perplexity, parity tests and evaluation."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotset.engine.batch import Executor, Segment, StepBatch
from hotset.errors import RequestError
from hotset.kv.memory import BlockTable, CacheMemory


def score(
    executor: Executor, memory: CacheMemory, tokens: NDArray[np.int32], vocab_size: int, max_tokens: int, is_all: bool
) -> NDArray[np.float32]:
    """Return the logits after every token, float32 [n, vocab], or after the last one only, [1, vocab].

    Uses blocks of its own, shares none and leaves none behind. RequestError when running requests have reserved them.
    """
    count = len(tokens)
    table = memory.open(tokens, count, count, reuse=False)
    if table is None:
        raise RequestError(
            f"{count} tokens need {memory.num_blocks(count)} cache blocks, running requests leave "
            f"{memory.pool.num_available} of {memory.pool.num_blocks}",
            "wait until the running requests have ended, or load with more sequences or a larger context",
        )
    try:
        chunk = min(max_tokens, executor.max_outputs) if is_all else max_tokens
        logits = np.empty((count if is_all else 1, vocab_size), np.float32)
        for start in range(0, count, chunk):
            rows = _run(executor, table, tokens, start, min(start + chunk, count), is_all)
            if is_all:
                logits[start : start + len(rows)] = rows
            elif len(rows):
                logits[:] = rows
        return logits
    finally:
        table.release()


def _run(
    executor: Executor, table: BlockTable, tokens: NDArray[np.int32], start: int, end: int, is_all: bool
) -> NDArray[np.float32]:
    if is_all:
        outputs = np.arange(end - start, dtype=np.int32)
    else:
        outputs = np.array([end - start - 1] if end == len(tokens) else [], np.int32)
    segment = Segment(0, end - start, start, table.cover(end))
    rows = executor.step(StepBatch(tokens[start:end], [segment], outputs))
    table.commit(end)
    return rows
