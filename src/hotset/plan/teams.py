"""How many threads of each CPU take part. One team decodes and reads prompts, so both decide.

Decoding reads memory, which fewer threads than there are cores may saturate; prompts compute, and want all cores. Both
are predicted for the two sizes, and the rule is: all cores, unless a request of :data:`PROMPT_TOKENS` in and
:data:`ANSWER_TOKENS` out takes more than :data:`WORTHWHILE` of the time that it takes with fewer. Where no arithmetic
rate is known, a prompt's time is not either, and all cores take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotset.machine.profile import Profile
from hotset.plan.predict import Prediction

PROMPT_TOKENS, ANSWER_TOKENS = 2048, 512
"""The request that teams and layouts are compared by: published measurements use it, and both halves count in it."""
WORTHWHILE = 1.03
"""Medians of bandwidth differ by as much from one probe to the next."""


@dataclass(frozen=True)
class Team:
    """A size of the teams: threads by CPU (none where GPUs run alone), and expected steps of one token and of a
    prompt's chunk."""

    threads: Mapping[str, int]
    decode: Prediction
    prefill: Prediction

    @property
    def each(self) -> int:
        """Threads of every CPU; 0 where none takes part."""
        return max(self.threads.values(), default=0)

    @property
    def request_s(self) -> float:
        """Seconds of a request of :data:`PROMPT_TOKENS` and :data:`ANSWER_TOKENS`."""
        return self.decode.seconds * ANSWER_TOKENS + self.prefill.seconds * PROMPT_TOKENS / self.prefill.num_tokens

    def to_json(self) -> dict[str, Any]:
        return {
            "threads": dict(self.threads),
            "request_s": self.request_s,
            "decode_tokens_per_s": self.decode.tokens_per_s,
            "prefill_tokens_per_s": self.prefill.tokens_per_s,
        }


def team_sizes(profile: Profile, cpus: Sequence[str]) -> list[Mapping[str, int]]:
    """Sizes to compare, the same for each of ``cpus``: all cores, and the threads that saturate the memory if fewer."""
    if not cpus:
        return [{}]
    consumers = [profile.consumer(name) for name in cpus]
    cores = min(consumer.num_cores for consumer in consumers)
    saturating = max(profile.path(cpu.name, cpu.near).threads or cores for cpu in consumers)
    return [dict.fromkeys(cpus, count) for count in dict.fromkeys((cores, min(cores, saturating)))]


def order_teams(teams: Sequence[Team], *, are_rates_known: bool) -> tuple[Team, ...]:
    """Sizes as :func:`team_sizes` has them, the one to use first."""
    if len(teams) == 2 and are_rates_known and teams[0].request_s > WORTHWHILE * teams[1].request_s:
        return teams[1], teams[0]
    return tuple(teams)


def explain_teams(teams: Sequence[Team]) -> list[str]:
    """A line that says how many threads take part and why, where there was a choice."""
    if len(teams) < 2:
        return []
    used, other = teams
    speeds = (
        f"decode {used.decode.tokens_per_s:,.1f} against {other.decode.tokens_per_s:,.1f} tok/s, prompts "
        f"{used.prefill.tokens_per_s:,.0f} against {other.prefill.tokens_per_s:,.0f}"
    )
    request = f"a request of {PROMPT_TOKENS:,} tokens in and {ANSWER_TOKENS:,} out takes"
    if used.each < other.each:
        why = f"{request} {used.request_s:,.1f} s with them and {other.request_s:,.1f} s with all ({speeds})"
        return [f"threads: {other.each} a node, one a core -> {used.each}, because {why}"]
    cores = f"threads: {used.each} a node, one a core, though {other.each} saturate its memory"
    if any(what.startswith("rate of") for what in used.prefill.unknown):
        return [
            f"{cores}: prompts are bound by arithmetic, of which no rate is known (decode "
            f"{used.decode.tokens_per_s:,.1f} against {other.decode.tokens_per_s:,.1f} tok/s)"
        ]
    return [f"{cores}: {request} {used.request_s:,.1f} s with all and {other.request_s:,.1f} s with those ({speeds})"]
