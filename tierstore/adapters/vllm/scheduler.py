"""The half in vLLM's scheduler process: it knows which pages are stored and decides which ones move.

Runs in the scheduler's thread only. It never blocks, and reads or copies no pages. Its decisions (``Orders``)
and their results (``Report``) are plain data. ``Tiers`` is the store of all workers without its bytes, which
are in the workers; it exists once all workers have sent their first message.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.costs import ComputeRate, MeasuredCosts
from tierstore.adapters.vllm.events import Events
from tierstore.adapters.vllm.hints import PageRetention, hints_of
from tierstore.adapters.vllm.hit import HitLookup, pages_to_load
from tierstore.adapters.vllm.keys import Adapters
from tierstore.adapters.vllm.loads import DiskPrefetch, Loads
from tierstore.adapters.vllm.messages import Orders
from tierstore.adapters.vllm.metrics import MetricsReader
from tierstore.adapters.vllm.requests import Request, RequestState, Step
from tierstore.adapters.vllm.saves import Stores
from tierstore.config import PrefetchConfig
from tierstore.errors import ConfigError
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.ranks import Ranks, assemble_apart
from tierstore.store import TierStore
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tierstore.adapters.vllm.config import Deployment, Load
    from tierstore.adapters.vllm.events import Change
    from tierstore.adapters.vllm.keys import Adapter
    from tierstore.adapters.vllm.kv_groups import Groups
    from tierstore.adapters.vllm.messages import Hello, Report
    from tierstore.config import StoreConfig


@dataclass(frozen=True, slots=True)
class Terms:
    """Settings of the tiers. ``config`` is that of one rank; the others are as in ``config.Settings``."""

    config: StoreConfig
    groups: Groups
    load_timeout_s: float
    put_off_s: float = 0.0
    load: Load = "always"


@dataclass(slots=True, eq=False)
class Tiers:
    """The store of all workers. ``disk_prefetch`` is None without a disk, ``costs`` if it loads all hits."""

    ranks: Ranks
    store: TierStore
    stores: Stores
    loads: Loads
    retention: PageRetention
    disk_prefetch: DiskPrefetch | None
    costs: MeasuredCosts | None
    hits: HitLookup

    @classmethod
    def of(
        cls, terms: Terms, hellos: Sequence[Hello], compute_rate: ComputeRate, events: Events | None
    ) -> Tiers:
        """Build the tiers over these workers. ConfigError unless all of them opened the same sizes.

        ``events`` records every copy that a tier gains or loses from now on.
        """
        specs = {hello.spec for hello in hellos}
        if len(specs) != 1:
            raise ConfigError(f"all ranks must have the same pages, got {len(specs)} kinds: {specs}")
        layout, ranks = PageLayout.of(hellos[0].spec), Ranks(len(hellos))
        opened = assemble_apart(terms.config, layout, [hello.opened for hello in hellos], ranks)
        store = TierStore(terms.config, opened, Wakeup(), pump=False)
        stores = Stores(store, terms.groups, events)
        if events is not None:
            store.watch(events.note)
        disk_prefetch = None
        if terms.config.nvme is not None:
            disk_prefetch = DiskPrefetch(store, _most_ahead(terms.config, hellos[0]), hellos[0].host_slots)
        costs = measured(terms, hellos, store, compute_rate)
        return cls(
            ranks=ranks,
            store=store,
            stores=stores,
            loads=Loads(store, terms.load_timeout_s),
            retention=PageRetention(store),
            disk_prefetch=disk_prefetch,
            costs=costs,
            hits=HitLookup(store, terms.groups, disk_prefetch, terms.put_off_s, costs),
        )

    @property
    def moving(self) -> bool:
        """Whether transfers are in flight, or wait to be started."""
        coming = self.disk_prefetch is not None and self.disk_prefetch.waits
        return coming or self.ranks.waiting or self.stores.waiting or not self.store.idle()

    def counted(self) -> dict[str, dict[str, float]]:
        """Return counters and gauges by their names in ``metrics``."""
        self.take_back()
        self.store.stats()  # it brings the gauges up to date
        on_disk = [tier for tier, each in self.store.tiers.items() if not each.in_memory]
        left = {tier.name: float(self.hits.left) for tier in on_disk[:1]}
        return {**self.store.metrics.snapshot(), "left_pages": left}

    def take_back(self) -> None:
        """Advance the store, and take back the blocks that it no longer reads."""
        self.stores.returned(self.store.poll())

    def forget(self) -> None:
        """Forget everything stored so far. Loads in flight count as failed."""
        self.stores.forget()
        self.loads.void()
        self.store.clear()
        self.take_back()

    def check(self) -> None:
        """Check every invariant. AssertionError names the first violation."""
        self.store.check()
        self.stores.check(self.loads.writing)


def _most_ahead(config: StoreConfig, hello: Hello) -> int:
    """Return the limit of pages in flight from the prefetch section, or its default."""
    limits = config.prefetch or PrefetchConfig()
    return min(limits.pages_of_host(hello.host_slots), limits.pages_in_flight(hello.spec.page_nbytes))


def measured(
    terms: Terms, hellos: Sequence[Hello], store: TierStore, compute_rate: ComputeRate
) -> MeasuredCosts | None:
    """Return costs measured with the slowest worker's disk; None if every hit is loaded."""
    if terms.load == "always" or terms.config.nvme is None:
        return None
    rates = [hello.read_rate for hello in hellos if hello.read_rate is not None]
    return MeasuredCosts(store, compute_rate, hellos[0].spec.page_nbytes, min(rates, default=None), monotonic)


