"""Every byte is planned before it is allocated: regions equal terms, and the process grows by what the plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers import (
    FORMATS,
    Tiny,
    add_byte_tokenizer,
    add_llama_keys,
    described,
    encode,
    native,
    plan_of,
    random_tokens,
    run,
    shapes,
    team,
    tiny,
    write_gguf,
)

from hotset.api import describe_model, plan_model
from hotset.checkpoint.checkpoint import Checkpoint
from hotset.engine.batch import Segment, StepBatch
from hotset.engine.native import NativeExecutor
from hotset.errors import CheckpointError, InternalError, MachineError
from hotset.machine.native import available_isas
from hotset.machine.teams import NodeTeam, Seats
from hotset.plan.budget import Plan, Wish


def regions(executor: NativeExecutor) -> dict[str, int]:
    """Allocated bytes by the plan's names of terms."""
    names = {"weights of thread": "weights", "vectors": "weights", "scratch of thread": "thread scratch"}
    out: Counter[str] = Counter()
    for region in executor.regions():
        term = next((term for prefix, term in names.items() if region.name.startswith(prefix)), region.name)
        out[term] += region.num_bytes
    return dict(out)


def allocated(plan: Plan) -> dict[str, int]:
    """The terms that the executor allocates; the sampler and token ids are the engine's."""
    own = ("sampler", "token ids")
    kept = (t for t in plan.terms if t.kind not in ("load", "reserve") and t.name not in own)
    return {t.name: t.num_bytes for t in kept if t.num_bytes}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_regions_are_the_terms_of_the_plan(format: str, threads: int, tmp_path: Path) -> None:
    """To the byte, for any thread count, tied or not, with and without attention partials."""
    for m, wish in (
        (tiny(format), {"context": 300, "max_sequences": 2, "prefill_chunk": 20}),
        (tiny(format, is_tied=False, layers=1), {"context": 2100, "max_sequences": 3, "prefix_tokens": 5}),
    ):
        d = described(tmp_path, m)
        with d.checkpoint:
            plan = plan_of(d, threads, **wish)
            executor = NativeExecutor(d.spec, d.formats, plan, team(threads), available_isas()[0])
            assert regions(executor) == allocated(plan)
            assert executor.num_blocks == plan.num_blocks
            assert (executor.max_tokens, executor.max_outputs) == (plan.prefill_chunk, plan.max_outputs)


def test_planning_a_file_reads_no_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of SmolLM2, the weights a hole in the file. Guards against a plan that costs more than headers."""

    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    m = Tiny(
        "Q4_1", hidden=576, ffn=1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49152, max_context=8192,
        embed_format="Q8_0",
    )  # fmt: skip
    path = write_sparse_gguf(tmp_path / "m.gguf", m)
    monkeypatch.setattr(Checkpoint, "raw", refuse)
    monkeypatch.setattr(Checkpoint, "array", refuse)
    d = describe_model(path)
    with d.checkpoint:
        plan = plan_model(d, Wish())
    assert 90e6 < plan.terms[0].num_bytes < 130e6 and plan.context == 8192


def write_sparse_gguf(path: Path, m: Tiny) -> Path:
    """Headers of a whole model; the data is a hole that takes no disk."""
    writer = gguf.GGUFWriter(path, "llama")
    add_llama_keys(writer, m)
    size = 0
    for name, shape in shapes(m).items():
        kind = gguf.GGMLQuantizationType[m.format_of(name)]
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        nbytes = int(np.prod(shape)) // block * block_bytes
        size += -(-nbytes // 32) * 32
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    start = -(-path.stat().st_size // 32) * 32
    with path.open("r+b") as file:
        file.truncate(start + size)
    return path


# ---- the process ---------------------------------------------------------------------------------------------

MEASURE = """
import json, sys
from pathlib import Path
import hotset

