"""docs/reference/validation.md is what its command writes, and the prediction is as good as issue 4 asks."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def validation() -> Iterator[ModuleType]:
    sys.path.insert(0, str(FOLDER))
    import validation

    yield validation
    sys.path.remove(str(FOLDER))


def test_the_page_is_current(validation: ModuleType) -> None:
    """A table in the documents that nobody regenerates describes another program."""
    assert validation.page() == validation.PAGE.read_text(), "python benchmarks/validation.py"


def test_bars(validation: ModuleType) -> None:
    """At least 15 rows, median error under 15 %, nothing off by more than 2x without a note."""
    counted = [(row, row.predict()[0]) for row in validation.ROWS if not row.is_derived]
    assert len(counted) >= 15
    assert statistics.median(abs(validation.error(row, value)) for row, value in counted) < 15
    assert all(row.note for row, value in counted if validation.is_far(row, value))


def test_the_placement_decides_as_it_was_measured(validation: ModuleType) -> None:
    """FP8 GLM-5.2: default < rows over the CPUs < strict local, and 20.31 : 2.39 within 1.5x."""
    lines = [line.split("|") for line in validation.placements().splitlines() if line.startswith("| ")][1:]
    default, rows, local = (float(cells[2]) for cells in lines)
    assert default < rows < local
    assert 1 / 1.5 < (local / default) / (20.31 / 2.39) < 1.5
