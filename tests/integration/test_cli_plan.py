"""``hotset plan`` on a tiny checkpoint, on models and machines that are not here: what is printed, the exit codes, and
that no weight is read."""

from __future__ import annotations

import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hotset.checkpoint.manifest import declared_formats
from hotset.cli.main import cli
from hotset.machine.measured import profile_path, write_profile
from hotset.machine.memory import MemoryState, MemoryTerm, read_memory
from hotset.machine.presets import read_preset
from hotset.machine.profile import Consumer, Memory, Profile
from hotset.machine.profile import Path as MemoryPath
from hotset.machine.topology import read_topology
from hotset.plan.budget import Wish, make_plan
from hotset.plan.cards import cut_layers, describe_config, read_card
from hotset.plan.devices import declared_bytes, plan_devices
from hotset.units import format_bytes

MACHINES = Path(__file__).parent.parent / "fixtures/machines"
MODEL = str(Path(__file__).parent.parent / "golden/llama/tied_f16")


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No measured profile but those of a test."""
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))


def measured(num_threads: int) -> Profile:
    cpu = Consumer("cpu0", "cpu", "node0", num_threads, {"f32": 1e12, "bf16": 2e12, "int8": 4e12}, 1e-6)
    path = MemoryPath("cpu0", "node0", 50e9)
    return Profile("this", "a test", "a test", (Memory("node0", "ddr", 1 << 34, 1.0),), (cpu,), (path,), measured="now")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", MODEL, *arguments])


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    state = MemoryState((MemoryTerm("memory.max of a test", 1 << 20, 1 << 20),))
    monkeypatch.setattr("hotset.api.read_memory", lambda: state)


def test_plan_is_the_wish_with_its_terms() -> None:
    result = run("--context", "32", "--sequences", "2", "--prefill-chunk", "16", "--threads", "1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "context 32, 2 sequences, prefill chunk 16, 1 threads" in result.stdout.splitlines()[0]
    report = json.loads(run("--context", "32", "--sequences", "2", "--json").stdout)
    assert (report["context"], report["max_sequences"], report["fits"]) == (32, 2, True)
    assert report["total_bytes"] == sum(term["num_bytes"] for term in report["terms"])


def test_a_plan_that_does_not_fit_is_printed_and_refused(little_memory: None) -> None:
    """The refusal came without the terms that would explain it (D001, D003)."""
    result = run("--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["fits"] is False
    assert result.stderr.startswith("error: this run needs ") and "\n\nhint: " in result.stderr
    assert "memory.max of a test" in result.stderr


def test_more_threads_than_cpus_are_refused() -> None:
    result = run("--threads", "4096")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: 4096 threads asked for, this process may use ")


def test_speed_is_expected_once_the_machine_was_measured() -> None:
    """A ceiling that was printed for any machine (or none) said nothing; without a profile one line says what to do."""
    before = run("--context", "32", "--threads", "1")
    assert before.stdout.splitlines()[-1] == (
        "layouts and expected speed: not known, `hotset probe` measures what they take"
    )
    assert "layouts on" not in before.stdout
    assert json.loads(run("--context", "32", "--threads", "1", "--json").stdout)["expected"] is None
    write_profile(measured(1), profile_path())
    lines = run("--context", "32", "--threads", "1").stdout.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("expected on this (a test; profile "))
    assert lines[start].endswith(", measured now), all in node0:")
    assert [line.split(":")[0] for line in lines[start + 1 : start + 3]] == ["  decode at 1", "  decode at 32"]
    assert any(line.startswith("  4 drafts") for line in lines)
    expected = json.loads(run("--context", "32", "--threads", "1", "--json").stdout)["expected"]
    step = expected["decode"]["32"]
    assert step["tokens_per_s"] == pytest.approx(1 / step["seconds"])
    assert sum(part["seconds"] for part in step["classes"]) == pytest.approx(step["seconds"])
    plan = json.loads(run("--context", "32", "--threads", "1", "--json").stdout)
    assert sum(step["path_bytes"].values()) == plan["decode_bytes"]["32"]


def test_the_layouts_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same table as for another machine, from the measured profile and the memory that is free."""
    write_profile(measured(2), profile_path())
    free = format_bytes(read_memory().available_bytes)[:2]
    text = run("--context", "32", "--threads", "1").stdout
    assert (
        "layouts on this, best first, for 2,048 tokens in and 512 out:\n  fixed by you: 1 threads (--threads)" in text
    )
    assert "\nall in node0: cpu0 reads it\n" in text
    content = json.loads(run("--context", "32", "--threads", "1", "--json").stdout)
    (candidate,) = content["placement"]["candidates"]
    assert content["placement"]["winner"] == candidate["layout"] == "all in node0"
    assert candidate["teams"][0]["threads"] == {"cpu0": 1} and content["cpus"] == [read_topology().affinity[0]]
    assert format_bytes(candidate["memories"][0]["usable_bytes"])[:2] == free


