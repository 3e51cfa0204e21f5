"""The frame of the command line: verbs, errors, exit codes. The text is the contract, so it is compared exactly."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import click
import pytest
from click.testing import CliRunner, Result

from hotset.cli import main as frame
from hotset.cli.main import VERBS, cli, main
from hotset.errors import CheckpointError, InternalError, MachineError, RequestError

HEAVY = ("numpy", "tokenizers", "rich", "jinja2", "huggingface_hub", "hotset.engine", "hotset._native")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def failing_verb(monkeypatch: pytest.MonkeyPatch):
    """A verb ``probe`` that raises what the test hands over."""

    def install(error: BaseException) -> None:
        @click.command(name="probe")
        def command() -> None:
            raise error

        monkeypatch.setattr("hotset.cli.probe.command", command)

    return install


def modules_after(statement: str) -> set[str]:
    """Names of the heavy modules that a fresh Python has loaded after ``statement``."""
    program = f"""
        import sys
        try:
            {statement}
        except SystemExit:
            pass
        print(*[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True)
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import hotset",
        "import sys; sys.argv = ['hotset', '--help']; from hotset.cli.main import main; main()",
        "import sys; sys.argv = ['hotset', '--version']; from hotset.cli.main import main; main()",
        "import sys; sys.argv = ['hotset', 'run', '--help']; from hotset.cli.main import main; main()",
    ],
)
def test_help_and_import_load_nothing_heavy(statement: str) -> None:
    """A second of NumPy and tokenizers before every help text."""
    assert modules_after(statement) == set()


def test_the_heavy_list_is_not_misspelt() -> None:
    """The test above passes for ever when a name in it is wrong."""
    assert modules_after(
        "import numpy, tokenizers, rich, jinja2, huggingface_hub, hotset.engine, hotset._native"
    ) == set(HEAVY)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    result = run(verb, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: cli {verb} [OPTIONS]")
    assert "--help" in result.stdout
    assert result.stderr == ""


def test_help_lists_the_verbs_in_order() -> None:
    result = run("--help")
    section = result.stdout.split("Verbs:\n")[1]
    assert [line.split()[0] for line in section.splitlines()] == list(VERBS)
    assert result.exit_code == 0


def test_no_verb_shows_help_as_talk() -> None:
    result = run()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: cli [OPTIONS]")


def test_misspelt_verb() -> None:
    result = run("porbe")
    assert result.exit_code == 2
    assert result.output == "error: no such verb: porbe\n\nhint: did you mean 'hotset probe'?\n"


def test_unknown_verb_lists_them() -> None:
    result = run("xyzzy")
    assert result.output == f"error: no such verb: xyzzy\n\nhint: the verbs are {', '.join(VERBS)}\n"


def test_misspelt_option_names_the_close_one() -> None:
    result = run("run", "model", "--max-token", "3")
    assert result.exit_code == 2
    assert result.output == "error: no such option: --max-token\n\nhint: did you mean --max-tokens?\n"


def test_unknown_option_points_to_help() -> None:
    result = run("probe", "--turbo")
    assert result.output == "error: no such option: --turbo\n\nhint: see 'cli probe --help'\n"


def test_missing_argument() -> None:
    result = run("plan")
    assert result.exit_code == 2
    assert result.output == "error: missing argument 'MODEL'\n\nhint: see 'cli plan --help'\n"


def test_value_out_of_range() -> None:
    result = run("plan", "model", "--context", "0")
    assert result.exit_code == 2
    assert result.output == (
        "error: invalid value for '--context': 0 is not in the range x>=1\n\nhint: see 'cli plan --help'\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (RequestError("no", "yes"), 2, "error: no\n\nhint: yes\n"),
        (RequestError("no"), 2, "error: no\n"),
        (MachineError("small", "a larger one"), 3, "error: small\n\nhint: a larger one\n"),
        (CheckpointError("torn"), 3, "error: torn\n"),
        (InternalError("oops"), 4, "error: oops\n"),
        (
            ValueError("two\nlines"),
            4,
            "internal error: ValueError: two lines\n\n"
            "hint: run it again as 'hotset --debug VERB ...' to see where, and report it\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line_and_an_exit_code(failing_verb, error: BaseException, code: int, output: str) -> None:
    """A traceback for a user's mistake, or exit code 1 for everything."""
    failing_verb(error)
    result = run("probe")
    assert (result.exit_code, result.stdout, result.stderr.lstrip("\n")) == (code, "", output)


def test_debug_shows_where(failing_verb) -> None:
    failing_verb(ValueError("deep"))
    result = run("--debug", "probe")
    assert result.exit_code == 4
    assert "Traceback (most recent call last)" in result.stderr and "in command" in result.stderr
    assert "internal error: ValueError: deep" in result.stderr


def test_reader_that_goes_away_is_no_error() -> None:
    """``hotset ... | head -1`` printed a BrokenPipeError and a second one at exit."""
    program = """
        import os, sys
        read, write = os.pipe()
        os.close(read)
        os.dup2(write, 1)
        sys.argv = ["hotset", "--help"]
        from hotset.cli.main import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (141, "")


def test_script_name_in_usage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hotset", "--help"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("Usage: hotset [OPTIONS] VERB [ARGS]...\n")


def test_version_says_which_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.machine.native.available_isas", lambda: ("avx512", "avx2"))
    monkeypatch.setattr("hotset.machine.native.isa_in_use", lambda: "avx2")
    result = run("version")
    assert result.exit_code == 0
    assert "kernels avx2 (available: avx512, avx2)\n" in result.stdout
    report = json.loads(run("version", "--json").stdout)
    assert report["isa"] == "avx2" and report["available_isas"] == ["avx512", "avx2"]
    assert run("--version").stdout == f"hotset {report['hotset']}\n"


def test_a_forced_instruction_set_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOTSET_ISA was ignored when it could not be had, and the wrong kernels were measured."""
    monkeypatch.setenv("HOTSET_ISA", "neon")
    monkeypatch.setattr("hotset.machine.native.native_module", lambda: type("N", (), {"isas": lambda: ["avx2"]}))
    # settings are read from the environment of the call, not of the import
    result = run("version")
    assert result.exit_code == 3
    assert (
        result.output == "error: HOTSET_ISA=neon cannot run here, this processor runs avx2\n\nhint: HOTSET_ISA=avx2\n"
    )


def test_verbs_name_real_modules() -> None:
    context = click.Context(cli)
    for verb in VERBS:
        command = cli.get_command(context, verb)
        assert command is not None and command.name == verb
    assert frame.EXIT_INTERRUPTED == 130
