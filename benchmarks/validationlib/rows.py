"""The published measurements: machine, model, placement, and what came out. Numbers are quoted, never fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from hotset.checkpoint.manifest import declared_formats
from hotset.machine.presets import read_preset
from hotset.models.spec import with_cache_format
from hotset.plan.cards import describe_config, read_card
from hotset.plan.expect import draft_depths
from hotset.plan.homes import Homes, Share, even_shares
from hotset.plan.predict import READ_SHARE, Prediction, Step, count_ops, model_step, predict_step
from validationlib import plain
from validationlib.plain import Plain

PART1 = "dnhkng.github.io 2026-04-25"
PART2 = "dnhkng.github.io 2026-06-08"
PART3 = "dnhkng.github.io 2026-06-17"
SPARK = "ggml-org/llama.cpp benches/dgx-spark.md, 2f68ce7cf"
VISOR = "visorcraft/strix-halo-llm-perf BENCHMARKS.md, 120 W"
LHL = "lhl/strix-halo-testing llm-bench"

GPUS = (("hbm0", "gpu0"), ("hbm1", "gpu1"))
HOSTS = (("node0", "gpu0"), ("node1", "gpu1"))
AWAY = (("node1", "gpu0"), ("node0", "gpu1"))
STAGED = (("hbm1", "gpu0"), ("hbm0", "gpu1"))
CPUS = (("node0", "cpu0"), ("node1", "cpu1"))


@dataclass(frozen=True)
class Row:
    """One measurement. ``predict`` returns tokens per second (or GB/s) and the bytes behind them in words."""

    machine: str
    what: str
    how: str
    published: float
    predict: Callable[[], tuple[float, str]]
    source: str
    note: str = ""
    is_derived: bool = False
    """A number of the preset was derived from this very row, which therefore proves nothing."""


def gpu_homes(name: str, outside: float, pairs: tuple[tuple[str, str], ...] = HOSTS) -> Homes:
    """Two GPUs: everything in their own memory but ``outside`` of the experts, which ``pairs`` read from elsewhere."""
    own = even_shares(GPUS)
    experts = (*even_shares(GPUS, 1.0 - outside), *even_shares(pairs, outside)) if outside < 1.0 else even_shares(pairs)
    return Homes(name, own, experts, own, tuple(Share(memory, 1.0, consumer) for memory, consumer in GPUS))


def cpu_homes(name: str, pairs: tuple[tuple[str, str], ...]) -> Homes:
    """CPUs alone."""
    own = even_shares(pairs)
    return Homes(name, own, own, own, own)


@cache
def card_step(
    card: str, form: str | None, context: int, num_tokens: int = 1, num_sequences: int = 1
) -> tuple[Step, int]:
    """The step of a model that hotset declares, and its layers."""
    spec = describe_config(card, read_card(card).config)
    formats = declared_formats(spec.tensors)
    spec = with_cache_format(spec, formats, form)
    step = model_step(
        spec, formats, count_ops(spec, formats), context=context, num_tokens=num_tokens, num_sequences=num_sequences
    )
    return step, spec.num_layers


def said(prediction: Prediction) -> str:
    """Bytes of a step by path."""
    parts = [
        f"{num_bytes / 1e9:,.2f} GB {path}" for path, num_bytes in prediction.path_bytes.items() if num_bytes > 5e6
    ]
    return ", ".join(parts)


def card_row(
    card: str, homes: Homes, context: int, *, drafts: int = 0, accepted: float = 0.0, num_sequences: int = 1
) -> Callable[[], tuple[float, str]]:
    """Decode on the dual GH200: ``accepted`` of ``drafts`` drafted tokens on average."""

    def predict() -> tuple[float, str]:
        profile = read_preset("dual-gh200")
        steps = [
            predict_step(card_step(card, None, context, 1 + n, num_sequences)[0], profile, homes) for n in {0, drafts}
        ]
        if not drafts:
            return steps[0].tokens_per_s, said(steps[0])
        depth = draft_depths([steps[0], *[steps[-1]] * drafts], card_step(card, None, context)[1])[-1]
        seconds = (depth.ratio + depth.draft_ratio) * steps[0].seconds
        return num_sequences * (1 + drafts * accepted) / seconds, said(steps[-1])

    return predict


def plain_row(
    machine: str, model: Plain, homes: Homes, context: int, num_sequences: int = 1
) -> Callable[[], tuple[float, str]]:
    """Decode of a model that is byte counts."""

    def predict() -> tuple[float, str]:
        result = predict_step(model.step(context, 1, num_sequences), read_preset(machine), homes)
        return result.tokens_per_s, said(result)

    return predict


def stream_row() -> tuple[float, str]:
    """Half of what each CPU reads lies on the other node; both read at once."""
    pairs = (*CPUS, ("node1", "cpu0"), ("node0", "cpu1"))
    model = replace(plain.TINYLLAMA, dense_bytes=1e12, cache_bytes_per_token=0.0)
    result = predict_step(
        replace(model.step(0), num_joins=0), read_preset("dual-gh200"), cpu_homes("interleaved", pairs)
    )
    # The share is of a step's reading; STREAM is what bandwidths are measured with.
    return 1e3 / result.seconds / READ_SHARE["cpu"], "of every 4 bytes 2 cross between the modules"


def _spark(
    model: Plain, context: int, published: float, num_sequences: int = 1, *, derived: bool = False, note: str = ""
) -> Row:
    homes = cpu_homes("GPU", (("unified", "gpu0"),))
    together = f", {num_sequences} sequences" if num_sequences > 1 else ""
    return Row(
        "dgx-spark", model.name, f"llama.cpp, decode at {context:,}{together}", published,
        plain_row("dgx-spark", model, homes, context, num_sequences), SPARK, note, derived,
    )  # fmt: skip


def _strix(model: Plain, published: float, source: str = VISOR, *, derived: bool = False) -> Row:
    homes = cpu_homes("GPU", (("unified", "gpu0"),))
    return Row(
        "strix-halo", model.name, "llama.cpp, 128 new tokens", published,
        plain_row("strix-halo", model, homes, 64), source, is_derived=derived,
    )  # fmt: skip


FP8, INT4, FLASH, PRO = "glm-5.2", "glm-5.2-int4", "deepseek-v4-flash", "deepseek-v4-pro"
_EXPERTS = {FP8: 675.2, INT4: 390.2}
"""GiB of 75 layers' experts (specs/glm_5_2.md section 6)."""


