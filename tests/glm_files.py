"""A GLM-5.2 of toy size, and headers without files for what a model declares."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.formats import FORMATS
from hotset.checkpoint.manifest import TensorDecl
from hotset.checkpoint.tensor import TensorInfo
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
TINY: dict[str, Any] = {
    "model_type": "glm_moe_dsa", "eos_token_id": [5, 6], "first_k_dense_replace": 1, "head_dim": 192,
    "hidden_size": 64, "index_head_dim": 64, "index_n_heads": 2, "index_skip_topk_offset": 1, "index_topk": 8,
    "index_topk_freq": 2, "intermediate_size": 96, "kv_lora_rank": 128, "max_position_embeddings": 4096,
    "moe_intermediate_size": 64, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 4, "num_experts_per_tok": 2, "num_hidden_layers": 4, "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1, "q_lora_rank": 64, "qk_head_dim": 48, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 10000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 48, "vocab_size": 300,
}  # fmt: skip


def packed(**changes: Any) -> dict[str, Any]:
    """The quantization_config of a "pack-quantized" release."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def headers(declarations: Iterable[TensorDecl]) -> dict[str, TensorInfo]:
    """The headers of a checkpoint that holds each tensor in the first format that its declaration accepts."""
    out = {}
    for decl in declarations:
        fmt = FORMATS[decl.formats[0]]
        out[decl.name] = TensorInfo(decl.name, decl.shape, fmt, 0, 0, fmt.nbytes(decl.shape))
    return out


def opened(config: dict[str, Any], tensors: dict[str, TensorInfo] | None = None) -> Checkpoint:
    return Checkpoint("safetensors", Path("model"), [], config, tensors or {})


def declared(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """Describe a config.json without files; a value of None is JSON's null."""
    return describe(opened(config | changes))
