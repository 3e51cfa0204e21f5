"""Make the stored goldens of the DeepSeek-V4 family: the logits that transformers gives tiny random checkpoints.

Run it in the oracle environment (torch and transformers; see ``make_llama_golden.py``)::

    .peers/oracle/bin/python tests/golden/make_deepseek_v4_golden.py

The checkpoints are not stored: ``tests/dsv4_files.py`` makes them again, bit for bit, from a counter hash. Each case
becomes ``tests/golden/deepseek_v4/<case>.npz`` with ``token_ids`` (int32 [n]), ``positions`` (int32 [m]) and ``logits``
(float32 [m, vocab]). transformers loads the released tensor names by itself and runs in float32; it has no FP8 or FP4
arithmetic of its own on a CPU, so it gets what the stored weights are worth. Its maths has neither activation rounding
nor the Hadamard transform (specs/deepseek_v4.md section 8), which is hotset's reference with rounding off.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DeepseekV4ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # for dsv4_files, with or without pytest
from deepseek_v4_cases import MODELS, NUM_TOKENS
from dsv4_files import TinyV4, hashed, write_floats

# Borders of the window (32), of groups of 4 and 128, of the block of 256; the first positions; the end.
KEPT_POSITIONS = (*range(10), 15, 16, 30, 31, 32, 33, 35, 36, 63, 64, 126, 127, 128, 129, 131, 132, 200, 254, 255, 256,
                  257, 259, 260, 290, 298, 299)  # fmt: skip


def tokens_of(m: TinyV4) -> np.ndarray:
    """The prompt, int32 [n]."""
    return (hashed(m.seed, "tokens", NUM_TOKENS) % np.uint64(m.vocab)).astype(np.int32)


def oracle_logits(name: str, m: TinyV4, folder: Path) -> np.ndarray:
    """Logits of transformers in float32, [n, vocab], of one pass over the whole prompt."""
    write_floats(folder, m)
    model, report = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        raise SystemExit(f"{name}: transformers did not take the checkpoint as it is: {problems}")
    model.eval()
    with torch.no_grad():
        out = model(torch.from_numpy(tokens_of(m)).long()[None], use_cache=False)
    return out.logits[0].numpy().astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "deepseek_v4", help="where the cases go")
    parser.add_argument("--seed", type=int, default=0, help="add this to the seeds: other weights and tokens")
    parser.add_argument("--all-positions", action="store_true", help="keep the logits of every position")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, m in MODELS.items():
        m = replace(m, seed=m.seed + options.seed)
        with tempfile.TemporaryDirectory() as folder:
            logits = oracle_logits(name, m, Path(folder))
        if not np.isfinite(logits).all():
            raise SystemExit(f"{name}: logits are not finite")
        positions = np.array(range(NUM_TOKENS) if options.all_positions else KEPT_POSITIONS, dtype=np.int32)
        path = options.out / f"{name}.npz"
        np.savez_compressed(path, token_ids=tokens_of(m), positions=positions, logits=logits[positions])
        print(
            f"{name}: {len(positions)} rows, deviation {logits.std():.3f}, largest {np.abs(logits).max():.2f}, "
            f"{path.stat().st_size / 1024:.0f} KiB"
        )


if __name__ == "__main__":
    main()
