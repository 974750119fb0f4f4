"""What is known of a request, and what it does in a step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tierstore.adapters.vllm.keys import Hashed, KeyChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.types import Match


class Request(Hashed, Protocol):
    """What is read of vLLM's request."""

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        ...


@dataclass(slots=True)
class Step:
    """What one request does in a step. ``blocks``: its whole table; ``fresh``: those of it that are newly its own."""

    request_id: str
    computed: int
    scheduled: int
    blocks: Sequence[int]
    fresh: Sequence[int]
    first: bool
    """Whether it begins, or begins again after a preemption."""


@dataclass(slots=True)
class Known:
    """A live request. ``limit``: blocks beyond this are not offered any more: they could not be loaded."""

    request: Request
    chain: KeyChain
    limit: int | None = None
    verdict: Verdict | None = None
    taken: Match | None = None
    """The offer that was taken last."""
    collected: int = 0
    """Blocks that were handed on to be stored, or that are stored."""


@dataclass(slots=True)
class Verdict:
    """What a lookup found for a request of so many tokens with so many computed."""

    tokens: int
    computed: int
    match: Match
    asked: int = field(default=0)
