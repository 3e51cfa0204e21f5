"""Requests against an executor without a model: what is answered, refused, cancelled and survived."""

import numpy as np
import pytest
from engine_fakes import EOS, VOCAB, ByteCodec, answer, make_engine, prefix_logits

from hotset.engine.events import Finished, Piece
from hotset.engine.sampling import Sampling
from hotset.errors import InternalError, RequestError

PROMPT = list(b"once upon a time")


def run(engine, prompt, sampling):
    *pieces, last = engine.generate(prompt, sampling)
    assert isinstance(last, Finished) and last.text == "" and all(isinstance(p, Piece) for p in pieces)
    return "".join(p.text for p in pieces), last, pieces


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=24),
        Sampling(max_tokens=24, temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=7),
        Sampling(max_tokens=60, stop=["ab", "c", "da"]),
        Sampling(max_tokens=60, stop="bd"),
        Sampling(max_tokens=40, ignore_eos=True, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
        Sampling(max_tokens=1),
    ],
)
def test_answer_is_that_of_a_loop_without_an_engine(sampling):
    """Bug class: anything between the logits and the text changes the answer."""
    engine, _ = make_engine()
    text, last, pieces = run(engine, PROMPT, sampling)
    output, expected, reason = answer(PROMPT, sampling, sampling.max_tokens)
    assert (list(last.token_ids), text, last.finish_reason) == (output, expected, reason)
    assert last.num_prompt_tokens == len(PROMPT) and last.error is None
    streamed = [token for piece in pieces for token in piece.token_ids]
    assert streamed == output[: len(streamed)]


def test_fresh_seed_is_reported_and_repeats_the_answer():
    """Bug class: an answer that nobody can reproduce."""
    engine, _ = make_engine()
    text, last, _ = run(engine, PROMPT, Sampling(temperature=1, max_tokens=20))
    assert 0 <= last.seed < 2**64
    again, _, _ = run(engine, PROMPT, Sampling(temperature=1, max_tokens=20, seed=last.seed))
    assert again == text
    _, other, _ = run(engine, PROMPT, Sampling(temperature=1, max_tokens=20))
    assert other.seed != last.seed


def test_max_tokens_none_fills_the_context_to_the_last_place():
    """Bug class: off by one at the end of the context."""
    engine, _ = make_engine(num_blocks=5, max_context=20)
    _, last, _ = run(engine, PROMPT, Sampling(ignore_eos=True))
    assert (last.finish_reason, len(last.token_ids)) == ("length", 20 - len(PROMPT))


def test_without_a_tokenizer_every_token_is_a_piece():
    engine, _ = make_engine(codec=None, eos_ids=[EOS])
    _, last, pieces = run(engine, PROMPT, Sampling(max_tokens=6))
    assert tuple(t for p in pieces for t in p.token_ids) == last.token_ids and {p.text for p in pieces} == {""}
    for prompt in ("text", [{"role": "user", "content": "x"}]):
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.generate(prompt)
    with pytest.raises(RequestError, match="stop strings"):
        engine.generate(PROMPT, Sampling(stop="x"))


@pytest.mark.parametrize("kind", ["text", "messages", "ids", "array"])
def test_every_kind_of_prompt(kind):
    engine, _ = make_engine()
    prompt = {
        "text": "[user]hi",
        "messages": [{"role": "user", "content": "hi"}],
        "ids": list(b"[user]hi"),
        "array": np.frombuffer(b"[user]hi", np.uint8),
    }[kind]
    _, last, _ = run(engine, prompt, Sampling(max_tokens=5))
    assert list(last.token_ids) == answer(list(b"[user]hi"), Sampling(), 5)[0]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message", "hint"),
    [
        ([], None, "the prompt is empty", "at least one token"),
        ("", None, "the prompt is empty", "at least one token"),
        ([1, VOCAB], None, f"token id {VOCAB} is not in the vocabulary", f"0 to {VOCAB - 1}"),
        ([1, -1], None, "token id -1 is not in the vocabulary", f"0 to {VOCAB - 1}"),
        ([1.5], None, "flat list of whole numbers", None),
        ([True], None, "flat list of whole numbers", None),
        ([[1]], None, "flat list of whole numbers", None),
        ([[1], [1, 2]], None, "flat list of whole numbers", None),
        ([2**70], None, "flat list of whole numbers", None),
        (7, None, "not int", None),
        (b"bytes", None, "not bytes", None),
        ([{"role": "user", "content": "x"}, 3], None, "1 of 2 entries", None),
        ([1] * 20, None, "20 tokens, the context holds 20", "at most 19 prompt tokens"),
        ([1] * 25, None, "25 tokens, the context holds 20", "at most 19 prompt tokens"),
        ([1] * 15, Sampling(max_tokens=6), "15 prompt tokens + max_tokens 6 = 21 tokens", "max_tokens=5"),
    ],
)
def test_bad_requests_are_refused_at_once_with_numbers(prompt, sampling, message, hint):
    """Bug class: a request that can never run waits for ever, or fails deep inside a step."""
    engine, executor = make_engine(max_context=20)
    for ask in (engine.generate, engine.submit):
        with pytest.raises(RequestError, match=message.replace("+", r"\+")) as caught:
            ask(prompt, sampling)
        assert hint is None or hint in caught.value.hint
    assert not executor.batches and engine.stats().num_waiting == 0


