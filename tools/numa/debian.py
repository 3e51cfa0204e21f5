"""Debian packages of any architecture and release, fetched and unpacked beside the host's own.

apt runs with a configuration, lists and a status of its own inside the cache folder: nothing of the host is read but
the addresses of its archives, nothing of it is changed, and no root is needed. Packages are unpacked, never installed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from common import Failed, NotHere, run

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_NOT_UNPACKED = ("./usr/share/doc", "./usr/share/man", "./usr/share/locale", "./usr/share/info", "./usr/share/lintian")
_NETWORK = "the machine needs a network with the Debian archive that its own apt uses"
_CONFIG = """\
APT::Architecture "{arch}"; APT::Architectures {{ "{arch}"; }};
APT::Install-Recommends "false"; APT::Sandbox::User ""; Acquire::Languages "none"; Acquire::Retries "2";
Acquire::http::Timeout "20"; Acquire::https::Timeout "20"; Debug::NoLocking "true";
Dir::State "{folder}/state"; Dir::State::lists "{folder}/lists"; Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache"; Dir::Log "{folder}/log";
Dir::Etc::sourcelist "{folder}/sources.list"; Dir::Etc::sourceparts "/dev/null"; Dir::Etc::main "/dev/null";
Dir::Etc::parts "/dev/null"; Dir::Etc::preferences "/dev/null"; Dir::Etc::preferencesparts "/dev/null";
"""


class Packages:
    """The packages of one Debian release for one architecture."""

    def __init__(self, cache: Path, suite: str, arch: str) -> None:
        self.suite, self.arch = suite, arch
        self._folder = cache / "apt" / f"{suite}-{arch}"
        self._config = self._folder / "apt.conf"
        if not self._config.is_file():
            self._configure()

    def fetch(self, *names: str) -> list[Path]:
        """Fetch packages and all that they depend on; the files of exactly these."""
        # Seen from an empty folder, since apt leaves out of this list what lies in its archives already.
        nothing = f"Dir::Cache::archives={self._folder / 'nothing'}"
        listed = self._apt("apt-get", "install", "--print-uris", "-qq", "-y", "-o", nothing, *names)
        archives = self._folder / "cache" / "archives"
        # Lines like: 'http://.../busybox-static_1.35_amd64.deb' busybox-static_1%3a1.35_amd64.deb 987654 SHA256:...
        files = [archives / line.split()[1] for line in listed.splitlines() if line.startswith("'")]
        if any(not file.is_file() for file in files):
            self._apt("apt-get", "install", "-qq", "-y", "--download-only", *names)
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise Failed(f"apt-get fetched no {', '.join(missing[:5])}")
        return files

    def fetch_alone(self, *names: str) -> list[Path]:
        """Fetch packages without what they depend on."""
        folder = self._folder / "single"
        folder.mkdir(exist_ok=True)
        found = [sorted(folder.glob(f"{name}_*.deb")) for name in names]
        for name, files in zip(names, found, strict=True):
            if not files:
                self._apt("apt-get", "download", "-qq", name, cwd=folder)
                files.extend(folder.glob(f"{name}_*.deb"))
        return [files[-1] for files in found]

    def needs(self, name: str, pattern: str) -> list[str]:
        """Names of packages that ``name`` depends on, near or far, and that match a regular expression."""
        listed = self._apt(
            "apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks",
            "--no-replaces", "--no-enhances", name,
        )  # fmt: skip
        return sorted({line for line in listed.splitlines() if re.fullmatch(pattern, line)})

    def _configure(self) -> None:
        if not _KEYRING.is_file():
            raise NotHere(f"no Debian keys in {_KEYRING}", "apt-get install debian-archive-keyring")
        for part in ("state", "lists/partial", "cache/archives/partial", "nothing/partial", "log"):
            (self._folder / part).mkdir(parents=True, exist_ok=True)
        (self._folder / "status").write_text("")
        lines = [f"deb [arch={self.arch} signed-by={_KEYRING}] {_archive()} {self.suite} main"]
        (self._folder / "sources.list").write_text("\n".join(lines) + "\n")
        fresh = self._folder / "apt.conf.new"
        fresh.write_text(_CONFIG.format(arch=self.arch, folder=self._folder))
        try:
            run(["apt-get", "update", "-qq"], env={"APT_CONFIG": str(fresh)})
        except Failed as error:
            raise NotHere(f"Debian packages cannot be fetched: {error}", _NETWORK) from error
        if not list((self._folder / "lists").glob("*_Packages*")):
            raise NotHere(f"apt-get update brought no list of {self.suite} for {self.arch}", _NETWORK)
        # Only now: a configuration that is there is one with lists.
        fresh.rename(self._config)

    def _apt(self, *command: str, cwd: Path | None = None) -> str:
        """Run apt on this state; once more with new lists when they name packages that the archive replaced."""
        env = {"APT_CONFIG": str(self._config)}
        try:
            return run(command, cwd=cwd, env=env)
        except Failed:
            try:
                run(["apt-get", "update", "-qq"], env=env)
                return run(command, cwd=cwd, env=env)
            except Failed as error:
                raise NotHere(f"Debian packages cannot be fetched: {error}", _NETWORK) from error


def unpack(files: list[Path], folder: Path) -> None:
    """Unpack packages into ``folder``, laid out as Debian is: /bin, /lib and /sbin are links into /usr."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    leave = [f"--exclude={name}" for name in _NOT_UNPACKED]
    extract = ["tar", "-x", "-C", str(folder), "--keep-directory-symlink", "--no-same-owner", *leave]
    for file in files:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(file)], stdout=subprocess.PIPE) as source:
            status = subprocess.run(extract, stdin=source.stdout, check=False).returncode
        if status or source.returncode:
            raise Failed(f"{file} cannot be unpacked")


def _archive() -> str:
    """Address of the Debian archive that the host's apt uses."""
    listed = run(["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages"])
    for line in listed.splitlines():
        label, _, address = line.rpartition(" ")
        if label == "Debian":
            return address.rstrip("/")
    raise NotHere("apt knows no Debian archive here", "on a Debian machine: apt-get update")
