"""GGUF conversions of the DeepSeek-V4 family: the same tensors under the names of llama.cpp's ``deepseek4``.

No row and no channel is moved: heads, output groups, rotary pairs and position tables lie as released. The experts of a
projection are one tensor ``[experts, out, in]``. Packed FP4 becomes MXFP4 blocks with the same bits; FP8 matrices are
quantised (Q8_0 by llama.cpp's converter); what was F32 stays so, norms become F32, expert ids I32. The draft head is
left out, or a file of its own. Sources: ggml-org/llama.cpp, conversion/deepseek.py and src/models/deepseek4.cpp;
antirez/ds4, ds4.c, whose files differ in formats alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.formats import RUNNABLE
from hotset.checkpoint.manifest import TensorDecl
from hotset.checkpoint.tensor import TensorInfo
from hotset.errors import CheckpointError
from hotset.models import deepseek_v4_tensors as released
from hotset.models.declarations import FLOAT_FORMATS
from hotset.models.deepseek_v4_config import FIXED, DeepSeekV4Config, config_of
from hotset.models.spec import Fields

PREFIX = "deepseek4."
SQRT_SOFTPLUS = 4
"""``expert_gating_func`` of the released models."""

# What config.json calls it: what the file does, after PREFIX.
KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "qk_rope_head_dim": "rope.dimension_count",
    "q_lora_rank": "attention.q_lora_rank",
    "o_groups": "attention.output_group_count",
    "o_lora_rank": "attention.output_lora_rank",
    "sliding_window": "attention.sliding_window",
    "compress_ratios": "attention.compress_ratios",
    "compress_rope_theta": "attention.compress_rope_freq_base",
    "rope_theta": "rope.freq_base",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "hc_mult": "hyper_connection.count",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "scoring_func": "expert_gating_func",
    "num_hash_layers": "hash_layer_count",
    "swiglu_limit": "swiglu_clamp_exp",
}
ROPE_KEYS = {
    "type": "type",
    "factor": "factor",
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
ONCE = ("swiglu_clamp_exp", "expert_feed_forward_length", *(KEYS[key] for key in FIXED if key in KEYS))
"""Given for every layer in some files; hotset runs one value for all."""
EOS_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")

# The program's key: the file's name, for the tensors outside layers and for those of a layer.
ROOT_NAMES = {
    "embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight",
    "hc_head.fn": "output_hc_fn.weight", "hc_head.base": "output_hc_base.weight",
    "hc_head.scale": "output_hc_scale.weight",
}  # fmt: skip
LAYER_NAMES = {
    "attn_norm": "attn_norm.weight", "ffn_norm": "ffn_norm.weight",
    "hc_attn.fn": "hc_attn_fn.weight", "hc_attn.base": "hc_attn_base.weight", "hc_attn.scale": "hc_attn_scale.weight",
    "hc_ffn.fn": "hc_ffn_fn.weight", "hc_ffn.base": "hc_ffn_base.weight", "hc_ffn.scale": "hc_ffn_scale.weight",
    "sink": "attn_sinks.weight", "wq_a": "attn_q_a.weight", "q_norm": "attn_q_a_norm.weight",
    "wq_b": "attn_q_b.weight", "wkv": "attn_kv.weight", "kv_norm": "attn_kv_a_norm.weight",
    "wo_a": "attn_output_a.weight", "wo_b": "attn_output_b.weight",
    "comp.ape": "attn_compressor_ape.weight", "comp.wkv": "attn_compressor_kv.weight",
    "comp.wgate": "attn_compressor_gate.weight", "comp.norm": "attn_compressor_norm.weight",
    "index.wq_b": "indexer.attn_q_b.weight", "index.weights": "indexer.proj.weight",
    "index.comp.ape": "indexer_compressor_ape.weight", "index.comp.wkv": "indexer_compressor_kv.weight",
    "index.comp.wgate": "indexer_compressor_gate.weight", "index.comp.norm": "indexer_compressor_norm.weight",
    "gate": "ffn_gate_inp.weight", "gate_bias": "exp_probs_b.bias", "tid2eid": "ffn_gate_tid2eid.weight",
    "shared.w1": "ffn_gate_shexp.weight", "shared.w3": "ffn_up_shexp.weight", "shared.w2": "ffn_down_shexp.weight",
    "experts.w1": "ffn_gate_exps.weight", "experts.w3": "ffn_up_exps.weight", "experts.w2": "ffn_down_exps.weight",
}  # fmt: skip


def read_config(checkpoint: Checkpoint) -> DeepSeekV4Config:
    """The configuration of a GGUF file. Raises CheckpointError where it is not one that can be run."""
    source = str(checkpoint.path)
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{source}: tensor token_embd.weight is missing")
    metadata = dict(checkpoint.metadata)
    general, f = Fields(metadata, source), Fields(metadata, source, PREFIX)
    if f.integer("attention.value_length", f.integer("attention.key_length")) != f.integer("attention.key_length"):
        raise CheckpointError(f"{source}: key and value heads of different size")
    if f.integer("expert_group_count", 0) > 1:
        raise CheckpointError(f"{source}: {PREFIX}expert_group_count is {f.integer('expert_group_count')}, expected 0")
    changed = {key: _once(f, key, source) for key in ONCE}
    if f.has("swiglu_clamp_shexp") and _once(f, "swiglu_clamp_shexp", source) != changed["swiglu_clamp_exp"]:
        raise CheckpointError(f"{source}: routed and shared experts are clamped at different values")
    if changed["expert_gating_func"] == SQRT_SOFTPLUS:
        changed["expert_gating_func"] = "sqrtsoftplus"
    ratios = f.raw("attention.compress_ratios")
    changed["attention.compress_ratios"] = ratios.tolist() if isinstance(ratios, np.ndarray) else ratios
    changed["block_count"] = _num_layers(f, checkpoint, source)
    changed["vocab_size"] = f.integer("vocab_size", embedding.shape[0])
    changed["eos_token_id"] = list(dict.fromkeys(general.integer(key) for key in EOS_KEYS if general.has(key)))
    if f.text("rope.scaling.type", "none") != "none":
        scaling = {key: f.raw(f"rope.scaling.{name}") for key, name in ROPE_KEYS.items()}
        changed["rope_scaling"] = {key: value for key, value in scaling.items() if value is not None}
    metadata |= {PREFIX + key: value for key, value in changed.items()}
    name = general.text("general.name", checkpoint.path.stem)
    # The released declarations then have every matrix in its plain shape, experts too.
    return config_of(Fields(metadata, source, PREFIX, KEYS), source, name, "FP8")


def _once(f: Fields, key: str, source: str) -> Any:
    """A value that files give once or once a layer; CheckpointError where layers differ."""
    value = f.raw(key)
    if not isinstance(value, np.ndarray):
        return value
    values = sorted(set(value.tolist()))
    if len(values) != 1:
        raise CheckpointError(
            f"{source}: {f.name(key)} has {len(values)} different values, expected one for all layers"
        )
    return values[0]


def _first_draft(f: Fields, checkpoint: Checkpoint) -> int | None:
    """The first block of a draft head; some files state one that they do not hold."""
    first = f.integer("block_count") - f.integer("nextn_predict_layers", 0)
    return first if f"blk.{first}.nextn.eh_proj.weight" in checkpoint.tensors else None


def _num_layers(f: Fields, checkpoint: Checkpoint, source: str) -> int:
    """Blocks of the trunk: without those of a draft head in the same file."""
    first = _first_draft(f, checkpoint)
    if first is None:
        return f.integer("block_count")
    if "blk.0.attn_norm.weight" not in checkpoint.tensors:
        raise CheckpointError(f"{source}: this file holds the draft head alone", "the file of the model itself")
    return first


def declare_tensors(config: DeepSeekV4Config, found: Mapping[str, TensorInfo]) -> tuple[TensorDecl, ...]:
    """All tensors of the file; ``found`` are those of its headers."""
    return (*_trunk(config), *_draft(config, found))


def _trunk(config: DeepSeekV4Config) -> Iterator[TensorDecl]:
    for decl in released.declare_tensors(config, {}):
        if decl.role == "scale":
            continue
        key, shape, parts = decl.key, decl.shape, 1
        stack, _, part = key.rpartition(".")
        if part.isdecimal():
            if part != "0":
                continue
            key, shape, parts = stack, (config.num_experts, *shape), config.num_experts
        name = ROOT_NAMES.get(key)
        if name is None:
            _, layer, rest = key.split(".", 2)
            name = f"blk.{layer}.{LAYER_NAMES[rest]}"
        yield TensorDecl(key, name, shape, decl.role, _formats(key, shape), parts=parts)


def _formats(key: str, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Everything that can be expanded: position tables and mixing matrices are quantised by some tools as well."""
    if key.endswith("tid2eid"):
        return ("I32", "I64")
    return FLOAT_FORMATS if len(shape) == 1 else RUNNABLE


def _draft(config: DeepSeekV4Config, found: Mapping[str, TensorInfo]) -> Iterator[TensorDecl]:
    """Blocks of a draft head after the trunk: accounted for and not looked into."""
    if f"blk.{config.num_layers}.nextn.eh_proj.weight" not in found:
        return
    for name in found:
        block = name.split(".", 2)
        if block[0] == "blk" and len(block) == 3 and block[1].isdecimal() and int(block[1]) >= config.num_layers:
            yield TensorDecl(name, name, (), "linear", (), "ignored", released.DRAFT_REASON["mtp"])
