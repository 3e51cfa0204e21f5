"""Shares of a step, without an engine."""

import numpy as np
import pytest

from hotset.engine.scheduler import Scheduler
from hotset.engine.sequence import Sequence
from hotset.errors import InternalError, RequestError
from hotset.kv.memory import CacheMemory


def make(*lengths, max_tokens=16, num_blocks=400, max_sequences=4, max_new=2):
    memory = CacheMemory(num_blocks, block_tokens=4)
    scheduler = Scheduler(memory, max_tokens, 8, max_sequences)
    for index, length in enumerate(lengths):
        prompt = np.full(length, index, np.int32)
        scheduler.add(Sequence(prompt, max_new, (), 0, lambda *_: 0, None))
    return scheduler


def run(scheduler, step):
    """Finish a step as the engine would; every sampled token is 0."""
    for sequence in step.sequences:
        if sequence.commit():
            sequence.accept(0)


def shares(step):
    return {int(sequence.tokens[0]): sequence.count for sequence in step.sequences}


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((50,), {0: 16}),
        ((50, 50), {0: 12, 1: 4}),
        ((50, 2), {0: 14, 1: 2}),
        ((5, 50), {0: 5, 1: 11}),
        ((50, 50, 3), {0: 12, 1: 1, 2: 3}),
        ((50, 50, 4), {0: 12, 2: 4}),
        ((3, 3), {0: 3, 1: 3}),
    ],
)
def test_prefill_shares(lengths, expected):
    """Bug class: room left unused, a short prompt behind a long one, or the oldest starved by newcomers."""
    assert shares(make(*lengths).schedule()) == expected


def test_batch_describes_its_segments_and_outputs():
    scheduler = make(3, 1, 20)
    step = scheduler.schedule()
    batch = step.batch
    # One token left to compute is a decode wherever it comes from, and stands first.
    assert [(s.first, s.count, s.position) for s in batch.segments] == [(0, 1, 0), (1, 3, 0), (4, 12, 0)]
    assert batch.tokens.tolist() == [1, 0, 0, 0] + [2] * 12
    assert batch.outputs.tolist() == [0, 3]
    run(scheduler, step)
    step = scheduler.schedule()
    assert shares(step) == {0: 1, 1: 1, 2: 8}
    assert step.batch.outputs.tolist() == [0, 1, 9]


def test_every_prefill_ends_even_when_short_prompts_keep_coming():
    """Bug class: shortest first starves a long prompt for ever."""
    scheduler = make(30, max_tokens=4, max_sequences=2)
    long = scheduler.waiting[0]
    for number in range(200):
        if len(scheduler.running) + len(scheduler.waiting) < 2:
            scheduler.add(Sequence(np.full(3, number, np.int32), 1, (), 0, lambda *_: 0, None))
        step = scheduler.schedule()
        for sequence in step.sequences:
            if sequence.commit() and sequence.accept(0):
                scheduler.remove(sequence)
                sequence.finish("length")
        if long.finish_reason:
            break
    assert number < 20


def test_admission_is_first_come_first_served_and_by_blocks():
    """Bug class: small requests overtake a large one for ever; or a request starts and cannot go on."""
    scheduler = make(20, 20, 1, num_blocks=10)
    scheduler.admit()
    assert (len(scheduler.running), len(scheduler.waiting)) == (1, 2)
    first = scheduler.running[0]
    scheduler.remove(first)
    first.finish("cancelled")
    scheduler.admit()
    assert [s.num_prompt for s in scheduler.running] == [20, 1]


def test_nothing_running_and_nothing_admissible_is_an_error_with_the_accounts():
    scheduler = make(20, num_blocks=3)
    with pytest.raises(InternalError, match="3 free \\+ 0 used \\+ 0 cached of 3"):
        scheduler.schedule()


def test_nothing_to_do_is_none():
    assert make().schedule() is None


@pytest.mark.parametrize("max_sequences", [0, 9, 17])
def test_more_sequences_than_places_in_a_step_are_refused(max_sequences):
    with pytest.raises(RequestError, match="max_sequences"):
        make(max_sequences=max_sequences)
