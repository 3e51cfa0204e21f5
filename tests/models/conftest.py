"""The real models that these tests read; ``make test-models`` fetches them first."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotset.checkpoint.resolve import resolve_model

BENCHMARK_MODELS = Path(__file__).parents[2] / ".models"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The Q4_1 file, from the benchmark's folder or as ``hotset pull smollm2-135m`` left it; an error when neither."""
    path = BENCHMARK_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    return path if path.exists() else resolve_model("smollm2-135m")
