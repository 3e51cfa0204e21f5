"""Three classes of weights, by how a step reads them: what a placement tells apart.

* "dense": every step reads all of it;
* "experts": a stack of which a token reads the matrices that its router chose;
* "sparse": rows that the token ids alone name, known before the pass (embeddings, tables by token).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hotset.checkpoint.formats import FORMATS
from hotset.program import program as p
from hotset.program.lower import table_bytes, weight_bytes

WeightClass = Literal["dense", "experts", "sparse"]
WEIGHT_CLASSES: tuple[WeightClass, ...] = ("dense", "experts", "sparse")


def weight_class(program: p.Program, weight: p.Weight) -> WeightClass:
    """Class of one weight of ``program``. An embedding that is the output matrix too is dense."""
    return weight_classes(program)[weight.key]


def weight_classes(program: p.Program) -> dict[str, WeightClass]:
    """Class of every weight of ``program`` by key, in the program's order."""
    whole = {w.key for op in program.ops if not isinstance(op, p.Embed) for w in p.weights_of(op) if not w.is_table}
    return {key: _class_of(weight, key in whole) for key, weight in program.weights.items()}


def _class_of(weight: p.Weight, is_read_whole: bool) -> WeightClass:
    if weight.count > 1:
        return "experts"
    return "dense" if is_read_whole else "sparse"


def class_bytes(program: p.Program, formats: Mapping[str, str]) -> dict[WeightClass, int]:
    """Bytes in memory of every class, as the plan counts them: packed matrices, and vectors and tables of floats."""
    total = dict.fromkeys(WEIGHT_CLASSES, 0)
    for key, name in weight_classes(program).items():
        total[name] += packed_bytes(program.weights[key], formats)
    return total


def packed_bytes(weight: p.Weight, formats: Mapping[str, str]) -> int:
    """Bytes in memory of one weight, or of a whole stack."""
    return weight_bytes(weight, FORMATS[formats[weight.key]]) if weight.is_matrix else table_bytes(weight)
