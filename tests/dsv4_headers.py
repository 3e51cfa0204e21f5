"""A tiny DeepSeek-V4 from headers alone: its declaration and its formats, for tests of lowering and plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from dsv4_files import TinyV4, make_tensors

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.formats import BY_SAFETENSORS_DTYPE
from hotset.checkpoint.manifest import account, formats_of
from hotset.checkpoint.tensor import TensorInfo
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec


@cache
def v4_headers(m: TinyV4) -> Checkpoint:
    """A checkpoint without files."""
    tensors = {
        name: TensorInfo(name, t.shape, BY_SAFETENSORS_DTYPE[t.dtype], 0, 0, len(t.raw))
        for name, t in make_tensors(m).items()
    }
    return Checkpoint("safetensors", Path("tiny-v4"), [], m.config(), tensors)


def v4_program(m: TinyV4) -> tuple[ModelSpec, dict[str, str]]:
    """What the family declares, and the program's format of every weight."""
    checkpoint = v4_headers(m)
    spec = describe(checkpoint)
    return spec, formats_of(spec.tensors, account(checkpoint, spec.tensors))
