"""The byte model of the paged layout, held against published numbers (specs/deepseek_v4.md sections 4.3 to 4.5)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hotset.checkpoint.manifest import declared_formats
from hotset.errors import RequestError
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.plan.cards import describe_config, read_card
from hotset.plan.paged import PagedLayout, paged_layout, tokens_in_flight
from hotset.program.cache import BLOCK_TOKENS, block_bytes, frontier_bytes
from hotset.units import GIB

MILLION = 1 << 20


@cache
def spec_of(name: str, form: str) -> ModelSpec:
    spec = describe_config(f"deepseek-v4-{name}", read_card(f"deepseek-v4-{name}").config)
    return with_cache_format(spec, declared_formats(spec.tensors), form)


def layout(name: str, form: str, draft_layers: int = 0) -> PagedLayout:
    return paged_layout(spec_of(name, form), draft_layers=draft_layers)


def with_rows(spec: ModelSpec, **row_bytes: int) -> ModelSpec:
    """The same model with rows of other sizes, by group."""
    groups = tuple(replace(g, row_bytes=row_bytes.get(g.name, g.row_bytes)) for g in spec.groups)
    frontier = tuple(replace(g, row_bytes=row_bytes.get(g.name, g.row_bytes)) for g in spec.frontier)
    return replace(spec, groups=groups, program=replace(spec.program, groups=groups, frontier=frontier))


@pytest.mark.parametrize(
    ("model", "form", "per_token", "gib"),
    [
        ("flash", "BF16-exact", 6880, 6.72),
        ("flash", "FP8+FP8", 3850.25, 3.76),
        ("flash", "FP8", 3514.25, 3.43),
        ("flash", "FP4", 2346.5, 2.29),
        ("pro", "BF16-exact", 9848, 9.62),
        ("pro", "FP8+FP8", 5511.4375, 5.38),
        ("pro", "FP8", 5031.4375, 4.91),
    ],
)
def test_own_rows_per_token(model: str, form: str, per_token: float, gib: float) -> None:
    """Table 4.3, of the cache groups that the executor's memory is made of. 9.62 GiB is published for Pro in BF16."""
    found = block_bytes(spec_of(model, form).groups) / BLOCK_TOKENS
    assert found == per_token
    assert round(found * MILLION / GIB, 2) == gib


def test_block_and_frontier_of_the_default_form() -> None:
    """DESIGN.md section 4, and the bound of issue 3: windows, and state of 12.2 MB."""
    spec = spec_of("flash", "FP8")
    assert block_bytes(spec.groups) == 899_648
    assert frontier_bytes(spec.frontier) == 43 * 128 * 584 + 12_206_080 <= 16_000_000


@pytest.mark.parametrize(
    ("model", "draft_layers", "tuple_size", "form", "padded", "bucketed", "dense"),
    [
        ("flash", 0, 22, "FP8+FP8", 22 * 47_808, 1_039_680, 1_002_240),
        ("flash", 3, 23, "FP8+FP8", 23 * 47_808, 1_077_120, 1_002_240),
        ("pro", 1, 31, "FP8+FP8", 31 * 47_808, 1_473_408, 1_435_968),
        ("flash", 0, 22, "FP8", None, None, 917_568),
        ("flash", 3, 23, "FP8", None, None, 917_568),
        ("pro", 1, 31, "FP8", None, None, 1_315_008),
    ],
)
def test_strides(
    model: str, draft_layers: int, tuple_size: int, form: str, padded: int | None, bucketed: int | None, dense: int
) -> None:
    """Every number of the table in section 4.4."""
    found = layout(model, form, draft_layers)
    assert (found.tuple_size, found.num_windows) == (tuple_size, 2)
    assert padded in (None, found.stride("padded"))
    assert bucketed in (None, found.stride("bucketed"))
    assert found.stride("dense") == dense


def test_strides_of_rows_without_scales() -> None:
    """FlashInfer's rows of 512 bytes: reported 1,308,672 bytes before the change and 1,228,800 after it, where the
    compressor states are the largest group."""
    rows = {"csa": 512, "hca": 512, "window": 512}
    before = paged_layout(with_rows(spec_of("pro", "FP8+FP8"), **rows), draft_layers=1, align=512)
    after = paged_layout(with_rows(spec_of("pro", "FP8"), **rows), draft_layers=1, align=512)
    assert (before.stride("bucketed"), after.stride("dense")) == (1_308_672, 1_228_800)


