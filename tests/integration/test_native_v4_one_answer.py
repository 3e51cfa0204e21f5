"""One answer for models with windows, compressed rows, an indexer and experts: bit for bit, however it is computed.

The judge is the same kernel set on one thread, each stream alone in one step. Rings, compressor state, candidates of
the indexer and pairs of experts all depend on how tokens are cut into steps; the bits must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from dsv4_files import TinyV4
from dsv4_native import v4_described, v4_native
from dsv4_reference import run_chunks
from helpers import Floats, Ints, random_tokens, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.api import Described
from hotset.engine.batch import Executor, Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.machine.native import available_isas
from hotset.program.cache import num_blocks

# Over 288 compressed rows of ratio 4: the indexer has to forget rows on the way (four times the wanted, and 256).
CONTEXT = 1300
NUM_SEQUENCES = 3
BLOCKS_EACH = num_blocks(CONTEXT)
VOCAB = 160
STREAMS = tuple(random_tokens(CONTEXT, VOCAB, seed=seed) for seed in range(NUM_SEQUENCES))
# Around groups of 4 and 128 tokens, the window, tiles of 64 positions, blocks, and runs of packed rows.
EDGES = (
    1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 131, 255, 256, 257, 259, 511, 512, 513,
    767, 768, 1023, 1024, 1025, 1151, 1152, 1153, 1279, 1280, 1281, 1298, 1299,
)  # fmt: skip

MODELS = {
    "window": TinyV4(ratios=(0, 0), formats="official", window=20, hash_layers=1),
    "all rows": TinyV4(ratios=(128, 128), formats="fp8", heads=6, window=64, hash_layers=0, top_k=3),
    # More chosen rows than a span of tiles holds; heads and tiles that no thread count divides.
    "chosen": TinyV4(
        ratios=(4, 4), formats="official", heads=5, o_groups=1, window=128, index_top_k=200, index_heads=3
    ),
    "mixed": TinyV4(formats="official", hidden=96, experts=5, inter=64, streams=3),
    "float": TinyV4(formats="float", ratios=(4, 128), top_k=1, heads=70, head_dim=80),
}
# Each with the default form of cache rows, and every other form with one of them.
CASES = (*MODELS, "chosen in FP4", "mixed in FP4+FP8", "mixed in BF16+FP8", "chosen in BF16-exact", "mixed in FP8+FP8")


class Lab:
    """A model with its executors, made once, and the judge's logits of every stream."""

    def __init__(self, model: Described) -> None:
        self.model = model
        self.executor = cache(self._executor)
        self.judge = cache(self._judge)

    def _executor(self, isa: str, threads: int) -> NativeExecutor:
        return v4_native(self.model, threads, isa, context=CONTEXT, sequences=NUM_SEQUENCES, chunk=2 * CONTEXT)

    def _judge(self, isa: str) -> list[Floats]:
        return [run_chunks(self.executor(isa, 1), tokens) for tokens in STREAMS]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Lab]]:
    labs: dict[str, Lab] = {}

    def open_lab(name: str) -> Lab:
        model, _, form = name.partition(" in ")
        if name not in labs:
            labs[name] = Lab(v4_described(tmp_path_factory.mktemp("model"), MODELS[model], form or None))
        return labs[name]

    yield open_lab
    for entry in labs.values():
        entry.model.checkpoint.close()


@dataclass
class Work:
    """One sequence of an example: which stream, and where its chunks end."""

    stream: int
    ends: list[int]


@st.composite
def works(draw: st.DrawFn) -> Work:
    length = draw(st.sampled_from(EDGES) | st.integers(1, CONTEXT))
    ends = draw(st.sets(st.sampled_from(EDGES) | st.integers(1, CONTEXT), max_size=8))
    # A run of single tokens, as in decoding.
    single = draw(st.sampled_from((0, length - 6, 124, 1149, 1278)))
    ends |= set(range(single, single + 6))
    return Work(draw(st.integers(0, NUM_SEQUENCES - 1)), [*sorted({e for e in ends if 0 < e < length}), length])


