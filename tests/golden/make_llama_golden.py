"""Make the stored goldens of the Llama family: tiny random checkpoints and the logits transformers gives them.

Run it in the oracle environment (torch and transformers; ``make`` never needs it)::

    python3 -m venv .peers/oracle
    .peers/oracle/bin/pip install torch==2.13.0+cpu transformers==5.23.0 accelerate==1.15.0 gguf==0.19.0
    .peers/oracle/bin/python tests/golden/make_llama_golden.py

Each case becomes a directory ``tests/golden/llama/<case>/``: a complete Hugging Face checkpoint with a
byte tokenizer, and ``golden.npz`` with ``token_ids`` (int32 [n]), ``positions`` (int32 [m]) and
``logits`` (float32 [m, vocab]). The logits are computed in float32 from the weights *as stored* (a BF16
file is judged by its rounded weights). Weights come from NumPy's PCG64, so that the files do not
change with the version of torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
VOCAB_SIZE = 256 + len(SPECIALS)  # 260: not a multiple of 16, so that row tiles have a ragged end

# Positions whose logits are kept: the first ones, the borders of 16, 32, 64 and of the 256-token block, the end.
KEPT_POSITIONS = (
    *range(20), 31, 32, 33, 63, 64, 65, 100, 127, 128, 200, 254, 255, 256, 257, 258, 280, 298, 299, 511, 512, 598, 599,
)  # fmt: skip

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint; ``seed`` fixes its weights, so cases with equal seed and shape differ in dtype only."""

    name: str
    seed: int
    dtype: torch.dtype
    num_tokens: int = 300
    shard_size: str | None = None
    is_legacy: bool = False  # config.json as transformers 4 wrote it: rope_theta and rope_scaling at the top level
    config: dict[str, Any] = field(default_factory=dict)


TIED = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
UNTIED = {
    "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
LLAMA3 = {
    # head_dim is not hidden_size / num_attention_heads here, as in several real checkpoints.
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
LINEAR = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
}  # fmt: skip

CASES = (
    Case("tied_f32", 1, torch.float32, config=TIED),
    Case("tied_bf16", 1, torch.bfloat16, config=TIED),
    Case("tied_f16", 1, torch.float16, config=TIED),
    Case("untied_bf16_sharded", 2, torch.bfloat16, shard_size="220KB", config=UNTIED),
    Case("rope_llama3_f32", 3, torch.float32, num_tokens=600, config=LLAMA3),
    Case("rope_linear_f16", 4, torch.float16, is_legacy=True, config=LINEAR),
)


def random_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return float32 weights that make every part of the model matter.

    Query and key rows are drawn 1.5 times wider than unit variance asks, so that attention is peaked
    and an error in the rotary angles shows; norms are near 1 but all different.
    """
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * values
    if "embed_tokens" in name:
        return 0.5 * values
    gain = 1.5 if ("q_proj" in name or "k_proj" in name) else 1.0
    return values * np.float32(gain / np.sqrt(shape[1]))


def build_model(case: Case) -> LlamaForCausalLM:
    """Return the model of a case with its weights already rounded to the case's dtype."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, max_position_embeddings=1024, bos_token_id=0, eos_token_id=2, pad_token_id=3,
        attn_implementation="eager", **case.config,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    rng = np.random.default_rng(case.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(random_weight(name, tuple(parameter.shape), rng)))
    return model.to(case.dtype)


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer whose ids 4..259 are the bytes 0..255, after the four special tokens."""
    # The byte-level alphabet gives every byte one printable character: printable ones stand for themselves.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = {token: token_id for token_id, token in enumerate(SPECIALS)}
    vocab |= {letters[byte]: len(SPECIALS) + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def save_tokenizer(directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with a ChatML template)."""
    byte_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[2],
        "pad_token": SPECIALS[3], "add_bos_token": False, "clean_up_tokenization_spaces": False,
        "model_max_length": 1024, "chat_template": CHAT_TEMPLATE,
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_legacy_config(directory: Path) -> None:
    """Turn ``rope_parameters`` of transformers 5 into the two keys that most published checkpoints have."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.44.0"
    path.write_text(json.dumps(config, indent=2) + "\n")


def golden_logits(directory: Path, case: Case) -> dict[str, np.ndarray]:
    """Load the saved checkpoint again, run it in float32, and return the arrays of ``golden.npz``."""
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    token_ids = np.random.default_rng(1000 + case.seed).integers(4, VOCAB_SIZE, case.num_tokens).astype(np.int32)
    with torch.no_grad():
        logits = model(torch.from_numpy(token_ids).long()[None]).logits[0].numpy()
    positions = np.array([p for p in KEPT_POSITIONS if p < case.num_tokens], dtype=np.int32)
    return {"token_ids": token_ids, "positions": positions, "logits": logits[positions].astype(np.float32)}


def make_case(case: Case, root: Path) -> None:
    """Write one directory, from nothing."""
    directory = root / case.name
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    build_model(case).save_pretrained(directory, max_shard_size=case.shard_size or "1GB")
    if case.is_legacy:
        write_legacy_config(directory)
    save_tokenizer(directory)
    golden = golden_logits(directory, case)
    np.savez_compressed(directory / "golden.npz", **golden)
    for path in directory.iterdir():
        path.chmod(0o644)  # safetensors writes 0600, which would not survive a copy by another user
    logits = golden["logits"]
    if not np.isfinite(logits).all():
        raise SystemExit(f"{case.name}: logits are not finite")
    size = sum(path.stat().st_size for path in directory.iterdir())
    print(f"{case.name}: {len(logits)} rows kept, logit deviation {logits.std():.3f}, {size / 1024:.0f} KiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "llama", help="where the cases go")
    parser.add_argument("--only", choices=[case.name for case in CASES], action="append", help="make this case only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    for case in CASES:
        if not options.only or case.name in options.only:
            make_case(case, options.out)


if __name__ == "__main__":
    main()
