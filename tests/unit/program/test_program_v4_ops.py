"""The reference executor's ops of DeepSeek-V4, each against the formulas of specs/deepseek_v4.md written out plainly.

The judges here see whole sequences in float64 and know nothing of steps, blocks or rings.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from v4_ops import (
    DIM,
    FREQUENCIES,
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    PLAIN,
    ROTARY,
    VOCAB,
    WINDOW,
    Weights,
    executor,
    random,
    run,
)

from hotset.engine.batch import Segment, StepBatch
from hotset.errors import InternalError
from hotset.program.builder import Builder
from hotset.program.program import Buffer
from hotset.program.rounding import hadamard, round_bf16, round_e2m1_groups, round_kv_row

# ---- one layer of attention ----------------------------------------------------------------------------------


def attention_weights(ratio: int, sink: float = 0.3) -> Weights:
    columns = 2 if ratio == 4 else 1
    return {
        "embed": random(VOCAB, HIDDEN),
        "wq": random(HEADS * DIM, HIDDEN, gain=0.2),
        "wkv": random(DIM, HIDDEN, gain=0.2),
        "sink": np.full(HEADS, sink, np.float32),
        "comp.wk": random(columns * DIM, HIDDEN, gain=0.2),
        "comp.wg": random(columns * DIM, HIDDEN, gain=0.3)[::-1].copy(),
        "comp.ape": random(max(ratio, 1), columns * DIM),
        "comp.norm": 1 + random(DIM, gain=0.1),
        "index.wq": random(INDEX_HEADS * INDEX_DIM, HIDDEN, gain=0.2),
        "index.weights": random(INDEX_HEADS, HIDDEN, gain=0.2),
        "icomp.wk": random(columns * INDEX_DIM, HIDDEN, gain=0.2),
        "icomp.wg": random(columns * INDEX_DIM, HIDDEN, gain=0.2)[::-1].copy(),
        "icomp.ape": random(max(ratio, 1), columns * INDEX_DIM),
        "icomp.norm": 1 + random(INDEX_DIM, gain=0.1),
    }


def build_attention(ratio: int, top_k: int | None) -> Callable[[Builder], Buffer]:
    """Window rows, and with a ratio compressed rows; with ``top_k`` those that an indexer chooses."""

    def build(b: Builder) -> Buffer:
        x = b.embed("embed", VOCAB, HIDDEN)
        q = b.linear(x, "wq", HEADS * DIM)
        b.window_rows(b.linear(x, "wkv", DIM), "window", 0, PLAIN)
        overlap = ratio == 4
        columns = 2 if overlap else 1
        chosen = None
        if ratio:
            k, g = (b.linear(x, f"comp.{part}", columns * DIM) for part in ("wk", "wg"))
            b.compress(k, g, "comp", 1e-6, FREQUENCIES, ratio, "kv", "kv_state", 0, overlap=overlap, hadamard=False)
        if top_k is not None:
            k, g = (b.linear(x, f"icomp.{part}", columns * INDEX_DIM) for part in ("wk", "wg"))
            b.compress(k, g, "icomp", 1e-6, FREQUENCIES, ratio, "index", "index_state", 0, overlap=overlap,
                       hadamard=True)  # fmt: skip
            iq, weights = b.linear(x, "index.wq", INDEX_HEADS * INDEX_DIM), b.linear(x, "index.weights", INDEX_HEADS)
            chosen = b.index_rows(iq, weights, "index", 0, INDEX_HEADS, INDEX_DIM, ratio, top_k, 0.1)
        group = "kv" if ratio else None
        return b.attend_rows(q, "window", group, chosen, ratio, "sink", 0, HEADS, DIM, DIM**-0.5)

    return build


def pooled(w: Weights, name: str, x: np.ndarray, ratio: int, width: int, is_rounded: bool = False) -> np.ndarray:
    """Every compressed row of a whole sequence, float64 [rows, width]; BF16 before the norm if asked for."""
    k = x @ w[f"{name}.wk"].T.astype(np.float64)
    g = x @ w[f"{name}.wg"].T.astype(np.float64) + np.resize(w[f"{name}.ape"], (len(x), len(w[f"{name}.wg"])))
    rows = []
    for j in range(len(x) // ratio):
        own = np.s_[ratio * j : ratio * (j + 1)]
        if ratio == 4:
            before = np.s_[ratio * max(j - 1, 0) : ratio * j]
            scores = np.concatenate([g[before, :width], g[own, width:]])
            values = np.concatenate([k[before, :width], k[own, width:]])
        else:
            scores, values = g[own], k[own]
        weights = np.exp(scores)
        row = (weights * values).sum(0) / weights.sum(0)
        if is_rounded:
            row = round_bf16(row.astype(np.float32)).astype(np.float64)
        row = row / np.sqrt((row**2).mean() + 1e-6) * w[f"{name}.norm"]
        turned = (row[-ROTARY::2] + 1j * row[-ROTARY + 1 :: 2]) * np.exp(1j * ratio * j * np.array(FREQUENCIES))
        row[-ROTARY::2], row[-ROTARY + 1 :: 2] = turned.real, turned.imag
        rows.append(row)
    return np.array(rows).reshape(-1, width)


def judged(w: Weights, tokens: np.ndarray, ratio: int, top_k: int | None) -> np.ndarray:
    """Attention outputs of a whole sequence, float64 [n, heads * dim]."""
    x = w["embed"][tokens].astype(np.float64)
    q = (x @ w["wq"].T).reshape(-1, HEADS, DIM) * DIM**-0.5
    window = x @ w["wkv"].T
    compressed = pooled(w, "comp", x, ratio, DIM) if ratio else np.zeros((0, DIM))
    keys = pooled(w, "icomp", x, ratio, INDEX_DIM) if top_k is not None else compressed
    index_q = (x @ w["index.wq"].T).reshape(-1, INDEX_HEADS, INDEX_DIM)
    out = []
    for t in range(len(x)):
        visible = list(range((t + 1) // ratio)) if ratio else []
        if top_k is not None:
            dots = np.maximum(index_q[t] @ keys[visible].T, 0)
            scores = (x[t] @ w["index.weights"].T) @ dots
            visible = sorted(sorted(visible, key=lambda j: -scores[j])[:top_k])
        rows = np.concatenate([compressed[visible], window[max(0, t - WINDOW + 1) : t + 1]])
        weights = np.exp(q[t] @ rows.T)
        total = weights.sum(-1) + np.exp(w["sink"])
        out.append((weights @ rows / total[:, None]).reshape(-1))
    return np.array(out)


@pytest.mark.parametrize(("ratio", "top_k"), [(0, None), (4, None), (4, 5), (4, 100), (128, None)])
@pytest.mark.parametrize("cuts", [[], [1, 3, 4, 5, 127, 128, 200, 255, 257], list(range(1, 20))])
def test_attention_over_window_and_compressed_rows(ratio: int, top_k: int | None, cuts: list[int]) -> None:
    """Guards the softmax with its sink, pooling, overlap, choice, and state at uneven cuts and block borders."""
    w = attention_weights(ratio)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 520 if ratio == 128 else 300).astype(np.int32)
    got = run(executor(build_attention(ratio, top_k), w, ratio=ratio), tokens, cuts)
    np.testing.assert_allclose(got, judged(w, tokens, ratio, top_k), atol=2e-5)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("cuts", [[], [5, 126, 127, 128, 129, 255, 256]])
def test_who_sees_a_token(ratio: int, cuts: list[int]) -> None:
    """Visibility at contexts k ratio - 1, k ratio, k ratio + 1: an entry is there for the token that completes it.

    One token is changed; exactly the outputs that may see it change. With overlap, token p is in entries p // 4 and
    p // 4 + 1; entry j is visible from position ratio (j + 1) - 1 on.
    """
    w = attention_weights(ratio)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 270).astype(np.int32)
    base = run(executor(build_attention(ratio, None), w, ratio=ratio), tokens, cuts)
    for p in (0, 3, 4, 5, 126, 127, 128, 129, 254, 256):
        changed = tokens.copy()
        changed[p] = (changed[p] + 7) % VOCAB
        got = run(executor(build_attention(ratio, None), w, ratio=ratio), changed, cuts)
        seen = np.abs(got - base).max(1) > 0
        want = [p <= t and (t - p < WINDOW or (ratio > 0 and t >= ratio * (p // ratio + 1) - 1)) for t in range(270)]
        assert seen.tolist() == want, (p, np.flatnonzero(seen != np.array(want)))


def test_the_first_entry_has_no_tokens_before_it() -> None:
    """The absent half has weight zero; scores of zero would give it weight, and zeros would pull the row down.

    Values that are equal in all tokens pool to themselves, so a shrunken row shows beside one channel that is not.
    """
    w = attention_weights(4)
    made = executor(build_attention(4, None), w, ratio=4)
    tokens = np.array([5, 6, 7, 8], np.int32)
    run(made, tokens)
    x = w["embed"][tokens].astype(np.float64)
    row = made.rows.rows("kv", 0, Segment(0, 4, 0, np.array([1], np.int32)), np.array([0]))[0]
    k = x @ w["comp.wk"][DIM:].T
    g = x @ w["comp.wg"][DIM:].T + w["comp.ape"][:, DIM:]
    want = (np.exp(g) * k).sum(0) / np.exp(g).sum(0)
    want = want / np.sqrt((want**2).mean() + 1e-6) * w["comp.norm"]
    np.testing.assert_allclose(row, want, atol=1e-5)  # entry 0 is rotated by nothing


def test_a_sink_only_divides() -> None:
    """One visible row: its weight is exp(s) / (exp(s) + exp(sink)), and a large sink overflows nothing."""
    for sink in (-1e4, 0.0, 3.0, 200.0):
        w = attention_weights(0, sink)
        tokens = np.array([9], np.int32)
        got = run(executor(build_attention(0, None), w), tokens).reshape(HEADS, DIM)
        x = w["embed"][9].astype(np.float64)
        row = w["wkv"] @ x
        score = (w["wq"] @ x).reshape(HEADS, DIM) @ row * DIM**-0.5
        np.testing.assert_allclose(got, row / (1 + np.exp(sink - score))[:, None], rtol=2e-4, atol=1e-30)


def test_ties_of_the_indexer_go_to_the_lower_row() -> None:
    """With every score 0 the first rows are chosen, in rising order, and -1 fills up; never a row of the future."""
    w = attention_weights(4)
    w["index.weights"][:] = 0

    def build(b: Builder) -> Buffer:
        build_attention(4, 3)(b)
        return next(op.out for op in b._ops if type(op).__name__ == "IndexRows")

    got = run(executor(build, w, ratio=4), np.arange(20, dtype=np.int32), [2, 9])
    for t in range(20):
        assert got[t].tolist() == [j if j < (t + 1) // 4 else -1 for j in range(3)]


def test_a_choice_is_that_of_the_best_scores() -> None:
    """All heads at or below zero give exactly 0, which beats a negative sum and loses to a positive one."""
    w = attention_weights(4)

    def build(b: Builder) -> Buffer:
        build_attention(4, 5)(b)
        return next(op.out for op in b._ops if type(op).__name__ == "IndexRows")

    tokens = np.random.default_rng(3).integers(0, VOCAB, 80).astype(np.int32)
    got = run(executor(build, w, ratio=4), tokens)
    x = w["embed"][tokens].astype(np.float64)
    keys = pooled(w, "icomp", x, 4, INDEX_DIM)
    q = (x @ w["index.wq"].T).reshape(-1, INDEX_HEADS, INDEX_DIM)
    for t in (3, 20, 23, 50, 79):
        scores = (x[t] @ w["index.weights"].T) @ np.maximum(q[t] @ keys[: (t + 1) // 4].T, 0)
        best = sorted(np.argsort(-scores, kind="stable")[:5].tolist())
        assert got[t].tolist() == best + [-1] * (5 - len(best))


# ---- rounding ------------------------------------------------------------------------------------------------


def test_the_official_place_of_every_rounding() -> None:
    """Rows: BF16 of the pooled row, norm, rotation, then the row format; index rows: Hadamard just before e2m1.

    Sources: specs/deepseek_v4.md sections 2.0, 2.5, 2.6 (the places there were checked against the official code).
    """
    w = attention_weights(4)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 40).astype(np.int32)
    made = executor(build_attention(4, 5), w, ratio=4, rounding=True)
    run(made, tokens)
    s = Segment(0, 1, 39, np.array([1], np.int32))
    x = w["embed"][tokens].astype(np.float64)
    window = made.rows._rings["window", 0][0][0]
    for position in range(40 - WINDOW, 40):
        want = round_kv_row("FP8", (w["wkv"] @ x[position]).astype(np.float32), PLAIN)
        np.testing.assert_allclose(window[position % WINDOW], want, rtol=2e-3)
    for name, group, width in (("comp", "kv", DIM), ("icomp", "index", INDEX_DIM)):
        rows = made.rows.rows(group, 0, s, np.arange(10))
        exact = pooled(w, name, x, 4, width).astype(np.float32)
        want = pooled(w, name, x, 4, width, is_rounded=True).astype(np.float32)
        rounded = round_e2m1_groups(hadamard(want)) if group == "index" else round_kv_row("FP8", want, PLAIN)
        # Float32 sums move a value over the border of two roundings now and then; every other place moves many.
        assert (rows == rounded).mean() > 0.99 and (rows == exact).mean() < 0.1
    grid = made.rows.rows("kv", 0, s, np.arange(10))
    np.testing.assert_array_equal(grid, round_kv_row("FP8", grid, PLAIN))  # already on the grid
    np.testing.assert_array_equal(grid[:, PLAIN:], grid[:, PLAIN:].astype(ml_dtypes.bfloat16).astype(np.float32))


def test_exact_rows_differ_from_no_rounding_by_bf16_alone() -> None:
    """The switch that leaves activation rounding out: no Hadamard, no e4m3, no e2m1."""
    w = attention_weights(4)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 60).astype(np.int32)
    exact = executor(
        build_attention(4, 5), w, ratio=4, kv_format="BF16-exact", index_format="BF16-exact", rounding=True
    )
    plain = executor(build_attention(4, 5), w, ratio=4, rounding=False)
    run(exact, tokens)
    run(plain, tokens)
    s = Segment(0, 1, 59, np.array([1], np.int32))
    for group in ("kv", "index"):
        want = plain.rows.rows(group, 0, s, np.arange(15))
        np.testing.assert_allclose(exact.rows.rows(group, 0, s, np.arange(15)), want, rtol=0.02, atol=0.02)


def test_bf16_rows_give_the_bits_of_fp8_rows() -> None:
    w = attention_weights(4)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 60).astype(np.int32)
    got = [
        run(executor(build_attention(4, 5), w, ratio=4, kv_format=format, rounding=True), tokens, [7, 30])
        for format in ("FP8", "BF16")
    ]
    np.testing.assert_array_equal(got[0], got[1])


# ---- state ---------------------------------------------------------------------------------------------------


def test_sequences_side_by_side_keep_their_own_frontiers() -> None:
    """Two sequences in one step, over their own blocks and frontiers, in uneven pieces: as each one alone."""
    w = attention_weights(4)
    tokens = [np.random.default_rng(seed).integers(0, VOCAB, 60).astype(np.int32) for seed in (1, 2)]
    alone = [run(executor(build_attention(4, 5), w, ratio=4), t) for t in tokens]
    made = executor(build_attention(4, 5), w, ratio=4, sequences=2)
    blocks = [np.array([5], np.int32), np.array([3], np.int32)]
    for begin, end in pairwise([0, 3, 4, 30, 60]):
        count = end - begin
        segments = [Segment(i * count, count, begin, blocks[i], 1 - i) for i in range(2)]
        both = np.concatenate([t[begin:end] for t in tokens])
        got = made.step(StepBatch(both, segments, np.arange(2 * count, dtype=np.int32)))
        for i in range(2):
            np.testing.assert_allclose(got[i * count : (i + 1) * count], alone[i][begin:end], atol=1e-5)


def test_going_back_needs_no_more_than_a_position() -> None:
    """State is addressed by position: a token that is replaced rewrites its row and the entry that it completed."""
    w = attention_weights(4)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 40).astype(np.int32)
    want = run(executor(build_attention(4, 5), w, ratio=4), tokens)
    made = executor(build_attention(4, 5), w, ratio=4)
    blocks = np.array([1], np.int32)
    run(made, tokens[:35])
    for token in (11, int(tokens[35])):  # position 35 completes an entry, first with a wrong token
        made.step(StepBatch(np.array([token], np.int32), [Segment(0, 1, 35, blocks)], np.array([0], np.int32)))
    rest = made.step(StepBatch(tokens[36:], [Segment(0, 4, 36, blocks)], np.arange(4, dtype=np.int32)))
    np.testing.assert_allclose(rest, want[36:], atol=1e-5)


def test_blocks_and_frontiers_can_be_moved() -> None:
    """A copy of a block and of a frontier, put elsewhere, continues the sequence; positions of the ring move too."""
    w = attention_weights(4)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 40).astype(np.int32)
    made = executor(build_attention(4, 5), w, ratio=4, sequences=2)
    want = run(made, tokens)[30:]
    run(made, tokens[:30])
    block, frontier = np.empty(made.block_bytes, np.uint8), np.empty(made.frontier_bytes, np.uint8)
    made.copy_block(1, block)
    made.copy_frontier(0, frontier)
    run(made, tokens[::-1].copy())  # another sequence takes block 1 and frontier 0
    made.restore_block(6, block)
    made.restore_frontier(1, frontier)
    moved = Segment(0, 10, 30, np.array([6], np.int32), frontier=1)
    got = made.step(StepBatch(tokens[30:], [moved], np.arange(10, dtype=np.int32)))
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_a_lost_ring_row_is_an_error_not_a_wrong_answer() -> None:
    """A sequence that continues on another's frontier is caught, not answered."""
    w = attention_weights(4)
    made = executor(build_attention(4, None), w, ratio=4, sequences=2)
    run(made, np.arange(10, dtype=np.int32))
    wrong = Segment(0, 1, 10, np.array([1], np.int32), frontier=1)
    with pytest.raises(InternalError, match="no longer holds positions"):
        made.step(StepBatch(np.array([1], np.int32), [wrong], np.array([0], np.int32)))
