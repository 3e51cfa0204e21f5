"""hotset: runs large mixture-of-experts language models on machines whose memory is not one pool.

The public Python API. Names are imported on first use, so that ``import hotset`` is quick and has no side effects.

>>> with hotset.load("smollm2-135m") as engine:
...     for event in engine.generate("Hello", hotset.Sampling(max_tokens=16)):
...         print(event.text, end="")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hotset.api import load
    from hotset.engine.engine import Engine
    from hotset.engine.events import Event, Finished, Piece
    from hotset.engine.request import Request
    from hotset.engine.sampling import Sampling
    from hotset.errors import CheckpointError, HotsetError, InternalError, MachineError, RequestError
    from hotset.kv.session import Session
    from hotset.plan.budget import Plan

_HOMES = {
    "load": "hotset.api",
    "Engine": "hotset.engine.engine",
    "Event": "hotset.engine.events",
    "Finished": "hotset.engine.events",
    "Piece": "hotset.engine.events",
    "Request": "hotset.engine.request",
    "Sampling": "hotset.engine.sampling",
    "Plan": "hotset.plan.budget",
    "Session": "hotset.kv.session",
    "HotsetError": "hotset.errors",
    "RequestError": "hotset.errors",
    "MachineError": "hotset.errors",
    "CheckpointError": "hotset.errors",
    "InternalError": "hotset.errors",
}

__all__ = [
    "CheckpointError",
    "Engine",
    "Event",
    "Finished",
    "HotsetError",
    "InternalError",
    "MachineError",
    "Piece",
    "Plan",
    "Request",
    "RequestError",
    "Sampling",
    "Session",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hotset' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
