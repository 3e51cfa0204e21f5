"""The engines compared, and the environment of each: a virtual environment of its own under ``.peers/``."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
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


CONVERTER_PACKAGES = ("torch", "transformers", "safetensors", "sentencepiece", "numpy", "pyyaml", "tqdm", "requests")


def ensure_converter() -> tuple[Path, Path]:
    """Return the interpreter and the source folder of llama.cpp's checkpoint converter, made when missing.

    The converter is part of the source package of llama-cpp-python. Which build of torch it gets, pip's settings say.
    """
    folder = PEERS_DIR / "converter"
    python = folder / "bin" / "python"
    engine = ENGINES["llama.cpp"]
    source = folder / f"llama_cpp_python-{engine.version}" / "vendor" / "llama.cpp"
    if source.exists():
        return python, source
    print("installing llama.cpp's converter into .peers/converter (minutes, 2 GB)", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", *CONVERTER_PACKAGES], check=True, stdout=sys.stderr)
    requirement = f"{engine.package}=={engine.version}"
    options = ("--no-deps", "--no-binary", engine.package, "--dest", folder)
    subprocess.run([*pip, "download", *options, requirement], check=True, stdout=sys.stderr)
    (archive,) = folder.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    return python, source
