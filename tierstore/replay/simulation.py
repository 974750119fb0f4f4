"""Simulation of a store that serves a trace.

The simulation uses the real store's ``Directory`` (its bookkeeping), policies and admission. Copies take no time,
and the current time is that of the trace. Requests run one after another: each leases its cached prefix, puts
its missing pages, and releases all of them. A ``Row`` contains the results for one trace and setting, and the
bound from ``bounds``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from tierstore.directory.directory import Directory
from tierstore.directory.residency import TierTable
from tierstore.metrics import Metrics
from tierstore.policy import Known, WriteBudget, make_admission, make_history, make_policy
from tierstore.types import Ack, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tierstore.replay.bounds import Bounds
    from tierstore.replay.traces import Request, Trace
    from tierstore.types import PageKey

_RECORD_HEAD = 4096


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of a simulation.

    ``pages`` and ``policies`` are the number of pages and the eviction policy of each tier; HBM must be one of the
    tiers. ``page_nbytes`` is the size of a page, which is one block of the trace. A page with ``doubling_depth``
    pages before it costs twice as much to compute as the first page of a sequence. ``admission``,
    ``daily_writes`` and ``flush_s`` are settings of the NVMe tier, as in the store's configuration.
    """

    pages: Mapping[Tier, int]
    policies: Mapping[Tier, str]
    page_nbytes: int
    doubling_depth: float
    admission: str = "all"
    daily_writes: int | None = None
    flush_s: float = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a replay.

    Tokens and hits are counted over the second half of the trace, because the first half fills the tiers. Bytes
    are counted over the whole trace. ``hits`` is the number of pages found in each tier, where a page counts only
    for its fastest tier. ``moved`` is the number of bytes copied over each edge. ``too_long`` is the number of
    requests that were skipped because they have more pages than HBM.
    """

    asked_tokens: int
    hit_tokens: int
    hits: Mapping[Tier, int]
    moved: dict[str, int]
    nvme_written: int
    too_long: int

    @property
    def hit_rate(self) -> float:
        """Number of prefix-hit tokens divided by the number of requested tokens."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0


