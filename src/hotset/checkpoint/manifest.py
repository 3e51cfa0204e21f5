"""Holds the tensors of a checkpoint against those that a model declares: every one is accounted for.

A tensor is loaded, optional and absent, or ignored for a stated reason. Anything else is an error that names it,
raised before a weight is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.formats import RUNNABLE
from hotset.checkpoint.tensor import TensorInfo, shown
from hotset.errors import CheckpointError, InternalError

_MAX_NAMED = 8


@dataclass(frozen=True)
class TensorDecl:
    """One tensor that a model knows.

    ``key`` is the program's name, ``name`` the one in the checkpoint; several keys may share a name (tied weights).
    ``shape`` is row-major, ``formats`` are the accepted format names. ``reason`` says why a "maybe" tensor may be
    absent, or why an "ignored" one is not needed; the shape and formats of an ignored tensor are not checked.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    role: str
    formats: tuple[str, ...]
    need: Literal["must", "maybe", "ignored"] = "must"
    reason: str = ""


@dataclass(frozen=True)
class Account:
    """Where every tensor went: ``loaded`` by program key, ``absent`` optional ones, ``ignored`` with the reason."""

    loaded: dict[str, TensorInfo]
    absent: list[TensorDecl]
    ignored: list[tuple[TensorInfo, str]]


def account(checkpoint: Checkpoint, declarations: Sequence[TensorDecl]) -> Account:
    """Match the checkpoint with the declarations.

    CheckpointError names what is missing, not expected, or of another shape or format, in four classes, of each the
    first eight and how many more. InternalError when a model declares a key twice.
    """
    found = checkpoint.tensors
    result = Account({}, [], [])
    known: set[str] = set()
    missing: list[str] = []
    shapes: list[str] = []
    formats: list[str] = []
    for decl in declarations:
        known.add(decl.name)
        info = found.get(decl.name)
        if decl.need == "ignored":
            if info is not None:
                result.ignored.append((info, decl.reason))
        elif info is None:
            if decl.need == "must":
                missing.append(shown(decl.name))
            else:
                result.absent.append(decl)
        else:
            if info.shape != decl.shape:
                shapes.append(f"{shown(decl.name)} is {_dims(info.shape)}, expected {_dims(decl.shape)}")
            if info.format.name not in decl.formats:
                formats.append(_format_problem(info, decl))
            if decl.key in result.loaded:
                raise InternalError(f"the model declares the key {decl.key} twice")
            result.loaded[decl.key] = info
    extra = [shown(name) for name in found if name not in known]
    _raise_problems(checkpoint, missing, extra, shapes, formats)
    return result


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(str(dim) for dim in shape) or "a scalar"


def _format_problem(info: TensorInfo, decl: TensorDecl) -> str:
    if not info.format.is_runnable:
        return f"tensor {shown(info.name)} is {info.format.name}; hotset runs {', '.join(RUNNABLE)}"
    return f"{shown(info.name)} is {info.format.name}, expected {' or '.join(decl.formats)}"


def _raise_problems(
    checkpoint: Checkpoint, missing: list[str], extra: list[str], shapes: list[str], formats: list[str]
) -> None:
    classes = (("missing", missing), ("not expected", extra), ("wrong shape", shapes), ("wrong format", formats))
    parts = []
    for title, problems in classes:
        if problems:
            more = f" and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
            parts.append(f"{len(problems)} {title}: {', '.join(problems[:_MAX_NAMED])}{more}")
    if parts:
        hint = None
        if formats and not (missing or extra or shapes):
            hint = "get the model in one of the formats that hotset runs"
        elif missing and not extra:
            hint = "the file may be incomplete: download it again"
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(parts)}", hint)
