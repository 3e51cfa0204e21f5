"""Threads that share one engine: no background thread, no spinning, nobody forgotten."""

import threading

import pytest
from engine_fakes import answer, make_engine

from hotset.engine.events import Finished
from hotset.engine.sampling import Sampling
from hotset.engine.turns import Turns

PROMPTS = [list(b"thread %d" % i) * (1 + i % 3) for i in range(6)]


def run_threads(works):
    errors = []

    def guarded(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    if errors:
        raise errors[0]


def test_every_thread_gets_its_own_answer():
    """Bug class: an event handed to the wrong request, or two threads in the executor at once."""
    engine, executor = make_engine(num_blocks=64, max_sequences=3)
    step, inside = executor.step, threading.Lock()

    def exclusive(batch):
        assert inside.acquire(blocking=False), "two threads run a step at once"
        try:
            return step(batch)
        finally:
            inside.release()

    executor.step = exclusive
    sampling = Sampling(max_tokens=15, temperature=0.7, seed=3, ignore_eos=True)
    results = {}

    def work(index):
        for repeat in range(3):
            results[index, repeat] = list(engine.generate(PROMPTS[index], sampling))[-1]

    run_threads([lambda i=i: work(i) for i in range(len(PROMPTS))])
    for (index, _), result in results.items():
        assert list(result.token_ids) == answer(PROMPTS[index], sampling, 15)[0]
    assert engine.stats().num_used_blocks == 0


def test_cancel_from_another_thread_during_a_step_is_honoured_before_the_next():
    """Bug class: a cancellation that arrives during a step is forgotten when nobody runs another one."""
    engine, executor = make_engine(codec=None)
    doomed = engine.submit([1, 2, 3], Sampling(max_tokens=40, ignore_eos=True))
    driver = engine.submit([4], Sampling(max_tokens=3, ignore_eos=True))
    step = executor.step

    def cancelling(batch):
        canceller = threading.Thread(target=doomed.cancel)
        canceller.start()
        canceller.join(timeout=60)
        assert not canceller.is_alive(), "cancel waits for the step"
        return step(batch)

    executor.step = cancelling
    next(driver)
    assert len(executor.batches) == 1
    assert doomed.is_finished
    assert [e.finish_reason for e in doomed if isinstance(e, Finished)] == ["cancelled"]


def test_a_thread_may_submit_while_another_runs_a_step():
    """Bug class: submit waits for the end of a long prefill."""
    engine, executor = make_engine()
    step, late = executor.step, []

    def submitting(batch):
        if not late:
            submitter = threading.Thread(target=lambda: late.append(engine.submit([9], Sampling(max_tokens=2))))
            submitter.start()
            submitter.join(timeout=60)
            assert late, "submit waits for the step"
        return step(batch)

    executor.step = submitting
    list(engine.generate([1, 2], Sampling(max_tokens=4)))
    assert isinstance(list(late[0])[-1], Finished)


def test_close_waits_for_the_step_and_ends_the_waiting_threads():
    engine, executor = make_engine()
    step, started, closer = executor.step, threading.Event(), []

    def closing(batch):
        if not started.is_set():
            closer.append(threading.Thread(target=engine.close))
            closer[0].start()
            started.set()
        return step(batch)

    executor.step = closing
    handles = [engine.submit([1], Sampling(ignore_eos=True)) for _ in range(3)]
    ends = []
    run_threads([lambda handle=handle: ends.append(list(handle)[-1]) for handle in handles])
    closer[0].join(timeout=60)
    assert executor.is_closed and len(ends) == 3
    assert {end.finish_reason for end in ends} <= {"cancelled", "length"}


def test_turns_go_on_after_work_that_raises():
    """Bug class: an exception leaves the turn taken for ever."""
    turns = Turns(lambda: None)
    with pytest.raises(ZeroDivisionError):
        turns.work_until(lambda: False, lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError), turns.take():
        raise ZeroDivisionError
    done = []
    assert turns.try_work(lambda: done.append(1)) and done == [1]
    with turns.take():
        assert not turns.try_work(lambda: done.append(2))
