"""Models that hotset does not declare, as byte counts: sizes of files and shapes, each with its source."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hotset.plan.predict import JOIN_BYTES, JOINS_PER_LAYER, Step, Work
from hotset.program.cost import expected_experts
from hotset.units import GIB

OPS_DENSE = 18
"""Native ops of a layer of a Llama: what hotset's own programs have."""
OPS_EXPERTS = 23
"""The same with a router and experts."""


@dataclass(frozen=True)
class Plain:
    """One file of weights. ``dense_bytes`` are read by every step, ``expert_bytes`` are those of one expert, all
    layers."""

    name: str
    num_layers: int
    hidden_size: int
    dense_bytes: float
    cache_bytes_per_token: float = 0.0
    expert_bytes: float = 0.0
    num_experts: int = 1
    top_k: int = 0

    def step(self, context: int, num_tokens: int = 1, num_sequences: int = 1) -> Step:
        """The work of a step of so many tokens of each of so many sequences."""
        tokens = num_tokens * num_sequences
        chosen = expected_experts(tokens, self.top_k, self.num_experts)
        cached = num_sequences * (context + num_tokens) * self.cache_bytes_per_token
        work = Counter({Work("dense", "dense", self.dense_bytes): 1, Work("cache", "cache", cached): 1})
        if self.top_k:
            work[Work("experts", "experts", chosen * self.expert_bytes)] = 1
        return Step(
            work,
            (OPS_EXPERTS if self.top_k else OPS_DENSE) * self.num_layers,
            JOINS_PER_LAYER * self.num_layers,
            JOIN_BYTES * self.hidden_size * tokens,
            num_tokens,
            num_sequences,
            context,
        )


def _rows(vocab: int, hidden: int, bits: float) -> float:
    """Bytes of an embedding, of which a token reads one row only."""
    return vocab * hidden * bits / 8


# Sizes as llama-bench prints them (GiB) less the embedding, where the output matrix is another one. Caches are F16.
Q8, Q4K, Q40, MX4 = 8.5, 4.5, 4.5, 4.25
TINYLLAMA = Plain("TinyLlama 1.1B Q4_K_M", 22, 2048, 636 / 1024 * GIB - _rows(32000, 2048, Q4K), 22 * 2 * 256 * 2)
GEMMA3_4B = Plain("gemma-3-4b QAT Q4_0", 34, 2560, 2.35 * GIB, 34 * 2 * 1024 * 2)
LLAMA32_3B = Plain("Llama 3.2 3B Q8_0", 28, 3072, 3.18 * GIB, 28 * 2 * 1024 * 2)
LLAMA2_7B_Q40 = Plain("Llama 2 7B Q4_0", 32, 4096, 3.56 * GIB - _rows(32000, 4096, Q40), 32 * 2 * 4096 * 2)
LLAMA2_7B = Plain("Llama 2 7B Q4_K_M", 32, 4096, 3.80 * GIB - _rows(32000, 4096, Q4K), 32 * 2 * 4096 * 2)
QWEN25_7B_Q6 = Plain("Qwen2.5-Coder 7B Q6_K", 28, 3584, 5.82 * GIB - _rows(152064, 3584, 6.5625), 28 * 2 * 512 * 2)
QWEN25_7B_Q8 = Plain("Qwen2.5-Coder 7B Q8_0", 28, 3584, 7.54 * GIB - _rows(152064, 3584, Q8), 28 * 2 * 512 * 2)
QWEN25_14B = Plain("Qwen2.5 14B Q4_K_M", 48, 5120, 8.37 * GIB - _rows(152064, 5120, Q4K), 48 * 2 * 1024 * 2)
QWEN25_32B = Plain("Qwen2.5 32B Q4_K_M", 64, 5120, 18.48 * GIB - _rows(152064, 5120, Q4K), 64 * 2 * 1024 * 2)
LLAMA31_70B = Plain("Llama 3.1 70B Q4_K_M", 80, 8192, 39.59 * GIB - _rows(128256, 8192, Q4K), 80 * 2 * 1024 * 2)


def _gpt_oss(name: str, layers: int, experts: int, top_k: int) -> Plain:
    """MXFP4 experts of 2880 x 2880, all else Q8_0; 64 heads of 64, 8 of keys and values, half the layers a window."""
    attention = 2880 * (4096 + 2 * 512) + 4096 * 2880
    dense = layers * attention * Q8 / 8 + layers * experts * 2880 * 4 + _rows(201088, 2880, Q8)
    one = layers * 3 * 2880 * 2880 * MX4 / 8
    return Plain(name, layers, 2880, dense, layers / 2 * 2 * 512 * 2, one, experts, top_k)


def _qwen3_30b(name: str, bits: float, head_bits: float) -> Plain:
    """48 layers, 8 of 128 experts of 768; 32 heads of 128, 4 of keys and values."""
    attention = 2048 * (4096 + 2 * 512) + 4096 * 2048
    dense = 48 * (attention * bits / 8 + 128 * 2048 * 4) + _rows(151936, 2048, head_bits)
    return Plain(name, 48, 2048, dense, 48 * 2 * 512 * 2, 48 * 3 * 2048 * 768 * bits / 8, 128, 8)


GPT_OSS_20B = _gpt_oss("gpt-oss-20b MXFP4", 24, 32, 4)
GPT_OSS_120B = _gpt_oss("gpt-oss-120b MXFP4", 36, 128, 4)
QWEN3_30B_Q8 = _qwen3_30b("Qwen3-Coder-30B-A3B Q8_0", Q8, Q8)
# 17.28 GiB for 30.53e9 weights.
QWEN3_30B_Q4 = _qwen3_30b("Qwen3-30B-A3B Q4_K_M", 17.28 * GIB * 8 / 30.53e9, 6.5625)
# specs/glm_5_2.md section 6: 6.7 GB of routed experts and 18.8 GB of the rest for a token.
GLM_IQ2 = Plain("GLM-5.2 UD-IQ2_XXS", 78, 6144, 18.8e9, 0.0, 6.7e9 / 8, 256, 8)
# JustVugg/colibri#234: 383.7 GB for 753.33e9 weights; specs/glm_5_2.md section 6: 40.298e9 of them active, 22.649e9
# routed.
_INT4 = 383.7e9 / 753.33e9
GLM_COLIBRI = Plain("GLM-5.2 int4 (colibri)", 78, 6144, 17.649e9 * _INT4, 0.0, 22.649e9 * _INT4 / 8, 256, 8)
