"""Requests to the engine, and the events with which it answers: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
"""``stop``: the model ended the answer, or a stop string came. ``length``: the answer has ``max_tokens``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for choosing tokens. ``temperature`` 0 takes the likeliest, ``top_k`` 0 considers all tokens.

    With a ``seed``, the same request over the same K/V gives the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``max_tokens`` 0 reads the prompt into the store without an answer.

    ``salt`` is the tenant's and part of every key. ``stop`` strings end the answer and are not part of it.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    salt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and times of one request. ``reused`` has the number of reused prompt tokens, by tier name.

    In seconds: ``waited_s`` until it started, ``ttft_s`` until its first token (until the end of the prompt without
    one), ``total_s`` until its end.
    """

    prompt_tokens: int
    completion_tokens: int
    reused: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def reused_tokens(self) -> int:
        """Return the reused tokens of all tiers."""
        return sum(self.reused.values())


@dataclass(frozen=True, slots=True)
class Read:
    """Progress of the prompt: the number of its tokens that were reused or computed."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next characters of the answer, at least one."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete. The last event."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """There is no answer, or no more of it. The last event."""

    why: str


Event = Read | Piece | Done | Failed


class RefusedError(ValueError):
    """The request can never be served here: it has no tokens, or too many for the model or HBM."""


class BusyError(RuntimeError):
    """Too many requests are waiting. A retry may succeed."""
