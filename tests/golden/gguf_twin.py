"""Write a Hugging Face Llama checkpoint as GGUF, the way llama.cpp's converter does.

The twin holds the same weights in float32, with the two differences that readers get wrong: rows of the query and
key projections in adjacent-pair order, and the Llama 3.1 frequency factors as a tensor of their own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from hotset.checkpoint.checkpoint import Checkpoint

GLOBAL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
PAD_ID = 3
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor name."""
    if name in GLOBAL_NAMES:
        return GLOBAL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def to_adjacent_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder output rows: within each head, rows j and j + head_dim / 2 become neighbours 2j and 2j + 1."""
    rows, inputs = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray:
    """Return what each rotary frequency is divided by, float32 [head_dim / 2] (rule of llama.cpp's converter)."""
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * index / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of either form of config.json under the names of the newer one."""
    if "rope_parameters" in config:
        return dict(config["rope_parameters"])
    scaling = dict(config["rope_scaling"])
    return {"rope_type": scaling.pop("type"), "rope_theta": config["rope_theta"], **scaling}


def add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    """Add the byte tokenizer of ``tokenizer.json``.

    A GGUF file must list merges and the byte tokenizer has none, so the unused padding token becomes the one of
    a space and a "t" (in the byte-level alphabet a space is written with a dotted capital G).
    """
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    vocab = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    tokens = [token for token, _ in vocab]
    specials = {token["id"] for token in tokenizer["added_tokens"]} - {PAD_ID}
    tokens[PAD_ID] = "\u0120t"
    kinds = [gguf.TokenType.CONTROL if index in specials else gguf.TokenType.NORMAL for index in range(len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["\u0120 t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def write_twin(checkpoint: Checkpoint, path: Path) -> None:
    """Write ``path`` with the weights, settings and tokenizer of ``checkpoint``, a directory."""
    config = checkpoint.metadata
    rope = rope_settings(config)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, checkpoint.path)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config["head_dim"]))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name in checkpoint.tensors:
        weight = checkpoint.array(name)
        part = name.split(".")[-2]
        if part in heads:
            weight = to_adjacent_pairs(weight, heads[part])
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(weight, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