_QUIET_S = 5.0
"""After this time without a report from the workers, the engine is no longer kept stepping for transfers."""


class SchedulerHalf:
    """The scheduler's half without vLLM's names. It offers and orders nothing before ``meet``."""

    def __init__(
        self,
        terms: Terms,
        namespaces: Sequence[bytes],
        *,
        with_adapter: Callable[[Adapter], Sequence[bytes]] | None = None,
        events: bool = False,
    ) -> None:
        """Make a half that has not met its workers.

        Args:
            terms: Settings of the tiers.
            namespaces: Namespace of the keys of each group.
            with_adapter: Returns the namespaces for requests with a LoRA adapter. None: their pages are
                neither reused nor stored.
            events: Whether a caller takes events.
        """
        self._events = Events() if events else None
        self.groups = terms.groups
        self._terms = terms
        self._namespaces = tuple(namespaces)
        self._with_adapter = with_adapter
        self._adapters = Adapters()
        self._compute_rate = ComputeRate()
        self._known: dict[str, RequestState] = {}
        self._tiers: Tiers | None = None
        self._metrics: MetricsReader | None = None
        self._number = 0
        self._moved = monotonic()

    @classmethod
    def of(cls, deployment: Deployment) -> SchedulerHalf:
        """Return the scheduler's half of a deployment, inert until it has met the workers."""
        settings, groups = deployment.settings, deployment.groups
        config = settings.of_rank(deployment.world_size, deployment.replica, "cpu")
        return cls(
            Terms(config, groups, settings.load_timeout_s, settings.put_off_s, settings.load),
            groups.namespaces(deployment.identity),
            with_adapter=deployment.with_adapter,
            events=deployment.events,
        )

    def meet(self, hellos: Sequence[Hello]) -> None:
        """Process the workers' first messages. ConfigError unless all workers opened the same sizes."""
        self._tiers = Tiers.of(self._terms, hellos, self._compute_rate, self._events)
        self._metrics = MetricsReader(self._tiers.counted)

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def looks_ahead(self) -> bool:
        """Whether ``arrived`` needs to know how many tokens of a queued request the engine holds."""
        return self._tiers is not None and self._tiers.disk_prefetch is not None

    def arrived(self, request: Request, local: int = 0) -> None:
        """Note that a request was queued, and that the engine holds its first ``local`` tokens now.

        A request with the id of an aborted load that is still in flight is ignored, because the end of that
        load would count as the end of its own. vLLM does not accept such a request either.
        """
        tiers = self._tiers
        if tiers is None or tiers.loads.of(request.request_id):
            return
        adapter, namespaces = None, self._namespaces
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            adapter = self._adapters.of(lora)
            if adapter is None or self._with_adapter is None:
                return  # its weights are unknown: none of its pages are reused or stored
            namespaces = tuple(self._with_adapter(adapter))
        chains, hints = self.groups.chains(request, namespaces), hints_of(request)
        known = RequestState(request, chains, collected=[0] * len(chains), hints=hints, adapter=adapter)
        self._known[request.request_id] = known
        if hints.after is not None:
            tiers.retention.waits(request.request_id, hints, known.keys)
        if tiers.disk_prefetch is not None:
            tiers.disk_prefetch.want(request.request_id, *tiers.hits.wanted(known, local), hints)

    def offer(self, request: Request, computed: int) -> int | None:
        """Return how many tokens beyond ``computed`` can be loaded.

        They are whole blocks, and leave at least one token to compute. None means that vLLM should ask again,
        because pages are being read from disk; for at most ``put_off_s``. Pages that are evicted before they
        are loaded are reported as failed.
        """
        tiers, known = self._tiers, self._known.get(request.request_id)
        if tiers is None or known is None or computed % self.groups.unit:
            return 0
        if not self._is_of_its_adapter(known, look=known.lookup is None):
            known.limit = 0
            if known.lookup is not None:
                known.lookup.stale = True
        return tiers.hits.tokens(known, computed, len(self._known) - 1)

    def sources(self, request: Request, tokens: int) -> dict[Tier, int]:
        """Return where the tokens of the last accepted offer come from."""
        known = self._known.get(request.request_id)
        return {} if known is None or known.taken is None else known.taken.up_to(tokens).sources

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Load ``tokens`` tokens of the accepted offer into the request's blocks, ``tables`` by group."""
        tiers, known = self._tiers, self._known.get(request.request_id)
        if tiers is None or known is None or known.lookup is None or not tokens:
            return
        start = known.lookup.computed
        pages = pages_to_load(self.groups, known.chains, tables, start, start + tokens)
        # At the end of a chunk no page before it is needed. vLLM waits for the result of a load all the same.
        starts, keys, blocks = zip(*pages, strict=True) if pages else ((), (), ())
        tiers.loads.want(request.request_id, keys, blocks, starts)
        known.taken, known.lookup = known.lookup.hit, None
        if tiers.disk_prefetch is not None and not known.left:
            tiers.disk_prefetch.over(request.request_id)

    def finished(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Note that the request ended or was aborted, with ``computed`` tokens in the blocks of ``tables``.

        Full blocks are stored before they are reused. Loads into its blocks go on, and are reported when they
        end. If the request waits with an offer that vLLM has not taken, nothing is stored: vLLM may count the
        offered tokens as computed although they are not in its blocks.
        """
        tiers, known = self._tiers, self._known.get(request_id)
        if tiers is None or known is None:
            return
        waits = known.lookup is not None or tiers.loads.of(request_id)
        if known.limit is None and not waits and self._is_of_its_adapter(known):
            tiers.stores.collect(known, tables, computed, computed)
        del self._known[request_id]
        if tiers.disk_prefetch is not None and not known.left:
            tiers.disk_prefetch.over(request_id)
        if known.hints.after is not None:
            tiers.retention.ended(request_id, known.hints, known.keys)

    # -- steps --------------------------------------------------------------------------------------------------

    def orders(self, steps: Iterable[Step]) -> Orders:
        """Return what the workers must do in the step that is about to run."""
        tiers = self._tiers
        if tiers is None:
            return Orders()
        stores, loads = tiers.stores, tiers.loads
        steps = list(steps)
        if steps:
            self._moved = monotonic()
        else:
            tiers.take_back()  # timed spills go on, although no worker sends a report
        fence = stores.reused(block for step in steps for block in step.fresh)
        stores.reused(loads.fresh_blocks())  # these loads wait until nothing reads their blocks
        loads.start(stores.busy, idle=not steps)
        if tiers.disk_prefetch is not None:
            tiers.disk_prefetch.advance()
        self._settle(tiers)
        before = tuple(tiers.ranks.take())
        for step in steps:
            self._follow(tiers, step)
        stores.put(loads.into)
        failed = loads.take_failed()
        after, waits = tuple(tiers.ranks.take()), loads.waits
        idle = not steps and (waits or tiers.moving)
        if tiers.costs is not None:
            tiers.costs.look(computes=bool(steps))
        self._number += 1
        answer = self._compute_rate.ordered(self._number, steps, monotonic()) or waits
        return Orders(fence, before, after, failed, answer, idle, self._number)

    def heard(self, report: Report | None) -> set[str]:
        """Process the workers' report. Returns requests whose loads have succeeded."""
        tiers = self._tiers
        if tiers is None:
            return set()
        if report is not None:
            self._compute_rate.ended(report.number, monotonic())
            for rank, health in report.health.items():
                tiers.ranks.hear(rank, health)
            for rank, acks in report.acks.items():
                tiers.ranks.deliver(rank, acks)
                if any(ack.num_ready for ack in acks):
                    self._moved = monotonic()
        tiers.take_back()
        if tiers.costs is not None:
            tiers.costs.look()
        self._settle(tiers)
        return tiers.loads.take_loaded()

    @property
    def pending(self) -> bool:
        """Whether the engine should keep stepping without a request."""
        if self._tiers is None or monotonic() - self._moved > _QUIET_S:
            return False
        return self._tiers.moving

    # -- life ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all pages stored so far, because the weights have changed or a user asked for it.

        If vLLM still accepts an earlier offer, it waits for the load, which is reported as failed.
        """
        if self._tiers is None:
            return
        self._tiers.forget()
        for known in self._known.values():
            if known.lookup is not None:
                known.lookup.stale = True

    def take_events(self) -> list[Change]:
        """Return the pages that tiers gained and lost since the last call; empty if events are off."""
        if self._events is None:
            return []
        if self._tiers is not None:
            self._tiers.take_back()
        return self._events.take()

    @property
    def at_rest(self) -> bool:
        """Return whether every ordered copy out of or into the engine's blocks was reported as ended."""
        tiers = self._tiers
        return tiers is None or not (tiers.stores.busy or tiers.loads.into)

    def check(self) -> None:
        """Check every invariant. AssertionError names the first violation."""
        if self._tiers is not None:
            self._tiers.check()

    def stats(self) -> dict[str, object]:
        """Return ``TierStore.stats``; an empty mapping before the workers' first messages."""
        return {} if self._tiers is None else self._tiers.store.stats()

    def figures(self) -> dict[str, dict[str, float]] | None:
        """Return the metrics since the last call; None if nothing is new or it was less than a second ago."""
        return None if self._metrics is None else self._metrics.take()

    def close(self) -> None:
        """Close this half. Pages that only host memory holds are lost with the workers."""
        if self._tiers is not None:
            self._tiers.store.close(timeout_s=0)

    # -- inside -------------------------------------------------------------------------------------------------

    def _follow(self, tiers: Tiers, step: Step) -> None:
        known = self._known.get(step.request_id)
        if known is None:
            return
        known.lookup = None
        if step.first and tiers.disk_prefetch is not None and not known.left:
            tiers.disk_prefetch.over(step.request_id)
        if self._is_of_its_adapter(known, look=step.first):
            tiers.stores.follow(known, step)
            if known.adapter is not None and step.first:
                self._adapters.runs(known.adapter)

    def _is_of_its_adapter(self, known: RequestState, *, look: bool = False) -> bool:
        """Return whether the request's adapter is still the one in its keys. ``look``: check its files."""
        return known.adapter is None or self._adapters.holds(known.adapter, look=look)

    def _settle(self, tiers: Tiers) -> None:
        """End final loads. With one group of full attention, vLLM continues after the pages that arrived.

        Otherwise vLLM gives all blocks back but keeps them reserved for the request. A second load would need
        space for other blocks as well, which a small pool never has, so the request is computed completely.
        """
        for load in tiers.loads.settle():
            known = self._known.get(load.request_id)
            if known is not None:
                known.limit = load.starts[load.arrived] if self.groups.whole else 0
