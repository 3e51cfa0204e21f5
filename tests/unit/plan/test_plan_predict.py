"""The prediction against times worked out on paper, for machines of round numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from hotset.checkpoint.manifest import declared_formats
from hotset.errors import MachineError
from hotset.machine.presets import read_preset
from hotset.machine.profile import Consumer, Memory, Path, Profile
from hotset.plan.cards import describe_config, read_card
from hotset.plan.expect import draft_depths, expect, tokens_per_step
from hotset.plan.homes import Homes, Share, default_homes, even_shares, module_of
from hotset.plan.predict import COMPUTE_SHARE, READ_SHARE, Prediction, Step, Work, count_ops, model_step, predict_step
from hotset.program.classes import class_bytes
from hotset.program.cost import decode_bytes

#: Two modules of a CPU and a GPU. A CPU reads its own memory at 100 GB/s and the other's at 20, a GPU its own at 1,000,
#: its CPU's at 200, the other GPU's at 50.
MACHINE = Profile(
    "two",
    "",
    "",
    (
        Memory("node0", "ddr", 400 * 10**9, 1.0, 0),
        Memory("node1", "ddr", 400 * 10**9, 1.0, 1),
        Memory("hbm0", "hbm", 100 * 10**9, 1.0),
        Memory("hbm1", "hbm", 100 * 10**9, 1.0),
    ),
    (
        Consumer("cpu0", "cpu", "node0", 8, {"bf16": 1e12}, 2e-6),
        Consumer("cpu1", "cpu", "node1", 8, {"bf16": 1e12}, 3e-6),
        Consumer("gpu0", "gpu", "hbm0", 100, {}, 1e-6),
        Consumer("gpu1", "gpu", "hbm1", 100, {}, 1e-6),
    ),
    (
        Path("cpu0", "node0", 100e9),
        Path("cpu1", "node1", 100e9),
        Path("cpu0", "node1", 20e9, latency_s=5e-6),
        Path("cpu1", "node0", 20e9, latency_s=5e-6),
        Path("gpu0", "hbm0", 1000e9),
        Path("gpu1", "hbm1", 1000e9),
        Path("gpu0", "node0", 200e9),
        Path("gpu1", "node1", 200e9),
        Path("gpu0", "hbm1", 50e9, latency_s=1e-4),
        Path("gpu1", "hbm0", 50e9, latency_s=1e-4),
    ),
)
CPU = READ_SHARE["cpu"]


def homes(*shares: Share) -> Homes:
    return Homes("test", shares, shares, shares, shares)


def step(num_bytes: float, num_ops: float = 0.0, *, ops: int = 0, joins: int = 0, join_bytes: float = 0.0) -> Step:
    return Step(Counter({Work("linear", "dense", num_bytes, num_ops, ("bf16", "f32")): 1}), ops, joins, join_bytes)


def seconds(part: Step, *shares: Share) -> float:
    return predict_step(part, MACHINE, homes(*shares)).seconds


ONE = Share("node0", 1.0, "cpu0")


def test_reading_or_computing_whichever_is_longer() -> None:
    """10 GB at 94 GB/s, or 55 G operations at 550 G/s."""
    read = 10e9 / (100e9 * CPU)
    assert seconds(step(10e9), ONE) == pytest.approx(read)
    assert seconds(step(10e9, 5e9), ONE) == pytest.approx(read)
    assert seconds(step(10e9, 1e12), ONE) == pytest.approx(1e12 / (1e12 * COMPUTE_SHARE))
    result = predict_step(step(10e9, 1e12), MACHINE, homes(ONE))
    assert [(part.name, part.bound) for part in result.classes if part.seconds] == [("linear", "cpu0 bf16")]


def test_consumers_work_at_once_and_memories_of_one_after_another() -> None:
    read = 10e9 / (100e9 * CPU)
    assert seconds(step(10e9), Share("node0", 0.5, "cpu0"), Share("node1", 0.5, "cpu1")) == pytest.approx(read / 2)
    mixed = seconds(step(10e9), Share("hbm0", 0.75, "gpu0"), Share("node0", 0.25, "gpu0"))
    assert mixed == pytest.approx(7.5e9 / 1000e9 + 2.5e9 / 200e9)


def test_what_crosses_between_modules_shares_one_bridge() -> None:
    """Interleaved over both nodes: 5 of 10 GB cross, half in either direction, over one way (255 GB/s measured)."""
    pairs = (("node0", "cpu0"), ("node1", "cpu0"), ("node0", "cpu1"), ("node1", "cpu1"))
    result = predict_step(step(10e9), MACHINE, homes(*even_shares(pairs)))
    assert result.seconds == pytest.approx(5e9 / (20e9 * CPU))
    assert result.classes[0].bound == "bridge"
    assert result.path_bytes == {f"{consumer} from {memory}": 2.5e9 for memory, consumer in pairs}


def test_a_gpu_belongs_to_the_cpu_whose_memory_it_reads_fastest() -> None:
    assert [module_of(MACHINE, memory.name) for memory in MACHINE.memories] == ["node0", "node1", "node0", "node1"]
    spark = read_preset("dgx-spark")
    assert module_of(spark, "unified") == "unified"


def test_every_op_costs_something_and_exchanges_are_between_modules() -> None:
    """The slowest team's cost for each op; an exchange takes its latency and its bytes, and one module has none."""
    assert seconds(step(0, ops=1000), ONE) == pytest.approx(1000 * 2e-6)
    both = Share("node0", 0.5, "cpu0"), Share("node1", 0.5, "cpu1")
    assert seconds(step(0, ops=1000), *both) == pytest.approx(1000 * 3e-6)
    assert seconds(step(0, joins=10, join_bytes=2e5), *both) == pytest.approx(10 * (5e-6 + 1e-5))
    beside = Share("hbm0", 0.5, "gpu0"), Share("node0", 0.5, "cpu0")
    assert seconds(step(0, joins=10, join_bytes=2e5), *beside) == 0.0


