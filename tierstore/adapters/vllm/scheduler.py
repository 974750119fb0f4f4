"""The scheduler half of the connector: knows which pages are stored, and decides which pages are moved.

It runs only in the scheduler's thread. It never blocks, and does not access page contents. Its decisions
(``Orders``) and their results (``Report``) are plain data. ``Tiers`` is one store for all workers. It has no page
contents, because these are in the workers. It is created once every worker has sent its first message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic
from typing import TYPE_CHECKING, Protocol

from tierstore.adapters.compute_rate import ComputeRate
from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.costs import Demand, MeasuredCosts, below_memory
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
    from tierstore.adapters.vllm.saves import Pins
    from tierstore.config import StoreConfig


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings from which the scheduler half and its tiers are created.

    ``config`` is the configuration of one rank. ``config_shared`` takes its place if ranks store each page once, and is
    None if they never do. ``load_timeout_s``, ``put_off_s`` and ``load`` are as in ``config.Settings``.
    """

    config: StoreConfig
    groups: Groups
    load_timeout_s: float
    put_off_s: float = 0.0
    load: Load = "always"
    loads: bool = True
    """Whether stored pages are offered as hits."""
    stores: bool = True
    """Whether pages are stored."""
    pins: bool = False
    """Whether blocks must be pinned in vLLM's pool while they are copied."""
    config_shared: StoreConfig | None = None


@dataclass(slots=True, eq=False)
class Tiers:
    """The store that all workers share, and the objects that use it.

    ``disk_prefetch`` is None without a disk. ``costs`` is None if all hits are loaded completely.
    """

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
        cls,
        terms: Terms,
        hellos: Sequence[Hello],
        compute_rate: ComputeRate,
        events: Events | None,
        clock: Callable[[], float],
        pins: Pins | None = None,
    ) -> Tiers:
        """Create the tiers for the workers that sent ``hellos``.

        Pipeline stages may have pages of different sizes. The store then uses the size of the largest page and the
        smallest number of slots in host memory.

        Args:
            terms: The settings.
            hellos: The first message of each worker, in the order of ranks.
            compute_rate: The compute rate of the engine.
            events: Records every page that a tier gains or loses. None if events are disabled.
            clock: Returns the current time in seconds.
            pins: Pins the engine's blocks while they are copied. None if a step can wait for the copies.

        Raises:
            ConfigError: Workers of a stage have different pages, or workers have opened tiers of different sizes.
        """
        (replicas,) = {hello.replicas for hello in hellos}  # the workers have agreed on it
        if replicas > 1 and terms.config_shared is not None:
            terms = replace(terms, config=terms.config_shared)
        for stage in sorted({hello.stage for hello in hellos}):
            specs = {hello.spec for hello in hellos if hello.stage == stage}
            if len(specs) != 1:
                raise ConfigError(
                    f"all workers of pipeline stage {stage} must have the same pages, got {len(specs)} different ones: "
                    f"{' and '.join(sorted(map(str, specs)))}; start all workers with the same model and settings"
                )
        if len({hello.stage for hello in hellos}) > 1:
            fewest = min(hello.host_slots for hello in hellos)
            hellos = [replace(hello, host_slots=fewest) for hello in hellos]
        largest = max(hellos, key=lambda hello: hello.spec.page_nbytes)
        layout, ranks = PageLayout.of(largest.spec), Ranks(len(hellos), replicas)
        opened = assemble_apart(terms.config, layout, [hello.opened for hello in hellos], ranks)
        store = TierStore(terms.config, opened, Wakeup(), pump=False)
        stores = Stores(store, terms.groups, events, pins)
        if events is not None:
            store.watch(events.note)
        disk_prefetch = None
        if terms.config.nvme is not None:
            disk_prefetch = DiskPrefetch(store, _most_ahead(terms.config, largest), largest.host_slots, clock)
        loads = Loads(store, terms.load_timeout_s)
        costs = measured(terms, hellos, store, compute_rate, loads, clock)
        return cls(
            ranks=ranks,
            store=store,
            stores=stores,
            loads=loads,
            retention=PageRetention(store),
            disk_prefetch=disk_prefetch,
            costs=costs,
            hits=HitLookup(store, terms.groups, disk_prefetch, terms.put_off_s, costs, clock),
        )

    @property
    def moving(self) -> bool:
        """Return whether transfers are in flight or waiting to be started."""
        coming = self.disk_prefetch is not None and self.disk_prefetch.waits
        return coming or self.ranks.waiting or self.stores.waiting or not self.store.idle()

    def counted(self) -> dict[str, dict[str, float]]:
        """Return counters and gauges by their names in ``metrics``."""
        self.take_back()
        self.store.stats()  # updates the gauges
        on_disk = [tier for tier, each in self.store.tiers.items() if not each.in_memory]
        left = {tier.name: float(self.hits.left) for tier in on_disk[:1]}
        return {**self.store.metrics.snapshot(), "left_pages": left}

    def take_back(self) -> None:
        """Advance the store, and release the blocks that it no longer reads."""
        self.stores.returned(self.store.poll())

    def forget(self) -> None:
        """Forget everything stored so far. Loads in flight are reported as failed."""
        self.stores.forget()
        self.loads.void()
        self.store.clear()
        self.take_back()

    def check(self) -> None:
        """Check all invariants. Raises AssertionError for the first violation."""
        self.store.check()
        self.stores.check(self.loads.writing)


