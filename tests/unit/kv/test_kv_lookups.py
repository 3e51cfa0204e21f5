"""Counts of the prefix cache: what could have been found, and what was."""

from __future__ import annotations

import numpy as np
import pytest

from hotset.kv import lookups
from hotset.kv.lookups import Lookups
from hotset.kv.memory import CacheMemory


def tokens(first: int, count: int = 9) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def counts(found: Lookups) -> tuple[int, int, int]:
    return found.num_lookups, found.num_repeats, found.num_hits


def test_a_beginning_is_known_although_its_block_is_gone() -> None:
    """That is the fault to be seen: the cache gave up what comes again."""
    found = Lookups(4)
    for first in (0, 100, 0, 100):
        found.count(tokens(first), 9, 0)
    assert counts(found) == (4, 2, 0)


def test_hits_are_counted_with_their_repeats() -> None:
    found = Lookups(4)
    found.count(tokens(0), 9, 0)
    found.count(tokens(0), 9, 8)
    assert counts(found) == (2, 1, 1)


@pytest.mark.parametrize(("num_known", "num_lookups"), [(4, 0), (5, 1)])
def test_prompts_without_a_block_before_their_last_token_are_not_counted(num_known: int, num_lookups: int) -> None:
    found = Lookups(4)
    found.count(tokens(0), num_known, 0)
    assert found.num_lookups == num_lookups


def test_what_follows_the_first_block_does_not_matter() -> None:
    found = Lookups(4)
    found.count(np.array([1, 2, 3, 4, 5], np.int32), 5, 0)
    found.count(np.array([1, 2, 3, 4, 9], np.int32), 5, 0)
    found.count(np.array([9, 2, 3, 4, 5], np.int32), 5, 0)
    assert found.num_repeats == 1


def test_memory_of_beginnings_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "MOST_KNOWN", 2)
    found = Lookups(4)
    for first in (0, 100, 200, 200, 0):
        found.count(tokens(first), 9, 0)
    assert counts(found) == (5, 1, 0)


def test_cache_memory_counts_what_it_opens() -> None:
    """Once for a prompt that had to wait for room, never for one that shares nothing."""
    memory = CacheMemory(2, block_tokens=4)
    first = memory.open(tokens(0), 6, 8)
    assert first is not None
    assert memory.open(tokens(0), 6, 8) is None, "no room: not counted"
    first.cover(6)
    first.commit(6)
    first.release()
    again = memory.open(tokens(0), 6, 8)
    assert again is not None and again.num_rows == 4
    again.release()
    alone = memory.open(tokens(0), 6, 8, reuse=False)
    assert alone is not None
    assert counts(memory.lookups) == (2, 1, 1)
