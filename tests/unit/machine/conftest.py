from __future__ import annotations

from pathlib import Path

import pytest
from machine_trees import FakeRoot


@pytest.fixture
def machine(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)
