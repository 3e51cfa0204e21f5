"""What a guest boots from, made of Debian packages and kept in the cache: emulator, firmware, kernel, root image."""

from __future__ import annotations

import shutil
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import initramfs
from common import GUEST_SUITE, HOST, NEW_SUITE, PYTHON_VERSION, REPOSITORY, Arch, Failed, NotHere, done, part, run
from debian import Packages, unpack
from kernel import build_kernel_64k

_GUEST_PACKAGES = ("python3", "busybox-static", "libstdc++6", "numactl")
_GUEST_MODULES = ("virtio_pci", "virtio_blk", "ext4")
_FREE_MEBIBYTES = 256
USUAL_PAGE_KIBIBYTES = 4
"""Of Debian's kernels that are used here."""


@dataclass(frozen=True)
class Images:
    """All that :func:`qemu.boot` needs. ``emulator`` is a command; ``firmware`` is there where QEMU has none itself."""

    emulator: tuple[str, ...]
    firmware: Path | None
    kernel: Path
    modules: tuple[Path, ...]
    busybox: Path
    root: Path


def make_images(cache: Path, arch: Arch, page_kibibytes: int) -> Images:
    """Make what is not in the cache yet: about two minutes and 1 GB for the first architecture.

    Pages of 64 KiB (AArch64) take a kernel of our own.
    """
    kernel = _kernel(cache, arch) if page_kibibytes == USUAL_PAGE_KIBIBYTES else build_kernel_64k(cache)
    image, busybox = _root(cache, arch)
    return Images(
        emulator=_emulator(cache, arch),
        firmware=_firmware(cache) if arch.name == "arm64" else None,
        kernel=_one(kernel, "boot/vmlinuz-*", "usr/lib/modules/*/vmlinuz"),
        modules=tuple(initramfs.find_modules(kernel / "usr" / "lib" / "modules", _GUEST_MODULES)),
        busybox=busybox,
        root=image,
    )


def _emulator(cache: Path, arch: Arch) -> tuple[str, ...]:
    """QEMU of the newer Debian, run by that Debian's own loader on its own libraries."""
    names = ("qemu-system-x86", "qemu-system-arm")
    folder, is_new = part(cache, "qemu", [NEW_SUITE, *names])
    if is_new:
        unpack(Packages(cache, NEW_SUITE, HOST.debian).fetch(*names), folder)
        done(folder)
    usr = folder / "usr"
    loader = _one(folder, "usr/lib64/ld-linux-x86-64.so.2")
    data = [word for name in ("share/qemu", "share/seabios", "lib/ipxe/qemu") for word in ("-L", str(usr / name))]
    libraries = f"{usr}/lib/x86_64-linux-gnu"
    return (str(loader), "--library-path", libraries, str(usr / "bin" / arch.qemu), *data)


def _firmware(cache: Path) -> Path:
    """UEFI for AArch64. Debian 12's reports its flash as memory that no node covers, and Linux then sees one node."""
    folder, is_new = part(cache, "firmware", [NEW_SUITE])
    if is_new:
        unpack(Packages(cache, NEW_SUITE, HOST.debian).fetch_alone("qemu-efi-aarch64"), folder)
        done(folder)
    return _one(folder, "usr/share/qemu-efi-aarch64/QEMU_EFI.fd")


def _kernel(cache: Path, arch: Arch) -> Path:
    """The newer Debian's kernel for virtual machines; image and modules may be packages of their own."""
    name = f"linux-image-cloud-{arch.debian}"
    folder, is_new = part(cache, f"kernel-{arch.name}", [NEW_SUITE, name])
    if is_new:
        packages = Packages(cache, NEW_SUITE, arch.debian)
        parts = packages.needs(name, rf"linux-(image|binary|modules)-\d.*-cloud-{arch.debian}")
        unpack(packages.fetch_alone(*parts), folder)
        done(folder)
    return folder


def _root(cache: Path, arch: Arch) -> tuple[Path, Path]:
    """An ext4 image with Python, hotset's requirements and pytest, byte-compiled here; and the busybox that is in it.

    Without the byte-compiling every start of Python in the guest would compile its imports under emulation: NumPy
    takes 7 seconds to import then, and 1.5 seconds otherwise.
    """
    requirements = _requirements()
    folder, is_new = part(cache, f"root-{arch.name}", [GUEST_SUITE, *_GUEST_PACKAGES, *requirements])
    image, busybox = folder / "root.ext4", folder / "busybox"
    if not is_new:
        return image, busybox
    tree = folder / "tree"
    unpack(Packages(cache, GUEST_SUITE, arch.debian).fetch(*_GUEST_PACKAGES), tree)
    _install(requirements, arch, tree)
    for name in ("proc", "sys", "dev", "tmp", "run", "root", "guest", "etc"):
        (tree / name).mkdir(exist_ok=True)
    (tree / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tree / "etc" / "group").write_text("root:x:0:\n")
    (tree / "usr" / "bin" / "sh").unlink(missing_ok=True)
    (tree / "usr" / "bin" / "sh").symlink_to("busybox")
    shutil.copy(tree / "usr" / "bin" / "busybox", busybox)
    size = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file()) * 5 // 4 + (_FREE_MEBIBYTES << 20)
    options = ["-q", "-t", "ext4", "-m", "0", "-O", "^has_journal", "-E", "root_owner=0:0"]
    run(["mke2fs", *options, "-d", tree, image, f"{size >> 20}M"], env={"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"})
    shutil.rmtree(tree)
    done(folder)
    return image, busybox


def _install(requirements: list[str], arch: Arch, tree: Path) -> None:
    """Put wheels for the guest into its tree, and byte-compile all Python in it."""
    python = f"{PYTHON_VERSION[0]}.{PYTHON_VERSION[1]}"
    packages = tree / "usr" / "lib" / "python3" / "dist-packages"
    platforms = [f"--platform=manylinux_{version}_{arch.machine}" for version in ("2_28", "2_17")]
    words = ["--no-compile", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}", *platforms]
    words += [f"--platform=manylinux2014_{arch.machine}", *requirements]
    try:
        run([sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--target", packages, *words])
    except Failed as error:
        raise NotHere(f"hotset's requirements cannot be fetched: {error}", "a network with a Python index") from error
    trees = [tree / "usr" / "lib" / f"python{python}", packages]
    run([sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "-s", tree, "-p", "/",
         *trees])  # fmt: skip


def _requirements() -> list[str]:
    """What hotset needs, from pyproject.toml, and what installs and tests it in the guest."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    tests = [line for line in project["optional-dependencies"]["test"] if line.startswith("pytest")]
    return [*project["dependencies"], *tests, "pip"]


def _one(folder: Path, *patterns: str) -> Path:
    """The file that the first pattern with any file finds."""
    for pattern in patterns:
        found = sorted(folder.glob(pattern))
        if found:
            return found[-1]
    raise Failed(f"no {' or '.join(patterns)} in {folder}")
