"""What cache rows depend on besides the tokens, so that rows of one engine are never taken for those of another."""

from __future__ import annotations

import hashlib
import os
from contextlib import ExitStack
from dataclasses import dataclass, field

from hotset.checkpoint.checkpoint import Checkpoint
from hotset.checkpoint.manifest import Account
from hotset.models.spec import ModelSpec

NUM_SAMPLED = 256
SAMPLE_BYTES = 64


@dataclass(frozen=True)
class Identity:
    """The same tokens give the same rows, bit for bit, in two engines of equal identity.

    Attributes:
        model: name of the model, for messages; not compared, because files may be renamed.
        weights: fingerprint of the weights, see :func:`identify`.
        program: fingerprint of the op list.
        cache: the cache and frontier groups in words, e.g. ``"kv: 4 layers x BF16 row of 256 B per token"``.
        kernels: kernel set, e.g. ``"avx512"``: sets differ in the last bit.
    """

    model: str = field(compare=False)
    weights: str
    program: str
    cache: tuple[str, ...]
    kernels: str


def identify(spec: ModelSpec, checkpoint: Checkpoint, account: Account, kernels: str) -> Identity:
    """Return the identity of a model that runs on ``kernels``.

    The fingerprint of the weights covers name, shape, format and size of every tensor, and 64 bytes from the beginning,
    the middle and the end of 256 tensors, spread evenly over the sorted list: enough to tell a model from its fine-tune
    in a few milliseconds, not a proof that every byte is the same.
    """
    weights = hashlib.sha256()
    loaded = sorted(account.loaded.items())
    for key, info in loaded:
        weights.update(f"{key} {info.format.name} {info.shape} {info.nbytes}\n".encode())
    step = max(1, len(loaded) / NUM_SAMPLED)
    with ExitStack() as stack:
        # Read, not mapped: touching a mapped page makes the kernel map sixteen, and all of them count as resident.
        handles = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in checkpoint.files]
        for handle in handles:
            stack.callback(os.close, handle)
        for index in range(min(len(loaded), NUM_SAMPLED)):
            info = loaded[int(index * step)][1]
            for start in (0, info.nbytes // 2, max(0, info.nbytes - SAMPLE_BYTES)):
                size = min(SAMPLE_BYTES, info.nbytes - start)
                weights.update(os.pread(handles[info.file_id], size, info.offset + start))
    cache = [
        f"{group.name}: {len(group.layers)} layers x {group.format} row of {group.row_bytes} B per "
        + ("token" if group.tokens_per_row == 1 else f"{group.tokens_per_row} tokens")
        for group in spec.groups
    ]
    cache += [
        f"{group.name}: {len(group.layers)} layers x {group.num_rows} {group.format} rows of {group.row_bytes} B"
        for group in spec.program.frontier
    ]
    # Dataclasses of names, numbers and tuples: their repr says everything, floats to the last digit.
    program = hashlib.sha256(repr(spec.program.ops).encode())
    return Identity(spec.name, weights.hexdigest(), program.hexdigest(), tuple(cache), kernels)
