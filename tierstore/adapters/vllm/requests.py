"""What the scheduler's half knows of each request, and what the request does in a step.

``StepReader`` reads vLLM's ``SchedulerOutput``, which names only a part of each block table, and keeps the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tierstore.adapters.vllm.hints import NO_HINTS, RequestHints
from tierstore.adapters.vllm.keys import Hashed, KeyChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.hit import Hit
    from tierstore.adapters.vllm.keys import Adapter
    from tierstore.adapters.vllm.kv_groups import Groups
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
class RequestState:
    """A live request. ``chains``: its keys, by group. ``limit``: tokens beyond this are not offered any more: they
    could not be loaded.
    """

    request: Request
    chains: tuple[KeyChain, ...]
    limit: int | None = None
    lookup: Lookup | None = None
    put_off: float | None = None
    """Since when it waits for what comes up from disk."""
    left: bool = False
    """Whether pages of it were left where they were."""
    taken: Hit | None = None
    """The offer that was taken last."""
    collected: list[int] = field(default_factory=list)
    """Blocks of each group that were handed on to be stored, or that are stored, or given back before."""
    hints: RequestHints = NO_HINTS
    adapter: Adapter | None = None
    """The LoRA adapter that it computes with; None: the model alone."""

    @property
    def keys(self) -> list[PageKey]:
        """Of all blocks that are full, group after group."""
        return [key for chain in self.chains for key in chain.first(self.request.num_tokens)]


@dataclass(slots=True)
class Lookup:
    """What a lookup found for a request of so many tokens with so many computed. ``stale``: who asks again is to have
    a new one; this one may have been taken."""

    tokens: int
    computed: int
    hit: Hit
    asked: int = field(default=0)
    stale: bool = False


class StepReader:
    """The block tables of all requests that run."""

    def __init__(self, groups: Groups) -> None:
        self._sizes = [group.block_size for group in groups.all]
        self._tables: dict[str, list[list[int]]] = {}

    def of(self, output: Any) -> list[Step]:
        """One a scheduled request. Each output exactly once, in order."""
        for request_id in output.finished_req_ids:
            self.forget(request_id)
        scheduled: dict[str, int] = output.num_scheduled_tokens
        steps: list[Step] = []
        for new in output.scheduled_new_reqs:
            steps.append(self._begun(new.req_id, new.num_computed_tokens, new.block_ids, scheduled))
        cached = output.scheduled_cached_reqs
        for request_id, more, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                steps.append(self._begun(request_id, computed, more, scheduled))
                continue
            tables = self._tables[request_id]
            fresh: list[int] = []
            for table, blocks in zip(tables, more or (), strict=False):
                table += blocks
                fresh += blocks
            steps.append(Step(request_id, computed, scheduled[request_id], tables, fresh, first=False))
        return steps

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._tables.pop(request_id, None)

    def _begun(
        self, request_id: str, computed: int, blocks: Sequence[list[int]] | None, scheduled: dict[str, int]
    ) -> Step:
        tables = [list(table) for table in blocks or [[] for _ in self._sizes]]
        self._tables[request_id] = tables
        fresh = [
            block
            for table, size in zip(tables, self._sizes, strict=True)
            for block in table[computed // size :]
        ]
        return Step(request_id, computed, scheduled[request_id], tables, fresh, first=True)
