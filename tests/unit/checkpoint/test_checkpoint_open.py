"""Which files make a checkpoint: folders, links, things that are no models, and what closing means."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import (
    ARCHITECTURE,
    GGML_F32,
    Tensor,
    entry,
    gguf_bytes,
    safetensors_bytes,
    safetensors_folder,
)

from hotset.checkpoint import open_checkpoint
from hotset.errors import CheckpointError, InternalError


def test_folder_with_one_gguf(tmp_path: Path) -> None:
    """A pulled GGUF model is a folder of one file and some JSON."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    (tmp_path / "hotset.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.kind == "gguf" and checkpoint.files == (tmp_path / "m.gguf",)


def test_ambiguous_folders_are_refused(tmp_path: Path) -> None:
    """Which of several models is meant is never guessed; the hint names one that works."""
    (tmp_path / "a.gguf").write_bytes(gguf_bytes())
    (tmp_path / "b.gguf").write_bytes(gguf_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models: a\.gguf, b\.gguf") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == f"give one: {tmp_path / 'a.gguf'}"
    safetensors_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds a safetensors model and GGUF files: a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").unlink()
    (tmp_path / "b.gguf").unlink()
    (tmp_path / "other.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 safetensors files and no model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_lone_shard_is_refused(tmp_path: Path) -> None:
    """One file of many without its index must not pass for a model."""
    folder = safetensors_folder(tmp_path / "m")
    shard = (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"holds model-00001-of-00002\.safetensors and no model\.safetensors\."):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"is one of several files, and there is no model\.safetensors\.index"):
        open_checkpoint(shard)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    """A pickle can run code: it is refused by name, with the reason, before a byte of it is read."""
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"cos\nsystem\n(S'touch PWNED'\ntR.")
    for path in (tmp_path, pickle):
        with pytest.raises(
            CheckpointError, match=r"pytorch_model\.bin is a Python pickle, which can run code"
        ) as caught:
            open_checkpoint(path)
        assert caught.value.hint == "get the model in safetensors or GGUF"


def test_things_that_are_no_models(tmp_path: Path) -> None:
    """Each in one line, and none of them hangs: a named pipe would wait for ever if it were opened for reading."""
    (tmp_path / "empty.gguf").touch()
    (tmp_path / "note.txt").write_text("hello")
    (tmp_path / "lfs.gguf").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    (tmp_path / "none").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "gone.gguf").symlink_to("blobs/abc")
    for name, message in (
        ("empty.gguf", r"empty\.gguf is empty"),
        ("note.txt", r"note\.txt is neither a GGUF nor a safetensors file"),
        ("lfs.gguf", r"lfs\.gguf is a Git LFS pointer of \d+ bytes, not the file itself"),
        ("none", r"none holds no model"),
        ("pipe.gguf", r"pipe\.gguf is not a regular file"),
        ("gone.gguf", r"gone\.gguf is a symbolic link to blobs/abc, which does not exist"),
        ("absent.gguf", r"cannot read .*absent\.gguf: No such file or directory"),
    ):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(tmp_path / name)


def test_hub_snapshots_are_links_to_nameless_blobs(tmp_path: Path) -> None:
    """A snapshot of huggingface_hub's cache opens by the link, and the blob itself by what is in it."""
    blob = tmp_path / "blobs" / "0123abcd"
    snapshot = tmp_path / "snapshots" / "main"
    blob.parent.mkdir()
    snapshot.mkdir(parents=True)
    blob.write_bytes(gguf_bytes())
    (snapshot / "m.gguf").symlink_to("../../blobs/0123abcd")
    for path in (snapshot, snapshot / "m.gguf", blob):
        assert set(open_checkpoint(path).tensors) == {"norm", "wq", "wk"}


def test_raw_is_a_read_only_view_that_outlives_the_checkpoint(tmp_path: Path) -> None:
    """Closing must not pull pages from under an array that is still in use, and nobody writes to a model."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    with open_checkpoint(path) as checkpoint:
        raw = checkpoint.raw("wq")
        info = checkpoint.tensors["wq"]
        expected = path.read_bytes()[info.offset : info.offset + info.nbytes]
    gc.collect()
    assert raw.tobytes() == expected
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 1
    with pytest.raises(InternalError, match="was closed before tensor wq was read"):
        checkpoint.raw("wq")
    with pytest.raises(CheckpointError, match="holds no tensor nothing"):
        checkpoint.raw("nothing")


def test_tables_cannot_be_changed(tmp_path: Path) -> None:
    """Two readers of one checkpoint must see the same tensors."""
    (tmp_path / "m.gguf").write_bytes(gguf_bytes())
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    with pytest.raises(TypeError):
        checkpoint.tensors["x"] = checkpoint.tensors["wq"]  # type: ignore[index]
    with pytest.raises(TypeError):
        checkpoint.metadata["general.architecture"] = "x"  # type: ignore[index]
    with pytest.raises(ValueError, match="read-only"):
        checkpoint.metadata["tokenizer.ggml.scores"][0] = 1


def test_opening_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    """The cycle collector rests while a header is read, also when that fails, and no longer."""
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert gc.isenabled()
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "bad.gguf")
    assert gc.isenabled()
    gc.disable()
    try:
        with pytest.raises(CheckpointError):
            open_checkpoint(tmp_path / "bad.gguf")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_opening_does_not_read_weights(tmp_path: Path) -> None:
    """A file of 8 GiB (sparse, so that it takes no disk) opens at once: only its header is looked at."""
    path = tmp_path / "big.gguf"
    num_weights = 2 << 30
    path.write_bytes(gguf_bytes((ARCHITECTURE,), (Tensor("w", (num_weights,), GGML_F32, 0),), data=b""))
    os.truncate(path, path.stat().st_size + 4 * num_weights)
    start = time.process_time()
    checkpoint = open_checkpoint(path)
    assert time.process_time() - start < 0.5
    assert checkpoint.tensors["w"].nbytes == 4 * num_weights
    assert np.count_nonzero(checkpoint.raw("w")[-4096:]) == 0


@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_many_tensors_open_in_linear_time(tmp_path: Path, kind: str) -> None:
    """A mixture of experts has 120,000 tensors (0.6 s): one check that looks at all others for each takes minutes."""
    num_tensors = 30_000
    names = [f"model.layers.{i // 1500}.mlp.experts.{i % 1500}.gate_proj.weight" for i in range(num_tensors)]
    data = bytes(32 * num_tensors)
    if kind == "gguf":
        tensors = tuple(Tensor(name, (8,), GGML_F32, 32 * i) for i, name in enumerate(names))
        path = tmp_path / "m.gguf"
        path.write_bytes(gguf_bytes((ARCHITECTURE,), tensors, data=data))
    else:
        header = {name: entry("F32", [8], 32 * i, 32 * i + 32) for i, name in enumerate(names)}
        path = safetensors_folder(tmp_path / "m", safetensors_bytes(header, data))
    start = time.process_time()
    checkpoint = open_checkpoint(path)
    assert time.process_time() - start < 1.5
    assert len(checkpoint.tensors) == num_tensors
