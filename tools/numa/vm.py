#!/usr/bin/env python3
"""Boots an emulated machine with several NUMA nodes and runs hotset's tests, or a command, inside it.

Usage: python tools/numa/vm.py setup ARCH
       python tools/numa/vm.py test ARCH [--machine NAME] [--timeout S] [-- PYTEST OPTIONS]
       python tools/numa/vm.py run ARCH [--machine NAME] [--timeout S] -- COMMAND

ARCH is x86-64 or arm64. The exit status is the guest's; 3 when this host cannot have the machine (no network, no
package), which the last line explains, and 4 when building or booting failed. See docs/guides/emulated_machines.md.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from common import ARCHES, HOST, PYTHON_VERSION, REPOSITORY, Arch, Failed, NotHere, cache_folder, only_one
from images import Images, make_images
from machines import MACHINES, Machine
from payload import make_command_payload, make_test_payload
from qemu import boot

EXIT_NOT_HERE = 3
EXIT_FAILED = 4
_TAIL_LINES = 80


def main(arguments: list[str]) -> int:
    """Run the command line; returns the exit status."""
    options, words = _parse(arguments)
    # Stopped by `timeout` or CI, Python ends without cleaning up, and the emulator would run on.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        _check_host()
        with only_one(cache_folder()):
            arch, machine = ARCHES[options.arch], MACHINES[options.machine]
            images = make_images(cache_folder(), arch)
            if options.verb == "setup":
                return 0
            return _boot(images, arch, machine, options.verb, words, options.timeout)
    except NotHere as error:
        print(f"error: {error}\n\nhint: {error.hint}", file=sys.stderr)
        return EXIT_NOT_HERE
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="Boot an emulated NUMA machine; see the head of this file.")
    parser.add_argument("verb", choices=("setup", "test", "run"))
    parser.add_argument("arch", choices=tuple(ARCHES))
    about = "; ".join(f"{machine.name}: {machine.about}" for machine in MACHINES.values())
    parser.add_argument("--machine", choices=tuple(MACHINES), default="gh200x2", help=about)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="stop the guest after S seconds")
    options, words = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if bool(words) != (options.verb == "run") and options.verb != "test":
        parser.error("run needs -- COMMAND, setup takes none")
    return options, words


def _check_host() -> None:
    if sys.version_info[:2] != PYTHON_VERSION:
        raise NotHere(
            f"this is Python {sys.version.split()[0]}, the guest's is {PYTHON_VERSION[0]}.{PYTHON_VERSION[1]}",
            "make PYTHON=python3.11 test-numa, after make clean",
        )
    if sys.platform != "linux" or not Path(f"/lib64/ld-linux-{HOST.machine.replace('_', '-')}.so.2").exists():
        raise NotHere("the emulator that is fetched is for Linux on x86-64", "use such a machine")
    for tool, package in (("apt-get", "apt"), ("dpkg-deb", "dpkg"), ("mke2fs", "e2fsprogs"), ("git", "git")):
        if shutil.which(tool) is None and not Path(f"/usr/sbin/{tool}").exists():
            raise NotHere(f"no {tool} here", f"on Debian: apt-get install {package}")


def _boot(images: Images, arch: Arch, machine: Machine, verb: str, words: list[str], timeout_s: float) -> int:
    results = REPOSITORY / "build" / "numa" / f"{machine.name}-{arch.name}"
    shutil.rmtree(results, ignore_errors=True)
    log = results / "console.log"
    with tempfile.TemporaryDirectory(prefix="hotset-numa-") as name:
        payload = Path(name) / "payload"
        if verb == "test":
            make_test_payload(payload, cache_folder(), arch, machine, words)
        else:
            make_command_payload(payload, " ".join(words))
        print(f"booting {machine.name} ({arch.name}), console in {log}", file=sys.stderr)
        try:
            outcome = boot(images, arch, machine, payload, log, results, timeout_s)
        except Failed:
            _show_tail(log, _TAIL_LINES)
            raise
    _show_tail(log, _TAIL_LINES)
    spent = f"{outcome.seconds:.0f} s, {outcome.cpu_seconds:.0f} s of processor time"
    print(f"the guest ended with status {outcome.status} after {spent}", file=sys.stderr)
    return outcome.status


def _show_tail(log: Path, count: int) -> None:
    if log.is_file():
        print("\n".join(log.read_text(errors="replace").splitlines()[-count:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
