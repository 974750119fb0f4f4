"""Loads into the engine's blocks, and prefetches from disk to host memory for queued requests.

``Loads`` runs the loads that vLLM waits for. A load starts once no copy is reading its blocks. It is reported
exactly once, after the last write to its blocks. ``DiskPrefetch`` reads pages of queued requests, a few per step.
Prefetched pages never displace pages that a load needs, and they are not leased. A wrong prediction therefore only
costs reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.hints import NO_HINTS
from tierstore.prefetch import PIECE_PAGES, PromotionQueue
from tierstore.types import Hint, HintResult, LeaseState, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence, Set

    from tierstore.adapters.vllm.hints import RequestHints
    from tierstore.lease import Lease
    from tierstore.store import TierStore
    from tierstore.types import PageKey

MOST_A_STEP = 1024
"""Maximum number of pages per step for which loads are started.

The limit keeps steps short, and lets the first pages be copied while others are prepared.
"""
MOST_IF_IDLE = 256
"""Maximum number of pages for which loads are started in a step that computes nothing.

It is lower than ``MOST_A_STEP``: the next step follows soon, and the first pages reach the link earlier.
"""


@dataclass(slots=True, eq=False)
class Load:
    """The load of a request's pages ``keys`` into ``blocks``. ``starts`` lists the first token of each block."""

    request_id: str
    keys: Sequence[PageKey]
    blocks: tuple[int, ...]
    starts: tuple[int, ...]
    leases: deque[Lease] = field(default_factory=deque)
    """Leases of the parts that are not complete yet, in order."""
    on_disk: int = 0
    """Number of pages that were only on disk when the load was accepted."""
    started: int = 0
    short: bool = False
    """Whether a page was not found in the store. Pages after it are not requested."""
    arrived: int = 0
    """Number of leading pages that have been loaded without a gap."""
    gap: bool = False
    """Whether a page of a completed part did not arrive. The pages after it are useless."""
    void: bool = False
    """Whether the load counts as failed regardless of its result."""

    @property
    def begun(self) -> bool:
        """Return whether no further part of the load will be started."""
        return self.short or self.void or self.started == len(self.keys)