def memory(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024

# Everything that Python imports on the way, and a first team of threads, before the first measurement.
with hotset.load(sys.argv[1], threads=2, context=256) as engine:
    engine.logits([1, 2, 3])
before = memory("RssAnon")
Path("/proc/self/clear_refs").write_text("5")  # the peak is now the present
start = memory("VmRSS")
with hotset.load(sys.argv[2], threads=2, context=4096, max_sequences=2) as engine:
    loaded, peak = memory("RssAnon"), memory("VmHWM")
    engine.logits(list(range(200)))
    used = memory("RssAnon")
    plan = engine.plan.to_json()
    partials = {term["name"]: term["num_bytes"] for term in plan["terms"]}
closed = memory("RssAnon")
print(json.dumps({"before": before, "start": start, "loaded": loaded, "peak": peak, "used": used, "closed": closed,
                  "resident": plan["resident_bytes"], "terms": partials}))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """A process of its own that loads 52 MB of weights and 126 MB in all."""
    folder = tmp_path_factory.mktemp("big")
    m = Tiny("Q4_1", hidden=1024, ffn=2816, layers=7, heads=16, kv_heads=4, head_dim=64, vocab=4096)
    weights = write_big_gguf(folder / "big.gguf", m)
    small = write_gguf(folder / "small.gguf", tiny("Q4_1"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, small, weights], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_big_gguf(path: Path, m: Tiny) -> Path:
    """Rows of one random matrix again and again: what the bits are does not matter, that they are there does."""
    writer = gguf.GGUFWriter(path, "llama")
    add_llama_keys(writer, m)
    add_byte_tokenizer(writer, m.vocab)
    rng = np.random.default_rng(0)
    made: dict[tuple[int, ...], np.ndarray] = {}
    for name, shape in shapes(m).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        if shape[1:] not in made:
            made[shape[1:]] = encode(rng.standard_normal((64, shape[1]), dtype=np.float32) / 32, m.format)
        rows = made[shape[1:]]
        writer.add_tensor(name, np.tile(rows, (shape[0] // 64, 1)), raw_dtype=gguf.GGMLQuantizationType[m.format])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_loaded_process_holds_what_the_plan_says(measured: dict[str, int]) -> None:
    """Counted: anonymous memory (RssAnon) that loading adds to a process that has loaded a tiny model before, so
    without the interpreter, libraries and file cache. Within 3 % of resident_bytes, after loading and after use
    (measured: 0.9 %)."""
    assert measured["terms"]["weights"] > 50e6
    for moment in ("loaded", "used"):
        grown = measured[moment] - measured["before"]
        assert abs(grown - measured["resident"]) <= 0.03 * measured["resident"], moment


def test_the_peak_of_loading_is_planned(measured: dict[str, int]) -> None:
    """Counted: the high-water mark of all resident memory, mapped file pages included. Guards against a second copy of
    the weights while they are read."""
    planned = measured["resident"] + measured["terms"]["load staging"]
    assert measured["peak"] - measured["start"] <= 1.03 * planned


def test_closing_gives_the_memory_back(measured: dict[str, int]) -> None:
    """Within 4 MiB of what was there before: the allocator keeps some small pieces."""
    assert measured["closed"] - measured["before"] <= 4 << 20


# ---- errors --------------------------------------------------------------------------------------------------


def test_limits_of_a_step(tmp_path: Path) -> None:
    """More tokens or outputs than planned would write past the workspace."""
    d = described(tmp_path, tiny("F32"))
    with d.checkpoint:
        executor = native(d, 1, chunk=16, outputs=4)
        tokens = random_tokens(17)
        segment = Segment(0, 17, 0, np.zeros(1, np.int32))
        with pytest.raises(InternalError, match="17 tokens and 1 outputs; planned for 16 and 4"):
            executor.step(StepBatch(tokens, [segment], np.zeros(1, np.int32)))
        segment = Segment(0, 5, 0, np.zeros(1, np.int32))
        with pytest.raises(InternalError, match="5 tokens and 5 outputs"):
            executor.step(StepBatch(tokens[:5], [segment], np.arange(5, dtype=np.int32)))


def test_a_closed_executor_says_so(tmp_path: Path) -> None:
    d = described(tmp_path, tiny("F32"))
    with d.checkpoint:
        executor = native(d)
        executor.close()
        executor.close()
        with pytest.raises(InternalError, match="closed"):
            executor.regions()
        with pytest.raises(InternalError, match="closed"):
            run(executor, random_tokens(1))


def test_kernels_and_processors_that_are_not_there(tmp_path: Path) -> None:
    d = described(tmp_path, tiny("F32"))
    with d.checkpoint:
        plan = plan_of(d)
        with pytest.raises(MachineError, match="no kernel set sve"):
            NativeExecutor(d.spec, d.formats, plan, team(1), "sve")
        with pytest.raises(MachineError, match="CPU 1000 is not in the affinity mask"):
            NativeExecutor(d.spec, d.formats, plan, Seats((NodeTeam(0, (0, 1000)),)), available_isas()[0])
        with pytest.raises(MachineError, match="cannot start"):
            NativeExecutor(d.spec, d.formats, replace(plan, num_blocks=1 << 45), team(1), available_isas()[0])


def test_a_file_that_got_shorter_while_it_was_read(tmp_path: Path) -> None:
    """Not a crash (a mapped file would give SIGBUS): an error that names the tensor and the file."""
    d = described(tmp_path, tiny("Q8_0"))
    with d.checkpoint:
        path = d.checkpoint.files[0]
        executor = NativeExecutor(d.spec, d.formats, plan_of(d, 2), team(2), available_isas()[0])
        info = d.account.loaded["layers.1.down"]
        with path.open("r+b") as file:
            file.truncate(info.offset + 64)
        with pytest.raises(
            CheckpointError, match=r"tiny\.gguf: reading blk\.1\.ffn_down\.weight: the file ended early"
        ):
            executor.load(d.checkpoint, d.account)


def test_progress_names_every_tensor_once(tmp_path: Path) -> None:
    """Bytes as in the file, in sum those of all loaded tensors."""
    m = tiny("Q8_0", is_tied=False)
    d = described(tmp_path, m)
    seen: list[tuple[str, int]] = []
    with d.checkpoint:
        executor = NativeExecutor(d.spec, d.formats, plan_of(d), team(1), available_isas()[0])
        executor.load(d.checkpoint, d.account, lambda name, num_bytes: seen.append((name, num_bytes)))
        assert sorted(name for name, _ in seen) == sorted(shapes(m))
        assert dict(seen) == {info.name: info.nbytes for info in d.account.loaded.values()}
