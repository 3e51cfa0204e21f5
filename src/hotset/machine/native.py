"""The native module as the rest of hotset asks for it: imported on use, with the instruction set that is in force."""

from __future__ import annotations

from types import ModuleType

from hotset.config import load_settings
from hotset.errors import MachineError


def native_module() -> ModuleType:
    """Return ``hotset._native``; MachineError when this installation has none for this Python."""
    try:
        from hotset import _native
    except ImportError as error:
        raise MachineError(f"hotset's native module cannot be loaded: {error}", "make build") from error
    return _native


def available_isas() -> tuple[str, ...]:
    """Names of the kernel sets that this build has and this processor runs, best first."""
    return tuple(native_module().isas())


def isa_in_use() -> str:
    """The kernel set in force: the best one, or the one that HOTSET_ISA names. MachineError when it cannot run."""
    available = available_isas()
    if not available:
        raise MachineError(
            "this processor runs none of hotset's kernel sets",
            "they need AVX2 with FMA and F16C, or Arm dotprod and i8mm",
        )
    wanted = load_settings().isa
    if wanted is None:
        return available[0]
    if wanted not in available:
        raise MachineError(
            f"HOTSET_ISA={wanted} cannot run here, this processor runs {', '.join(available)}",
            f"HOTSET_ISA={available[0]}",
        )
    return wanted
