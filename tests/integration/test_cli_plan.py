"""``hotset plan`` on a tiny checkpoint, on models and machines that are not here: what is printed, the exit codes, and
that no weight is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hotset.cli.main import cli
from hotset.machine.memory import MemoryState, MemoryTerm

MODEL = str(Path(__file__).parent.parent / "golden/llama/tied_f16")


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
    result = other("deepseek-v4-pro", "--machine", "dual-gh200", "--context", "1048576")
    assert result.exit_code == 3 and "does NOT fit in 92.16 GiB" in result.stdout
    assert result.stderr.startswith("error: each device of dual-gh200 needs 40")
    assert "\n\nhint: " in result.stderr


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
    assert unknown.exit_code == 2 and "\n\nhint: one of dual-gh200" in unknown.stderr
    threads = other("deepseek-v4-flash", "--machine", "dual-gh200", "--threads", "1")
    assert threads.exit_code == 2 and "--threads" in threads.stderr
