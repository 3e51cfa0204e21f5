"""Every tensor of a DeepSeek-V4 checkpoint: trunk and draft head, in the released names.

Source: specs/deepseek_v4.md section 3. A projection is FP8 with a scale per 128x128, or, in checkpoints made for tests,
in float without one; which one a file has is read from its header, and its shape follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotset.checkpoint.manifest import TensorDecl
from hotset.checkpoint.tensor import TensorInfo
from hotset.models.declarations import FLOAT_FORMATS, Declarations
from hotset.models.deepseek_v4_config import CSA_RATIO, DeepSeekV4Config

SCALE_BLOCK = 128
SCALE_GROUP = 32
DRAFT_REASON = {
    "dspark": "the DSpark decoder, which is not used yet",
    "mtp": "the draft layer of the preview, which is not used yet",
}


class _Declarations(Declarations):
    def __init__(self, config: DeepSeekV4Config, found: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self.c = config
        self.found = found

    def exact(self, key: str, name: str, *shape: int) -> None:
        """F32 in the release, and needed so: these go through twenty Sinkhorn rounds, or through exponentials."""
        self.add(key, name, shape, "linear" if key.endswith(".fn") else "table", ("F32",))

    def is_float(self, name: str) -> bool:
        info = self.found.get(name)
        return info is not None and info.format.name in FLOAT_FORMATS

    def fp8(self, key: str, name: str, out: int, width: int) -> None:
        if self.is_float(f"{name}.weight"):
            self.floats(key, name, out, width)
            return
        self.add(key, f"{name}.weight", (out, width), "linear", ("F8_E4M3",), "FP8", f"{key}.scale")
        shape = (-(-out // SCALE_BLOCK), -(-width // SCALE_BLOCK))
        self.add(f"{key}.scale", f"{name}.scale", shape, "scale", ("F8_E8M0",))

    def expert(self, key: str, name: str, out: int, width: int) -> None:
        if self.c.expert_format == "FP8" or self.is_float(f"{name}.weight"):
            self.fp8(key, name, out, width)
            return
        self.add(key, f"{name}.weight", (out, width // 2), "linear", ("I8",), "MXFP4", f"{key}.scale")
        self.add(f"{key}.scale", f"{name}.scale", (out, width // SCALE_GROUP), "scale", ("F8_E8M0",))

    def hyper(self, key: str, name: str, columns: int, scales: int) -> None:
        self.exact(f"{key}.fn", f"{name}_fn", columns, self.c.num_streams * self.c.hidden_size)
        self.exact(f"{key}.base", f"{name}_base", columns)
        self.exact(f"{key}.scale", f"{name}_scale", scales)

    def hyper_head(self, key: str, name: str) -> None:
        self.hyper(key, name, self.c.num_streams, 1)

    def compressor(self, key: str, name: str, ratio: int, width: int) -> None:
        columns = width * (2 if ratio == CSA_RATIO else 1)
        self.exact(f"{key}.ape", f"{name}.ape", ratio, columns)
        self.floats(f"{key}.wkv", f"{name}.wkv", columns, self.c.hidden_size)
        self.floats(f"{key}.wgate", f"{name}.wgate", columns, self.c.hidden_size)
        self.norm(f"{key}.norm", f"{name}.norm", width)

    def attention(self, key: str, name: str, ratio: int) -> None:
        c, heads = self.c, self.c.num_heads * self.c.head_dim
        self.exact(f"{key}.sink", f"{name}.attn_sink", c.num_heads)
        self.fp8(f"{key}.wq_a", f"{name}.wq_a", c.q_rank, c.hidden_size)
        self.norm(f"{key}.q_norm", f"{name}.q_norm", c.q_rank)
        self.fp8(f"{key}.wq_b", f"{name}.wq_b", heads, c.q_rank)
        self.fp8(f"{key}.wkv", f"{name}.wkv", c.head_dim, c.hidden_size)
        self.norm(f"{key}.kv_norm", f"{name}.kv_norm", c.head_dim)
        self.fp8(f"{key}.wo_a", f"{name}.wo_a", c.o_groups * c.o_rank, heads // c.o_groups)
        self.fp8(f"{key}.wo_b", f"{name}.wo_b", c.hidden_size, c.o_groups * c.o_rank)
        if ratio:
            self.compressor(f"{key}.comp", f"{name}.compressor", ratio, c.head_dim)
        if ratio == CSA_RATIO:
            self.fp8(f"{key}.index.wq_b", f"{name}.indexer.wq_b", c.index_heads * c.index_dim, c.q_rank)
            self.floats(f"{key}.index.weights", f"{name}.indexer.weights_proj", c.index_heads, c.hidden_size)
            self.compressor(f"{key}.index.comp", f"{name}.indexer.compressor", ratio, c.index_dim)

    def experts(self, key: str, name: str, is_hashed: bool) -> None:
        c = self.c
        self.floats(f"{key}.gate", f"{name}.gate", c.num_experts, c.hidden_size)
        if is_hashed:
            self.add(f"{key}.tid2eid", f"{name}.gate.tid2eid", (c.vocab_size, c.top_k), "table", ("I64", "I32"))
        else:
            self.exact(f"{key}.gate_bias", f"{name}.gate.bias", c.num_experts)
        shapes = {"w1": (c.expert_size, c.hidden_size), "w3": (c.expert_size, c.hidden_size),
                  "w2": (c.hidden_size, c.expert_size)}  # fmt: skip
        for part, shape in shapes.items():
            for expert in range(c.num_experts):
                self.expert(f"{key}.experts.{part}.{expert}", f"{name}.experts.{expert}.{part}", *shape)
            self.fp8(f"{key}.shared.{part}", f"{name}.shared_experts.{part}", *shape)

    def layer(self, prefix: str, ratio: int, is_hashed: bool) -> None:
        c = self.c
        columns = c.num_streams * (2 + c.num_streams)
        for part in ("attn", "ffn"):
            self.norm(f"{prefix}.{part}_norm", f"{prefix}.{part}_norm", c.hidden_size)
            self.hyper(f"{prefix}.hc_{part}", f"{prefix}.hc_{part}", columns, 3)
        self.attention(prefix, f"{prefix}.attn", ratio)
        self.experts(prefix, f"{prefix}.ffn", is_hashed)

    def draft(self) -> None:
        """``mtp.*``: must be there, is checked and not loaded. Stages attend over their window alone."""
        c, d = self.c, self.c.draft
        if d.kind == "none":
            return
        self.need, self.reason = "spare", DRAFT_REASON[d.kind]
        for stage in range(d.num_stages):
            self.layer(f"mtp.{stage}", 0, is_hashed=False)
            if d.kind == "mtp":
                for part in ("e_proj", "h_proj"):
                    self.fp8(f"mtp.{stage}.{part}", f"mtp.{stage}.{part}", c.hidden_size, c.hidden_size)
                for part in ("enorm", "hnorm", "norm"):
                    self.norm(f"mtp.{stage}.{part}", f"mtp.{stage}.{part}", c.hidden_size)
                self.hyper_head(f"mtp.{stage}.hc_head", f"mtp.{stage}.hc_head")
        if d.kind == "dspark":
            last = f"mtp.{d.num_stages - 1}"
            self.fp8("mtp.0.main_proj", "mtp.0.main_proj", c.hidden_size, d.num_taps * c.hidden_size)
            self.norm("mtp.0.main_norm", "mtp.0.main_norm", c.hidden_size)
            self.norm(f"{last}.norm", f"{last}.norm", c.hidden_size)
            self.hyper_head(f"{last}.hc_head", f"{last}.hc_head")
            for part in ("markov_w1", "markov_w2"):
                self.floats(f"{last}.{part}", f"{last}.markov_head.{part}", c.vocab_size, d.markov_rank)
            self.floats(f"{last}.confidence", f"{last}.confidence_head.proj", 1, c.hidden_size + d.markov_rank)


def declare_tensors(config: DeepSeekV4Config, found: Mapping[str, TensorInfo]) -> tuple[TensorDecl, ...]:
    """All tensors of the checkpoint; ``found`` are those of its headers, empty to declare the released formats."""
    work = _Declarations(config, found)
    work.floats("embed", "embed", config.vocab_size, config.hidden_size, role="embedding")
    for layer, ratio in enumerate(config.ratios):
        work.layer(f"layers.{layer}", ratio, layer < config.num_hash_layers)
    work.hyper_head("hc_head", "hc_head")
    work.norm("norm", "norm", config.hidden_size)
    work.floats("head", "head", config.vocab_size, config.hidden_size)
    work.draft()
    return tuple(work.out)
