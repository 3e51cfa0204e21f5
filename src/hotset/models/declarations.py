"""Collects the tensor declarations of a checkpoint, for families whose names end in ``.weight``."""

from __future__ import annotations

from typing import Literal

from hotset.checkpoint.manifest import TensorDecl

FLOAT_FORMATS = ("BF16", "F32", "F16")
"""The released one first."""


class Declarations:
    """``out`` grows by :meth:`add`; ``need`` and ``reason`` are those of the tensors added from now on."""

    def __init__(self) -> None:
        self.out: list[TensorDecl] = []
        self.need: Literal["must", "spare", "maybe"] = "must"
        self.reason = ""

    def add(
        self, key: str, name: str, shape: tuple[int, ...], role: str, formats: tuple[str, ...], stored_as: str = "",
        scale: str = "",
    ) -> None:  # fmt: skip
        self.out.append(TensorDecl(key, name, shape, role, formats, self.need, self.reason, stored_as, scale))

    def floats(self, key: str, name: str, *shape: int, role: str = "linear") -> None:
        """A tensor that is stored as it is multiplied: ``NAME.weight`` in one of the float formats."""
        self.add(key, f"{name}.weight", shape, role, FLOAT_FORMATS)

    def norm(self, key: str, name: str, width: int) -> None:
        self.floats(key, name, width, role="norm")
