"""The prefetcher: a thread that reads a store's hints, plans, and asks the store to promote pages in time.

It uses only the public interface of the store, holds no pages or leases, and takes none of the store's locks.
Without a prefetcher, requests are still served, but may wait longer. The store decides which pages may be displaced,
and starts nothing for a withdrawn hint (``TierStore.promote``). ``PrefetchLoop`` does the work. In each turn, it
reads hints, makes a new plan if one is due, and starts those promotions that can start.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from math import inf
from threading import Event, Lock
from time import monotonic
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from prefetch.hints import ExpectedRequests, KeptPages
from prefetch.planner import PIECE_PAGES, plan
from prefetch.promotions import PromotionQueue
from prefetch.types import Machine, Retained, Want
from tierstore.config import PrefetchConfig
from tierstore.errors import StoreClosed
from tierstore.threads import Worker
from tierstore.types import Tier, require_time, seconds_to_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from prefetch.hints import Expected
    from prefetch.types import Compute, Plan
    from tierstore.store import TierStore
    from tierstore.types import Hint, PageKey


def section(figures: dict[str, object], name: str) -> dict[str, Any]:
    """Return the mapping ``figures[name]``.

    Raises:
        TypeError: The value is not a mapping.
    """
    found = figures[name]
    if not isinstance(found, dict):
        raise TypeError(f"stats()[{name!r}] must be a mapping, got {found!r}")
    return found


def number(figures: dict[str, object], name: str) -> float:
    """Return the number ``figures[name]``.

    Raises:
        TypeError: The value is not a number.
    """
    found = figures[name]
    if not isinstance(found, int | float):
        raise TypeError(f"stats()[{name!r}] must be a number, got {found!r}")
    return found


_WAVE_S = 0.1
"""Maximum total duration of the copies in flight, in seconds.

A lease that is acquired while they are in flight may have to wait for them, so this also limits its waiting time.
"""
_PLAN_AGAIN_S = 0.05
_PLAN_SOON_S = 0.004
_PLAN_SHARE = 10.0
"""The pause after a plan, as a multiple of the time that was needed to make that plan."""
_BUSY_S = 0.002
_BLOCKED_S = 0.02
_IDLE_S = 0.25
_PLAN_PAGES = 8192
_PLAN_REQUESTS = 256
_FIRST_PAGES = 256
"""Number of pages to plan first if nothing is in flight.

The complete plan is made while these pages are being copied.
"""
_PASSES = 3
"""Number of promotions at the head of the queue that may be skipped because they cannot start yet.

