"""``hotset synth`` and ``hotset check`` on the header set of the whole release, and its defects by name."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hotset.cli.main import cli

FLASH = "deepseek-v4-flash"
LAYER = "layers.1."


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path_factory.getbasetemp() / "synth-home"))


def hotset(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Headers of the first two layers, at full width."""
    target = tmp_path_factory.mktemp("headers") / "cut"
    result = hotset("synth", FLASH, "--layers", "2", "--headers-only", "--out", target)
    assert result.exit_code == 0, result.output
    return target


def test_headers_of_the_whole_release(tmp_path: Path) -> None:
    """72,317 tensors in 48 files that say they hold 155.43 GiB, as the release does, and take megabytes."""
    target = tmp_path / "flash"
    written = hotset("synth", FLASH, "--headers-only", "--out", target)
    assert (written.exit_code, written.stdout) == (0, f"{target}\n")
    assert "155.43 GiB to write" in written.stderr
    assert "flash is ready (72,317 tensors, 155.43 GiB, no data)" in written.stderr
    files = list(target.glob("*.safetensors"))
    assert len(files) == 48 and sum(path.stat().st_blocks * 512 for path in files) < 32 << 20
    report = json.loads(hotset("check", target, "--json").stdout)
    assert (report["loaded"]["tensors"], len(report["ignored"])) == (67_612, 4_705)
    assert round(report["bytes"] / 2**30, 2) == 155.43
    assert list(report["loaded"]["formats"]) == ["MXFP4", "FP8", "BF16", "F32", "I64"]
    lines = hotset("check", target).stdout.splitlines()
    assert lines[-1] == "every tensor is accounted for" and len(lines) < 20
    (reason,) = [line for line in lines if "DSpark" in line]
    assert reason.startswith("  4705, mtp.0.attn_norm.weight to mtp.2.")


def defective(source: Path, target: Path, change: Callable[[dict[str, Any]], int]) -> Path:
    """A header set with another header in the file of layer 1; ``change`` returns the bytes of data that it adds."""
    target.mkdir()
    index = json.loads((source / "model.safetensors.index.json").read_text())
    file_name = index["weight_map"][f"{LAYER}ffn_norm.weight"]
    for path in source.iterdir():
        if path.name not in (file_name, "model.safetensors.index.json"):
            (target / path.name).symlink_to(path)
    with (source / file_name).open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data_bytes = (source / file_name).stat().st_size - 8 - length
    data_bytes += change(header)
    text = json.dumps(header).encode()
    with (target / file_name).open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + data_bytes)
    kept = {name: place for name, place in index["weight_map"].items() if place != file_name}
    index["weight_map"] = kept | {name: file_name for name in header if name != "__metadata__"}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    return target