def test_pages_of_256_tokens() -> None:
    """Section 4.3: 3,915 B per token, 3.82 GiB at 1M, with page padding alone."""
    assert layout("flash", "FP8+FP8").main.num_bytes == 1_002_240 == 3915 * BLOCK_TOKENS
    assert round(1_002_240 / BLOCK_TOKENS * MILLION / GIB, 2) == 3.82


def test_a_start_that_was_refused() -> None:
    """26.33 GiB needed at 32,768 tokens a batch with asynchronous scheduling, where 3.57 GiB held 8,884 tokens."""
    found = layout("flash", "FP8+FP8")
    flight = tokens_in_flight(32_768, is_async=True)
    assert flight == 65_536
    assert found.num_blocks(65_536, flight) == 256 + 2 * 1025 + 16_385 + 8_193
    assert round(found.pool_bytes(65_536, flight) / GIB, 3) == 26.334
    assert round(found.pool_bytes(8_884, flight) / GIB, 2) == 3.57
    # The limit that was printed is where this model's blocks end as well: one more window page does not fit.
    assert found.pool_bytes(8_884, flight) <= 3.575 * GIB < found.pool_bytes(8_884 + 64, flight)


def test_runs_that_started() -> None:
    """7.63 GiB for 1M with DSpark; by the groups' own bytes 2.736 GiB at 64K (12.67 / 4.63) and 6.334 at 1M (8.28 /
    1.31)."""
    plain, draft = layout("flash", "FP8+FP8"), layout("flash", "FP8+FP8", draft_layers=3)
    flight = tokens_in_flight(8_192, is_async=False)
    assert draft.num_blocks(MILLION, flight) == 7_450
    assert round(draft.pool_bytes(MILLION, flight) / GIB, 2) == 7.63
    assert round(plain.own_bytes(65_536, flight) / GIB, 3) == 2.736
    assert round(draft.own_bytes(MILLION, flight) / GIB, 3) == 6.334
    assert abs(plain.own_bytes(65_536, flight) / GIB - 12.67 / 4.63) < 0.01
    assert abs(draft.own_bytes(MILLION, flight) / GIB - 8.28 / 1.31) < 0.02


def test_cost_of_a_token_in_flight() -> None:
    """407 to 447 KB, whatever the context: 12.4 to 13.6 GiB at 32,768 in flight, twice that with two batches."""
    found = layout("flash", "FP8+FP8")
    assert found.bytes_per_token_in_flight("dense") == pytest.approx(1_002_240 * 0.40625)
    assert 407e3 < found.bytes_per_token_in_flight("dense") < found.bytes_per_token_in_flight("padded") < 447e3
    more = found.pool_bytes(MILLION, 65_536) - found.pool_bytes(MILLION, 32_768)
    assert more == pytest.approx(32_768 * found.bytes_per_token_in_flight(), rel=1e-3)
    assert more == found.pool_bytes(2 * MILLION, 65_536) - found.pool_bytes(2 * MILLION, 32_768)


def test_blocks_of_a_decode_step() -> None:
    """One token in flight needs itself and window - 1 before it: 8 tokens of state in pages of 4, plus one for the cut
    that does not fall on a page. A context shorter than the window needs no more than it has."""
    found = layout("flash", "FP8+FP8")
    state = found.states[0]
    assert [state.num_blocks(1000, in_flight) for in_flight in (1, 2, 5, 6)] == [3, 4, 4, 5]
    assert state.num_blocks(3, 8192) == 2
    assert found.window.num_blocks(1000, 1) == 2 + 1
    assert [found.main.num_blocks(length, 8192) for length in (1, 256, 257)] == [1, 1, 2]


def test_a_model_of_plain_rows_is_refused() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 300,
        "intermediate_size": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    with pytest.raises(RequestError, match="no cache of compressed rows"):
        paged_layout(describe_config("tiny", config))
