"""The option ``--record`` of the verbs that run a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from hotset.engine.engine import Engine

NUM_SAMPLES = 16
"""Steps that are timed op by op for a record."""
_Command = TypeVar("_Command", bound=Callable[..., Any])


def _check(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a place that cannot be written before the model is loaded."""
    from hotset.audit.record import check_writable

    if value is not None:
        check_writable(value)
    return value


def record_option(command: _Command) -> _Command:
    """Add ``--record FILE``."""
    return click.option(
        "--record",
        "record_path",
        type=click.Path(path_type=Path),
        callback=_check,
        metavar="FILE",
        help="Write the run record, for hotset audit: after loading, and again at the end.",
    )(command)


@contextmanager
def recording(engine: Engine, path: Path | None) -> Iterator[None]:
    """Write the run record to ``path`` now, so that the run can be audited while it lives, and again at the end."""
    if path is None:
        yield
        return
    from hotset.audit.record import write_record

    engine.request_samples(NUM_SAMPLES)
    write_record(engine.record(), path)
    try:
        yield
    finally:
        write_record(engine.record(), path)
