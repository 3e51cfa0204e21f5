"""Tiny random DeepSeek-V4 checkpoints in the released layout, and what their weights are worth in float32.

Nothing of hotset is used here, so that the oracle environment can import this file and so that the encodings are a
second opinion. Numbers come from a counter hash, not from a library's generator: a stored golden stays valid for ever.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

E4M3_CODES = np.arange(127)  # positive finite ones
E4M3_VALUES = np.where(
    E4M3_CODES < 8, E4M3_CODES * 2.0**-9, (8 + E4M3_CODES % 8) * 2.0 ** (E4M3_CODES // 8 - 10.0)
).astype(np.float32)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True)
class TinyV4:
    """The shape of a tiny DeepSeek-V4. ``formats`` is "official" (FP8, FP4 experts), "fp8" (FP8 experts) or "float"."""

    ratios: tuple[int, ...] = (0, 4, 128, 4)
    formats: str = "float"
    hidden: int = 32
    heads: int = 4
    head_dim: int = 80
    rotary: int = 16
    q_rank: int = 32
    o_groups: int = 2
    o_rank: int = 16
    window: int = 32
    index_heads: int = 8
    index_dim: int = 32
    index_top_k: int = 8
    streams: int = 4
    iterations: int = 20
    experts: int = 8
    top_k: int = 2
    inter: int = 32
    hash_layers: int = 2
    vocab: int = 160
    limit: float = 0.8
    theta: float = 10000.0
    compress_theta: float = 1000.0
    yarn_factor: float = 16.0
    yarn_original: int = 256
    max_context: int = 4096
    draft: str = "none"  # or "dspark" (3 stages), or "mtp" (1 layer)
    states_expert_dtype: bool = True
    seed: int = 1

    def config(self) -> dict[str, Any]:
        """config.json, with the fields of the release."""
        extra: dict[str, Any] = {}
        stages = {"none": 0, "dspark": 3, "mtp": 1}[self.draft]
        if self.draft == "dspark":
            extra = {"dspark_block_size": 5, "dspark_target_layer_ids": [0, 1, 2], "dspark_markov_rank": 16,
                     "dspark_noise_token_id": 3}  # fmt: skip
        if self.formats != "float":
            extra["quantization_config"] = {
                "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
                "activation_scheme": "dynamic",
            }  # fmt: skip
            if self.states_expert_dtype:
                extra["expert_dtype"] = "fp4" if self.formats == "official" else "fp8"
        return {
            "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "vocab_size": self.vocab,
            "hidden_size": self.hidden, "num_hidden_layers": len(self.ratios), "num_attention_heads": self.heads,
            "num_key_value_heads": 1, "head_dim": self.head_dim, "qk_rope_head_dim": self.rotary,
            "q_lora_rank": self.q_rank, "o_groups": self.o_groups, "o_lora_rank": self.o_rank,
            "sliding_window": self.window, "compress_ratios": [*self.ratios, *[0] * stages],
            "index_n_heads": self.index_heads, "index_head_dim": self.index_dim, "index_topk": self.index_top_k,
            "rope_theta": self.theta, "compress_rope_theta": self.compress_theta,
            "rope_scaling": {"type": "yarn", "factor": self.yarn_factor, "beta_fast": 32, "beta_slow": 1,
                             "original_max_position_embeddings": self.yarn_original},
            "max_position_embeddings": self.max_context, "rms_norm_eps": 1e-6, "hc_mult": self.streams,
            "hc_sinkhorn_iters": self.iterations, "hc_eps": 1e-6, "n_routed_experts": self.experts,
            "n_shared_experts": 1, "num_experts_per_tok": self.top_k, "moe_intermediate_size": self.inter,
            "num_hash_layers": self.hash_layers, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
            "norm_topk_prob": True, "routed_scaling_factor": 1.5, "swiglu_limit": self.limit, "hidden_act": "silu",
            "num_nextn_predict_layers": min(stages, 1), "tie_word_embeddings": False, "attention_bias": False,
            "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
        } | extra  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor as it is in the file; ``value`` is what it is worth (None for scales, integers for id tables)."""

    dtype: str
    shape: tuple[int, ...]
    raw: bytes
    value: NDArray[Any] | None


