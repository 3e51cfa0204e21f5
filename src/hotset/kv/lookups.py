"""What the prefix cache was asked and what it found: a cache that never hits should be seen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_KNOWN = 4096
"""First blocks that are remembered, by hash."""


class Lookups:
    """Counts of prompts that could have been found: those with a whole block before their last token.

    ``num_repeats`` of them begin with a block that an earlier one began with, whether or not it is still in the cache;
    ``num_hits`` found something.
    """

    def __init__(self, block_tokens: int) -> None:
        self.num_lookups = self.num_repeats = self.num_hits = 0
        self._block_tokens = block_tokens
        self._known: set[int] = set()

    def count(self, tokens: NDArray[np.int32], num_known: int, num_found: int) -> None:
        """Count a lookup of the prompt ``tokens[:num_known]`` of which ``num_found`` positions need no computing."""
        if num_known <= self._block_tokens:
            return
        first = hash(tokens[: self._block_tokens].tobytes())
        self.num_lookups += 1
        self.num_hits += num_found > 0
        self.num_repeats += first in self._known
        if len(self._known) < MOST_KNOWN:
            self._known.add(first)
