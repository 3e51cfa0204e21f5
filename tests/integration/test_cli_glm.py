"""``hotset plan``, ``check``, ``synth`` and ``run`` on GLM-5.2: planned at full size in time, and refused when run."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from glm_files import FP8, TINY, headers, packed

from hotset.cli.main import cli
from hotset.plan.cards import describe_config, read_card
from hotset.units import GIB


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTSET_HOME", str(tmp_path_factory.getbasetemp() / "glm-home"))


def hotset(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def test_the_plan_of_the_whole_release_in_time() -> None:
    """Two seconds for 118,629 tensors: guards against a lowering or an account that grows faster than they do."""
    start = time.process_time()
    result = hotset("plan", "glm-5.2", "--machine", "dual-gh200", "--context", "635904", "--json")
    assert time.process_time() - start < 2.0
    assert result.exit_code == 0
    plan = json.loads(result.stdout)
    weights = plan["weights"]
    assert (weights["num_tensors"], weights["num_spare"]) == (117_060, 1_569)
    assert weights["num_bytes"] + weights["spare_bytes"] == 755_617_140_416
    assert weights["spare_bytes"] == 10_032_632_960 and plan["fits"]
    assert plan["placement"]["winner"] == "GPUs, experts beside them" and plan["total_bytes"] > plan["usable_bytes"]
    sizes = {line["form"]: line["context_bytes"] for line in plan["caches"]}
    assert {form: round(size / GIB, 2) for form, size in sizes.items()} == {
        "FP8": 31.94, "BF16+FP8": 54.86, "BF16": 56.4,
    }  # fmt: skip
    terms = {term["name"]: term["num_bytes"] for term in plan["terms"]}
    assert sum(terms.values()) == plan["total_bytes"] and terms["cache"] == sizes["FP8"]
    assert plan["workspace"]["1024"] == 2 * plan["workspace"]["512"] > 64 * 576 * 4 * 1024


def test_what_does_not_fit_is_said_and_what_does_not_run_too() -> None:
    """703.7 GiB are more than two memories of 96 GiB hold; nobody may think from a plan that the model runs yet."""
    result = hotset("plan", "glm-5.2", "--machine", "dual-gh200")
    assert result.exit_code == 0
    assert "117,060 tensors, 694.38 GiB; each of 2 devices: 347.19 GiB" in result.stdout
    assert "1,569 tensors, 9.34 GiB: the draft (MTP) layer, which is not used yet" in result.stdout
    assert "does NOT fit in 92.16 GiB" in result.stdout
    assert "% of them in node0, node1; each GPU reads them from the memory of its own CPU" in result.stdout
    small_machine = hotset("plan", "glm-5.2", "--machine", "gh200")
    assert small_machine.exit_code == 3 and "error: no layout fits gh200; the nearest, " in small_machine.stderr
    assert "note: glm-5.2 is planned here, and runs in a later release; missing: attention over" in result.stderr
    here = hotset("plan", "glm-5.2-int4", "--threads", "1")
    assert here.exit_code == 3 and "the largest term is weights: 424.88 GiB" in here.stderr
    small = hotset("plan", "deepseek-v4-narrow", "--threads", "1")
    assert "note:" not in small.stderr


@pytest.mark.parametrize("name", ["glm-5.2", "glm-5.2-int4"])
def test_slices_are_written_and_accounted_for(name: str, tmp_path: Path) -> None:
    """Four layers at full width, headers only: three dense ones and the first mixture, without a draft layer."""
    target = tmp_path / "cut"
    written = hotset("synth", name, "--layers", "4", "--headers-only", "--out", target)
    assert written.exit_code == 0, written.stderr
    files = sorted(path.name for path in target.iterdir())
    assert not any("tokenizer" in file for file in files)
    assert sum(file.endswith(".safetensors") for file in files) == 6
    report = json.loads(hotset("check", target, "--json").stdout)
    experts = {"glm-5.2": "FP8_F32", "glm-5.2-int4": "INT4"}[name]
    # One mixture of 256 experts: twelve tensors each packed, two for each of three matrices in FP8.
    assert report["loaded"]["formats"][experts]["tensors"] == {"FP8_F32": 1612, "INT4": 3072}[experts]
    assert not report["ignored"] and not report["absent"] and report["family"] == "glm_moe_dsa"
    planned = hotset("plan", target, "--machine", "dual-gh200", "--json")
    assert planned.exit_code == 0, planned.stderr
    assert json.loads(planned.stdout)["weights"]["num_bytes"] == report["loaded"]["bytes"]


@pytest.mark.parametrize("quantization", [FP8, packed()])
def test_running_is_refused_in_one_line(quantization: dict[str, Any], tmp_path: Path) -> None:
    config = TINY | {"quantization_config": quantization}
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    entries: dict[str, Any] = {}
    at = 0
    for info in headers(describe_config("m", config).tensors).values():
        entries[info.name] = {
            "dtype": info.format.safetensors_dtype, "shape": list(info.shape), "data_offsets": [at, at + info.nbytes]
        }  # fmt: skip
        at += info.nbytes
    text = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    assert hotset("check", folder).exit_code == 0
    for verb in (("run", folder, "hello"), ("bench", folder, "--prefill", "16")):
        result = hotset(*verb)
        assert (result.exit_code, result.stdout) == (2, "")
        (line, *_) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert "runs in a later release; missing: attention over a latent cache" in line


def test_cards_say_what_they_are() -> None:
    """Which other matrices the 4-bit artefact packs is not known, and its card must not claim it."""
    card = read_card("glm-5.2-int4")
    assert "is not known" in card.source and "everything else BF16" in card.about
    assert "specs/glm_5_2.md" in read_card("glm-5.2").source
