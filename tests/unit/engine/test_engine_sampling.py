"""Settings of a request: what is accepted is honoured, the rest is refused by name."""

import math

import pytest

from hotset.engine.sampling import Sampling
from hotset.errors import RequestError


@pytest.mark.parametrize(
    ("field", "values"),
    {
        "temperature": [-0.1, 1e-9, math.nan, math.inf, 101, "1", True, None],
        "top_k": [-1, 1.5, True, None, 2**31],
        "top_p": [0, -1, 1.1, math.nan, None],
        "min_p": [-0.1, 1.1, "x"],
        "seed": [-1, 2**64, 1.0, True],
        "max_tokens": [0, -1, 2.0, True],
        "stop": [1, [1], ["a", ""], ["a", None], {"a"}],
        "ignore_eos": [1, None],
        "repetition_penalty": [0, -1, math.inf],
        "presence_penalty": [math.nan, "1"],
        "frequency_penalty": [math.inf, None],
    }.items(),
)
def test_bad_values_are_refused_and_the_field_is_named(field, values):
    """Bug class: a bad value reaches the arithmetic, or is quietly replaced."""
    for value in values:
        with pytest.raises(RequestError, match=field):
            Sampling(**{field: value})


def test_good_values_at_the_edges():
    Sampling(temperature=0.001, top_k=0, top_p=1, min_p=1, seed=2**64 - 1, max_tokens=1, repetition_penalty=0.5)
    assert Sampling(stop="ab").stop_strings == ("ab",)
    assert Sampling(stop=["ab", "c"]).stop_strings == ("ab", "c")
    assert Sampling(stop="").stop_strings == Sampling().stop_strings == ()


def test_default_is_greedy():
    """Bug class: the same prompt gives another answer unless one knows the option."""
    assert Sampling().temperature == 0


def test_unknown_field_is_refused_by_name():
    with pytest.raises(TypeError, match="best_of"):
        Sampling(best_of=2)
