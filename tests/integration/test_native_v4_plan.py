"""DeepSeek-V4 under the native executor: planned bytes are allocated bytes, and files that it must not load."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dsv4_files import TinyV4, write_v4
from dsv4_headers import v4_program
from dsv4_native import v4_described, v4_native
from helpers import plan_of, random_tokens, team, tiny, write_gguf

import hotset
from hotset.api import Described
from hotset.chat.random_tokenizer import byte_tokenizer
from hotset.engine.batch import Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.errors import CheckpointError, InternalError, RequestError
from hotset.machine.native import available_isas
from hotset.plan.budget import Wish, make_plan
from hotset.program.cache import frontier_bytes, num_blocks
from hotset.program.lower import lower, partial_floats
from hotset.program.lower_types import FEW_TOKENS
from hotset.program.program import AttendRows

MODELS = {
    "official": TinyV4(formats="official", hidden=160, inter=96, experts=5, o_groups=1),
    "fp8": TinyV4(formats="fp8", ratios=(4, 4), heads=3, o_groups=3, hash_layers=1),
    "float": TinyV4(ratios=(0, 128), heads=2, hash_layers=0),
}


def allocated(executor: NativeExecutor) -> dict[str, int]:
    """Allocated bytes by the plan's names of terms."""
    names = {"weights of thread": "weights", "vectors": "weights", "scratch of thread": "thread scratch"}
    out: Counter[str] = Counter()
    for region in executor.regions():
        term = next((term for prefix, term in names.items() if region.name.startswith(prefix)), region.name)
        out[term] += region.num_bytes
    return dict(out)


@pytest.mark.parametrize("cache_format", ["FP8", "BF16", "FP4+FP8", "BF16-exact"])
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_regions_are_the_terms_of_the_plan(name: str, threads: int, cache_format: str, tmp_path: Path) -> None:
    """To the byte: stacks of experts with their scales, tables, rings, scratch of attention and of the indexer."""
    d = v4_described(tmp_path, MODELS[name], cache_format)
    with d.checkpoint:
        for wish in ({}, {"context": 700, "max_sequences": 3, "prefill_chunk": 33, "prefix_tokens": 300}):
            plan = plan_of(d, threads, **wish)
            executor = NativeExecutor(d.spec, d.formats, plan, team(threads), available_isas()[0])
            terms = {t.name: t.num_bytes for t in plan.terms if t.kind not in ("load", "reserve")}
            own = allocated(executor)
            assert {term: terms[term] for term in own} == own
            assert plan.num_frontiers == plan.max_sequences
            assert own["frontier"] == plan.max_sequences * frontier_bytes(d.spec.frontier) > 0


def test_snapshots_are_planned_and_serve_a_prefix(tmp_path: Path) -> None:
    """Guards against an engine that reuses nothing because nobody wired the plan's number, and against memory that is
    taken without a term."""
    path = write_v4(tmp_path, replace(MODELS["official"], vocab=320))
    for name, text in byte_tokenizer(320, 0, 1).items():
        (path / name).write_text(text, encoding="utf-8")
    prompt = random_tokens(600, 320).tolist()
    for asked, reused in ((None, 512), (3, 512), (0, 0)):
        with hotset.load(path, threads=1, context=700, snapshots=asked) as engine:
            number = 16 if asked is None else asked
            terms = {t.name: t.num_bytes for t in engine.plan.terms}
            assert terms["frontier snapshots"] == number * terms["frontier"]
            for expected in (0, reused):
                *_, last = engine.generate(prompt, hotset.Sampling(max_tokens=1, ignore_eos=True))
                assert last.cached_tokens == expected
            assert last.recomputed_tokens == (0 if reused else 512)


def test_snapshots_of_a_model_without_a_frontier_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="has no frontier to keep"):
        hotset.load(write_gguf(tmp_path / "llama.gguf", tiny("Q4_1")), threads=1, context=64, snapshots=2)
    with pytest.raises(RequestError, match="snapshots is -1"):
        hotset.load(write_v4(tmp_path / "v4", MODELS["float"]), threads=1, context=64, snapshots=-1)


def test_workspace_and_scratch_do_not_grow_with_the_context() -> None:
    """A score per compressed row would take a gigabyte at a million tokens (256 tokens, 64 heads and more)."""
    spec, formats = v4_program(MODELS["official"])
    spec = replace(spec, max_context=1 << 20)
    terms = []
    for context in (4096, 1 << 20):
        plan = make_plan(spec, formats, Wish(context=context, prefill_chunk=64), 2, 1 << 50, "test")
        terms.append({t.name: t.num_bytes for t in plan.terms})
    for name in ("workspace", "thread scratch", "frontier", "weights"):
        assert terms[0][name] == terms[1][name], name
    assert terms[1]["cache"] == 256 * terms[0]["cache"]


def test_partial_sums_grow_by_four_spans_per_doubling_of_the_context() -> None:
    """Sums of every tile would be as large as the rows themselves."""
    spec, _ = v4_program(MODELS["official"])
    floats = [partial_floats(spec.program, 1, context, 2) for context in (1 << 19, 1 << 20, 1 << 21)]
    op = next(op for op in spec.program.ops if isinstance(op, AttendRows))
    row = op.num_heads * (op.head_dim + 2)
    assert floats[1] - floats[0] == floats[2] - floats[1] == floats[0] // (17 * row) * 4 * row
    assert floats[0] == floats[0] // (17 * row) * 17 * row  # 64 tiles of 64 rows of 128 tokens, and the window


