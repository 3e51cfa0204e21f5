"""One answer: the logits of a token depend on the tokens before it and on nothing else, bit for bit.

Every example computes prefixes of fixed token streams in some way: cut into chunks, beside other sequences, over any
blocks, on one to three threads, with long contexts split into spans or not. The judge is the same kernel set on one
thread, each stream alone in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from helpers import K_FORMATS, Floats, Ints, described, native, program, random_tokens, reference, run, same_bits, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.api import Described
from hotset.engine.batch import Executor, Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.machine.native import available_isas
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup, num_blocks
from hotset.program.program import Buffer

# The second span of 1,024 tokens has two blocks, so that it matters whether its blocks are merged before or after.
CONTEXT = 1300
NUM_SEQUENCES = 3
BLOCKS_EACH = num_blocks(CONTEXT)
STREAMS = tuple(random_tokens(CONTEXT, seed=seed) for seed in range(NUM_SEQUENCES))
# Around a tile of keys, a block and a span; and the groups that input rows are packed in.
EDGES = (
    1, 2, 3, 15, 16, 17, 31, 33, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1100, 1279, 1280, 1281, 1298, 1299,
)  # fmt: skip
# One format of each packing of input rows, and both formats of cache rows.
FORMATS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K", "MXFP4", "F32 BF16", "Q8_0 F16")


def shape(format: str) -> dict[str, int]:
    """Six heads over two kv heads, so that three threads share them unevenly."""
    return {"layers": 1} if format in K_FORMATS else {"heads": 6, "kv_heads": 2, "ffn": 96}


class Lab:
    """A model with its executors, made once, and the judge's logits of every stream."""

    def __init__(self, model: Described) -> None:
        self.model = model
        self.executor = cache(self._executor)
        self.judge = cache(self._judge)

    def _executor(self, isa: str, threads: int, is_split: bool = True) -> NativeExecutor:
        return native(
            self.model, threads, isa, context=CONTEXT, sequences=NUM_SEQUENCES, chunk=2 * CONTEXT,
            partials=None if is_split else 0,
        )  # fmt: skip

    def _judge(self, isa: str) -> list[Floats]:
        return [run(self.executor(isa, 1), tokens) for tokens in STREAMS]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Lab]]:
    labs: dict[str, Lab] = {}

    def open_lab(format: str) -> Lab:
        if format not in labs:
            weights, _, cache_format = format.partition(" ")
            m = tiny(weights, **shape(weights))
            labs[format] = Lab(described(tmp_path_factory.mktemp("model"), m, cache_format or None))
        return labs[format]

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
    single = draw(st.sampled_from((0, length - 6, 1023, 1278)))
    ends |= set(range(single, single + 6))
    return Work(draw(st.integers(0, NUM_SEQUENCES - 1)), [*sorted({e for e in ends if 0 < e < length}), length])


def play(executor: Executor, sequences: list[Work], seed: int) -> Iterator[tuple[int, int, Floats]]:
    """Run the chunks in steps of any of the sequences in any order, over any blocks.

    Yields (stream, position, logits) of every output; each step wants all, some or none of them.
    """
    rng = np.random.default_rng(seed)
    table = rng.permutation(executor.num_blocks).astype(np.int32).reshape(NUM_SEQUENCES, BLOCKS_EACH)
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
            segments.append(Segment(first, end - begin, begin, table[i, : num_blocks(end)]))
            origin += [(sequences[i].stream, position) for position in range(begin, end)]
            first += end - begin
        wanted = np.flatnonzero(rng.random(first) < rng.choice([0.0, 0.3, 1.0], p=[0.2, 0.4, 0.4])).astype(np.int32)
        logits = executor.step(StepBatch(np.concatenate(tokens), segments, wanted))
        for row, index in enumerate(wanted):
            yield (*origin[index], logits[row])


@pytest.mark.parametrize("format", FORMATS)
def test_any_way_of_computing_gives_the_same_bits(format: str, isa: str, lab: Callable[[str], Lab]) -> None:
    """Guards against reductions that depend on chunk, neighbours, threads or blocks, and against races."""
    here = lab(format)
    judge = here.judge(isa)

    @settings(max_examples=12)
    @given(
        st.lists(works(), min_size=1, max_size=NUM_SEQUENCES),
        st.sampled_from((1, 2, 2, 3)),
        st.booleans(),
        st.integers(0, 2**32 - 1),
    )
    def check(sequences: list[Work], threads: int, is_split: bool, seed: int) -> None:
        for stream, position, logits in play(here.executor(isa, threads, is_split), sequences, seed):
            assert same_bits(logits, judge[stream][position]), (stream, position)

    check()


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0", "Q4_1", "Q6_K"])
def test_decoding_gives_the_bits_of_a_prefill(format: str, isa: str, lab: Callable[[str], Lab]) -> None:
    """Token by token over every border, three sequences at different lengths beside each other, as an engine does."""
    here = lab(format)
    judge = here.judge(isa)  # before any step: logits are a view until the next
    for threads, starts in ((1, (0, 250, 1277)), (2, (1020, 252, 1020)), (3, (14, 1278, 1022))):
        ends = [Work(s, [start, *range(start + 1, start + 9)][start == 0 :]) for s, start in enumerate(starts)]
        for stream, position, logits in play(here.executor(isa, threads), ends, threads):
            assert same_bits(logits, judge[stream][position]), (threads, stream, position)


