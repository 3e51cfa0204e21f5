"""What a request answers: pieces, then exactly one terminal event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hotset.errors import HotsetError

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of wall time.

    Attributes:
        queue_s: from submission to admission.
        prefill_s: from admission to the first token.
        decode_s: from the first token to the last.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became certain, and the tokens sampled since the piece before.

    The texts of all pieces together are the answer. Their ``token_ids`` together are the beginning of
    ``Finished.token_ids``; tokens that brought no text of their own (an end-of-text token, a stop string) may be in no
    piece. Without a tokenizer every token is a piece with an empty text.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The one terminal event of a request.

    Attributes:
        finish_reason: ``"stop"`` (end-of-text token or stop string), ``"length"`` (``max_tokens`` or a full context),
            ``"cancelled"``, or ``"error"``.
        text: always empty, so that text can be joined over all events.
        token_ids: every sampled token, an end-of-text token included.
        num_prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were not computed, because their blocks were in the cache.
        recomputed_tokens: tokens whose blocks were in the cache and that were computed all the same, because no
            snapshot of the model's frontier stood where they end. Always 0 for a model without a frontier.
        seed: the seed that was used.
        timings: see :class:`Timings`.
        error: what went wrong when the reason is ``"error"``, otherwise None.
    """

    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    seed: int
    timings: Timings
    error: HotsetError | None = None
    text: str = field(default="", init=False)


Event = Piece | Finished
