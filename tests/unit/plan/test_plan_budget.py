"""The plan: what it adds up to, what it refuses, and that its advice is good."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Mapping
from functools import cache

import numpy as np
import pytest
from helpers import Tiny, declared, spec_and_formats
from hypothesis import given, settings
from hypothesis import strategies as st

from hotset.checkpoint.manifest import account
from hotset.errors import MachineError, RequestError
from hotset.kv.blocks import BlockPool
from hotset.kv.prefix import PrefixTree
from hotset.models.registry import describe
from hotset.models.spec import ModelSpec
from hotset.plan import budget
from hotset.plan.budget import Plan, Wish, make_plan, require_fit
from hotset.plan.explain import explain
from hotset.units import MIB, format_bytes

M = Tiny("Q8_0", heads=4, kv_heads=2, head_dim=16, hidden=64, ffn=160, layers=2, vocab=259, max_context=4096)
SMOLLM2 = Tiny(
    "Q4_1", hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49152, max_context=8192,
    embed_format="Q8_0",
)  # fmt: skip
LLAMA_70B = Tiny(
    "Q4_K", hidden=8192, ffn=28672, layers=80, heads=64, kv_heads=8, head_dim=128, vocab=128256, max_context=131072,
    is_tied=False, head_format="Q6_K",
)  # fmt: skip
LOTS = 1 << 50


spec_of = cache(spec_and_formats)


def plan_for(m: Tiny = M, available: int = LOTS, threads: int = 2, **wish: int) -> Plan:
    return make_plan(*spec_of(m), Wish(**wish), threads, available, "test limit")


def terms(plan: Plan) -> Mapping[str, int]:
    return {term.name: term.num_bytes for term in plan.terms}


def test_terms_by_hand() -> None:
    """Numbers worked out on paper for a model that fits on one: guards against a term that scales wrongly."""
    plan = plan_for(context=1100, max_sequences=3, prefill_chunk=32, prefix_tokens=300)
    found = terms(plan)
    # Q8_0: 34 bytes per 32 weights; rows padded to 16. Per layer q, k, v, o, then gate, up, down.
    layer = 34 * (64 + 32 + 32 + 64 + 160 + 160) * 2 + 34 * 64 * 5
    # Five norms of 64 floats.
    assert found["weights"] == 272 * 68 + 2 * layer + 5 * 64 * 4
    # Five blocks for each of three sequences, two for the prefix; keys and values of 2 x 16 halves in two layers.
    assert found["cache"] == (3 * 5 + 2) * 256 * 2 * (2 * 2 * 16 * 2)
    # Two spans of 1,024; four heads with m, l and 16 channels.
    assert found["attention partials"] == 3 * 2 * 4 * 18 * 4
    assert found["load staging"] == 2 * MIB // 4 and found["reserve"] == 256 * MIB
    assert plan.total_bytes == sum(found.values())
    assert plan.resident_bytes == plan.total_bytes - found["load staging"] - found["reserve"]
    assert plan.cache_bytes_per_token == 2 * 128


def test_a_token_reads_weights_and_its_context() -> None:
    """One embedding row, every other matrix once, and the rows of the context and of the token itself."""
    plan = plan_for(context=1000)
    matrices = terms(plan)["weights"] - 5 * 64 * 4
    assert plan.decode_bytes.keys() == {1, 1000}
    assert {context: read - (68 + matrices) for context, read in plan.decode_bytes.items()} == {
        1: 2 * 256,
        1000: 1001 * 256,
    }
    # An output matrix of its own is read instead of the embedding.
    untied = make_plan(*spec_and_formats(Tiny("Q8_0", is_tied=False)), Wish(context=1000), 2, LOTS, "")
    assert untied.decode_bytes[1000] == plan.decode_bytes[1000]


def test_terms_follow_what_they_depend_on() -> None:
    """Cache by sequences and context, workspace by chunk, scratch and staging by threads; nothing else moves."""
    base = terms(plan_for(context=1024, max_sequences=2, prefill_chunk=64))

    def moved(**wish: int) -> set[str]:
        new = terms(plan_for(**({"context": 1024, "max_sequences": 2, "prefill_chunk": 64} | wish)))
        return {name for name in base if base[name] != new[name]}

    assert moved(context=2048) == {"cache", "token ids", "attention partials"}
    assert moved(max_sequences=4) == {"cache", "token ids"}
    assert moved(prefill_chunk=128) == {"workspace"}
    assert moved(threads=3) == {"thread scratch", "load staging"}
    assert moved(prefix_tokens=1) == {"cache", "token ids"}


def test_json_round_trip() -> None:
    """Plain values only, totals included."""
    plan = plan_for(context=512)
    values = plan.to_json()
    assert json.loads(json.dumps(values)) == json.loads(json.dumps(values, default=None))
    back = json.loads(json.dumps(values))
    assert back["total_bytes"] == plan.total_bytes == sum(term["num_bytes"] for term in back["terms"])
    assert back["resident_bytes"] == plan.resident_bytes and back["fits"] is True
    assert back["decode_bytes"] == {str(context): read for context, read in plan.decode_bytes.items()}
    assert [term["name"] for term in back["terms"]] == [term.name for term in plan.terms]
    assert back["context"] == 512 and back["available_source"] == "test limit"


def test_explain_prints_every_term() -> None:
    plan = plan_for(context=512)
    text = "\n".join(explain(plan))
    for term in plan.terms:
        assert term.name in text and format_bytes(term.num_bytes) in text and term.detail in text
    assert format_bytes(plan.total_bytes) in text and "fits" in text
    assert "does NOT fit" in "\n".join(explain(plan_for(available=1)))


def test_defaults() -> None:
    """The model's context up to 8,192, one sequence; the chunk from a budget."""
    assert plan_for().context == 4096 and plan_for(LLAMA_70B).context == 8192
    assert plan_for().max_sequences == 1 and plan_for().prefill_chunk == 512
    assert plan_for(context=100).prefill_chunk == 112


