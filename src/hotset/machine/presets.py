"""Machines that are not this one, as published measurements describe them.

Capacities are what the memory modules hold, bandwidths what was measured, in bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotset.errors import RequestError
from hotset.units import GIB


@dataclass(frozen=True)
class Pool:
    """One memory: its capacity, the share of it that a run may plan with, and its measured read bandwidth."""

    name: str
    num_bytes: int
    usable: float
    bytes_per_s: float

    @property
    def usable_bytes(self) -> int:
        return int(self.num_bytes * self.usable)


@dataclass(frozen=True)
class Preset:
    """A machine of equal modules: ``devices`` are the memories of its accelerators, ``hosts`` those of its CPUs."""

    name: str
    about: str
    source: str
    devices: tuple[Pool, ...]
    hosts: tuple[Pool, ...]


# 96 GB are 96 GiB here: 79.15 GiB of weights and 8.28 GiB of cache were in use at a utilisation of 0.96, which 96e9
# bytes do not hold. That utilisation is what runs on it kept, so it is what may be planned with.
_DUAL_GH200 = Preset(
    name="dual-gh200",
    about="two Grace Hopper modules, each one Hopper with 96 GB HBM3 and one Grace with 480 GB LPDDR5X",
    source="specs/reference_systems.md: BabelStream and STREAM triad on one workstation (dnhkng.github.io, 2026)",
    devices=(Pool("HBM 0", 96 * GIB, 0.96, 3728e9), Pool("HBM 1", 96 * GIB, 0.96, 3724e9)),
    hosts=(Pool("LPDDR 0", 480 * 10**9, 1.0, 348e9), Pool("LPDDR 1", 480 * 10**9, 1.0, 348e9)),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (_DUAL_GH200,)}


def find_preset(name: str) -> Preset:
    """Return a preset; RequestError when there is none of that name."""
    if name not in PRESETS:
        raise RequestError(f"no machine is named {name}", f"one of {', '.join(PRESETS)}")
    return PRESETS[name]