For example, pages that are still being read from disk cannot be loaded into HBM yet.
"""


class PrefetchLoop:
    """The work of a prefetcher: keeps the expected requests of a store, plans, and starts promotions.

    Not thread-safe.
    """

    def __init__(
        self,
        store: TierStore,
        config: PrefetchConfig,
        compute: Compute | None,
        clock: Callable[[], float],
    ) -> None:
        figures = store.stats()
        self.expected = ExpectedRequests()
        self.counts: Counter[str] = Counter()
        self._store = store
        self._config = config
        self._compute = compute
        self._clock = clock
        self._page_nbytes = int(number(figures, "page_nbytes"))
        tiers = sorted(Tier[name] for name in section(figures, "tiers"))
        self._top = tiers[0]
        self._promoted_to = [tier for tier in tiers[:-1] if tier <= Tier.HOST]
        self._most_in_flight = config.pages_in_flight(self._page_nbytes)
        most = min(self._most_in_flight, PIECE_PAGES)  # the limit until the first plan
        self._promotions = PromotionQueue(store, most, passes=_PASSES, clock=clock)
        self._staged: set[PageKey] = set()
        self._kept = KeptPages(self._promotions, self._promoted_to)
        self._plan_at = self._planned_at = -inf
        self._soonest = inf
        """Earliest time of the next plan if no new hint arrives and all planned promotions have started.

        It is inf after a plan without promotions.
        """
        self._missed: set[tuple[str, int]] = set()
        self._take(0.0)

    @property
    def in_flight(self) -> int:
        """Number of pages that were being promoted at the last call to the store."""
        return self._promotions.in_flight

    def turn(self, timeout_s: float) -> float:
        """Read hints, make a new plan if one is due, and start promotions. See ``Prefetcher.turn``."""
        fresh = self._take(timeout_s)
        now = self._clock()
        self.expected.expire(now)
        expected = self.expected.in_order()
        self._note_misses(expected, now)
        if not expected:
            self._promotions.clear()
            self._staged = set()
            self._kept.clear()
            self._promotions.look(self._top)
            return _IDLE_S
        if fresh and self._idle:
            self._begin(expected, now)
        elif fresh or now >= self._plan_at:
            self._replan(expected, now)
        self._promotions.look(self._top)
        started = 0
        for tier in self._promotions.tiers:
            self._kept.ask(tier)
            started += self._start(tier)
        if now >= self._plan_at:
            return 0.0
        if started:  # the current plan is still making progress
            self._plan_at = max(self._plan_at, min(now + _PLAN_AGAIN_S, self._planned_at + _IDLE_S))
        if started or self.in_flight:
            if not self._promotions:
                self._plan_at = min(self._plan_at, max(now + _PLAN_SOON_S, self._soonest))
                return max(_BUSY_S, min(_BLOCKED_S, self._plan_at - now))
            return _BUSY_S
        return _BLOCKED_S if self._promotions else _PLAN_AGAIN_S

    def _take(self, timeout_s: float) -> bool:
        hints = self._store.take_hints(timeout_s)
        self.expected.take(hints, self._clock())
        return bool(hints)

    @property
    def _idle(self) -> bool:
        return not (self.in_flight or self._promotions)

    def _begin(self, expected: list[Expected], now: float) -> None:
        """If there are many pages, plan only the first ones, so that copies start before the complete plan is ready.

        The first plan uses only free slots. The complete plan, which follows in the next turn, decides which
        pages to displace.
        """
        first, rest = expected[0], sum(len(each.hint.keys) for each in expected[1:])
        tiers = section(self._store.stats(), "tiers")
        free = min((tiers[tier.name]["free"] for tier in self._promoted_to), default=0)
        if self._compute is not None or not free or len(first.hint.keys) + rest <= 2 * _FIRST_PAGES:
            self._replan(expected, now)
            return
        keys = first.hint.keys[: min(free, _FIRST_PAGES)]
        want = Want(request_id="", keys=keys, tiers=self._store.match(keys).tiers, deadline=first.deadline)
        machine = self._machine(len(self._staged))
        found = plan([want], machine, now, most_pages=_FIRST_PAGES)
        later = tuple(each.hint for each in expected[1:])
        self._take_over(found, (first.hint, *later), {"": 0}, machine)
        self._plan_at = now

    def _replan(self, expected: list[Expected], now: float) -> None:
        self.counts["plans"] += 1
        soon = _soon(expected)
        wants = [self._want(each) for each in soon]
        tiers = {key: tier for want in wants for key, tier in zip(want.keys, want.tiers, strict=False)}
        self._staged = {key for key in self._staged if tiers.get(key, Tier.HBM) != Tier.HBM}
        machine = self._machine(sum(tiers[key] == Tier.HOST for key in self._staged))
        staying = tuple(self._store.staying())
        retained = [Retained(keys=staying, tiers=(Tier.HBM,) * len(staying), until=-inf)]
        found = plan(wants, machine, now, retained, most_pages=_PLAN_PAGES)
        ranks = {each.hint.request_id: rank for rank, each in enumerate(soon)}
        hints = tuple(each.hint for each in soon)
        self._kept.plan(hints, wants, [found.outcomes[want.request_id].load for want in wants])
        self._take_over(found, hints, ranks, machine)
        self._planned_at = now
        rest = _PLAN_SHARE * (self._clock() - now)
        self._soonest = now + rest if self._promotions else inf
        self._plan_at = now + max(rest, _PLAN_AGAIN_S if self._promotions else _IDLE_S)

    def _take_over(
        self, found: Plan, hints: tuple[Hint, ...], ranks: dict[str, int], machine: Machine
    ) -> None:
        """Replace the queued promotions with those of a new plan, and update the queue's limit."""
        self._promotions.clear()
        for promotion in found.promotions:
            rank = ranks[promotion.request_id]
            self._promotions.want(hints[rank], promotion.keys, promotion.dst, later=hints[rank + 1 :])
        quickest = min((s for s in (machine.read_s, machine.load_s) if s), default=inf)
        self._promotions.most = min(self._most_in_flight, max(PIECE_PAGES, int(_WAVE_S / quickest)))
        self._promotions.load_s = machine.load_s

    def _want(self, each: Expected) -> Want:
        hint = each.hint
        return Want(
            request_id=hint.request_id,
            keys=hint.keys,
            tiers=self._store.match(hint.keys).tiers,
            deadline=each.deadline,
            priority=hint.priority,
        )

    def _machine(self, staged: int) -> Machine:
        """Return the measured rates and the available space, for the planner.

        ``staged`` is the number of pages that the prefetcher has read into host memory and that are still there.
        Their slots are not available.
        """
        tiers, rates = section(self._store.stats(), "tiers"), self._store.rates()
        hbm, host = tiers.get("HBM"), tiers.get("HOST")
        gone = 0 if hbm is None else hbm["owned"] + hbm["quarantined"]
        places = None if host is None else self._config.pages_of_host(host["num_slots"])
        memory = Tier.HBM if host is None else Tier.HOST
        reads = [rate for (src, dst), rate in rates.items() if src > Tier.HOST and dst == memory and rate]
        load = rates.get((Tier.HOST, Tier.HBM))
        return Machine(
            read_s=self._page_nbytes / min(reads) if reads else 0.0,
            load_s=self._page_nbytes / load if load else 0.0,
            hbm_pages=0 if hbm is None else hbm["num_slots"] - gone,
            host_pages=None if places is None else max(0, places - staged),
            compute=self._compute,
        )

    def _start(self, tier: Tier) -> int:
        """Start the next promotions to a tier, within the limits.

        Returns:
            The number of pages whose promotion was started.
        """
        found = self._promotions.advance(tier)
        for each in found:
            if not each.in_force:
                self.expected.drop(each.hint)
            self._note_started(each.started, tier)
            self._kept.note(each.hint, each.covered, tier)
        return sum(len(each.started) for each in found)

    def _note_started(self, keys: Sequence[PageKey], dst: Tier) -> None:
        self.counts["loaded_bytes" if dst == Tier.HBM else "read_bytes"] += len(keys) * self._page_nbytes
        if dst == Tier.HOST:
            self._staged.update(keys)

    def _note_misses(self, expected: list[Expected], now: float) -> None:
        """Count requests whose deadline passed before all their readable pages were in HBM.

        Each revision of a hint is counted once.
        """
        due = [each for each in expected if each.deadline <= now]
        marks = {(each.hint.request_id, each.hint.revision): each.hint for each in due}
        for mark, hint in marks.items():
            if mark not in self._missed:
                tiers = self._store.match(hint.keys).tiers
                self.counts["deadline_misses"] += any(tier != Tier.HBM for tier in tiers)
        self._missed = set(marks)


