"""The settings that hotset takes from the environment. Nothing else in hotset reads it.

| variable | meaning |
|---|---|
| ``HOTSET_HOME`` | folder of what hotset keeps (``models``, ``profile.json``, ``runs``), default ``~/.cache/hotset`` |
| ``HOTSET_ISA`` | use the kernels of this instruction set, lower than the best that the processor has |
| ``HF_ENDPOINT`` | address of the Hugging Face hub, by default ``https://huggingface.co`` |
| ``HF_TOKEN`` | access token for private and gated models |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from hotset.errors import RequestError

#: Instruction sets that kernels are compiled for; the native module knows which of them this build and machine have.
ISA_NAMES = ("avx2", "avx512", "neon")
DEFAULT_HF_ENDPOINT = "https://huggingface.co"

_OWN_VARIABLES = ("HOTSET_HOME", "HOTSET_ISA")


@dataclass(frozen=True)
class Settings:
    """What the environment says, checked. ``isa`` and ``hf_token`` are None when they are not set."""

    home: Path
    isa: str | None = None
    hf_endpoint: str = DEFAULT_HF_ENDPOINT
    hf_token: str | None = field(default=None, repr=False)

    @property
    def models_dir(self) -> Path:
        """The folder of fetched models."""
        return self.home / "models"

    @property
    def profile_path(self) -> Path:
        """The measured profile of this machine."""
        return self.home / "profile.json"

    @property
    def runs_dir(self) -> Path:
        """The folder of links to the records of running processes."""
        return self.home / "runs"


def load_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Read and check the settings; RequestError names the variable, what it holds and what it may hold.

    An empty variable counts as not set. An unknown ``HOTSET_...`` variable is refused: it is a misspelt one.
    """
    for name in sorted(environment):
        if name.startswith("HOTSET_") and name not in _OWN_VARIABLES:
            raise RequestError(f"unknown environment variable {name}", f"hotset reads {' and '.join(_OWN_VARIABLES)}")
    return Settings(
        home=_home(environment.get("HOTSET_HOME", "")),
        isa=_isa(environment.get("HOTSET_ISA", "")),
        hf_endpoint=_endpoint(environment.get("HF_ENDPOINT", "")),
        hf_token=_token(environment.get("HF_TOKEN", "")),
    )


def _home(value: str) -> Path:
    if not value:
        return Path.home() / ".cache" / "hotset"
    home = Path(value).expanduser()
    if not home.is_absolute():
        raise RequestError(f"HOTSET_HOME is {value!r}, expected an absolute path", f"HOTSET_HOME={home.absolute()}")
    return home


def _isa(value: str) -> str | None:
    if value and value not in ISA_NAMES:
        raise RequestError(f"HOTSET_ISA is {value!r}, expected one of {', '.join(ISA_NAMES)}")
    return value or None


def _endpoint(value: str) -> str:
    if not value:
        return DEFAULT_HF_ENDPOINT
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise RequestError(f"HF_ENDPOINT is {value!r}, expected a web address", f"HF_ENDPOINT={DEFAULT_HF_ENDPOINT}")
    return value.rstrip("/")


def _token(value: str) -> str | None:
    token = value.strip()
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        # The value itself is a secret and is not shown.
        raise RequestError("HF_TOKEN holds spaces or unprintable characters, expected one access token")
    return token or None
