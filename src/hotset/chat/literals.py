"""Constants of a Python file that comes with a checkpoint: read, never run.

The file is not trusted. It is parsed, and only assignments at its top level of a string, or of a dictionary of strings,
are looked at; nothing in it is evaluated or imported.
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Mapping
from pathlib import Path

from hotset.errors import CheckpointError

#: The released files have 28 KB; more than this is something else.
MAX_BYTES = 1 << 20

Literal = str | dict[str, str]


def read_literals(path: Path) -> dict[str, Literal]:
    """Return the strings and dictionaries of strings that ``path`` assigns at its top level, by name.

    Of two assignments to one name the later counts. CheckpointError when there is no such file, or it is too large, not
    UTF-8 or not Python.
    """
    try:
        # The rest is read by nobody, so a size that lies does no harm.
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise CheckpointError(f"{path} has more than {MAX_BYTES} bytes, which is not a file of constants")
    found: dict[str, Literal] = {}
    for node in _parse(data, path).body:
        name, value = _assigned(node)
        if name is not None and value is not None:
            found[name] = value
    return found


def _parse(data: bytes, path: Path) -> ast.Module:
    try:
        text = data.decode("utf-8")
        with warnings.catch_warnings():
            # Odd escapes in somebody's string are not our user's concern.
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}") from error
    except (RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: nested too deeply") from error
    except SyntaxError as error:
        raise CheckpointError(f"{path}: not Python that can be parsed, line {error.lineno}: {error.msg}") from error
    except ValueError as error:  # a null byte
        raise CheckpointError(f"{path}: not Python that can be parsed: {error}") from error


def _assigned(node: ast.stmt) -> tuple[str | None, Literal | None]:
    """The name and the constant of an assignment to one name; ``None`` for anything else."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    elif isinstance(node, ast.AnnAssign):
        target = node.target
    else:
        return None, None
    return (target.id if isinstance(target, ast.Name) else None), _constant(node.value)


def _constant(node: ast.expr | None) -> Literal | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Dict):
        pairs = [(_constant(key), _constant(value)) for key, value in zip(node.keys, node.values, strict=True)]
        texts = {key: value for key, value in pairs if isinstance(key, str) and isinstance(value, str)}
        return texts if len(texts) == len(pairs) else None
    return None


def sha256(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes, in hexadecimal."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def require_text(literals: Mapping[str, Literal], name: str, digest: str, path: Path) -> str:
    """Return the string called ``name``, or else the one with this SHA-256 under another name.

    CheckpointError when there is neither, or when ``name`` is another text than the one that hotset knows.
    """
    value = literals.get(name)
    if value is None:
        for other in literals.values():
            for text in [other] if isinstance(other, str) else other.values():
                if sha256(text) == digest:
                    return text
        raise CheckpointError(f"{path} assigns no string to {name}", "pull the model again")
    return check_text(value, name, digest, path)


def check_text(value: Literal, name: str, digest: str, path: Path) -> str:
    """Return ``value`` when it is the text with this SHA-256; CheckpointError otherwise."""
    if not isinstance(value, str):
        raise CheckpointError(f"{path}: {name} is a dictionary, expected a text", "pull the model again")
    found = sha256(value)
    if found != digest:
        raise CheckpointError(
            f"{path}: the text of {name} is not the released one (SHA-256 {found[:16]}, expected {digest[:16]})",
            "the model was trained with one text; pull the model again",
        )
    return value
