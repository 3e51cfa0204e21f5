"""Help texts that could lie: defaults that live elsewhere, and the page that is made of them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import click
import pytest

from hotset.cli.main import cli
from hotset.cli.run import SAMPLING_FIELDS
from hotset.engine.sampling import Sampling
from hotset.plan.budget import DEFAULT_CONTEXT, DEFAULT_SEQUENCES

SCRIPT = Path(__file__).parents[3] / "scripts" / "gen_cli_docs.py"


def option_help(verb: str, name: str) -> str:
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return next(param.help or "" for param in command.params if isinstance(param, click.Option) and param.name == name)


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_sampling_defaults_in_help_are_those_of_the_api(name: str) -> None:
    default = {field.name: field.default for field in fields(Sampling)}[name]
    stated = re.search(r"\[default: ([^\]]+)\]", option_help("run", name))
    assert stated is not None
    if default is not None:
        assert float(stated.group(1)) == default


def test_every_sampling_field_has_an_option() -> None:
    """A field without its option cannot be reached from the command line, and nobody notices."""
    assert {field.name for field in fields(Sampling)} == {*SAMPLING_FIELDS, "stop", "ignore_eos"}


def test_plan_defaults_in_help_are_those_of_the_planner() -> None:
    assert f"at most {DEFAULT_CONTEXT}]" in option_help("plan", "context")
    assert f"at most {DEFAULT_CONTEXT}]" in option_help("run", "context")
    assert f"[default: {DEFAULT_SEQUENCES}]" in option_help("plan", "sequences")


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_cli_docs", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_help_says(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/reference/cli.md is stale: run python scripts/gen_cli_docs.py."""
    assert script.main(["--check"]) == 0, capsys.readouterr().err


def test_a_stale_page_is_found(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "docs" / "cli.md")
    assert script.main(["--check"]) == 1
    assert script.main([]) == 0
    assert script.main(["--check"]) == 0
    script.PAGE.write_text(script.PAGE.read_text().replace("--threads", "--treads", 1))
    assert script.main(["--check"]) == 1
    assert "run: python scripts/gen_cli_docs.py" in capsys.readouterr().err


def test_the_page_does_not_depend_on_the_terminal(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = script.page()
    monkeypatch.setenv("COLUMNS", "40")
    assert script.page() == before
