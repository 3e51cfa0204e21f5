"""What ops are wired with: buffers of a step, and weights by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rows = Literal["tokens", "outputs", "pairs"]


@dataclass(frozen=True)
class Buffer:
    """Float32 matrix ``[rows, width]``.

    ``rows`` is the step's tokens, the step's wanted outputs, or its (token, expert) pairs in the order of
    :class:`Route`.
    """

    name: str
    width: int
    rows: Rows = "tokens"


@dataclass(frozen=True)
class Weight:
    """A matrix ``[out_width, in_width]`` (linear) or a vector (``in_width`` 1) named by key.

    ``count`` above 1 is a stack of such matrices, one per expert: ``KEY.E`` names matrix E. ``is_table`` marks an
    integer table (expert ids by token), which is never multiplied.
    """

    key: str
    out_width: int
    in_width: int
    count: int = 1
    is_table: bool = False

    @property
    def is_matrix(self) -> bool:
        """Whether it is multiplied, in its stored format; vectors and tables are expanded."""
        return self.in_width > 1 and not self.is_table

    def part(self, index: int) -> str:
        """Key of one matrix of the stack."""
        return f"{self.key}.{index}" if self.count > 1 else self.key
