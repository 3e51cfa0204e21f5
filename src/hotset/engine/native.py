"""The native executor: the lowered program on a team of pinned threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hotset import _native
from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.manifest import Account
from hotset.checkpoint.scaled import (
    check_block_scales,
    check_ids,
    check_scales,
    has_block_scales,
    weight_array,
)
from hotset.checkpoint.tensor import TensorInfo, shown
from hotset.engine.batch import StepBatch
from hotset.errors import CheckpointError, InternalError, MachineError
from hotset.machine.room import LoadRoom
from hotset.machine.tasks import list_tasks, read_task
from hotset.machine.teams import Seats
from hotset.machine.thp import read_page_bytes
from hotset.machine.verify import RegionPages, locate
from hotset.models.spec import ModelSpec
from hotset.plan.budget import Plan
from hotset.program.lower import (
    CACHE_KIND,
    FEW_TOKENS,
    INDEX_KIND,
    NUM_ACT_KINDS,
    OP_KINDS,
    ROW_KIND,
    Lowered,
    NativeOp,
    NativeWeight,
    lower,
)
from hotset.program.pending import require_runnable

_EXPECTED = (len(OP_KINDS), NUM_ACT_KINDS, len(CACHE_KIND), len(ROW_KIND), len(INDEX_KIND))
if _native.KIND_COUNTS != _EXPECTED:
    raise InternalError(
        f"the native module was built from other sources: it knows {_native.KIND_COUNTS} kinds of op, input and row, "
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
    native = _copy(_native.WeightSpec(), weight, skip=("key", "format", "num_ids"))
    native.format = _native.FORMATS.index(weight.format)
    return native


_COPIED = (
    "slot_bytes", "private_slot_bytes", "max_tokens", "max_outputs", "attend_rows", "attend_head_dim",
    "work_bytes", "candidate_bytes", "frequencies", "logits",
)  # fmt: skip


def _native_spec(low: Lowered, plan: Plan) -> _native.ExecutorSpec:
    spec = _native.ExecutorSpec()
    spec.ops = [_op_spec(op) for op in low.ops]
    spec.weights = [_weight_spec(weight) for weight in low.weights]
    spec.buffers = [_copy(_native.BufferSpec(), buffer) for buffer in low.buffers]
    for name in _COPIED:
        setattr(spec, name, getattr(low, name))
    spec.few_tokens = FEW_TOKENS
    spec.num_blocks, spec.block_bytes = plan.num_blocks, plan.block_bytes
    spec.partial_floats = plan.partial_floats
    spec.num_frontiers, spec.frontier_bytes = plan.num_frontiers, plan.frontier_bytes
    return spec


def _native_seats(seats: Seats) -> _native.Seats:
    native = _native.Seats()
    native.cpus, native.nodes = list(seats.cpus), list(seats.nodes)
    native.policy = getattr(_native.NumaPolicy, seats.policy)
    return native


class NativeExecutor:
    """Implements :class:`hotset.engine.batch.Executor` with the C++ kernels."""

    def __init__(self, spec: ModelSpec, formats: Mapping[str, str], plan: Plan, seats: Seats, isa: str) -> None:
        require_runnable(spec.program, formats, spec.name)
        self.num_blocks, self.block_bytes = plan.num_blocks, plan.block_bytes
        self.num_frontiers, self.frontier_bytes = plan.num_frontiers, plan.frontier_bytes
        self.max_tokens = plan.prefill_chunk
        self.max_outputs = plan.max_outputs
        self.isa = isa
        self.seats = seats
        self.low = lower(spec.program, formats, self.max_tokens, self.max_outputs)
        self._vocab_size = spec.vocab_size
        before = list_tasks()
        try:
            self._native: _native.Executor | None = _native.Executor(
                _native_seats(seats), isa, _native_spec(self.low, plan)
            )
        except (RuntimeError, MemoryError) as error:
            raise MachineError(f"the executor cannot start: {error}") from error
        self._new_tasks = list_tasks() - before

    def load(
        self,
        checkpoint: Checkpoint,
        account: Account,
        progress: Callable[[str, int], None] | None = None,
        room: LoadRoom | None = None,
    ) -> None:
        """Read and pack every weight; each thread reads its own rows. ``progress`` gets each tensor's name and bytes.

        Raises:
            CheckpointError: a file changed or ended while it was read, or holds what no product can take.
            MachineError: ``room`` found that a node has no room any more.
        """
        with ExitStack() as stack:
            handles = []
            for path in checkpoint.files:
                handles.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                stack.callback(os.close, handles[-1])
            for index, weight in enumerate(self.low.weights):
                for part in range(weight.count):
                    key = f"{weight.key}.{part}" if weight.count > 1 else weight.key
                    if room is not None:
                        room.before()
                    for info in self._load_part(checkpoint, account, handles, index, part, key):
                        if room is not None:
                            room.after(handles[info.file_id], info.offset, info.nbytes)
                        if progress is not None:
                            progress(info.name, info.nbytes)
        self._running().touch()

    def _load_part(
        self, checkpoint: Checkpoint, account: Account, handles: Sequence[int], index: int, part: int, key: str
    ) -> tuple[TensorInfo, ...]:
        """Load one tensor, with its scales if it has any; return what was read."""
        weight = self.low.weights[index]
        info, declared = account.find(key)
        if weight.is_table:
            ids = check_ids(weight_array(checkpoint, account, key).astype(np.int64), weight.num_ids, info.name)
            if (np.diff(np.sort(ids, axis=1), axis=1) == 0).any():
                raise CheckpointError(f"{shown(info.name)} names an expert twice for one token")
            self._running().set_table(index, np.ascontiguousarray(ids).reshape(-1))
            return (info,)
        if weight.in_width == 0:
            values = np.ascontiguousarray(checkpoint.array(info.name), dtype=np.float32)
            self._running().set_vector(index, values.reshape(-1))
            return (info,)
        scale = account.loaded[declared.scale] if declared.stored_as else None
        try:
            if scale is None:
                if has_block_scales(info):
                    check_block_scales(_read(handles[info.file_id], info.offset, info.nbytes), info)
                self._running().load(index, part, handles[info.file_id], info.offset, -1, 0)
                return (info,)
            handle = handles[scale.file_id]
            check_scales(_read(handle, scale.offset, scale.nbytes), scale.name)
            self._running().load(index, part, handles[info.file_id], info.offset, handle, scale.offset)
            return info, scale
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{checkpoint.files[info.file_id]}: reading {info.name}: {error}") from error

    def load_raw(self, index: int, fd: int, offset: int, scale_offset: int | None = None) -> None:
        """Read the rows of weight ``index`` of :attr:`low` from byte ``offset`` of a file. Raises RuntimeError.

        ``scale_offset``: where in the same file the scales lie, for a format that has them apart.
        """
        scale_fd = -1 if scale_offset is None else fd
        self._running().load(index, 0, fd, offset, scale_fd, scale_offset or 0)

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
            table = np.array((s.first, s.count, s.position, 0, s.frontier), dtype=np.int32)
            blocks = np.ascontiguousarray(s.blocks, dtype=np.int32)
        else:
            rows: list[int] = []
            start = 0
            for s in segments:
                rows.extend((s.first, s.count, s.position, start, s.frontier))
                start += len(s.blocks)
            table = np.array(rows, dtype=np.int32)
            blocks = np.concatenate([s.blocks for s in segments], dtype=np.int32)
        native.step(batch.tokens, table, blocks, batch.outputs)
        return native.logits(len(batch.outputs), self._vocab_size)

    def copy_block(self, block_id: int, out: NDArray[np.uint8]) -> None:
        """Copy a cache block into ``out``, uint8 [block_bytes]."""
        np.copyto(out, self._block(block_id))

    def restore_block(self, block_id: int, data: NDArray[np.uint8]) -> None:
        """Overwrite a cache block with ``data``, uint8 [block_bytes]."""
        np.copyto(self._block(block_id), data)

    def copy_frontier(self, slot: int, out: NDArray[np.uint8]) -> None:
        """Copy a frontier into ``out``, uint8 [frontier_bytes]."""
        np.copyto(out, self._frontier(slot))

    def restore_frontier(self, slot: int, data: NDArray[np.uint8]) -> None:
        """Overwrite a frontier with ``data``, uint8 [frontier_bytes]."""
        np.copyto(self._frontier(slot), data)

    def _block(self, block_id: int) -> NDArray[np.uint8]:
        if not 0 <= block_id < self.num_blocks:
            raise InternalError(f"block {block_id} of {self.num_blocks}")
        return self._running().block(block_id)

    def _frontier(self, slot: int) -> NDArray[np.uint8]:
        if not 0 <= slot < self.num_frontiers:
            raise InternalError(f"frontier {slot} of {self.num_frontiers}")
        return self._running().frontier(slot)

    def regions(self) -> tuple[RegionPages, ...]:
        """Every allocation: where it was planned, and where its pages are now."""
        places = self._running().places()
        return locate(places, read_page_bytes(), _native.pages_by_node)

    def thread_ids(self) -> dict[int, int]:
        """The kernel's number of every thread of the team but the first, which is whoever calls :meth:`step`.

        They have names once they have run; known after :meth:`load`.
        """
        tasks = [task for task_id in self._new_tasks if (task := read_task("self", task_id)) is not None]
        named = {task.name: task.task_id for task in tasks}
        names = ((thread, f"hotset-{thread}") for thread in range(1, len(self.seats.cpus)))
        return {thread: named[name] for thread, name in names if name in named}

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


def _read(handle: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Bytes of a file; RuntimeError when it ends before them."""
    data = np.empty(num_bytes, np.uint8)
    view, done = data.data, 0
    while done < num_bytes:
        read = os.preadv(handle, [view[done:]], offset + done)
        if not read:
            raise RuntimeError("the file ended early")
        done += read
    return data
