"""``hotset plan`` on a tiny checkpoint: what is printed, the exit codes, and that no weight is read."""

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
