"""A model with a frontier: what is reused, what is computed again, and that the answer is always the cold one."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from engine_fakes import VOCAB, answer
from frontier_fakes import BLOCK, FrontierExecutor, chain_logits, make_frontier_engine
from hypothesis import given, settings, strategies
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from hotset.engine.engine import Engine
from hotset.engine.events import Finished
from hotset.engine.reference_sampler import ReferenceSampler
from hotset.engine.sampling import Sampling
from hotset.errors import RequestError

GREEDY = Sampling(max_tokens=6, ignore_eos=True)


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(0, 200, length).tolist()


def run(engine, prompt, max_tokens=6):
    """The terminal event of a greedy request, after holding its tokens against a run without a cache."""
    *_, last = engine.generate(prompt, Sampling(max_tokens=max_tokens, ignore_eos=True))
    check(prompt, last, max_tokens)
    return last


def check(prompt, last, max_tokens=6):
    expected, _, _ = answer(prompt, Sampling(ignore_eos=True), max_tokens, chain_logits)
    assert isinstance(last, Finished) and list(last.token_ids) == expected


def computed(executor, since=0):
    return [chunk for batch in executor.batches[since:] for chunk in batch]


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 70, 129])
def test_a_prompt_sent_again_resumes_at_its_last_whole_block(length):
    """Bug class: 0 % hits on an identical request (hybrid groups), or rows without the state that belongs to them."""
    engine, executor = make_frontier_engine()
    prompt = prompt_of(length)
    first, since = run(engine, prompt), len(executor.batches)
    again = run(engine, prompt)
    border = (length - 1) // BLOCK * BLOCK
    assert (first.cached_tokens, first.recomputed_tokens) == (0, 0)
    assert (again.cached_tokens, again.recomputed_tokens) == (border, 0)
    assert computed(executor, since)[0] == (border, length - border)


def test_the_next_turn_resumes_where_the_answer_ended():
    """Bug class: the answer is prefilled again as part of the next prompt."""
    engine, _ = make_frontier_engine()
    history, reusable = prompt_of(40), 0
    for turn in range(4):
        last = run(engine, history, max_tokens=37)
        assert (last.cached_tokens, last.recomputed_tokens) == (reusable, 0)
        # The last token of an answer is never fed back, so it has no row.
        reusable = (len(history) + 37 - 1) // BLOCK * BLOCK
        history = [*history, *last.token_ids, *prompt_of(9, seed=turn + 1)]


def test_one_snapshot_follows_an_answer_and_does_not_push_others_out():
    """Bug class: a long answer fills the pool with snapshots of itself and every other conversation is lost."""
    engine, _ = make_frontier_engine(num_snapshots=4)
    other = prompt_of(50, seed=1)
    run(engine, other)
    run(engine, prompt_of(20, seed=2), max_tokens=100)
    assert engine.stats().num_used_snapshots <= 4
    assert run(engine, other).cached_tokens == 48


def test_a_long_prompt_leaves_snapshots_at_the_stated_spacing():
    """Bug class: an edit early in a long prompt throws all of it away."""
    engine, executor = make_frontier_engine(80, num_snapshots=16, max_tokens=50)
    spacing = engine.stats().snapshot_spacing
    assert spacing == 8 * BLOCK
    prompt = prompt_of(1000)
    run(engine, prompt)
    for cut in (300, 650, 999):
        edited = [*prompt[:cut], 201, *prompt_of(30, seed=3)]
        since = len(executor.batches)
        last = run(engine, edited)
        whole = cut // BLOCK * BLOCK
        assert whole - last.cached_tokens < spacing + 50, "further back than the spacing and one step"
        assert last.recomputed_tokens == whole - last.cached_tokens
        assert sum(count for _, count in computed(executor, since)) == len(edited) - last.cached_tokens + 5


def test_a_small_pool_spreads_its_snapshots_over_a_long_prompt():
    """Bug class: only the last few thousand tokens of a long prompt have snapshots, all others were pushed out."""
    engine, _ = make_frontier_engine(130, num_snapshots=4, max_tokens=64)
    prompt = prompt_of(2000)
    run(engine, prompt)
    edited = [*prompt[:1500], 201]
    assert run(engine, edited).cached_tokens >= 1000


def test_many_short_turns_do_not_push_out_the_snapshots_of_a_long_beginning():
    """Bug class: after a dozen turns an edit in the system prompt computes everything again."""
    engine, _ = make_frontier_engine(120, num_snapshots=8)
    document = prompt_of(600)
    history = [*document, *prompt_of(20, 1)]
    for turn in range(30):
        last = run(engine, history, max_tokens=6)
        assert turn == 0 or last.cached_tokens >= len(history) - 24 - BLOCK
        history = [*history, *last.token_ids, *prompt_of(12, turn)]
    assert run(engine, [*document[:550], 201]).cached_tokens >= 500 - 2 * engine.stats().snapshot_spacing


def test_an_edit_in_the_middle_computes_what_follows_it_only():
    engine, executor = make_frontier_engine()
    head, body, tail = prompt_of(3 * BLOCK + 5), prompt_of(40, 1), prompt_of(30, 2)
    run(engine, head)
    run(engine, [*head, *body, *tail])
    since = len(executor.batches)
    last = run(engine, [*head, *body[:20], 7, *body[21:], *tail])
    # The head ended a prompt, so its last whole block has a snapshot. One block after it is whole and known.
    assert (last.cached_tokens, last.recomputed_tokens) == (3 * BLOCK, BLOCK)
    assert computed(executor, since)[0][0] == 3 * BLOCK


def test_where_prompts_part_becomes_a_place_to_resume():
    """Bug class: a shared system prompt that ends at no snapshot is computed for every conversation for ever."""
    engine, _ = make_frontier_engine()
    system = prompt_of(5 * BLOCK + 3)
    counts = [run(engine, [*system, *prompt_of(40, seed)]) for seed in (1, 2, 3)]
    assert [last.cached_tokens for last in counts] == [0, 0, 5 * BLOCK]
    assert [last.recomputed_tokens for last in counts] == [0, 5 * BLOCK, 0]


def test_two_branches_of_one_history_and_two_interleaved_conversations():
    """Bug class: one live timeline, which a side request moves (187,860 common tokens thrown away)."""
    engine, _ = make_frontier_engine(60, num_snapshots=24)
    trunk = prompt_of(60)
    first = run(engine, trunk, max_tokens=20)
    branches = [[*trunk, *first.token_ids, *prompt_of(20, seed)] for seed in (4, 5)]
    others = [prompt_of(50, 6)]
    for turn in range(3):
        for index in (0, 1):
            last = run(engine, branches[index], max_tokens=20)
            assert last.cached_tokens >= len(branches[index]) - (20 + 20 + BLOCK)
            branches[index] = [*branches[index], *last.token_ids, *prompt_of(10 + turn, 7 + index)]
        last = run(engine, others[-1], max_tokens=20)
        others.append([*others[-1], *last.token_ids, *prompt_of(12, 20 + turn)])
        assert turn == 0 or last.cached_tokens >= len(others[-2]) - (12 + 20 + BLOCK)
    # And the trunk, again.
    assert run(engine, trunk).cached_tokens == 48


def test_requests_together_take_from_each_other_only_what_they_can_resume_from():
    """Bug class: a sequence skips to blocks that a neighbour computed and keeps its own window."""
    engine, executor = make_frontier_engine(150, max_tokens=64, max_outputs=4, max_sequences=4, num_snapshots=12)
    shared = prompt_of(300)
    prompts = [[*shared, 50 + i] for i in range(4)]
    handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
    lasts = [list(handle)[-1] for handle in handles]
    for prompt, last in zip(prompts, lasts, strict=True):
        check(prompt, last)
    assert executor.num_restores > 0 and sum(last.cached_tokens for last in lasts) > 2 * len(shared)
    assert sum(count for _, count in computed(executor)) < 2.5 * len(shared)


def test_room_that_a_cut_leaves_goes_to_the_neighbours():
    """Bug class: steps half empty while others wait."""
    engine, executor = make_frontier_engine(100, max_tokens=64)
    handles = [engine.submit(prompt_of(length, length), GREEDY) for length in (120, 700)]
    for length, handle in zip((120, 700), handles, strict=True):
        check(prompt_of(length, length), list(handle)[-1])
    steps = [[chunk for chunk in batch if chunk[1] > 1] for batch in executor.batches]
    # The first prompt's third step would end at 120 and is cut at 112.
    assert [sum(count for _, count in step) for step in steps[:3]] == [64, 64, 64]
    assert steps[2] == [(96, 16), (32, 48)]


def test_without_snapshots_nothing_is_reused_and_the_report_says_what_that_cost():
    engine, executor = make_frontier_engine(num_snapshots=0)
    prompt = prompt_of(100)
    run(engine, prompt)
    again = run(engine, prompt)
    assert (again.cached_tokens, again.recomputed_tokens) == (0, 96)
    assert executor.num_copies == executor.num_restores == 0
    assert max(count for _, count in computed(executor)) == 64, "a step was cut for a snapshot that is not taken"


def test_clear_cache_forgets_snapshots_too():
    engine, _ = make_frontier_engine()
    prompt = prompt_of(100)
    run(engine, prompt)
    assert engine.stats().num_used_snapshots > 0
    engine.clear_cache()
    assert engine.stats().num_used_snapshots == 0
    assert run(engine, prompt).cached_tokens == 0


@pytest.mark.parametrize("at_step", [0, 1, 3, 6])
def test_an_interrupted_step_costs_time_not_correctness(at_step):
    """Bug class: Ctrl-C after a step's kernels, before its bookkeeping: the window has moved, the sequence has not."""
    engine, executor = make_frontier_engine(max_tokens=40)
    prompts = [prompt_of(90), prompt_of(70, 1)]
    handles = [engine.submit(prompt, GREEDY) for prompt in prompts]
    for _ in range(at_step):
        engine.step()
    executor.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    lasts = [list(handle)[-1] for handle in handles]
    for prompt, last in zip(prompts, lasts, strict=True):
        check(prompt, last)
        assert last.cached_tokens == 0, "its own tokens count as cached"
    assert engine.stats().num_used_blocks == 0


