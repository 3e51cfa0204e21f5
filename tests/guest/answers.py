"""Answers of a model, computed in the same way on the host and in the guest.

Usage: python answers.py FOLDER: for every model in FOLDER, and for one that `hotset synth` writes, print JSON with the
token ids of a greedy answer and a hash of all bits of the logits.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import hotset
from hotset.engine.events import Finished
from hotset.engine.sampling import Sampling

SYNTH = "deepseek-v4-narrow"
SYNTH_LAYERS = 2
_VOCAB = 256
_NUM_TOKENS = 300  # more than a block of the cache
_NUM_PROMPT_TOKENS = 40


@contextmanager
def on_cpus(cpus: Sequence[int]) -> Iterator[None]:
    """Allow this process those CPUs alone, one thread of hotset for each."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def answer(model: Path, cpus: Sequence[int]) -> dict[str, object]:
    """Token ids of a greedy answer, and a hash of the logits after every token of a text, computed on ``cpus``."""
    tokens = np.random.default_rng(5).integers(3, _VOCAB, _NUM_TOKENS)
    with on_cpus(cpus), hotset.load(model, threads=len(cpus), context=512, prefill_chunk=128) as engine:
        sampling = Sampling(max_tokens=12, ignore_eos=True)
        *_, finished = engine.generate(tokens[:_NUM_PROMPT_TOKENS].tolist(), sampling)
        logits = engine.logits(tokens)
    assert isinstance(finished, Finished)
    assert np.isfinite(logits).all()
    digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()
    return {"token_ids": list(finished.token_ids), "logits_sha256": digest}


def write_synth(hotset_command: Sequence[str], folder: Path) -> Path:
    """Write a random DeepSeek-V4 of a few megabytes with `hotset synth`."""
    words = [*hotset_command, "synth", SYNTH, "--layers", str(SYNTH_LAYERS), "--out", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return folder


def _answers(folder: Path) -> dict[str, object]:
    # The host's hotset is an unpacked wheel on PYTHONPATH, without scripts, and -S hides other installations of it.
    command = [sys.executable, "-S", "-c", "from hotset.cli.main import main; main()"]
    cpus = sorted(os.sched_getaffinity(0))[:1]
    found = {model.name: answer(model, cpus) for model in sorted(folder.iterdir())}
    with tempfile.TemporaryDirectory() as scratch:
        found[SYNTH] = answer(write_synth(command, Path(scratch) / SYNTH), cpus)
    return found


if __name__ == "__main__":
    print(json.dumps(_answers(Path(sys.argv[1]))))
