"""The native sampler behind the engine's :class:`~hotset.engine.sampler.Sampler` protocol."""

from __future__ import annotations

from hotset import _native
from hotset.engine.sampler import Chooser
from hotset.engine.sampling import Sampling


class NativeSampler:
    """Makes choosers of native/src/sampler.cpp for a vocabulary of ``vocab_size`` tokens.

    They share one scratch memory, so only one thread at a time may call any of them, as an engine does.
    """

    def __init__(self, vocab_size: int) -> None:
        self._workspace = _native.SamplerWorkspace(vocab_size)

    def start(self, sampling: Sampling, seed: int, num_prompt: int) -> Chooser:
        """Return the chooser of one request; see the protocol."""
        params = _native.SamplingParams()
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            setattr(params, name, getattr(sampling, name))
        params.seed = seed
        params.num_prompt = num_prompt
        chooser: Chooser = _native.Chooser(params, self._workspace)
        return chooser
