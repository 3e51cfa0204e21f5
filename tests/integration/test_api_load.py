"""hotset.load and the engine over a real native executor: text, logits, several engines, options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from helpers import CONTROL_TOKENS, EOS_ID, Tiny, described, native, random_tokens, run, same_bits, tiny, write_gguf

import hotset
from hotset import CheckpointError, Finished, MachineError, Piece, RequestError, Sampling
from hotset.api import describe_model, plan_model
from hotset.machine.native import available_isas
from hotset.plan.budget import Plan, Wish

GOLDEN = Path(__file__).parents[1] / "golden" / "llama"
M = tiny("Q8_0", is_tied=False)
# Any token may follow any other, so that answers differ.
DRAW = {"temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", M)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[hotset.Engine]:
    with hotset.load(path, context=1100, max_sequences=3, prefill_chunk=64) as engine:
        yield engine


def answer(engine: hotset.Engine, prompt: object, sampling: Sampling) -> Finished:
    *_, last = engine.generate(prompt, sampling)  # type: ignore[arg-type]
    assert isinstance(last, Finished)
    return last


# ---- text ----------------------------------------------------------------------------------------------------


def test_generate_gives_pieces_and_one_end(engine: hotset.Engine) -> None:
    """Texts of pieces are the answer; tokens of pieces begin those of the end."""
    events = list(engine.generate("the cat sat on the mat", Sampling(seed=1, max_tokens=20, **DRAW)))
    *pieces, last = events
    assert all(isinstance(piece, Piece) for piece in pieces) and isinstance(last, Finished)
    assert last.finish_reason == "length" and len(last.token_ids) == 20
    # "th" is one token of this vocabulary.
    assert last.num_prompt_tokens == len("the cat sat on the mat") - 2
    ids = [token for piece in pieces for token in piece.token_ids]
    assert tuple(ids) == last.token_ids[: len(ids)]
    assert engine.codec is not None
    assert "".join(event.text for event in events) == engine.codec.decode(last.token_ids)  # type: ignore[attr-defined]


def test_messages_go_through_the_template_of_the_file(engine: hotset.Engine) -> None:
    """The same tokens as the text that the template makes; a control token inside a message is plain text."""
    sampling = Sampling(seed=1, max_tokens=5, **DRAW)
    by_message = answer(engine, [{"role": "user", "content": "hi"}], sampling)
    by_text = answer(engine, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", sampling)
    assert by_message.token_ids == by_text.token_ids
    assert by_message.num_prompt_tokens == by_text.num_prompt_tokens
    sneaky = answer(engine, [{"role": "user", "content": CONTROL_TOKENS[1]}], sampling)
    assert sneaky.num_prompt_tokens == by_text.num_prompt_tokens - len("hi") + len(CONTROL_TOKENS[1])


def test_greedy_answers_follow_the_logits(engine: hotset.Engine) -> None:
    """Every token of a greedy answer is the largest logit after the tokens before it, computed apart."""
    prompt = random_tokens(300).tolist()
    got = answer(engine, prompt, Sampling(max_tokens=12, ignore_eos=True)).token_ids
    logits = engine.logits([*prompt, *got])
    assert got == tuple(logits[len(prompt) - 1 : -1].argmax(-1))


def test_an_end_of_text_token_of_the_file_ends_the_answer(path: Path) -> None:
    """Guards against an end that is known to the tokenizer or to the family alone and lost on the way."""
    with hotset.load(path, context=512) as engine:
        for seed in range(200):
            last = answer(engine, "a", Sampling(temperature=1.5, seed=seed, max_tokens=30))
            if last.finish_reason == "stop":
                break
        assert last.finish_reason == "stop" and last.token_ids[-1] == EOS_ID


# ---- logits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 8, 63, 64, 65, 300])
def test_all_logits_and_last_logits_have_the_same_bits(engine: hotset.Engine, count: int) -> None:
    """They are computed in chunks of different size, and from different steps."""
    tokens = random_tokens(count)
    every = engine.logits(tokens)
    last = engine.logits(tokens, "last")
    assert every.shape == (count, M.vocab) and last.shape == (1, M.vocab)
    assert same_bits(every[-1:], last)


def test_logits_are_a_copy_and_do_not_depend_on_what_ran_before(engine: hotset.Engine) -> None:
    """Guards against a view of the executor's memory, and against the prefix cache leaking into scores."""
    tokens = random_tokens(280)
    first = engine.logits(tokens)
    kept = first.copy()
    answer(engine, tokens.tolist(), Sampling(max_tokens=3, seed=2, **DRAW))
    assert same_bits(engine.logits(tokens), first) and same_bits(kept, first)


