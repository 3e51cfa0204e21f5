"""Ops over a latent cache: costs worked out on paper, shapes that are refused, memory, classes of weights."""

from __future__ import annotations

import pytest
from glm_files import FP8, TINY, declared, packed
from helpers import Tiny, spec_and_formats

from hotset.checkpoint.formats import FORMATS
from hotset.checkpoint.manifest import declared_formats
from hotset.errors import InternalError
from hotset.models.spec import ModelSpec, with_cache_format
from hotset.plan.budget import weights_bytes
from hotset.plan.cards import describe_config, read_card
from hotset.program import program as p
from hotset.program.builder import Builder
from hotset.program.cache import CacheGroup
from hotset.program.classes import class_bytes, weight_class, weight_classes
from hotset.program.cost import Cost, decode_bytes, op_class, op_cost, step_cost
from hotset.program.lower import lower, step_bytes, tile_bytes
from hotset.program.lower_types import PLANNED_KINDS
from hotset.program.pending import pending
from hotset.program.rows import kv_row
from hotset.units import GIB

LATENT_ROW, INDEX_ROW = 128 + 4 + 32, 64 + 4
GROUPS = (CacheGroup("latent", (0,), 656), CacheGroup("index", (0,), 132), CacheGroup("pooled", (0,), 656, 4))


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return declared(TINY, quantization_config=FP8)


def cost(spec: ModelSpec, kind: type, num_tokens: int, context: int, number: int = 0) -> Cost:
    op = [op for op in spec.program.ops if isinstance(op, kind)][number]
    return op_cost(op, declared_formats(spec.tensors), spec.groups, num_tokens, 1, context)


# ---- costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "context", "rows", "keys"),
    [(1, 0, 1, 1), (1, 6, 7, 7), (1, 7, 8, 8), (1, 8, 8, 8), (1, 500, 8, 8), (3, 6, 9, 7 + 8 + 8), (3, 500, 24, 24)],
)
def test_attention_reads_the_chosen_rows(spec: ModelSpec, num_tokens: int, context: int, rows: int, keys: int) -> None:
    """All rows up to the best 8, then 8 for each token and no more than there are; keys of 144, values of 128."""
    found = cost(spec, p.AttendLatent, num_tokens, context)
    assert found.cache_bytes == rows * LATENT_ROW
    assert found.num_ops == 2 * keys * 4 * (144 + 128)


def test_the_indexer_reads_every_key(spec: ModelSpec) -> None:
    found = cost(spec, p.IndexRows, 2, 500)
    assert found.cache_bytes == 502 * INDEX_ROW
    assert found.num_ops == 2 * (501 + 502) * 2 * 64


def test_every_row_is_stored_once(spec: ModelSpec) -> None:
    """Latent rows in every layer, keys in the two layers that own an indexer."""
    stored = sum(c.store_bytes for c in step_cost(spec.program, declared_formats(spec.tensors), 3, 1, 0).values())
    assert stored == 3 * (4 * LATENT_ROW + 2 * INDEX_ROW)
    lines = {op_class(op) for op in spec.program.ops if isinstance(op, p.StoreRows)}
    assert lines == {"attention", "indexer"}


def test_the_halves_of_kv_b_are_read_once(spec: ModelSpec) -> None:
    """Rows of W_UK by the query, rows of W_UV by the values: together the matrix, 320 rows of 128 inputs."""
    query, value = (cost(spec, kind, 5, 0) for kind in (p.LatentQuery, p.LatentValue))
    whole = 320 // 16 * tile_bytes(FORMATS["FP8_F32"], 128)
    assert query.weight_bytes + value.weight_bytes == whole
    assert query.weight_bytes == whole * 32 // 80
    assert (query.num_ops, value.num_ops) == (2 * 5 * 4 * 32 * 128, 2 * 5 * 4 * 48 * 128)


