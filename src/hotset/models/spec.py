"""What a model family declares: tensors, cache groups, a program. Everything else reads this."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hotset.checkpoint.manifest import TensorDecl
from hotset.errors import CheckpointError, RequestError
from hotset.program.cache import CacheGroup, FrontierGroup
from hotset.program.program import Program


@dataclass(frozen=True)
class CacheForm:
    """One way to store a family's cache rows: format and bytes of a row, by cache or frontier group.

    Groups that are not named keep theirs (compressor state is always float).
    """

    name: str
    rows: Mapping[str, tuple[str, int]]


@dataclass(frozen=True)
class ModelSpec:
    """One model, as declared from a checkpoint's headers.

    Attributes:
        family: the family file's name, e.g. ``"llama"``.
        name: what the checkpoint calls itself.
        max_context: largest number of tokens the model was made for.
        eos_ids: token ids that end an answer.
        cache_forms: what the cache rows can be, the default first.
        float_form: the default where every matrix is F32 or F16; empty for no such exception.
    """

    family: str
    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]
    tensors: tuple[TensorDecl, ...]
    groups: tuple[CacheGroup, ...]
    program: Program
    cache_forms: tuple[CacheForm, ...] = ()
    float_form: str = ""

    @property
    def frontier(self) -> tuple[FrontierGroup, ...]:
        """What a live sequence keeps beside its blocks."""
        return self.program.frontier


def with_cache_format(spec: ModelSpec, formats: Mapping[str, str], wish: str | None = None) -> ModelSpec:
    """The same model with its cache rows in the form ``wish``, or in that which suits its weights (``formats`` by key).

    A model without forms (one op under test) stays as it is.

    Raises:
        RequestError: a form that this family's cache rows cannot have.
    """
    names = [form.name for form in spec.cache_forms]
    if wish is not None and wish not in names:
        raise RequestError(f"cache format {wish!r}, expected one of {', '.join(names)}", " or ".join(names))
    if not names:
        return spec
    matrices = {formats[key] for key, weight in spec.program.weights.items() if weight.in_width > 1}
    is_float = bool(spec.float_form) and matrices <= {"F32", "F16"}
    name = wish or (spec.float_form if is_float else names[0])
    rows = next(form.rows for form in spec.cache_forms if form.name == name)
    groups = tuple(_with_rows(group, rows) for group in spec.groups)
    frontier = tuple(_with_rows(group, rows) for group in spec.program.frontier)
    return replace(spec, groups=groups, program=replace(spec.program, groups=groups, frontier=frontier))


_Group = TypeVar("_Group", CacheGroup, FrontierGroup)


def _with_rows(group: _Group, rows: Mapping[str, tuple[str, int]]) -> _Group:
    if group.name not in rows:
        return group
    name, row_bytes = rows[group.name]
    return replace(group, format=name, row_bytes=row_bytes)


def _short(value: object) -> str:
    """A value for one line of an error: arrays and long texts cut."""
    return " ".join(reprlib.repr(value).split())


def eos_ids_of(value: object, source: str) -> tuple[int, ...]:
    """Token ids that end an answer, from metadata: none, one, or a list of them."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise CheckpointError(f"{source}: eos_token_id is {value!r}, expected a token id or a list of them")
    return tuple(ids)


class Fields:
    """Typed access to a checkpoint's metadata that names what is missing or of the wrong kind.

    Keys get ``prefix`` put before them; those in ``names`` are called otherwise in the file.
    """

    def __init__(
        self, metadata: Mapping[str, Any], source: str, prefix: str = "", names: Mapping[str, str] | None = None
    ) -> None:
        self._metadata = metadata
        self._source = source
        self._prefix = prefix
        self._names = names or {}

    def name(self, key: str) -> str:
        """What the file calls a key."""
        return self._prefix + self._names.get(key, key)

    def has(self, key: str) -> bool:
        return self.raw(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer; ``default`` when the key is absent, an error without one."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"{self._source}: {self.name(key)} is {_short(value)}, expected a non-negative integer"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self._source}: {self.name(key)} is {_short(value)}, expected a number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if not (value > 0 and math.isfinite(value)):
            raise CheckpointError(f"{self._source}: {self.name(key)} is {value!r}, expected a number above 0")
        return value

    def section(self, key: str) -> Fields:
        """An object inside the metadata."""
        value = self.raw(key)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self._source}: {self.name(key)} is {_short(value)}, expected an object")
        return Fields(value, f"{self._source}: {key}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._source}: {self.name(key)} is {_short(value)}, expected a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._source}: {self.name(key)} is {_short(value)}, expected true or false")
        return value

    def raw(self, key: str) -> Any:
        return self._metadata.get(self.name(key))

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self.name(key))
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._source}: {self.name(key)} is missing")
        return default
