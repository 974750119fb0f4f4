"""The prefetcher: one thread that reads a store's hints, plans, and has the store bring pages up before their time.

It is a caller like any other: it holds no pages, no lease and no lock, and without it everything is served as well,
only later. What it may displace, and that nothing starts for a hint that was withdrawn, is the store's to see to
(``TierStore.promote``).
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from threading import Event, Lock, Thread
from time import monotonic
from typing import TYPE_CHECKING, Self
from weakref import WeakSet

from prefetch.bringing import Bringing
from prefetch.figures import section
from tierstore.config import PrefetchConfig
from tierstore.errors import StoreClosed
from tierstore.types import Tier, require_time, seconds_to_wait

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from prefetch.types import Compute
    from tierstore.store import TierStore
    from tierstore.types import PageKey

_log = logging.getLogger(__name__)

_POLL_S = 0.002
_AFTER_FAULT_S = 0.25


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
        self._config = config or _configured(store.stats())
        self._bringing = Bringing(store, self._config, compute, clock)
        self._faults = 0
        self._closing = Event()
        self._thread: Thread | None = None

    @classmethod
    def attach(
        cls, store: TierStore, *, config: PrefetchConfig | None = None, compute: Compute | None = None
    ) -> Prefetcher:
        """A running prefetcher with the limits of the store's ``prefetch`` section, or of ``config``.

        From now on ``will_need`` hints are deferred to it, until it is closed. It ends by itself with the store.
        ValueError while another is attached to the store: each hint would go to one of them only.
        """
        prefetcher = cls(store, config, compute)
        prefetcher._thread = Thread(target=prefetcher._run, name="tierstore-prefetcher", daemon=True)
        with _attaching:
            if any(other._store is store and other._serves for other in _attached):
                raise ValueError(
                    "the store has a prefetcher; allowed: one at a time, another once it is closed"
                )
            prefetcher._thread.start()
            _attached.add(prefetcher)
        return prefetcher

    def close(self, timeout_s: float = 5.0) -> None:
        """Ends its thread and lets the store go on without it: hints are rejected again, copies under way go on.

        Idempotent, any thread, before or after the store is closed. ``timeout_s`` bounds the wait for the thread.
        """
        timeout_s = seconds_to_wait("timeout_s", timeout_s)
        first = not self._closing.is_set()
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if first:  # a second call must not take the hints from who came after it
            with suppress(StoreClosed):
                self._store.reject_hints()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def ready(self, keys: Sequence[PageKey], by: float) -> int:
        """Pages of the prefix that are in HBM, once all that can be read are, or at ``by`` on the loop's clock.

        Holds nothing: a lease may find fewer. It starts nothing either: hint first. StoreClosed if the store is,
        TypeError or ValueError for what is no time.
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
        """Counters: pages and bytes started by edge, hints known and turned away, deadlines missed, faults.

        What became of the bytes is the store's to say: ``prefetch_bytes`` among the counters of ``TierStore.stats``.
        """
        bringing = self._bringing
        return {
            "expected": len(bringing.intake),
            "turned_away": bringing.intake.turned_away,
            "in_flight_pages": bringing.in_flight,
            "max_in_flight": self._config.max_in_flight,
            "share_of_host": self._config.share_of_host,
            "faults": self._faults,
            **{
                name: bringing.counts[name]
                for name in ("read_bytes", "loaded_bytes", "deadline_misses", "plans")
            },
        }

    def turn(self, timeout_s: float) -> float:
        """Takes in hints, waiting up to ``timeout_s`` for one, plans if that is due and starts what can start.

        The seconds after which the next turn is worth while. One thread at a time: its own, once it is attached.
        """
        return self._bringing.turn(timeout_s)

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
            except Exception:  # noqa: BLE001 - a thread's top: count it, log it once, go on
                if not self._faults:
                    _log.exception("the prefetcher met an unexpected error")
                self._faults += 1
                self._closing.wait(_AFTER_FAULT_S)
        # Who closed it may not have waited so long, and its last look at the hints attached it again.
        with suppress(StoreClosed):
            self._store.reject_hints()


_attaching = Lock()
_attached: WeakSet[Prefetcher] = WeakSet()
"""Under ``_attaching``. Weak, so that neither a prefetcher nor its store is kept by it."""


def _configured(figures: dict[str, object]) -> PrefetchConfig:
    """The store's section, whose values ``stats`` gives; the defaults without one."""
    return PrefetchConfig.model_validate(section(figures, "config").get("prefetch", {}))
