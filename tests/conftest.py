"""Shared by all tests: the folder of this file is on the import path, so tests say ``from helpers import ...``."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings

from hotset.machine.native import available_isas

# Other processes share the machine: a slow example says nothing about the code, and a run must be repeatable.
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile("hotset", deadline=None, derandomize=True, report_multiple_bugs=False, phases=PHASES)
settings.load_profile("hotset")


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Every kernel set that this processor runs."""
    return request.param
