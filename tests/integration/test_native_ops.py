"""Every native op against the reference executor, with inputs that are exact in both.

Inputs are embedding rows (exact), so a product multiplies the same rounded inputs in both executors and only the order
of float sums differs. That is what the tolerances are made of: a multiple of 2^-24 times the sum of the magnitudes
that were added.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import (
    CACHE_FORMATS,
    FLOAT_FORMATS,
    FORMATS,
    K_FORMATS,
    Floats,
    native,
    program,
    random_tokens,
    reference,
    run,
    same_bits,
)

from hotset.api import Described
from hotset.engine.batch import Segment, StepBatch
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup
from hotset.program.program import Buffer
from hotset.program.reference import round_bf16

ULP = 2.0**-24
NUM_ROWS = 48
# One and two tokens take the path with private copies; then every group size of packed rows, and a mixed one.
COUNTS = (1, 2, 3, 7, 16, 45)


def rows_of(width: int, seed: int = 1, spread: float = 1.0) -> Floats:
    """Embedding rows with very different magnitudes from one run of 32 to the next, and a run of zeros."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((NUM_ROWS, width), dtype=np.float32)
    runs = rows.reshape(NUM_ROWS, -1, 16)
    runs *= np.exp2(spread * rng.integers(-3, 4, (*runs.shape[:2], 1))).astype(np.float32)
    rows[5, :32] = 0
    rows[6] = 0
    return rows


def matrix(out_width: int, in_width: int, seed: int = 2) -> Floats:
    return np.random.default_rng(seed).standard_normal((out_width, in_width), dtype=np.float32) / np.float32(
        in_width**0.5
    )


def both(
    d: Described, count: int, isa: str, threads: int = 2, start: int = 0, context: int = 512
) -> tuple[Floats, Floats]:
    tokens = random_tokens(count, NUM_ROWS)
    executor = native(d, threads, isa, context=context)
    return run(executor, tokens, start=start), run(reference(d, context=context), tokens, start=start)


def weights(d: Described, key: str) -> Floats:
    return d.checkpoint.array(key)


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_rows_are_exact(format: str, isa: str, tmp_path: Path) -> None:
    """Guards against tiles packed or unpacked in the wrong order, and against a last tile that is not full."""
    width = 256 if format in K_FORMATS else 96
    values = rows_of(width)[:45]
    d = program(
        tmp_path / "m.gguf", {"table": (values, format)}, lambda b: b.select_outputs(b.embed("table", 45, width))
    )
    with d.checkpoint:
        executor = native(d, 2, isa)
        for tokens in ([44], [0, 44], list(range(45))):
            got = run(executor, np.array(tokens, np.int32))
            assert same_bits(got, weights(d, "table")[tokens])


@pytest.mark.parametrize("format", FORMATS)
def test_linear(format: str, isa: str, tmp_path: Path) -> None:
    """Products of every format: nibble order, offsets, block minima, sub-scales, tiles that are not full.

    Tolerance: 16 ulp of the sum of magnitudes, measured at most 6.
    """
    width = 512 if format in K_FORMATS else 160
    tables = {"table": (rows_of(width), "F32"), "w": (matrix(37, width), format)}
    d = program(
        tmp_path / "m.gguf", tables,
        lambda b: b.linear(b.select_outputs(b.embed("table", NUM_ROWS, width)), "w", 37),
    )  # fmt: skip
    with d.checkpoint:
        for count in COUNTS:
            got, want = both(d, count, isa)
            magnitude = np.abs(weights(d, "table")[random_tokens(count, NUM_ROWS)]) @ np.abs(weights(d, "w")).T
            assert (np.abs(got - want) <= 16 * ULP * magnitude).all()


