"""The plan for another machine: what each device holds, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest

from hotset.checkpoint.manifest import declared_formats
from hotset.errors import MachineError, RequestError
from hotset.machine.measured import find_profile
from hotset.machine.presets import read_preset
from hotset.models.spec import with_cache_format
from hotset.plan.budget import Wish
from hotset.plan.cards import describe_config, read_card
from hotset.plan.devices import (
    CHUNKS,
    DevicePlan,
    declared_bytes,
    explain_devices,
    plan_devices,
)
from hotset.plan.paged import paged_layout
from hotset.plan.placement import require_winner
from hotset.units import GIB

MILLION = 1 << 20


@cache
def plan_for(model: str = "flash", form: str | None = None, wish: Wish = Wish(context=MILLION)) -> DevicePlan:  # noqa: B008
    spec = describe_config(f"deepseek-v4-{model}", read_card(f"deepseek-v4-{model}").config)
    formats = declared_formats(spec.tensors)
    spec = with_cache_format(spec, formats, form)
    return plan_devices(spec, formats, declared_bytes(spec.tensors), read_preset("dual-gh200"), wish)


def terms(plan: DevicePlan) -> dict[str, int]:
    return {term.name: term.num_bytes for term in plan.terms}


def test_the_real_thing_at_a_million_tokens() -> None:
    """Flash without its draft head in two memories of 96 GiB: half the weights each, a whole cache each."""
    plan = plan_for()
    found = terms(plan)
    assert 2 * found["weights"] - plan.weights.num_bytes in (0, 1)
    assert round((plan.weights.num_bytes + plan.weights.spare_bytes) / GIB, 2) == 155.42
    assert found["cache"] == 4096 * 899_648
    assert found["frontier"] == 15_420_416
    assert plan.total_bytes == sum(found.values()) and plan.fits
    assert plan.usable_bytes == int(0.96 * 96 * GIB)
    assert require_winner(plan.placement).layout.name == "rows over hbm0, hbm1"


def test_published_numbers_are_printed() -> None:
    """Issue 3: weights per device, cache per form, workspace per chunk, and what asynchronous scheduling cost."""
    text = "\n".join(explain_devices(plan_for()))
    for words in (
        "67,612 tensors, 145.30 GiB; each of 2 devices: 72.65 GiB",
        "4,705 tensors, 10.12 GiB: the DSpark decoder",
        "3.43 GiB   3,514.25 B per token",
        "3.76 GiB   3,850.25 B per token",
        "6.72 GiB   6,880.00 B per token",
        "2.29 GiB   2,346.50 B per token",
        "26.33 GiB  65,536 tokens, batches of 32,768, asynchronous: 26,884 blocks",
        "fits in 92.16 GiB",
        *(f"{chunk:,} " for chunk in CHUNKS),
    ):
        assert words in text
    pro = plan_for("pro", "BF16-exact")
    assert pro.total_bytes > pro.usable_bytes
    assert "9.62 GiB   9,848.00 B per token" in "\n".join(explain_devices(pro))


def test_asynchronous_scheduling_costs_what_a_batch_costs() -> None:
    """Twice the tokens in flight, whatever the context; nothing of hotset's own plan depends on it."""
    lines = {(line.length, line.chunk, line.is_async): line for line in plan_for().paged}
    assert {length for length, _, _ in lines} == {65_536, MILLION}
    for length, chunk, _ in lines:
        more = lines[length, chunk, True].num_bytes - lines[length, chunk, False].num_bytes
        # At 65,536 tokens two batches of 32,768 are all there is, less the tokens before them.
        assert more == pytest.approx(chunk * plan_for().paged_bytes_per_token, rel=2e-3)
    short = plan_for(wish=Wish(context=4096))
    assert short.paged == () and not any("in flight" in line for line in explain_devices(short))


def test_workspace_grows_with_the_chunk_and_nothing_else() -> None:
    """Every layer uses the same buffers, and contexts do not enter."""
    plan, short = plan_for(), plan_for(wish=Wish(context=4096))
    assert plan.workspace == short.workspace
    assert list(plan.workspace) == list(CHUNKS)
    per_token = plan.workspace[1024] - plan.workspace[512]
    assert plan.workspace[32768] == pytest.approx(plan.workspace[512] + (32768 - 512) / 512 * per_token, rel=0.01)
    # One layer's compressor rows are 10,240 B a token; of all 21 layers they would be 215 KB.
    assert per_token / 512 < 1e6


