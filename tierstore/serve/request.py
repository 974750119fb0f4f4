"""Plain data types for requests to the engine, and for the events with which the engine responds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]
"""Why an answer ended.

``stop``: the model ended the answer, or a stop string occurred. ``length``: the answer has ``max_tokens`` tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings for choosing tokens.

    With ``temperature`` 0, the most likely token is always chosen. With ``top_k`` 0, the number of candidates is
    not limited. With a ``seed``, the same request produces the same tokens if it attends to the same K/V.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request to the engine.

    Attributes:
        prompt: The token IDs of the prompt.
        max_tokens: Maximum number of tokens in the answer. With 0, the prompt is read into the store and no
            answer is generated.
        sampling: Settings for choosing the tokens of the answer.
        stop: Strings that end the answer. The answer does not include them.
        salt: Bytes that identify the tenant. They are part of every page key.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    salt: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts and times of one request.

    Attributes:
        prompt_tokens: Tokens in the prompt.
        completion_tokens: Tokens in the answer.
        reused: Number of prompt tokens found in each tier, by the tier's name. All other prompt tokens were
            computed.
        waited_s: Seconds from submission to the start of the request.
        ttft_s: Seconds from submission to the first token, or to the end of the prompt if ``max_tokens`` is 0.
        total_s: Seconds from submission to the end of the request.
    """

    prompt_tokens: int
    completion_tokens: int
    reused: dict[str, int] = field(default_factory=dict)
    waited_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0

    @property
    def reused_tokens(self) -> int:
        """Return the number of reused prompt tokens, summed over all tiers."""
        return sum(self.reused.values())


@dataclass(frozen=True, slots=True)
class Read:
    """A progress report. ``tokens`` is the number of prompt tokens that have been reused or computed so far."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of the answer. ``text`` has at least one character."""

    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The request is complete. This is the last event of a successful request."""

    reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that failed, possibly after a part of the answer. ``why`` is a message."""

    why: str


Event = Read | Piece | Done | Failed


class RefusedError(ValueError):
    """The request can never be served.

    For example, its prompt is empty, invalid or too long, or the model has no chat template.
    """


class BusyError(RuntimeError):
    """The request was rejected because the queue is full. A later retry may succeed."""