def two_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, latency_s: float = 1e-7) -> None:
    """A machine of two nodes with two CPUs each, as a snapshot shows it, and its profile."""
    with tarfile.open(MACHINES / "x86-gh200x2-mig-hotadd.tar.xz") as archive:
        archive.extractall(tmp_path / "machine", filter="data")
    topology = read_topology(tmp_path / "machine")
    monkeypatch.setattr("hotset.api.read_topology", lambda: topology)
    rates = {"f32": 1e12, "bf16": 2e12, "int8": 4e12}
    profile = Profile(
        "this", "a test", "a test",
        tuple(Memory(f"node{i}", "ddr", 1 << 34, 1.0, i) for i in range(2)),
        tuple(Consumer(f"cpu{i}", "cpu", f"node{i}", 2, rates, 1e-6) for i in range(2)),
        (
            *(MemoryPath(f"cpu{i}", f"node{i}", 50e9, threads=1, reads=((1, 50e9), (2, 49e9))) for i in range(2)),
            *(MemoryPath(f"cpu{i}", f"node{1 - i}", 20e9, latency_s=latency_s, threads=1) for i in range(2)),
        ),
        measured="now",
    )  # fmt: skip
    write_profile(profile, profile_path())


@pytest.mark.parametrize(
    ("options", "homes", "threads"),
    [
        ((), "rows over node0, node1", {0: 2, 1: 2}),
        (("--threads", "2"), "rows over node0, node1", {0: 1, 1: 1}),
        (("--nodes", "1"), "all in node1", {1: 2}),
        (("--nodes", "1", "--threads", "1"), "all in node1", {1: 1}),
    ],
)
def test_a_machine_of_two_nodes_has_an_expected_speed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: tuple[str, ...], homes: str, threads: dict[int, int]
) -> None:
    """Bug class: the plan's threads were compared with the cores of the whole profile, and no speed was printed."""
    two_sockets(monkeypatch, tmp_path)
    card = ("deepseek-v4-flash", "--context", "4096", "--json", *options)
    content = json.loads(other(*card).stdout)
    assert {node["node_id"]: node["num_threads"] for node in content["nodes"]} == threads
    assert content["expected"]["homes"] == homes and content["placement"] is not None
    text = other("deepseek-v4-flash", "--context", "4096", *options).stdout
    assert f"), {homes}:\n  decode at 1: " in text and "layouts on this, best first" in text
    cannot_hold = "cannot be, node1 would hold"  # 145 GiB, in a machine of 4
    assert cannot_hold in text and "by profile " in text


@pytest.mark.parametrize(
    ("latency_s", "homes", "nodes"), [(1e-8, "rows over node0, node1", [0, 1]), (1e-4, "all in node0", [0])]
)
def test_the_layout_that_won_is_the_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, latency_s: float, homes: str, nodes: list[int]
) -> None:
    """A table beside a plan that does something else. One node wins where the exchange costs more than it gains."""
    two_sockets(monkeypatch, tmp_path, latency_s)
    content = json.loads(run("--context", "32", "--json").stdout)
    first, *others = content["placement"]["candidates"]
    assert first["layout"] == content["placement"]["winner"] == content["expected"]["homes"] == homes
    assert [node["node_id"] for node in content["nodes"]] == nodes and content["cpus"] == [0, 1, 2, 3][: 2 * len(nodes)]
    assert {"rows over node0, node1", "all in node0"} <= {entry["layout"] for entry in (first, *others)}
    assert content["expected"]["decode"]["32"]["seconds"] == pytest.approx(first["decode"]["seconds"])


