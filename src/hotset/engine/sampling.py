"""How the next token is chosen: the settings of one request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotset.errors import RequestError

MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 0.001
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class Sampling:
    """Settings of one request; the default is greedy, so that the same prompt gives the same answer.

    The filters work in this order, as in Hugging Face transformers: penalties, temperature, top-k, top-p, min-p, draw.
    Candidates are ordered by logit, ties by the lower token id. RequestError names a field that cannot be.

    Attributes:
        temperature: 0 takes the most likely token (the four filters below then change nothing); otherwise logits are
            divided by it, 0.001 to 100.
        top_k: keep the ``top_k`` most likely tokens; 0 keeps all.
        top_p: of what top-k left, keep the fewest tokens whose share reaches ``top_p``; 1 keeps all.
        min_p: keep tokens with at least this share of the most likely one's probability; 0 keeps all.
        seed: the token at a position depends on the logits, this number and the position alone, so the same seed gives
            the same text whatever else is in the batch. ``None`` draws one, reported in the result.
        max_tokens: stop with reason ``"length"`` after so many tokens; ``None`` means as many as the context holds.
            Cache for prompt and ``max_tokens`` is reserved before the request starts.
        stop: texts that end the answer (reason ``"stop"``) where one is complete first; not part of the answer's text.
        ignore_eos: go on after an end-of-text token.
        repetition_penalty: logits of tokens in prompt or output are divided by it when positive, multiplied when
            negative; 1 is off.
        presence_penalty: subtracted from the logits of tokens in the output, once; 0 is off.
        frequency_penalty: subtracted once per occurrence in the output; 0 is off.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | tuple[str, ...] | list[str] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature is {self.temperature}, expected 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}",
                "0 takes the most likely token",
            )
        _check_integer("top_k", self.top_k, 0, 2**31 - 1, "0 keeps all tokens")
        _check_number("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, MAX_SEED)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "None means as many as the context holds")
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}, expected True or False")
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, is_low_open=True)
        _check_number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check_number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        if not isinstance(self.stop, str | tuple | list) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop is {self.stop!r}, expected a string or a list of strings")
        if "" in self.stop_strings:
            raise RequestError("stop holds an empty string, which would end every answer at once")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings, also when one was given as a plain string."""
        if isinstance(self.stop, str):
            return (self.stop,) if self.stop else ()
        return tuple(self.stop)


def _check_number(name: str, value: float, low: float, high: float, *, is_low_open: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (is_low_open and value == low):
        above = "above " if is_low_open else ""
        raise RequestError(f"{name} is {value!r}, expected a number {above}{low:g} to {high:g}")


def _check_integer(name: str, value: int, low: int, high: int, hint: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise RequestError(f"{name} is {value!r}, expected a whole number from {low} to {high}", hint)
