from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from machine_trees import FakeRoot

MACHINES = Path(__file__).parents[2] / "fixtures" / "machines"


@pytest.fixture
def machine(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


@pytest.fixture
def snapshot(tmp_path: Path) -> Callable[[str], Path]:
    """Unpacks tests/fixtures/machines/NAME.tar.xz and returns the root of the tree."""

    def unpack(name: str) -> Path:
        root = tmp_path / name
        with tarfile.open(MACHINES / f"{name}.tar.xz") as archive:
            archive.extractall(root, filter="data")
        return root

    return unpack
