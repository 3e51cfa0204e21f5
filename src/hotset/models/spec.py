"""What a model family declares: tensors, cache groups, a program. Everything else reads this."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hotset.checkpoint.manifest import TensorDecl
from hotset.errors import CheckpointError, RequestError
from hotset.program.cache import CacheGroup
from hotset.program.program import Program


@dataclass(frozen=True)
class ModelSpec:
    """One model, as declared from a checkpoint's headers.

    Attributes:
        family: the family file's name, e.g. ``"llama"``.
        name: what the checkpoint calls itself.
        max_context: largest number of tokens the model was made for.
        eos_ids: token ids that end an answer.
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


CACHE_FORMATS = ("BF16", "F16")


def with_cache_format(spec: ModelSpec, formats: Mapping[str, str], wish: str | None = None) -> ModelSpec:
    """The same model with its cache rows in ``wish``, or in the format that suits its weights (``formats`` by key).

    BF16 rows are multiplied with BF16 queries and weights, which is what the models' own code does and is quickest. F16
    rows keep three more bits and are multiplied as floats; they are the default where every product takes float inputs
    (F32 and F16 weights), so that attention is not the coarsest step of the model.

    Raises:
        RequestError: a format that cache rows cannot have.
    """
    if wish is not None and wish not in CACHE_FORMATS:
        raise RequestError(f"cache format {wish!r}, expected one of {', '.join(CACHE_FORMATS)}", "BF16 or F16")
    matrices = {formats[key] for key, weight in spec.program.weights.items() if weight.in_width > 1}
    name = wish or ("F16" if matrices <= {"F32", "F16"} else "BF16")
    groups = tuple(replace(group, format=name) for group in spec.groups)
    return replace(spec, groups=groups, program=replace(spec.program, groups=groups))


def _short(value: object) -> str:
    """A value for one line of an error: arrays and long texts cut."""
    return " ".join(reprlib.repr(value).split())


class Fields:
    """Typed access to a checkpoint's metadata that names what is missing or of the wrong kind."""

    def __init__(self, metadata: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._metadata = metadata
        self._source = source
        self._prefix = prefix

    def has(self, key: str) -> bool:
        return self._metadata.get(self._prefix + key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A non-negative integer; ``default`` when the key is absent, an error without one."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise CheckpointError(
                f"{self._source}: {self._prefix}{key} is {_short(value)}, expected a non-negative integer"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{self._source}: {self._prefix}{key} is {_short(value)}, expected a number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self.number(key, default)
        if not (value > 0 and math.isfinite(value)):
            raise CheckpointError(f"{self._source}: {self._prefix}{key} is {value!r}, expected a number above 0")
        return value

    def section(self, key: str) -> Fields:
        """An object inside the metadata."""
        value = self.raw(key)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self._source}: {self._prefix}{key} is {_short(value)}, expected an object")
        return Fields(value, f"{self._source}: {key}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise CheckpointError(f"{self._source}: {self._prefix}{key} is {_short(value)}, expected a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self._source}: {self._prefix}{key} is {_short(value)}, expected true or false")
        return value

    def raw(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self._prefix + key)
        if value is not None:
            return value
        if default is None:
            raise CheckpointError(f"{self._source}: {self._prefix}{key} is missing")
        return default
