"""Shared by all tests: the folder of this file is on the import path, so tests say ``from helpers import ...``."""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

from hotset.machine.native import available_isas

# NumPy is not imported yet. One thread for its products: the reference executor then gives the same bits with any
# number of processors, and does not fight with other processes for them.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

# Other processes share the machine: a slow example says nothing about the code, and a run must be repeatable.
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
settings.register_profile("hotset", deadline=None, derandomize=True, report_multiple_bugs=False, phases=PHASES)
settings.load_profile("hotset")


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    """Every kernel set that this processor runs."""
    return request.param
