"""Tokenizers small enough to read, as GGUF metadata and as a model folder, and slow judges for both algorithms."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from hotset.chat.vocabulary import byte_of_character

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LITERAL = ["<think>", "<｜User｜>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("i", "m"), ("<", "|")]


def byte_level_vocab() -> list[str]:
    characters = sorted(byte_of_character(), key=byte_of_character().__getitem__)
    return [*CONTROL, *characters, *(a + b for a, b in MERGES), *LITERAL]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF "gpt2" tokenizer: all bytes, a few merges, three control tokens, two literal tokens."""
    tokens = byte_level_vocab()
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 5) + [4] * 2,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


WORDS = {"▁h": -3.0, "he": -1.0, "ll": -2.0, "llo": -4.0, "▁hello": -6.0, "</": -5.0, "</s": -5.0}
WORDS |= {"hello": -5.0, "▁hell": -7.0, "aa": -8.0, "aaa": -8.0, "aaaa": -8.0}
# As in Llama 2 and Mistral: runs of spaces have equal scores, and some lengths are missing.
WORDS |= {"▁" * length: -9.0 for length in (*range(2, 15), 16)}
LETTERS = "▁helowrdabc<>s/é"


def byte_fallback_metadata(**changes: Any) -> dict[str, Any]:
    """A GGUF "llama" tokenizer: SentencePiece with scores, byte fallback, ``<s>`` and ``</s>``."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS, *LETTERS]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(WORDS) + len(LETTERS))
    scores = [0.0] * 259 + list(WORDS.values()) + [-20.0 - i for i in range(len(LETTERS))]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper has it: join the best neighbours, the first of equals, until none is left."""
    pieces = list(text)
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not unions:
            return pieces
        _, i = min(unions)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]


def write_folder(folder: Path, **settings: Any) -> Path:
    """A model folder with the byte-level tokenizer as tokenizer.json."""
    vocab = {token: i for i, token in enumerate(byte_level_vocab())}
    added = [
        {"id": vocab[t], "content": t, "special": t in CONTROL, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for t in (*CONTROL, *LITERAL)
    ]  # fmt: skip
    data = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": [" ".join(pair) for pair in MERGES]},
    }
    data |= settings.pop("tokenizer", {})
    (folder / "tokenizer.json").write_text(json.dumps(data))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return folder
