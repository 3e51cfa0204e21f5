"""What an engine tells of its run: whoever keeps the run record stands between the engine and its executor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hotset.engine.batch import StepBatch

if TYPE_CHECKING:
    from hotset.engine.engine import EngineStats


class Recorder(Protocol):
    """Runs the steps of an engine and makes its run record (:class:`hotset.audit.recorder.RunRecorder`)."""

    def step(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run one step of the executor, and return its logits."""
        ...

    def request_samples(self, count: int) -> None:
        """Time the ops of ``count`` of the steps to come."""
        ...

    def record(self, stats: EngineStats) -> Any:
        """The run record of this moment."""
        ...