@pytest.mark.parametrize(
    ("name", "gib"),
    [("glm-5.2", 38.5), ("glm-5.2-int4", 45.1)],
)
def test_what_a_token_of_the_release_reads(name: str, gib: float) -> None:
    """specs/glm_5_2.md section 6: 38.5 GiB in FP8, and more than that in 4 bits, whose other matrices are BF16."""
    spec = describe_config(name, read_card(name).config)
    formats = declared_formats(spec.tensors)
    # Scales in the headers of tiles, padded to whole lines, are 0.2 % more than in the files.
    assert decode_bytes(spec.program, formats, 0) / GIB == pytest.approx(gib, rel=4e-3)
    costs = step_cost(spec.program, formats, 1, 1, 635_903)
    assert costs["indexer"].cache_bytes == 21 * 635_904 * 132
    assert round(costs["indexer"].cache_bytes / GIB, 2) == 1.64
    assert costs["attention"].cache_bytes == 78 * 2048 * 656
    exact = with_cache_format(spec, formats, "BF16")
    assert round(step_cost(exact.program, formats, 1, 1, 635_903)["indexer"].cache_bytes / GIB, 2) == 3.18
    indexers = [op for op in spec.program.ops if isinstance(op, p.IndexRows)]
    scan = sum(op_cost(op, formats, spec.groups, 1, 1, (1 << 20) - 1).num_ops for op in indexers)
    assert scan == 2 * 21 * 32 * 128 << 20


# ---- shapes --------------------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit() -> None:
    """A wrong program fails where it is written, by name."""

    def fails(words: str, width: int, build: str, *arguments: object, **named: object) -> None:
        b = Builder(GROUPS)
        with pytest.raises(InternalError, match=words):
            getattr(b, build)(b.buffer("x", width), *arguments, **named)

    fails("512 latent channels of 512", 512, "latent_norm", "norm", 512, 1e-5)
    fails("600 plain channels of 576", 576, "store_rows", "latent", 0, 600)
    fails("a row per token into .*pooled", 576, "store_rows", "pooled", 0, 512)
    fails("layer 1 has no rows in a group 'latent'", 576, "store_rows", "latent", 1, 512)
    fails("3 heads with 192 plain channels on a row of 1024", 1024, "latent_query", "kv_b", 3, 192, 256, 512)
    fails("4 heads with 256 plain channels on a row of 1024", 1024, "latent_query", "kv_b", 4, 256, 256, 512)
    fails("5 heads on a row of 2048", 2048, "latent_value", "kv_b", 5, 192, 256)
    fails("route: 8 of 256 experts from 2 of 3 groups", 256, "route", 8, 2.5, bias="b", num_groups=3, top_groups=2)
    fails("route: 40 of 256 experts from 1 of 8", 256, "route", 40, 2.5, bias="b", num_groups=8, top_groups=1)
    chosen = Builder(GROUPS).buffer("chosen", 2048)
    fails("4 heads, 576 latent channels", 2304, "attend_latent", chosen, "latent", 0, 4, 576, 1.0)
    fails("rows of single tokens, not .*pooled", 2304, "attend_latent", chosen, "pooled", 0, 4, 512, 1.0)


def test_experts_are_added_to_a_buffer_that_fits() -> None:
    b = Builder(GROUPS)
    x = b.buffer("x", 64)
    route = b.route(b.buffer("scores", 8), 2, 1.0, bias="bias", gate="sigmoid")
    pairs = b.expert_gated(x, route, "gate", "up", 8, 32)
    with pytest.raises(InternalError, match="down: adds 48 columns to buffer"):
        b.expert_down(pairs, route, "down", 8, 48, add_to=x)
    assert b.expert_down(pairs, route, "down", 8, 64, add_to=x) is x


def test_rows_with_float_scales() -> None:
    """512 bytes, four scales and 64 BF16 channels: 656, as other engines lay them out."""
    assert kv_row("FP8-F32", 576, 512).row_bytes == 656
    with pytest.raises(InternalError, match="kv rows in FP8-F32"):
        kv_row("FP8-F32", 256, 192)


# ---- memory --------------------------------------------------------------------------------------------------


def test_step_buffers_of_all_sizes_are_those_of_a_lowering(spec: ModelSpec) -> None:
    """One order of ops for every size: the sums that the executor's own lowering gives."""
    tiny = spec_and_formats(Tiny("Q8_0"))
    for model, formats in ((spec, declared_formats(spec.tensors)), tiny):
        found = step_bytes(model.program, formats, (1, 16, 48, 17), 6)
        assert found == {n: sum(lower(model.program, formats, n, 6).slot_bytes) for n in (1, 16, 48, 17)}


