"""DeepSeek-V4 in an engine: sessions, reuse, rewind and branches give the bits of a run without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from dsv4_files import TinyV4
from dsv4_native import v4_described, v4_native
from dsv4_reference import run_chunks
from helpers import Floats, random_tokens, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotset.api import Described
from hotset.engine.batch import StepBatch
from hotset.engine.engine import Engine
from hotset.engine.events import Finished
from hotset.engine.native import NativeExecutor
from hotset.engine.native_sampler import NativeSampler
from hotset.engine.sampling import Sampling
from hotset.kv.identity import identify

CONTEXT = 1300
VOCAB = 160
STREAM = random_tokens(CONTEXT, VOCAB, seed=1)
# Around groups of 4 and 128 tokens, the window (32), tiles of 64 positions, and blocks.
EDGES = (
    2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 34, 64, 65, 66, 127, 128, 129, 130, 131, 132, 133, 255, 256, 257, 258, 259, 261,
    383, 384, 385, 386, 511, 512, 513, 514, 767, 768, 769, 1024, 1025, 1026, 1151, 1152, 1153, 1280, 1281, 1285,
)  # fmt: skip


@dataclass
class Watched:
    """An engine, and the logits of the last step that wanted any."""

    engine: Engine
    executor: NativeExecutor
    logits: Floats | None = None

    def last(self, prompt: list[int]) -> tuple[Finished, Floats]:
        """The end of a request for one token, and the logits that the token was drawn from."""
        *_, last = self.engine.generate(prompt, Sampling(max_tokens=1, ignore_eos=True))
        assert isinstance(last, Finished) and last.error is None and self.logits is not None
        return last, self.logits[-1:]


def watch(
    d: Described, *, threads: int = 1, chunk: int = CONTEXT, sequences: int = 1, num_snapshots: int = 8
) -> Watched:
    executor = v4_native(d, threads, context=CONTEXT, sequences=sequences, chunk=chunk)
    engine = Engine(
        executor, None, NativeSampler(VOCAB), vocab_size=VOCAB, max_context=CONTEXT, max_sequences=sequences,
        num_snapshots=num_snapshots, identity=identify(d.spec, d.checkpoint, d.account, executor.isa),
    )  # fmt: skip
    watched, step = Watched(engine, executor), executor.step

    def watching(batch: StepBatch) -> Floats:
        logits = step(batch)
        if len(batch.outputs):
            watched.logits = logits.copy()
        return logits

    executor.step = watching  # type: ignore[method-assign]
    return watched


@pytest.fixture(scope="module", params=["FP8", "BF16", "FP4+FP8"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Described]:
    d = v4_described(tmp_path_factory.mktemp("v4"), TinyV4(formats="official"), request.param)
    with d.checkpoint:
        yield d


@pytest.fixture(scope="module")
def judge(model: Described) -> NativeExecutor:
    return v4_native(model, context=CONTEXT, chunk=CONTEXT)


def test_a_session_goes_on_with_the_same_bits_at_every_border(
    model: Described, judge: NativeExecutor, tmp_path: Path
) -> None:
    """Bug class: exact at 128 tokens, different from 129 on (llama.cpp#26063)."""
    expected = run_chunks(judge, STREAM)
    one, two = watch(model, chunk=200), watch(model, threads=2, chunk=64, sequences=2)
    for length in EDGES:
        prompt = STREAM[:length].tolist()
        one.engine.save_session(tmp_path / "s", prompt)
        two.engine.clear_cache()
        two.engine.load_session(tmp_path / "s")
        for more in (0, 1, 7):
            last, logits = two.last(STREAM[: length + more].tolist())
            assert last.cached_tokens >= length - 1, "the session was not used"
            assert same_bits(logits, expected[length + more - 1 : length + more]), (length, more)


def test_every_length_around_a_block_and_a_window(model: Described, judge: NativeExecutor, tmp_path: Path) -> None:
    expected = run_chunks(judge, STREAM[:300])
    one, two = watch(model), watch(model)
    for length in (*range(2, 40), *range(240, 292)):
        one.engine.save_session(tmp_path / "s", STREAM[:length])
        two.engine.clear_cache()
        assert two.engine.load_session(tmp_path / "s").cached_tokens == length - 1
        assert same_bits(two.last(STREAM[:length].tolist())[1], expected[length - 1 : length]), length


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 1200), st.integers(0, 300), st.booleans()), min_size=3, max_size=9
    ),
    chunk=st.sampled_from([48, 200, CONTEXT]),
    num_snapshots=st.integers(0, 9),
)
def test_reuse_rewind_and_branches_have_the_bits_of_a_cold_run(
    model: Described, judge: NativeExecutor, turns: list[tuple[int, int, int, bool]], chunk: int, num_snapshots: int
) -> None:
    """Every turn takes one of three histories, cuts it anywhere, and goes on with other tokens; or starts anew."""
    watched = watch(model, chunk=chunk, sequences=2, num_snapshots=num_snapshots)
    histories = [STREAM[:300].tolist(), STREAM[:700].tolist(), STREAM[100:600].tolist()]
    for seed, (which, cut, count, is_kept) in enumerate(turns):
        tokens = [*histories[which][: cut + 1], *random_tokens(count, VOCAB, seed=seed + 9).tolist()][: CONTEXT - 20]
        if is_kept:
            histories[which] = tokens
        beside = watched.engine.submit(histories[(which + 1) % 3], Sampling(max_tokens=5, seed=seed, ignore_eos=True))
        if count % 2:
            watched.engine.step()
        last, logits = watched.last(tokens)
        list(beside)
        assert same_bits(logits, run_chunks(judge, np.array(tokens, np.int32))[-1:])
        assert last.cached_tokens + last.recomputed_tokens < len(tokens)
        watched.engine._memory.check_integrity(())


def test_answers_of_interleaved_conversations_are_those_of_cold_engines(model: Described) -> None:
    """Decode crosses window, group and block borders between the turns; what is reused is reported."""
    warm = watch(model, sequences=2, chunk=256, num_snapshots=12)
    histories = [STREAM[:200].tolist(), STREAM[300:550].tolist()]
    for turn in range(3):
        sampling = Sampling(max_tokens=90, temperature=1.0, seed=turn, ignore_eos=True)
        handles = [warm.engine.submit(history, sampling) for history in histories]
        for index, handle in enumerate(handles):
            *_, last = handle
            cold = watch(model, num_snapshots=0)
            *_, expected = cold.engine.generate(histories[index], sampling)
            assert isinstance(last, Finished) and isinstance(expected, Finished)
            assert last.token_ids == expected.token_ids
            if turn:
                assert last.cached_tokens >= (len(histories[index]) - 20 - 1) // 256 * 256
            histories[index] = [*histories[index], *last.token_ids, *random_tokens(20, VOCAB, seed=turn).tolist()]
