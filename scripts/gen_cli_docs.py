#!/usr/bin/env python3
"""Write docs/reference/cli.md from the live ``--help`` of every verb, or check that it is up to date.

Usage: python scripts/gen_cli_docs.py [--check]

With ``--check`` nothing is written; the exit code is 1 when the file differs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from hotset.cli.main import VERBS, cli

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "cli.md"
WIDTH = 100

HEAD = """\
# Command line

<!-- Written by scripts/gen_cli_docs.py from the --help texts; do not edit. -->

Results go to standard output, everything else to standard error. With `--json` the results are one JSON value.

| exit code | meaning |
|---|---|
| 0 | done |
| 2 | your request cannot be met: an option, a prompt, a setting |
| 3 | your machine or your files do not allow it |
| 4 | a mistake in hotset; `hotset --debug VERB ...` shows where |
| 130 | ended by Ctrl-C |
| 141 | the reader of a pipe went away |

An error is one line, followed by a blank line and `hint: ...` when a value that works is known.
"""


def help_text(command: click.Command, name: str, parent: click.Context | None = None) -> str:
    """The help of a command as a terminal of fixed width shows it."""
    context = click.Context(
        command,
        parent=parent,
        info_name=name,
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        help_option_names=["-h", "--help"],
    )
    return command.get_help(context)


def page() -> str:
    """The whole page."""
    root = click.Context(cli, info_name="hotset")
    parts = [HEAD, f"```text\n{help_text(cli, 'hotset')}\n```\n"]
    for verb in VERBS:
        command = cli.get_command(root, verb)
        if command is None:
            raise SystemExit(f"no command for the verb {verb}")
        parts.append(f"## hotset {verb}\n\n```text\n{help_text(command, verb, root)}\n```\n")
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    text = page()
    if arguments == ["--check"]:
        if PAGE.exists() and PAGE.read_text() == text:
            return 0
        print(f"{PAGE} is not what --help says now; run: python scripts/gen_cli_docs.py", file=sys.stderr)
        return 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
