"""The tiny DeepSeek-V4 checkpoints of dsv4_files.py as GGUF files, as llama.cpp's converter lays them out.

The names are written out once more here, and blocks are packed by the gguf package: a second opinion.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from dsv4_files import Stored, TinyV4, make_tensors
from gguf.quants import quantize
from numpy.typing import NDArray

ROOT = {
    "embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "head.weight": "output.weight",
    "hc_head_fn": "output_hc_fn.weight", "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight",
}  # fmt: skip
LAYER = {
    "attn_norm.weight": "attn_norm.weight",
    "hc_attn_fn": "hc_attn_fn.weight",
    "hc_attn_base": "hc_attn_base.weight",
    "hc_attn_scale": "hc_attn_scale.weight",
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight",
    "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
    "hc_ffn_fn": "hc_ffn_fn.weight",
    "hc_ffn_base": "hc_ffn_base.weight",
    "hc_ffn_scale": "hc_ffn_scale.weight",
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    "ffn.shared_experts.w1.weight": "ffn_gate_shexp.weight",
    "ffn.shared_experts.w2.weight": "ffn_down_shexp.weight",
    "ffn.shared_experts.w3.weight": "ffn_up_shexp.weight",
}
STACKS = {"w1": "ffn_gate_exps.weight", "w2": "ffn_down_exps.weight", "w3": "ffn_up_exps.weight"}


def gguf_name(name: str) -> str:
    """What the file calls a released tensor; experts give the name of their stack."""
    if name in ROOT:
        return ROOT[name]
    _, layer, rest = name.split(".", 2)
    part = rest.split(".")[3] if rest.startswith("ffn.experts.") else ""
    return f"blk.{layer}.{STACKS[part] if part else LAYER[rest]}"


def metadata(m: TinyV4) -> dict[str, Any]:
    """The keys, in the types that converters write: u32, f32, bool, str, arrays."""
    layers = len(m.ratios)
    return {
        "block_count": layers, "context_length": m.max_context, "embedding_length": m.hidden,
        "attention.head_count": m.heads, "attention.head_count_kv": 1, "attention.key_length": m.head_dim,
        "attention.value_length": m.head_dim, "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.q_lora_rank": m.q_rank, "attention.sliding_window": m.window,
        "attention.output_group_count": m.o_groups, "attention.output_lora_rank": m.o_rank,
        "attention.compress_ratios": list(m.ratios), "attention.compress_rope_freq_base": m.compress_theta,
        "attention.indexer.head_count": m.index_heads, "attention.indexer.key_length": m.index_dim,
        "attention.indexer.top_k": m.index_top_k,
        "rope.dimension_count": m.rotary, "rope.freq_base": m.theta, "rope.scaling.type": "yarn",
        "rope.scaling.factor": m.yarn_factor, "rope.scaling.original_context_length": m.yarn_original,
        "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": m.experts, "expert_used_count": m.top_k, "expert_shared_count": 1,
        "expert_feed_forward_length": m.inter, "expert_gating_func": 4, "expert_weights_scale": 1.5,
        "expert_weights_norm": True, "swiglu_clamp_exp": [m.limit] * layers, "swiglu_clamp_shexp": [m.limit] * layers,
        "hyper_connection.count": m.streams, "hyper_connection.sinkhorn_iterations": m.iterations,
        "hyper_connection.epsilon": 1e-6, "hash_layer_count": m.hash_layers,
    }  # fmt: skip


def mxfp4_blocks(weight: Stored, scale: Stored) -> NDArray[np.uint8]:
    """Packed FP4 rows as blocks of 17 bytes: a scale, then inputs 0 to 15 in low nibbles, 16 to 31 in high ones."""
    rows, width = weight.shape
    packed = np.frombuffer(weight.raw, np.uint8).reshape(rows, width)
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(rows, -1, 32)
    scales = np.frombuffer(scale.raw, np.uint8).reshape(rows, -1, 1)
    return np.concatenate((scales, codes[..., :16] | codes[..., 16:] << 4), axis=-1).reshape(rows, -1)


Encoded = tuple[NDArray[Any], gguf.GGMLQuantizationType]


def encode(values: NDArray[np.float32], format: str) -> Encoded:
    """A matrix, or a stack of them, in a format that the gguf package can write."""
    type_id = gguf.GGMLQuantizationType[format]
    return (values.astype(np.float32) if format == "F32" else quantize(values, type_id)), type_id


def gguf_tensors(m: TinyV4, dense: str = "Q8_0", experts: str = "", floats: str = "") -> dict[str, Encoded]:
    """Every tensor of the file by its name.

    ``dense`` is the format of what is released in FP8, ``experts`` that of experts ("" for what they are: MXFP4 as
    released, or that of other matrices), ``floats`` that of other matrices ("" for BF16 or F32, as released).
    """
    tensors = make_tensors(m)
    out: dict[str, Encoded] = {}
    for name, t in tensors.items():
        if name.startswith("mtp.") or t.value is None:
            continue
        to = gguf_name(name)
        if t.dtype == "I64":
            out[to] = t.value.astype(np.int32), gguf.GGMLQuantizationType.I32
        elif ".experts." in name:
            stack = [name.replace(".experts.0.", f".experts.{e}.") for e in range(m.experts)]
            if ".experts.0." not in name:
                continue
            if t.dtype == "I8" and not experts:
                blocks = [mxfp4_blocks(tensors[n], tensors[n.replace(".weight", ".scale")]) for n in stack]
                out[to] = np.stack(blocks), gguf.GGMLQuantizationType.MXFP4
            else:
                format = experts or floats or ("BF16" if t.dtype == "BF16" else dense)
                out[to] = encode(np.stack([tensors[n].value for n in stack]), format)
        elif len(t.shape) == 1:
            out[to] = encode(t.value, "F32")
        else:
            out[to] = encode(t.value, dense if t.dtype == "F8_E4M3" else floats or t.dtype)
    return out


def write_gguf(path: Path, keys: Mapping[str, Any], tensors: Mapping[str, Encoded]) -> Path:
    """A ``deepseek4`` file of these keys (without their prefix) and tensors."""
    writer = gguf.GGUFWriter(path, "deepseek4")
    writer.add_name("tiny")
    for key, value in keys.items():
        kinds = gguf.GGUFValueType
        if isinstance(value, list):
            writer.add_array(f"deepseek4.{key}", value)
        else:
            kind = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}[type(value)]
            writer.add_key_value(f"deepseek4.{key}", value, kind)
    writer.add_eos_token_id(1)
    for name, (data, type_id) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if data.dtype in (np.float32, np.int32) else type_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_v4_gguf(path: Path, m: TinyV4, **formats: str) -> Path:
    """The checkpoint as a GGUF file; ``formats`` as for :func:`gguf_tensors`."""
    return write_gguf(path, metadata(m), gguf_tensors(m, **formats))
