"""Both executors against logits that transformers computed from the same tiny checkpoints (tests/golden)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import Floats, Ints, native, reference, run

from hotset.api import describe_model
from hotset.machine.native import available_isas

FOLDER = Path(__file__).parents[1] / "golden" / "llama"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/golden.npz"))
# Root mean square in units of the logits' deviation. F32 and F16 weights: what half-precision cache rows cost (2^-12 of
# a value); BF16 weights: inputs of products as well (2^-9). Measured: 0.0005 and 0.007.
COST = {"f32": 2e-3, "f16": 2e-3, "bf16": 2e-2}


def rms(x: Floats) -> float:
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))


def golden(case: str) -> tuple[Ints, Ints, Floats]:
    with np.load(FOLDER / case / "golden.npz") as arrays:
        return arrays["token_ids"], arrays["positions"], arrays["logits"]


def test_all_cases_are_here() -> None:
    """Guards against tests that pass because a file was not found."""
    assert len(CASES) == 6


@pytest.mark.parametrize("case", CASES)
def test_reference_is_exact(case: str) -> None:
    """Exact arithmetic on the stored weights gives what transformers gives: 1e-4 of logits with deviation about 5."""
    tokens, positions, logits = golden(case)
    d = describe_model(FOLDER / case)
    with d.checkpoint:
        got = run(reference(d, rounding=False, context=1024), tokens)[positions]
    assert np.abs(got - logits).max() <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_native_is_within_the_cost_of_rounding(case: str) -> None:
    """The whole native path on real file layouts: sharded, tied, scaled angles, head size not hidden / heads.

    The cost is measured by the reference with rounding on; two executors that round alike may differ in single
    borderline values, so 1.1 times that (measured: 0.998 to 1.022).
    """
    tokens, positions, logits = golden(case)
    d = describe_model(FOLDER / case)
    with d.checkpoint:
        cost = rms(run(reference(d, context=1024), tokens)[positions] - logits)
        assert cost <= COST[case.split("_")[-1] if "sharded" not in case else "bf16"] * logits.std()
        for isa in available_isas():
            got = run(native(d, 2, isa, context=1024), tokens, [1, 3, 40, 256])[positions]
            assert rms(got - logits) <= 1.1 * cost
