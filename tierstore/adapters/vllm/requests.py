"""What is known of a request, and what it does in a step. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tierstore.adapters.vllm.hints import NOTHING, Told
from tierstore.adapters.vllm.keys import Hashed, KeyChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.keys import Adapter
    from tierstore.adapters.vllm.plans import Plan
    from tierstore.types import PageKey


class Request(Hashed, Protocol):
    """What is read of vLLM's request."""

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        ...


@dataclass(slots=True)
class Step:
    """What one request does in a step. ``tables``: its blocks, by group; of a group with a window those that were given
    back stand there still. ``fresh``: blocks that are newly its own, of all groups.
    """

    request_id: str
    computed: int
    scheduled: int
    tables: Sequence[Sequence[int]]
    fresh: Sequence[int]
    first: bool
    """Whether it begins, or begins again after a preemption."""


@dataclass(slots=True)
class Known:
    """A live request. ``chains``: its keys, by group. ``limit``: tokens beyond this are not offered any more: they
    could not be loaded.
    """

    request: Request
    chains: tuple[KeyChain, ...]
    limit: int | None = None
    verdict: Verdict | None = None
    put_off: float | None = None
    """Since when it waits for what comes up from disk."""
    left: bool = False
    """Whether pages of it were left where they were."""
    taken: Plan | None = None
    """The offer that was taken last."""
    collected: list[int] = field(default_factory=list)
    """Blocks of each group that were handed on to be stored, or that are stored, or given back before."""
    told: Told = NOTHING
    adapter: Adapter | None = None
    """The LoRA adapter that it computes with; None: the model alone."""

    @property
    def keys(self) -> list[PageKey]:
        """Of all blocks that are full, group after group."""
        return [key for chain in self.chains for key in chain.first(self.request.num_tokens)]


@dataclass(slots=True)
class Verdict:
    """What a lookup found for a request of so many tokens with so many computed. ``stale``: who asks again is to have
    a new one; this one may have been taken."""

    tokens: int
    computed: int
    plan: Plan
    asked: int = field(default=0)
    stale: bool = False