def test_what_nobody_published_is_said() -> None:
    silent = replace(MACHINE, consumers=tuple(replace(c, step_s=None, rates={}) for c in MACHINE.consumers))
    result = predict_step(step(1e9, 1e9, ops=5), silent, homes(ONE))
    assert result.unknown == ("rate of bf16 or f32 (cpu)", "fixed cost of an op (cpu)")
    with pytest.raises(MachineError, match="nobody measured on two how fast gpu0 reads node1"):
        seconds(step(1e9), Share("node1", 1.0, "gpu0"))


def test_default_homes_follow_what_fits() -> None:
    """All in the GPUs' memory; experts that are left over in the memory beside each; over the nodes without a GPU."""
    small = default_homes(MACHINE, {"dense": 10**9, "experts": 10**9, "sparse": 0})
    assert small.name == "rows split over hbm0, hbm1" and small.consumers == ("gpu0", "gpu1")
    assert small.dense == even_shares((("hbm0", "gpu0"), ("hbm1", "gpu1")))
    assert sum(share.share for share in small.cache) == 2.0
    large = default_homes(MACHINE, {"dense": 80 * 10**9, "experts": 240 * 10**9, "sparse": 0})
    assert large.name == "rows split over hbm0, hbm1, 50% of the experts in node0, node1"
    assert {(share.memory, share.consumer): share.share for share in large.experts} == {
        ("hbm0", "gpu0"): 0.25, ("hbm1", "gpu1"): 0.25, ("node0", "gpu0"): 0.25, ("node1", "gpu1"): 0.25,
    }  # fmt: skip
    cpus = replace(MACHINE, consumers=MACHINE.consumers[:2], paths=MACHINE.paths[:4])
    assert default_homes(cpus, {"dense": 1, "experts": 1, "sparse": 0}).name == "rows split over node0, node1"
    alone = replace(MACHINE, consumers=MACHINE.consumers[2:], paths=MACHINE.paths[4:6])
    with pytest.raises(MachineError, match="no room for this model in hbm0, hbm1"):
        default_homes(alone, {"dense": 0, "experts": 300 * 10**9, "sparse": 0})


def test_a_model_reads_what_its_costs_say() -> None:
    """Bytes by path are those of the plan, and rows of a step share all weights but experts."""
    spec = describe_config("mini", read_card("deepseek-v4-mini").config)
    formats = declared_formats(spec.tensors)
    machine = replace(MACHINE, consumers=MACHINE.consumers[:1], paths=MACHINE.paths[:1])
    where = default_homes(machine, class_bytes(spec.program, formats))
    num_ops = count_ops(spec, formats)
    one = predict_step(model_step(spec, formats, num_ops, context=300), machine, where)
    assert one.num_bytes == decode_bytes(spec.program, formats, 300)
    two = predict_step(model_step(spec, formats, num_ops, context=300, num_sequences=2), machine, where)
    assert one.class_seconds("head") == pytest.approx(two.class_seconds("head"))
    assert two.class_seconds("experts") == pytest.approx(one.class_seconds("experts") * (2 - 6 / 32), rel=1e-3)
    assert two.tokens_per_s > one.tokens_per_s


def test_drafts_gain_only_where_their_bytes_allow_it() -> None:
    """k drafts accepted with a each yield 1 + a + ... + a^k tokens, and cost a step of k + 1 rows and k drafts."""

    def entry(total: float) -> Prediction:
        parts = predict_step(step(total * 100e9 * CPU), MACHINE, homes(ONE))
        return replace(parts, classes=(replace(parts.classes[0], name="head", seconds=0.0), *parts.classes))

    depths = draft_depths([entry(1.0), entry(1.5), entry(1.8), entry(4.5)], 10)
    assert [depth.ratio for depth in depths] == pytest.approx([1.5, 1.8, 4.5])
    assert [depth.draft_ratio for depth in depths] == pytest.approx([0.1, 0.2, 0.3])
    assert depths[0].acceptance == pytest.approx(0.6)
    assert depths[1].acceptance is not None and tokens_per_step(2, depths[1].acceptance) == pytest.approx(2.0)
    assert depths[2].acceptance is None


def test_glm_drafts_as_the_specification_counts_them() -> None:
    """specs/glm_5_2.md section 5: 2 rows read 59.0 of 38.5 GiB, 4 rows 98.0; FP8 on a machine that only reads."""
    spec = describe_config("glm", read_card("glm-5.2").config)
    formats = declared_formats(spec.tensors)
    consumer = replace(MACHINE.consumers[0], rates={}, step_s=None)
    machine = replace(MACHINE, consumers=(consumer,), paths=MACHINE.paths[:1])
    drafts = expect(spec, formats, machine, [1], 512).drafts
    assert [drafts[0].ratio, drafts[2].ratio] == pytest.approx([59.0 / 38.5, 98.0 / 38.5], rel=0.01)
