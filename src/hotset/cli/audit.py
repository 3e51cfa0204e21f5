"""``hotset audit``: what was planned beside what is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hotset.errors import MachineError, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hotset.audit.checks import Line
    from hotset.audit.observe import Observed
    from hotset.audit.record import RunRecord


def _names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Check the names of lines."""
    from hotset.audit.checks import LINE_NAMES

    for value in values:
        if value not in LINE_NAMES:
            raise click.BadParameter(f"{value!r} is none of {', '.join(LINE_NAMES)}", ctx, param)
    return values


@click.command(name="audit")
@click.argument("target", metavar="RECORD|PID|URL")
@click.option("--ignore", callback=_names, multiple=True, metavar="LINE",
              help="Do not count a red LINE; may be given several times.")  # fmt: skip
@click.option("--html", "html_path", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write a report with the memory map.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the lines as JSON.")
def command(target: str, ignore: tuple[str, ...], html_path: Path | None, as_json: bool) -> None:
    """Hold a run against its plan: where its pages lie, where its threads run, how fast it reads.

    RECORD is what --record of run or bench wrote, PID the number of a process that was started with it, URL an
    http://127.0.0.1 address that answers with a record. While the process lives it is looked at; afterwards the record
    has to do, and what it cannot tell is grey.

    The exit code is 0 when no line is red, and 3 otherwise.

    \b
    hotset run smollm2-135m "What is a hot set?" --record run.json
    hotset audit run.json --html run.html
    """
    from hotset.audit import checks
    from hotset.audit.fetch import find_record
    from hotset.audit.observe import observe
    from hotset.machine.measured import read_measured

    record = find_record(target)
    profile = read_measured()
    seen = observe(record, profile.id if profile is not None else None)
    lines = checks.ignore(checks.audit(record, seen), ignore)
    if html_path is not None:
        _write_html(html_path, record, seen, lines)
    click.echo(json.dumps(_json(record, seen, lines), indent=2) if as_json else "\n".join(_text(record, seen, lines)))
    red = [line.name for line in lines if line.state == "red"]
    if red:
        raise MachineError(f"{len(red)} of {len(lines)} lines red: {', '.join(red)}")


def _json(record: RunRecord, seen: Observed, lines: Sequence[Line]) -> dict[str, object]:
    return {
        "model": record.plan.model,
        "process": asdict(record.process),
        "is_live": seen.ended is None,
        "ended": seen.ended,
        "time": seen.moment.time,
        "lines": [asdict(line) for line in lines],
    }


def _text(record: RunRecord, seen: Observed, lines: Sequence[Line]) -> list[str]:
    width = max(len(line.name) for line in lines)
    out = [f"{record.plan.model}, hotset {record.hotset}, {record.isa}, started {record.started}"]
    if seen.ended is None:
        out.append(f"process {record.process.pid}, seen {seen.moment.time}")
    else:
        out.append(f"{seen.ended}; as recorded {seen.moment.time}")
    for line in lines:
        out.append(f"{line.state:5}  {line.name.ljust(width)}  {line.found}")
        indent = " " * (width + 9)
        if line.state != "green":
            out.append(f"{indent}expected: {line.expected}")
        if line.hint:
            out.append(f"{indent}hint: {line.hint}")
    return out


def _write_html(path: Path, record: RunRecord, seen: Observed, lines: Sequence[Line]) -> None:
    from hotset.audit.report import html_report

    try:
        path.write_text(html_report(record, seen, lines), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}", "choose another place") from None
