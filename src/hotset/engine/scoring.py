"""Steps of given tokens without generating: their logits (perplexity, parity tests), or their rows for a session."""

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
    table = _open(memory, tokens, count, reuse=False)
    try:
        chunk = min(max_tokens, executor.max_outputs) if is_all else max_tokens
        logits = np.empty((count if is_all else 1, vocab_size), np.float32)
        for start in range(0, count, chunk):
            end = min(start + chunk, count)
            if is_all:
                outputs = np.arange(end - start, dtype=np.int32)
            else:
                outputs = np.array([end - start - 1] if end == count else [], np.int32)
            rows = _run(executor, table, tokens, end, outputs)
            if is_all:
                logits[start : start + len(rows)] = rows
            elif len(rows):
                logits[:] = rows
        return logits
    finally:
        table.release()


def compute(executor: Executor, memory: CacheMemory, tokens: NDArray[np.int32], max_tokens: int) -> BlockTable:
    """Return a table with the rows of all tokens but the last, sharing what is cached of them. The caller releases it.

    Errors as for :func:`score`.
    """
    count = len(tokens) - 1
    table = _open(memory, tokens, count, reuse=True)
    try:
        while table.num_rows < count:
            end = table.num_rows + table.limit(min(max_tokens, count - table.num_rows))
            _run(executor, table, tokens, end, np.empty(0, np.int32))
    except BaseException:
        table.release()
        raise
    return table


def _open(memory: CacheMemory, tokens: NDArray[np.int32], num_rows: int, reuse: bool) -> BlockTable:
    table = memory.open(tokens, len(tokens), num_rows, reuse)
    if table is not None:
        return table
    hint = "wait until the running requests have ended, or load with more sequences or a larger context"
    if memory.frontiers.is_needed and not memory.frontiers.num_free_slots:
        raise RequestError("the running requests use every frontier of this engine", hint)
    raise RequestError(
        f"{num_rows} tokens need {memory.num_blocks(num_rows)} cache blocks, running requests leave "
        f"{memory.pool.num_available} of {memory.pool.num_blocks}",
        hint,
    )


def _run(
    executor: Executor, table: BlockTable, tokens: NDArray[np.int32], end: int, outputs: NDArray[np.int32]
) -> NDArray[np.float32]:
    start = table.num_rows
    segment = Segment(0, end - start, start, table.cover(end), table.frontier.slot)
    rows = executor.step(StepBatch(tokens[start:end], [segment], outputs))
    table.commit(end)
    return rows
