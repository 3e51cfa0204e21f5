"""Model files: what they hold, whether that is what the model needs, and where to get them."""

from __future__ import annotations

from hotset.checkpoint.checkpoint import Checkpoint, open_checkpoint
from hotset.checkpoint.formats import FORMATS, RUNNABLE, Format
from hotset.checkpoint.manifest import Account, TensorDecl, account
from hotset.checkpoint.tensor import TensorInfo

__all__ = [
    "FORMATS",
    "RUNNABLE",
    "Account",
    "Checkpoint",
    "Format",
    "TensorDecl",
    "TensorInfo",
    "account",
    "open_checkpoint",
]
