"""Every tensor of a ``glm_moe_dsa`` checkpoint: trunk and draft layer, in the released names.

Source: specs/glm_5_2.md section 3. The header of each matrix says how it is stored, not config.json: releases mix forms
(an FP8 draft layer on a 4-bit base), and lists of what is not converted name modules that do not exist. A matrix is

* plain floats ``NAME.weight``,
* FP8: ``NAME.weight`` in F8_E4M3 and ``NAME.weight_scale_inv`` in F32, one per 128x128, which is multiplied, or
* 4-bit, as compressed-tensors packs it: ``NAME.weight_packed``, ``.weight_scale``, ``.weight_zero_point`` (not when
  symmetric) and ``.weight_shape``.
"""

from __future__ import annotations

from collections.abc import Mapping

from hotset.checkpoint.manifest import TensorDecl
from hotset.checkpoint.tensor import TensorInfo
from hotset.models.declarations import FLOAT_FORMATS, Declarations
from hotset.models.glm_moe_dsa_config import BLOCK, PACK_GROUP, PACK_WORD, GlmConfig, Storage

DRAFT_REASON = "the draft (MTP) layer, which is not used yet"
NO_DRAFT_REASON = "config.json names a draft (MTP) layer that these files do not hold"


class _Declarations(Declarations):
    def __init__(self, config: GlmConfig, found: Mapping[str, TensorInfo]) -> None:
        super().__init__()
        self.c = config
        self.found = found

    def storage(self, name: str, default: Storage) -> Storage:
        """How the files hold a matrix; ``default`` where they hold none of that name."""
        if f"{name}.weight_packed" in self.found:
            has_zeros = f"{name}.weight_zero_point" in self.found or self.c.storage == "INT4"
            return "INT4" if has_zeros else "INT4_SYM"
        info = self.found.get(f"{name}.weight")
        if info is None:
            return default
        return "float" if info.format.name in FLOAT_FORMATS else "FP8_F32"

    def matrix(self, key: str, name: str, out: int, width: int, is_expert: bool = False) -> None:
        """A matrix that quantised releases quantise: all of them in FP8, the experts alone in 4 bits."""
        released = self.c.storage
        stored = self.storage(name, released if is_expert or released == "FP8_F32" else "float")
        if stored == "float":
            self.floats(key, name, out, width)
        elif stored == "FP8_F32":
            scale = f"{key}.scale"
            self.add(key, f"{name}.weight", (out, width), "linear", ("F8_E4M3",), stored, scale)
            self.add(scale, f"{name}.weight_scale_inv", (-(-out // BLOCK), -(-width // BLOCK)), "scale", ("F32",))
        else:
            self.packed(key, name, out, width, stored)

    def packed(self, key: str, name: str, out: int, width: int, stored: Storage) -> None:
        """Widths that are no whole words or groups make a shape that no file has, and so an error that names it."""
        scale, words = f"{key}.scale", -(-width // PACK_WORD)
        self.add(key, f"{name}.weight_packed", (out, words), "linear", ("I32",), stored, scale)
        groups = -(-width // PACK_GROUP)
        self.add(scale, f"{name}.weight_scale", (out, groups), "scale", ("BF16",))
        if stored == "INT4":
            self.add(f"{key}.zero", f"{name}.weight_zero_point", (-(-out // PACK_WORD), groups), "zero", ("I32",))
        self.add(f"{key}.shape", f"{name}.weight_shape", (2,), "shape", ("I64",))

    def attention(self, key: str, name: str, owns_indexer: bool) -> None:
        c = self.c
        self.matrix(f"{key}.q_a", f"{name}.q_a_proj", c.q_rank, c.hidden_size)
        self.norm(f"{key}.q_norm", f"{name}.q_a_layernorm", c.q_rank)
        self.matrix(f"{key}.q_b", f"{name}.q_b_proj", c.num_heads * (c.plain + c.rotary_dim), c.q_rank)
        self.matrix(f"{key}.kv_a", f"{name}.kv_a_proj_with_mqa", c.kv_rank + c.rotary_dim, c.hidden_size)
        self.norm(f"{key}.kv_norm", f"{name}.kv_a_layernorm", c.kv_rank)
        self.matrix(f"{key}.kv_b", f"{name}.kv_b_proj", c.num_heads * (c.plain + c.value_dim), c.kv_rank)
        self.matrix(f"{key}.o", f"{name}.o_proj", c.hidden_size, c.num_heads * c.value_dim)
        if owns_indexer:
            self.matrix(f"{key}.index.q", f"{name}.indexer.wq_b", c.index_heads * c.index_dim, c.q_rank)
            self.matrix(f"{key}.index.k", f"{name}.indexer.wk", c.index_dim, c.hidden_size)
            self.kept(f"{key}.index.weights", f"{name}.indexer.weights_proj", c.index_heads, c.hidden_size)
            self.norm(f"{key}.index.norm.weight", f"{name}.indexer.k_norm", c.index_dim)
            self.add(f"{key}.index.norm.bias", f"{name}.indexer.k_norm.bias", (c.index_dim,), "norm", FLOAT_FORMATS)

    def kept(self, key: str, name: str, out: int, width: int) -> None:
        """A matrix that FP8 releases leave in floats; 4-bit files may have packed it as any other."""
        stored = self.storage(name, "float")
        if stored in ("INT4", "INT4_SYM"):
            self.packed(key, name, out, width, stored)
        else:
            self.floats(key, name, out, width)

    def mlp(self, key: str, name: str, size: int, part: str = "", is_expert: bool = False) -> None:
        hidden = self.c.hidden_size
        self.matrix(f"{key}.gate{part}", f"{name}.gate_proj", size, hidden, is_expert)
        self.matrix(f"{key}.up{part}", f"{name}.up_proj", size, hidden, is_expert)
        self.matrix(f"{key}.down{part}", f"{name}.down_proj", hidden, size, is_expert)

    def layer(self, key: str, name: str, *, owns_indexer: bool, is_dense: bool) -> None:
        c = self.c
        self.norm(f"{key}.attn_norm", f"{name}.input_layernorm", c.hidden_size)
        self.norm(f"{key}.ffn_norm", f"{name}.post_attention_layernorm", c.hidden_size)
        self.attention(key, f"{name}.self_attn", owns_indexer)
        if is_dense:
            self.mlp(f"{key}.mlp", f"{name}.mlp", c.ffn_size)
            return
        self.kept(f"{key}.router", f"{name}.mlp.gate", c.num_experts, c.hidden_size)
        # F32 in every release: the choice of experts hangs on it.
        bias = f"{name}.mlp.gate.e_score_correction_bias"
        self.add(f"{key}.router_bias", bias, (c.num_experts,), "table", ("F32",))
        for expert in range(c.num_experts):
            self.mlp(f"{key}.experts", f"{name}.mlp.experts.{expert}", c.expert_size, f".{expert}", is_expert=True)
        self.mlp(f"{key}.shared", f"{name}.mlp.shared_experts", c.expert_size)

    def draft(self) -> None:
        """Layer ``num_layers``: checked where it is there, and not loaded; it uses the trunk's embedding and head."""
        name = f"model.layers.{self.c.num_layers}"
        is_there = any(tensor.startswith(f"{name}.") for tensor in self.found)
        if not is_there and not self.c.num_draft_layers:
            return
        is_absent = bool(self.found) and not is_there
        self.need, self.reason = ("maybe", NO_DRAFT_REASON) if is_absent else ("spare", DRAFT_REASON)
        hidden = self.c.hidden_size
        self.layer("draft", name, owns_indexer=True, is_dense=False)
        self.kept("draft.eh", f"{name}.eh_proj", hidden, 2 * hidden)
        for part in ("enorm", "hnorm", "shared_head.norm"):
            self.norm(f"draft.{part}", f"{name}.{part}", hidden)


def declare_tensors(config: GlmConfig, found: Mapping[str, TensorInfo]) -> tuple[TensorDecl, ...]:
    """All tensors of the checkpoint; ``found`` are those of its headers, empty to declare the release's own formats."""
    work = _Declarations(config, found)
    work.floats("embed", "model.embed_tokens", config.vocab_size, config.hidden_size, role="embedding")
    for layer, owns_indexer in enumerate(config.owns_indexer):
        is_dense = layer < config.num_dense_layers
        work.layer(f"layers.{layer}", f"model.layers.{layer}", owns_indexer=owns_indexer, is_dense=is_dense)
    work.norm("norm", "model.norm", config.hidden_size)
    work.kept("head", "lm_head", config.vocab_size, config.hidden_size)
    work.draft()
    return tuple(work.out)
