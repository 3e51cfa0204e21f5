"""DeepSeek-V4 against transformers, live: other weights and tokens than the stored goldens have, every position.

Needs the oracle environment (``tests/golden/make_llama_golden.py`` says how to make it) and is skipped without it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
ORACLE = ROOT / ".peers/oracle/bin/python"
SCRIPT = ROOT / "tests/golden/make_deepseek_v4_golden.py"
SEEDS = (10, 11, 12)
TOLERANCE = 1e-4

sys.path.insert(0, str(SCRIPT.parent))
from deepseek_v4_cases import MODELS  # noqa: E402
from dsv4_reference import run_chunks, v4_reference, with_seed  # noqa: E402

pytestmark = pytest.mark.skipif(not ORACLE.exists(), reason=f"no oracle environment at {ORACLE}")


@pytest.fixture(scope="module", params=SEEDS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """Logits of every position of both models with that seed, computed by transformers now."""
    out = tmp_path_factory.mktemp("oracle")
    command = [str(ORACLE), str(SCRIPT), "--out", str(out), "--seed", str(request.param), "--all-positions"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return request.param, out


@pytest.mark.parametrize("name", MODELS)
def test_every_position_agrees_with_transformers(name: str, oracle: tuple[int, Path], tmp_path: Path) -> None:
    """One step, uneven steps: largest difference of any logit under 1e-4."""
    seed, folder = oracle
    golden = np.load(folder / f"{name}.npz")
    m = with_seed(MODELS[name], seed)
    cuts = sorted(np.random.default_rng(seed).choice(np.arange(1, 300), 12, replace=False).tolist())
    for steps in ([], cuts):
        logits = run_chunks(v4_reference(tmp_path, m, rounding=False), golden["token_ids"], steps)
        worst = float(np.abs(logits - golden["logits"]).max())
        print(f"{name}, seed {seed}, {len(steps) + 1} steps: largest difference {worst:.2e}")
        assert worst < TOLERANCE
