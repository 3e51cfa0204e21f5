"""Talk to the person at the terminal: notes, warnings and progress, all on standard error.

Standard output carries data only, so a verb's output can be piped while its talk stays visible.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Says what is being done now; each call also counts one step as begun.
Step = Callable[[str], None]


def note(message: str) -> None:
    """Print one line of information on standard error."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Print one line that calls for an action of the user on standard error."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


@contextmanager
def progress(num_steps: int) -> Iterator[Step]:
    """Show a job of ``num_steps`` steps: a bar on a terminal, one plain line for each step otherwise."""
    if not sys.stderr.isatty():
        done = 0

        def say(label: str) -> None:
            nonlocal done
            done += 1
            note(f"[{done}/{num_steps}] {label}")

        yield say
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    # rich honours NO_COLOR and a dumb terminal by itself.
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_steps)
        begun = 0

        def show(label: str) -> None:
            nonlocal begun
            bar.update(task, description=label, completed=begun)
            begun += 1

        yield show