@pytest.mark.parametrize("threads", [2, 3])
def test_partials_are_planned_for_exactly_the_steps_that_are_cut(tmp_path: Path, threads: int) -> None:
    """Too little room and the executor would quietly cut by heads; too much is memory that nothing uses."""
    d, context = v4_described(tmp_path, MODELS["official"]), 512
    with d.checkpoint:
        executor = v4_native(d, threads, context=context, chunk=64)
        for count in range(1, 4 * threads + 2):
            executor.profile(True)
            blocks = np.arange(num_blocks(context), dtype=np.int32)
            segment = Segment(0, count, context - count, blocks)
            executor.step(StepBatch(np.arange(count, dtype=np.int32), [segment], np.array([0], np.int32)))
            merges = [ns > 0 for kind, ns, _ in executor.op_times() if kind == "attend_rows_merge"]
            # Fewer than eight heads are one run: enough for the threads are as many tokens, or four times as many.
            is_cut = count < (threads if count <= FEW_TOKENS else 4 * threads)
            assert merges == [is_cut] * len(merges), count


def test_nothing_of_a_token_survives_a_layer() -> None:
    """Values and scores of compressors, window rows and pairs live in step buffers that every layer uses again."""
    sizes = []
    for layers in (1, 5, 12):
        spec, formats = v4_program(replace(MODELS["official"], ratios=(4, 128, 0) * layers))
        sizes.append(sum(lower(spec.program, formats, 256, 8).slot_bytes))
    assert sizes[0] <= sizes[1] == sizes[2]
    assert sizes[1] <= 1.1 * sizes[0]


# ---- files ---------------------------------------------------------------------------------------------------


def patch(d: Described, name: str, at: int, raw: bytes) -> None:
    """Overwrite bytes of a tensor in its file."""
    info = d.checkpoint.tensors[name]
    with d.checkpoint.files[info.file_id].open("r+b") as file:
        file.seek(info.offset + at)
        file.write(raw)


@pytest.mark.parametrize(
    ("name", "at", "raw", "message"),
    [
        ("layers.0.ffn.experts.3.w2.scale", 5, b"\xff", r"layers\.0\.ffn\.experts\.3\.w2\.scale are NaN"),
        ("layers.1.attn.wq_b.scale", 0, b"\xff", r"layers\.1\.attn\.wq_b\.scale are NaN"),
        ("layers.0.ffn.gate.tid2eid", 16, b"\x05", "expert ids from 0 to 5, expected 0 to 4"),
        ("layers.0.ffn.gate.tid2eid", 7, b"\xff", "expert ids from -"),
    ],
)
def test_values_that_no_product_can_take(name: str, at: int, raw: bytes, message: str, tmp_path: Path) -> None:
    """Guards against NaN weights, and against an expert that is not there."""
    d = v4_described(tmp_path, MODELS["official"])
    with d.checkpoint:
        patch(d, name, at, raw)
        with pytest.raises(CheckpointError, match=message):
            v4_native(d)


def test_an_expert_named_twice_for_one_token(tmp_path: Path) -> None:
    d = v4_described(tmp_path, MODELS["official"])
    with d.checkpoint:
        ids = np.frombuffer(d.checkpoint.raw("layers.1.ffn.gate.tid2eid").tobytes(), "<i8").reshape(-1, 2)
        patch(d, "layers.1.ffn.gate.tid2eid", 16 * 7 + 8, ids[7, :1].tobytes())
        with pytest.raises(CheckpointError, match=r"layers\.1\.ffn\.gate\.tid2eid names an expert twice"):
            v4_native(d)


@pytest.mark.parametrize("name", ["layers.3.ffn.experts.4.w3.weight", "layers.3.ffn.experts.4.w3.scale"])
def test_a_file_that_got_shorter_while_it_was_read(name: str, tmp_path: Path) -> None:
    """An error that names the file and the tensor; scales are read as weights are, not through a mapping."""
    d = v4_described(tmp_path, MODELS["official"])
    with d.checkpoint:
        plan = plan_of(d, 2)
        executor = NativeExecutor(d.spec, d.formats, plan, team(2), available_isas()[0])
        info = d.checkpoint.tensors[name]
        with d.checkpoint.files[info.file_id].open("r+b") as file:
            file.truncate(info.offset + 16)
        with pytest.raises(CheckpointError, match="the file ended early"):
            executor.load(d.checkpoint, d.account)


def test_progress_names_every_tensor_once(tmp_path: Path) -> None:
    """Scales under their own names, bytes as in the file."""
    d = v4_described(tmp_path, MODELS["official"])
    seen: list[tuple[str, int]] = []
    with d.checkpoint:
        executor = NativeExecutor(d.spec, d.formats, plan_of(d), team(1), available_isas()[0])
        executor.load(d.checkpoint, d.account, lambda name, num_bytes: seen.append((name, num_bytes)))
        assert len(seen) == len(d.account.loaded)
        assert dict(seen) == {info.name: info.nbytes for info in d.account.loaded.values()}


def test_blocks_and_frontiers_that_are_not_there(tmp_path: Path) -> None:
    d = v4_described(tmp_path, MODELS["float"])
    with d.checkpoint:
        executor = v4_native(d, context=256, sequences=2)
        for call, index in ((executor.copy_block, 2), (executor.copy_frontier, 2), (executor.copy_frontier, -1)):
            with pytest.raises(InternalError, match=f"{index} of 2"):
                call(index, np.empty(8, np.uint8))