def test_a_cache_smaller_than_the_context_is_named():
    engine, _ = make_engine(num_blocks=3, max_context=100)
    with pytest.raises(RequestError, match="the cache holds 13") as caught:
        engine.submit([1] * 10, Sampling(max_tokens=4))
    assert caught.value.hint == "max_tokens=3"
    assert run(engine, [1] * 10, Sampling(max_tokens=3, ignore_eos=True))[1].finish_reason == "length"


def test_chat_options_go_with_messages_only():
    engine, _ = make_engine()
    with pytest.raises(RequestError, match="tools"):
        engine.generate("text", chat_options={"tools": []})


def test_second_request_reuses_the_prefix_and_says_so():
    engine, executor = make_engine()
    first, one, _ = run(engine, PROMPT, Sampling(max_tokens=8))
    executor.batches.clear()
    second, two, _ = run(engine, PROMPT, Sampling(max_tokens=8))
    assert (first, one.cached_tokens, two.cached_tokens) == (second, 0, 12)
    assert executor.batches[0] == [(12, 4)]
    engine.clear_cache()
    assert run(engine, PROMPT, Sampling(max_tokens=8))[1].cached_tokens == 0


def test_requests_of_different_lengths_share_steps():
    """Bug class: requests served one after another."""
    engine, executor = make_engine()
    handles = [engine.submit([b] * n, Sampling(max_tokens=6, ignore_eos=True)) for b, n in ((1, 3), (2, 9), (3, 1))]
    results = [list(handle)[-1] for handle in handles]
    assert max(len(batch) for batch in executor.batches) == 3
    for (byte, length), result in zip(((1, 3), (2, 9), (3, 1)), results, strict=True):
        assert list(result.token_ids) == answer([byte] * length, Sampling(ignore_eos=True), 6)[0]


def test_more_requests_than_places_wait_their_turn():
    engine, _ = make_engine(max_sequences=2)
    handles = [engine.submit(PROMPT[:n], Sampling(max_tokens=5, ignore_eos=True)) for n in range(1, 7)]
    assert engine.stats().num_waiting == 6
    assert [list(handle)[-1].finish_reason for handle in handles] == ["length"] * 6
    assert engine.stats().finished == {"length": 6}


def test_closing_the_iterator_cancels_at_once_and_frees_everything():
    """Bug class: the client is gone and generation goes on for hours."""
    engine, executor = make_engine()
    for _ in engine.generate(PROMPT, Sampling(ignore_eos=True)):
        break
    steps = len(executor.batches)
    stats = engine.stats()
    assert stats.finished == {"cancelled": 1} and stats.num_used_blocks == stats.num_reserved_blocks == 0
    run(engine, [1], Sampling(max_tokens=2))
    assert all(len(batch) == 1 for batch in executor.batches[steps:])


def test_iterator_that_is_never_started_queues_nothing():
    engine, _ = make_engine()
    del_me = engine.generate(PROMPT)
    del_me.close()
    assert engine.stats().num_waiting == 0


def test_cancelled_handle_still_yields_one_terminal_event():
    engine, _ = make_engine()
    handle = engine.submit(PROMPT, Sampling(ignore_eos=True))
    next(handle)
    handle.cancel()
    handle.cancel()
    events = list(handle)
    assert [e.finish_reason for e in events if isinstance(e, Finished)] == ["cancelled"]
    assert list(handle) == [] and handle.is_finished


def test_cancel_in_the_queue_never_runs():
    engine, executor = make_engine()
    handle = engine.submit(PROMPT)
    handle.cancel()
    assert next(handle).finish_reason == "cancelled" and not executor.batches


def test_executor_failure_ends_the_requests_of_that_step_only():
    """Bug class: one failed step kills the engine, or leaks its blocks, or leaves a client waiting."""
    engine, executor = make_engine(max_sequences=2)
    run(engine, PROMPT, Sampling(max_tokens=1))
    other = [9] * 5
    handles = [engine.submit(p, Sampling(max_tokens=5, ignore_eos=True)) for p in (PROMPT[:3], PROMPT[:4], other)]
    next(handles[0])
    executor.fail_with = ValueError("boom")
    results = [list(handle)[-1] for handle in handles]
    assert [r.finish_reason for r in results] == ["error", "error", "length"]
    assert isinstance(results[0].error, InternalError) and "ValueError: boom" in results[0].error.message
    assert list(results[2].token_ids) == answer(other, Sampling(ignore_eos=True), 5)[0]
    stats = engine.stats()
    assert stats.num_used_blocks == stats.num_reserved_blocks == 0
    # What a failure may have left in the cache is not served to anybody.
    assert run(engine, PROMPT, Sampling(max_tokens=5, ignore_eos=True))[1].cached_tokens == 0


