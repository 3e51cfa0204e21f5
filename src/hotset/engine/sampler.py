"""The arithmetic of choosing a token, as the engine sees it.

The native sampler (native/src/sampler.h) is the fast one; ``reference_sampler`` is its judge. Both choose by the same
rules, so a seed gives the same text with either.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotset.engine.sampling import Sampling


class Chooser(Protocol):
    """Chooses the tokens of one request. May keep scratch memory: one call at a time."""

    def __call__(self, logits: NDArray[np.float32], history: NDArray[np.int32], position: int) -> int:
        """Return the token for ``logits``, float32 [vocab], at ``position`` of its sequence.

        ``history`` is int32 [position], the sequence so far, prompt first. Neither array is kept or changed.
        Returns -1 when the logits hold a NaN or +inf, or no finite number at all: that is not a token.
        """
        ...


class Sampler(Protocol):
    """Makes choosers for one vocabulary."""

    def start(self, sampling: Sampling, seed: int, num_prompt: int) -> Chooser:
        """Return the chooser of a request with ``num_prompt`` prompt tokens. ``sampling.seed`` may be None; ``seed``
        is the one to use.
        """
        ...
