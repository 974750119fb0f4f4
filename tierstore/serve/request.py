"""What is asked of the engine, and what it tells of it: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
"""``stop``: the model ended by itself, or a stop string came; ``length``: ``max_tokens`` are there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0: the likeliest, whatever the rest says. ``top_k`` 0: of all.

    With a ``seed`` the same request over the same K/V gives the same tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. ``max_tokens`` 0: the prompt is read into the store, and nothing is answered.

    ``salt``: the tenant's, which is part of every key. ``stop``: strings that end the answer, and are not in it.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    salt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one request. ``reused``: tokens of the prompt that were not computed, by the name of the tier they came from.

    Seconds: ``waited_s`` from the asking to its start, ``ttft_s`` from the asking to its first token (to the end of the
    prompt if none was asked for), ``total_s`` to its end.
    """

    prompt_tokens: int
    completion_tokens: int
    reused: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def reused_tokens(self) -> int:
        """From whichever tier."""
        return sum(self.reused.values())


@dataclass(frozen=True, slots=True)
class Read:
    """So many tokens of the prompt are there, reused or computed."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next characters of the answer, never none."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The answer is complete: nothing follows."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no answer, or not the rest of it: nothing follows."""

    why: str


Event = Read | Piece | Done | Failed


class RefusedError(ValueError):
    """The request can never be served here: too long for the model or for HBM, or no tokens. Says the sizes."""


class BusyError(RuntimeError):
    """Too many requests wait already. Later, it may be served."""
