"""The threads of a process as /proc shows them: where each may run, where it ran last, what it waited for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotset.machine.files import ROOT, list_names, parse_cpu_list, read_table, read_text

# Places in /proc/PID/stat after the name in parentheses, counted from 0 (proc_pid_stat(5) counts from 3).
_MINOR, _MAJOR, _START, _CPU = 7, 9, 19, 36


@dataclass(frozen=True)
class Task:
    """A thread. ``start_ticks`` are clock ticks from the boot to its beginning; faults and switches are all since."""

    task_id: int
    name: str
    start_ticks: int
    allowed_cpus: tuple[int, ...]
    last_cpu: int
    minor_faults: int
    major_faults: int
    num_switches: int
    num_preemptions: int


def read_task(process: int | str, task_id: int, root: Path = ROOT) -> Task | None:
    """Read a thread of a process; None when there is none of that number. A process is the thread of its own number."""
    directory = f"/proc/{process}/task/{task_id}"
    stat, status = read_text(root, f"{directory}/stat"), read_text(root, f"{directory}/status")
    if stat is None or status is None:
        return None
    # The name may hold spaces and parentheses.
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    table = read_table(status)
    allowed = next(line for line in status.splitlines() if line.startswith("Cpus_allowed_list:")).partition(":")[2]
    return Task(
        task_id,
        head.partition("(")[2],
        int(fields[_START]),
        parse_cpu_list(allowed),
        int(fields[_CPU]),
        int(fields[_MINOR]),
        int(fields[_MAJOR]),
        table.get("voluntary_ctxt_switches", 0),
        table.get("nonvoluntary_ctxt_switches", 0),
    )


def list_tasks(process: int | str = "self", root: Path = ROOT) -> frozenset[int]:
    """The numbers of all threads of a process; none when it has ended."""
    return frozenset(int(name) for name in list_names(root, f"/proc/{process}/task") if name.isdecimal())


def read_boot_id(root: Path = ROOT) -> str:
    """What names the time since the last boot; empty where the kernel does not say."""
    return read_text(root, "/proc/sys/kernel/random/boot_id") or ""