class Simulation:
    """A simulated store: the bookkeeping, policies, admission and history of a real store, without page bytes."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._metrics = Metrics()
        self._record_nbytes = setting.page_nbytes + _RECORD_HEAD
        names = [*setting.policies.values(), setting.admission]
        history = make_history(names, sum(setting.pages.values()))
        known = None if history is None else Known(history, setting.doubling_depth)
        tables: dict[Tier, TierTable] = {}
        for tier, pages in setting.pages.items():
            policy = make_policy(setting.policies[tier], known, pages)
            tables[tier] = (
                TierTable(
                    policy,
                    budget_nbytes=pages * self._record_nbytes,
                    record_nbytes=self._record_nbytes,
                    durable=True,
                )
                if tier == Tier.NVME
                else TierTable(policy, num_slots=pages)
            )
        self.directory = Directory(
            tables,
            self._metrics,
            page_nbytes=setting.page_nbytes,
            flush_s=setting.flush_s,
            history=history,
            admission=make_admission(setting.admission, known),
            budget=WriteBudget(setting.daily_writes),
        )

    def serve(self, request: Request) -> list[Tier]:
        """Run one request. Return the tier in which each page of its cached prefix was found, in order."""
        directory, keys, now = self.directory, request.keys, request.at
        self._run(now)
        lease = directory.leases.begin(keys, None, None, exact=False)
        while not lease.complete:
            directory.extend_lease(lease, len(keys) + 1, now)
            if lease.complete and lease.miss_reason == "no_room" and len(lease.slots) < len(keys):
                lease.complete = not self._make_room(len(keys) - len(lease.slots), now)
        self._run(now)
        found = lease.sources[: len(lease.slots)]
        self._put(keys, len(lease.slots), now)
        while directory.leases.release_some(lease, len(keys) + 1):
            pass
        self._run(now)
        return found

    def _put(self, keys: tuple[PageKey, ...], start: int, now: float) -> None:
        missing = len(keys) - start
        if not missing:
            return
        slots = self.directory.owned.allocate(missing, reserve=missing)
        while slots is None and self._make_room(missing, now):
            slots = self.directory.owned.allocate(missing, reserve=missing)
        if slots is None:
            return
        parent = keys[start - 1] if start else None
        _, duplicates = self.directory.sealed.put(keys[start:], slots, parent, None, written=True)
        self.directory.owned.free(duplicates)

    def _make_room(self, pages: int, now: float) -> bool:
        """Save or evict pages to free ``pages`` slots in HBM. Return whether at least one slot became free."""
        before = self.directory.space.room(Tier.HBM)
        self.directory.want_slots(pages, now)
        self._run(now)
        return self.directory.space.room(Tier.HBM) > before

    def _run(self, now: float) -> None:
        """Acknowledge all pending copies as complete, including copies that these acknowledgements cause."""
        directory, more = self.directory, True
        while more:
            acks = [self._ack(c) for c in directory.take_commands() if isinstance(c, Transfer)]
            more = directory.advance(acks, now) or bool(acks) or bool(directory.transfers.outbox)

    def _ack(self, transfer: Transfer) -> Ack:
        number = len(transfer.keys)
        return Ack(transfer.id, True, number, number * self._record_nbytes)

    @property
    def nvme_written(self) -> int:
        """Number of bytes written to NVMe so far, including the heads of records."""
        return self.directory.admission.budget.total

    def moved(self) -> dict[str, int]:
        """Return the number of bytes copied over each edge so far."""
        return {edge: int(nbytes) for edge, nbytes in self._metrics.snapshot()["transfer_bytes"].items()}


def replay(trace: Trace, setting: Setting, step: Callable[[int], None]) -> Outcome:
    """Run the whole trace through a new simulation.

    After each request, ``step`` is called with the number of its pages.
    """
    simulation, half = Simulation(setting), len(trace.requests) // 2
    hits: Counter[Tier] = Counter()
    asked = hit = too_long = 0
    for number, request in enumerate(trace.requests):
        found: list[Tier] = []
        if len(request.keys) > setting.pages[Tier.HBM]:
            too_long += 1
        else:
            found = simulation.serve(request)
        if number >= half:
            asked += request.tokens
            hit += len(found) * trace.block_tokens
            hits.update(found)
        step(len(request.keys))
    return Outcome(asked, hit, hits, simulation.moved(), simulation.nvme_written, too_long)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of replaying one trace with one setting.

    ``hit_rate`` is the number of prefix-hit tokens divided by the number of requested tokens, over the second half
    of the trace. ``optimal_hit_rate`` is the same for the bound, a cache with the capacity of all tiers together
    (``capacity_bytes``) that knows the future. Bytes are counted over the whole trace. ``too_long`` is the number
    of requests that the replay skipped because they have more pages than HBM; the bound includes them.
    ``seconds`` is the elapsed time of the replay, without the time for computing the bound.
    ``pages_per_second`` is the number of pages requested in the whole trace, divided by ``seconds``.
    """

    trace: str
    policy: str
    admission: str
    capacity_bytes: int
    hit_rate: float
    optimal_hit_rate: float
    hit_tokens: dict[str, int]
    asked_tokens: int
    bytes_moved: dict[str, int]
    nvme_bytes_written: int
    too_long: int
    seconds: float
    pages_per_second: float


def row(trace: Trace, setting: Setting, bounds: Bounds, step: Callable[[int], None]) -> Row:
    """Replay the trace and return its row.

    After each request, ``step`` is called with the number of its pages.
    """
    began = perf_counter()
    outcome = replay(trace, setting, step)
    seconds = perf_counter() - began
    pages = sum(setting.pages.values())
    names = [setting.policies[tier] for tier in sorted(setting.pages)]
    return Row(
        trace=trace.name,
        policy=names[0] if len(set(names)) == 1 else "/".join(names),
        admission=setting.admission,
        capacity_bytes=pages * setting.page_nbytes,
        hit_rate=outcome.hit_rate,
        optimal_hit_rate=bounds.rate(trace, pages),
        hit_tokens={tier.name: n * trace.block_tokens for tier, n in sorted(outcome.hits.items())},
        asked_tokens=outcome.asked_tokens,
        bytes_moved=outcome.moved,
        nvme_bytes_written=outcome.nvme_written,
        too_long=outcome.too_long,
        seconds=seconds,
        pages_per_second=sum(len(request.keys) for request in trace.requests) / seconds if seconds else 0.0,
    )
