"""The state that the scheduler's half keeps of each request, and the steps of requests.

``StepReader`` reads vLLM's ``SchedulerOutput``, which names only a part of each block table, and remembers the rest.
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
    """The part of vLLM's request that is used here."""

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        ...


@dataclass(slots=True)
class Step:
    """The part of one request in a step.

    Attributes:
        tables: Its blocks by group. Blocks that a group with a window has given back are still listed.
        fresh: Blocks of all groups that the request did not own before.
    """

    request_id: str
    computed: int
    scheduled: int
    tables: Sequence[Sequence[int]]
    fresh: Sequence[int]
    first: bool
    """Whether the request begins, or begins again after a preemption."""


@dataclass(slots=True)
class RequestState:
    """A live request.

    Attributes:
        chains: Keys of the request's blocks, by group.
        limit: Tokens beyond this number are not offered: a load of them failed, or the adapter has changed.
    """

    request: Request
    chains: tuple[KeyChain, ...]
    limit: int | None = None
    lookup: Lookup | None = None
    put_off: float | None = None
    """Time since which the request waits for pages read from disk; inf once it no longer waits."""
    left: bool = False
    """Whether some of its pages are computed instead of loaded."""
    taken: Hit | None = None
    """The offer that was accepted last."""
    collected: list[int] = field(default_factory=list)
    """For each group, the number of leading blocks that were collected, are stored, or were given back."""
    hints: RequestHints = NO_HINTS
    adapter: Adapter | None = None
    """The LoRA adapter that it computes with; None for the base model."""

    @property
    def keys(self) -> list[PageKey]:
        """Keys of all full blocks, group after group."""
        return [key for chain in self.chains for key in chain.first(self.request.num_tokens)]


@dataclass(slots=True)
class Lookup:
    """The result of a lookup for a request of ``tokens`` tokens, of which ``computed`` are computed.

    If ``stale``, the next query needs a new lookup.
    """

    tokens: int
    computed: int
    hit: Hit
    asked: int = field(default=0)
    stale: bool = False


class StepReader:
    """Reads steps out of vLLM's output, and keeps the block tables of all running requests."""

    def __init__(self, groups: Groups) -> None:
        self._sizes = [group.block_size for group in groups.all]
        self._tables: dict[str, list[list[int]]] = {}

    def of(self, output: Any) -> list[Step]:
        """Return one step per scheduled request. Pass each output exactly once, in order."""
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
        """Forget a request that has ended."""
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