def play(executor: Executor, sequences: list[Work], seed: int) -> Iterator[tuple[int, int, Floats]]:
    """Run the chunks in steps of any of the sequences in any order, over any blocks and frontiers.

    Yields (stream, position, logits) of every output; each step wants all, some or none of them.
    """
    rng = np.random.default_rng(seed)
    table = rng.permutation(executor.num_blocks).astype(np.int32).reshape(NUM_SEQUENCES, BLOCKS_EACH)
    frontiers = rng.permutation(NUM_SEQUENCES)
    done = [0] * len(sequences)
    todo = [list(work.ends) for work in sequences]
    while any(todo):
        ready = [i for i in range(len(sequences)) if todo[i]]
        tokens: list[Ints] = []
        segments, origin, first = [], [], 0
        for i in rng.permutation(ready)[: rng.integers(1, len(ready) + 1)]:
            begin, end = done[i], todo[i][0]
            if first + end - begin > executor.max_tokens:
                continue
            todo[i].pop(0)
            done[i] = end
            tokens.append(STREAMS[sequences[i].stream][begin:end])
            segments.append(Segment(first, end - begin, begin, table[i, : num_blocks(end)], int(frontiers[i])))
            origin += [(sequences[i].stream, position) for position in range(begin, end)]
            first += end - begin
        wanted = np.flatnonzero(rng.random(first) < rng.choice([0.0, 0.3, 1.0], p=[0.2, 0.4, 0.4])).astype(np.int32)
        logits = executor.step(StepBatch(np.concatenate(tokens), segments, wanted))
        for row, index in enumerate(wanted):
            yield (*origin[index], logits[row])


@pytest.mark.parametrize("name", CASES)
def test_any_way_of_computing_gives_the_same_bits(name: str, isa: str, lab: Callable[[str], Lab]) -> None:
    """Guards against results that depend on chunk, neighbours, threads, blocks or frontiers, and against races."""
    here = lab(name)
    judge = here.judge(isa)

    @settings(max_examples=10)
    @given(
        st.lists(works(), min_size=1, max_size=NUM_SEQUENCES),
        st.sampled_from((1, 2, 2, 3, 4)),
        st.integers(0, 2**32 - 1),
    )
    def check(sequences: list[Work], threads: int, seed: int) -> None:
        for stream, position, logits in play(here.executor(isa, threads), sequences, seed):
            assert same_bits(logits, judge[stream][position]), (stream, position)

    check()


@pytest.mark.parametrize("name", CASES)
def test_decoding_gives_the_bits_of_a_prefill(name: str, isa: str, lab: Callable[[str], Lab]) -> None:
    """Token by token over every border, three sequences at different lengths beside each other, as an engine does."""
    here = lab(name)
    judge = here.judge(isa)  # before any step: logits are a view until the next
    for threads, starts in ((1, (0, 250, 1277)), (2, (1020, 124, 1148)), (3, (14, 1278, 252)), (4, (60, 508, 1))):
        ends = [Work(s, [start, *range(start + 1, start + 9)][start == 0 :]) for s, start in enumerate(starts)]
        for stream, position, logits in play(here.executor(isa, threads), ends, threads):
            assert same_bits(logits, judge[stream][position]), (threads, stream, position)


@pytest.mark.parametrize("name", ["chosen", "mixed", "mixed in FP4+FP8"])
def test_small_steps_again_and_again(name: str, lab: Callable[[str], Lab]) -> None:
    """Steps of one token and of two, where threads run far apart between barriers: races show in some of many runs.

    More threads than processors, so that a thread is stopped at any place while others run on.
    """
    here, isa = lab(name), available_isas()[0]
    judge = here.judge(isa)
    tokens = np.concatenate([STREAMS[0][1240:1290], STREAMS[1][1240:1290]])
    for threads in (1, 2, 3, 4):
        executor = here.executor(isa, threads)
        table = np.arange(2 * BLOCKS_EACH, dtype=np.int32).reshape(2, BLOCKS_EACH)
        for s in (0, 1):
            run_chunks(executor, STREAMS[s][:1240], blocks=table[s], frontier=s)
        for i in range(50):
            segments = [Segment(s, 1, 1240 + i, table[s], s) for s in (0, 1)]
            steps = [[segments[0]], [segments[1]]] if i % 2 else [segments]
            for step in steps:
                picked = tokens[[50 * s.frontier + i for s in step]]
                step = [Segment(row, 1, s.position, s.blocks, s.frontier) for row, s in enumerate(step)]
                logits = executor.step(StepBatch(picked, step, np.arange(len(step), dtype=np.int32)))
                for row, s in enumerate(step):
                    assert same_bits(logits[row], judge[s.frontier][1240 + i]), (threads, i)


