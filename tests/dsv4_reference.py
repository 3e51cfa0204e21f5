"""Tiny DeepSeek-V4 checkpoints under the reference executor; needs neither the native module nor an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from dsv4_files import TinyV4, write_v4
from numpy.typing import NDArray

from hotset.checkpoint.checkpoint import open_checkpoint
from hotset.checkpoint.manifest import account, formats_of
from hotset.engine.batch import Executor, Segment, StepBatch
from hotset.models.registry import describe
from hotset.models.spec import with_cache_format
from hotset.program.cache import num_blocks
from hotset.program.reference import ReferenceExecutor, reference_weights

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def with_seed(m: TinyV4, seed: int) -> TinyV4:
    """The model with ``seed`` added to its own, as the golden script does it."""
    return replace(m, seed=m.seed + seed)


def v4_reference(
    folder: Path, m: TinyV4, *, rounding: bool, cache_format: str | None = None, context: int = 512,
    sequences: int = 1,
) -> ReferenceExecutor:  # fmt: skip
    """Write the model into ``folder`` and load it."""
    with open_checkpoint(write_v4(folder, m)) as checkpoint:
        spec = describe(checkpoint)
        found = account(checkpoint, spec.tensors)
        formats = formats_of(spec.tensors, found)
        return ReferenceExecutor(
            with_cache_format(spec, formats, cache_format), reference_weights(checkpoint, found), formats,
            num_blocks=sequences * num_blocks(context), num_frontiers=sequences, max_tokens=context,
            max_outputs=context, rounding=rounding,
        )  # fmt: skip


def run_chunks(
    executor: Executor, tokens: Ints, cuts: Sequence[int] = (), *, blocks: Ints | None = None, frontier: int = 0,
    start: int = 0,
) -> Floats:  # fmt: skip
    """Logits after every token of one sequence, float32 [n, vocab], in steps that end before each of ``cuts``.

    ``start`` is the position of the first token; ``blocks`` defaults to 0, 1, 2, ...
    """
    table = np.arange(executor.num_blocks, dtype=np.int32) if blocks is None else blocks
    out = []
    for begin, end in pairwise([0, *cuts, len(tokens)]):
        segment = Segment(0, end - begin, start + begin, table[: num_blocks(start + end)], frontier)
        outputs = np.arange(end - begin, dtype=np.int32)
        out.append(executor.step(StepBatch(tokens[begin:end], [segment], outputs)).copy())
    return np.concatenate(out)
