"""The parent's side of a worker process, and processes that only keep a core busy."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerlib.environments import ROOT, Engine

LOG_DIR = ROOT / ".peers" / "logs"
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class WorkerError(RuntimeError):
    """A worker refused, died or took too long."""


@dataclass(frozen=True)
class Answer:
    """What a worker answered, and how much of the machine other processes used meanwhile (in cores)."""

    fields: dict[str, Any]
    others_cores: float


def leave_for_own_autogroup() -> None:
    """In the child, before exec: a scheduling group of its own at the highest weight.

    Between sessions the kernel's autogroups share a core evenly whatever the nice values are, so
    a plain ``nice`` would not help (needs root or CAP_SYS_NICE).
    """
    os.setsid()
    Path("/proc/self/autogroup").write_text("-20")


def busy_seconds() -> float:
    """Return the CPU seconds that all processors have spent on anything but idling, stolen time included."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / CLOCK_TICKS


class Worker:
    """One engine in a process of its own; asleep except during :meth:`ask`."""

    def __init__(self, engine: Engine, has_priority: bool) -> None:
        LOG_DIR.mkdir(parents=True, exist_ok=True)
        self.engine = engine
        self.log_path = LOG_DIR / f"{engine.name}.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [engine.python, engine.worker_path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                preexec_fn=leave_for_own_autogroup if has_priority else None,
            )

    def ask(self, op: str, timeout_s: float = 1800.0, **fields: Any) -> Answer:
        """Send one request and wait for its answer; raises WorkerError."""
        assert self.process.stdin and self.process.stdout
        start, busy, own = time.perf_counter(), busy_seconds(), self.cpu_seconds()
        try:
            self.process.stdin.write(json.dumps({"op": op, **fields}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self._obituary()) from None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        if not ready:
            self.kill()
            raise WorkerError(f"no answer to {op} in {timeout_s:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self._obituary())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        others = (busy_seconds() - busy) - (self.cpu_seconds() - own)
        return Answer(answer, max(0.0, others / (time.perf_counter() - start)))

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the worker has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def peak_rss_bytes(self) -> int:
        """Return the largest resident size so far, mapped file pages included."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        raise WorkerError(f"{self.engine.name}: the kernel reports no peak size")

    def close(self) -> None:
        """Let the worker quit by itself; kill it if it does not."""
        assert self.process.stdin
        try:
            self.process.stdin.close()
            self.process.wait(timeout=60)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _obituary(self) -> str:
        status = self.process.wait()
        lines = self.log_path.read_text(errors="replace").strip().splitlines()
        return f"worker ended with status {status}: {lines[-1] if lines else 'no output'}"


@contextmanager
def busy_cores(num_cores: int, has_priority: bool) -> Iterator[None]:
    """Keep ``num_cores`` processes spinning inside the block.

    They share one session, hence one autogroup, so that against an engine with as many threads the kernel's
    fair share is one half.
    """
    code = f"import os\nfor _ in range({num_cores - 1}):\n    if os.fork() == 0: break\nwhile True: pass"
    leader = subprocess.Popen(
        [sys.executable, "-c", code],
        start_new_session=not has_priority,
        preexec_fn=leave_for_own_autogroup if has_priority else None,
    )
    try:
        time.sleep(0.5)  # until they have started
        yield
    finally:
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
