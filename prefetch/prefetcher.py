"""The prefetcher: one thread that reads a store's hints, plans, and has the store bring pages up before their time.

It is a caller like any other: it holds no pages, no lease and no lock, and without it everything is served as well,
only later. What it may displace, and that nothing starts for a hint that was withdrawn, is the store's to see to
(``TierStore.promote``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from math import inf
from threading import Event, Thread
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from prefetch.intake import Intake
from prefetch.planner import PIECE_PAGES, Machine, Promotion, Want, plan
from tierstore.config import PrefetchConfig
from tierstore.errors import StoreClosed
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from prefetch.intake import Expected
    from prefetch.planner import Compute
    from tierstore.store import TierStore
    from tierstore.types import Hint, PageKey

_log = logging.getLogger(__name__)

_WAVE_S = 0.1
"""Seconds of copies under way at once, at most: a lease that comes meanwhile waits no longer for them."""
_PLAN_AGAIN_S = 0.05
_PLAN_SOON_S = 0.004
_BUSY_S = 0.002
_BLOCKED_S = 0.02
_IDLE_S = 0.25
_PLAN_PAGES = 8192
_PLAN_REQUESTS = 256
_LOOK_AHEAD = 4
"""Promotions that are tried after one that cannot start yet."""


class _Ahead(NamedTuple):
    """A planned promotion whose hint is known; ``over``: hints that are needed later, the last of them last."""

    hint: Hint
    keys: tuple[PageKey, ...]
    dst: Tier
    over: tuple[Hint, ...]


class Prefetcher:
    """Brings up what ``will_need`` hints name. ``attach`` starts its thread; one to a store.

    ``compute``: what computing a page costs here; without it pages are always loaded. ``clock`` is for tests.
    """

    def __init__(
        self,
        store: TierStore,
        config: PrefetchConfig | None = None,
        compute: Compute | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._store = store
        self._compute = compute
        self._clock = clock
        figures = store.stats()
        self._config = config or _configured(figures)
        self._page_nbytes = int(_number(figures, "page_nbytes"))
        self._top = Tier.HBM if "HBM" in _section(figures, "tiers") else Tier.HOST
        self._intake = Intake()
        self._ahead: dict[Tier, list[_Ahead]] = {}
        self._staged: set[PageKey] = set()
        self._in_flight = 0
        self._wave = PIECE_PAGES
        self._plan_at = -inf
        self._missed: set[tuple[str, int]] = set()
        self._counts: Counter[str] = Counter()
        self._closing = Event()
        self._thread: Thread | None = None
        self._take(0.0)

    @classmethod
    def attach(
        cls, store: TierStore, *, config: PrefetchConfig | None = None, compute: Compute | None = None
    ) -> Prefetcher:
        """A running prefetcher with the limits of the store's ``prefetch`` section, or of ``config``.

        From now on ``will_need`` hints are deferred to it. Close it before the store.
        """
        prefetcher = cls(store, config, compute)
        prefetcher._thread = Thread(target=prefetcher._run, name="tierstore-prefetcher", daemon=True)
        prefetcher._thread.start()
        return prefetcher

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends its thread; copies under way go on by themselves. Idempotent, any thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def ready(self, keys: Sequence[PageKey], by: float) -> int:
        """Pages of the prefix that are in HBM, once all that can be read are, or at ``by`` on the loop's clock.

        Holds nothing: a lease may find fewer. It starts nothing either: hint first. StoreClosed if the store is.
        """
        loop = asyncio.get_running_loop()
        there = 0
        while True:
            tiers = self._store.match(keys[there:]).tiers
            count = next((i for i, tier in enumerate(tiers) if tier != Tier.HBM), len(tiers))
            there += count
            if count == len(tiers) or loop.time() >= by:
                return there
            await asyncio.sleep(min(_BUSY_S, max(0.0, by - loop.time())))

    def stats(self) -> dict[str, object]:
        """Counters: pages and bytes started by edge, hints known and turned away, deadlines missed, faults.

        What became of the bytes is the store's to say: ``prefetch_bytes`` among the counters of ``TierStore.stats``.
        """
        return {
            "expected": len(self._intake),
            "turned_away": self._intake.turned_away,
            "in_flight_pages": self._in_flight,
            "max_in_flight": self._config.max_in_flight,
            "share_of_host": self._config.share_of_host,
            **{
                name: self._counts[name]
                for name in ("read_bytes", "loaded_bytes", "deadline_misses", "plans", "faults")
            },
        }

    # -- one turn -----------------------------------------------------------------------------------------------

    def turn(self, timeout_s: float) -> float:
        """Takes in hints, waiting up to ``timeout_s`` for one, plans if that is due and starts what can start.

        The seconds after which the next turn is worth while. One thread at a time.
        """
        fresh = self._take(timeout_s)
        now = self._clock()
        self._intake.expire(now)
        expected = self._intake.in_order()
        self._note_misses(expected, now)
        if not expected:
            self._ahead, self._staged = {}, set()
            return _IDLE_S
        if fresh or now >= self._plan_at:
            self._replan(expected, now)
        started = sum(self._start(tier) for tier in list(self._ahead))
        if self._in_flight and not started:
            self._in_flight = self._store.promote(expected[0].hint, (), self._top).in_flight
        if started or self._in_flight:
            if not any(self._ahead.values()):
                self._plan_at = min(self._plan_at, now + _PLAN_SOON_S)
            return _BUSY_S
        return _BLOCKED_S if any(self._ahead.values()) else _PLAN_AGAIN_S

    def _take(self, timeout_s: float) -> bool:
        hints = self._store.take_hints(timeout_s)
        self._intake.take(hints, self._clock())
        return bool(hints)

    def _replan(self, expected: list[Expected], now: float) -> None:
        self._counts["plans"] += 1
        soon = _soon(expected)
        wants = [self._want(each) for each in soon]
        tiers = {key: tier for want in wants for key, tier in zip(want.keys, want.tiers, strict=False)}
        self._staged = {key for key in self._staged if tiers.get(key, Tier.HBM) != Tier.HBM}
        machine = self._machine(sum(tiers[key] == Tier.HOST for key in self._staged))
        found = plan(wants, machine, now, most_pages=_PLAN_PAGES)
        ranks = {each.hint.request_id: rank for rank, each in enumerate(soon)}
        hints = tuple(each.hint for each in soon)
        self._ahead = {}
        for promotion in found.promotions:
            rank = ranks[promotion.request_id]
            self._ahead.setdefault(promotion.dst, []).append(_ahead(promotion, hints, rank))
        quickest = min((s for s in (machine.read_s, machine.load_s) if s), default=inf)
        self._wave = max(PIECE_PAGES, int(_WAVE_S / quickest))
        self._plan_at = now + (_PLAN_AGAIN_S if self._ahead else _IDLE_S)

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
        """The rates, and the room that expected requests may take: all that nobody holds."""
        figures = self._store.stats()
        tiers, rates = _section(figures, "tiers"), _section(figures, "bytes_per_s")
        hbm, host = tiers.get("HBM"), tiers.get("HOST")
        held = 0 if hbm is None else hbm["owned"] + hbm["quarantined"] + hbm["pinned"]
        places = None if host is None else max(1, int(host["num_slots"] * self._config.share_of_host))
        to_host = "NVME->HOST" if host is not None else "NVME->HBM"
        return Machine(
            read_s=self._page_nbytes / rates[to_host] if rates.get(to_host) else 0.0,
            load_s=self._page_nbytes / rates["HOST->HBM"] if rates.get("HOST->HBM") else 0.0,
            hbm_pages=0 if hbm is None else hbm["num_slots"] - held,
            host_pages=None if places is None else max(0, places - staged),
            compute=self._compute,
        )

    def _start(self, dst: Tier) -> int:
        """Starts what comes next on the way to a tier, as long as it may; pages started."""
        queue, started, at = self._ahead[dst], 0, 0
        while at < min(len(queue), _LOOK_AHEAD):
            room = self._most_in_flight - self._in_flight
            hint, keys, _, over = queue[at]
            if room <= 0:
                break
            found = self._store.promote(hint, keys[:room], dst, over)
            self._in_flight = found.in_flight
            if not found.in_force:
                self._intake.drop(hint)
                queue[:] = [each for each in queue if each.hint is not hint]
                at = 0
                continue
            started += len(found.keys)
            self._note_started(found.keys, dst)
            if found.covered == len(keys):
                del queue[at]
                continue
            queue[at] = queue[at]._replace(keys=keys[found.covered :])
            at += found.covered < room
        return started

    @property
    def _most_in_flight(self) -> int:
        """Pages: the configured limit, and no more than a wave, but one page at least."""
        return max(1, min(self._config.max_in_flight // self._page_nbytes, self._wave))

    def _note_started(self, keys: Sequence[PageKey], dst: Tier) -> None:
        self._counts["loaded_bytes" if dst == Tier.HBM else "read_bytes"] += len(keys) * self._page_nbytes
        if dst == Tier.HOST:
            self._staged.update(keys)

    def _note_misses(self, expected: list[Expected], now: float) -> None:
        """A request whose time has come while pages of it that can be read are not in HBM: counted once a revision."""
        due = [each for each in expected if each.deadline <= now]
        marks = {(each.hint.request_id, each.hint.revision): each.hint for each in due}
        for mark, hint in marks.items():
            if mark not in self._missed:
                tiers = self._store.match(hint.keys).tiers
                self._counts["deadline_misses"] += any(tier != Tier.HBM for tier in tiers)
        self._missed = set(marks)

    def _run(self) -> None:
        pause = 0.0
        while not self._closing.is_set():
            try:
                pause = self.turn(pause)
            except StoreClosed:
                return
            except Exception:  # noqa: BLE001 - a thread's top: count it, log it once, go on
                if not self._counts["faults"]:
                    _log.exception("the prefetcher met an unexpected error")
                self._counts["faults"] += 1
                self._closing.wait(_IDLE_S)


def _ahead(promotion: Promotion, hints: tuple[Hint, ...], rank: int) -> _Ahead:
    return _Ahead(hints[rank], promotion.keys, promotion.dst, hints[rank + 1 :])


def _soon(expected: list[Expected]) -> list[Expected]:
    """Who is planned for: the first, as many as have so many pages together."""
    pages, found = 0, []
    for each in expected[:_PLAN_REQUESTS]:
        if pages > 2 * _PLAN_PAGES:
            break
        pages += len(each.hint.keys)
        found.append(each)
    return found


def _configured(figures: dict[str, object]) -> PrefetchConfig:
    """The store's section, whose values ``stats`` gives; the defaults without one."""
    section = _section(figures, "config").get("prefetch", {})
    return PrefetchConfig.model_validate(section)


def _section(figures: dict[str, object], name: str) -> dict[str, Any]:
    found = figures[name]
    if not isinstance(found, dict):
        raise TypeError(f"stats()[{name!r}] is {found!r}; allowed: a mapping")
    return found


def _number(figures: dict[str, object], name: str) -> float:
    found = figures[name]
    if not isinstance(found, int | float):
        raise TypeError(f"stats()[{name!r}] is {found!r}; allowed: a number")
    return found
