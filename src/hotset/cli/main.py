"""The command ``hotset``: finds the verb, runs it, and turns errors into one line and an exit code.

A verb's module is imported only when that verb runs, so ``hotset --help`` stays far below the time
that NumPy or a tokenizer needs to load.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

import hotset
from hotset.errors import HotsetError, InternalError

EXIT_USAGE = 2
EXIT_INTERNAL = InternalError.exit_code
#: What a shell reports for a program that was ended by Ctrl-C (128 + SIGINT).
EXIT_INTERRUPTED = 130
#: What a shell reports for a program whose reader went away (128 + SIGPIPE).
EXIT_BROKEN_PIPE = 141

#: Every verb with the line that ``hotset --help`` shows. ``cli/<verb>.py`` holds a click command named ``command``.
VERBS = {
    "run": "Ask a model one question, or chat with it.",
    "plan": "Show the memory a model needs before loading it.",
    "check": "Hold a model's files against what hotset expects.",
    "machine": "Show this machine: nodes, memory, GPUs, and settings that hurt.",
    "probe": "Measure what this machine's memory and processor can do.",
    "bench": "Measure a model's speed as a share of the machine's.",
    "audit": "Hold a run against its plan: pages, threads, speed.",
    "pull": "Fetch a model.",
    "synth": "Write a random checkpoint in a model's layout.",
    "list": "List the models that were fetched.",
    "version": "Show versions and instruction sets.",
}


@dataclass
class CliState:
    """What the global options say; the object of the root click context."""

    debug: bool = False


class HotsetGroup(click.Group):
    """The root command: verbs are loaded on use, and errors are printed as hotset prints them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"hotset.cli.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean 'hotset {close[0]}'?" if close else f"the verbs are {', '.join(VERBS)}"
            raise HintedUsageError(f"no such verb: {args[0]}", hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run the command line and exit with the code of what happened."""
        state = CliState()
        code = 0
        # click's own main is not used: it answers a closed pipe with exit code 1, as if something had failed.
        try:
            try:
                arguments = sys.argv[1:] if args is None else list(args)
                with self.make_context(prog_name or "hotset", arguments, obj=state, **extra) as context:
                    self.invoke(context)
            except click.exceptions.Exit as done:  # --help and --version
                code = done.exit_code
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader of a pipe went away (hotset list | head -1). Python would complain once more on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            code = EXIT_BROKEN_PIPE
        except (click.Abort, KeyboardInterrupt):
            code = EXIT_INTERRUPTED
        except Exception as error:
            code = report(error, debug=state.debug)
        sys.exit(code)


class HintedUsageError(click.UsageError):
    """A usage error that knows what would have worked."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def report(error: Exception, *, debug: bool) -> int:
    """Print an error as ``error: ...``, a blank line and ``hint: ...``, and return its exit code."""
    if debug and not isinstance(error, click.UsageError):
        traceback.print_exception(error)
    if isinstance(error, HotsetError):
        message, hint, code = f"error: {error.message}", error.hint, error.exit_code
    elif isinstance(error, click.UsageError):
        message, hint, code = f"error: {_usage_message(error)}", _usage_hint(error), EXIT_USAGE
    elif isinstance(error, click.ClickException):
        message, hint, code = f"error: {error.format_message()}", None, EXIT_USAGE
    else:
        message = f"internal error: {type(error).__name__}: {' '.join(str(error).split())}"
        hint, code = "run it again as 'hotset --debug VERB ...' to see where, and report it", EXIT_INTERNAL
    print(message, file=sys.stderr)
    if hint:
        print(f"\nhint: {hint}", file=sys.stderr)
    return code


def _usage_message(error: click.UsageError) -> str:
    if isinstance(error, click.NoSuchOption):
        return f"no such option: {error.option_name}"
    text = error.format_message().rstrip(".")
    return text[0].lower() + text[1:]


def _usage_hint(error: click.UsageError) -> str:
    if isinstance(error, HintedUsageError):
        return error.hint
    path = error.ctx.command_path if error.ctx else "hotset"
    if isinstance(error, click.NoSuchOption):
        names = {name.lstrip("-"): name for name in _option_names(error.ctx)} if error.ctx else {}
        close = difflib.get_close_matches(error.option_name.lstrip("-"), names, n=1)
        if close:
            return f"did you mean {names[close[0]]}?"
    return f"see '{path} --help'"


def _option_names(ctx: click.Context) -> list[str]:
    return [name for param in ctx.command.get_params(ctx) if isinstance(param, click.Option) for name in param.opts]


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"hotset {hotset.__version__}")
        ctx.exit()


@click.group(
    cls=HotsetGroup,
    invoke_without_command=True,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """hotset runs large language models at the speed of this machine's memory.

    Start with `hotset pull smollm2-135m`, then `hotset run smollm2-135m`.
    Every verb has --help, and --json where it prints results.
    """
    ctx.obj.debug = debug
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        ctx.exit(EXIT_USAGE)


def main() -> NoReturn:
    """Entry point of the ``hotset`` script."""
    cli.main(prog_name="hotset")
