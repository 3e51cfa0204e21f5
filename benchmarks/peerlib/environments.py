"""The engines compared, and the environment of each: a virtual environment of its own under ``.peers/``."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS_DIR = ROOT / ".peers"


@dataclass(frozen=True)
class Engine:
    """One engine: its worker script, and how to install it (hotset runs in the interpreter that runs this)."""

    name: str
    worker: str
    directory: str = ""
    package: str = ""
    version: str = ""
    pip_options: tuple[str, ...] = ()
    build_environment: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Interpreter of the environment."""
        return PEERS_DIR / self.directory / "bin" / "python" if self.directory else Path(sys.executable)

    @property
    def worker_path(self) -> Path:
        return Path(__file__).parent / self.worker


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("hotset", "worker_hotset.py", package="hotset"),
        Engine(
            "llama.cpp",
            "worker_llama_cpp.py",
            directory="llama-cpp",
            package="llama-cpp-python",
            version="0.3.36",
            # From source, for this processor: a published wheel would leave AVX-512 unused.
            pip_options=("--no-binary", "llama-cpp-python"),
            build_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": "2"},
        ),
        Engine(
            "openvino",
            "worker_openvino.py",
            directory="openvino",
            package="openvino-genai",
            version="2026.4.1.0",
        ),
    )
}


def installed_version(engine: Engine) -> str | None:
    """Return the version that the engine's environment has, or None if it has none."""
    if not engine.python.exists():
        return None
    code = f"import importlib.metadata as m; print(m.version({engine.package!r}))"
    done = subprocess.run([engine.python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def ensure(engine: Engine) -> None:
    """Create the environment of an engine unless it has the wanted version; CalledProcessError if pip fails."""
    if not engine.directory or installed_version(engine) == engine.version:
        return
    print(f"installing {engine.package}=={engine.version} into .peers/{engine.directory} (minutes)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", PEERS_DIR / engine.directory], check=True)
    requirement = f"{engine.package}=={engine.version}"
    subprocess.run(
        [engine.python, "-m", "pip", "install", "--quiet", *engine.pip_options, requirement],
        check=True,
        env={**os.environ, **engine.build_environment},
        stdout=sys.stderr,
    )