def test_a_profile_of_other_threads_says_nothing_about_these() -> None:
    write_profile(measured(2), profile_path())
    last = run("--threads", "1").stdout.splitlines()[-1]
    assert last.endswith("the profile is of 2 threads of node 0, the plan of 1: `hotset probe --threads 1`")
    curve = replace(measured(2), paths=(MemoryPath("cpu0", "node0", 50e9, threads=2, reads=((1, 30e9), (2, 50e9))),))
    write_profile(curve, profile_path())
    assert "expected on this (a test; " in run("--threads", "1").stdout


def test_this_machine_by_name(tmp_path: Path) -> None:
    missing = run("--machine", "this")
    assert missing.exit_code == 3 and missing.stderr.endswith("hint: hotset probe\n")
    write_profile(measured(1), tmp_path / "mine.json")
    found = run("--machine", str(tmp_path / "mine.json"), "--context", "32")
    assert found.exit_code == 0 and "expected on this (a test" in found.stdout
    write_profile(measured(1), profile_path())
    assert run("--machine", "this", "--context", "32").stdout == found.stdout
    profile_path().write_text("{}")
    damaged = run("--machine", "this")
    assert damaged.exit_code == 3 and "profile of version None, expected 1" in damaged.stderr


@pytest.mark.parametrize("machine", ["dual-gh200", "gh200", "dgx-spark", "strix-halo", "epyc-9004-2s", "xeon-6430-2s"])
def test_every_preset_has_an_expectation(machine: str) -> None:
    result = other(MODEL, "--machine", machine, "--context", "32")
    assert result.exit_code == 0, result.output
    assert f"expected on {machine} (" in result.stdout and "published figures" in result.stdout


def test_a_slice_without_compressed_layers_names_no_format() -> None:
    """The line said "0 B of  , for 1 x 8,192 tokens"."""
    spec = describe_config("slice", cut_layers(read_card("deepseek-v4-flash").config, 1))
    formats = declared_formats(spec.tensors)
    plan = make_plan(spec, formats, Wish(context=4096), 1, 1 << 40, "a test")
    assert next(term for term in plan.terms if term.name == "cache").detail == "no layer keeps rows of all tokens"
    devices = plan_devices(spec, formats, declared_bytes(spec.tensors), read_preset("dual-gh200"), Wish(context=4096))
    assert {line.rows for line in devices.caches} == {"no layer keeps rows of all tokens"}


def test_no_such_model() -> None:
    result = CliRunner().invoke(cli, ["plan", "no-such-model"])
    assert result.exit_code == 2
    assert result.output.startswith("error: ")


