"""One answer: the text of a request does not depend on neighbours, chunks, places, prefix reuse or cancellations."""

import numpy as np
from engine_fakes import answer, make_engine
from hypothesis import given, settings, strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from hotset.engine.events import Finished
from hotset.engine.sampling import Sampling
from hotset.errors import RequestError

# Few different tokens and shared beginnings, so that prefixes meet and part at every place of a block.
PREFIXES = [[], [5] * 9, [5] * 4 + [6] * 13, list(range(30))]
prompts = strategies.builds(
    lambda prefix, cut, rest: (prefix[:cut] + rest) or [1],
    strategies.sampled_from(PREFIXES),
    strategies.integers(0, 30),
    strategies.lists(strategies.integers(5, 6), max_size=9),
)
samplings = strategies.builds(
    Sampling,
    temperature=strategies.sampled_from([0.0, 0.9]),
    top_k=strategies.sampled_from([0, 20]),
    seed=strategies.integers(0, 3),
    max_tokens=strategies.integers(1, 12),
    stop=strategies.sampled_from([(), ("ab",), ("c", "abd")]),
    ignore_eos=strategies.booleans(),
    frequency_penalty=strategies.sampled_from([0.0, 0.3]),
)


class EngineMachine(RuleBasedStateMachine):
    """Submit, step, cancel, read and score in any order, over a small pool."""

    requests = Bundle("requests")

    @initialize(
        num_blocks=strategies.integers(10, 24),
        max_tokens=strategies.integers(3, 20),
        max_sequences=strategies.integers(1, 3),
    )
    def start(self, num_blocks, max_tokens, max_sequences):
        self.engine, self.executor = make_engine(
            num_blocks, max_tokens=max_tokens, max_outputs=3, max_sequences=max_sequences
        )
        self.open = []

    @rule(target=requests, prompt=prompts, sampling=samplings)
    def submit(self, prompt, sampling):
        try:
            handle = self.engine.submit(prompt, sampling)
        except RequestError:
            assert len(prompt) + sampling.max_tokens > self.engine.max_context
            return multiple()
        request = {"handle": handle, "prompt": prompt, "sampling": sampling, "events": [], "cancelled": False}
        self.open.append(request)
        return request

    @rule(count=strategies.integers(1, 5))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule(request=requests)
    def read(self, request):
        request["events"] += [event for event in [next(request["handle"], None)] if event]

    @rule(request=consumes(requests))
    def cancel(self, request):
        request["handle"].cancel()
        request["cancelled"] = True
        self.finish(request)

    @rule(request=consumes(requests))
    def finish(self, request):
        request["events"] += list(request["handle"])
        self.open.remove(request)
        check(request)

    @rule(prompt=prompts)
    def score(self, prompt):
        try:
            self.engine.logits(prompt, "last")
        except RequestError as error:
            assert "leave" in str(error)

    @invariant()
    def accounts_are_whole(self):
        if hasattr(self, "engine"):
            running = self.engine._scheduler.running
            self.engine._memory.check_integrity(sequence.table for sequence in running)

    def teardown(self):
        if hasattr(self, "engine"):
            for request in list(self.open):
                self.finish(request)
            assert self.engine.stats().num_used_blocks == self.engine.stats().num_reserved_blocks == 0


def check(request):
    *pieces, last = request["events"]
    assert isinstance(last, Finished) and not any(isinstance(piece, Finished) for piece in pieces)
    output, text, reason = answer(request["prompt"], request["sampling"], request["sampling"].max_tokens)
    seen = "".join(piece.text for piece in pieces)
    if last.finish_reason == "cancelled":
        assert request["cancelled"] and list(last.token_ids) == output[: len(last.token_ids)]
    else:
        assert (list(last.token_ids), seen, last.finish_reason) == (output, text, reason)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    batch=strategies.lists(strategies.tuples(prompts, samplings), min_size=1, max_size=6),
    max_tokens=strategies.integers(1, 40),
)
def test_any_chunk_and_any_company_give_the_answers_of_single_requests(batch, max_tokens):
    max_sequences = min(3, max_tokens)
    engine, executor = make_engine(64, max_tokens=max_tokens, max_outputs=3, max_sequences=max_sequences)
    handles = [engine.submit(prompt, sampling) for prompt, sampling in batch]
    for (prompt, sampling), handle in zip(batch, handles, strict=True):
        check({"prompt": prompt, "sampling": sampling, "events": list(handle), "cancelled": False})
    assert max(sum(count for _, count in step) for step in executor.batches) <= max_tokens


def test_long_prefill_does_not_stop_running_answers():
    """Bug class: decode is never scheduled while a long prompt is read (270 -> 6.6 tokens per second)."""
    engine, executor = make_engine(num_blocks=200, max_tokens=16)
    talker = engine.submit([1], Sampling(max_tokens=40, ignore_eos=True))
    next(talker)
    executor.batches.clear()
    reader = engine.submit(list(np.arange(250) % 7), Sampling(max_tokens=2, ignore_eos=True))
    list(reader)
    prefill = executor.batches[:16]
    assert all(any(count == 1 for _, count in batch) for batch in prefill), "a step without the running answer"
    assert all(sum(count for _, count in batch) == 16 for batch in prefill[:-1]), "room left unused"


def test_short_prompt_does_not_wait_for_a_long_one():
    """Bug class: the second agent waits for the first one's prefill to end."""
    engine, executor = make_engine(num_blocks=200, max_tokens=16)
    long = engine.submit([3] * 200, Sampling(max_tokens=2, ignore_eos=True))
    short = engine.submit([4] * 8, Sampling(max_tokens=2, ignore_eos=True))
    list(short)
    assert len(executor.batches) <= 4
    list(long)


def test_eight_requests_with_one_long_beginning_compute_it_about_once():
    """Bug class: a shared system prompt is computed once per request when they arrive together."""
    engine, executor = make_engine(num_blocks=200, max_tokens=32, max_outputs=8, max_sequences=8)
    shared = list(np.arange(120) % 11)
    handles = [engine.submit([*shared, 50 + i], Sampling(max_tokens=3, ignore_eos=True)) for i in range(8)]
    results = [list(handle)[-1] for handle in handles]
    computed = sum(count for batch in executor.batches for _, count in batch)
    assert computed < 2.5 * len(shared)
    assert sum(result.cached_tokens for result in results) > 5 * len(shared)
    for i, result in enumerate(results):
        assert list(result.token_ids) == answer([*shared, 50 + i], Sampling(ignore_eos=True), 3)[0]
