"""JSON without surprises: duplicate keys, NaN and infinities are errors, and so is anything malformed."""

from __future__ import annotations

import json
import math
from typing import Any

from hotset.checkpoint.tensor import shown
from hotset.errors import CheckpointError


class _Refused(ValueError):
    """A rule of ours, as opposed to one of JSON, was broken."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Refused(f"the key {shown(key)} appears twice")
            seen.add(key)
    return result


def _constant(text: str) -> Any:
    raise _Refused(f"{text} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Refused(f"the number {text[:40]} is too large")
    return value


def parse_json(data: bytes, what: str) -> Any:
    """Return the parsed JSON text (UTF-8); CheckpointError starting with ``what`` when it is not strict JSON."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
    except _Refused as error:
        raise CheckpointError(f"{what}: {error}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{what}: not UTF-8 text at byte {error.start}") from error
    except RecursionError as error:
        raise CheckpointError(f"{what}: nested too deeply") from error
    except ValueError as error:
        # JSONDecodeError, or an integer with thousands of digits.
        raise CheckpointError(f"{what}: not valid JSON ({error})") from error