@pytest.mark.parametrize("format", ["F32", "Q4_1"])
def test_linear_adds_to_what_is_there(format: str, isa: str, tmp_path: Path) -> None:
    """Guards against a residual that is overwritten, or added twice."""

    def build(b: Builder) -> Buffer:
        x, y = (b.select_outputs(b.embed(key, NUM_ROWS, 64)) for key in ("table", "other"))
        return b.linear(x, "w", 64, add_to=y)

    tables = {"table": (rows_of(64), "F32"), "other": (rows_of(64, 5), "F32"), "w": (matrix(64, 64), format)}
    d = program(tmp_path / "m.gguf", tables, build)
    with d.checkpoint:
        for count in (1, 5, 40):
            got, want = both(d, count, isa)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_q8_0_products_do_not_saturate(isa: str, tmp_path: Path) -> None:
    """All weights and all inputs at the ends of their ranges: pairs of products overflow 16 bits, and must not.

    Every partial sum is a whole number below 2^24 times powers of two, so the result is exact.
    """
    x = np.where(np.arange(NUM_ROWS)[:, None] % 2, 127.0, -127.0).astype(np.float32).repeat(64, axis=1)
    w = np.where(np.arange(32)[:, None] % 2, 127.0, -127.0).astype(np.float32).repeat(64, axis=1)
    tables = {"table": (x, "F32"), "w": (w, "Q8_0")}
    d = program(
        tmp_path / "m.gguf", tables, lambda b: b.linear(b.select_outputs(b.embed("table", NUM_ROWS, 64)), "w", 32)
    )
    with d.checkpoint:
        tokens = random_tokens(20, NUM_ROWS)
        assert same_bits(run(native(d, 2, isa), tokens), x[tokens] @ w.T)


@pytest.mark.parametrize("format", [f for f in FORMATS if f not in FLOAT_FORMATS])
def test_runs_of_tiny_inputs_count_as_zero(format: str, isa: str, tmp_path: Path) -> None:
    """32 inputs below 4e-37 and not all zero: 127 over their maximum overflows. Guards against infinities and NaN out
    of numbers that are as good as zero, which a gate that is far closed can give."""
    x = np.random.default_rng(1).standard_normal((5, 256), dtype=np.float32)
    x[1:, 32:64] = np.array([[1e-40], [1e-38], [3e-37], [5e-37]], np.float32)
    x[1, 40] = 0
    as_zero = x.copy()
    as_zero[1:, 32:64] = 0
    logits = []
    for rows in (x, as_zero):
        tables = {"table": (rows, "F32"), "w": (matrix(32, 256), format)}
        d = program(
            tmp_path / "m.gguf", tables, lambda b: b.linear(b.select_outputs(b.embed("table", 5, 256)), "w", 32)
        )
        with d.checkpoint:
            logits.append(run(native(d, 1, isa), np.arange(5, dtype=np.int32)))
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-30)


@pytest.mark.parametrize("up", ["same", "other"])
@pytest.mark.parametrize("format", FORMATS)
def test_gated_linear(format: str, up: str, isa: str, tmp_path: Path) -> None:
    """Gate and up tiles in turn; when the two formats differ, two products and a separate gate.

    Tolerance: 16 ulp of the product of the two sums of magnitudes, measured at most 4; |silu(g) u| changes by at most
    1.1 |u| per unit of g and by |g| per unit of u.
    """
    width = 256 if format in K_FORMATS else 96
    up_format = format if up == "same" else ("Q8_0" if format != "Q8_0" else "F16")

    def build(b: Builder) -> Buffer:
        return b.gated_linear(b.select_outputs(b.embed("table", NUM_ROWS, width)), "gate", "up", 37)

    tables = {
        "table": (rows_of(width), "F32"),
        "gate": (2 * matrix(37, width), format),
        "up": (matrix(37, width, 3), up_format),
    }
    d = program(tmp_path / "m.gguf", tables, build)
    with d.checkpoint:
        for count in (1, 2, 19):
            got, want = both(d, count, isa)
            x = np.abs(weights(d, "table")[random_tokens(count, NUM_ROWS)])
            gate, other = (x @ np.abs(weights(d, key)).T for key in ("gate", "up"))
            assert (np.abs(got - want) <= 16 * ULP * gate * other).all()