def test_the_chunk_is_the_largest_that_fits() -> None:
    plan = plan_for()
    rest = plan.total_bytes - terms(plan)["workspace"]
    assert plan.prefill_chunk == max(c for c in CHUNKS if rest + plan.workspace[c] <= plan.usable_bytes)
    assert plan_for(wish=Wish(context=700)).prefill_chunk == 512
    asked = plan_for(wish=Wish(context=MILLION, prefill_chunk=3000))
    assert asked.prefill_chunk == 3000 and terms(asked)["workspace"] == asked.workspace[3000]


def test_sequences_multiply_cache_and_frontier_alone() -> None:
    one, four = terms(plan_for(wish=Wish(context=65_536))), terms(plan_for(wish=Wish(context=65_536, max_sequences=4)))
    assert (four["cache"], four["frontier"]) == (4 * one["cache"], 4 * one["frontier"])
    assert (four["weights"], four["sampler"]) == (one["weights"], one["sampler"])


def test_what_does_not_fit_names_its_largest_term() -> None:
    """Of the layout that comes nearest: what to change, or that nothing helps but a larger machine."""
    spec = describe_config("pro", read_card("deepseek-v4-pro").config)
    formats = declared_formats(spec.tensors)
    pro = plan_devices(spec, formats, declared_bytes(spec.tensors), read_preset("gh200"), Wish(context=MILLION))
    assert not pro.fits and pro.expected is None
    with pytest.raises(MachineError, match=r"no layout fits gh200; .* of experts 7\d\d\.") as caught:
        require_winner(pro.placement)
    assert caught.value.hint == "a machine with more memory, or a smaller model"
    many = plan_for(wish=Wish(context=MILLION, max_sequences=400))
    with pytest.raises(MachineError, match="of cache ") as caught:
        require_winner(many.placement)
    assert caught.value.hint == "a smaller --context or --sequences"
    wide = plan_for(wish=Wish(context=MILLION, prefill_chunk=1 << 21))
    with pytest.raises(MachineError, match="of workspace ") as caught:
        require_winner(wide.placement)
    assert caught.value.hint == "--prefill-chunk 512"


def test_requests_that_cannot_be_met() -> None:
    with pytest.raises(RequestError, match="context 1048577 is more than the 1048576 tokens"):
        plan_for(wish=Wish(context=MILLION + 1))
    with pytest.raises(RequestError, match="no machine is named toaster") as caught:
        find_profile("toaster")
    assert caught.value.hint is not None and "dual-gh200" in caught.value.hint


def test_json_holds_every_number() -> None:
    content = json.loads(json.dumps(plan_for().to_json()))
    assert content["fits"] is True and content["weights"]["num_spare"] == 4705
    assert content["workspace"]["512"] == plan_for().workspace[512]
    assert [line["form"] for line in content["caches"]][:2] == ["FP8", "FP8+FP8"]
    assert sum(term["num_bytes"] for term in content["terms"]) == content["total_bytes"]


def test_paged_lines_are_of_the_published_formats() -> None:
    """Whatever form the plan has: rows of 584 and 132 bytes, without the draft head."""
    found = plan_for(form="BF16")
    assert found.paged == plan_for().paged and found.cache_form == "BF16"
    spec = describe_config("flash", read_card("deepseek-v4-flash").config)
    layout = paged_layout(with_cache_format(spec, declared_formats(spec.tensors), "FP8+FP8"))
    assert {line.num_bytes // line.num_blocks for line in found.paged} == {layout.stride("padded")}


def test_a_token_reads_its_experts_and_no_others() -> None:
    """13.9 B of 284 B parameters, most of them in half a byte: 11.3 GB, from both memories at once."""
    plan = plan_for()
    assert 11e9 < plan.decode_bytes[1] < 11.5e9 < plan.weights.num_bytes / 10
    assert plan.read_bytes_per_s == 3728e9 + 3724e9


def test_presets_state_their_source() -> None:
    """96 GB that hold 79.15 + 8.28 GiB at a utilisation of 0.96 are GiB."""
    preset = read_preset("dual-gh200")
    assert "specs/reference_systems.md" in preset.source
    memories = [preset.memory(device.near) for device in preset.devices]
    assert all(memory.usable_bytes > (79.15 + 8.28) * GIB for memory in memories)
    assert replace(memories[0], num_bytes=96 * 10**9).usable_bytes < (79.15 + 8.28) * GIB
