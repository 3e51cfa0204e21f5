"""The tokenizer of a random checkpoint: one token for every byte, and the control tokens of DeepSeek-V4."""

from __future__ import annotations

import json
from typing import Any

from hotset.chat.vocabulary import byte_of_character

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
# Ids of the release (specs/deepseek_v4.md section 6). A smaller vocabulary has them after its bytes.
CONTROL = {
    "<｜User｜>": 128803, "<｜Assistant｜>": 128804, "<think>": 128821, "</think>": 128822, "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828, "<｜action｜>": 128829, "<｜query｜>": 128830, "<｜authority｜>": 128831,
    "<｜domain｜>": 128832, "<｜title｜>": 128836, "<｜read_url｜>": 128845,
}  # fmt: skip
_FIRST_BYTE = 3
# Readers of byte-pair vocabularies refuse one without merges. This one joins bytes that no text has.
_MERGED_BYTES = (0, 0)


def byte_tokenizer(vocab_size: int, bos_id: int, eos_id: int) -> dict[str, str]:
    """Return tokenizer.json and tokenizer_config.json, by name, for a vocabulary of at least 300 tokens.

    Byte b is token 3 + b; ``bos_id`` and ``eos_id`` are two of 0, 1, 2. Tokens in between stand for no text.
    """
    pad_id = next(i for i in range(_FIRST_BYTE) if i not in (bos_id, eos_id))
    control = {BOS: bos_id, EOS: eos_id, PAD: pad_id}
    after = _FIRST_BYTE + 256
    for i, (content, released_id) in enumerate(CONTROL.items()):
        control[content] = released_id if vocab_size > max(CONTROL.values()) else after + i
    characters = {byte: character for character, byte in byte_of_character().items()}
    merge = [characters[byte] for byte in _MERGED_BYTES]
    vocab = control | {character: _FIRST_BYTE + byte for byte, character in characters.items()}
    vocab["".join(merge)] = after + len(CONTROL)
    added = [
        {
            "id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": content in (BOS, EOS, PAD),
        }
        for content, token_id in sorted(control.items(), key=lambda item: item[1])
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": None, "decoder": level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "vocab": dict(sorted(vocab.items(), key=lambda item: item[1])), "merges": [merge],
        },
    }  # fmt: skip
    settings = {
        "add_bos_token": False, "add_eos_token": False, "bos_token": BOS, "eos_token": EOS, "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    return {
        name: json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", settings))
    }