def last_tensor(header: dict[str, Any]) -> str:
    return max((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"][1])


def drop_scale(header: dict[str, Any]) -> int:
    # The last tensor of the file is an expert's scale; without it the file is shorter and has no hole.
    name = last_tensor(header)
    assert name.endswith(".scale")
    start, end = header.pop(name)["data_offsets"]
    return start - end


def swap_shape(header: dict[str, Any]) -> int:
    header[f"{LAYER}attn.wq_a.weight"]["shape"].reverse()
    return 0


def declare_fp8(header: dict[str, Any]) -> int:
    header[f"{LAYER}ffn.experts.7.w1.weight"]["dtype"] = "F8_E4M3"
    return 0


def add_tensor(header: dict[str, Any]) -> int:
    end = header[last_tensor(header)]["data_offsets"][1]
    header[f"{LAYER}ffn.experts.256.w1.weight"] = {"dtype": "I8", "shape": [4], "data_offsets": [end, end + 4]}
    return 4


def make_hole(header: dict[str, Any]) -> int:
    start = header[f"{LAYER}attn.wkv.weight"]["data_offsets"][0]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= start:
            entry["data_offsets"] = [at + 64 for at in entry["data_offsets"]]
    return 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_scale, "does not fit the model: 1 missing: layers.1.ffn.shared_experts.w2.scale"),
        (
            swap_shape,
            "does not fit the model: 1 wrong shape: layers.1.attn.wq_a.weight is 4096x1024, expected 1024x4096 "
            "(the same dimensions in another order)",
        ),
        (
            declare_fp8,
            "does not fit the model: 1 wrong format: layers.1.ffn.experts.7.w1.weight is F8_E4M3, expected I8, the "
            "form of MXFP4 weights",
        ),
        (add_tensor, "does not fit the model: 1 not expected: layers.1.ffn.experts.256.w1.weight"),
        (make_hole, "model-00003-of-00004.safetensors: 64 unused bytes before tensor layers.1.attn.wkv.weight"),
    ],
)
def test_seeded_defects_are_named(
    cut: Path, tmp_path: Path, change: Callable[[dict[str, Any]], int], words: str
) -> None:
    """One line that names the tensor and what is wrong with it; nothing on standard output; exit code 3."""
    result = hotset("check", defective(cut, tmp_path / "m", change))
    assert (result.exit_code, result.stdout) == (3, "")
    (line, *_) = result.stderr.splitlines()
    assert line.startswith("error: ") and line.endswith(words)


def test_a_slice_without_defects_passes(cut: Path, tmp_path: Path) -> None:
    """The judge of the tests above: the same rewriting without a change is accepted."""
    assert hotset("check", defective(cut, tmp_path / "m", lambda header: 0)).exit_code == 0


def test_weights_are_read_when_asked_for(cut: Path) -> None:
    """Headers are in order, and scales that nobody wrote are zeros."""
    result = hotset("check", cut, "--weights")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "scales in layers.0.attn.wq_a.scale are 2^-127" in result.stderr


def test_a_model_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --out it is listed and found by name; a second run refuses, --force does not."""
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path / "home"))
    arguments = ("synth", "deepseek-v4-mini", "--layers", "1", "--headers-only")
    report = json.loads(hotset(*arguments, "--json").stdout)
    assert report["name"] == "synth/deepseek-v4-mini-l1-headers" and not report["has_data"]
    assert report["name"] in hotset("list").stdout
    assert hotset("check", report["name"]).exit_code == 0
    again = hotset(*arguments)
    assert again.exit_code == 2 and "--force" in again.stderr
    assert hotset(*arguments, "--force").exit_code == 0


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    unknown = hotset("synth", "deepseek-v5")
    assert unknown.exit_code == 2 and "one of deepseek-v4-flash" in unknown.stderr
    many = hotset("synth", FLASH, "--layers", "44")
    assert many.exit_code == 2 and "44 layers, expected 1 to 43" in many.stderr
    (tmp_path / "tokenizer.json").write_text("{}")
    bad = hotset("synth", FLASH, "--layers", "1", "--tokenizer", tmp_path)
    assert bad.exit_code == 3 and str(tmp_path) in bad.stderr


def test_another_tokenizer(cut: Path, tmp_path: Path) -> None:
    """Copied when its ids fit into the model's vocabulary."""
    small = tmp_path / "small"
    fits = hotset("synth", "deepseek-v4-mini", "--layers", "1", "--headers-only", "--out", small, "--tokenizer", small)
    assert fits.exit_code == 2
    result = hotset("synth", "deepseek-v4-mini", "--layers", "1", "--headers-only", "--out", small)
    assert result.exit_code == 0
    other = ("synth", FLASH, "--layers", "1", "--headers-only", "--out", tmp_path / "big", "--tokenizer", small)
    assert hotset(*other).exit_code == 0
    assert (tmp_path / "big" / "tokenizer.json").read_bytes() == (small / "tokenizer.json").read_bytes()
    large = hotset("synth", "deepseek-v4-mini", "--headers-only", "--out", tmp_path / "x", "--tokenizer", cut)
    assert large.exit_code == 2 and "has 128846 tokens, the model 49152" in large.stderr
