"""A DeepSeek-V4 model folder small enough to read: a byte tokenizer and an encoder file of the released structure."""

from __future__ import annotations

import json
from pathlib import Path

from hotset.chat.deepseek_v4 import ENCODER_FILE, Digests, Texts, read_texts
from hotset.chat.literals import sha256
from hotset.chat.random_tokenizer import byte_tokenizer

TOOLS = (
    "## How\n<{dsml_token}tool_calls> after {thinking_end_token}, not {thinking_start_token}\n{tool_schemas}\n{x} end\n"
)
RESPONSE = "## Form:\n{schema}"
ABSOLUTE, BEYOND = "Think hard.\n\n", "Think harder \N{EM DASH} still.\n\n"
DIGESTS = Digests(sha256(TOOLS), sha256(RESPONSE), sha256(ABSOLUTE), sha256(BEYOND))

RELEASE = f"""
import os, copy
from typing import Dict
bos_token: str = "x"
response_format_template: str = (
    "## Form:"
    "\\n{{schema}}"
)
assistant_template: str = "{{content}}" + bos_token
REASONING_EFFORT_PROMPTS: Dict[str, str] = {{"low": "", "high": {ABSOLUTE!r}, "max": {BEYOND!r}}}
TOOLS_TEMPLATE = \"\"\"{TOOLS}\"\"\"
raise SystemExit("this file must not run")
"""
PREVIEW = RELEASE.replace(
    f'_PROMPTS: Dict[str, str] = {{"low": "", "high": {ABSOLUTE!r}, "max": {BEYOND!r}}}', f"_MAX = {ABSOLUTE!r}"
)


def write_encoder(folder: Path, source: str = RELEASE) -> Path:
    path = folder / ENCODER_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source, encoding="utf-8")
    return path


def texts(folder: Path, source: str = RELEASE) -> Texts:
    return read_texts(write_encoder(folder, source), DIGESTS)


def write_model(folder: Path, *, vocab_size: int = 400, special: bool | None = None) -> Path:
    """The folder with its tokenizer; ``special`` is what tokenizer.json says of every control token."""
    files = byte_tokenizer(vocab_size, 0, 1)
    if special is not None:
        data = json.loads(files["tokenizer.json"])
        for token in data["added_tokens"]:
            token["special"] = special
        files["tokenizer.json"] = json.dumps(data)
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4", "eos_token_id": 1}))
    write_encoder(folder)
    return folder
