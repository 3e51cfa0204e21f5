"""The slow, obvious sampler in NumPy: the judge of native/src/sampler.cpp."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hotset.engine.sampler import Chooser
from hotset.engine.sampling import Sampling

_MASK = 0xFFFFFFFF


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1), 53 bits, that decides the token at ``position`` under ``seed``."""
    words = philox4x32_10((position & _MASK, position >> 32, 0, 0), (seed & _MASK, seed >> 32))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def apply_penalties(
    logits: NDArray[np.float32], sampling: Sampling, history: NDArray[np.int32], num_prompt: int
) -> NDArray[np.float32]:
    """Return the penalised logits, float32 [vocab]."""
    logits = logits.copy()
    seen = np.unique(history)
    penalty = np.float32(sampling.repetition_penalty)
    logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    tokens, counts = np.unique(history[num_prompt:], return_counts=True)
    frequency = np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    logits[tokens] -= np.float32(sampling.presence_penalty) + frequency
    return logits


def kept_tokens(logits: NDArray[np.float32], sampling: Sampling) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the tokens that the filters keep, in rising order, and their weights relative to the most likely one."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    order = order[logits[order] > -np.inf]
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = np.exp((logits[order].astype(np.float64) - logits[order[0]]) / sampling.temperature)
    if sampling.top_p < 1:
        target = np.float32(sampling.top_p) * weights.sum()
        count = int(np.searchsorted(np.cumsum(weights), target)) + 1
        order, weights = order[:count], weights[:count]
    is_likely = weights >= np.float32(sampling.min_p)
    order, weights = order[is_likely], weights[is_likely]
    by_token = np.argsort(order)
    return order[by_token], weights[by_token]


class ReferenceSampler:
    """Sampler of any vocabulary in float64."""

    def start(self, sampling: Sampling, seed: int, num_prompt: int) -> Chooser:
        def choose(logits: NDArray[np.float32], history: NDArray[np.int32], position: int) -> int:
            logits = apply_penalties(logits, sampling, history, num_prompt)
            if np.isnan(logits).any() or not np.isfinite(logits.max()):
                return -1
            if sampling.temperature == 0:
                return int(np.argmax(logits))
            tokens, weights = kept_tokens(logits, sampling)
            index = np.searchsorted(np.cumsum(weights), uniform(seed, position) * weights.sum(), side="right")
            return int(tokens[min(int(index), len(tokens) - 1)])

        return choose