def test_an_interrupted_request_keeps_its_place_before_those_that_wait():
    engine, executor = make_frontier_engine(max_sequences=1)
    handles = [engine.submit(prompt_of(40, seed), GREEDY) for seed in (1, 2)]
    engine.step()
    executor.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    list(handles[0])
    assert not handles[1].is_finished and len(executor.batches) == 2 + 1 + 5


def test_a_cancelled_prefill_is_not_lost():
    """Bug class: the client gives up, asks again, and everything is computed from the beginning."""
    engine, _ = make_frontier_engine(max_tokens=4 * BLOCK)
    prompt = prompt_of(300)
    request = engine.submit(prompt, GREEDY)
    for _ in range(3):
        engine.step()
    request.cancel()
    assert list(request)[-1].finish_reason == "cancelled"
    assert run(engine, prompt).cached_tokens >= 2 * 4 * BLOCK


def test_a_failed_step_frees_slots_and_trusts_nothing():
    engine, executor = make_frontier_engine()
    prompt = prompt_of(100)
    run(engine, prompt)
    executor.fail_with = ValueError("boom")
    *_, last = engine.generate(prompt, GREEDY)
    assert last.finish_reason == "error"
    assert engine.stats().num_used_snapshots == 0
    assert run(engine, prompt).cached_tokens == 0