def offloaded(card: str, gib_per_rank: float) -> Homes:
    """What vLLM's expert offload leaves: so many GiB of the experts of each rank in the memory of its own CPU."""
    return gpu_homes(f"{gib_per_rank:.0f} GiB of experts a rank in its own Grace", 2 * gib_per_rank / _EXPERTS[card])


def _glm(
    card: str, offload: float, how: str, context: int, published: float, note: str = "", *, drafts: int = 0,
    accepted: float = 0.0, num_sequences: int = 1,
) -> Row:  # fmt: skip
    name = {FP8: "GLM-5.2 FP8", INT4: "GLM-5.2 INT4"}[card]
    predict = card_row(
        card, offloaded(card, offload), context, drafts=drafts, accepted=accepted, num_sequences=num_sequences
    )
    return Row(
        "dual-gh200",
        name,
        f"vLLM TP 2, strict local, {offload:.0f} GiB a rank in Grace, {how}",
        published,
        predict,
        PART3,
        note,
    )


CROSSING = gpu_homes("routed experts cross between the modules", 1.0, STAGED)
_DRAFT_NOTE = "a draft pass took 1.6 ms there, of which 0.15 ms are bytes"
_MANY_ROWS = (
    "four rows read 34.6 GB of experts a GPU, 92 ms as a copy (377 GB/s); a kernel that reads pinned memory got 328 to "
    "339 (104 ms), and the published step took about 150 to 170 ms"
)
_SAME_TEXT = (
    "uniform routing has 8 rows choose 28.5 of 128 experts; the published step leaves room for 11.9 GB, 20 experts: "
    "the 8 sequences are of one prompt"
)
_REST = "the other engine's time is not in the bytes: "