def _soon(expected: list[Expected]) -> list[Expected]:
    """Return the first expected requests, up to a limit on their number and on their number of pages."""
    pages, found = 0, []
    for each in expected[:_PLAN_REQUESTS]:
        if pages > 2 * _PLAN_PAGES:
            break
        pages += len(each.hint.keys)
        found.append(each)
    return found


_log = logging.getLogger("prefetch.prefetcher")

_POLL_S = 0.002
_AFTER_FAULT_S = 0.25


class Prefetcher:
    """A thread that promotes the pages of ``will_need`` hints before they are needed.

    Call ``attach`` to create a prefetcher and start its thread. A store has at most one prefetcher.

    Args:
        store: The store to serve.
        config: The limits. By default, the ``prefetch`` section of the store's configuration.
        compute: The cost of computing pages on this machine. None: the prefetcher never prefers computing
            to loading.
        clock: Returns the time in seconds. Tests replace it.
    """

    def __init__(
        self,
        store: TierStore,
        config: PrefetchConfig | None = None,
        compute: Compute | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store = store
        self._config = config or _configured(store.stats())
        self._loop = PrefetchLoop(store, self._config, compute, clock)
        self._faults = 0
        self._closing = Event()
        self._thread: Worker | None = None

    @classmethod
    def attach(
        cls, store: TierStore, *, config: PrefetchConfig | None = None, compute: Compute | None = None
    ) -> Prefetcher:
        """Create a prefetcher for ``store`` and start its thread.

        From now on, until the prefetcher is closed, the store accepts ``will_need`` hints and passes them to
        the prefetcher. The thread ends when the prefetcher or the store is closed.

        Args:
            store: The store to serve.
            config: The limits. By default, the ``prefetch`` section of the store's configuration.
            compute: The cost of computing pages on this machine. None: computing is never preferred to
                loading.

        Raises:
            ValueError: A prefetcher is already attached to the store. With two, each hint would reach only one of
                them.
        """
        prefetcher = cls(store, config, compute)
        prefetcher._thread = Worker(prefetcher._run, name="tierstore-prefetcher")
        with _attaching:
            if any(other._store is store and other._serves for other in _attached):
                raise ValueError("the store already has a prefetcher: close it before you attach another")
            prefetcher._thread.start()
            _attached.add(prefetcher)
        return prefetcher

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and detach from the store, which rejects ``will_need`` hints from then on.

        Copies in flight continue. Idempotent and thread-safe. May be called before or after the store is
        closed.

        Args:
            timeout_s: Longest time to wait for the thread, in seconds.
        """
        timeout_s = seconds_to_wait("timeout_s", timeout_s)
        first = not self._closing.is_set()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if first:  # a second call must not detach a prefetcher that was attached later
            with suppress(StoreClosed):
                self._store.reject_hints()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def ready(self, keys: Sequence[PageKey], by: float) -> int:
        """Wait until all pages of the longest readable prefix of ``keys`` are in HBM, or until the time ``by``.

        This method starts no copies, so give a hint first. It pins no pages, so a lease that is acquired afterwards
        may find fewer pages in HBM.

        Args:
            keys: The keys of a sequence.
            by: The time at which to stop waiting, in seconds on the event loop's clock (``loop.time()``).

        Returns:
            The number of pages that are in HBM, counted from the first key without a gap.

        Raises:
            StoreClosed: The store is closed.
            TypeError, ValueError: ``by`` is not a time.
        """
        require_time("by", by)
        loop = asyncio.get_running_loop()
        there = 0
        while True:
            tiers = self._store.match(keys[there:]).tiers
            count = next((i for i, tier in enumerate(tiers) if tier != Tier.HBM), len(tiers))
            there += count
            if count == len(tiers) or loop.time() >= by:
                return there
            await asyncio.sleep(min(_POLL_S, max(0.0, by - loop.time())))

    def stats(self) -> dict[str, object]:
        """Return the limits and the counters of the prefetcher.

        ``read_bytes`` and ``loaded_bytes`` are the numbers of bytes whose promotion to HOST and to HBM,
        respectively, was started; ``prefetch_bytes`` in the counters of ``TierStore.stats`` shows how many
        prefetched bytes were used. ``turned_away`` counts requests that were dropped because too many were expected,
        ``deadline_misses`` counts requests whose pages were not all in HBM in time, and ``faults`` counts
        unexpected errors.
        """
        loop = self._loop
        return {
            "expected": len(loop.expected),
            "turned_away": loop.expected.turned_away,
            "in_flight_pages": loop.in_flight,
            "max_in_flight": self._config.max_in_flight,
            "share_of_host": self._config.share_of_host,
            "faults": self._faults,
            **{
                name: loop.counts[name] for name in ("read_bytes", "loaded_bytes", "deadline_misses", "plans")
            },
        }

    def turn(self, timeout_s: float) -> float:
        """Read hints, make a new plan if one is due, and start promotions.

        Not thread-safe. If the prefetcher is attached, only its thread may call this method.

        Args:
            timeout_s: Longest time to wait for a hint, in seconds.

        Returns:
            The ``timeout_s`` for the next turn: the time in seconds after which there is work to do even if no new
                hint arrives.
        """
        return self._loop.turn(timeout_s)

    @property
    def _serves(self) -> bool:
        return not self._closing.is_set() and self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        pause = 0.0
        while not self._closing.is_set():
            try:
                pause = self.turn(pause)
            except StoreClosed:
                return
            except Exception:  # noqa: BLE001 - a thread's top: count errors, log the first
                if not self._faults:
                    _log.exception("unexpected error in the prefetcher thread, which continues (logged once)")
                self._faults += 1
                self._closing.wait(_AFTER_FAULT_S)
        # If close() timed out, a later take_hints of this thread may have attached the prefetcher again.
        with suppress(StoreClosed):
            self._store.reject_hints()


_attaching = Lock()
_attached: WeakSet[Prefetcher] = WeakSet()
"""All attached prefetchers of this process. Protected by ``_attaching``.

The references are weak, so the set keeps no prefetcher or store alive.
"""


def _configured(figures: dict[str, object]) -> PrefetchConfig:
    """Return the ``prefetch`` section of the configuration in a store's ``stats``, or the defaults."""
    return PrefetchConfig.model_validate(section(figures, "config").get("prefetch", {}))
