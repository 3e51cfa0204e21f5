"""Typed access to metadata: every wrong value is named with what was found and what was expected."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.errors import CheckpointError
from hotset.models.spec import Fields

FIELDS = Fields(
    {"a.count": 3, "a.zero": 0, "a.rate": 0.5, "a.name": "x", "a.on": True, "a.none": None, "a.many": np.arange(40)},
    "file.gguf", "a.",
)  # fmt: skip


def test_values_of_the_right_kind() -> None:
    """An integer is a number; zero and False are values, not absences."""
    assert FIELDS.integer("count") == 3 and FIELDS.integer("zero", 5) == 0
    assert FIELDS.number("rate") == 0.5 and FIELDS.number("count") == 3.0
    assert isinstance(FIELDS.number("count"), float)
    assert FIELDS.text("name") == "x" and FIELDS.flag("on", False) is True
    assert FIELDS.has("zero") and not FIELDS.has("none") and not FIELDS.has("other")
    assert FIELDS.raw("name") == "x" and FIELDS.raw("other") is None


def test_defaults_are_for_absent_keys_only() -> None:
    """JSON's null counts as absent; a wrong value never falls back to the default."""
    assert FIELDS.integer("other", 7) == 7 and FIELDS.integer("none", 7) == 7
    assert (
        FIELDS.number("other", 0.0) == 0.0 and FIELDS.text("other", "") == "" and FIELDS.flag("other", False) is False
    )
    with pytest.raises(CheckpointError, match=r"a\.name is 'x', expected a non-negative integer"):
        FIELDS.integer("name", 7)


@pytest.mark.parametrize("read", ["integer", "number", "text"])
def test_missing_keys_are_named(read: str) -> None:
    with pytest.raises(CheckpointError, match=r"file\.gguf: a\.other is missing"):
        getattr(FIELDS, read)("other")


@pytest.mark.parametrize(
    ("read", "key", "expected"),
    [
        ("integer", "rate", "0.5, expected a non-negative integer"),
        ("integer", "on", "True, expected a non-negative integer"),
        ("number", "name", "'x', expected a number"),
        ("number", "on", "True, expected a number"),
        ("text", "count", "3, expected a string"),
    ],
)
def test_wrong_kinds_are_named(read: str, key: str, expected: str) -> None:
    """Guards against truth values that pass as numbers (JSON's true is Python's 1)."""
    with pytest.raises(CheckpointError) as error:
        getattr(FIELDS, read)(key)
    assert f"a.{key} is {expected}" in error.value.message
    with pytest.raises(CheckpointError, match="expected true or false"):
        FIELDS.flag("count", False)
    with pytest.raises(CheckpointError, match="-1, expected a non-negative integer"):
        Fields({"n": -1}, "f").integer("n")


def test_an_array_in_place_of_a_number_is_one_line() -> None:
    """Some files give one value per layer; the message stays one line however many there are."""
    with pytest.raises(CheckpointError) as error:
        FIELDS.integer("many")
    assert "a.many" in error.value.message and "\n" not in error.value.message
