"""The DeepSeek-V4 family against logits that transformers computed from the same tiny checkpoints.

``make_deepseek_v4_golden.py`` made the logits; ``dsv4_files.py`` makes the checkpoints. The reference executor without
rounding must agree to float32 accuracy however the tokens are cut into steps: what goes from one step to the next lies
in blocks and frontiers, by position.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from deepseek_v4_cases import MODELS
from dsv4_reference import Floats, run_chunks, v4_reference

from hotset.program.reference import ReferenceExecutor

GOLDENS = Path(__file__).parent / "deepseek_v4"
TOLERANCE = 1e-4  # of logits with deviation 1: float32 sums in another order
CUTS = {
    "one step": [],
    "uneven": [1, 2, 5, 9, 40, 73, 127, 130, 255, 259, 299],
    "token by token": list(range(1, 300)),
}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def load(folder: Path, name: str) -> tuple[ReferenceExecutor, dict[str, np.ndarray]]:
    return v4_reference(folder, MODELS[name], rounding=False), dict(np.load(GOLDENS / f"{name}.npz"))


def difference(logits: Floats, golden: dict[str, np.ndarray]) -> float:
    return float(np.abs(logits[golden["positions"]] - golden["logits"]).max())


@pytest.mark.parametrize("cuts", CUTS)
def test_the_reference_agrees_with_transformers(name: str, cuts: str, tmp_path: Path) -> None:
    """Guards the declaration of the family and every op of it, and the state between steps."""
    executor, golden = load(tmp_path, name)
    worst = difference(run_chunks(executor, golden["token_ids"], CUTS[cuts]), golden)
    assert worst < TOLERANCE, worst