@pytest.mark.parametrize("m", [M, SMOLLM2, LLAMA_70B])
def test_the_chunk_keeps_to_its_budget(m: Tiny) -> None:
    """The default chunk's buffers stay within the budget, and the next larger chunk would not, or is the largest."""
    plan = plan_for(m)
    assert terms(plan)["workspace"] <= budget.WORKSPACE_BUDGET or plan.prefill_chunk == budget.CHUNK_ALIGN
    if plan.prefill_chunk < budget.LARGEST_CHUNK:
        larger = plan_for(m, prefill_chunk=plan.prefill_chunk + budget.CHUNK_ALIGN)
        assert terms(larger)["workspace"] > budget.WORKSPACE_BUDGET


def test_a_changed_setting_is_said() -> None:
    """Every sequence needs a row in a step; a smaller chunk is not kept in silence."""
    plan = plan_for(max_sequences=20, prefill_chunk=8)
    assert plan.prefill_chunk == 20 and plan.max_outputs == 20
    assert plan.changes == ("prefill_chunk 8 -> 20, because every sequence needs one row in a step",)
    assert plan_for(max_sequences=8, prefill_chunk=8).changes == ()


def test_context_beyond_the_model_is_refused_with_numbers() -> None:
    with pytest.raises(RequestError, match="context 4097 is more than the 4096 tokens") as error:
        plan_for(context=4097)
    assert error.value.hint == "--context 4096"
    assert plan_for(context=4096).context == 4096


