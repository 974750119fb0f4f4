"""The tiers of all workers as the scheduler's half has them: one store whose bytes are elsewhere, and what acts on it.

They are there once all workers have said hello. One thread, the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.costs import Measured
from tierstore.adapters.vllm.hints import Afterwards
from tierstore.adapters.vllm.hit import Offers
from tierstore.adapters.vllm.loads import Ahead, Loading
from tierstore.adapters.vllm.stores import Filling, Storing
from tierstore.apart import Ranks, assemble_apart
from tierstore.config import PrefetchConfig
from tierstore.errors import ConfigError
from tierstore.layout import PageLayout
from tierstore.store import TierStore
from tierstore.types import Tier
from tierstore.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.config import Load
    from tierstore.adapters.vllm.costs import Pace
    from tierstore.adapters.vllm.events import Events
    from tierstore.adapters.vllm.kv_groups import Groups
    from tierstore.adapters.vllm.messages import Hello
    from tierstore.assembly import Parts
    from tierstore.config import StoreConfig
    from tierstore.directory.transfers import Traffic


@dataclass(frozen=True, slots=True)
class Terms:
    """What is asked of them. ``config``: of one rank; the others are as in ``settings.Settings``."""

    config: StoreConfig
    groups: Groups
    load_timeout_s: float
    put_off_s: float = 0.0
    load: Load = "always"


@dataclass(slots=True, eq=False)
class Tiers:
    """``ahead``: None without a disk. ``costs``: None where what is stored is always loaded."""

    ranks: Ranks
    parts: Parts
    store: TierStore
    storing: Storing
    filling: Filling
    loading: Loading
    afterwards: Afterwards
    ahead: Ahead | None
    costs: Measured | None
    offers: Offers

    @classmethod
    def of(cls, terms: Terms, hellos: Sequence[Hello], pace: Pace, events: Events | None) -> Tiers:
        """Over the workers that said hello. ConfigError unless they have opened the same.

        ``events``: is told of every copy that comes and goes from now on.
        """
        specs = {hello.spec for hello in hellos}
        if len(specs) != 1:
            raise ConfigError(
                f"ranks have pages of {len(specs)} kinds: {specs}; allowed: the same on all of them"
            )
        layout, ranks = PageLayout.of(hellos[0].spec), Ranks(len(hellos))
        parts = assemble_apart(terms.config, layout, [hello.opened for hello in hellos], ranks)
        store = TierStore(terms.config, parts, Wakeup(), pump=False)
        storing = Storing(store)
        if events is not None:
            parts.directory.watch(events.came, events.left)
        ahead = None
        if terms.config.nvme is not None:
            ahead = Ahead(store, _most_ahead(terms.config, hellos[0]), hellos[0].host_slots)
        costs = measured(terms, hellos, parts.directory.traffic, pace)
        return cls(
            ranks=ranks,
            parts=parts,
            store=store,
            storing=storing,
            filling=Filling(store, storing, terms.groups, events),
            loading=Loading(store, terms.load_timeout_s),
            afterwards=Afterwards(store),
            ahead=ahead,
            costs=costs,
            offers=Offers(store, terms.groups, ahead, terms.put_off_s, costs),
        )

    @property
    def moving(self) -> bool:
        """Whether something is on its way, or is to be."""
        directory = self.parts.directory
        moves = self.ranks.waiting or self.storing.waiting or directory.busy()
        coming = self.ahead is not None and self.ahead.waits
        return moves or coming or directory.placement.next_spill is not None

    def counted(self) -> dict[str, dict[str, float]]:
        """Counters and gauges by their names in ``figures``."""
        self.store.stats()  # it brings the gauges up to date
        left = {Tier.NVME.name: float(self.offers.left)}
        return {**self.store.metrics.snapshot(), "left_pages": left}

    def forget(self) -> None:
        """Nothing stored so far is found again, and what loads are bringing counts as failed."""
        self.storing.forget()
        self.loading.void()
        tables = self.parts.directory.residency.tables.values()
        self.store.evict(list(dict.fromkeys(key for table in tables for key in table.copies)))

    def check(self) -> None:
        """AssertionError naming the first invariant that does not hold."""
        self.store.check()
        self.storing.check(self.loading.writing)


def _most_ahead(config: StoreConfig, hello: Hello) -> int:
    """Pages under way at once, as the prefetch section or its defaults have it."""
    limits = config.prefetch or PrefetchConfig()
    share = int(hello.host_slots * limits.share_of_host)
    return max(1, min(share, limits.max_in_flight // hello.spec.page_nbytes))


def measured(terms: Terms, hellos: Sequence[Hello], traffic: Traffic, pace: Pace) -> Measured | None:
    """What the workers' disks give, the slowest of them counting; None: what is stored is always loaded."""
    if terms.load == "always" or terms.config.nvme is None:
        return None
    rates = [hello.read_rate for hello in hellos if hello.read_rate is not None]
    return Measured(traffic, pace, hellos[0].spec.page_nbytes, min(rates, default=None), monotonic)
