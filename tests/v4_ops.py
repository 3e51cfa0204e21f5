"""Programs of a few ops of DeepSeek-V4, over one layer, for the reference executor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from hotset.engine.batch import Segment, StepBatch
from hotset.models.spec import ModelSpec
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup, FrontierGroup, num_blocks
from hotset.program.program import Buffer
from hotset.program.reference import ReferenceExecutor
from hotset.program.rounding import Floats
from hotset.program.rows import index_row, kv_row, state_row_bytes

VOCAB, HIDDEN, HEADS, DIM, PLAIN = 300, 32, 2, 80, 64
ROTARY = DIM - PLAIN
INDEX_HEADS, INDEX_DIM = 3, 32
WINDOW = 6
FREQUENCIES = tuple(float(f) for f in 0.7 ** np.arange(ROTARY // 2))
Weights = dict[str, np.ndarray]


def random(*shape: int, gain: float = 1.0) -> Floats:
    return (np.random.default_rng(int(np.prod(shape))).standard_normal(shape) * gain).astype(np.float32)


def executor(
    build: Callable[[Builder], Buffer], weights: Weights, *, ratio: int = 0, kv_format: str = "FP8",
    index_format: str = "MXFP4", rounding: bool = False, sequences: int = 1,
) -> ReferenceExecutor:  # fmt: skip
    """A program of a few ops over one layer with a window, compressed rows and index rows."""
    groups: tuple[CacheGroup, ...] = ()
    row_bytes = kv_row(kv_format, DIM, PLAIN).row_bytes
    frontier = [FrontierGroup("window", (0,), WINDOW, row_bytes, kv_format)]
    if ratio:
        copies = 2 if ratio == 4 else 1
        index_bytes = index_row(index_format, INDEX_DIM).row_bytes
        groups = (
            CacheGroup("kv", (0,), row_bytes, ratio, kv_format),
            CacheGroup("index", (0,), index_bytes, ratio, index_format),
        )
        frontier += [
            FrontierGroup("kv_state", (0,), copies * ratio, state_row_bytes(copies * DIM), "F32"),
            FrontierGroup("index_state", (0,), copies * ratio, state_row_bytes(copies * INDEX_DIM), "F32"),
        ]
    b = Builder(groups, tuple(frontier))
    made = b.finish(b.select_outputs(build(b)))
    spec = ModelSpec("test", "ops", 1, HIDDEN, VOCAB, 4096, (), (), groups, made)
    formats = {name: "F32" for key in weights for name in (key, key.rpartition(".")[0])}
    return ReferenceExecutor(
        spec, weights, formats, num_blocks=4 * sequences, num_frontiers=sequences, rounding=rounding
    )


def run(made: ReferenceExecutor, tokens: np.ndarray, cuts: list[int] | None = None) -> Floats:
    out = []
    blocks = np.array([1, 0, 3, 2], np.int32)
    for begin, end in pairwise([0, *(cuts or []), len(tokens)]):
        s = Segment(0, end - begin, begin, blocks[: num_blocks(end)])
        out.append(made.step(StepBatch(tokens[begin:end], [s], np.arange(end - begin, dtype=np.int32))))
    return np.concatenate(out)
