"""Make the stored answers that ``test_smollm2.py`` holds hotset against: transformers' GGUF loader, in float32.

Run it in the oracle environment (see ``tests/golden/make_llama_golden.py``) after ``hotset pull smollm2-135m``::

    .peers/oracle/bin/python tests/models/make_smollm2_oracle.py PATH/SmolLM2-135M-Instruct.Q4_1.gguf

It reads ``texts/*.txt``, each a sequence of its own (openings of works long in the public domain), and writes
``smollm2_oracle.npz`` and ``smollm2_oracle.json`` beside itself. The weights are the file's own
quantised values, expanded exactly; only the arithmetic (float32 instead of integer dot products) differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

HERE = Path(__file__).parent
# Chosen out of a dozen because every greedy step wins by a wide margin (0.54 and 1.9 logits at the
# narrowest), so that rounding activations to eight bits cannot turn it. A narrow step would make the test a
# coin toss. A list of messages goes through the chat template, a string goes in as it is.
PROMPTS = {
    "chat": [{"role": "user", "content": "What is 2+2?"}],
    "counting": "1, 2, 3, 4, 5,",
}
MAX_NEW_TOKENS = 40
NUM_TOP = 8


def load(gguf: Path) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """Return the model with float32 weights, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def logits_of(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """Return float32 logits [n, vocab] of one pass over ``token_ids``."""
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def text_answers(model: torch.nn.Module, token_ids: list[int]) -> dict[str, np.ndarray]:
    """Return, per position: the best token, its lead over the second, the top log-probabilities, the loss."""
    logits = logits_of(model, token_ids)
    log_probabilities = torch.log_softmax(logits.double(), dim=-1)
    top_values, top_ids = torch.topk(log_probabilities, NUM_TOP, dim=-1)
    targets = torch.tensor(token_ids[1:])[:, None]
    losses = -log_probabilities[:-1].gather(1, targets)[:, 0]
    return {
        "token_ids": np.array(token_ids, dtype=np.int32),
        "argmax": top_ids[:, 0].numpy().astype(np.int32),
        "margin": (top_values[:, 0] - top_values[:, 1]).numpy().astype(np.float32),
        "top_ids": top_ids.numpy().astype(np.int32),
        "top_log_probabilities": top_values.numpy().astype(np.float32),
        "losses": losses.numpy().astype(np.float32),
    }


def prompt_answers(
    model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]]
) -> dict[str, object]:
    """Return the prompt as text and ids, its greedy continuation (with the end token) and the lead of every step."""
    text = prompt
    if not isinstance(prompt, str):
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    token_ids, margins = list(prompt_ids), []
    for _ in range(MAX_NEW_TOKENS):
        best = torch.topk(logits_of(model, token_ids)[-1], 2)
        token_ids.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 3))
        if token_ids[-1] == tokenizer.eos_token_id:
            break
    continuation = token_ids[len(prompt_ids) :]
    return {
        "prompt": prompt,
        "rendered": text,
        "prompt_ids": prompt_ids,
        "continuation_ids": continuation,
        "continuation_text": tokenizer.decode(continuation, skip_special_tokens=True),
        "margins": margins,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    options = parser.parse_args()
    torch.set_num_threads(2)
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load(options.gguf)

    texts = {path.stem: path.read_text() for path in sorted((HERE / "texts").glob("*.txt"))}
    answers = {
        name: text_answers(model, tokenizer(text, add_special_tokens=False)["input_ids"])
        for name, text in texts.items()
    }
    arrays = {f"{name}.{key}": array for name, answer in answers.items() for key, array in answer.items()}
    losses = np.concatenate([answer["losses"] for answer in answers.values()]).astype(np.float64)

    np.savez_compressed(HERE / "smollm2_oracle.npz", **arrays)
    record = {
        "made_by": f"transformers {transformers.__version__}, torch {torch.__version__}, float32",
        "gguf_sha256": hashlib.sha256(options.gguf.read_bytes()).hexdigest(),
        "texts": {name: len(answer["token_ids"]) for name, answer in answers.items()},
        "perplexity": float(np.exp(losses.mean())),
        "prompts": {name: prompt_answers(model, tokenizer, prompt) for name, prompt in PROMPTS.items()},
    }
    (HERE / "smollm2_oracle.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{sum(record['texts'].values())} tokens, perplexity {record['perplexity']:.4f}")
    for name, answer in record["prompts"].items():
        print(f"{name}: narrowest step {min(answer['margins'])}, text {answer['continuation_text']!r}")


if __name__ == "__main__":
    main()
