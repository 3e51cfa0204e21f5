"""The account: every tensor is loaded, absent, or ignored with a reason, and anything else stops by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import GGML_F32, GGML_Q5_K, TENSORS, Tensor, gguf_bytes

from hotset.checkpoint import Checkpoint, TensorDecl, account, open_checkpoint
from hotset.checkpoint.manifest import formats_of
from hotset.checkpoint.scaled import weight_array
from hotset.errors import CheckpointError, InternalError

QUANTS = ("Q8_0", "Q4_0")
NORM = TensorDecl("norm", "norm", (8,), "norm", ("F32",))
WQ = TensorDecl("attn.wq", "wq", (4, 32), "linear", QUANTS)
WK = TensorDecl("attn.wk", "wk", (2, 32), "linear", QUANTS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes())
    return open_checkpoint(path)


def test_complete_account(checkpoint: Checkpoint) -> None:
    """Loaded by key, optional ones that are absent listed, ignored ones with their reason, tied ones under two keys."""
    declarations = [
        NORM,
        WQ,
        TensorDecl("head", "wq", (4, 32), "linear", QUANTS),
        TensorDecl("wk", "wk", (99,), "table", (), need="ignored", reason="only for training"),
        TensorDecl("bias", "wq.bias", (4,), "norm", ("F32",), need="maybe", reason="no bias in this model"),
        TensorDecl("other", "other", (1,), "table", (), need="ignored", reason="never used"),
    ]
    result = account(checkpoint, declarations)
    assert {key: info.name for key, info in result.loaded.items()} == {"norm": "norm", "attn.wq": "wq", "head": "wq"}
    assert [(decl.name, decl.reason) for decl in result.absent] == [("wq.bias", "no bias in this model")]
    assert [(info.name, reason) for info, reason in result.ignored] == [("wk", "only for training")]


def test_every_problem_is_named_in_its_class(checkpoint: Checkpoint) -> None:
    """One message holds all four classes; a present optional tensor is checked like any other."""
    declarations = [
        TensorDecl("norm", "norm", (9,), "norm", ("F32",)),
        TensorDecl("wq", "wq", (4, 32), "linear", ("F16", "BF16"), need="maybe"),
        TensorDecl("lost", "lost", (1,), "linear", QUANTS),
    ]
    with pytest.raises(CheckpointError) as caught:
        account(checkpoint, declarations)
    assert caught.value.message == (
        f"{checkpoint.path} does not fit the model: 1 missing: lost; 1 not expected: wk; "
        "1 wrong shape: norm is 8, expected 9; 1 wrong format: wq is Q8_0, expected F16 or BF16"
    )


def test_swapped_dimensions_are_a_wrong_shape(checkpoint: Checkpoint) -> None:
    """The same number of weights in another order is another matrix."""
    with pytest.raises(CheckpointError, match="wq is 4x32, expected 32x4"):
        account(checkpoint, [NORM, TensorDecl("wq", "wq", (32, 4), "linear", QUANTS), WK])


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    """270 names hide the twelve that matter: the first eight of a class and the number of the rest."""
    path = tmp_path / "m.gguf"
    extra = tuple(Tensor(f"x{i}", (8,), GGML_F32, 256 + 32 * i) for i in range(12))
    path.write_bytes(gguf_bytes(tensors=(*TENSORS, *extra), data=b"\0" * 640))
    with pytest.raises(CheckpointError, match=r"12 not expected: x0, x1, x2, x3, x4, x5, x6, x7 and 4 more"):
        account(open_checkpoint(path), [NORM, WQ, WK])


def test_format_that_hotset_cannot_run(tmp_path: Path) -> None:
    """A Q5_K tensor is refused as Q5_K, with what would work; it may be there when it is ignored."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=(Tensor("w", (256,), GGML_Q5_K, 0),), data=b"\0" * 176))
    decl = TensorDecl("w", "w", (256,), "linear", ("F32", "Q8_0"))
    with pytest.raises(CheckpointError, match=r"tensor w is Q5_K; hotset runs F32, F16, BF16, Q8_0") as caught:
        account(open_checkpoint(path), [decl])
    assert caught.value.hint is not None
    ignored = TensorDecl("w", "w", (1,), "linear", (), need="ignored", reason="draft head, not used")
    assert account(open_checkpoint(path), [ignored]).ignored[0][1] == "draft head, not used"


def test_a_key_declared_twice_is_our_fault(checkpoint: Checkpoint) -> None:
    """Two tensors for one key would make one of them vanish."""
    with pytest.raises(InternalError, match=r"declares the key attn\.wq twice"):
        account(checkpoint, [NORM, WQ, TensorDecl("attn.wq", "wk", (2, 32), "linear", QUANTS)])


def test_parts_of_a_stacked_tensor(checkpoint: Checkpoint) -> None:
    """One tensor, many weights: parts lie one after another and are all of it; none is another's."""
    stack = TensorDecl("experts", "wq", (4, 32), "linear", QUANTS, parts=4)
    result = account(checkpoint, [NORM, stack, WK])
    assert list(result.weights()) == ["norm", "experts.0", "experts.1", "experts.2", "experts.3", "attn.wk"]
    whole, parts = checkpoint.tensors["wq"], [result.find(f"experts.{part}") for part in range(4)]
    assert {(info.name, info.shape, info.nbytes, decl.key) for info, decl in parts} == {("wq", (32,), 34, "experts")}
    assert b"".join(checkpoint.view(info).tobytes() for info, _ in parts) == checkpoint.raw("wq").tobytes()
    values = [weight_array(checkpoint, result, f"experts.{part}") for part in range(4)]
    np.testing.assert_array_equal(values, checkpoint.array("wq"))
    assert result.find("experts") == (whole, stack) and formats_of([stack], result) == {"experts": "Q8_0"}
    for wrong in ("experts.4", "experts.x", "norm.0", "nothing"):
        with pytest.raises(InternalError, match=f"no weight {wrong} was loaded"):
            result.find(wrong)
