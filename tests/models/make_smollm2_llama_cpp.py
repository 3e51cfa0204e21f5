"""Make the second stored oracle of ``test_smollm2.py``: llama.cpp on the same file and tokens.

llama.cpp rounds activations to eight bits as hotset does, so this one says what that rounding alone may cost, where
the float32 oracle says what is exact. Run it after ``make_smollm2_oracle.py``, in the benchmark's environment::

    .peers/llama-cpp/bin/python tests/models/make_smollm2_llama_cpp.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

It writes ``smollm2_llama_cpp.npz``: per text ``<text>.argmax`` (int32 [n]) and ``<text>.losses`` (float32 [n - 1]).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent


def answers(model: llama_cpp.Llama, token_ids: np.ndarray) -> dict[str, np.ndarray]:
    """Return the best token after every token, and the loss of every token but the first."""
    model.reset()
    model.eval(token_ids.tolist())
    logits = model.scores[: len(token_ids)].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_probabilities = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    losses = -log_probabilities[np.arange(len(token_ids) - 1), token_ids[1:]]
    return {"argmax": logits.argmax(axis=1).astype(np.int32), "losses": losses.astype(np.float32)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    options = parser.parse_args()
    model = llama_cpp.Llama(str(options.gguf), n_ctx=1024, n_threads=2, logits_all=True, verbose=False)
    arrays = {}
    with np.load(HERE / "smollm2_oracle.npz") as oracle:
        for name in sorted(key.removesuffix(".token_ids") for key in oracle if key.endswith(".token_ids")):
            for key, array in answers(model, oracle[f"{name}.token_ids"]).items():
                arrays[f"{name}.{key}"] = array
    np.savez_compressed(HERE / "smollm2_llama_cpp.npz", **arrays)
    losses = np.concatenate([array for key, array in arrays.items() if key.endswith(".losses")])
    print(f"llama-cpp-python {llama_cpp.__version__}: perplexity {np.exp(losses.astype(np.float64).mean()):.4f}")


if __name__ == "__main__":
    main()