@pytest.mark.parametrize(("fp8", "bf16"), [("FP8", "BF16"), ("FP8+FP8", "BF16+FP8")])
@pytest.mark.parametrize("name", ["all rows", "mixed"])
def test_rows_in_fp8_and_in_bf16_are_the_same_numbers(
    name: str, fp8: str, bf16: str, isa: str, lab: Callable[[str], Lab]
) -> None:
    """BF16 rows hold the values of FP8 rows: every logit has the same bits. Guards against a scale or a sign lost."""
    assert same_bits(lab(f"{name} in {fp8}").judge(isa)[0], lab(f"{name} in {bf16}").judge(isa)[0])


@pytest.mark.parametrize("name", ["mixed", "chosen", "mixed in FP4+FP8"])
def test_a_frontier_copied_away_and_back_continues_with_the_same_bits(name: str, lab: Callable[[str], Lab]) -> None:
    """What the next token needs besides blocks is in the frontier, all of it: copied to another slot after other
    sequences overwrote the first, and onto an executor with another number of threads."""
    here, isa = lab(name), available_isas()[0]
    judge = here.judge(isa)[0]
    blocks = np.array([3, 0, 5, 1, 9, 2], np.int32)
    for cut, threads in ((1, 1), (6, 2), (127, 2), (130, 3), (1027, 2)):
        first, second = here.executor(isa, 2), here.executor(isa, threads)
        run_chunks(first, STREAMS[0][:cut], blocks=blocks, frontier=1)
        saved = np.empty(first.frontier_bytes, np.uint8)
        first.copy_frontier(1, saved)
        rows = np.empty((len(blocks), first.block_bytes), np.uint8)
        for row, block in zip(rows, blocks, strict=True):
            first.copy_block(int(block), row)
        others = np.setdiff1d(np.arange(first.num_blocks, dtype=np.int32), blocks)[: num_blocks(300)]
        run_chunks(first, STREAMS[1][:300], [5, 270], blocks=others, frontier=1)
        second.restore_frontier(2, saved)
        for row, block in zip(rows, blocks, strict=True):
            second.restore_block(int(block), row)
        got = run_chunks(second, STREAMS[0][cut : cut + 140], [1, 2, 9, 100], blocks=blocks, frontier=2, start=cut)
        assert same_bits(got, judge[cut : cut + 140]), (cut, threads)


@pytest.mark.parametrize("name", ["mixed"])
def test_garbage_in_a_fresh_frontier_is_not_read(name: str, lab: Callable[[str], Lab]) -> None:
    """At position 0 a frontier holds anything. Guards against ring rows of positions before the first."""
    here, isa = lab(name), available_isas()[0]
    executor = here.executor(isa, 2)
    executor.restore_frontier(0, np.full(executor.frontier_bytes, 0xFF, np.uint8))
    for block in range(BLOCKS_EACH):
        executor.restore_block(block, np.full(executor.block_bytes, 0xFF, np.uint8))
    got = run_chunks(executor, STREAMS[2][:300], [1, 2, 3, 130])
    assert same_bits(got, here.judge(isa)[2][:300])


def test_the_last_positions_of_a_million(isa: str, tmp_path: Path) -> None:
    """Positions up to 1,048,575: 262,143 index rows, almost all of them with equal scores, of which the first win;
    8,191 rows of 128 tokens. Guards against 32-bit products, and against room that grows with the context."""
    last = 1 << 20
    m = TinyV4(ratios=(4, 128), heads=2, index_heads=2, experts=2, top_k=1, max_context=last)
    blocks = np.random.default_rng(1).permutation(last // 256).astype(np.int32)
    logits = []
    d = v4_described(tmp_path, m)
    with d.checkpoint:
        for threads, cuts in ((1, [4]), (2, [1, 2, 4, 7]), (3, [1, 2, 3, 4, 6, 8, 9, 10])):
            executor = v4_native(d, threads, isa, context=last, chunk=16)
            logits.append(run_chunks(executor, STREAMS[0][:11], cuts, blocks=blocks, start=last - 11))
    assert np.isfinite(logits[0]).all() and logits[0].std() > 0.1
    assert all(same_bits(other, logits[0]) for other in logits[1:])


@pytest.mark.skipif(len(available_isas()) < 2, reason="this processor runs one kernel set")
def test_kernel_sets_differ_by_less_than_rounding_does(lab: Callable[[str], Lab]) -> None:
    """BF16 products round differently in AVX-512, so bits differ: in half of all tokens by less than a hundredth of the
    logits' deviation."""
    first, *others = (lab("window").judge(isa)[0] for isa in available_isas())
    for other in others:
        assert np.median(np.abs(other - first).max(1)) <= 1e-2 * first.std()
