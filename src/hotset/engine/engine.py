"""The engine: requests in, events out.

A request is prepared (tokens, checks, a seed), queued, admitted when its blocks can be reserved, and scheduled step by
step; its tokens are chosen and turned into events, and exactly one terminal event ends it, whatever happens.
"""

from __future__ import annotations

import secrets
from collections import Counter, abc, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from hotset.engine.batch import Executor
from hotset.engine.events import Event, FinishReason
from hotset.engine.prompt import Prompt, check_length, encode
from hotset.engine.recorder import Recorder
from hotset.engine.request import Request
from hotset.engine.sampler import Sampler
from hotset.engine.sampling import Sampling
from hotset.engine.scheduler import Scheduler, Step
from hotset.engine.scoring import compute, score
from hotset.engine.sequence import Sequence
from hotset.engine.text import TextCodec
from hotset.engine.turns import Turns
from hotset.errors import HotsetError, InternalError, RequestError
from hotset.kv.identity import Identity
from hotset.kv.memory import BlockTable, CacheMemory
from hotset.kv.session import Session, open_session, save_session
from hotset.machine.verify import RegionPages
from hotset.program.cache import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was made, and the accounts of the moment.

    Token counts are those of ended requests; ``num_cached_tokens`` are the prompt tokens that were not computed, and
    ``num_recomputed_tokens`` those that were although their blocks were cached (see :class:`Finished`). ``finished``
    counts requests by finish reason. ``num_blocks`` is free + used + cached. ``snapshot_spacing`` is the number of
    tokens between two snapshots of the frontier that a short prompt leaves; 0 when none are kept. Lookups are those in
    the prefix cache, see :class:`hotset.kv.lookups.Lookups`.
    """

    num_waiting: int
    num_running: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_recomputed_tokens: int
    num_generated_tokens: int
    finished: dict[str, int]
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_reserved_blocks: int
    num_snapshots: int
    num_used_snapshots: int
    snapshot_spacing: int
    num_lookups: int
    num_repeats: int
    num_hits: int


class Engine:
    """A loaded model that answers requests, many at once. Use it as a context manager, or call :meth:`close`.

    There is no background thread: iterating a request runs the engine, and threads take turns.
    """

    def __init__(
        self,
        executor: Executor,
        codec: TextCodec | None,
        sampler: Sampler,
        *,
        vocab_size: int,
        max_context: int,
        max_sequences: int,
        prefill_chunk: int | None = None,
        eos_ids: Collection[int] = (),
        plan: Any = None,
        num_snapshots: int = 0,
        identity: Identity | None = None,
        recorder: Recorder | None = None,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        """Make an engine that owns ``executor`` and closes it.

        ``max_context`` counts prompt and output tokens of one sequence. ``prefill_chunk`` is the most tokens of one
        step, at most (and by default) ``executor.max_tokens``. ``eos_ids`` are added to those of ``codec``; without a
        ``codec`` prompts are token ids and pieces have no text. ``num_snapshots`` frontiers are kept for reuse, if the
        model has any. Without an ``identity`` sessions cannot be saved or loaded; without a ``recorder`` there is no
        run record. RequestError when the numbers do not go together.
        """
        self._max_tokens = executor.max_tokens if prefill_chunk is None else prefill_chunk
        if not 1 <= self._max_tokens <= executor.max_tokens:
            raise RequestError(
                f"prefill_chunk is {prefill_chunk}, expected 1 to {executor.max_tokens}, the room of the executor"
            )
        if executor.frontier_bytes and executor.num_frontiers < max_sequences:
            raise RequestError(
                f"max_sequences is {max_sequences}, the executor holds {executor.num_frontiers} frontiers",
                f"at most {executor.num_frontiers} sequences",
            )
        self._memory = CacheMemory(executor.num_blocks, block_tokens, executor, num_snapshots)
        self._scheduler = Scheduler(self._memory, self._max_tokens, executor.max_outputs, max_sequences)
        self._executor = executor
        self._codec = codec
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._eos_ids = frozenset(eos_ids) | frozenset(codec.eos_ids if codec else ())
        self._plan = plan
        self._identity = identity
        self._recorder = recorder
        self._stepper: Executor | Recorder = executor if recorder is None else recorder
        self._turns = Turns(self._settle)
        # Other threads only append here; the thread that has the turn empties both.
        self._arrivals: deque[Sequence] = deque()
        self._cancels: deque[Sequence] = deque()
        self._is_closed = False
        self._num_steps = 0
        self._totals: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    # What callers use

    @property
    def plan(self) -> Any:
        """The plan the engine was loaded with."""
        return self._plan

    @property
    def codec(self) -> TextCodec | None:
        """The tokenizer."""
        return self._codec

    @property
    def max_context(self) -> int:
        """Most tokens of one sequence, prompt and output together."""
        return self._max_context

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self._vocab_size

    def generate(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        chat_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Event]:
        """Answer a prompt and yield pieces as they become certain, then one ``Finished``.

        ``prompt`` is a string that the model gets as it is (control tokens in it count as such), a list of messages
        that is rendered with the model's chat template (control tokens inside a message are plain text), or a sequence
        of token ids. ``chat_options`` are variables for the template. Closing the iterator, or leaving a ``for`` loop
        over it, cancels the request. RequestError, at once, when the request cannot be served.
        """
        return self._stream(self._prepare(prompt, sampling, chat_options))

    def submit(
        self,
        prompt: Prompt,
        sampling: Sampling | None = None,
        *,
        chat_options: Mapping[str, Any] | None = None,
    ) -> Request:
        """Queue a request beside others and return its handle; arguments and errors as for :meth:`generate`.

        Nothing runs until some handle is iterated.
        """
        return self._enqueue(self._prepare(prompt, sampling, chat_options))

    def logits(
        self, token_ids: abc.Sequence[int] | NDArray[np.integer[Any]], positions: Literal["all", "last"] = "all"
    ) -> NDArray[np.float32]:
        """Return the logits that follow every given token, float32 [n, vocab], or the last one only, [1, vocab].

        Shares nothing with the cache of earlier requests. Running requests pause meanwhile.
        """
        if positions not in ("all", "last"):
            raise RequestError(f"positions is {positions!r}, expected 'all' or 'last'")
        tokens = encode(token_ids, {}, None, self._vocab_size)
        limit = min(self._max_context, self._memory.num_rows)
        if len(tokens) > limit:
            raise RequestError(f"{len(tokens)} tokens, the context is {limit}", f"at most {limit} tokens at a time")
        with self._turns.take():
            self._check_open()
            is_all = positions == "all"
            try:
                return score(self._executor, self._memory, tokens, self._vocab_size, self._max_tokens, is_all)
            except Exception as error:
                raise _wrap(error) from error

    def stats(self) -> EngineStats:
        """Return counts and accounts, between two steps."""
        with self._turns.take():
            return self._stats()

    def _stats(self) -> EngineStats:
        self._settle()
        pool, frontiers, lookups = self._memory.pool, self._memory.frontiers, self._memory.lookups
        return EngineStats(
            num_waiting=len(self._scheduler.waiting),
            num_running=len(self._scheduler.running),
            num_steps=self._num_steps,
            num_prompt_tokens=self._totals["prompt"],
            num_cached_tokens=self._totals["cached"],
            num_recomputed_tokens=self._totals["recomputed"],
            num_generated_tokens=self._totals["generated"],
            finished=dict(self._finished),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_used_blocks=pool.num_used,
            num_cached_blocks=pool.num_cached,
            num_reserved_blocks=pool.num_reserved,
            num_snapshots=frontiers.num_snapshots,
            num_used_snapshots=frontiers.num_used,
            snapshot_spacing=frontiers.spacing(1),
            num_lookups=lookups.num_lookups,
            num_repeats=lookups.num_repeats,
            num_hits=lookups.num_hits,
        )

    def record(self) -> Any:
        """Return the run record of this moment, a :class:`hotset.audit.record.RunRecord`. Running requests pause.

        It holds no prompt and no text. RequestError for an engine that ``hotset.load`` did not make.
        """
        with self._turns.take():
            self._check_open()
            return self._require_recorder().record(self._stats())

    def request_samples(self, count: int) -> None:
        """Time every op in about ``count`` of the steps to come, for the run record; each takes microseconds more."""
        with self._turns.take():
            self._require_recorder().request_samples(count)

    def _require_recorder(self) -> Recorder:
        if self._recorder is None:
            raise RequestError("this engine keeps no run record", "use hotset.load")
        return self._recorder

    def regions(self) -> tuple[RegionPages, ...]:
        """Every allocation of the executor: where it was planned, and where its pages are now."""
        with self._turns.take():
            return self._executor.regions()

    def clear_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""
        with self._turns.take():
            self._memory.forget()

    def save_session(self, path: str | Path, what: Request | abc.Sequence[int] | NDArray[np.integer[Any]]) -> Session:
        """Write the cached rows of a sequence to a file, from which :meth:`load_session` goes on with the same bits.

        ``what`` is a request of this engine, which may still be running, or token ids. What is not in the cache of them
        is computed first: for a request that has ended, the end of its answer, at most a few hundred tokens. The file
        is readable by its owner only; it holds the tokens in clear. Running requests pause meanwhile.

        Raises:
            RequestError: fewer than 2 tokens, or more than fit beside the running requests.
            MachineError: the file cannot be written; an older file of that name is then still whole.
        """
        identity = self._require_identity()
        source = what if isinstance(what, Request) else encode(what, {}, None, self._vocab_size)
        with self._turns.take():
            self._check_open()
            self._settle()
            self._scheduler.requeue_torn()
            tokens, table = self._state(source)
            try:
                with self._computed(tokens) if table is None else nullcontext(table) as table:
                    return save_session(Path(path), self._memory, identity, table, tokens)
            except Exception as error:
                raise _wrap(error) from error

    def _state(self, source: Request | NDArray[np.int32]) -> tuple[NDArray[np.int32], BlockTable | None]:
        """The tokens of a session, and the table that holds rows of them, if there is one."""
        if not isinstance(source, Request):
            return source, None
        sequence = source.sequence
        if sequence.finish_reason is None and not self._scheduler.holds(sequence):
            raise RequestError("this request runs in another engine", "save it with the engine that it was given to")
        return sequence.state()

    @contextmanager
    def _computed(self, tokens: NDArray[np.int32]) -> Iterator[BlockTable]:
        limit = min(self._max_context, self._memory.num_rows + 1)
        if not 2 <= len(tokens) <= limit:
            raise RequestError(f"a session of {len(tokens)} tokens, expected 2 to {limit}", f"at most {limit} tokens")
        table = compute(self._executor, self._memory, tokens, self._max_tokens)
        try:
            yield table
        finally:
            table.release()

    def load_session(self, path: str | Path) -> Session:
        """Put the rows of a saved session into the cache, and return its tokens and how many of them are reusable.

        A prompt that begins with these tokens goes on where the session was saved. Nothing is pinned: like any cached
        prefix, the session is given up when its room is needed.

        Raises:
            MachineError: the file cannot be read, or is damaged.
            RequestError: it belongs to another model, cache format or kernel set, or does not fit this engine.
        """
        identity = self._require_identity()
        limit = min(self._max_context, self._memory.num_rows + 1) - 1
        with open_session(Path(path), self._memory, identity, self._vocab_size, limit) as session:
            session.verify()
            with self._turns.take():
                self._check_open()
                return session.restore(self._memory)

    def _require_identity(self) -> Identity:
        if self._identity is None:
            raise RequestError("this engine was not told which model it runs, so it has no sessions", "use hotset.load")
        return self._identity

    def close(self) -> None:
        """Cancel every request and free the executor. A second call does nothing."""
        with self._turns.take():
            if self._is_closed:
                return
            self._is_closed = True
            self._settle()
            for sequence in (*self._scheduler.running, *self._scheduler.waiting):
                self._finish(sequence, "cancelled")
            self._executor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Into the queue and out of it

    def _prepare(self, prompt: Prompt, sampling: Sampling | None, chat_options: Mapping[str, Any] | None) -> Sequence:
        self._check_open()
        sampling = sampling or Sampling()
        tokens = encode(prompt, chat_options or {}, self._codec, self._vocab_size)
        max_tokens = check_length(len(tokens), sampling.max_tokens, self._max_context, self._memory.num_rows)
        if sampling.stop_strings and self._codec is None:
            raise RequestError("stop strings need a tokenizer, this engine has none", "end with max_tokens or eos_ids")
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        return Sequence(
            tokens,
            max_tokens,
            () if sampling.ignore_eos else self._eos_ids,
            seed,
            self._sampler.start(sampling, seed, len(tokens)),
            self._codec.stream(sampling.stop_strings) if self._codec else None,
        )

    def _enqueue(self, sequence: Sequence) -> Request:
        self._arrivals.append(sequence)
        return Request(sequence, self._wait, self._cancel)

    def _stream(self, sequence: Sequence) -> Iterator[Event]:
        request = self._enqueue(sequence)
        try:
            yield from request
        finally:
            request.cancel()

    def _wait(self, sequence: Sequence) -> None:
        def work() -> None:
            if not self.step() and not sequence.events:
                raise InternalError("a request waits in no queue and runs in no step")

        self._turns.work_until(lambda: sequence.events, work)

    def _cancel(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            self._cancels.append(sequence)
            # When another thread has the turn, it settles this at the end of the turn.
            self._turns.try_work(self._settle)

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("this engine is closed", "load the model again")

    # The loop. From here on only the thread that has the turn.

    def step(self) -> bool:
        """Run one step for all live requests: schedule, run, accept. ``False`` when there is nothing to do.

        Iterating a request calls this. Call it yourself only when no other thread uses the engine.
        """
        self._settle()
        step = self._schedule()
        if step is not None:
            logits = self._run(step)
            if logits is not None:
                self._accept(step, logits)
        return step is not None

    def _settle(self) -> None:
        """Take in what other threads left: arrivals first, then cancellations, which may be of the same requests."""
        while self._arrivals:
            self._scheduler.add(self._arrivals.popleft())
        while self._cancels:
            sequence = self._cancels.popleft()
            if sequence.finish_reason is None:
                self._finish(sequence, "cancelled")
        if self._is_closed:
            for sequence in tuple(self._scheduler.waiting):
                self._finish(sequence, "cancelled")

    def _schedule(self) -> Step | None:
        while True:
            try:
                return self._scheduler.schedule()
            except InternalError as error:
                # Blocks were lost. The request that cannot start is told so, and the queue goes on.
                self._finish(self._scheduler.waiting[0], "error", error)

    def _run(self, step: Step) -> NDArray[np.float32] | None:
        try:
            self._num_steps += 1
            return self._stepper.step(step.batch)
        except Exception as error:
            for sequence in step.sequences:
                self._finish(sequence, "error", _wrap(error))
            return None

    def _accept(self, step: Step, logits: NDArray[np.float32]) -> None:
        row = 0
        for sequence in step.sequences:
            try:
                if sequence.commit():
                    row += 1
                    self._advance(sequence, logits[row - 1])
            except BaseException as error:
                # One request's failure is not its neighbours'. An interrupt ends this request and goes on its way.
                if sequence.finish_reason is None:
                    self._finish(sequence, "error", _wrap(error))
                    if isinstance(error, Exception):
                        continue
                raise

    def _advance(self, sequence: Sequence, logits: NDArray[np.float32]) -> None:
        token = sequence.choose(logits)
        if token < 0:
            raise InternalError(f"the logits at position {sequence.num_tokens} are not numbers")
        reason = sequence.accept(token)
        if reason is not None:
            self._finish(sequence, reason)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: HotsetError | None = None) -> None:
        self._scheduler.remove(sequence)
        sequence.finish(reason, error)
        self._finished[reason] += 1
        self._totals["prompt"] += sequence.num_prompt
        self._totals["cached"] += sequence.num_cached
        self._totals["recomputed"] += sequence.num_recomputed
        self._totals["generated"] += len(sequence.output)
        if error is not None:
            # What a failure left in the cache is not trusted. Live requests keep what they hold.
            self._memory.forget()
        if not self._scheduler.running:
            self._memory.check_integrity(())


def _wrap(error: BaseException) -> HotsetError:
    if isinstance(error, HotsetError):
        return error
    wrapped = InternalError(f"the step failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