class Loads:
    """Runs all loads that vLLM waits for.

    Each load is reported exactly once, as loaded or failed, even if its request was aborted.
    """

    def __init__(self, store: TierStore, timeout_s: float) -> None:
        self.into: set[int] = set()
        """Blocks that loads are writing or will write."""
        self._store = store
        self._timeout_s = timeout_s
        self._loads: list[Load] = []
        self._unseen: list[int] = []
        self._loaded: set[str] = set()
        self._failed: dict[str, tuple[int, ...]] = {}

    def want(
        self,
        request_id: str,
        keys: Sequence[PageKey],
        blocks: Sequence[int],
        starts: Sequence[int],
        on_disk: int = 0,
    ) -> None:
        """Queue the load of these pages into the request's blocks. The load owns the blocks until it is reported.

        ``starts`` lists the first token of each block. ``on_disk`` is the number of pages that are only on disk.
        """
        load = Load(request_id, keys, tuple(blocks), tuple(starts), on_disk=on_disk)
        self._loads.append(load)
        self._unseen += load.blocks
        self.into.update(load.blocks)

    def fresh_blocks(self) -> list[int]:
        """Return the blocks of the loads that were added since the last call.

        Copies that read these blocks must complete before the loads start.
        """
        blocks, self._unseen = self._unseen, []
        return blocks

    def start(self, busy: Set[int], idle: bool) -> None:
        """Start as many parts of loads as the step allows, oldest load first.

        A load does not start while a copy is reading one of its blocks (``busy``). ``idle`` tells whether the step
        computes nothing.
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
        """Finish the loads whose result is final. Return the loads that failed."""
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
        """Return the requests whose pages were all loaded. Each is returned once."""
        loaded, self._loaded = self._loaded, set()
        return loaded

    def take_failed(self) -> dict[str, tuple[int, ...]]:
        """Return the requests with missing pages and, for each of them, the blocks that were not loaded.

        Each request is returned once.
        """
        failed, self._failed = self._failed, {}
        return failed

    @property
    def waits(self) -> bool:
        """Return whether vLLM is waiting for a load or for its report."""
        return bool(self._loads or self._loaded or self._failed)

    @property
    def promised(self) -> int:
        """Return roughly how many pages on disk the loads have yet to request from the store."""
        return sum(min(load.on_disk, len(load.keys) - load.started) for load in self._loads if not load.begun)

    @property
    def writing(self) -> set[int]:
        """Return the blocks that loads in flight may be writing."""
        return {block for load in self._loads for block in load.blocks[: load.started]}

    def of(self, request_id: str) -> bool:
        """Return whether a load of this request has not been reported yet."""
        known = request_id in self._loaded or request_id in self._failed
        return known or any(load.request_id == request_id for load in self._loads)

    def void(self) -> None:
        """Make all unfinished loads fail, because their pages are no longer wanted."""
        for load in self._loads:
            load.void = True


def _end_pieces(load: Load) -> None:
    """Release the leases that are no longer pending. Releasing all of them at the end would delay the request."""
    while load.leases and load.leases[0].wait(0) is not LeaseState.PENDING:
        lease = load.leases.popleft()
        lease.release()
        if not load.gap:
            load.arrived += lease.num_pages
        load.gap |= lease.num_pages < len(lease.keys)


_A_STEP = 128
"""Maximum number of pages per step whose reads are started. The engine waits while they are started."""

_MOST_BEHIND = 4
"""Maximum number of requests that compute pages which are also prefetched. The newest such requests are kept."""


class DiskPrefetch:
    """Prefetches pages of queued requests from disk to host memory. Used only by the scheduler's thread.

    Args:
        store: The store.
        most: Maximum number of pages to prefetch at a time.
        room: Number of pages that fit into host memory.
        clock: Returns the current time in seconds.
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
        self._store.take_hints()  # attaches this object to the store as its prefetcher

    def want(
        self, request_id: str, keys: Sequence[PageKey], local: int, hints: RequestHints = NO_HINTS
    ) -> None:
        """Add a queued request. The engine already has its first ``local`` pages.

        The request is expected to start now, after all requests queued before it, unless ``hints`` says
        otherwise. If its pages do not all fit into host memory, only the first ones are prefetched.
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
        """Stop prefetching for a request, because it is loading its pages or has finished."""
        if self._forget(request_id):
            self._store.hint(Hint(request_id, next(self._revisions), ()))

    def behind(self, request_id: str) -> None:
        """Prefetch this request's pages after all others, because the request itself computes them.

        Later requests may use them.
        """
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

    def wants(self, request_id: str) -> bool:
        """Return whether pages are being prefetched for this queued request, and not only for later requests."""
        return request_id in self._queue and request_id not in self._behind

    @property
    def waits(self) -> bool:
        """Return whether pages remain to be prefetched for later requests."""
        return bool(self._behind)

    def coming(self, request_id: str) -> bool:
        """Return whether pages of the request are still being prefetched."""
        hint = self._queue.get(request_id)
        if hint is None:
            return False
        last = hint.keys[-PIECE_PAGES:]
        return self._promotions.left(hint) > 0 or self._below_memory(self._store.match(last).tiers)

    def advance(self) -> None:
        """Start reads of the most urgent pages for which host memory has space. Call once per step."""
        if not self._queue:
            return
        self._store.take_hints()
        self._promotions.advance(Tier.HOST, _A_STEP)
        for request_id in [name for name in self._behind if not self._promotions.left(self._queue[name])]:
            self.over(request_id)

    def _promote(self, hint: Hint, pages: int, due: float) -> None:
        """Queue reads of the last ``pages`` pages of a hint, with the deadline ``due``.

        If ``due`` is infinite, they come after all other reads.
        """
        keys = hint.keys[len(hint.keys) - pages :]
        self._promotions.want(hint, keys, Tier.HOST, order=(due, -hint.priority, hint.revision))

    def _forget(self, request_id: str) -> bool:
        hint = self._queue.pop(request_id, None)
        self._behind.discard(request_id)
        if hint is not None:
            self._promotions.over(hint)
        return hint is not None

    def _below_memory(self, tiers: Sequence[Tier]) -> bool:
        """Return whether one of these tiers is below memory, in which case pages must be read from it."""
        return not self._memory.issuperset(tiers)