def test_logits_that_are_not_numbers_end_one_request_not_its_neighbour():
    """Bug class: NaN becomes token 0 for ever."""
    engine, executor = make_engine()
    executor.poison = {7}
    bad, good = (engine.submit(PROMPT[:n], Sampling(max_tokens=5, ignore_eos=True)) for n in (5, 9))
    bad, good = list(bad)[-1], list(good)[-1]
    assert (bad.finish_reason, len(bad.token_ids), good.finish_reason) == ("error", 2, "length")
    assert "position 7 are not numbers" in bad.error.message


def test_interrupt_passes_through_and_the_request_can_go_on():
    """Bug class: Ctrl-C during a step leaves the engine locked or the sequence out of step."""
    engine, executor = make_engine()
    handle = engine.submit(PROMPT, Sampling(max_tokens=9, ignore_eos=True))
    next(handle)
    executor.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(handle)
    tokens = list(list(handle)[-1].token_ids)
    assert tokens == answer(PROMPT, Sampling(ignore_eos=True), 9)[0]


def test_lost_blocks_are_reported_not_waited_for():
    """Bug class: requests wait for "capacity" at 0 % use for ever."""
    engine, _ = make_engine(num_blocks=6)
    engine._memory.pool.reserve(3)  # as if a sequence had not given its reservation back
    first = engine.submit([1] * 8, Sampling(max_tokens=8))
    second = engine.submit([1] * 3, Sampling(max_tokens=2))
    with pytest.raises(InternalError, match="reserv"):
        list(first)
    last = list(first)[-1]
    assert last.finish_reason == "error" and "3 reserved" in last.error.message
    engine._memory.pool.unreserve(3)
    assert list(second)[-1].finish_reason in ("length", "stop")


def test_close_ends_every_request_and_the_engine_says_it_is_closed():
    engine, executor = make_engine(max_sequences=1)
    unstarted = engine.generate(PROMPT)
    running, waiting = (engine.submit(PROMPT, Sampling(ignore_eos=True)) for _ in range(2))
    next(running)
    with engine:
        pass
    engine.close()
    assert executor.is_closed
    assert [list(h)[-1].finish_reason for h in (running, waiting, unstarted)] == ["cancelled"] * 3
    for ask in (engine.generate, engine.submit, engine.logits):
        with pytest.raises(RequestError, match="closed"):
            ask(PROMPT)


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_logits_are_those_of_every_prefix_and_leave_nothing_behind(chunk):
    engine, executor = make_engine(num_blocks=8, prefill_chunk=chunk, max_outputs=3, max_sequences=1)
    before = engine.stats()
    everything = engine.logits(PROMPT)
    expected = [prefix_logits(np.array(PROMPT[: n + 1], np.int32)) for n in range(len(PROMPT))]
    np.testing.assert_array_equal(everything, expected)
    np.testing.assert_array_equal(engine.logits(PROMPT, positions="last"), expected[-1:])
    assert everything.dtype == np.float32 and engine.stats() == before
    assert all(count <= chunk for batch in executor.batches for _, count in batch)


def test_logits_refuses_what_cannot_be():
    engine, executor = make_engine(num_blocks=4, max_context=100)
    with pytest.raises(RequestError, match="17 tokens, the context is 16"):
        engine.logits([1] * 17)
    with pytest.raises(RequestError, match="positions is 'first'"):
        engine.logits([1], positions="first")
    handle = engine.submit([1], Sampling(max_tokens=10, ignore_eos=True))
    next(handle)
    with pytest.raises(RequestError, match="leave 1 of 4"):
        engine.logits([1] * 5)
    executor.fail_with = ValueError("boom")
    with pytest.raises(InternalError, match="ValueError: boom"):
        engine.logits([1])
    assert list(handle)[-1].finish_reason == "length"


@pytest.mark.parametrize("settings", [{"max_sequences": 0}, {"max_sequences": 5}, {"prefill_chunk": 0}])
def test_settings_that_do_not_go_together_are_refused(settings):
    with pytest.raises(RequestError):
        make_engine(**settings)


def test_engines_share_nothing():
    """Bug class: module state leaks between two engines in one process."""
    (one, first), (two, second) = make_engine(), make_engine(num_blocks=16)
    handles = [e.submit(PROMPT, Sampling(max_tokens=9)) for e in (one, two)]
    assert list(handles[0])[-1].token_ids == list(handles[1])[-1].token_ids
    assert first.batches == second.batches


def test_timings_and_stats_add_up():
    engine, _ = make_engine()
    _, last, _ = run(engine, PROMPT, Sampling(max_tokens=8, ignore_eos=True))
    timings = last.timings
    assert min(timings.queue_s, timings.prefill_s, timings.decode_s) >= 0
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generated_tokens, stats.num_cached_tokens) == (len(PROMPT), 8, 0)
    assert stats.num_free_blocks + stats.num_used_blocks + stats.num_cached_blocks == stats.num_blocks


def test_codec_protocol_is_implemented_by_the_fake():
    assert ByteCodec().encode_prompt("é") == [0xC3, 0xA9]
