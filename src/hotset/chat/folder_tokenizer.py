"""The tokenizer of a model folder: tokenizer.json and what the config files beside it say."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotset.chat.vocabulary import (
    SPACE_MARK,
    AddedToken,
    Spelling,
    TokenKind,
    Vocabulary,
    find_end_tokens,
)
from hotset.checkpoint.strict_json import parse_json
from hotset.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend


def read_folder_tokenizer(folder: Path, protocol_tokens: Collection[str] = ()) -> tuple[Backend, Vocabulary]:
    """Load ``folder/tokenizer.json``; CheckpointError when it is missing, damaged or of a kind hotset cannot decode.

    ``protocol_tokens`` are spellings that a dialect reads in answers and that no message may write, whatever the file
    calls them.
    """
    from tokenizers import Tokenizer as Backend

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} holds no tokenizer.json", "download the model's tokenizer.json into the folder"
        )
    data = read_config(path)
    spelling = _spelling(data, path)
    added = _added_tokens(data, path, protocol_tokens)
    # Role markers that the file does not call special become so for the library, which can then leave them unread.
    guarded = {token.token_id for token in added if token.is_guarded}
    for entry in data.get("added_tokens") or []:
        entry["special"] = entry["id"] in guarded
    try:
        backend = Backend.from_str(json.dumps(data))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path} cannot be used: {error}") from error
    return backend, _vocabulary(backend, data, spelling, added, folder)


def _added_tokens(data: Mapping[str, Any], path: Path, protocol_tokens: Collection[str]) -> tuple[AddedToken, ...]:
    try:
        return tuple(
            AddedToken(
                content=entry["content"],
                token_id=int(entry["id"]),
                is_control=bool(entry["special"]),
                takes_space_before=bool(entry.get("lstrip")),
                takes_space_after=bool(entry.get("rstrip")),
                is_protocol=entry["content"] in protocol_tokens,
            )
            for entry in data.get("added_tokens") or []
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: added_tokens is not a list of objects with id, content and special") from error


def read_config(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file, ``{}`` when there is no such file; CheckpointError when it is anything else."""
    if not path.is_file():
        return {}
    data = parse_json(path.read_bytes(), str(path))
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return data


def read_settings(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json."""
    return read_config(folder / "tokenizer_config.json")


def _spelling(data: Mapping[str, Any], path: Path) -> Spelling:
    kinds = {(step.get("type"), step.get("content")) for step in _steps(data.get("decoder"))}
    types = {kind for kind, _ in kinds}
    if "ByteLevel" in types:
        return Spelling.BYTE_LEVEL
    if types & {"ByteFallback", "Metaspace"} or ("Replace", " ") in kinds:
        return Spelling.BYTE_FALLBACK
    raise CheckpointError(
        f"{path}: its decoder ({', '.join(sorted(map(str, types))) or 'none'}) is not one that hotset can stream",
        "hotset decodes byte-level BPE and SentencePiece with byte fallback",
    )


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder or normalizer, those inside a Sequence too."""
    if isinstance(part, Mapping):
        yield part
        for step in part.get("decoders") or part.get("normalizers") or ():
            yield from _steps(step)


def _vocabulary(
    backend: Backend, data: Mapping[str, Any], spelling: Spelling, added: tuple[AddedToken, ...], folder: Path
) -> Vocabulary:
    settings = read_settings(folder)
    kinds = {t.token_id: TokenKind.CONTROL if t.is_control and not t.is_protocol else TokenKind.LITERAL for t in added}
    if data["model"].get("byte_fallback"):
        kinds |= {i: TokenKind.BYTE for b in range(256) if (i := backend.token_to_id(f"<0x{b:02X}>")) is not None}
    bos_id = _named_token(backend, settings.get("bos_token"))
    return Vocabulary(
        size=1 + max((*backend.get_vocab(with_added_tokens=True).values(), -1)),
        spelling=spelling,
        text_of=backend.id_to_token,
        kind_of=lambda token_id: kinds.get(token_id, TokenKind.NORMAL),
        added=added,
        bos_id=bos_id,
        eos_id=_named_token(backend, settings.get("eos_token")),
        eos_ids=_eos_ids(backend, settings, folder) | find_end_tokens(added),
        prefix_ids=_prefix_ids(backend, settings, bos_id),
        has_space_prefix=spelling is Spelling.BYTE_FALLBACK and _has_space_prefix(data),
    )


def _has_space_prefix(data: Mapping[str, Any]) -> bool:
    for step in (*_steps(data.get("normalizer")), *_steps(data.get("pre_tokenizer"))):
        if step.get("type") == "Prepend" and step.get("prepend") == SPACE_MARK:
            return True
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _named_token(backend: Backend, entry: Any) -> int | None:
    """The id of a token named in tokenizer_config.json, as a string or as an object with its content."""
    content = entry.get("content") if isinstance(entry, Mapping) else entry
    return backend.token_to_id(content) if isinstance(content, str) else None


def _eos_ids(backend: Backend, settings: Mapping[str, Any], folder: Path) -> frozenset[int]:
    ids = {_named_token(backend, settings.get("eos_token"))} - {None}
    for name in ("config.json", "generation_config.json"):
        value = read_config(folder / name).get("eos_token_id")
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is not None and (not isinstance(token_id, int) or token_id < 0):
                raise CheckpointError(f"{folder / name}: eos_token_id holds {token_id!r}, expected token ids")
            ids.add(token_id)
    return frozenset(token_id for token_id in ids if token_id is not None)


def _prefix_ids(backend: Backend, settings: Mapping[str, Any], bos_id: int | None) -> tuple[int, ...]:
    """What the tokenizer puts before a text: as tokenizer_config.json says, else as its own post-processor does."""
    adds_bos = settings.get("add_bos_token")
    if adds_bos is not None:
        return (bos_id,) if adds_bos and bos_id is not None else ()
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    return ()
