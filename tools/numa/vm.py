#!/usr/bin/env python3
"""Boots an emulated machine with several NUMA nodes and runs hotset's tests, or a command, inside it.

Usage: python tools/numa/vm.py setup ARCH [--pages KIB]
       python tools/numa/vm.py test ARCH [--machine NAME] [--pages KIB] [--timeout S] [-- PYTEST OPTIONS]
       python tools/numa/vm.py run ARCH [--machine NAME] [--pages KIB] [--timeout S] -- COMMAND

ARCH is x86-64 or arm64; --pages 64 is a kernel with pages of 64 KiB for arm64, built once. The exit status is the
guest's; 3 when this host cannot have the machine (no network, no package), which the last line explains, and 4 when
building or booting failed. See docs/guides/emulated_machines.md.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from common import ARCHES, HOST, PYTHON_VERSION, REPOSITORY, Failed, NotHere, cache_folder, only_one
from images import USUAL_PAGE_KIBIBYTES, Images, make_images
from machines import DEBIAN_MOST_NODES, MACHINES, enlarged
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
            images = make_images(cache_folder(), ARCHES[options.arch], options.pages)
            return 0 if options.verb == "setup" else _boot(images, options, words)
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
    parser.add_argument(
        "--pages", type=int, choices=(USUAL_PAGE_KIBIBYTES, 64), default=USUAL_PAGE_KIBIBYTES, metavar="KIB",
        help="KiB of a page: 4, or 64 on arm64 as Grace has them",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="stop the guest after S seconds")
    options, words = parser.parse_args(arguments[:split]), arguments[split + 1 :]
    if bool(words) != (options.verb == "run") and options.verb != "test":
        parser.error("run needs -- COMMAND, setup takes none")
    if options.pages != USUAL_PAGE_KIBIBYTES and options.arch != "arm64":
        parser.error("only arm64 has pages of 64 KiB")
    num_nodes = len(MACHINES[options.machine].nodes)
    if options.pages == USUAL_PAGE_KIBIBYTES and num_nodes > DEBIAN_MOST_NODES[options.arch]:
        parser.error(f"{options.machine} has {num_nodes} nodes, too many for Debian's {options.arch}: --pages 64")
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


def _boot(images: Images, options: argparse.Namespace, words: list[str]) -> int:
    arch, machine = ARCHES[options.arch], MACHINES[options.machine]
    kernel = arch.name
    if options.pages != USUAL_PAGE_KIBIBYTES:
        machine, kernel = enlarged(machine), f"{arch.name}-{options.pages}k"
    results = REPOSITORY / "build" / "numa" / f"{machine.name}-{kernel}"
    shutil.rmtree(results, ignore_errors=True)
    log = results / "console.log"
    with tempfile.TemporaryDirectory(prefix="hotset-numa-") as name:
        payload = Path(name) / "payload"
        if options.verb == "test":
            facts = machine.as_json() | {"machine": arch.machine, "page_bytes": options.pages << 10}
            make_test_payload(payload, cache_folder(), arch, facts, words)
        else:
            make_command_payload(payload, " ".join(words))
        print(f"booting {machine.name} ({kernel}), console in {log}", file=sys.stderr)
        try:
            outcome = boot(images, arch, machine, payload, log, results, options.timeout)
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
