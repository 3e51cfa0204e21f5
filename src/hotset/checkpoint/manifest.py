"""Holds the tensors of a checkpoint against those that a model declares: every one is accounted for.

A tensor is loaded, optional and absent, or ignored for a stated reason. Anything else is an error that names it,
raised before a weight is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from hotset.checkpoint.checkpoint import Checkpoint, collector_paused
from hotset.checkpoint.formats import RUNNABLE
from hotset.checkpoint.tensor import TensorInfo, shown
from hotset.errors import CheckpointError, InternalError

_MAX_NAMED = 8
COMPANIONS = ("scale", "zero", "shape")
"""Roles of tensors that belong to a weight and are none of their own."""


class TensorDecl(NamedTuple):
    """One tensor that a model knows. A named tuple, because a model has 100,000 of them.

    ``key`` is the program's name, ``name`` the one in the checkpoint; several keys may share a name (tied weights).
    ``shape`` is row-major, ``formats`` are the accepted format names, both as they are in the file. ``need`` is

    * "must": has to be there, and is loaded,
    * "maybe": may be absent for ``reason``,
    * "ignored": not needed for ``reason``; its shape and format are not checked,
    * "spare": has to be there in this shape and format, and is not loaded for ``reason``.

    A weight whose scales are a tensor of their own names that tensor's key as ``scale``, and in ``stored_as`` what
    both together are to the program: "FP8" (formats F8_E4M3 and F8_E8M0), "FP8_F32" (F8_E4M3 and F32), "MXFP4" (I8, two
    weights to a byte, and F8_E8M0), "INT4" or "INT4_SYM" (I32, eight weights to a word, and BF16). The scales' own
    declaration has the role "scale". Packed weights have companions under ``KEY.zero`` (role "zero": the zero points of
    "INT4") and ``KEY.shape`` (role "shape": rows and columns).

    With ``parts`` above 1 the tensor is a whole stack, its first dimension: the parts of the key are ``KEY.0``,
    ``KEY.1``, ..., and lie one after another.
    """

    key: str
    name: str
    shape: tuple[int, ...]
    role: str
    formats: tuple[str, ...]
    need: Literal["must", "maybe", "ignored", "spare"] = "must"
    reason: str = ""
    stored_as: str = ""
    scale: str = ""
    parts: int = 1


@dataclass(frozen=True)
class Account:
    """Where every tensor went: ``loaded`` by program key, ``absent`` optional ones, ``ignored`` with the reason.

    ``declared`` holds the declaration of every loaded key.
    """

    loaded: dict[str, TensorInfo]
    absent: list[TensorDecl]
    ignored: list[tuple[TensorInfo, str]]
    declared: dict[str, TensorDecl] = field(default_factory=dict)

    def weights(self) -> Iterator[str]:
        """Keys of all loaded weights, the parts of a stacked tensor one by one; scales belong to their weight."""
        for key, decl in self.declared.items():
            if decl.parts > 1:
                yield from (f"{key}.{part}" for part in range(decl.parts))
            elif decl.role not in COMPANIONS:
                yield key

    def find(self, key: str) -> tuple[TensorInfo, TensorDecl]:
        """Return where the weight of a key lies, and its declaration; InternalError when it was not loaded.

        Part E of a stacked tensor is found as ``STACK.E``: shape, offset and bytes are those of the part.
        """
        if key in self.loaded:
            return self.loaded[key], self.declared[key]
        stack, _, part = key.rpartition(".")
        decl = self.declared.get(stack)
        if decl is None or decl.parts == 1 or not part.isdecimal() or int(part) >= decl.parts:
            raise InternalError(f"no weight {key} was loaded")
        whole = self.loaded[stack]
        nbytes = whole.nbytes // decl.parts
        offset = whole.offset + int(part) * nbytes
        return replace(whole, shape=whole.shape[1:], offset=offset, nbytes=nbytes), decl


@collector_paused()
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
            if decl.need in ("must", "spare"):
                missing.append(shown(decl.name))
            else:
                result.absent.append(decl)
        else:
            if info.shape != decl.shape:
                shapes.append(_shape_problem(info, decl))
            if info.format.name not in decl.formats:
                formats.append(_format_problem(info, decl))
            if decl.need == "spare":
                result.ignored.append((info, decl.reason))
                continue
            if decl.key in result.loaded:
                raise InternalError(f"the model declares the key {decl.key} twice")
            result.loaded[decl.key] = info
            result.declared[decl.key] = decl
    extra = [shown(name) for name in found if name not in known]
    _raise_problems(checkpoint, missing, extra, shapes, formats)
    return result


def formats_of(declarations: Iterable[TensorDecl], account: Account) -> dict[str, str]:
    """Return the program's format of every loaded weight by key, that of a stack under the stack's key as well.

    Keys ``STACK.0``, ``STACK.1``, ... are the parts of a stack. Scales have no entry: they belong to their weight.
    CheckpointError when the parts of a stack are stored in different formats.
    """
    return _collect(
        (decl, decl.stored_as or account.loaded[decl.key].format.name)
        for decl in declarations
        if account.declared.get(decl.key) is decl
    )


def declared_formats(declarations: Iterable[TensorDecl]) -> dict[str, str]:
    """Return the same for a model without files: of every weight the first format that its declaration accepts."""
    return _collect((d, d.stored_as or d.formats[0]) for d in declarations if d.need == "must")


def _collect(pairs: Iterable[tuple[TensorDecl, str]]) -> dict[str, str]:
    result: dict[str, str] = {}
    for decl, name in pairs:
        if decl.role in COMPANIONS:
            continue
        result[decl.key] = name
        stack, _, part = decl.key.rpartition(".")
        if part.isdecimal() and result.setdefault(stack, name) != name:
            raise CheckpointError(
                f"{shown(decl.name)} is {name} and others of {stack} are {result[stack]}, expected one format"
            )
    return result


def _shape_problem(info: TensorInfo, decl: TensorDecl) -> str:
    is_swapped = sorted(info.shape) == sorted(decl.shape)
    note = " (the same dimensions in another order)" if is_swapped else ""
    return f"{shown(decl.name)} is {_dims(info.shape)}, expected {_dims(decl.shape)}{note}"


def _dims(shape: tuple[int, ...]) -> str:
    return "x".join(str(dim) for dim in shape) or "a scalar"


def _format_problem(info: TensorInfo, decl: TensorDecl) -> str:
    if decl.stored_as or decl.role in COMPANIONS:
        meaning = f", the form of {decl.stored_as} weights" if decl.stored_as else ""
        return f"{shown(info.name)} is {info.format.name}, expected {' or '.join(decl.formats)}{meaning}"
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