@pytest.mark.parametrize("width", [16, 48, 64, 80, 576])
def test_rms_norm(width: int, isa: str, tmp_path: Path) -> None:
    """Rows that do not fill the four accumulators; a row of zeros stays zero. Tolerance: 16 ulp; measured 5."""
    weight = rows_of(width, 9)[0] + 1
    d = program(
        tmp_path / "m.gguf", {"table": (rows_of(width), "F32"), "w": (weight, "F32")},
        lambda b: b.rms_norm(b.select_outputs(b.embed("table", NUM_ROWS, width)), "w", 1e-5),
    )  # fmt: skip
    with d.checkpoint:
        for count in (1, 3, 40):
            got, want = both(d, count, isa)
            np.testing.assert_allclose(got, want, rtol=16 * ULP, atol=0)


@pytest.mark.parametrize("start", [0, 255, 3000])
def test_rope_angles(start: int, isa: str, tmp_path: Path) -> None:
    """Angles at far positions: the product of position and frequency is rounded to float before the cosine.

    Tolerance against the reference: one ulp of 1, for the last bit of two cosine routines. Against exact arithmetic:
    half an ulp of an angle of 3,000.
    """
    frequencies = tuple(10000.0 ** (-i / 16) for i in range(16))
    d = program(
        tmp_path / "m.gguf", {"w": (np.eye(32, dtype=np.float32), "F32")},
        lambda b: b.linear(b.select_outputs(b.rope_angles(frequencies)), "w", 32),
    )  # fmt: skip
    with d.checkpoint:
        for count in (1, 2, 5):
            got, want = both(d, count, isa, start=start, context=4096)
            np.testing.assert_allclose(got, want, rtol=0, atol=2**-23)
            exact = np.cos((start + np.arange(count))[:, None] * np.array(frequencies))
            np.testing.assert_allclose(got[:, :16], exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("pairs", ["adjacent", "halves"])
@pytest.mark.parametrize(("head_dim", "rotary"), [(16, 16), (32, 16), (64, 64), (80, 80), (80, 40), (128, 128)])
def test_rope(head_dim: int, rotary: int, pairs: str, isa: str, tmp_path: Path) -> None:
    """Both pairings, heads that turn only in part, head sizes that are not powers of two. Tolerance: 2 ulp of |x|."""
    width = 3 * head_dim
    frequencies = tuple(100.0 ** (-i / rotary) for i in range(rotary // 2))

    def build(b: Builder) -> Buffer:
        x = b.embed("table", NUM_ROWS, width)
        b.rope(x, b.rope_angles(frequencies), 3, head_dim, pairs)  # type: ignore[arg-type]
        return b.select_outputs(x)

    d = program(tmp_path / "m.gguf", {"table": (rows_of(width), "F32")}, build)
    with d.checkpoint:
        for count in (1, 2, 33):
            got, want = both(d, count, isa, start=7)
            limit = 4 * ULP * np.abs(want).reshape(count, 3, head_dim).max(-1).repeat(head_dim, -1)
            assert (np.abs(got - want) <= limit).all()


def attention(
    path: Path, group: int, head_dim: int, kv_heads: int = 2, spread: float = 0.0, cache_format: str = "F16"
) -> Described:
    """Attention alone: queries, keys and values are embedding rows; keys and values are exact in the cache."""
    kv, heads = kv_heads * head_dim, kv_heads * group

    def half(seed: int) -> Floats:
        rows = rows_of(kv, seed, spread)
        return round_bf16(rows) if cache_format == "BF16" else rows.astype(np.float16).astype(np.float32)

    def build(b: Builder) -> Buffer:
        q = b.embed("q", NUM_ROWS, heads * head_dim)
        b.store_kv(b.embed("k", NUM_ROWS, kv), b.embed("v", NUM_ROWS, kv), "kv", 0, kv_heads, head_dim)
        return b.select_outputs(b.attend(q, "kv", 0, heads, kv_heads, head_dim, head_dim**-0.5))

    tables = {"q": (2 * rows_of(heads * head_dim, 1, spread), "F32"), "k": (half(2), "F32"), "v": (half(3), "F32")}
    return program(path, tables, build, (CacheGroup("kv", (0,), 4 * kv, format=cache_format),))


def check_attention(got: Floats, want: Floats, cache_format: str, limit: float = 4e-6) -> None:
    """F16: ``limit`` of the largest value; weights carry the error of the exponential (2e-7) and of scores up to 20,
    measured 1.1e-6. BF16 also rounds the weights of keys, here and there to the other side, and per block where the
    reference has one maximum for all: half of the values within 4e-7 (measured 3e-8), the root mean square within 3e-4
    (measured 9e-5; that rounding itself costs 2.2e-3)."""
    difference = np.abs(got - want)
    if cache_format == "F16":
        assert difference.max() <= limit * np.abs(want).max()
    else:
        assert np.median(difference) <= 4e-7 * np.abs(want).max()
        assert (difference**2).mean() ** 0.5 <= 3e-4 * (want**2).mean() ** 0.5


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_attention(group: int, head_dim: int, cache_format: str, isa: str, tmp_path: Path) -> None:
    """Every head size and sharing of kv heads, in a chunk and then token by token, over a block border."""
    d = attention(tmp_path / "m.gguf", group, head_dim, cache_format=cache_format)
    tokens = random_tokens(260, NUM_ROWS)
    with d.checkpoint:
        got = run(native(d, 2, isa), tokens, [100, 117, 255, 256, 257])
        check_attention(got, run(reference(d), tokens), cache_format)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize(("group", "head_dim", "kv_heads"), [(50, 16, 1), (2, 256, 1), (1, 512, 2), (3, 48, 5)])
def test_attention_at_its_limits(
    group: int, head_dim: int, kv_heads: int, cache_format: str, isa: str, tmp_path: Path
) -> None:
    """More heads per kv head than one call takes (48), the largest head, and few heads for three threads."""
    d = attention(tmp_path / "m.gguf", group, head_dim, kv_heads, cache_format=cache_format)
    tokens = random_tokens(70, NUM_ROWS)
    with d.checkpoint:
        want = run(reference(d), tokens)
        for threads in (1, 3):
            check_attention(run(native(d, threads, isa), tokens, [1, 2, 40, 41]), want, cache_format)


@pytest.mark.parametrize("cache_format", CACHE_FORMATS)
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_attention_over_spans(spread: float, cache_format: str, isa: str, tmp_path: Path) -> None:
    """Contexts beyond one span of 1,024 tokens, whole and cut by spans, with scores so far apart that most weights
    vanish (spread 1). Tolerance for F16: 1.5e-5 of the largest value, measured 4.1e-6."""
    d = attention(tmp_path / "m.gguf", 3, 32, spread=spread, cache_format=cache_format)
    tokens = random_tokens(1100, NUM_ROWS)
    cuts = [1020, *range(1021, 1028), 1098, 1099]
    with d.checkpoint:
        got = run(native(d, 2, isa, context=1100, chunk=1100), tokens, cuts)
        check_attention(got, run(reference(d, context=1100), tokens), cache_format, 1.5e-5)


def test_no_outputs_is_a_step_too(isa: str, tmp_path: Path) -> None:
    """A prefill chunk in the middle of a prompt wants no logits."""
    d = attention(tmp_path / "m.gguf", 1, 16)
    with d.checkpoint:
        executor = native(d, 2, isa)
        for count in (1, 2, 9):
            blocks = np.zeros(1, np.int32)
            batch = StepBatch(random_tokens(count, NUM_ROWS), [Segment(0, count, 0, blocks)], np.zeros(0, np.int32))
            assert executor.step(batch).shape == (0, d.spec.vocab_size)