def _most_ahead(config: StoreConfig, hello: Hello) -> int:
    """Return how many pages may be prefetched at a time, according to the prefetch section or its defaults."""
    limits = config.prefetch or PrefetchConfig()
    return min(limits.pages_of_host(hello.host_slots), limits.pages_in_flight(hello.spec.page_nbytes))


def measured(
    terms: Terms,
    hellos: Sequence[Hello],
    store: TierStore,
    compute_rate: ComputeRate,
    loads: Loads,
    clock: Callable[[], float],
) -> MeasuredCosts | None:
    """Return cost estimates, or None if ``terms.load`` is "always", because every hit is then loaded in full.

    Until pages have been read, the estimates use the measured disk throughput of the slowest worker. Workers that store
    each page once read different pages at the same time.
    """
    if terms.load == "always":
        return None
    rates = [hello.read_rate for hello in hellos if hello.read_rate is not None]
    page_nbytes, slowest = max(hello.spec.page_nbytes for hello in hellos), min(rates, default=None)
    if slowest is not None:
        slowest *= hellos[0].replicas
    return MeasuredCosts(store, compute_rate, page_nbytes, slowest, clock, lambda: loads.promised)


_MOST_UNMET = 100
"""Number of steps after which requests no longer wait for the workers' first messages."""


class Blocks(Protocol):
    """The method of vLLM's ``KVCacheBlocks`` that this module uses."""

    def get_block_ids(self) -> Sequence[Sequence[int]]:
        """Return the request's blocks, by group number."""
        ...


_QUIET_S = 5.0
"""Seconds without progress after which the engine is no longer kept stepping for transfers."""


