"""Boots a guest, waits for it, and takes its results: the console in a log, files and exit status in a tar."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import initramfs
from common import Arch, Failed
from images import Images
from machines import Machine, kernel_words, qemu_words

_RESULT_BYTES = 64 << 20
# Emulated processors now and then miss a timer while Linux starts, and the guest hangs before it has run anything of
# ours ("rcu_preempt kthread starved" on its console); or QEMU ends itself while firmware and Linux map devices
# ("iotlb_to_section: Assertion" failed). The guest is started again then; one that came up never is.
_UP = "guest up after"
_BOOT_SECONDS = 120.0
_BOOT_TRIES = 3
# What firmware writes to clear a terminal, and carriage returns.
_CONTROL = re.compile(r"\x1bc|\x1b\[[?0-9;=]*[A-Za-z]|\r")
# Grace's cores are Neoverse V2; of QEMU's, N2 has the same features. QEMU's "max" for x86-64 has AVX2, not AVX-512.
_BOARDS = {
    "x86-64": ("-machine", "q35,hmat=on,usb=off,graphics=off", "-cpu", "max"),
    "arm64": ("-machine", "virt,gic-version=3,hmat=on", "-cpu", "neoverse-n2"),
}


@dataclass(frozen=True)
class Outcome:
    """How a guest ended. ``status`` is the exit status of its run.sh; ``cpu_seconds`` is what emulating it took."""

    status: int
    seconds: float
    cpu_seconds: float


def boot(
    images: Images, arch: Arch, machine: Machine, payload: Path, log: Path, results: Path, timeout_s: float
) -> Outcome:
    """Boot, run the payload, unpack what it wrote to out/ into ``results``.

    Args:
        payload: a folder with a ``run.sh``.
        log: file for the guest's console, written as it comes.

    Raises:
        Failed: the guest did not start, did not end by itself in ``timeout_s``, or ended without a status; the log says
            more.
    """
    with tempfile.TemporaryDirectory(prefix="hotset-numa-") as name:
        scratch = Path(name)
        disk, answer = scratch / "payload.tar", scratch / "results.raw"
        with tarfile.open(disk, "w") as tar:
            tar.add(payload, arcname=".")
        with answer.open("wb") as file:
            file.truncate(_RESULT_BYTES)
        initramfs.write(scratch / "initramfs", images.busybox, images.modules)
        words = [
            *images.emulator, *_BOARDS[arch.name], *qemu_words(machine), *_start_words(images, arch, machine, scratch),
            *_disk_words(images.root, "snapshot=on,cache=unsafe"), *_disk_words(disk, "readonly=on"),
            *_disk_words(answer, "cache=unsafe"),
        ]  # fmt: skip
        started, cpu_before = time.monotonic(), _cpu_seconds()
        tries = 1
        while not run_once(words, log, timeout_s):
            if tries == _BOOT_TRIES:
                raise Failed(f"the guest did not start, {tries} times; its console is in {log}")
            tries += 1
            print(f"the guest did not start, trial {tries} of {_BOOT_TRIES}", file=sys.stderr)
        spent = time.monotonic() - started, _cpu_seconds() - cpu_before
        return Outcome(_unpack(answer, results, log), *spent)


def _cpu_seconds() -> float:
    """Processor time of all children that have ended. It says more than wall time on a busy host."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _start_words(images: Images, arch: Arch, machine: Machine, scratch: Path) -> list[str]:
    """Everything but the machine's own shape and its disks. TCG always: a result must not depend on the host."""
    words = ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"]
    words += ["-accel", "tcg,thread=multi,tb-size=256"]
    words += ["-kernel", str(images.kernel), "-initrd", str(scratch / "initramfs")]
    kernel = [f"console={arch.console}", "quiet", "panic=-1", "nokaslr", "mitigations=off", *kernel_words(machine)]
    words += ["-append", " ".join(kernel)]
    return words + (["-bios", str(images.firmware)] if images.firmware else [])


def _disk_words(path: Path, options: str) -> list[str]:
    name = path.name.replace(".", "-")
    return [
        "-drive",
        f"if=none,id={name},file={path},format=raw,{options}",
        "-device",
        f"virtio-blk-pci,bus=pcie.0,drive={name}",
    ]


def run_once(words: list[str], log: Path, timeout_s: float) -> bool:
    """Run the guest to its end; False when it never came up: it was stopped, or QEMU ended itself by a signal.

    Raises:
        Failed: QEMU refused these words, or ended after the guest came up, or took longer than ``timeout_s``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    is_up = threading.Event()
    with log.open("w", buffering=1) as file:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", bufsize=1,
        )  # fmt: skip
        assert process.stdout is not None
        reader = threading.Thread(target=_copy, args=(process.stdout, file.write, is_up))
        reader.start()
        try:
            if not is_up.wait(min(_BOOT_SECONDS, timeout_s)) and process.poll() is None:
                return False
            process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise Failed(f"the guest was stopped after {timeout_s:g} s; its console is in {log}") from error
        finally:
            process.kill()
            process.wait()
            reader.join()
    if process.returncode < 0 and _UP not in log.read_text():
        return False
    if process.returncode != 0:
        raise Failed(f"QEMU ended with status {process.returncode}; its words are in {log}")
    return True


def _copy(source: IO[str], write: Callable[[str], int], is_up: threading.Event) -> None:
    for line in source:
        write(_CONTROL.sub("", line))
        if _UP in line:
            is_up.set()
    is_up.set()  # it has ended: there is nothing to wait for


def _unpack(answer: Path, results: Path, log: Path) -> int:
    results.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(answer, "r:") as tar:
            tar.extractall(results, filter="data")
        return int((results / "status").read_text())
    except (tarfile.TarError, OSError, ValueError) as error:
        raise Failed(f"the guest turned itself off without results; its console is in {log}") from error
