"""Threads share one engine without a thread of its own: whoever needs an event runs the steps, the others wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition, Lock


class Turns:
    """One thread at a time has the turn; the others sleep until it ends.

    ``at_end`` runs at the end of every turn, before another can begin. What a thread leaves for the holder of the turn
    and finds :meth:`try_work` refused is therefore seen by ``at_end``, never forgotten.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._condition = Condition(Lock())
        self._is_taken = False
        self._at_end = at_end

    def work_until(self, is_done: Callable[[], object], work: Callable[[], object]) -> None:
        """Call ``work``, one turn per call, until ``is_done()``. Turns of other threads count as well."""
        with self._condition:
            while not is_done():
                if self._is_taken:
                    self._condition.wait()
                else:
                    self._work(work)

    def try_work(self, work: Callable[[], object]) -> bool:
        """Call ``work`` if nobody has the turn; otherwise return ``False`` at once."""
        with self._condition:
            if not self._is_taken:
                self._work(work)
                return True
            return False

    @contextmanager
    def take(self) -> Iterator[None]:
        """Wait for the turn and keep it for the length of a ``with`` block."""
        with self._condition:
            while self._is_taken:
                self._condition.wait()
            self._begin()
        try:
            yield
        finally:
            with self._condition:
                self._end()

    def _work(self, work: Callable[[], object]) -> None:
        self._begin()
        self._condition.release()
        try:
            work()
        finally:
            self._condition.acquire()
            self._end()

    def _begin(self) -> None:
        self._is_taken = True

    def _end(self) -> None:
        try:
            self._at_end()
        finally:
            self._is_taken = False
            self._condition.notify_all()