def test_a_failed_step_leaves_no_snapshot_even_where_a_neighbour_holds_the_blocks():
    engine, executor = make_frontier_engine(max_tokens=8)
    prompt = prompt_of(40)
    run(engine, prompt)
    handles = [engine.submit(one, GREEDY) for one in (prompt_of(100, 1), prompt_of(3, 2), [*prompt, 5])]
    executor.fail_with = ValueError("boom")
    engine.step()
    assert [handle.is_finished for handle in handles] == [True, True, False]
    assert engine.stats().num_used_blocks == 2 and engine.stats().num_used_snapshots == 0
    check([*prompt, 5], list(handles[2])[-1])


def test_logits_need_a_frontier_of_their_own():
    """Bug class: scoring moves the window of a running request."""
    engine, _ = make_frontier_engine(max_sequences=2)
    prompt = prompt_of(45)
    expected = [chain_logits(np.array(prompt[: n + 1])) for n in range(len(prompt))]
    handles = [engine.submit(prompt_of(30, 1), GREEDY)]
    next(handles[0])
    np.testing.assert_array_equal(engine.logits(prompt), expected)
    handles.append(engine.submit(prompt_of(20, 2), GREEDY))
    next(handles[1])
    with pytest.raises(RequestError, match="every frontier"):
        engine.logits(prompt)
    for seed, length, handle in ((1, 30, handles[0]), (2, 20, handles[1])):
        check(prompt_of(length, seed), list(handle)[-1])


def test_more_sequences_than_frontiers_are_refused():
    executor = FrontierExecutor(8, 16, 4, num_frontiers=2)
    with pytest.raises(RequestError, match="3, the executor holds 2 frontiers"):
        Engine(executor, None, ReferenceSampler(), vocab_size=VOCAB, max_context=64, max_sequences=3)