def test_logits_are_those_of_the_executor(engine: hotset.Engine, path: Path, tmp_path: Path) -> None:
    """The engine adds nothing and loses nothing."""
    tokens = random_tokens(70)
    d = described(tmp_path, M)
    with d.checkpoint:
        assert same_bits(engine.logits(tokens), run(native(d), tokens))


def test_logits_refuse_what_they_cannot_do(engine: hotset.Engine) -> None:
    with pytest.raises(RequestError, match="positions is 'first', expected 'all' or 'last'"):
        engine.logits([1], "first")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1101 tokens, the context is 1100"):
        engine.logits(random_tokens(1101))
    with pytest.raises(RequestError, match="token id 259 is not in the vocabulary"):
        engine.logits([259])


def test_a_folder_of_safetensors_with_its_own_tokenizer() -> None:
    """The other kind of file, end to end: logits of transformers, and text."""
    case = GOLDEN / "tied_f32"
    with np.load(case / "golden.npz") as arrays, hotset.load(case, context=512) as engine:
        got = engine.logits(arrays["token_ids"])[arrays["positions"]]
        assert np.abs(got - arrays["logits"]).max() <= 0.01 * arrays["logits"].std()
        last = answer(engine, "Hello", Sampling(max_tokens=4, ignore_eos=True))
        assert last.num_prompt_tokens == 5 and len(last.token_ids) == 4


# ---- many ----------------------------------------------------------------------------------------------------


def test_requests_beside_each_other_equal_requests_alone(engine: hotset.Engine) -> None:
    """Greedy and drawn, short and long prompts, more requests than sequences: the same tokens as one after another."""
    prompts = [random_tokens(count, seed=count).tolist() for count in (3, 260, 17, 90, 1)]
    settings = [
        Sampling(max_tokens=9 + i, seed=i, temperature=0.0 if i % 2 else 0.9, ignore_eos=True) for i in range(5)
    ]
    alone = [answer(engine, prompt, sampling).token_ids for prompt, sampling in zip(prompts, settings, strict=True)]
    engine.clear_cache()
    requests = [engine.submit(prompt, sampling) for prompt, sampling in zip(prompts, settings, strict=True)]
    together = []
    for request in requests:
        *_, last = request
        together.append(last.token_ids)
    assert together == alone


def test_a_cached_prefix_changes_no_token(engine: hotset.Engine) -> None:
    """The second time the first block of the prompt is not computed; the answer is the same."""
    engine.clear_cache()
    prompt = random_tokens(400, seed=11).tolist()
    sampling = Sampling(max_tokens=10, seed=5, **DRAW)
    first, second = answer(engine, prompt, sampling), answer(engine, prompt, sampling)
    assert (first.cached_tokens, second.cached_tokens) == (0, 256)
    assert first.token_ids == second.token_ids


def test_cancelling_ends_one_request_and_no_other(engine: hotset.Engine) -> None:
    sampling = Sampling(max_tokens=30, seed=3, **DRAW)
    alone = answer(engine, "other", sampling).token_ids
    cancelled, other = engine.submit("first", Sampling(max_tokens=500, **DRAW)), engine.submit("other", sampling)
    next(cancelled)
    cancelled.cancel()
    *_, last = cancelled
    assert last.finish_reason == "cancelled" and len(last.token_ids) < 500
    *_, last = other
    assert last.token_ids == alone
    assert engine.stats().num_used_blocks == 0