class SchedulerHalf:
    """The connector's half in vLLM's scheduler. It does not depend on vLLM's classes.

    The first ``Orders`` ask each worker for its ``Hello``. Requests wait until ``meet`` has processed the answers.
    """

    def __init__(
        self,
        terms: Terms,
        namespaces: Sequence[bytes],
        *,
        with_adapter: Callable[[Adapter], Sequence[bytes]] | None = None,
        events: bool = False,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Create a scheduler half that is not connected to its workers yet.

        Args:
            terms: Settings of the tiers.
            namespaces: Key namespace of each group.
            with_adapter: Returns the key namespaces for requests with a LoRA adapter. If None, the pages of
                these requests are neither reused nor stored.
            events: Whether ``take_events`` will be called.
            clock: Returns the current time in seconds.
        """
        self._clock = clock
        self._events = Events() if events else None
        self.groups = terms.groups
        self._terms = terms
        self._namespaces = tuple(namespaces)
        self._with_adapter = with_adapter
        self._loads, self._stores = terms.loads, terms.stores
        self._adapters = Adapters()
        self._compute_rate = ComputeRate(rough=True)
        self._known: dict[str, RequestState] = {}
        self._early: dict[str, Request] = {}
        """Requests that arrived before ``meet``."""
        self.pins: Pins | None = None
        """Pins the engine's blocks. If it is None although ``Terms.pins`` is set, nothing is stored."""
        self._granted: dict[str, Blocks] = {}
        self._demand = Demand()
        self._tiers: Tiers | None = None
        self._metrics: MetricsReader | None = None
        self._number = 0
        self._moved = self._clock()

    @classmethod
    def of(cls, deployment: Deployment) -> SchedulerHalf:
        """Return the scheduler half of a deployment. It is inactive until ``meet`` is called."""
        settings, groups = deployment.settings, deployment.groups
        config = settings.of_rank(deployment.world_size, deployment.replica, "cpu")
        terms = Terms(
            config,
            groups,
            settings.load_timeout_s,
            settings.put_off_s,
            settings.load,
            loads=deployment.caching and deployment.role != "kv_producer",
            stores=deployment.caching and deployment.role != "kv_consumer",
            pins=deployment.pins,
            config_shared=None
            if deployment.replicas == 1
            else settings.of_rank(deployment.world_size, deployment.replica, "cpu", deployment.replicas),
        )
        return cls(
            terms,
            groups.namespaces(deployment.identity),
            with_adapter=deployment.with_adapter,
            events=deployment.events,
        )

    def meet(self, hellos: Sequence[Hello]) -> None:
        """Process the workers' first messages, and create the tiers.

        If prefix caching is off in a worker, nothing is loaded or stored from now on.

        Raises:
            ConfigError: See ``Tiers.of``.
        """
        if not all(hello.caching for hello in hellos):
            self._loads = self._stores = False
        if self._terms.pins and self.pins is None:
            self._stores = False  # blocks would be cleared while they are copied
        self._tiers = Tiers.of(self._terms, hellos, self._compute_rate, self._events, self._clock, self.pins)
        self._metrics = MetricsReader(self._tiers.counted)
        early, self._early = self._early, {}
        for request in early.values():
            self.arrived(request)

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def looks_ahead(self) -> bool:
        """Return whether ``arrived`` needs the number of a request's tokens that the engine has cached."""
        return self._loads and self._tiers is not None and self._tiers.disk_prefetch is not None

    def arrived(self, request: Request, local: int = 0) -> None:
        """Register a queued request, of which the engine has cached the first ``local`` tokens.

        Nothing is prefetched for a request that must not use cached KV. A request is ignored if it has the ID of an
        aborted request whose load is still in flight, because the ends of the two loads could not be told apart.
        vLLM does not accept such a request either.
        """
        tiers = self._tiers
        if not (self._loads or self._stores):
            return
        if tiers is None:
            self._early[request.request_id] = request
            return
        if tiers.loads.of(request.request_id):
            return
        adapter, namespaces = None, self._namespaces
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            adapter = self._adapters.of(lora)
            if adapter is None or self._with_adapter is None:
                return  # its weights are unknown, so its pages are neither reused nor stored
            namespaces = tuple(self._with_adapter(adapter))
        chains, hints = self.groups.chains(request, namespaces), hints_of(request)
        known = RequestState(request, chains, hints=hints, adapter=adapter)
        self._known[request.request_id] = known
        if hints.after is not None:
            tiers.retention.waits(request.request_id, hints, known.keys)
        if self._loads and tiers.disk_prefetch is not None and not compat.must_compute_all(request):
            tiers.disk_prefetch.want(request.request_id, *tiers.hits.wanted(known, local), hints)
        on_disk = tiers.disk_prefetch is not None and tiers.disk_prefetch.wants(request.request_id)
        self._demand.queued(request.request_id, on_disk=on_disk)

    def offer(self, request: Request, computed: int) -> int | None:
        """Return how many tokens beyond ``computed`` can be loaded.

        The tokens form whole blocks, or end as ``Groups.tail_unit`` allows, and leave at least one token to compute.
        None means that vLLM should ask again later: pages are being read from disk (for at most ``put_off_s``), or
        the workers have not sent their first messages. If an offered page is evicted before it is loaded, the load
        is reported as failed.
        """
        if self._meets and request.request_id in self._early:
            return None
        tiers, known = self._tiers, self._known.get(request.request_id)
        if tiers is None or known is None:
            return 0
        known.local = computed
        if not self._loads or computed % self.groups.unit or compat.must_compute_all(request):
            return 0
        if not self._is_of_its_adapter(known, look=known.lookup is None):
            known.limit = 0
            if known.lookup is not None:
                known.lookup.stale = True
        return tiers.hits.tokens(known, computed, self._demand.others(request.request_id))

    def sources(self, request: Request, tokens: int) -> dict[Tier, int]:
        """Return how many of the first ``tokens`` tokens of the last accepted offer come from each tier."""
        known = self._known.get(request.request_id)
        return {} if known is None or known.taken is None else known.taken.up_to(tokens).sources

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """Queue the load of the accepted offer's ``tokens`` tokens into the request's blocks.

        ``tables`` contains the request's blocks, by group number.
        """
        tiers, known = self._tiers, self._known.get(request.request_id)
        if tiers is None or known is None or known.lookup is None or not tokens:
            return
        start = known.lookup.computed
        # vLLM waits for the result of a load even if it needs no page.
        starts, keys, blocks = pages_to_load(self.groups, known.chains, tables, start, start + tokens)
        known.taken, known.lookup = known.lookup.hit, None
        on_disk = below_memory(known.taken)
        tiers.loads.want(request.request_id, keys, blocks, starts, on_disk)
        self._demand.loads(request.request_id, on_disk=on_disk > 0)
        if tiers.disk_prefetch is not None and not known.left:
            tiers.disk_prefetch.over(request.request_id)

    def granted(self, request_id: str, blocks: Blocks) -> None:
        """Record that a request has blocks into which this connector loads nothing."""
        if self._stores:
            self._granted[request_id] = blocks

    def finished(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Handle the end of a request that finished or was aborted with ``computed`` tokens in ``tables``.

        Full blocks are stored unless vLLM reuses them first. Loads into the request's blocks continue, and are
        reported when they are complete. If a load is in flight, or an offer has not been accepted, nothing is
        stored: vLLM may count the tokens as computed although they are not in the request's blocks.
        """
        self._early.pop(request_id, None)
        self._granted.pop(request_id, None)
        tiers, known = self._tiers, self._known.get(request_id)
        if tiers is None or known is None:
            return
        waits = known.lookup is not None or tiers.loads.of(request_id)
        if self._stores and known.limit is None and not waits and self._is_of_its_adapter(known):
            tiers.stores.ended(known, tables, computed)
        del self._known[request_id]
        self._demand.ended(request_id)
        if tiers.disk_prefetch is not None and not known.left:
            tiers.disk_prefetch.over(request_id)
        if known.hints.after is not None:
            tiers.retention.ended(request_id, known.hints, known.keys)

    # -- steps --------------------------------------------------------------------------------------------------

    def orders(self, steps: Iterable[Step], overwritten: Iterable[int] = ()) -> Orders:
        """Return the orders for the step that is about to run.

        ``overwritten`` are the blocks that vLLM overwrites at the start of the step, in addition to the fresh
        blocks of requests.
        """
        tiers = self._tiers
        if tiers is None:
            self._number += 1
            self._granted.clear()
            return Orders(number=self._number, hello=self._number == 1)
        stores, loads = tiers.stores, tiers.loads
        steps = list(steps)
        if steps:
            self._moved = self._clock()
        else:
            tiers.take_back()  # timed spills must proceed even if no worker sends a report
        others = self._filled_by_others(steps)
        fence = stores.reused([*overwritten, *others, *(block for step in steps for block in step.fresh)])
        stores.reused(loads.fresh_blocks())  # these loads wait until no copy reads their blocks
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
        self._number += 1
        answer = self._compute_rate.ordered(self._number, steps, self._clock()) or waits
        return Orders(fence, before, after, failed, answer, idle, self._number)

    def heard(self, report: Report | None) -> set[str]:
        """Process the workers' report. Return the requests whose loads succeeded."""
        tiers = self._tiers
        if tiers is None:
            return set()
        if report is not None:
            self._compute_rate.ended(report.number, self._clock())
            for rank, health in report.health.items():
                tiers.ranks.hear(rank, health)
            for rank, acks in report.acks.items():
                tiers.ranks.deliver(rank, acks)
                if any(ack.num_ready for ack in acks):
                    self._moved = self._clock()
        tiers.take_back()
        if tiers.costs is not None:
            tiers.costs.look()
        self._settle(tiers)
        loaded = tiers.loads.take_loaded()
        for request_id in loaded & self._known.keys():
            self._demand.computes(request_id)
        return loaded

    @property
    def pending(self) -> bool:
        """Return whether the engine should keep stepping without a request."""
        if self._meets:
            return True
        if self._tiers is None or self._clock() - self._moved > _QUIET_S:
            return False
        return self._tiers.moving

    # -- state, close -------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget all pages stored so far, because the weights have changed or a user requested it.

        If vLLM accepts an earlier offer afterwards, it waits for the load, which is reported as failed.
        """
        if self._tiers is None:
            return
        self._tiers.forget()
        for known in self._known.values():
            if known.lookup is not None:
                known.lookup.stale = True

    def take_events(self) -> list[Change]:
        """Return the pages that tiers have gained or lost since the last call. Empty if events are disabled."""
        if self._events is None:
            return []
        if self._tiers is not None:
            self._tiers.take_back()
        return self._events.take()

    @property
    def at_rest(self) -> bool:
        """Return whether every ordered copy to or from the engine's blocks has been reported as complete."""
        tiers = self._tiers
        return tiers is None or not (tiers.stores.busy or tiers.loads.into)

    def check(self) -> None:
        """Check all invariants. Raises AssertionError for the first violation."""
        if self._tiers is not None:
            self._tiers.check()

    def stats(self) -> dict[str, object]:
        """Return ``TierStore.stats``, or an empty mapping before the workers' first messages."""
        return {} if self._tiers is None else self._tiers.store.stats()

    def figures(self) -> dict[str, dict[str, float]] | None:
        """Return the metrics collected since the last call.

        The result is None if nothing is new, or if the last call was less than a second ago.
        """
        return None if self._metrics is None else self._metrics.take()

    def close(self) -> None:
        """Close this half. Pages that are only in host memory are lost with the workers."""
        if self._tiers is not None:
            self._tiers.store.close(timeout_s=0)

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def _meets(self) -> bool:
        """Return whether the workers' first messages are still expected."""
        return self._tiers is None and self._number < _MOST_UNMET

    def _filled_by_others(self, steps: Sequence[Step]) -> list[int]:
        """Return the blocks that another connector (under ``MultiConnector``) may fill in this step.

        They are the new blocks after the tokens that were cached when the request last asked for a hit. If the
        request runs in this step, the blocks of tokens that it computes itself are left out.
        """
        granted, self._granted = self._granted, {}
        if not granted:
            return []
        runs = {step.request_id: step.computed if step.first else 0 for step in steps}
        sizes = {group.number: group.block_size for group in self.groups.all}
        found: list[int] = []
        for request_id, blocks in granted.items():
            known = self._known.get(request_id)
            start, end = 0 if known is None else known.local, runs.get(request_id)
            if end is not None and end <= start:
                continue
            for number, table in enumerate(blocks.get_block_ids()):
                size = sizes.get(number)
                if size is None:
                    found += table
                else:
                    found += table[start // size : None if end is None else -(-end // size)]
        return found

    def _follow(self, tiers: Tiers, step: Step) -> None:
        known = self._known.get(step.request_id)
        if known is None:
            return
        known.lookup = None
        if step.first:
            self._demand.computes(step.request_id)
        if step.first and tiers.disk_prefetch is not None and not known.left:
            tiers.disk_prefetch.over(step.request_id)
        if self._is_of_its_adapter(known, look=step.first):
            if self._stores:
                tiers.stores.follow(known, step)
            if known.adapter is not None and step.first:
                self._adapters.runs(known.adapter)

    def _is_of_its_adapter(self, known: RequestState, *, look: bool = False) -> bool:
        """Return whether the request's adapter is still the one that the request's keys refer to.

        With ``look``, check the adapter's files as well.
        """
        return known.adapter is None or self._adapters.holds(known.adapter, look=look)

    def _settle(self, tiers: Tiers) -> None:
        """Finish loads whose result is final.

        If there is a single group, with full attention, vLLM continues after the pages that were loaded. Otherwise,
        vLLM discards all blocks of the load but keeps them reserved for the request. A second load would need other
        blocks in addition, which a small pool may never have. The request is therefore computed completely.
        """
        for load in tiers.loads.settle():
            known = self._known.get(load.request_id)
            if known is not None:
                self._demand.computes(load.request_id)
                known.limit = load.starts[load.arrived] if self.groups.whole else 0