def hashed(seed: int, name: str, count: int) -> NDArray[np.uint64]:
    """``count`` random 64-bit numbers: splitmix64 of a counter."""
    start = np.uint64((seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03) % 2**64)
    with np.errstate(over="ignore"):
        z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def spread(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """About normal with deviation 1: the sum of four uniform numbers."""
    parts = hashed(seed, name, int(np.prod(shape))).view(np.uint16).reshape(-1, 4).astype(np.float64) / 65536 - 0.5
    return (parts.sum(1) * np.sqrt(3.0)).astype(np.float32).reshape(shape)


def nearest(values: NDArray[np.float32], table: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Index of the nearest entry of a rising table to |value|."""
    middles = (table[1:] + table[:-1]) / 2
    return np.searchsorted(middles, np.abs(values)).astype(np.uint8)


def bf16(values: NDArray[np.float32]) -> tuple[bytes, NDArray[np.float32]]:
    """Values rounded to BF16: bytes, and float32 again."""
    bits = values.astype("<f4").view("<u4")
    high = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
    return high.tobytes(), (high.astype("<u4") << 16).view("<f4")


class _Writer:
    def __init__(self, m: TinyV4) -> None:
        self.m = m
        self.out: dict[str, Stored] = {}

    def f32(self, name: str, shape: tuple[int, ...], values: NDArray[np.float32]) -> None:
        self.out[name] = Stored("F32", shape, values.astype("<f4").tobytes(), values)

    def exact(self, name: str, *shape: int, gain: float = 1.0, centre: float = 0.0) -> None:
        self.f32(name, shape, np.float32(centre) + np.float32(gain) * spread(self.m.seed, name, shape))

    def floats(self, name: str, *shape: int, gain: float = 1.0, centre: float = 0.0) -> None:
        values = np.float32(centre) + np.float32(gain) * spread(self.m.seed, name, shape)
        raw, value = bf16(values)
        self.out[f"{name}.weight"] = Stored("BF16", shape, raw, value.reshape(shape))

    def norm(self, name: str, width: int, centre: float = 1.0) -> None:
        self.floats(name, width, gain=0.1, centre=centre)

    def matrix(self, name: str, out: int, width: int, gain: float = 1.0) -> None:
        self.floats(name, out, width, gain=gain * width**-0.5)

    def exponents(self, name: str, shape: tuple[int, ...], deviation: float) -> NDArray[np.int64]:
        """e8m0 exponents around a deviation, three different ones, so that a wrong scale shows."""
        jitter = hashed(self.m.seed, f"{name}.scale", int(np.prod(shape))).reshape(shape) % np.uint64(3)
        return int(np.round(np.log2(deviation))) + jitter.astype(np.int64) - 1

    def scaled(self, name: str, dtype: str, codes: NDArray[np.uint8], exponents: NDArray[np.int64],
               value: NDArray[np.float32]) -> None:  # fmt: skip
        self.out[f"{name}.weight"] = Stored(dtype, codes.shape, codes.tobytes(), value)
        scale = (exponents + 127).astype(np.uint8)
        self.out[f"{name}.scale"] = Stored("F8_E8M0", scale.shape, scale.tobytes(), None)

    def fp8(self, name: str, out: int, width: int) -> None:
        if self.m.formats == "float":
            self.matrix(name, out, width)
            return
        values = 64 * spread(self.m.seed, name, (out, width))
        codes = nearest(values, E4M3_VALUES)
        exponents = self.exponents(name, (-(-out // 128), -(-width // 128)), width**-0.5 / 64)
        scale = np.repeat(np.repeat(2.0**exponents, 128, 0)[:out], 128, 1)[:, :width]
        value = (np.sign(values) * E4M3_VALUES[codes] * scale).astype(np.float32)
        self.scaled(name, "F8_E4M3", codes | (values < 0).astype(np.uint8) << 7, exponents, value)

    def fp4(self, name: str, out: int, width: int) -> None:
        if self.m.formats != "official":
            self.fp8(name, out, width)
            return
        values = 2 * spread(self.m.seed, name, (out, width))
        codes = nearest(values, E2M1_VALUES)
        exponents = self.exponents(name, (out, width // 32), width**-0.5 / 2)
        scale = np.repeat(2.0**exponents, 32, 1)
        value = (np.sign(values) * E2M1_VALUES[codes] * scale).astype(np.float32)
        nibbles = codes | (values < 0).astype(np.uint8) << 3
        self.scaled(name, "I8", nibbles[:, 0::2] | nibbles[:, 1::2] << 4, exponents, value)

    def hyper(self, name: str, columns: int, scales: int) -> None:
        width = self.m.streams * self.m.hidden
        self.exact(f"{name}_fn", columns, width, gain=width**-0.5)
        self.exact(f"{name}_base", columns, gain=0.5)
        self.exact(f"{name}_scale", scales, gain=0.1, centre=1.0)

    def compressor(self, name: str, ratio: int, width: int) -> None:
        columns = width * (2 if ratio == 4 else 1)
        self.exact(f"{name}.ape", ratio, columns)
        self.matrix(f"{name}.wkv", columns, self.m.hidden)
        self.matrix(f"{name}.wgate", columns, self.m.hidden, gain=1.5)
        self.norm(f"{name}.norm", width, centre=1.3)

    def attention(self, name: str, ratio: int) -> None:
        m, width = self.m, self.m.heads * self.m.head_dim
        self.exact(f"{name}.attn_sink", m.heads)
        self.fp8(f"{name}.wq_a", m.q_rank, m.hidden)
        self.norm(f"{name}.q_norm", m.q_rank)
        self.fp8(f"{name}.wq_b", width, m.q_rank)
        self.fp8(f"{name}.wkv", m.head_dim, m.hidden)
        self.norm(f"{name}.kv_norm", m.head_dim, centre=1.3)
        self.fp8(f"{name}.wo_a", m.o_groups * m.o_rank, width // m.o_groups)
        self.fp8(f"{name}.wo_b", m.hidden, m.o_groups * m.o_rank)
        if ratio:
            self.compressor(f"{name}.compressor", ratio, m.head_dim)
        if ratio == 4:
            self.fp8(f"{name}.indexer.wq_b", m.index_heads * m.index_dim, m.q_rank)
            self.matrix(f"{name}.indexer.weights_proj", m.index_heads, m.hidden)
            self.compressor(f"{name}.indexer.compressor", ratio, m.index_dim)

    def experts(self, name: str, is_hashed: bool) -> None:
        m = self.m
        self.matrix(f"{name}.gate", m.experts, m.hidden)
        if is_hashed:
            order = hashed(m.seed, f"{name}.tid2eid", m.vocab * m.experts).reshape(m.vocab, m.experts)
            ids = np.argsort(order, axis=1, kind="stable")[:, : m.top_k].astype("<i8")
            self.out[f"{name}.gate.tid2eid"] = Stored("I64", ids.shape, ids.tobytes(), ids)
        else:
            self.exact(f"{name}.gate.bias", m.experts, gain=0.3)
        for part, out, width in (("w1", m.inter, m.hidden), ("w3", m.inter, m.hidden), ("w2", m.hidden, m.inter)):
            for expert in range(m.experts):
                self.fp4(f"{name}.experts.{expert}.{part}", out, width)
            self.fp8(f"{name}.shared_experts.{part}", out, width)

    def layer(self, name: str, ratio: int, is_hashed: bool) -> None:
        m = self.m
        for part in ("attn", "ffn"):
            self.norm(f"{name}.{part}_norm", m.hidden)
            self.hyper(f"{name}.hc_{part}", m.streams * (2 + m.streams), 3)
        self.attention(f"{name}.attn", ratio)
        self.experts(f"{name}.ffn", is_hashed)

    def draft(self) -> None:
        m = self.m
        for stage in range({"none": 0, "dspark": 3, "mtp": 1}[m.draft]):
            self.layer(f"mtp.{stage}", 0, is_hashed=False)
        if m.draft == "mtp":
            for part in ("e_proj", "h_proj"):
                self.fp8(f"mtp.0.{part}", m.hidden, m.hidden)
            for part in ("enorm", "hnorm", "norm"):
                self.norm(f"mtp.0.{part}", m.hidden)
            self.hyper("mtp.0.hc_head", m.streams, 1)
        if m.draft == "dspark":
            self.fp8("mtp.0.main_proj", m.hidden, 3 * m.hidden)
            self.norm("mtp.0.main_norm", m.hidden)
            self.norm("mtp.2.norm", m.hidden)
            self.hyper("mtp.2.hc_head", m.streams, 1)
            for part in ("markov_w1", "markov_w2"):
                self.matrix(f"mtp.2.markov_head.{part}", m.vocab, 16)
            self.matrix("mtp.2.confidence_head.proj", 1, m.hidden + 16)


def make_tensors(m: TinyV4) -> dict[str, Stored]:
    """Every tensor of the checkpoint by its released name."""
    work = _Writer(m)
    work.floats("embed", m.vocab, m.hidden)
    for index, ratio in enumerate(m.ratios):
        work.layer(f"layers.{index}", ratio, index < m.hash_layers)
    work.hyper("hc_head", m.streams, 1)
    work.norm("norm", m.hidden)
    work.matrix("head", m.vocab, m.hidden)
    work.draft()
    return work.out


def write_safetensors(path: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """One .safetensors file of (dtype, shape, bytes) by name."""
    header: dict[str, object] = {}
    at = 0
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(raw for _, _, raw in tensors.values()))


def write_v4(folder: Path, m: TinyV4) -> Path:
    """The checkpoint in the released layout."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: (t.dtype, t.shape, t.raw) for name, t in make_tensors(m).items()}
    write_safetensors(folder / "model.safetensors", stored)
    (folder / "config.json").write_text(json.dumps(m.config(), indent=1))
    return folder


def write_floats(folder: Path, m: TinyV4) -> Path:
    """The same model for readers without FP8 and FP4: every weight in F32, the same names, no scales."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, tensor in make_tensors(m).items():
        if tensor.value is not None and not name.startswith("mtp."):
            is_table = tensor.dtype == "I64"
            raw = tensor.value.astype("<i8" if is_table else "<f4").tobytes()
            stored[name] = ("I64" if is_table else "F32", tensor.value.shape, raw)
    write_safetensors(folder / "model.safetensors", stored)
    config = m.config()
    for key in ("quantization_config", "expert_dtype"):
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder
