"""What a step should read and compute, from the model's headers: the numerators of every share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotset.checkpoint.formats import FORMATS
from hotset.models.spec import ModelSpec
from hotset.program.cost import Cost, arithmetic, step_cost
from hotset.program.lower import weight_bytes


class ModelCosts:
    """Costs of steps of one model whose weights have ``formats`` (names, by key)."""

    def __init__(self, spec: ModelSpec, formats: Mapping[str, str]) -> None:
        self._spec = spec
        self._formats = formats

    def decode_bytes(self, contexts: Sequence[int]) -> int:
        """Bytes that one step reads with a token for each sequence, ``contexts[i]`` tokens of it being in the cache.

        Weights are read once for all of them, of experts as many as their tokens are expected to choose; the cache of
        each is read once.
        """
        weights = self._step(1, 1, 0, len(contexts)).weight_bytes
        return weights + sum(self._step(1, 1, context).cache_bytes for context in contexts)

    def prefill(self, num_tokens: int, chunk: int) -> tuple[int, int]:
        """Bytes read and operations done for a prompt of ``num_tokens`` in chunks, from an empty cache."""
        num_bytes = num_ops = 0
        for start in range(0, num_tokens, chunk):
            size = min(chunk, num_tokens - start)
            cost = self._step(size, int(start + size == num_tokens), start)
            num_bytes += cost.weight_bytes + cost.cache_bytes
            num_ops += cost.num_ops
        return num_bytes, num_ops

    def compute_kind(self, available: Sequence[str]) -> str:
        """The arithmetic rate that bounds this model's prefill: that of the format of most of its matrix bytes."""
        sizes: dict[str, int] = {}
        for weight in self._spec.program.weights.values():
            if weight.in_width > 1:
                name = self._formats[weight.key]
                sizes[name] = sizes.get(name, 0) + weight_bytes(weight, FORMATS[name])
        largest = max(sizes, key=lambda name: sizes[name])
        return next(kind for kind in arithmetic(largest) if kind in available)

    def _step(self, num_tokens: int, num_outputs: int, context: int, num_sequences: int = 1) -> Cost:
        costs = step_cost(self._spec.program, self._formats, num_tokens, num_outputs, context, num_sequences)
        return sum(costs.values(), Cost())
