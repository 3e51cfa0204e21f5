"""Audits of living processes: a clean run is green, and every fault that is planted in one is found.

What the machine's other programs do is not part of a run: the lines about them are ignored, as a user would.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fakes import make_engine
from helpers import tiny, write_gguf

from hotset.errors import RequestError

ENVIRONMENT = ("neighbours", "memory", "cpu")
HOTSET = (sys.executable, "-c", "from hotset.cli.main import main; main()")
CHILD = """
import ctypes, mmap, os, sys
from pathlib import Path
import hotset
from hotset.audit.record import write_record

model, path, settings = sys.argv[1], Path(sys.argv[2]), eval(sys.argv[3])
engine = hotset.load(model, threads=2, **settings)

def ask(text, count=8):
    for event in engine.generate(text, hotset.Sampling(max_tokens=count, ignore_eos=True)):
        pass
    return event

def record():
    write_record(engine.record(), path)

def split(name):
    # Pages of half a region are given back, and come again as small ones.
    region = next(region for region in engine.record().regions if region.name == name)
    half = region.planned_huge_bytes // 2
    start = (region.address + region.num_bytes - half) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    for advice in (15, 4):  # MADV_NOHUGEPAGE, MADV_DONTNEED
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(half), advice):
            raise OSError(ctypes.get_errno(), "madvise")
    ctypes.memset(start, 0, half)