ROWS: tuple[Row, ...] = (
    Row("dual-gh200", "STREAM triad, GB/s", "both CPUs, memory interleaved", 255.0, stream_row, PART1),
    Row(
        "dual-gh200", "DeepSeek-V4-Flash", "vLLM TP 2, all in HBM, no drafts", 92.9,
        card_row(FLASH, gpu_homes("HBM", 0.0), 8192), "specs/reference_systems.md", is_derived=True,
    ),
    Row(
        "dual-gh200", "GLM-5.2 FP8", "vLLM TP 2, default placement", 2.39, card_row(FP8, CROSSING, 512), PART3,
        "the placement was not recorded; assumed, as its author does: every routed byte crosses by the staged path",
    ),
    _glm(FP8, 300, "256 -> 512", 512, 19.33),
    _glm(FP8, 270, "256 -> 512", 512, 20.31),
    _glm(FP8, 270, "4 x 256 -> 512", 512, 23.63, _MANY_ROWS, num_sequences=4),
    _glm(FP8, 270, "2048 -> 512, 3 drafts, 93.6 % accepted", 2304, 25.66, _MANY_ROWS, drafts=3, accepted=0.936),
    _glm(INT4, 170, "256 -> 512", 512, 25.15),
    _glm(INT4, 170, "2048 -> 512", 2304, 24.03),
    _glm(INT4, 170, "2048 -> 512, 3 drafts, 91.5 % accepted", 2304, 43.39, drafts=3, accepted=0.915),
    _glm(INT4, 170, "four real prompts, 3 drafts, 62.7 % accepted", 1024, 35.44, drafts=3, accepted=0.627),
    _glm(
        INT4, 170, "4 x 2048 -> 512, 3 drafts, 77.4 % accepted", 2304, 54.92, drafts=3, accepted=0.774, num_sequences=4
    ),
    Row(
        "dual-gh200", "DeepSeek-V4-Flash", "vLLM TP 2, 1 draft, 90.8 % accepted", 152.7,
        card_row(FLASH, gpu_homes("HBM", 0.0), 8192, drafts=1, accepted=0.908), PART2, _DRAFT_NOTE,
    ),
    Row(
        "dual-gh200", "DeepSeek-V4-Flash", "vLLM TP 2, 3 drafts, 71.1 % accepted", 193.0,
        card_row(FLASH, gpu_homes("HBM", 0.0), 8192, drafts=3, accepted=0.711), PART2, _DRAFT_NOTE,
    ),
    Row(
        "dual-gh200", "DeepSeek-V4-Pro", "vLLM TP 2, experts in Grace, 62.61 ms a token", 1000 / 62.61,
        card_row(PRO, gpu_homes("experts in the own Grace", 1.0), 4096), PART2,
        "where the pages lay was not recorded; each GPU read 6.4 GB of experts in about 46 ms, 140 GB/s, which is what "
        "it reads the other Grace at (133)",
    ),
    Row(
        "dual-gh200", "GLM-5.2 UD-IQ2_XXS", "llama.cpp, 72 threads, node 1 alone", 4.30,
        plain_row("dual-gh200", plain.GLM_IQ2, cpu_homes("node 1", (CPUS[1],)), 256), PART3,
        _REST + "25.5 GB a token at 4.30 tok/s are 110 of 348 GB/s: its codebook kernels, and attention without "
        "the indexer",
    ),
    Row(
        "xeon-6430-2s", "GLM-5.2 int4", "colibri, both sockets, drafts on", 5.42,
        plain_row("xeon-6430-2s", plain.GLM_COLIBRI, cpu_homes("rows over both", CPUS), 256), "JustVugg/colibri#389",
        _REST + "20.5 GB a token at 5.42 tok/s are 111 of 563 GB/s; its profile has 57 % in expert products "
        "and 28 % in attention",
    ),
    _spark(plain.GEMMA3_4B, 16, 78.97, derived=True),
    _spark(plain.QWEN25_7B_Q8, 16, 29.30),
    _spark(plain.QWEN25_7B_Q8, 32768, 22.70),
    _spark(plain.QWEN25_7B_Q8, 528, 195.67, 8),
    _spark(plain.QWEN3_30B_Q8, 16, 60.92),
    _spark(plain.QWEN3_30B_Q8, 32768, 30.80),
    _spark(plain.GPT_OSS_20B, 16, 84.10),
    _spark(plain.GPT_OSS_120B, 16, 59.02),
    _spark(plain.GPT_OSS_120B, 528, 95.08, 4),
    _spark(plain.GPT_OSS_120B, 528, 146.65, 8, note=_SAME_TEXT),
    _strix(plain.TINYLLAMA, 249.06, derived=True),
    _strix(plain.LLAMA32_3B, 60.90),
    _strix(plain.LLAMA2_7B_Q40, 49.4, LHL),
    _strix(plain.LLAMA2_7B, 47.25),
    _strix(plain.QWEN25_7B_Q6, 36.71),
    _strix(plain.QWEN25_14B, 24.47),
    _strix(plain.QWEN3_30B_Q4, 86.07),
    _strix(plain.QWEN25_32B, 11.25),
    _strix(plain.LLAMA31_70B, 5.10),
)  # fmt: skip
