"""Loads into the engine's blocks, and pages read from disk to host memory ahead of the requests that need them.

``Loads`` starts the loads that vLLM waits for, once their blocks are free of copies, and reports each exactly
once, when nothing writes its blocks any more. ``DiskPrefetch`` works for queued requests, a few pages in each
step. Its pages replace none that a load needs and are not leased, so a wrong prediction costs reads and
nothing else.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from prefetch.planner import PIECE_PAGES
from prefetch.promotions import PromotionQueue
from tierstore.adapters.vllm.hints import NO_HINTS
from tierstore.types import Hint, HintResult, LeaseState, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from tierstore.adapters.vllm.hints import RequestHints
    from tierstore.lease import Lease
    from tierstore.store import TierStore
    from tierstore.types import PageKey

MOST_A_STEP = 1024
"""Most pages started in one step: the first are copied while others are prepared, and steps stay short."""
MOST_IF_IDLE = 256
"""The same for a step that computes nothing: the next step comes soon, and the link gets pages sooner."""


@dataclass(slots=True, eq=False)
class Load:
    """One request's load of ``keys`` into ``blocks``. ``starts`` has the first token of each block."""

    request_id: str
    keys: Sequence[PageKey]
    blocks: tuple[int, ...]
    starts: tuple[int, ...]
    leases: deque[Lease] = field(default_factory=deque)
    """Leases of the parts that have not arrived yet, in order."""
    started: int = 0
    short: bool = False
    """Whether a page was missing. Pages after it are not requested."""
    arrived: int = 0
    """Number of leading pages that have arrived, without a gap."""
    gap: bool = False
    """Whether a part that has ended lacks pages. Pages after it are of no use."""
    void: bool = False
    """Whether the load counts as failed whatever arrives."""

    @property
    def begun(self) -> bool:
        """Whether no further part of the load will be started."""
        return self.short or self.void or self.started == len(self.keys)