engine.request_samples(4)
ask("warm", 30)
record()
print("ready", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Run:
    """A live engine in a process of its own, which wrote a run record."""

    def __init__(self, model: Path, folder: Path, **settings: Any) -> None:
        self.model = model
        self.path = folder / "run.json"
        self.environment = os.environ | {"HOTSET_HOME": str(folder / "home")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, model, self.path, repr(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment,
        )  # fmt: skip
        assert self._answer() == "ready"

    def do(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def record(self) -> dict[str, Any]:
        return json.loads(self.path.read_text())

    def audit(self, *arguments: str, target: str | None = None) -> tuple[int, dict[str, dict[str, Any]]]:
        """Exit code, and lines by name."""
        words = [word for name in ENVIRONMENT for word in ("--ignore", name)]
        done = subprocess.run(
            [*HOTSET, "audit", target or str(self.path), "--json", *words, *arguments],
            capture_output=True, text=True, env=self.environment, check=False, timeout=120,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, {line["name"]: line for line in json.loads(done.stdout)["lines"]}

    def red(self) -> dict[str, str]:
        """What is found in red lines; the exit code goes with them."""
        code, lines = self.audit()
        found = {name: line["found"] for name, line in lines.items() if line["state"] == "red"}
        assert code == (3 if found else 0)
        return found


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("a team of two threads needs two CPUs")
    runs: list[Run] = []

    def begin(**settings: Any) -> Run:
        # A cache of 16 MiB for 8,192 tokens, so that there is something to have in huge pages.
        model = tiny("Q8_0", hidden=256, ffn=256, heads=4, kv_heads=4, head_dim=64, max_context=8192)
        runs.append(Run(write_gguf(tmp_path / "tiny.gguf", model), tmp_path, **settings))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()


def test_a_clean_run_is_green_while_it_lives_and_afterwards(start: Start) -> None:
    """By its number and by its record; the same engine then works on as before."""
    run = start(context=8192)
    run.do("ask('a' * 300); ask('a' * 300); record()")
    for target in (str(run.process.pid), str(run.path)):
        code, lines = run.audit(target=target)
        assert code == 0
        states = {name: line["state"] for name, line in lines.items() if name not in ENVIRONMENT}
        assert "red" not in states.values(), lines
        assert {name for name, state in states.items() if state == "green"} >= {
            "pages", "absent", "threads", "faults", "cache", "plan",
        }  # fmt: skip
        # No profile was measured in that HOTSET_HOME.
        assert states["rate"] == "grey"
    run.do("ask('b' * 300)")
    assert run.red() == {}
    run.end()
    code, lines = run.audit()
    assert code == 0 and lines["neighbours"]["found"] == f"process {run.process.pid} has ended"
    assert lines["pages"]["state"] == lines["threads"]["state"] == "green"


def test_a_thread_that_escaped_from_its_team(start: Start) -> None:
    run = start(context=512)
    seat = run.record()["seats"][1]
    cpus = os.sched_getaffinity(0)
    os.sched_setaffinity(seat["thread_id"], cpus)
    found = run.red()
    assert list(found) == ["threads"]
    assert found["threads"].startswith(f"thread 1 of CPU {seat['cpu']} may run on ")
    os.sched_setaffinity(seat["thread_id"], {seat["cpu"]})
    run.do("ask('back')")
    assert run.red() == {}


def test_half_the_huge_pages_missing(start: Start) -> None:
    run = start(context=8192)
    line = run.audit()[1]["huge pages"]
    if line["state"] == "grey":
        pytest.skip(f"no huge pages here: {line['found']}")
    assert line["state"] == "green"
    run.do("split('cache')")
    found = run.red()
    assert list(found) == ["huge pages"]
    assert found["huge pages"] == "cache has 8.00 MiB of 16.00 MiB in huge pages"


def test_a_cache_that_never_hits(start: Start) -> None:
    """Room for one prompt, and two that take turns: each pushes the other out. The same with more room is green."""
    talk = "for _ in range(4): ask('a' * 300); ask('b' * 300)"
    small = start(context=512)
    small.do(talk)
    small.do("record()")
    found = small.red()
    assert list(found) == ["cache"]
    assert found["cache"] == "0 hits in 8 lookups, 6 with a known beginning"
    large = start(context=512, prefix_tokens=2048)
    large.do(talk)
    large.do("record()")
    assert large.red() == {}
    assert large.audit()[1]["cache"]["found"] == "6 hits in 8 lookups, 6 with a known beginning"


def test_a_stale_plan(start: Start) -> None:
    run = start(context=512)
    os.utime(run.model, ns=(1, 1))
    assert list(run.red()) == ["plan"]
    with run.model.open("ab") as file:
        file.write(b"more")
    assert "bytes, it had" in run.red()["plan"]


def test_a_region_on_the_wrong_node(start: Start) -> None:
    """This host may have one node only, so the plan is moved, not the pages."""
    run = start(context=512)
    content = run.record()
    region = next(region for region in content["regions"] if region["name"] == "cache")
    region["node"] += 1
    run.path.write_text(json.dumps(content))
    found = run.red()
    assert list(found) == ["pages"]
    assert found["pages"].startswith(f"cache was planned on node {region['node']}, of ")


def test_pages_that_were_given_back(start: Start) -> None:
    """As pages that were swapped out: they are not in memory."""
    run = start(context=512)
    region = next(region for region in run.record()["regions"] if region["name"] == "cache")
    run.do(
        f"import ctypes; ctypes.CDLL(None).madvise(ctypes.c_void_p({region['address']}), "
        f"ctypes.c_size_t({region['num_bytes']}), 4)"
    )
    assert "absent" in run.red()


def test_a_run_slower_than_its_machine(start: Start) -> None:
    """A profile of a machine a million times as fast, and classes of any size, since this model is tiny."""
    run = start(context=512)
    content = run.record()
    assert len(content["samples"]) == 4
    for sample in content["samples"]:
        for part in sample["classes"]:
            part["num_bytes"] *= 1000.0
            part["expected_seconds"] = part["seconds"] / 1e6
    run.path.write_text(json.dumps(content))
    assert set(run.red()) == {"rate linear", "rate head", "rate attention"}


def test_no_prompt_and_no_text_is_in_the_record(start: Start) -> None:
    run = start(context=2048)
    run.do("e = ask('xyzzyplugh' * 40, 40); record()")
    run.do("Path(sys.argv[2] + '.ids').write_text(repr(list(e.token_ids)))")
    text = run.path.read_text()
    ids = eval(Path(f"{run.path}.ids").read_text())
    assert "xyzzy" not in text and "plugh" not in text
    assert json.dumps(ids[:6])[1:-1] not in " ".join(text.split())
    assert run.path.stat().st_mode & 0o777 == 0o600


def hotset(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOTSET, *arguments],
        capture_output=True, text=True, env=os.environ | {"HOTSET_HOME": str(home)}, check=False, timeout=120,
    )  # fmt: skip


def test_run_and_bench_write_records_that_audit_reads(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", tiny("Q8_0"))
    path, html = tmp_path / "run.json", tmp_path / "run.html"
    ignored = [word for name in ENVIRONMENT for word in ("--ignore", name)]
    done = hotset(
        "run", str(model), "hello", "--max-tokens", "40", "--ignore-eos", "--record", str(path), home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert content["counters"]["num_generated_tokens"] == 40 and content["samples"]
    asked = {setting["name"]: (setting["asked"], setting["used"]) for setting in content["settings"]}
    assert asked["max_sequences"] == ("1", "1") and asked["context"] == (None, "4096")
    done = hotset("audit", str(path), "--html", str(html), *ignored, home=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "green  pages" in done.stdout and "has ended" in done.stdout
    assert html.read_text().startswith("<!DOCTYPE html>")
    done = hotset(
        "bench", str(model), "--context", "64", "--prefill", "", "--repeats", "1", "--record", str(path), home=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(path.read_text())["samples"]) > 4
    assert hotset("audit", str(path), *ignored, home=tmp_path).returncode == 0


def test_an_engine_of_ones_own_keeps_no_record() -> None:
    engine, _ = make_engine(256)
    with engine:
        for ask in (engine.record, lambda: engine.request_samples(1)):
            with pytest.raises(RequestError, match="keeps no run record"):
                ask()


def test_what_audit_refuses(tmp_path: Path) -> None:
    (tmp_path / "no.json").write_text("{}")
    done = hotset("audit", str(tmp_path / "no.json"), home=tmp_path)
    assert done.returncode == 3 and "not a run record of version 1" in done.stderr and not done.stdout
    done = hotset("audit", "http://example.com/", home=tmp_path)
    assert done.returncode == 2 and "not an address of this machine" in done.stderr
    done = hotset("audit", "x.json", "--ignore", "everything", home=tmp_path)
    assert done.returncode == 2 and "none of pages, absent" in done.stderr
    done = hotset("run", "m", "hi", "--record", str(tmp_path), home=tmp_path)
    assert done.returncode == 2 and "is a folder" in done.stderr
