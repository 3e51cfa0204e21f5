"""What a guest is given: hotset's wheel, the tests of tests/guest, the machine's description, the host's answers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from common import HOST, REPOSITORY, Arch, run
from wheel import build_wheel, host_python

_TESTS = REPOSITORY / "tests" / "guest"
_MODELS = tuple(REPOSITORY / "tests" / "golden" / "llama" / name for name in ("untied_bf16_sharded", "rope_linear_f16"))
# AVX2 and NEON kernels give the same bits, so one set of answers serves guests of both architectures.
_HOST_ISA = "avx2"


def make_test_payload(
    folder: Path, cache: Path, arch: Arch, facts: Mapping[str, object], pytest_words: list[str]
) -> None:
    """Fill ``folder`` with what a run of the guest's tests needs.

    ``facts`` are what the tests are told about the machine, ``pytest_words`` more options for pytest.
    """
    folder.mkdir()
    shutil.copy(build_wheel(cache, arch), folder)
    shutil.copytree(_TESTS, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for model in _MODELS:
        shutil.copytree(model, folder / "models" / model.name, ignore=shutil.ignore_patterns("golden.npz"))
    (folder / "machine.json").write_text(json.dumps(facts))
    (folder / "answers.json").write_text(_host_answers(cache, folder / "models"))
    words = " ".join(f"'{word}'" for word in pytest_words)
    (folder / "run.sh").write_text(f"exec sh tests/run.sh {words}\n")


def make_command_payload(folder: Path, command: str) -> None:
    """Fill ``folder`` with a shell command to run in the guest."""
    folder.mkdir()
    (folder / "run.sh").write_text(f"{command}\n")


def _host_answers(cache: Path, models: Path) -> str:
    """Token ids and logits of every model as the host computes them, with the same sources, as JSON."""
    command, env = host_python(build_wheel(cache, HOST))
    return run([*command, _TESTS / "answers.py", models], env=env | {"HOTSET_ISA": _HOST_ISA})