class Loads:
    """All loads that vLLM waits for. Each is reported exactly once, as loaded or failed, also for aborted requests."""

    def __init__(self, store: TierStore, timeout_s: float) -> None:
        self.into: set[int] = set()
        """Blocks that loads write or are about to write."""
        self._store = store
        self._timeout_s = timeout_s
        self._loads: list[Load] = []
        self._unseen: list[int] = []
        self._loaded: set[str] = set()
        self._failed: dict[str, tuple[int, ...]] = {}

    def want(
        self, request_id: str, keys: Sequence[PageKey], blocks: Sequence[int], starts: Sequence[int]
    ) -> None:
        """Load these pages into the request's blocks, which belong to the load until it is reported."""
        load = Load(request_id, keys, tuple(blocks), tuple(starts))
        self._loads.append(load)
        self._unseen += load.blocks
        self.into.update(load.blocks)

    def fresh_blocks(self) -> list[int]:
        """Return blocks of new loads since the last call. No copy may read them when the loads start."""
        blocks, self._unseen = self._unseen, []
        return blocks

    def start(self, busy: Set[int], idle: bool) -> None:
        """Start parts of loads, oldest first. Loads wait while copies read their blocks (``busy``).

        ``idle``: the step computes nothing.
        """
        left = MOST_IF_IDLE if idle else MOST_A_STEP
        for load in self._loads:
            if not load.started and not busy.isdisjoint(load.blocks):
                continue
            while left > 0 and not load.begun:
                piece = slice(load.started, load.started + left)
                keys = load.keys[piece]
                lease = self._store.acquire(keys, self._timeout_s, into=load.blocks[piece])
                load.leases.append(lease)
                load.started += len(keys)
                load.short = lease.num_pages < len(keys)
                left -= len(keys)

    def settle(self) -> list[Load]:
        """End the loads that are final. Returns those that have failed."""
        running: list[Load] = []
        failed: list[Load] = []
        for load in self._loads:
            _end_pieces(load)
            if load.leases or not load.begun:
                running.append(load)
                continue
            if load.void:
                load.arrived = 0
            self.into.difference_update(load.blocks)
            if load.arrived == len(load.keys):
                self._loaded.add(load.request_id)
            else:
                self._failed[load.request_id] = load.blocks[load.arrived :]
                failed.append(load)
        self._loads = running
        return failed

    def take_loaded(self) -> set[str]:
        """Return requests whose pages have all arrived, once each."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> dict[str, tuple[int, ...]]:
        """Return requests that lack pages, once each, with the blocks that were not loaded."""
        failed, self._failed = self._failed, {}
        return failed

    @property
    def waits(self) -> bool:
        """Whether vLLM waits for a load or for the report of one."""
        return bool(self._loads or self._loaded or self._failed)

    @property
    def writing(self) -> set[int]:
        """Blocks that loads in flight write."""
        return {block for load in self._loads for block in load.blocks[: load.started]}

    def of(self, request_id: str) -> bool:
        """Return whether a load of this request has not been reported."""
        known = request_id in self._loaded or request_id in self._failed
        return known or any(load.request_id == request_id for load in self._loads)

    def void(self) -> None:
        """Fail all loads in flight, because their content is no longer wanted."""
        for load in self._loads:
            load.void = True


def _end_pieces(load: Load) -> None:
    """Release the lease of each part that is final. Releasing all at the end would delay the request."""
    while load.leases and load.leases[0].wait(0) is not LeaseState.PENDING:
        lease = load.leases.popleft()
        lease.release()
        if not load.gap:
            load.arrived += lease.num_pages
        load.gap |= lease.num_pages < len(lease.keys)


_A_STEP = 128
"""Most pages started in one step, because the engine waits for the scheduler meanwhile."""

_MOST_BEHIND = 4
"""Most requests at once, the newest, whose pages are prefetched although no request waits for them."""


class DiskPrefetch:
    """The queued requests whose pages are wanted in host memory. Use it from the scheduler's thread only.

    ``most`` is the limit of pages in flight, ``room`` the number of pages that fit in host memory.
    """

    def __init__(
        self, store: TierStore, most: int, room: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._store = store
        self._room = room
        self._clock = clock
        self._promotions = PromotionQueue(store, most)
        self._revisions = count(1)
        self._memory = frozenset(tier for tier, each in store.tiers.items() if each.in_memory)
        self._queue: dict[str, Hint] = {}
        self._behind: set[str] = set()
        """Requests that compute their pages themselves. The pages are prefetched for later requests."""
        self._store.take_hints()  # from now on the store knows that its hints are used

    def want(
        self, request_id: str, keys: Sequence[PageKey], local: int, hints: RequestHints = NO_HINTS
    ) -> None:
        """Add a queued request, of which the engine itself holds the first ``local`` pages.

        The request is expected to start now, after all requests queued before it, unless ``hints`` says
        otherwise. It does not wait for pages that do not fit in host memory together with its other pages.
        """
        found = self._store.match(keys[local:])
        end = local + min(found.num_pages, self._room)
        if not self._below_memory(found.tiers[: self._room]):
            return
        hint = Hint(
            request_id,
            next(self._revisions),
            tuple(keys[:end]),
            deadline_s=hints.starts_in_s or None,
            priority=hints.priority,
        )
        if self._store.hint(hint) is HintResult.DEFERRED:
            self._forget(request_id)
            self._queue[request_id] = hint
            self._promote(hint, end - local, self._clock() + hints.starts_in_s)

    def over(self, request_id: str) -> None:
        """Remove a request that loads its pages now or has ended."""
        if self._forget(request_id):
            self._store.hint(Hint(request_id, next(self._revisions), ()))

    def behind(self, request_id: str) -> None:
        """Prefetch this request's pages last, for later requests: the request computes them itself."""
        hint = self._queue.get(request_id)
        if hint is None or request_id in self._behind:
            return
        self._behind.add(request_id)
        left = self._promotions.left(hint)
        self._promotions.over(hint)
        self._promote(hint, left, inf)
        late = [name for name in self._queue if name in self._behind]
        for name in late[:-_MOST_BEHIND]:
            self.over(name)

    @property
    def waits(self) -> bool:
        """Whether pages for which no request waits are still to be prefetched."""
        return bool(self._behind)

    def coming(self, request_id: str) -> bool:
        """Return whether pages of the request are still in flight."""
        hint = self._queue.get(request_id)
        if hint is None:
            return False
        last = hint.keys[-PIECE_PAGES:]
        return self._promotions.left(hint) > 0 or self._below_memory(self._store.match(last).tiers)

    def advance(self) -> None:
        """Start reads for which there is space, the most urgent first."""
        if not self._queue:
            return
        self._store.take_hints()
        self._promotions.advance(Tier.HOST, _A_STEP)
        for request_id in [name for name in self._behind if not self._promotions.left(self._queue[name])]:
            self.over(request_id)

    def _promote(self, hint: Hint, pages: int, due: float) -> None:
        """Want the last ``pages`` pages of a hint by ``due``, or without a due time (inf)."""
        keys = hint.keys[len(hint.keys) - pages :]
        self._promotions.want(hint, keys, Tier.HOST, order=(due, -hint.priority, hint.revision))

    def _forget(self, request_id: str) -> bool:
        hint = self._queue.pop(request_id, None)
        self._behind.discard(request_id)
        if hint is not None:
            self._promotions.over(hint)
        return hint is not None

    def _below_memory(self, tiers: Sequence[Tier]) -> bool:
        """Return whether one of these tiers keeps pages as records, which must be read."""
        return not self._memory.issuperset(tiers)
