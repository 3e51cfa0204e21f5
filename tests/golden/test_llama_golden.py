"""The Llama family against logits that transformers computed from the same tiny checkpoints.

``make_llama_golden.py`` made the checkpoints and the logits. The reference executor without rounding must agree to
float32 accuracy; the native engine rounds activations (BF16 or int8) and cache rows (half precision), so it is
held to a share of the logits' own deviation.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_twin import write_twin

import hotset
from hotset.checkpoint import open_checkpoint
from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.manifest import account
from hotset.engine.batch import Segment, StepBatch
from hotset.models.registry import describe
from hotset.program.reference import ReferenceExecutor

CASES = sorted(path.parent for path in (Path(__file__).parent / "llama").glob("*/golden.npz"))
REFERENCE_TOLERANCE = 1e-4  # of the logits' deviation: float32 sums in another order
NATIVE_TOLERANCE = {"F32": 0.01, "F16": 0.01, "BF16": 0.1}  # by format; two to three times what rounding costs


@pytest.fixture(params=CASES, ids=lambda path: path.name)
def case(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(params=["safetensors", "gguf"])
def model_path(request: pytest.FixtureRequest, case: Path, tmp_path: Path) -> Path:
    """The checkpoint as transformers saved it, and as llama.cpp's converter would write it."""
    if request.param == "safetensors":
        return case
    path = tmp_path / f"{case.name}.gguf"
    with open_checkpoint(case) as checkpoint:
        write_twin(checkpoint, path)
    return path


def reference_logits(checkpoint: Checkpoint, token_ids: np.ndarray) -> np.ndarray:
    """Return logits [n, vocab] of exact arithmetic on the stored weights."""
    spec = describe(checkpoint)
    loaded = account(checkpoint, spec.tensors).loaded
    weights = {key: checkpoint.array(info.name) for key, info in loaded.items()}
    formats = {key: info.format.name for key, info in loaded.items()}
    count = len(token_ids)
    executor = ReferenceExecutor(spec, weights, formats, max_tokens=count, max_outputs=count, rounding=False)
    blocks = np.arange(executor.num_blocks, dtype=np.int32)[: -(-count // 256)]
    return executor.step(StepBatch(token_ids, [Segment(0, count, 0, blocks)], np.arange(count, dtype=np.int32)))


def test_reference_executor_agrees_with_transformers(case: Path, model_path: Path) -> None:
    """Guards the declaration of the family: a wrong rotary layout or scaling, head mapping, norm or tie."""
    golden = np.load(case / "golden.npz")
    with open_checkpoint(model_path) as checkpoint:
        logits = reference_logits(checkpoint, golden["token_ids"])[golden["positions"]]
    error = np.abs(logits - golden["logits"]).max() / golden["logits"].std()
    assert error < REFERENCE_TOLERANCE


def test_native_engine_agrees_with_transformers(case: Path, model_path: Path) -> None:
    """Guards the whole native path, from files to logits, at positions before, at and after a block border."""
    golden = np.load(case / "golden.npz")
    with open_checkpoint(model_path) as checkpoint:
        tolerance = max(NATIVE_TOLERANCE[info.format.name] for info in checkpoint.tensors.values())
    with hotset.load(model_path, threads=2, context=1024) as engine:
        logits = engine.logits(golden["token_ids"], positions="all")[golden["positions"]]
    error = np.abs(logits - golden["logits"]).max(axis=1) / golden["logits"].std()
    assert error.max() < tolerance, f"worst at position {golden['positions'][error.argmax()]}"


def test_last_logits_do_not_depend_on_the_prefill_chunk(case: Path) -> None:
    """Guards the chunk borders: the same tokens in pieces of 32 and in one piece give the same bits."""
    token_ids = np.load(case / "golden.npz")["token_ids"]
    rows = []
    for chunk in (32, 512):
        with hotset.load(case, threads=1, context=1024, prefill_chunk=chunk) as engine:
            rows.append(engine.logits(token_ids, positions="last"))
    np.testing.assert_array_equal(rows[0], rows[1])
