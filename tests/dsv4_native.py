"""Tiny DeepSeek-V4 checkpoints under the native executor, and under the reference over the same files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsv4_files import TinyV4, write_v4
from helpers import plan_of, team

from hotset.api import Described, describe_model
from hotset.engine.native import NativeExecutor
from hotset.machine.native import available_isas
from hotset.program.cache import num_blocks
from hotset.program.reference import ReferenceExecutor, reference_weights


def v4_described(folder: Path, m: TinyV4, cache_format: str | None = None) -> Described:
    """Write the model into ``folder`` and open it."""
    return describe_model(write_v4(folder, m), cache_format)


def v4_native(
    d: Described, threads: int = 1, isa: str | None = None, *, context: int = 512, sequences: int = 1,
    chunk: int | None = None, nodes: int = 1,
) -> NativeExecutor:  # fmt: skip
    """A loaded executor that gives the logits of every token of a step."""
    plan = plan_of(d, threads, context=context, max_sequences=sequences, prefill_chunk=chunk or context)
    plan = replace(plan, max_outputs=plan.prefill_chunk)
    executor = NativeExecutor(d.spec, d.formats, plan, team(threads, nodes), isa or available_isas()[0])
    executor.load(d.checkpoint, d.account)
    return executor


def v4_judge(d: Described, *, rounding: bool = True, context: int = 512, sequences: int = 1) -> ReferenceExecutor:
    """The reference executor over the same files."""
    return ReferenceExecutor(
        d.spec, reference_weights(d.checkpoint, d.account), d.formats, num_blocks=sequences * num_blocks(context),
        num_frontiers=sequences, max_tokens=context, max_outputs=context, rounding=rounding,
    )  # fmt: skip
