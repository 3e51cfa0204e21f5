"""The handle of a submitted request."""

from __future__ import annotations

from collections.abc import Callable

from hotset.engine.events import Event, Finished
from hotset.engine.sequence import Sequence


class Request:
    """Iterates over the events of one request; the last one is :class:`~hotset.engine.events.Finished`.

    Iterating runs the engine: steps serve all live requests, and events that belong to others wait in their handles.
    Different threads may iterate different handles; one handle belongs to one thread at a time.
    """

    def __init__(
        self, sequence: Sequence, wait: Callable[[Sequence], None], cancel: Callable[[Sequence], None]
    ) -> None:
        self._sequence = sequence
        self._wait = wait
        self._cancel = cancel
        self._is_exhausted = False

    def __iter__(self) -> Request:
        return self

    def __next__(self) -> Event:
        events = self._sequence.events
        if not events:
            if self._is_exhausted:
                raise StopIteration
            self._wait(self._sequence)
        event = events.popleft()
        if isinstance(event, Finished):
            self._is_exhausted = True
        return event

    @property
    def sequence(self) -> Sequence:
        """What the engine knows of this request. Belongs to the thread that has the turn."""
        return self._sequence

    @property
    def num_prompt_tokens(self) -> int:
        return self._sequence.num_prompt

    @property
    def is_finished(self) -> bool:
        """The request has ended; its last events may still be waiting to be read."""
        return self._sequence.finish_reason is not None

    def cancel(self) -> None:
        """End the request within one step, from any thread. Does nothing when it has ended already.

        The handle still yields what was produced before, and a terminal event.
        """
        self._cancel(self._sequence)
