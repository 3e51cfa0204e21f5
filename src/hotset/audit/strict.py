"""JSON into frozen dataclasses: every field must be there, of its type, and no other may be."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from hotset.errors import MachineError

_Kind = TypeVar("_Kind")
_LARGEST = 1 << 63


def read_as(kind: type[_Kind], value: object, where: str) -> _Kind:
    """Return ``value``, plain JSON values, as the dataclass ``kind``; ``where`` names the place in errors.

    Numbers are 0 or more. Texts hold nothing that a terminal obeys.

    Raises:
        MachineError: a field is missing, unknown or of another type.
    """
    if not isinstance(value, Mapping):
        raise _error(where, value, "an object")
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = [name for name in value if name not in names]
    if unknown:
        raise MachineError(f"{where}: unknown field {unknown[0]!r:.60}, expected {', '.join(names)}")
    missing = [name for name in names if name not in value]
    if missing:
        raise MachineError(f"{where}: no field {missing[0]!r}")
    return kind(**{name: _read(hints[name], value[name], f"{where}: {name}") for name in names})


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        options = [option for option in arguments if option is not NoneType]
        return None if value is None else _read(options[0], value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _error(where, value, "a list")
        return tuple(_read(arguments[0], item, f"{where} {index}") for index, item in enumerate(value))
    if origin is Literal:
        if value not in arguments:
            raise _error(where, value, f"one of {', '.join(arguments)}")
        return value
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise _error(where, value, "an object")
        key, kind = arguments
        return {_key(key, name, where): _read(kind, item, f"{where} {name!r:.60}") for name, item in value.items()}
    if is_dataclass(hint):
        return read_as(hint, value, where)  # type: ignore[arg-type]
    return _scalar(hint, value, where)


def _scalar(kind: type, value: Any, where: str) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise _error(where, value, "true or false")
    elif kind is int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LARGEST:
            raise _error(where, value, "a whole number, 0 or more")
    elif kind is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0:
            raise _error(where, value, "a number, 0 or more")
        return float(value)
    elif not isinstance(value, str) or not value.isprintable():
        raise _error(where, value, "a text of one line")
    return value


def _key(kind: type, name: Any, where: str) -> Any:
    if kind is int:
        if not isinstance(name, int) and not re.fullmatch(r"-?\d{1,9}", name, re.ASCII):
            raise _error(where, name, "whole numbers as keys")
        return int(name)
    return _scalar(str, name, where)


def _error(where: str, value: object, expected: str) -> MachineError:
    return MachineError(f"{where} is {value!r:.60}, expected {expected}")
