"""What no executor computes yet: such programs are checked and planned, and refused before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hotset.errors import RequestError
from hotset.program import program as p

# The words of an error for ops that are declared and have neither reference nor kernels.
_OPS: dict[type, str] = {
    p.LayerNorm: "norms with a mean",
    p.LatentNorm: "attention over a latent cache",
    p.StoreRows: "attention over a latent cache",
    p.LatentQuery: "attention over a latent cache",
    p.AttendLatent: "attention over a latent cache",
    p.LatentValue: "attention over a latent cache",
}
_FORMATS = {
    "FP8_F32": "FP8 weights with float scales",
    "INT4": "4-bit weights with zero points",
    "INT4_SYM": "symmetric 4-bit weights",
}


def pending(program: p.Program, formats: Mapping[str, str]) -> tuple[str, ...]:
    """What is missing to run ``program`` with weights in ``formats`` (by key), in words; empty when it runs."""
    return tuple(dict.fromkeys(_missing(program, formats)))


def require_runnable(program: p.Program, formats: Mapping[str, str], name: str) -> None:
    """Refuse a model that is only planned so far. RequestError names what is missing."""
    missing = pending(program, formats)
    if missing:
        raise RequestError(
            f"{name} is checked and planned here, and runs in a later release; missing: {', '.join(missing)}",
            "hotset plan, hotset check",
        )


def _missing(program: p.Program, formats: Mapping[str, str]) -> Iterator[str]:
    for op in program.ops:
        if type(op) in _OPS:
            yield _OPS[type(op)]
        elif isinstance(op, p.IndexRows) and op.ratio == 1:
            yield "an indexer over single tokens"
        elif isinstance(op, p.Route) and op.gate != "sqrtsoftplus":
            yield f"{op.gate} routing"
        elif isinstance(op, p.Route) and op.num_groups > 1:
            yield "routing by groups of experts"
        elif isinstance(op, p.ExpertDown) and op.add:
            yield "experts added to the residual"
    for key in program.weights:
        if formats[key] in _FORMATS:
            yield _FORMATS[formats[key]]