def other(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_a_model_that_is_not_here_on_a_machine_that_is_not_this_one() -> None:
    """Issue 3, point 9. Everything needed is in the package: no file of the model, no network."""
    result = other("deepseek-v4-flash", "--machine", "dual-gh200", "--context", "1048576")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "deepseek-v4-flash on dual-gh200: context 1,048,576, 1 sequences" in result.stdout.splitlines()[0]
    assert "each of 2 devices: 72.65 GiB" in result.stdout and "26.33 GiB" in result.stdout
    report = json.loads(other("deepseek-v4-flash", "--machine", "dual-gh200", "--json").stdout)
    assert (report["context"], report["fits"], report["num_devices"]) == (8192, True, 2)


def test_a_machine_that_is_too_small_is_planned_and_refused() -> None:
    result = other("deepseek-v4-pro", "--machine", "dgx-spark", "--context", "1048576")
    assert (
        result.exit_code == 3 and "does NOT fit in 1" in result.stdout and "cannot be, unified would" in result.stdout
    )
    assert result.stderr.startswith(
        "error: no layout fits dgx-spark; the nearest, all in unified: unified would hold 80"
    )
    assert "hint: a machine with more memory, or a smaller model" in result.stderr


def test_experts_that_gpus_have_no_room_for_lie_beside_them() -> None:
    """The devices alone are too small, the machine is not: a refusal here would be a planner that knows no LPDDR."""
    result = other("deepseek-v4-pro", "--machine", "dual-gh200", "--context", "1048576")
    assert result.exit_code == 0 and "does NOT fit in 92.16 GiB" in result.stdout
    assert (
        "GPUs, experts beside them: " in result.stdout
        and "each GPU reads them from the memory of its own" in result.stdout
    )


@pytest.mark.parametrize(
    ("options", "exit_code", "words"),
    [
        (("--nodes", "1"), 0, "fixed by you: nodes 1 only (--nodes)"),
        (("--max-hbm", "40GiB"), 0, "fixed by you: at most 40.00 GiB of the memory of each GPU (--max-hbm)"),
        (("--pin", "experts=node1", "--pin", "dense=hbm1"), 0, "fixed by you: dense in hbm1 (--pin)"),
        (("--pin", "experts=hbm0"), 3, "no layout fits dual-gh200 with experts in hbm0 (--pin); the nearest, "),
        (("--nodes", "5"), 2, "dual-gh200 has no node 5 with CPUs"),
        (("--pin", "experts=moon"), 2, "pin is 'experts=moon', expected one of dense, experts, sparse"),
        (("--max-hbm", "lots"), 2, "'lots' is not a size such as 80GiB"),
        (("--nodes", "one"), 2, "'one' is not a list of nodes such as 0,1"),
        (("--threads", "2"), 2, "is for this machine, not for another"),
    ],
)
def test_what_the_user_fixed_holds_or_is_refused(options: tuple[str, ...], exit_code: int, words: str) -> None:
    """None is ignored."""
    result = other("deepseek-v4-flash", "--machine", "dual-gh200", *options)
    assert (result.exit_code, words in result.output) == (exit_code, True), result.output


def test_what_only_another_machine_can_have_is_refused_here() -> None:
    """The engine of this machine splits rows over nodes; an option that it would not honour is an error."""
    for options in (("--pin", "experts=node1"), ("--max-hbm", "1GiB")):
        result = run(*options)
        assert result.exit_code == 2 and "is for another machine, see --machine" in result.stderr


def test_nodes_of_this_machine() -> None:
    """A node that is there, and one that is not."""
    node = read_topology().cpu_nodes[0]
    found = json.loads(run("--nodes", str(node), "--json").stdout)
    assert [entry["node_id"] for entry in found["nodes"]] == [node]
    assert sum(sum(entry["terms"].values()) for entry in found["nodes"]) == found["total_bytes"]
    missing = run("--nodes", "1023")
    assert missing.exit_code == 2 and "this machine has no NUMA node 1023" in missing.stderr


def test_a_model_that_is_not_here_on_this_machine(little_memory: None) -> None:
    """The same plan as for its files: the first tensor formats of the release, every byte of the trunk."""
    result = other("deepseek-v4-flash", "--json", "--threads", "1")
    assert result.exit_code == 3
    weights = next(term for term in json.loads(result.stdout)["terms"] if term["name"] == "weights")
    assert 145.3 < weights["num_bytes"] / 2**30 < 145.5
    assert "the largest term is weights" in result.stderr


def test_files_on_another_machine() -> None:
    """A plain model: one form of rows, no draft head, nothing to compare with a paged layout of compressed rows."""
    result = other(MODEL, "--machine", "dual-gh200", "--context", "32")
    assert result.exit_code == 0
    assert "not loaded" not in result.stdout and "paged" not in result.stdout
    assert "cache F16" in result.stdout.splitlines()[0]


def test_forms_are_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form of another family is refused with those that there are; files win over a card of the same name."""
    plain = other("deepseek-v4-flash", "--machine", "dual-gh200", "--cache-format", "F16")
    assert plain.exit_code == 2 and "expected one of FP8, FP8+FP8, BF16" in plain.stderr
    form = other("deepseek-v4-flash", "--machine", "dual-gh200", "--cache-format", "BF16")
    assert form.exit_code == 0 and "cache BF16" in form.stdout.splitlines()[0]
    monkeypatch.chdir(tmp_path)
    Path("deepseek-v4-flash").symlink_to(MODEL)
    assert "cache F16" in other("deepseek-v4-flash", "--machine", "dual-gh200", "--context", "32").stdout


def test_options_that_mean_nothing_together() -> None:
    unknown = other("deepseek-v4-flash", "--machine", "toaster")
    assert unknown.exit_code == 2 and "\n\nhint: one of this, dgx-spark, dual-gh200" in unknown.stderr
    threads = other("deepseek-v4-flash", "--machine", "dual-gh200", "--threads", "1")
    assert threads.exit_code == 2 and "--threads" in threads.stderr
