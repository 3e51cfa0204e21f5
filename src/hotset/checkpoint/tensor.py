"""Where one tensor lies in the files of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from hotset.checkpoint.formats import Format

_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as its file describes it.

    ``shape`` is row-major: a linear weight is (out, in) and its last dimension is contiguous
    (GGUF stores dimensions the other way round; they are reversed on reading).
    ``offset`` is in bytes from the start of ``files[file_id]`` of the checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    file_id: int
    offset: int
    nbytes: int


def shown(name: str) -> str:
    """Return a name from a file so that it is safe in a one-line message: quoted and cut when it is odd.

    Files are not trusted: a name may be empty, hold line breaks or terminal escapes, or be huge.
    """
    cut = name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}..."
    return cut if cut and cut.isprintable() and " " not in cut else repr(cut)


def shown_list(names: list[str], limit: int = 8) -> str:
    """Return the first ``limit`` names for a message, then how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + rest
