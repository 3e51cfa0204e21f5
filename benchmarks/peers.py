"""Compare hotset with llama.cpp and OpenVINO GenAI: same files, same threads, one run. ``make bench-peers`` calls it.

    .venv/bin/python benchmarks/peers.py --quick                # SmolLM2 only, fewer repeats, table to the terminal
    .venv/bin/python benchmarks/peers.py                        # everything; writes docs/reference/peers.md and .json
    .venv/bin/python benchmarks/peers.py --v4                   # DeepSeek-V4; writes docs/reference/peers-v4.md
    .venv/bin/python benchmarks/peers.py --models smollm2-q4_0 --engines hotset llama.cpp --repeats 5

Missing environments (``.peers/``) and models (``.models/``, 12 GB in all) are made first. How things are measured:
``peerlib/protocol.py`` (what each number means) and ``peerlib/schedule.py`` (in which order).
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from peerlib import environments, machine, models, report, schedule

V4_PAGE = environments.ROOT / "docs" / "reference" / "peers-v4.md"
DEFAULT_PAGE = environments.ROOT / "docs" / "reference" / "peers.md"
MANNERS_MODEL = "smollm2-q4_0"
MANNERS_ENGINES = ("hotset", "llama.cpp")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare hotset with other engines on this machine.",
        epilog="data goes to stdout (with --json the record, else the page), talk to stderr",
    )
    parser.add_argument("--quick", action="store_true", help="SmolLM2 only, 3 repeats, no file written unless --out")
    parser.add_argument("--models", nargs="+", choices=list(models.MODELS), help="only these (default: all)")
    parser.add_argument("--v4", action="store_true", help="DeepSeek-V4 checkpoints instead, beside llama.cpp")
    parser.add_argument("--engines", nargs="+", choices=list(environments.ENGINES), help="only these (default: all)")
    parser.add_argument(
        "--repeats", type=int, help="samples of every number (default: 5, synthetic models and --quick 3)"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine (default: 2)")
    parser.add_argument("--out", type=Path, help=f"the page; the record goes beside it (default: {DEFAULT_PAGE.name})")
    parser.add_argument("--json", action="store_true", help="print the record instead of the page")
    parser.add_argument("--no-manners", action="store_true", help="leave out the test beside busy processes")
    parser.add_argument(
        "--priority", action="store_true", help="run workers in a scheduling autogroup of their own at -20 (root)"
    )
    options = parser.parse_args()
    if options.v4:
        options.models = [key for key, model in models.MODELS.items() if model.card]
    options.models = options.models or [
        key for key, model in models.MODELS.items() if not (model.card or (options.quick and model.is_synthetic))
    ]
    options.engines = options.engines or list(environments.ENGINES)
    if options.repeats is None and options.quick:
        options.repeats = 3
    if (options.repeats is not None and options.repeats < 1) or options.threads < 1:
        parser.error("--repeats and --threads take a number of at least 1")
    if options.out is None and not options.quick:
        options.out = V4_PAGE if options.v4 else DEFAULT_PAGE
    return options


def prepare(options: argparse.Namespace) -> None:
    """Make what is missing: environments first, for requantising needs llama.cpp's."""
    for name in dict.fromkeys([*options.engines, "llama.cpp"]):
        environments.ensure(environments.ENGINES[name])
    for key in options.models:
        models.ensure(models.MODELS[key])


def to_text(record: dict[str, Any]) -> str:
    """Return the record as JSON with one sample, or one list of numbers, per line."""
    return re.sub(r"\[\s+([-0-9.e+]+),\s+([-0-9.e+]+)\s+\]", r"[\1, \2]", json.dumps(record, indent=1)) + "\n"


def save(options: argparse.Namespace, record: dict[str, Any], text: str) -> None:
    """Write page and record; called after every model, so that an interrupted run leaves what it has."""
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text)
        options.out.with_suffix(".json").write_text(to_text(record))


def main() -> int:
    options = parse_arguments()
    prepare(options)
    plan = schedule.Plan(
        engines=tuple(environments.ENGINES[name] for name in options.engines),
        repeats=options.repeats,
        threads=options.threads,
        has_priority=options.priority,
    )
    started = datetime.datetime.now(datetime.UTC)
    nonce = f"{time.time_ns():x}"
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "file": (options.out or DEFAULT_PAGE).with_suffix(".json").name,
        "date": started.strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine.describe(),
        "engines": options.engines,
        "threads": options.threads,
        "has_priority": options.priority,
        "nonce": nonce,
        "results": [],
        "manners": None,
    }
    results: list[schedule.ModelResult] = []
    manners = None
    for key in options.models:
        model = models.MODELS[key]
        print(f"{model.title}:", file=sys.stderr)
        models.warm_page_cache(model)
        result = schedule.measure_model(model, plan, nonce)
        results.append(result)
        record["results"].append(report.result_record(result))
        save(options, record, report.page(record, results, manners))
    if MANNERS_MODEL in options.models and not options.no_manners:
        polite = tuple(engine for engine in plan.engines if engine.name in MANNERS_ENGINES)
        print("manners:", file=sys.stderr)
        manners = schedule.measure_manners(models.MODELS[MANNERS_MODEL], plan.only(polite), nonce)
        record["manners"] = report.result_record(manners)
    text = report.page(record, results, manners)
    save(options, record, text)
    print(to_text(record) if options.json else text, end="")
    failed = [result for result in [*results, manners] if result and result.failures]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