@pytest.mark.parametrize("quantization", [None, FP8, packed(), packed(symmetric=True)])
def test_every_op_has_its_place_in_memory(quantization: dict[str, object] | None) -> None:
    """Buffers that live at once never share a slot: the residual, and a choice that later layers read again."""
    spec = declared(TINY, quantization_config=quantization)
    low = lower(spec.program, declared_formats(spec.tensors), 48, 6)
    kinds = {op.kind for op in low.ops}
    assert set(PLANNED_KINDS) <= kinds
    last: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, op in enumerate(low.ops):
        for b in op.buffers:
            first.setdefault(b, index)
            last[b] = index
    for a in first:
        for b in first:
            if a < b and low.buffers[a].slot == low.buffers[b].slot:
                assert last[a] < first[b] or last[b] < first[a], (low.buffers[a], low.buffers[b])
    for b, index in first.items():
        assert b in (low.ops[index].out, low.ops[index].out2), "read before it is written"
    chosen = [op for op in low.ops if op.kind == "attend_latent"]
    assert len({op.y for op in chosen}) == 2 and len(chosen) == 4


def test_a_new_value_is_packed_again() -> None:
    """Products before and after a change in place must not share a packed row."""
    b = Builder(())
    x = b.embed("embed", 32, 32)
    b.linear(x, "first", 32)
    b.linear(x, "again", 32)
    b.rope(x, b.rope_angles((1.0,)), 1, 32, "adjacent")
    y = b.linear(x, "second", 32)
    program = b.finish(b.select_outputs(y))
    low = lower(program, dict.fromkeys(program.weights, "Q8_0"), 4, 4)
    assert [op.kind for op in low.ops].count("pack") == 2


# ---- what is missing, and classes ----------------------------------------------------------------------------


def test_what_runs_and_what_does_not(spec: ModelSpec) -> None:
    formats = declared_formats(spec.tensors)
    assert pending(spec.program, formats) == (
        "attention over a latent cache",
        "norms with a mean",
        "an indexer over single tokens",
        "sigmoid routing",
        "experts added to the residual",
        "FP8 weights with float scales",
    )
    assert "4-bit weights with zero points" in pending(spec.program, formats | {"layers.1.experts.up": "INT4"})
    for name in ("deepseek-v4-mini", "deepseek-v4-flash"):
        other = describe_config(name, read_card(name).config)
        assert pending(other.program, declared_formats(other.tensors)) == ()
    assert pending(spec_and_formats(Tiny("Q8_0"))[0].program, spec_and_formats(Tiny("Q8_0"))[1]) == ()


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.2-int4", "deepseek-v4-flash"])
def test_classes_of_weights_add_up(name: str) -> None:
    """Every byte that the plan counts is in one class; experts are the stacks, sparse what token ids alone choose."""
    spec = describe_config(name, read_card(name).config)
    formats = declared_formats(spec.tensors)
    sizes = class_bytes(spec.program, formats)
    assert sum(sizes.values()) == sum(weights_bytes(spec, formats))
    classes = weight_classes(spec.program)
    assert {key for key, kind in classes.items() if kind == "experts"} == {key for key in classes if ".experts." in key}
    sparse = {key for key, kind in classes.items() if kind == "sparse"}
    hashed = {f"layers.{layer}.tid2eid" for layer in range(3)} if name.startswith("deepseek") else set()
    assert sparse == {"embed"} | hashed
    if name == "glm-5.2":
        # 675.2 GiB in the files (specs/glm_5_2.md section 6), 17.44 GiB dense, 1.77 GiB of embedding.
        assert sizes["experts"] / GIB == pytest.approx(675.2, rel=2e-3)
        assert sizes["dense"] / GIB == pytest.approx(17.44, rel=3e-3)
        assert sizes["sparse"] == 154_880 * 6144 * 2


def test_a_tied_embedding_is_dense() -> None:
    """It is the output matrix as well, which every token reads whole."""
    for is_tied, kind in ((True, "dense"), (False, "sparse")):
        spec, _ = spec_and_formats(Tiny("Q8_0", is_tied=is_tied))
        (embed,) = [op for op in spec.program.ops if isinstance(op, p.Embed)]
        assert weight_class(spec.program, embed.table) == kind
