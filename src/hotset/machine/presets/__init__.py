"""Machines that are not this one, as published measurements describe them: one JSON profile each, with its sources."""

from __future__ import annotations

from importlib import resources

from hotset.errors import InternalError
from hotset.machine.profile import Profile, parse_profile

_FOLDER = resources.files("hotset.machine.presets")


def preset_names() -> tuple[str, ...]:
    """The names of all presets."""
    names = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def read_preset(name: str) -> Profile:
    """Return the preset of that name, one of :func:`preset_names`."""
    if name not in preset_names():
        raise InternalError(f"no preset is named {name}")
    return parse_profile((_FOLDER / f"{name}.json").read_bytes(), f"preset {name}")
