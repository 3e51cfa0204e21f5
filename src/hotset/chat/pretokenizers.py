"""How text is cut before byte-level BPE, by the name that GGUF files use (``tokenizer.ggml.pre``).

The expressions are those of the models' own tokenizer.json; a name that is not in the table is refused, because a
wrong cut gives plausible but different tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hotset.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Cut:
    """Expressions applied one after another: each splits what the one before left whole, and keeps the rest.

    ``ignore_merges``: a piece that is a token as a whole is taken without merging. ``normalizes``: Unicode NFC first.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    normalizes: bool = False


_CUTS = {
    "gpt-2": Cut((_GPT2,)),
    # What llama.cpp does for files without a better name.
    "default": Cut((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": Cut((r"\p{N}", _GPT2)),
    "starcoder": Cut((r"\p{N}", _GPT2)),
    "refact": Cut((r"\p{N}", _GPT2)),
    "command-r": Cut((r"\p{N}", _GPT2), normalizes=True),
    "llama-bpe": Cut((_LLAMA3,), ignore_merges=True),
    "llama3": Cut((_LLAMA3,), ignore_merges=True),
    "llama-v3": Cut((_LLAMA3,), ignore_merges=True),
    "qwen2": Cut((_QWEN2,), normalizes=True),
    "deepseek-r1-qwen": Cut((_QWEN2,), normalizes=True),
    "glm4": Cut((_LLAMA3,)),
    "chatglm-bpe": Cut((_LLAMA3,)),
    "deepseek-v3": Cut((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
    # Under this name DeepSeek-V4 is converted.
    "joyai-llm": Cut((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_V3)),
}


def find_cut(name: str | None) -> Cut:
    """Return the cut of that name; CheckpointError when it is not known."""
    cut = _CUTS.get(name or "")
    if cut is None:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, a way of cutting text that hotset does not know"
            if name
            else "tokenizer.ggml.pre is missing, so the way of cutting text is not known",
            f"known: {', '.join(sorted(_CUTS))}; or use the model's original folder with its tokenizer.json",
        )
    return cut


def make_pre_tokenizer(cut: Cut) -> PreTokenizer:
    """Return the pre-tokenizer of the tokenizers library that cuts and then spells bytes as characters."""
    from tokenizers import Regex, pre_tokenizers

    splits: list[PreTokenizer] = [pre_tokenizers.Split(Regex(e), behavior="isolated") for e in cut.expressions]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
