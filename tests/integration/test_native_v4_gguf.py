"""GGUF files of the DeepSeek-V4 family in the native executor: stacked experts, formats that releases do not have."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from dsv4_files import TinyV4
from dsv4_gguf import gguf_tensors, metadata, write_gguf, write_v4_gguf
from dsv4_native import v4_described, v4_judge, v4_native
from dsv4_reference import run_chunks
from helpers import random_tokens

from hotset.api import describe_model
from hotset.errors import CheckpointError

EXACT = 1e-5  # as in test_native_v4_parity.py, which says why a few tokens may differ


def test_same_numbers_give_the_same_bits(isa: str, tmp_path: Path) -> None:
    """The float twin of a released checkpoint: experts read out of stacks, by threads that each take their rows."""
    m = TinyV4()
    tokens = random_tokens(200, m.vocab)
    with v4_described(tmp_path / "released", m).checkpoint as checkpoint:
        want = run_chunks(v4_native(describe_model(checkpoint.path), 1, isa), tokens, (7, 130))
    d = describe_model(write_v4_gguf(tmp_path / "m.gguf", m))
    with d.checkpoint:
        np.testing.assert_array_equal(run_chunks(v4_native(d, 2, isa), tokens, (100,)), want)


FORMATS = {
    "as converted": {},
    "small": {"dense": "Q4_0", "experts": "Q4_1", "floats": "F16"},
    "large": {"dense": "BF16", "experts": "Q8_0", "floats": "F32"},
}


@pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_every_kind_of_layer(ratio: int, formats: dict[str, str], isa: str, tmp_path: Path) -> None:
    """Formats of conversions in every product of the family: grouped, gated, experts, indexer, mixing.

    A narrow window, so that a row at the border of two roundings reaches few tokens.
    """
    m = TinyV4(ratios=(ratio,), formats="official", hash_layers=0, window=4, seed=3)
    d = describe_model(write_v4_gguf(tmp_path / "m.gguf", m, **formats))
    tokens = random_tokens(300, m.vocab)
    with d.checkpoint:
        found = run_chunks(v4_native(d, 2, isa), tokens, (1, 2, 40, 130))
        errors = np.abs(found - run_chunks(v4_judge(d), tokens)).max(1)
    assert np.quantile(errors, 0.95) <= EXACT


def test_scales_inside_blocks_are_checked_while_loading(tmp_path: Path) -> None:
    m = TinyV4(ratios=(0,), formats="official")
    tensors = gguf_tensors(m)
    tensors["blk.0.ffn_up_exps.weight"][0][5, 3, 0] = 255
    d = describe_model(write_gguf(tmp_path / "m.gguf", metadata(m), tensors))
    with d.checkpoint, pytest.raises(CheckpointError, match=r"scales in blk\.0\.ffn_up_exps\.weight are NaN"):
        v4_native(d)


def test_file_that_ends_early_while_loading(tmp_path: Path) -> None:
    """The last expert of the last stack is cut off after the header was read."""
    m = TinyV4(ratios=(0,), formats="official")
    tensors = gguf_tensors(m)
    stack = tensors.pop("blk.0.ffn_down_exps.weight")
    path = write_gguf(tmp_path / "m.gguf", metadata(m), tensors | {"blk.0.ffn_down_exps.weight": stack})
    d = describe_model(path)
    os.truncate(path, path.stat().st_size - 64)
    with d.checkpoint, pytest.raises(CheckpointError, match=r"reading blk\.0\.ffn_down_exps\.weight"):
        v4_native(d)
