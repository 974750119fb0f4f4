"""State that the scheduler half keeps for each request, and the request's part of each step.

``StepReader`` reads vLLM's ``SchedulerOutput``. That output contains only the changes to each block table, so the
reader keeps the complete tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.hints import NO_HINTS, RequestHints
from tierstore.adapters.vllm.keys import Hashed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.hit import Hit
    from tierstore.adapters.vllm.keys import Adapter
    from tierstore.adapters.vllm.kv_groups import Chains, Groups
    from tierstore.types import PageKey


class Request(Hashed, Protocol):
    """The attributes of a vLLM request that the scheduler half uses."""

    request_id: str

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the request has so far."""
        ...

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompt."""
        ...


@dataclass(slots=True)
class Step:
    """One request's part of a step.

    Attributes:
        computed: Number of tokens computed before the step.
        scheduled: Number of tokens to compute in the step.
        tables: The request's blocks in each group. Blocks that a windowed group has freed are still listed.
        fresh: Blocks that vLLM has newly assigned to the request. In the first step, these are the blocks after the
            computed tokens, and all blocks of the groups that the connector skips.
    """

    request_id: str
    computed: int
    scheduled: int
    tables: Sequence[Sequence[int]]
    fresh: Sequence[int]
    first: bool
    """Whether the request starts, or restarts after a preemption."""
    offers: Sequence[tuple[int, int, int]] = ()
    """States that vLLM offers: the group, the block, and the number of tokens that the state covers."""


@dataclass(slots=True)
class RequestState:
    """The state of a live request, as the scheduler half knows it.

    Attributes:
        chains: The keys of the request's blocks, by group number.
        limit: Tokens beyond this number are not offered, because loading them failed or the adapter has
            changed.
    """

    request: Request
    chains: Chains
    limit: int | None = None
    local: int = 0
    """Number of tokens that the engine had cached when it last asked for a hit."""
    lookup: Lookup | None = None
    shared: int = 0
    """Number of leading tokens whose pages in groups with full attention were stored at the last lookup."""
    put_off: float | None = None
    """Time at which the request began to wait for pages from disk. Infinite once it no longer waits."""
    left: bool = False
    """Whether any of the request's pages are computed instead of loaded."""
    probe: bool = False
    """Whether the request computes some of its last pages to measure the compute rate."""
    taken: Hit | None = None
    """The hit that was last accepted."""
    collected: dict[int, int] = field(default_factory=dict)
    """By group number, the number of leading blocks that were collected, are already stored, or were freed."""
    ends: frozenset[int] = frozenset()
    """Numbers of tokens after which a later hit is likely to end, known when the request starts."""
    hints: RequestHints = NO_HINTS
    adapter: Adapter | None = None
    """The LoRA adapter that the request computes with. None for the base model."""

    @property
    def keys(self) -> list[PageKey]:
        """Return the keys of all full blocks, one group after another."""
        return [key for chain in self.chains.values() for key in chain.first(self.request.num_tokens)]


@dataclass(slots=True)
class Lookup:
    """The cached result of looking up a request.

    At the time of the lookup the request had ``tokens`` tokens, and vLLM had computed ``computed`` of them.
    ``asked`` is the number of queries answered from this result. If ``stale`` is true, the next query looks the
    request up again.
    """

    tokens: int
    computed: int
    hit: Hit
    asked: int = field(default=0)
    stale: bool = False


class StepReader:
    """Converts vLLM's ``SchedulerOutput`` into steps, and keeps the block tables of all running requests.

    If a request is not scheduled in the step, the recurrent states that vLLM offers for it are ignored, because vLLM
    may already have overwritten them.
    """

    def __init__(self, groups: Groups) -> None:
        self._sizes = {group.number: group.block_size for group in groups.all}
        self._tables: dict[str, list[list[int]]] = {}

    def of(self, output: Any) -> list[Step]:
        """Return one step per scheduled request. Pass each output exactly once, in order."""
        for request_id in output.finished_req_ids:
            self.forget(request_id)
        scheduled: dict[str, int] = output.num_scheduled_tokens
        offers = compat.boundary_states(output)
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
            fresh = [block for blocks in more or () for block in blocks]
            for table, blocks in zip(tables, more or (), strict=False):
                table += blocks
            steps.append(Step(request_id, computed, scheduled[request_id], tables, fresh, first=False))
        for step in steps:
            step.offers = offers.get(step.request_id, ())
        return steps

    def forget(self, request_id: str) -> None:
        """Remove a finished request."""
        self._tables.pop(request_id, None)

    def _begun(
        self, request_id: str, computed: int, blocks: Sequence[list[int]] | None, scheduled: dict[str, int]
    ) -> Step:
        tables = [list(table) for table in blocks or [[] for _ in range(max(self._sizes) + 1)]]
        self._tables[request_id] = tables
        fresh = [
            block
            for number, table in enumerate(tables)
            for block in table[computed // self._sizes[number] if number in self._sizes else 0 :]
        ]
        return Step(request_id, computed, scheduled[request_id], tables, fresh, first=True)