# Few different tokens and shared beginnings, so that prefixes meet and part at every place of a block.
PREFIXES = [[], [5] * 40, [5] * 20 + [6] * 60, list(range(90))]
prompts = strategies.builds(
    lambda prefix, cut, rest: (prefix[:cut] + rest) or [1],
    strategies.sampled_from(PREFIXES),
    strategies.integers(0, 90),
    strategies.lists(strategies.integers(5, 6), max_size=20),
)
samplings = strategies.builds(
    Sampling,
    temperature=strategies.sampled_from([0.0, 0.9]),
    seed=strategies.integers(0, 3),
    max_tokens=strategies.integers(1, 40),
    ignore_eos=strategies.booleans(),
)


class FrontierMachine(RuleBasedStateMachine):
    """Submit, step, interrupt, cancel, read, save, load and forget in any order, over small pools."""

    requests = Bundle("requests")

    @initialize(
        num_blocks=strategies.integers(10, 24),
        max_tokens=strategies.integers(3, 70),
        max_sequences=strategies.integers(1, 3),
        num_snapshots=strategies.integers(0, 6),
    )
    def start(self, num_blocks, max_tokens, max_sequences, num_snapshots):
        self.engine, self.executor = make_frontier_engine(
            num_blocks, max_tokens=max_tokens, max_sequences=max_sequences, num_snapshots=num_snapshots
        )
        self.open = []
        self.folder = TemporaryDirectory()
        self.session = Path(self.folder.name) / "session"

    @rule(target=requests, prompt=prompts, sampling=samplings)
    def submit(self, prompt, sampling):
        try:
            handle = self.engine.submit(prompt, sampling)
        except RequestError:
            assert len(prompt) + sampling.max_tokens > self.engine.max_context
            return multiple()
        request = {"handle": handle, "prompt": prompt, "sampling": sampling, "cancelled": False}
        self.open.append(request)
        return request

    @rule(count=strategies.integers(1, 8))
    def step(self, count):
        for _ in range(count):
            self.engine.step()

    @rule()
    def interrupt(self):
        self.executor.fail_with = KeyboardInterrupt()
        try:
            self.engine.step()
        except KeyboardInterrupt:
            return
        self.executor.fail_with = None

    @rule()
    def forget(self):
        self.engine.clear_cache()

    @rule(prompt=prompts)
    def save(self, prompt):
        try:
            saved = self.engine.save_session(self.session, prompt)
        except RequestError as error:
            assert len(prompt) < 2 or any(word in str(error) for word in ("expected 2 to", "leave", "every frontier"))
        else:
            assert saved.cached_tokens == len(prompt) - 1

    @rule()
    @precondition(lambda self: self.session.exists())
    def load(self):
        try:
            loaded = self.engine.load_session(self.session)
        except RequestError as error:
            assert any(word in str(error) for word in ("takes prompts of", "leave", "keeps none"))
        else:
            assert loaded.cached_tokens == len(loaded.token_ids) - 1

    @rule(request=consumes(requests))
    def cancel(self, request):
        request["handle"].cancel()
        request["cancelled"] = True
        self.finish(request)

    @rule(request=consumes(requests))
    def finish(self, request):
        *_, last = request["handle"]
        self.open.remove(request)
        sampling = request["sampling"]
        output, _, reason = answer(request["prompt"], sampling, sampling.max_tokens, chain_logits)
        if last.finish_reason == "cancelled":
            assert request["cancelled"] and list(last.token_ids) == output[: len(last.token_ids)]
        else:
            assert (list(last.token_ids), last.finish_reason) == (output, reason)

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
            self.folder.cleanup()


TestFrontierMachine = FrontierMachine.TestCase
TestFrontierMachine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@settings(max_examples=40, deadline=None)
@given(
    batch=strategies.lists(strategies.tuples(prompts, samplings), min_size=1, max_size=5),
    max_tokens=strategies.integers(3, 90),
    num_snapshots=strategies.integers(0, 9),
)
def test_any_chunk_any_company_and_any_pool_give_the_answers_of_single_requests(batch, max_tokens, num_snapshots):
    engine, _ = make_frontier_engine(64, max_tokens=max_tokens, num_snapshots=num_snapshots)
    handles = [engine.submit(prompt, sampling) for prompt, sampling in batch]
    for (prompt, sampling), handle in zip(batch, handles, strict=True):
        output, _, reason = answer(prompt, sampling, sampling.max_tokens, chain_logits)
        last = list(handle)[-1]
        assert (list(last.token_ids), last.finish_reason) == (output, reason)
