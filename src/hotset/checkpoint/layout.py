"""Do the tensors of one file lie where they can: checks over all of them at once, in NumPy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hotset.checkpoint.tensor import TensorInfo, shown
from hotset.errors import CheckpointError


def by_name(infos: Sequence[TensorInfo], what: str) -> dict[str, TensorInfo]:
    """Return the tensors by name; CheckpointError when a name appears twice."""
    result = {info.name: info for info in infos}
    if len(result) != len(infos):
        name, count = Counter(info.name for info in infos).most_common(1)[0]
        raise CheckpointError(f"{what}: {count} tensors are named {shown(name)}")
    return result


def check_layout(infos: Sequence[TensorInfo], what: str, *, data_start: int, data_end: int, has_holes: bool) -> None:
    """Check that no tensor leaves [data_start, data_end) and no two overlap.

    Offsets must fit int64, and ``nbytes`` must be at most ``data_end``. With ``has_holes`` False the tensors must
    also follow each other without a gap and fill the range (a rule of safetensors; GGUF pads).
    """
    if not infos:
        return
    starts = np.fromiter((info.offset for info in infos), np.int64, len(infos))
    ends = starts + np.fromiter((info.nbytes for info in infos), np.int64, len(infos))
    outside = np.flatnonzero((starts < data_start) | (ends > data_end))
    if outside.size:
        info = infos[int(outside[0])]
        raise CheckpointError(
            f"{what}: tensor {shown(info.name)} covers bytes {info.offset} to {info.offset + info.nbytes},"
            f" expected within {data_start} to {data_end}",
            "the file is truncated or damaged: download it again",
        )
    order = np.lexsort((ends, starts))
    gaps = starts[order][1:] - ends[order][:-1]
    overlapping = np.flatnonzero(gaps < 0)
    if overlapping.size:
        at = int(overlapping[0])
        first, second = infos[int(order[at])], infos[int(order[at + 1])]
        raise CheckpointError(f"{what}: tensors {shown(first.name)} and {shown(second.name)} overlap")
    if not has_holes:
        _check_no_holes(infos, what, starts[order], ends[order], order, data_start, data_end)


def _check_no_holes(
    infos: Sequence[TensorInfo],
    what: str,
    starts: np.ndarray,
    ends: np.ndarray,
    order: np.ndarray,
    data_start: int,
    data_end: int,
) -> None:
    before = np.concatenate(([data_start], ends[:-1]))
    holes = np.flatnonzero(starts > before)
    if holes.size:
        at = int(holes[0])
        name = infos[int(order[at])].name
        raise CheckpointError(f"{what}: {starts[at] - before[at]} unused bytes before tensor {shown(name)}")
    if ends[-1] != data_end:
        raise CheckpointError(f"{what}: {data_end - ends[-1]} unused bytes after the last tensor")
