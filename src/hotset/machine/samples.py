"""Samples of a rate, and how much measuring them may cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from hotset.errors import MachineError
from hotset.units import GIB, MIB

MIN_SAMPLES = 5


@dataclass(frozen=True)
class Effort:
    """How much the probe may cost: bytes of memory and of files, seconds of each measured row."""

    buffer_bytes: int
    row_seconds: float
    choice_seconds: float
    file_bytes: int
    file_seconds: float

    def shared(self, num_rows: int, num_paid: int = 8) -> Effort:
        """The same with the time of ``num_paid`` rows for all ``num_rows``, when there are more of them."""
        return replace(self, row_seconds=self.row_seconds * min(1.0, num_paid / max(1, num_rows)))


FULL = Effort(GIB, 0.3, 0.15, GIB, 5.0)
QUICK = Effort(256 * MIB, 0.06, 0.03, 128 * MIB, 0.5)


@dataclass(frozen=True)
class Samples:
    """Rates per second from several short runs, in the order in which they were taken."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def inverse(self) -> Samples:
        """Seconds per thing in place of things per second."""
        return Samples(tuple(1 / value for value in self.values))

    def times(self, factor: float) -> Samples:
        return Samples(tuple(factor * value for value in self.values))

    def to_json(self) -> dict[str, Any]:
        return {"median": self.median, "min": self.low, "max": self.high, "samples": list(self.values)}


@contextmanager
def machine_errors() -> Iterator[None]:
    """What the native probe raises is about memory and CPUs that the system refuses."""
    try:
        yield
    except RuntimeError as error:
        raise MachineError(str(error)) from error