def test_long_contexts_are_split_into_spans_when_there_is_room(isa: str, lab: Callable[[str], Lab]) -> None:
    """The tests above cover both ways only if a single token beyond 1,024 really takes the split one."""
    for is_split in (True, False):
        executor = lab("Q8_0").executor(isa, 2, is_split)
        run(executor, STREAMS[0][:1030])
        executor.profile(True)
        run(executor, STREAMS[0][1030:1032], [1], start=1030)
        merges = [ns for kind, ns, _ in executor.op_times() if kind == "attend_merge"]
        executor.profile(False)
        assert all(merges) if is_split else not any(merges)


@pytest.mark.parametrize("format", ["F16", "Q8_0"])
def test_rewinding_is_a_change_of_length(format: str, lab: Callable[[str], Lab]) -> None:
    """Other tokens from an earlier position on give what a fresh run of the edited sequence gives; the old tokens
    again give the old bits. Guards against state that only moves forward."""
    here = lab(format)
    isa = available_isas()[0]
    judge = here.judge(isa)

    @settings(max_examples=15)
    @given(
        st.sampled_from(EDGES[:-2]) | st.integers(1, CONTEXT - 2),
        st.integers(1, 80),
        st.integers(1, 2),
        st.integers(0, 999),
    )
    def check(position: int, count: int, threads: int, seed: int) -> None:
        executor = here.executor(isa, threads)
        length = min(position + 40, CONTEXT)
        blocks = np.random.default_rng(seed).permutation(executor.num_blocks)[:BLOCKS_EACH].astype(np.int32)
        run(executor, STREAMS[0][:length], blocks=blocks)
        edit = random_tokens(min(count, CONTEXT - position), seed=seed)
        edited = run(executor, edit, [len(edit) // 2], blocks, start=position)
        again = run(executor, STREAMS[0][position:length], [1], blocks, start=position)
        fresh = run(here.executor(isa, 1), np.concatenate([STREAMS[0][:position], edit]))[position:]
        assert same_bits(edited, fresh)
        assert same_bits(again, judge[0][position:length])

    check()


def test_sequences_share_full_blocks(isa: str, lab: Callable[[str], Lab]) -> None:
    """A sequence that starts with another's full blocks reads them and gives the same bits; so does the other after."""
    here = lab("Q8_0")
    judge = here.judge(isa)[0]
    executor = here.executor(isa, 2)
    tokens = STREAMS[0]
    own = np.array([3, 9, 1, 7, 0, 13], np.int32)
    other = np.array([3, 9, 4, 2, 11], np.int32)
    assert same_bits(run(executor, tokens[:700], [600], own), judge[:700])
    assert same_bits(run(executor, tokens[512:1100], [1, 300], other, start=512), judge[512:1100])
    assert same_bits(run(executor, tokens[700:], [], own, start=700), judge[700:])


@pytest.mark.skipif(len(available_isas()) < 2, reason="this processor runs one kernel set")
@pytest.mark.parametrize("format", ["F32", "F16", "Q8_0 F16", "Q4_0 F16", "Q4_1 F16", "Q4_K F16", "Q6_K F16"])
def test_kernel_sets_agree_in_every_bit(format: str, lab: Callable[[str], Lab]) -> None:
    """All sets reduce in the same order. The exceptions are BF16 weights and cache rows, for which AVX-512 has an
    instruction with a rounding of its own. Guards against a kernel set that was changed alone."""
    first, *others = (lab(format).judge(isa) for isa in available_isas())
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("cache_format", "huge"), [("F16", 1e6), ("F16", np.inf), ("BF16", np.inf)])
@pytest.mark.parametrize("overflow", ["k", "v"])
def test_a_row_that_overflows_harms_no_earlier_token(
    overflow: str, cache_format: str, huge: float, isa: str, tmp_path: Path
) -> None:
    """A key or value beyond the cache's format counts as the format's largest number. Tokens before it never see that
    row, in the same chunk as little as in an earlier one. Guards against masked rows that count as 0 times infinity."""
    rows = {key: np.random.default_rng(ord(key)).standard_normal((16, 32), dtype=np.float32) for key in ("q", "k", "v")}
    rows[overflow][9, 5] = huge

    def build(b: Builder) -> Buffer:
        q, k, v = (b.embed(key, 16, 32) for key in ("q", "k", "v"))
        b.store_kv(k, v, "kv", 0, 2, 16)
        return b.select_outputs(b.attend(q, "kv", 0, 2, 2, 16, 0.25))

    group = CacheGroup("kv", (0,), row_bytes=2 * 32 * 2, format=cache_format)
    d = program(tmp_path / "m.gguf", {key: (values, "F32") for key, values in rows.items()}, build, (group,))
    with d.checkpoint:
        tokens = np.array([1, 2, 3, 9, 4, 5], np.int32)
        before = run(native(d, 1, isa), tokens[:3])
        chunk = run(native(d, 1, isa), tokens)
        assert same_bits(chunk[:3], before)
        if np.isfinite(huge):
            np.testing.assert_allclose(chunk, run(reference(d), tokens), rtol=1e-4, atol=1e-4)
