"""The half beside the scheduler: it knows what there is, decides what moves, and gives every step its orders.

One thread, the scheduler's; nothing blocks, nothing is read or copied here. What it decides is plain data (``Orders``),
what became of it comes back as plain data (``Report``).
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.ahead import Ahead
from tierstore.adapters.vllm.choosing import Measured
from tierstore.adapters.vllm.events import Events
from tierstore.adapters.vllm.figures import Figures
from tierstore.adapters.vllm.filling import Filling
from tierstore.adapters.vllm.loading import Loading
from tierstore.adapters.vllm.messages import Orders
from tierstore.adapters.vllm.offers import Offers
from tierstore.adapters.vllm.pace import Pace
from tierstore.adapters.vllm.plans import into
from tierstore.adapters.vllm.requests import Known, Request, Step
from tierstore.adapters.vllm.storing import Storing
from tierstore.adapters.vllm.told import Afterwards, told_of
from tierstore.apart import Ranks, assemble_apart
from tierstore.config import PrefetchConfig
from tierstore.errors import ConfigError
from tierstore.layout import PageLayout
from tierstore.store import TierStore
from tierstore.types import Tier
from tierstore.wakeup import Wakeup

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tierstore.adapters.vllm.groups import Groups
    from tierstore.adapters.vllm.messages import Hello, Report
    from tierstore.adapters.vllm.settings import Load
    from tierstore.assembly import Parts
    from tierstore.config import StoreConfig

_QUIET_S = 5.0
"""Without an answer of the workers for so long the engine is not kept stepping for their sake."""


class SchedulerHalf:
    """Everything but vLLM's names. Inert until all workers have said hello."""

    def __init__(
        self,
        config: StoreConfig,
        groups: Groups,
        namespaces: Sequence[bytes],
        *,
        load_timeout_s: float,
        put_off_s: float = 0.0,
        load: Load = "always",
        events: bool = False,
    ) -> None:
        """``config``: of one rank. ``namespaces``: of the keys of each group. ``events``: whether somebody takes
        them.
        """
        self._load = load
        self._pace = Pace()
        self._costs: Measured | None = None
        self._number = 0
        self.events = Events() if events else None
        self.groups = groups
        self._config = config
        self._namespaces = tuple(namespaces)
        self._timeout_s = load_timeout_s
        self._put_off_s = put_off_s
        self._known: dict[str, Known] = {}
        self._ranks = Ranks(1)
        self._parts: Parts | None = None
        self._store: TierStore | None = None
        self._loading: Loading | None = None
        self._storing: Storing | None = None
        self._filling: Filling | None = None
        self._offers: Offers | None = None
        self._figures: Figures | None = None
        self._ahead: Ahead | None = None
        self._afterwards: Afterwards | None = None
        self._moved = monotonic()

    def meet(self, hellos: Sequence[Hello]) -> None:
        """All workers are open. ConfigError unless they have opened the same."""
        specs = {hello.spec for hello in hellos}
        if len(specs) != 1:
            raise ConfigError(
                f"ranks have pages of {len(specs)} kinds: {specs}; allowed: the same on all of them"
            )
        layout = PageLayout.of(hellos[0].spec)
        self._ranks = Ranks(len(hellos))
        opened = [hello.opened for hello in hellos]
        self._parts = assemble_apart(self._config, layout, opened, self._ranks)
        self._store = TierStore(self._config, self._parts, Wakeup(), pump=False)
        self._storing = Storing(self._store)
        self._filling = Filling(self._store, self._storing, self.groups, self.events)
        self._loading = Loading(self._store, self._timeout_s)
        self._afterwards = Afterwards(self._store)
        self._figures = Figures(self._counted)
        if self.events is not None:
            self._parts.directory.watch(self.events.came, self.events.left)
        if self._config.nvme is not None:
            self._ahead = Ahead(self._store, self._most_ahead(hellos[0]), hellos[0].host_slots)
        self._costs = self._measured(hellos, layout.page_nbytes)
        self._offers = Offers(self._store, self.groups, self._ahead, self._put_off_s, self._costs)

    # -- requests -----------------------------------------------------------------------------------------------

    @property
    def looks_ahead(self) -> bool:
        """Whether it counts what of a queued request the engine holds."""
        return self._ahead is not None

    def arrived(self, request: Request, local: int = 0) -> None:
        """A request was queued, of which the engine holds the first ``local`` tokens now.

        One whose id an aborted load still goes by is left alone: the end of that load would be taken for its own. vLLM
        itself takes no such request.
        """
        if self._afterwards is None or self._loading is None or self._loading.of(request.request_id):
            return
        chains, told = self.groups.chains(request, self._namespaces), told_of(request)
        known = Known(request, chains, collected=[0] * len(chains), told=told)
        self._known[request.request_id] = known
        if told.after is not None:
            self._afterwards.waits(request.request_id, told, known.keys)
        if self._ahead is not None and self._offers is not None:
            self._ahead.want(request.request_id, *self._offers.wanted(known, local), told)

    def offer(self, request: Request, computed: int) -> int | None:
        """Tokens that can be loaded beyond ``computed``, whole blocks, at least one token left to compute.

        A promise that can be broken: what is gone by then is reported as failed. None: ask again, pages come up from
        disk; for ``put_off_s`` in all.
        """
        known = self._known.get(request.request_id)
        if known is None or self._offers is None or computed % self.groups.unit:
            return 0
        return self._offers.of(known, computed, len(self._known) - 1)

    def sources(self, request: Request, tokens: int) -> dict[Tier, int]:
        """Where the tokens of the offer taken last come from."""
        known = self._known.get(request.request_id)
        return {} if known is None or known.taken is None else known.taken.up_to(tokens).sources

    def allocated(self, request: Request, tables: Sequence[Sequence[int]], tokens: int) -> None:
        """vLLM has taken the offer: ``tokens`` of it are to be loaded into the request's blocks, by group."""
        known = self._known.get(request.request_id)
        if known is None or known.verdict is None or self._loading is None or not tokens:
            return
        start = known.verdict.computed
        pages = into(self.groups, known.chains, tables, start, start + tokens)
        # Where a chunk ends nothing before it is needed: no page, and vLLM waits to hear of a load all the same.
        starts, keys, blocks = zip(*pages, strict=True) if pages else ((), (), ())
        self._loading.want(request.request_id, keys, blocks, starts)
        known.taken, known.verdict = known.verdict.plan, None
        if self._ahead is not None and not known.left:
            self._ahead.over(request.request_id)

    def finished(self, request_id: str, tables: Sequence[Sequence[int]], computed: int) -> None:
        """The request has ended or was aborted with so many tokens computed in these blocks, by group, which are
        stored before they are reused. Loads into its blocks go on, and are told of when they end. While it waits with
        an offer that was not taken, vLLM may count that as computed, and nothing of it is there.
        """
        known = self._known.get(request_id)
        if known is None or self._loading is None or self._filling is None:
            return
        waits = known.verdict is not None or self._loading.of(request_id)
        if known.limit is None and not waits:
            self._filling.collect(known, tables, computed, computed)
        del self._known[request_id]
        if self._ahead is not None and not known.left:
            self._ahead.over(request_id)
        if self._afterwards is not None and known.told.after is not None:
            self._afterwards.ended(request_id, known.told, known.keys)

    # -- steps --------------------------------------------------------------------------------------------------

    def orders(self, steps: Iterable[Step]) -> Orders:
        """What the workers do in the step that is about to run."""
        if self._store is None or self._loading is None or self._storing is None:
            return Orders()
        storing, loading = self._storing, self._loading
        steps = list(steps)
        if steps:
            self._moved = monotonic()
        fence = storing.reused(block for step in steps for block in step.fresh)
        storing.reused(loading.fresh_blocks())  # these loads wait until nothing reads their blocks
        loading.start(storing.busy, idle=not steps)
        if self._ahead is not None:
            self._ahead.advance()
        self._settle()
        before = tuple(self._ranks.take())
        for step in steps:
            self._follow(step)
        storing.put(loading.into)
        failed = loading.take_failed()
        after, waits = tuple(self._ranks.take()), loading.waits
        if self._costs is not None:
            self._costs.look(computes=bool(steps))
        self._number += 1
        answer = self._pace.ordered(self._number, steps, monotonic()) or waits
        return Orders(fence, before, after, failed, answer, waits and not steps, self._number)

    def heard(self, report: Report | None) -> set[str]:
        """What the workers have done; the requests whose loads have ended well by now."""
        if self._store is None or self._loading is None or self._storing is None:
            return set()
        if report is not None:
            self._pace.ended(report.number, monotonic())
            for rank, acks in report.acks.items():
                self._ranks.deliver(rank, acks)
                if any(ack.num_ready for ack in acks):
                    self._moved = monotonic()
        self._storing.returned(self._store.poll())
        if self._costs is not None:
            self._costs.look()
        self._settle()
        return self._loading.take_loaded()

    @property
    def pending(self) -> bool:
        """Whether steps are needed although no request asks for one."""
        if self._parts is None or self._storing is None or monotonic() - self._moved > _QUIET_S:
            return False
        directory = self._parts.directory
        moving = self._ranks.waiting or self._storing.waiting or directory.busy()
        coming = self._ahead is not None and self._ahead.waits
        return moving or coming or directory.placement.next_spill is not None

    # -- life ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Nothing stored so far is offered again: the weights have changed, or somebody wants it gone."""
        if self._parts is None or self._store is None or self._loading is None or self._storing is None:
            return
        self._storing.forget()
        self._loading.void()
        tables = self._parts.directory.residency.tables.values()
        self._store.evict(list(dict.fromkeys(key for table in tables for key in table.copies)))
        for known in self._known.values():
            known.verdict = None

    @property
    def at_rest(self) -> bool:
        """Whether no copy out of the engine's blocks, or into them, is under way or ordered, as far as was heard."""
        return (
            self._storing is None or self._loading is None or not (self._storing.busy or self._loading.into)
        )

    def check(self) -> None:
        """AssertionError naming the first invariant that does not hold."""
        if self._store is not None and self._loading is not None and self._storing is not None:
            self._store.check()
            self._storing.check(self._loading.writing)

    def stats(self) -> dict[str, object]:
        """As ``TierStore.stats``; empty before the workers have said hello."""
        return {} if self._store is None else self._store.stats()

    def figures(self) -> dict[str, dict[str, float]] | None:
        """What was counted since the last look, once a second at most."""
        return None if self._figures is None else self._figures.take()

    def close(self) -> None:
        """Ends it. What only host memory holds is lost with the workers."""
        if self._store is not None:
            self._store.close(timeout_s=0)

    # -- inside -------------------------------------------------------------------------------------------------

    def _most_ahead(self, hello: Hello) -> int:
        """Pages under way at once, as the prefetch section or its defaults have it."""
        limits = self._config.prefetch or PrefetchConfig()
        share = int(hello.host_slots * limits.share_of_host)
        return max(1, min(share, limits.max_in_flight // hello.spec.page_nbytes))

    def _measured(self, hellos: Sequence[Hello], page_nbytes: int) -> Measured | None:
        """None: what is stored is always loaded."""
        if self._load == "always" or self._config.nvme is None:
            return None
        assert self._parts is not None
        rates = [hello.read_rate for hello in hellos if hello.read_rate is not None]
        return Measured(
            self._parts.directory.traffic, self._pace, page_nbytes, min(rates, default=None), monotonic
        )

    def _counted(self) -> dict[str, dict[str, float]]:
        assert self._store is not None
        self._store.stats()  # it brings the gauges up to date
        left = 0 if self._offers is None else self._offers.left
        return {**self._store.metrics.snapshot(), "left_pages": {Tier.NVME.name: float(left)}}

    def _follow(self, step: Step) -> None:
        known = self._known.get(step.request_id)
        if known is not None and self._filling is not None:
            known.verdict = None
            if step.first and self._ahead is not None and not known.left:
                self._ahead.over(step.request_id)
            self._filling.follow(known, step)

    def _settle(self) -> None:
        """Ends loads. Of one group of full attention vLLM goes on behind what has arrived.

        Else it gives all blocks back, and keeps them reserved for the request: a second load of its own would have to
        find room beside them, which on a small pool is never there. So it computes all of it.
        """
        assert self._loading is not None
        for load in self._loading.settle():
            known = self._known.get(load.request_id)
            if known is not None:
                known.limit = load.starts[load.arrived] if self.groups.whole else 0