@pytest.mark.parametrize("name", ["context", "max_sequences", "prefill_chunk"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(RequestError, match=f"{name} is {value}, expected at least 1"):
        plan_for(**{name: value})


def test_prefix_tokens_must_not_be_negative() -> None:
    """A negative number would take blocks away from live sequences."""
    assert terms(plan_for(prefix_tokens=0))["cache"] > 0
    with pytest.raises(RequestError, match="prefix_tokens"):
        plan_for(prefix_tokens=-1000)


# ---- what does not fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "wish", "largest"),
    [
        (LLAMA_70B, {"context": 256, "max_sequences": 1}, "weights"),
        (LLAMA_70B, {"context": 131072, "max_sequences": 8}, "cache"),
        (M, {"prefill_chunk": 1_000_000, "context": 256, "max_sequences": 1}, "workspace"),
    ],
)
def test_a_refusal_names_the_largest_term(m: Tiny, wish: dict[str, int], largest: str) -> None:
    plan = plan_for(m, available=300 * MIB, **wish)
    assert not plan.fits
    with pytest.raises(MachineError) as error:
        require_fit(plan)
    for part in (
        f"needs {format_bytes(plan.total_bytes)}", "300.00 MiB are available (test limit)",
        f"the largest term is {largest}: {format_bytes(terms(plan)[largest])}",
    ):  # fmt: skip
        assert part in error.value.message
    assert error.value.hint and "\n" not in error.value.message


def test_a_plan_that_fits_exactly_is_not_refused() -> None:
    total = plan_for().total_bytes
    require_fit(plan_for(available=total))
    with pytest.raises(MachineError):
        require_fit(plan_for(available=total - 1))


SIZES = st.fixed_dictionaries(
    {"context": st.integers(1, 4096), "max_sequences": st.integers(1, 12), "prefill_chunk": st.integers(16, 3000)}
)


def advised(hint: str, wish: dict[str, int]) -> dict[str, int] | None:
    """The wish with the settings that a hint names, or None when it names none."""
    names = {"--context": "context", "--sequences": "max_sequences", "--prefill-chunk": "prefill_chunk"}
    found = {names[flag]: int(value) for flag, value in re.findall(r"(--[a-z-]+) (\d+)", hint)}
    return wish | found if found else None


def check_hint(wish: dict[str, int], part: float, m: Tiny) -> None:
    """Memory is too small by up to 1.2 times the cache, so that a shorter context helps in most examples."""
    wish = wish | {"context": min(wish["context"], m.max_context)}
    plan = plan_for(m, **wish)
    available = max(0, plan.total_bytes - 1 - int(1.2 * part * terms(plan)["cache"]))
    with pytest.raises(MachineError) as error:
        require_fit(plan_for(m, available, **wish))
    better = advised(error.value.hint or "", wish)
    if better is not None:
        assert better["context"] <= -(-wish["context"] // 256) * 256
        require_fit(plan_for(m, available, **better))


SHORT = Tiny("F32", layers=1, max_context=300)


@settings(max_examples=60)
@given(SIZES, st.floats(0.0, 1.0), st.sampled_from([M, SHORT]))
def test_what_a_hint_names_really_fits(wish: dict[str, int], part: float, m: Tiny) -> None:
    """Any size, any memory below what it needs: following the hint gives a plan that fits, on the first try."""
    check_hint(wish, part, m)


@settings(max_examples=30)
@given(SIZES, st.integers(1, 2000), st.floats(0.0, 1.0), st.sampled_from([M, SHORT]))
def test_a_hint_counts_the_blocks_of_kept_prefixes(wish: dict[str, int], prefix: int, part: float, m: Tiny) -> None:
    """The same with prefix_tokens, whose blocks stay when the context shrinks."""
    check_hint(wish | {"prefix_tokens": prefix}, part, m)


def test_a_setting_that_fits_is_named_whenever_there_is_one() -> None:
    """A chunk that is far too large is the term that is too large, so the chunk is what to change."""
    wish = {"prefill_chunk": 1_000_000, "context": 256, "max_sequences": 1}
    with pytest.raises(MachineError) as error:
        require_fit(plan_for(available=300 * MIB, **wish))
    better = advised(error.value.hint or "", wish)
    assert better is not None
    require_fit(plan_for(available=300 * MIB, **better))


# ---- speed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [SMOLLM2, LLAMA_70B])
def test_planning_takes_less_than_a_second_and_reads_no_weight(m: Tiny) -> None:
    """Headers alone: the checkpoint here has no file, so reading a weight would fail."""
    start = time.perf_counter()
    checkpoint = declared(m)
    spec: ModelSpec = describe(checkpoint)
    formats = {key: info.format.name for key, info in account(checkpoint, spec.tensors).loaded.items()}
    plan = make_plan(spec, formats, Wish(), 2, LOTS, "")
    assert time.perf_counter() - start < 1.0
    assert plan.total_bytes > 50 * MIB


def test_a_block_of_the_prefix_tree_takes_what_is_planned() -> None:
    """A million tokens in the tree are megabytes of Python objects, outside every native region."""
    count = 2000
    tokens = np.arange(count * 256, dtype=np.int32)
    tracemalloc.start()
    pool = BlockPool(count)
    tree = PrefixTree(pool, lambda _: None)
    pool.reserve(count)
    node = tree.root
    for i in range(count):
        node = tree.insert(node, tokens[256 * i : 256 * (i + 1)].tobytes(), pool.take())
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used == pytest.approx(count * budget.TREE_BYTES, rel=0.15)