def test_leaving_a_loop_gives_the_blocks_back(engine: hotset.Engine) -> None:
    for _ in engine.generate("text", Sampling(max_tokens=400, **DRAW)):
        break
    assert engine.stats().num_used_blocks == 0 and engine.stats().num_running == 0


def test_several_engines_in_one_process(engine: hotset.Engine, tmp_path: Path) -> None:
    """Two models turn by turn: each answers as if it were alone, also after the other is closed."""
    other_path = write_gguf(tmp_path / "other.gguf", tiny("F16", is_tied=False, seed=9, vocab=300))
    sampling = Sampling(max_tokens=12, seed=4, **DRAW)
    alone = answer(engine, "abc", sampling).token_ids
    with hotset.load(other_path, context=512, threads=1) as other, hotset.load(other_path, context=256) as third:
        other_alone = answer(other, "abc", sampling).token_ids
        one, two = engine.submit("abc", sampling), other.submit("abc", sampling)
        events = [[next(one), next(two)] for _ in range(5)]
        assert len(events) == 5
        *_, last = two
        assert last.token_ids == other_alone
        assert answer(third, "abc", sampling).token_ids == other_alone
    *_, last = one
    assert last.token_ids == alone


def test_engines_in_several_python_threads(path: Path, tmp_path: Path) -> None:
    """Steps leave Python's lock; two engines at once on the same processors must not share anything."""
    other_path = write_gguf(tmp_path / "other.gguf", tiny("BF16", seed=9))
    tokens = random_tokens(120)
    before = os.sched_getaffinity(0)
    with hotset.load(path, context=256) as one, hotset.load(other_path, context=256) as two:
        engines = (one, two)
        alone = [engine.logits(tokens) for engine in engines]
        with ThreadPoolExecutor(4) as pool:
            together = [pool.submit(engines[i % 2].logits, tokens) for i in range(12)]
            assert all(same_bits(job.result(), alone[i % 2]) for i, job in enumerate(together))
    # A team pins the thread that calls it only while it works.
    assert os.sched_getaffinity(0) == before


def test_a_closed_engine_says_so(path: Path) -> None:
    with hotset.load(path, context=256) as engine:
        request = engine.submit("abc", Sampling(max_tokens=50, **DRAW))
        next(request)
    *_, last = request
    assert last.finish_reason == "cancelled"
    for use in (lambda: engine.generate("abc"), lambda: engine.logits([1]), lambda: engine.submit("abc")):
        with pytest.raises(RequestError, match="closed"):
            use()
    engine.close()


# ---- options -------------------------------------------------------------------------------------------------


def test_options_are_honoured(path: Path) -> None:
    """The plan of the engine shows them, and so does what it does."""
    with hotset.load(path, threads=1, context=300, prefill_chunk=7, max_sequences=2, prefix_tokens=512) as engine:
        plan = engine.plan
        assert (plan.num_threads, plan.context, plan.prefill_chunk, plan.max_sequences) == (1, 300, 7, 2)
        assert plan.num_blocks == 2 * 2 + 2 and engine.max_context == 300
        assert answer(engine, random_tokens(50).tolist(), Sampling(max_tokens=1)).finish_reason in ("length", "stop")
        assert engine.stats().num_steps == 8  # ceil(50 / 7) chunks


def test_the_format_of_the_cache_is_an_option(path: Path) -> None:
    """BF16 is the default beside rounded weights; F16 rounds otherwise, so other bits show that it is honoured."""
    tokens = random_tokens(40)
    logits = {}
    for cache_format in (None, "BF16", "F16"):
        with hotset.load(path, context=256, cache_format=cache_format) as engine:  # type: ignore[arg-type]
            logits[cache_format] = engine.logits(tokens)
    assert same_bits(logits[None], logits["BF16"]) and not same_bits(logits[None], logits["F16"])
    with pytest.raises(RequestError, match="cache format 'F32', expected one of BF16, F16"):
        hotset.load(path, cache_format="F32")  # type: ignore[arg-type]


