"""Random checkpoints: what is drawn, that it is the same every time, and what is never overwritten."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotset.chat.random_tokenizer import BOS, CONTROL, EOS, byte_tokenizer
from hotset.chat.tokenizer import Tokenizer
from hotset.checkpoint import Account, Checkpoint, account, open_checkpoint
from hotset.checkpoint.progress import SilentProgress
from hotset.checkpoint.scaled import check_values, weight_array
from hotset.checkpoint.store import Record, read_record
from hotset.checkpoint.synth import write_checkpoint
from hotset.errors import CheckpointError, MachineError, RequestError
from hotset.models.registry import describe
from hotset.plan.cards import cut_layers, describe_config, read_card

# A model of this family small enough to read whole: ratios 0, 0, 4, 128, 4, and a draft head.
TINY: dict[str, Any] = read_card("deepseek-v4-mini").config | {
    "hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "head_dim": 128, "q_lora_rank": 64,
    "o_groups": 2, "o_lora_rank": 64, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "index_n_heads": 2, "index_head_dim": 64, "vocab_size": 600, "compress_ratios": [0, 0, 4, 128, 4, 0, 0, 0],
    "num_nextn_predict_layers": 1, "dspark_block_size": 5, "dspark_target_layer_ids": [2, 3, 4],
    "dspark_markov_rank": 32,
}  # fmt: skip


def write(folder: Path, seed: int = 7, config: Mapping[str, Any] = TINY, **options: Any) -> Record:
    spec = describe_config("tiny", dict(config))
    files = byte_tokenizer(config["vocab_size"], config["bos_token_id"], config["eos_token_id"])
    return write_checkpoint(folder, "tiny", config, spec.tensors, seed, SilentProgress(), files=files, **options)


def opened(folder: Path) -> tuple[Checkpoint, Account]:
    checkpoint = open_checkpoint(folder)
    return checkpoint, account(checkpoint, describe(checkpoint).tensors)


def data_of(folder: Path) -> dict[str, bytes]:
    with open_checkpoint(folder) as checkpoint:
        return {name: checkpoint.raw(name).tobytes() for name in checkpoint.tensors}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("synth") / "tiny"
    write(target)
    return target


def test_every_declared_tensor_is_there(folder: Path) -> None:
    """The account is the judge: released names, shapes and formats, draft head included; scales and ids are valid."""
    checkpoint, result = opened(folder)
    assert not result.absent and {info.name.split(".")[0] for info, _ in result.ignored} == {"mtp"}
    scaled = sum(bool(decl.stored_as) for decl in result.declared.values())
    assert check_values(checkpoint, result) == scaled + TINY["num_hash_layers"]
    assert json.loads((folder / "config.json").read_text()) == TINY


def test_products_keep_their_size(folder: Path) -> None:
    """A matrix of deviation in^-1/2 maps inputs near one to outputs near one; off by a power of two a deep slice
    overflows or dies out, and its speed is that of zeros."""
    checkpoint, result = opened(folder)
    for key, decl in result.declared.items():
        if decl.role != "linear" or key.endswith(".fn"):
            continue
        weight = weight_array(checkpoint, result, key)
        gain = float(weight.std()) * weight.shape[1] ** 0.5
        assert 0.5 < gain < 1.6, (key, gain)
        assert abs(float(weight.mean())) < 0.2 * float(weight.std()) + 0.02, key
    assert (weight_array(checkpoint, result, "layers.2.comp.norm") == 1).all()
    assert 0.9 < weight_array(checkpoint, result, "embed").std() < 1.1
    assert (weight_array(checkpoint, result, "layers.0.hc_attn.scale") == 0.5).all()
    assert (weight_array(checkpoint, result, "layers.0.sink") == 0).all()
    assert 0.005 < weight_array(checkpoint, result, "layers.4.hc_ffn.fn").std() < 0.015


def test_ids_of_a_row_are_different_experts(folder: Path) -> None:
    """A token routed to one expert twice would read fewer bytes than the real model."""
    checkpoint, result = opened(folder)
    ids = weight_array(checkpoint, result, "layers.1.tid2eid")
    assert ids.shape == (600, 3) and set(np.unique(ids)) == set(range(8))
    assert all(len(set(row)) == 3 for row in ids.tolist())


def test_numbers_start_at_multiples_of_their_size(folder: Path) -> None:
    """Other readers map them as arrays of their type."""
    with open_checkpoint(folder) as checkpoint:
        assert all(info.offset % info.format.block_bytes == 0 for info in checkpoint.tensors.values())


def test_seed_and_name_decide_every_byte(folder: Path, tmp_path: Path) -> None:
    """A slice of two layers has the bytes of the first two layers of the whole: results of both can be compared."""
    write(tmp_path / "again")
    write(tmp_path / "other", seed=8)
    write(tmp_path / "cut", config=cut_layers(TINY, 2))
    whole, other, cut = data_of(folder), data_of(tmp_path / "other"), data_of(tmp_path / "cut")
    assert data_of(tmp_path / "again") == whole
    assert cut == {name: whole[name] for name in cut}
    drawn = [name for name in whole if not name.endswith(("norm.weight", "scale", "sink", "_base", "_head_base"))]
    assert len(drawn) > 100 and all(whole[name] != other[name] for name in drawn)
    names = [name for name in drawn if name.endswith("w1.weight")]
    assert len({whole[name] for name in names}) == len(names)


def test_bytes_are_the_same_on_every_machine(folder: Path) -> None:
    """Results of two sessions are compared over such checkpoints: a generator that depends on the process or on the
    version of NumPy shows here."""
    data = data_of(folder)
    names = (
        "layers.0.attn.wq_a.weight",
        "layers.4.ffn.experts.7.w2.weight",
        "layers.2.ffn.gate.tid2eid",
        "embed.weight",
    )
    assert [zlib.crc32(data[name]) for name in names] == [3186235278, 2386749088, 2142542263, 3264325367]


def test_tokenizer_writes_any_text(folder: Path, tmp_path: Path) -> None:
    """One token per byte of text, and control tokens at the ids of the release when the vocabulary is large enough."""
    tokenizer = Tokenizer.from_folder(folder)
    text = "Größe 1 M, \u4e2d\u6587 \U0001f600\n"
    ids = tokenizer.encode(text)
    assert ids == [3 + byte for byte in text.encode()] and tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, frozenset({2}), 260 + len(CONTROL))
    assert tokenizer.encode_prompt("a") == [3 + ord("a")]
    for name, content in byte_tokenizer(129280, 0, 1).items():
        (tmp_path / name).write_text(content)
    released = Tokenizer.from_folder(tmp_path)
    assert released.encode(f"{BOS}<｜User｜>a<｜Assistant｜></think>{EOS}") == [0, 128803, 100, 128804, 128822, 1]


def test_headers_only(tmp_path: Path) -> None:
    """The same headers, and no data on the disk; scales that were never written do not pass for weights."""
    record = write(tmp_path / "m", headers_only=True)
    checkpoint, _ = opened(tmp_path / "m")
    assert record.total_bytes > checkpoint.total_bytes > 1 << 20
    assert sum(path.stat().st_blocks * 512 for path in checkpoint.files) < 1 << 20
    with pytest.raises(CheckpointError, match=r"scales in layers\.0\.attn\.wq_a\.scale are 2\^-127"):
        check_values(*opened(tmp_path / "m"))


def test_large_checkpoints_have_a_file_per_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotset.checkpoint.synth.LARGEST_FILE_BYTES", 1 << 20)
    write(tmp_path / "m")
    names = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-00010.safetensors" for i in range(1, 11)]
    checkpoint, _ = opened(tmp_path / "m")
    places = {info.file_id for name, info in checkpoint.tensors.items() if name.startswith("layers.3.")}
    assert len(places) == 1
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in checkpoint.tensors.values())


def test_nothing_is_overwritten_by_accident(tmp_path: Path) -> None:
    """--force replaces what synth wrote, and nothing else whatever the folder is called."""
    write(tmp_path / "m")
    with pytest.raises(RequestError, match="is there already") as caught:
        write(tmp_path / "m", seed=8)
    assert caught.value.hint is not None and "--force" in caught.value.hint
    before = data_of(tmp_path / "m")
    write(tmp_path / "m", seed=8, force=True)
    assert data_of(tmp_path / "m") != before
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("x")
    with pytest.raises(RequestError, match="was not written by hotset synth"):
        write(mine, force=True)
    assert (mine / "thesis.txt").read_text() == "x"


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the first byte; headers alone would fit."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=65 << 20))
    monkeypatch.setattr("hotset.checkpoint.synth._SPARE_DISK_BYTES", (65 << 20) - 500_000)
    with pytest.raises(MachineError, match=r"MiB to write, 65\.00 MiB free in .*"):
        write(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "m", headers_only=True)


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    """Neither half a checkpoint under its name nor gigabytes under a hidden one; the folder before it stays."""

    class Interrupted(SilentProgress):
        def advance(self, num_bytes: int) -> None:
            raise KeyboardInterrupt

    write(tmp_path / "m")
    spec = describe_config("tiny", TINY)
    before = data_of(tmp_path / "m")
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(tmp_path / "m", "tiny", TINY, spec.tensors, 9, Interrupted(), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    assert data_of(tmp_path / "m") == before


def test_the_record_lists_what_was_written(folder: Path) -> None:
    """So that `hotset list` shows it and a changed file is noticed."""
    record = read_record(folder)
    assert record is not None and record.first_missing(folder) is None
    assert (record.source, record.commit, record.models) == ("hotset synth tiny", "random, seed 7", (".",))
    assert {file.path for file in record.files} == {path.name for path in folder.iterdir()} - {"hotset.json"}
