"""Stand-ins for the engine's tests: an executor without a model, and a codec of bytes.

The fake executor stores token ids as cache rows and makes logits from a checksum of *every* token that is visible
through the block table. A wrong block, a row written twice or a row not written gives other logits, so a test that
compares tokens with :func:`answer` tests the whole path of blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hotset.chat.detokenize import Detokenizer, decode
from hotset.chat.stream import AnswerStream
from hotset.engine.batch import StepBatch
from hotset.engine.engine import Engine
from hotset.engine.reference_sampler import ReferenceSampler
from hotset.engine.sampling import Sampling
from hotset.machine.verify import RegionPages

EOS = 256
VOCAB = 257


class FakeExecutor:
    """Checks every batch against the contract of ``hotset.engine.batch``, then answers it. It has no frontiers."""

    num_frontiers = frontier_bytes = 0

    def __init__(self, num_blocks: int, max_tokens: int, max_outputs: int, block_tokens: int) -> None:
        self.num_blocks = num_blocks
        self.max_tokens = max_tokens
        self.max_outputs = max_outputs
        self.rows = np.full((num_blocks, block_tokens), -7, np.int32)
        self.block_bytes = self.rows[0].nbytes
        self.batches: list[list[tuple[int, int]]] = []
        self.fail_with: BaseException | None = None
        self.poison: set[int] = set()
        self.is_closed = False

    def step(self, batch: StepBatch) -> np.ndarray:
        self._check(batch)
        self.batches.append([(segment.position, segment.count) for segment in batch.segments])
        block_tokens = self.rows.shape[1]
        for segment in batch.segments:
            for index in range(segment.count):
                position = segment.position + index
                block = segment.blocks[position // block_tokens]
                self.rows[block, position % block_tokens] = batch.tokens[segment.first + index]
        if self.fail_with is not None:
            error, self.fail_with = self.fail_with, None
            raise error
        logits = np.empty((len(batch.outputs), VOCAB), np.float32)
        for row, output in enumerate(batch.outputs):
            segment = next(s for s in batch.segments if s.first <= output < s.first + s.count)
            length = segment.position + int(output) - segment.first + 1
            visible = self.rows[segment.blocks].reshape(-1)[:length]
            logits[row] = prefix_logits(visible)
            if length in self.poison:
                logits[row, 3] = np.nan
        return logits

    def regions(self) -> tuple[RegionPages, ...]:
        return ()

    def _check(self, batch: StepBatch) -> None:
        assert not self.is_closed
        block_tokens = self.rows.shape[1]
        assert 1 <= len(batch.tokens) <= self.max_tokens and batch.tokens.dtype == np.int32
        assert len(batch.outputs) <= self.max_outputs and batch.outputs.dtype == np.int32
        assert (np.diff(batch.outputs) > 0).all()
        first, written = 0, []
        for segment in batch.segments:
            assert segment.first == first and segment.count >= 1
            first += segment.count
            end = segment.position + segment.count
            assert segment.blocks.dtype == np.int32 and len(segment.blocks) == -(-end // block_tokens)
            assert ((segment.blocks >= 0) & (segment.blocks < self.num_blocks)).all()
            written += segment.blocks[segment.position // block_tokens :].tolist()
        assert first == len(batch.tokens)
        assert len(written) == len(set(written)), "two sequences write one block"
        read = [b for s in batch.segments for b in s.blocks[: s.position // block_tokens].tolist()]
        assert not set(read) & set(written), "a shared block is written"

    def copy_block(self, block_id: int, out: np.ndarray) -> None:
        out[:] = self.rows[block_id].view(np.uint8)

    def restore_block(self, block_id: int, data: np.ndarray) -> None:
        self.rows[block_id] = data.view(np.int32)

    def copy_frontier(self, slot: int, out: np.ndarray) -> None:
        raise AssertionError("this model has no frontier")

    restore_frontier = copy_frontier

    def close(self) -> None:
        self.is_closed = True


def prefix_logits(tokens: np.ndarray) -> np.ndarray:
    """The fake model: logits of the token after ``tokens``, float32 [VOCAB]."""
    generator = np.random.default_rng(zlib.crc32(tokens.astype(np.int32).tobytes()))
    logits = generator.standard_normal(VOCAB).astype(np.float32) * 2
    logits[ord("a") : ord("e")] += 3  # letters are likely, so stop strings happen
    logits[EOS] += 1
    return logits


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < 256 else b""


class ByteCodec:
    """One token per byte."""

    eos_ids = frozenset({EOS})

    def encode_prompt(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_messages(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        return list("".join(f"[{m['role']}]{m['content']}" for m in messages).encode())

    def stream(self, stop: tuple[str, ...]) -> AnswerStream:
        return AnswerStream(Detokenizer(token_bytes), stop)


def make_engine(
    num_blocks: int = 32, *, block_tokens: int = 4, max_tokens: int = 8, max_outputs: int = 4, **options: Any
) -> tuple[Engine, FakeExecutor]:
    executor = FakeExecutor(num_blocks, max_tokens, max_outputs, block_tokens)
    settings = {"max_context": num_blocks * block_tokens, "max_sequences": 4} | options
    codec = settings.pop("codec", ByteCodec())
    engine = Engine(executor, codec, ReferenceSampler(), vocab_size=VOCAB, block_tokens=block_tokens, **settings)
    return engine, executor


def answer(
    prompt: list[int],
    sampling: Sampling,
    max_tokens: int,
    logits: Callable[[np.ndarray], np.ndarray] = prefix_logits,
) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason of a request, by a loop that has no blocks, steps or neighbours."""
    tokens, output = list(prompt), []
    choose = ReferenceSampler().start(sampling, sampling.seed or 0, len(prompt))
    while True:
        history = np.array(tokens, np.int32)
        token = choose(logits(history), history, len(tokens))
        tokens.append(token)
        output.append(token)
        if token == EOS and not sampling.ignore_eos:
            return output, decode(token_bytes, output), "stop"
        # Text is looked at without the bytes of a character that is not complete yet.
        text = Detokenizer(token_bytes)
        text_so_far = "".join(map(text.feed, output))
        ends = [(text_so_far.find(s) + len(s), text_so_far.find(s)) for s in sampling.stop_strings if s in text_so_far]
        if ends:
            return output, text_so_far[: min(ends)[1]], "stop"
        if len(output) == max_tokens:
            return output, decode(token_bytes, output), "length"