def test_unknown_options_are_refused_by_name(path: Path) -> None:
    with pytest.raises(TypeError, match="contxt"):
        hotset.load(path, contxt=512)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature"):
        Sampling(temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        hotset.lod  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 4097}, "context 4097 is more than the 4096 tokens"),
        ({"context": 0}, "context is 0, expected at least 1"),
        ({"max_sequences": 0}, "max_sequences is 0, expected at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0, expected at least 1"),
        ({"threads": 4096}, "4096 threads asked for"),
        ({"threads": -1}, "-1 threads asked for"),
        ({"threads": 0}, "threads"),
        ({"prefix_tokens": -1}, "prefix_tokens"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(path: Path, options: dict[str, int], message: str) -> None:
    """Guards against a zero that is taken for "not given"."""
    with pytest.raises(RequestError) as error:
        hotset.load(path, **options).close()  # type: ignore[arg-type]
    assert message in error.value.message


def test_models_that_are_not_there_or_not_whole(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no-such-model"):
        hotset.load("no-such-model")
    short = tmp_path / "short.gguf"
    short.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"short\.gguf"):
        hotset.load(short)


def test_a_run_that_does_not_fit_allocates_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the largest term before the executor is made, so before the first large allocation."""

    class NoMemory:
        available_bytes = 1 << 20
        source = "a small cgroup"

    def refuse(*_: object) -> None:
        raise AssertionError("the executor was made")

    seen: list[Plan] = []
    monkeypatch.setattr("hotset.api.read_memory", NoMemory)
    monkeypatch.setattr("hotset.api.NativeExecutor", refuse)
    with pytest.raises(MachineError, match=r"1\.00 MiB are available \(a small cgroup\); the largest term is reserve"):
        hotset.load(path, on_plan=seen.append)
    assert seen == []


def test_the_plan_comes_before_the_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """on_plan once, before any progress; progress once per tensor."""
    log: list[object] = []
    with hotset.load(
        path, context=256, on_plan=log.append, progress=lambda name, num_bytes: log.append((name, num_bytes))
    ) as engine:
        assert log[0] is engine.plan and len(log) == 1 + len(describe_model(path).account.loaded)
        assert all(isinstance(entry, tuple) and entry[1] > 0 for entry in log[1:])
    with describe_model(path).checkpoint as checkpoint:
        assert checkpoint.tensors.keys() == {entry[0] for entry in log[1:]}


def test_the_plan_without_loading_is_the_plan_of_the_engine(path: Path) -> None:
    """`hotset plan` and a run cannot disagree."""
    d = describe_model(path)
    with d.checkpoint, hotset.load(path, context=400, max_sequences=2) as engine:
        planned = plan_model(d, Wish(context=400, max_sequences=2))
        assert planned.terms == engine.plan.terms and planned.decode_bytes == engine.plan.decode_bytes


@pytest.mark.parametrize("isa", available_isas())
def test_the_kernel_set_of_the_environment_is_used(isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 products round differently in two kernel sets, so the bits tell which one ran."""
    monkeypatch.setenv("HOTSET_ISA", isa)
    d = described(tmp_path, Tiny("BF16"))
    tokens = random_tokens(40)
    with d.checkpoint, hotset.load(d.checkpoint.files[0], context=256) as engine:
        assert same_bits(engine.logits(tokens), run(native(d, 1, isa), tokens))


def test_a_kernel_set_that_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "neon" if "neon" not in available_isas() else "avx2"
    monkeypatch.setenv("HOTSET_ISA", missing)
    with pytest.raises(MachineError, match=f"HOTSET_ISA={missing} cannot run here"):
        hotset.load(path, context=256)


def test_importing_hotset_loads_nothing_heavy() -> None:
    """Names are found on first use, so that `import hotset` is quick and has no side effects."""
    code = "import sys, hotset; print(*sorted(m for m in sys.modules if '.' not in m)); hotset.Sampling"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"numpy", "tokenizers", "jinja2", "huggingface_hub", "rich", "click"}
    assert not heavy & set(done.stdout.split())
