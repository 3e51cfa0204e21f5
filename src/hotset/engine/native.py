"""The native executor: the lowered program on a team of pinned threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotset import _native
from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.manifest import Account
from hotset.engine.batch import StepBatch
from hotset.errors import CheckpointError, InternalError, MachineError
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Plan
from hotset.program.lower import CACHE_KIND, FEW_TOKENS, NUM_ACT_KINDS, Lowered, NativeOp, NativeWeight, lower

OP_KINDS = (
    "embed", "angles", "rms_norm", "pack", "linear", "gated", "silu_mul", "rope", "store_kv", "attend", "attend_merge",
    "select",
)  # fmt: skip
"""Order of ``OpKind`` in native/src/executor.h."""


_EXPECTED = (len(OP_KINDS), NUM_ACT_KINDS, len(CACHE_KIND))
if _native.KIND_COUNTS != _EXPECTED:
    raise InternalError(
        f"the native module was built from other sources: it knows {_native.KIND_COUNTS} kinds of op, input and cache, "
        f"this package {_EXPECTED}",
        "make build",
    )

_Spec = TypeVar("_Spec")


def _copy(target: _Spec, source: object, skip: tuple[str, ...] = ()) -> _Spec:
    for name, value in vars(source).items():
        if name not in skip:
            setattr(target, name, int(value) if isinstance(value, bool) else value)
    return target


def _op_spec(op: NativeOp) -> _native.OpSpec:
    native = _copy(_native.OpSpec(), op, skip=("kind", "source"))
    native.kind = OP_KINDS.index(op.kind)
    return native


def _weight_spec(weight: NativeWeight) -> _native.WeightSpec:
    native = _copy(_native.WeightSpec(), weight, skip=("key", "format"))
    native.format = _native.FORMATS.index(weight.format)
    return native


_COPIED = (
    "slot_bytes", "private_slot_bytes", "max_tokens", "max_outputs", "attend_rows", "attend_head_dim", "logits",
)  # fmt: skip


def _native_spec(low: Lowered, plan: Plan) -> _native.ExecutorSpec:
    spec = _native.ExecutorSpec()
    spec.ops = [_op_spec(op) for op in low.ops]
    spec.weights = [_weight_spec(weight) for weight in low.weights]
    spec.buffers = [_copy(_native.BufferSpec(), buffer) for buffer in low.buffers]
    for name in _COPIED:
        setattr(spec, name, getattr(low, name))
    spec.frequencies = list(low.frequencies)
    spec.few_tokens = FEW_TOKENS
    spec.num_blocks, spec.block_bytes = plan.num_blocks, plan.block_bytes
    spec.partial_floats = plan.partial_floats
    return spec


class NativeExecutor:
    """Implements :class:`hotset.engine.batch.Executor` with the C++ kernels."""

    def __init__(self, spec: ModelSpec, formats: Mapping[str, str], plan: Plan, cpus: Sequence[int], isa: str) -> None:
        self.num_blocks = plan.num_blocks
        self.max_tokens = plan.prefill_chunk
        self.max_outputs = plan.max_outputs
        self.isa = isa
        self.low = lower(spec.program, formats, self.max_tokens, self.max_outputs)
        self._vocab_size = spec.vocab_size
        try:
            self._native: _native.Executor | None = _native.Executor(list(cpus), isa, _native_spec(self.low, plan))
        except (RuntimeError, MemoryError) as error:
            raise MachineError(f"the executor cannot start: {error}") from error

    def load(
        self, checkpoint: Checkpoint, account: Account, progress: Callable[[str, int], None] | None = None
    ) -> None:
        """Read and pack every weight; each thread reads its own rows. ``progress`` gets each tensor's name and bytes.

        Raises:
            CheckpointError: a file changed or ended while it was read.
        """
        native = self._running()
        handles = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in checkpoint.files]
        try:
            for index, weight in enumerate(self.low.weights):
                info = account.loaded[weight.key]
                if weight.in_width == 0:
                    native.set_vector(
                        index, np.ascontiguousarray(checkpoint.array(info.name), dtype=np.float32).reshape(-1)
                    )
                else:
                    try:
                        native.load(index, handles[info.file_id], info.offset)
                    except RuntimeError as error:
                        raise CheckpointError(
                            f"{checkpoint.files[info.file_id]}: reading {info.name}: {error}"
                        ) from error
                if progress is not None:
                    progress(info.name, info.nbytes)
        finally:
            for handle in handles:
                os.close(handle)
        native.touch()

    def load_raw(self, index: int, fd: int, offset: int) -> None:
        """Read the rows of weight ``index`` of :attr:`low` from byte ``offset`` of a file. Raises RuntimeError."""
        self._running().load(index, fd, offset)

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step; float32 [m, vocab], a view that is valid until the next step."""
        native = self._running()
        segments = batch.segments
        if len(batch.tokens) > self.max_tokens or len(batch.outputs) > self.max_outputs:
            raise InternalError(
                f"a step of {len(batch.tokens)} tokens and {len(batch.outputs)} outputs; planned for "
                f"{self.max_tokens} and {self.max_outputs}"
            )
        if len(segments) == 1:
            s = segments[0]
            table = np.array((s.first, s.count, s.position, 0), dtype=np.int32)
            blocks = np.ascontiguousarray(s.blocks, dtype=np.int32)
        else:
            rows: list[int] = []
            start = 0
            for s in segments:
                rows.extend((s.first, s.count, s.position, start))
                start += len(s.blocks)
            table = np.array(rows, dtype=np.int32)
            blocks = np.concatenate([s.blocks for s in segments], dtype=np.int32)
        native.step(batch.tokens, table, blocks, batch.outputs)
        return native.logits(len(batch.outputs), self._vocab_size)

    def regions(self) -> list[tuple[str, int]]:
        """Name and bytes of every allocation."""
        return self._running().regions()

    def profile(self, enable: bool) -> None:
        """Start or stop counting nanoseconds per native op on thread 0."""
        self._running().profile(enable)

    def op_times(self) -> list[tuple[str, int, int]]:
        """(kind, ns in the op, ns waiting before it) per native op since :meth:`profile`."""
        native = self._running()
        return [
            (op.kind, ns, wait) for op, ns, wait in zip(self.low.ops, native.op_ns(), native.wait_ns(), strict=True)
        ]

    def close(self) -> None:
        """Stop the threads and free all memory. A second call does nothing."""
        self._native = None

    def _running(self) -> _native.Executor:
        if self._native is None:
            raise InternalError("the executor is closed")
        return self._native
