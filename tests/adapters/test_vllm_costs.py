"""Test how many pages of a hit are loaded if computing some of them can be faster than loading them.

No other number of pages may take much less time. Some tests run the connector in a simulated engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_pool import hashes_of
from tests.support.pages import SPEC, chain
from tierstore.adapters.compute_rate import ComputeRate
from tierstore.adapters.vllm import costs as choosing
from tierstore.adapters.vllm.costs import Demand, MeasuredCosts, Others, Queues, worth_loading
from tierstore.adapters.vllm.hit import Hit, HitLookup, Span
from tierstore.adapters.vllm.kv_groups import Group, Groups, Window
from tierstore.adapters.vllm.loads import DiskPrefetch
from tierstore.adapters.vllm.requests import RequestState
from tierstore.config import load_config
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.ranks import Disk as OpenedDisk
from tierstore.ranks import Opened, Ranks, assemble_apart
from tierstore.store import TierStore
from tierstore.types import Ack, Hint, Match, PageKey, Tier, Transfer

HOST, NVME = Tier.HOST, Tier.NVME
NBYTES = SPEC.page_nbytes
SIZE = 16


class Estimates:
    """Fixed estimates of the time that loads and computation take.

    ``load``, ``read`` and ``token`` are the times in seconds to load a page, to read a page and to compute a token.
    ``before`` is the number of seconds that each earlier token adds to the computation of a token.

    ``to_measure`` is the number of tokens that a step must compute to measure the compute rate.
    ``disk_s`` is the time in seconds for which earlier reads keep the disk busy.
    """

    def __init__(
        self,
        load: float,
        read: float,
        token: float | None,
        before: float = 0.0,
        to_measure: int = 0,
        disk_s: float = 0.0,
    ) -> None:
        self.load, self.read, self.token, self.before = load, read, token, before
        self.to_measure, self.disk_s = to_measure, disk_s

    def queues(self, coming: int = 0) -> Queues:
        return Queues(self.disk_s, 0.0, self.read, self.load)

    def coming(self, keys: Sequence[PageKey]) -> int:
        return 0

    def compute_s(self, start: int, end: int) -> float | None:
        if self.token is None:
            return None
        return self.token * (end - start) + self.before * (end * end - start * start) / 2


def hit(tiers: list[Tier], first: int = 0) -> Hit:
    span = Span(Group(0, SIZE), first, chain(len(tiers)), tiers)
    return Hit(first * SIZE, (first + len(tiers)) * SIZE, (span,))


@given(
    tiers=st.lists(st.sampled_from([HOST, NVME]), max_size=12),
    first=st.integers(0, 5),
    more=st.integers(1, 100),
    load=st.floats(0.0, 1.0),
    read=st.floats(0.0, 3.0),
    token=st.floats(0.0, 0.2),
    before=st.floats(0.0, 0.01),
    engine=st.integers(0, 4),
    reads=st.integers(0, 4),
    moves=st.integers(0, 4),
)
def test_chosen_page_count_costs_at_most_a_quarter_more_waiting_than_the_best(
    tiers: list[Tier],
    first: int,
    more: int,
    load: float,
    read: float,
    token: float,
    before: float,
    engine: int,
    reads: int,
    moves: int,
) -> None:
    plan, costs = hit(tiers, first), Estimates(load, read, token, before)
    total = plan.end + more

    def waits(pages: int) -> float:
        computing = costs.compute_s(plan.start + pages * SIZE, total)
        assert computing is not None
        on_disk = tiers[:pages].count(NVME)
        loading = (1 + moves) * (pages - on_disk) * load + (1 + reads) * on_disk * max(load, read)
        return loading + (1 + engine) * computing

    least = min(waits(pages) for pages in range(len(tiers) + 1))
    tokens = worth_loading(plan, total, costs, Others(engine, reads, moves))
    assert tokens % SIZE == 0
    if tokens == plan.tokens:
        assert waits(len(tiers)) <= 1.25 * least * (1 + 1e-9)
    else:
        assert waits(tokens // SIZE) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize(
    ("others", "pages"),
    [
        (Others(), 0),  # 3 s to read a page, 1.6 s to compute it
        (Others(engine=1), 4),  # loading leaves the engine to another request
        (Others(engine=1, reads=1), 0),  # the other request could load instead
        (Others(engine=3, reads=1), 4),
        (Others(engine=9, reads=9), 0),
        (Others(engine=1, moves=9), 4),  # the other requests do not wait for the disk
    ],
)
def test_engine_and_disk_time_cost_more_when_more_requests_need_them(others: Others, pages: int) -> None:
    plan = hit([NVME] * 4)
    assert worth_loading(plan, plan.end + 1, Estimates(0.1, 3.0, 0.1), others) == pages * SIZE


@pytest.mark.parametrize(("others", "pages"), [(Others(reads=99), 4), (Others(moves=99), 0)])
def test_load_from_memory_does_not_delay_requests_waiting_for_the_disk(others: Others, pages: int) -> None:
    plan = hit([HOST] * 4)
    assert worth_loading(plan, plan.end + 1, Estimates(0.1, 3.0, 0.1), others) == pages * SIZE


def test_pages_already_being_read_are_loaded_and_later_ones_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs = Estimates(0.1, 3.0, 0.1)
    monkeypatch.setattr(costs, "coming", lambda keys: 2)
    monkeypatch.setattr(costs, "queues", lambda coming: Queues(-2.9 * coming, 0.0, 3.0, 0.1))
    plan = hit([HOST, NVME, NVME, NVME, NVME])
    assert worth_loading(plan, plan.end + 1, costs) == 3 * SIZE


@pytest.mark.parametrize(("memory", "loaded"), [(2, 2), (0, 0), (None, 0)])
def test_hit_with_windows_loads_its_part_in_memory_if_that_is_complete(
    memory: int | None, loaded: int
) -> None:
    window = Group(1, SIZE, kind=Window(SIZE + 1))
    spans = Span(Group(0, SIZE), 0, chain(4), [HOST, HOST, NVME, NVME]), Span(window, 3, chain(1), [NVME])
    plan = Hit(0, 4 * SIZE, spans)
    shorter = None if memory is None else Hit(0, memory * SIZE, (spans[0],) if memory else ())
    assert worth_loading(plan, plan.end + 1, Estimates(0.1, 9.0, 0.1), None, shorter) == loaded * SIZE


@pytest.mark.parametrize(
    ("tiers", "costs", "pages"),
    [
        ([NVME] * 4, Estimates(0.1, 3.0, 0.1), 0),
        ([HOST, HOST, NVME, HOST], Estimates(0.1, 9.0, 0.1), 2),
        ([NVME, HOST, HOST, HOST], Estimates(0.1, 3.0, 0.1), 4),
        ([NVME] * 4, Estimates(0.1, 1.65, 0.1), 4),  # computing is not clearly faster
        ([HOST] * 4, Estimates(9.0, 9.0, 0.1), 0),  # a slow link
        ([HOST] * 4, Estimates(1.0, 9.0, 0.1), 4),
        ([NVME] * 4, Estimates(0.1, 9.0, None), 4),
        ([], Estimates(0.1, 9.0, 0.1), 0),
    ],
)
def test_number_of_pages_loaded_for_a_hit(tiers: list[Tier], costs: Estimates, pages: int) -> None:
    plan = hit(tiers)
    assert worth_loading(plan, plan.end + 1, costs) == pages * SIZE


@pytest.mark.parametrize(
    ("tokens", "disk_gbps", "loaded"),
    [(16384, 1.8, False), (65536, 1.8, False), (131072, 1.8, True), (16384, 4.2, True), (16384, 6.0, True)],
)
def test_short_prompts_are_computed_rather_than_loaded_from_a_slow_disk(
    tokens: int, disk_gbps: float, loaded: bool
) -> None:
    # an H200 and the 8B shape: 128 KiB per token, and 2.28e-5 n + 4.33e-10 n^2 seconds for n tokens
    page = SIZE * (128 << 10)
    costs = Estimates(page / 54e9, page / (disk_gbps * 1e9), 2.28e-5, 2 * 4.33e-10)
    plan = hit([NVME] * (tokens // SIZE - 4))
    assert worth_loading(plan, tokens, costs) == (plan.tokens if loaded else 0)


@pytest.mark.parametrize(
    ("tiers", "costs", "pages"),
    [
        ([NVME] * 4, Estimates(0.1, 0.5, None, to_measure=9), 4),
        ([NVME] * 4, Estimates(0.1, 1.0, None, to_measure=9), 3),
        ([HOST, NVME, HOST, NVME, NVME], Estimates(0.1, 1.4, None, to_measure=9), 4),
        ([NVME] * 4, Estimates(0.1, 1.0, None, to_measure=9, disk_s=1.9), 1),
        ([NVME] * 4, Estimates(0.1, 1.0, None, to_measure=9, disk_s=8.0), 0),
        ([HOST, HOST, NVME], Estimates(0.1, 1.0, None, to_measure=9, disk_s=8.0), 2),
        ([HOST] * 4, Estimates(9.0, 9.0, None, to_measure=9), 4),  # nothing is on disk
        ([HOST] * 4, Estimates(0.1, 1.0, None, to_measure=9, disk_s=8.0), 4),
        ([NVME] * 4, Estimates(0.0, 0.0, None, to_measure=9), 4),  # the disk is unknown too
        ([NVME] * 4, Estimates(0.1, 1.0, 9.0, to_measure=9), 3),  # computing takes at most that long
        ([NVME] * 4, Estimates(0.1, 1.0, 0.01, to_measure=9), 0),
    ],
)
def test_with_unknown_compute_rate_only_three_seconds_of_disk_reads_are_loaded(
    tiers: list[Tier], costs: Estimates, pages: int
) -> None:
    plan = hit(tiers)
    assert worth_loading(plan, plan.end + 1, costs) == pages * SIZE


@given(
    tiers=st.lists(st.sampled_from([HOST, NVME]), min_size=1, max_size=12),
    quarters=st.integers(1, 12),
    busy=st.integers(0, 20),
)
def test_with_unknown_compute_rate_hit_ends_before_the_first_page_after_three_seconds(
    tiers: list[Tier], quarters: int, busy: int
) -> None:
    plan, costs = hit(tiers), Estimates(0.125, quarters / 4, None, to_measure=9, disk_s=busy / 4)
    late = [
        n for n in range(len(tiers)) if tiers[n] is NVME and busy + tiers[: n + 1].count(NVME) * quarters > 12
    ]
    assert worth_loading(plan, plan.end + 1, costs) == min(late, default=len(tiers)) * SIZE


@pytest.mark.parametrize(("read", "memory", "loaded"), [(0.5, 1, 4), (9.0, 1, 1), (9.0, 0, 0)])
def test_with_unknown_compute_rate_hit_with_windows_loads_whole_or_only_its_part_in_memory(
    read: float, memory: int, loaded: int
) -> None:
    spans = (
        Span(Group(0, SIZE), 0, chain(4), [HOST, HOST, NVME, NVME]),
        Span(Group(1, SIZE, kind=Window(SIZE + 1)), 3, chain(1), [NVME]),
    )
    shorter = Hit(0, memory * SIZE, (spans[0],) if memory else ())
    costs = Estimates(0.1, read, None, to_measure=9)
    assert worth_loading(Hit(0, 4 * SIZE, spans), 99, costs, None, shorter) == loaded * SIZE


def test_a_hit_with_windows_is_loaded_whole_or_not_at_all() -> None:
    full = Span(Group(0, SIZE), 0, chain(3), [HOST, HOST, NVME])
    window = Span(Group(1, SIZE, kind=Window(SIZE + 1)), 2, chain(1), [NVME])
    plan = Hit(0, 3 * SIZE, (full, window))
    assert worth_loading(plan, plan.end + 1, Estimates(0.1, 9.0, 0.1)) == 0
    assert worth_loading(plan, plan.end + 1, Estimates(0.1, 1.0, 0.1)) == plan.tokens


class Disk:
    """A store with a worker in another process, which the test simulates, and ``MeasuredCosts`` of the store.

    The test reports when the worker has read pages and how long that took. ``clock`` is the current time.
    """

    def __init__(self, pages_per_s: float | None) -> None:
        """``pages_per_s`` is the read rate measured when the disk was opened, or None if it was not measured."""
        config = load_config(
            {
                "host": {"capacity": 300 * NBYTES, "pin": "never"},
                "nvme": {"path": "/nowhere", "capacity": "1GiB"},
            }
        )
        self._left = chain(300)
        """Pages on disk whose reads have not been ordered."""
        on_disk = OpenedDisk(NBYTES, 1 << 30, [(key, None, NBYTES) for key in self._left])
        self.ranks = Ranks(1)
        opened = assemble_apart(config, PageLayout.of(SPEC), [Opened(8, 300, on_disk)], self.ranks)
        self.store = TierStore(config, opened, Wakeup(), pump=False)
        self.store.take_hints()
        self._hint = Hint("r", 1, tuple(self._left))
        self.store.hint(self._hint)
        self.clock = 0.0
        rate = None if pages_per_s is None else pages_per_s * NBYTES
        self.costs = MeasuredCosts(self.store, ComputeRate(), NBYTES, rate, lambda: self.clock)

    def order(self, pages: int) -> tuple[list[Transfer], list[PageKey]]:
        """Start to read ``pages`` pages into memory. Return the transfers and the keys."""
        keys, self._left = self._left[:pages], self._left[pages:]
        for start in range(0, pages, 32):
            self.store.promote(self._hint, keys[start : start + 32], HOST)
        return self.ordered(), keys

    def ordered(self) -> list[Transfer]:
        """Return the transfers that the store has started since the last call."""
        return [command for command in self.ranks.take() if isinstance(command, Transfer)]

    def end(self, transfer: Transfer, now: float, seconds: float) -> None:
        self.clock = now
        pages = len(transfer.keys)
        self.ranks.deliver(0, [Ack(transfer.id, True, pages, pages * NBYTES, seconds)])
        self.store.poll()
        self.costs.look()


@pytest.fixture
def open_disk() -> Iterator[Callable[[float | None], Disk]]:
    """Yield a function that creates a ``Disk``. All disks are closed at the end of the test."""
    disks: list[Disk] = []

    def opened(pages_per_s: float | None) -> Disk:
        disks.append(Disk(pages_per_s))
        return disks[-1]

    yield opened
    for disk in disks:
        disk.store.close(timeout_s=0)


OpenDisk = Callable[["float | None"], Disk]


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 6.0), (None, 0.0)])
def test_before_the_first_read_the_disk_rate_is_that_measured_at_open(
    rate: float | None, seconds: float, open_disk: OpenDisk
) -> None:
    disk = open_disk(rate)
    disk.costs.look()
    queues = disk.costs.queues()
    assert (queues.load_s(3, 3), queues.load_s(3, 0), queues.load_s(0, 0)) == (seconds, 0.0, 0.0)
    assert disk.costs.compute_s(0, 9) is None


def test_disk_rate_is_measured_by_workers_regardless_of_engine_steps(
    open_disk: OpenDisk,
) -> None:
    disk = open_disk(0.5)
    (one, two), keys = disk.order(64)
    disk.end(one, 0.10, 0.08)
    disk.end(two, 7.0, 0.16)  # reported at the end of a long step
    page_s = 1 / (0.8 * 32 / 0.08 + 0.2 * 32 / 0.16)  # the rates are averaged
    assert disk.costs.queues().load_s(3, 3) == pytest.approx(3 * page_s)
    (three,), _ = disk.order(4)
    assert disk.costs.queues().load_s(3, 3) == pytest.approx(
        (4 + 3) * page_s
    )  # earlier orders are read first
    disk.end(three, 8.0, 4 * page_s)
    assert disk.costs.queues() == pytest.approx(Queues(0.0, 0.0, page_s, 0.0))
    with disk.store.acquire(keys[:1], into=[0]):
        assert disk.costs.queues().link_s == 0.0  # not known yet
        (load,) = disk.ordered()
        disk.end(load, 8.5, 0.5)
    assert disk.costs.queues().load_s(3, 0) == 1.5
    assert disk.costs.queues().load_s(5, 3) == pytest.approx(
        2 * 0.5 + 3 * 0.5
    )  # the link is slower than the disk


def test_pages_of_accepted_loads_not_yet_requested_count_as_queued_reads(open_disk: OpenDisk) -> None:
    disk = open_disk(0.5)
    disk.costs._promised = lambda: 7
    assert disk.costs.queues().disk_s == 14.0


def test_pages_count_as_coming_from_disk_once_their_read_is_ordered(open_disk: OpenDisk) -> None:
    disk = open_disk(1.0)
    (first, _), pages = disk.order(40)
    _, later = disk.order(1)
    assert disk.costs.coming(pages[30:] + later) == 11
    disk.end(first, 1.0, 1.0)
    assert disk.costs.coming(pages[30:] + later) == 9
    assert disk.costs.coming(chain(9, "elsewhere")) == 0


@pytest.mark.parametrize(("others", "loaded"), [(0, 64), (5, 0)])
def test_reads_in_flight_for_the_same_hit_are_counted_once(
    others: int, loaded: int, monkeypatch: pytest.MonkeyPatch, open_disk: OpenDisk
) -> None:
    """Use a hit that takes 4 s to read and 5.12 s to compute. All its reads are already in flight."""
    disk = open_disk(1.0)
    monkeypatch.setattr(disk.costs, "compute_s", lambda start, end: 0.08 * (end - start))
    disk.costs._compute_rate.known = True
    plan = hit([NVME] * 4)
    assert disk.order(4)[1] == plan.spans[0].keys
    disk.order(others)
    assert worth_loading(plan, plan.end, disk.costs) == loaded


def test_disk_rate_older_than_a_minute_is_ignored(open_disk: OpenDisk) -> None:
    disk = open_disk(None)
    (slow,), _ = disk.order(1)
    disk.end(slow, 0.2, 0.2)
    disk.clock = 60.2
    disk.costs.look()  # nothing has arrived
    assert disk.costs.queues().load_s(3, 3) == pytest.approx(0.6)
    disk.clock = 60.3  # too old: the disk is tried again
    assert disk.costs.queues().load_s(3, 3) == 0.0
    (quick,), _ = disk.order(10)
    disk.end(quick, 61.1, 0.1)
    assert disk.costs.queues().load_s(3, 3) == pytest.approx(3 / (0.8 * 5 + 0.2 * 100))


def test_link_rate_older_than_a_minute_is_ignored(open_disk: OpenDisk) -> None:
    disk = open_disk(None)
    (read,), keys = disk.order(1)
    disk.end(read, 1.0, 0.1)
    with disk.store.acquire(keys, into=[0]):
        (load,) = disk.ordered()
        disk.end(load, 2.0, 0.5)
    assert disk.costs.queues().move_s == 0.5
    disk.clock = 62.1
    assert disk.costs.queues().move_s == 0.0


def test_demand_counts_requests_for_the_engine_and_for_pages() -> None:
    demand = Demand()
    demand.queued("cached", on_disk=False)
    demand.queued("stored", on_disk=True)
    assert demand.others("new") == Others(2, 1)
    assert demand.others("stored") == Others(1, 0)
    demand.loads("stored", on_disk=True)
    assert demand.others("cached") == Others(0, 1)
    demand.loads("stored", on_disk=False)
    assert demand.others("cached") == Others(0, 0, 1)
    demand.computes("stored")
    assert demand.others("cached") == Others(1, 0)
    demand.ended("stored")
    demand.ended("stored")
    assert demand.others("cached") == Others()


def on_disk(tmp_path: Path, load: str = "if_faster") -> Engine:
    """Return an engine with the pages of ``DOCUMENT`` only on disk. With ``slow_disk``, reading a page takes 9 s."""
    config = {"host": {"capacity": 12 * 64, "pin": "never"}, "nvme": {"path": tmp_path, "capacity": 1 << 20}}
    engine = Engine(config, load=load)
    engine.add(DOCUMENT, 1)
    engine.run()
    tables = engine.half._tiers.store._directory.residency.tables
    assert len(tables[NVME].copies) == 4
    engine.half._tiers.store.evict(list(tables[NVME].copies), HOST)
    engine.forget()
    return engine


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing.MeasuredCosts, "queues", lambda self, coming: Queues(read_s=9.0))
    monkeypatch.setattr(choosing.MeasuredCosts, "compute_s", lambda self, start, end: float(end - start))
    monkeypatch.setattr(choosing.MeasuredCosts, "to_measure", 0)


@pytest.mark.usefixtures("slow_disk")
def test_pages_faster_to_compute_are_computed_and_promoted_for_the_next_request(
    tmp_path: Path,
) -> None:
    engine = on_disk(tmp_path)
    name = engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 0
    assert engine.answers[name] == engine.answers["r1"]
    assert engine.half._tiers.counted()["left_pages"] == {"NVME": 4.0}
    assert len(engine.half._tiers.store._directory.residency.tables[HOST].copies) == 4
    engine.forget()
    engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 8
    engine.check()
    engine.close()


@pytest.mark.usefixtures("slow_disk")
def test_pages_left_after_a_partial_load_are_promoted(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    store, tables = engine.half._tiers.store, engine.half._tiers.store._directory.residency.tables
    engine.add(DOCUMENT[:5], 1)  # two pages, which are promoted to memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing.MeasuredCosts, "queues", lambda self, coming: Queues())
        engine.run()
    assert (engine.taken, len(tables[HOST].copies)) == (4, 2)
    engine.forget()
    engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 8
    assert engine.half._tiers.counted()["left_pages"] == {"NVME": 2.0}
    assert len(tables[HOST].copies) == 4
    store.check()
    engine.close()


@pytest.mark.usefixtures("slow_disk")
def test_left_pages_are_promoted_after_their_request_ends_and_keep_the_engine_stepping(
    tmp_path: Path,
) -> None:
    engine = on_disk(tmp_path)
    engine.add(DOCUMENT, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskPrefetch, "advance", lambda self: None)
        while engine.requests:
            engine.step()
    copies = engine.half._tiers.store._directory.residency.tables[HOST].copies
    assert (engine.taken, len(copies)) == (0, 0)
    engine.run()
    assert len(copies) == 4
    assert not engine.half.pending
    engine.close()


@pytest.mark.usefixtures("slow_disk")
def test_steps_that_only_promote_left_pages_are_idle(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    (records,) = engine.records
    records.hold((NVME, HOST))
    engine.pace = 0.0
    engine.add(DOCUMENT, 1)
    while engine.requests:
        engine.step()
    assert engine.half.pending
    assert engine.half.orders([]).idle
    records.open()
    engine.run()
    assert not engine.half.pending
    assert not engine.half.orders([]).idle
    engine.close()


@pytest.mark.usefixtures("slow_disk")
def test_left_pages_are_counted_once_if_vllm_asks_again(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    name = engine.add(DOCUMENT, 1)
    for _ in range(2):
        assert engine.half.offer(engine.requests[name], 0) == 0
        engine.half._known[name].lookup = None
    assert engine.half._tiers.counted()["left_pages"] == {"NVME": 4.0}
    engine.run()
    engine.close()


def test_arrived_pages_are_measured_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []
    monkeypatch.setattr(MeasuredCosts, "look", lambda self: looks.append(1))
    engine = on_disk(tmp_path)
    looks.clear()
    engine.step()
    engine.add([1, 2], 1)
    engine.step()
    assert len(looks) == 2
    engine.run()
    engine.close()


@pytest.mark.usefixtures("slow_disk")
def test_load_always_loads_pages_faster_to_compute(tmp_path: Path) -> None:
    engine = on_disk(tmp_path, load="always")
    engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 8
    assert engine.half._tiers.counted()["left_pages"] == {"NVME": 0.0}
    engine.close()


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(("others", "taken"), [(0, 0), (1, 8)])
def test_hit_is_loaded_if_that_frees_the_engine_for_another_request(
    others: int, taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add a request whose pages take 12 s to load and 9 s to compute, after ``others`` requests that need the engine.

    While the pages are loaded, the engine can compute the other requests.
    """
    monkeypatch.setattr(choosing.MeasuredCosts, "queues", lambda self, coming: Queues(read_s=3.0))
    engine = on_disk(tmp_path)
    names = [
        engine.add([1, 2], 9) for _ in range(others)
    ]  # short, so that the step has tokens left for the next one
    names.append(engine.add(DOCUMENT, 1))
    engine.step()
    assert engine.requests[names[-1]].status == ("loading" if taken else "running")
    engine.run()
    assert engine.taken == taken
    assert set(names) <= engine.answers.keys()
    assert engine.half._demand.others("") == Others()
    engine.close()


def test_all_pages_are_loaded_before_anything_is_measured(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 8
    engine.close()


def test_pages_of_a_running_request_are_no_longer_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_disk(tmp_path)
    monkeypatch.setattr(engine.half._tiers.hits, "tokens", lambda known, computed, others: 0)
    engine.add(DOCUMENT, 1)
    engine.step()
    assert engine.half._tiers.disk_prefetch._queue == {}
    engine.run()
    engine.close()


class Tiered:
    """A store that holds each key in the tier given by ``tiers``."""

    def __init__(self, tiers: dict[PageKey, Tier]) -> None:
        self.tiers = tiers

    def match(self, keys: Sequence[PageKey]) -> Match:
        found = [self.tiers[key] for key in takewhile(self.tiers.__contains__, keys)]
        return Match(len(found), tuple(found), True)

    def locate(self, keys: Sequence[PageKey]) -> list[Tier | None]:
        return [self.tiers.get(key) for key in keys]


def looked_up(
    costs: Estimates, tier: Tier, requests: int, groups: Sequence[Group] = (Group(0, SIZE),)
) -> tuple[HitLookup, list[int | None]]:
    """Look up ``requests`` prompts. Each has ten pages, all of them in ``tier``.

    Returns the lookup and, for each prompt, the number of tokens to load.
    """
    found = Groups(tuple(groups))
    request = SimpleNamespace(request_id="r", num_tokens=10 * SIZE + 1, block_hashes=hashes_of([0] * 20))
    chains = found.chains(request, [bytes([i] * 32) for i in range(len(groups))])
    keys = [key for chain in chains.values() for key in chain.first(10)]
    hits = HitLookup(Tiered(dict.fromkeys(keys, tier)), found, None, 0.0, costs)  # type: ignore[arg-type]
    taken = []
    for _ in range(requests):
        known = RequestState(request, chains)
        taken.append(hits.tokens(known, 0))
        known.lookup = None
        assert hits.tokens(known, 0) == taken[-1]  # asked again
    return hits, taken


@pytest.mark.parametrize("token", [None, 9.0])
def test_first_requests_with_pages_on_disk_compute_enough_to_measure_the_compute_rate(
    token: float | None,
) -> None:
    costs = Estimates(0.0, 0.01, token, to_measure=2 * SIZE)
    assert looked_up(costs, NVME, 10)[1] == [8 * SIZE] * 8 + [10 * SIZE] * 2
    windows = (Group(0, SIZE), Group(1, SIZE, kind=Window(SIZE)))
    assert looked_up(costs, NVME, 9, windows)[1] == [8 * SIZE] * 8 + [10 * SIZE]


@pytest.mark.parametrize(
    ("costs", "tier"),
    [
        (Estimates(0.0, 0.01, 9.0), NVME),  # the rate is known
        (Estimates(0.0, 0.01, None, to_measure=6 * SIZE), NVME),  # more than half of the prompt
        (Estimates(0.0, 0.01, None, to_measure=2 * SIZE), HOST),  # the engine has computed them
    ],
)
def test_other_requests_compute_nothing_to_measure_the_compute_rate(costs: Estimates, tier: Tier) -> None:
    hits, taken = looked_up(costs, tier, 1)
    assert taken == [10 * SIZE]
    assert hits.left == 0


def test_with_windows_the_part_in_memory_ends_where_all_groups_are_complete() -> None:
    """Look up a hit whose window group needs the block before the hit's end.

    Memory contains that block if the hit ends after two blocks, but not if it ends after three.
    """
    groups = Groups((Group(0, SIZE), Group(1, SIZE, kind=Window(SIZE))))
    request = SimpleNamespace(request_id="r", num_tokens=4 * SIZE + 1, block_hashes=hashes_of([0] * 8))
    chains = groups.chains(request, [bytes(32), bytes([1] * 32)])
    full, window = chains[0].first(4), chains[1].first(4)
    tiers = {full[0]: HOST, full[1]: HOST, full[2]: HOST, full[3]: NVME, window[1]: HOST, window[3]: NVME}
    known = RequestState(request, chains)
    hits = HitLookup(Tiered(tiers), groups, None, 0.0, Estimates(0.1, 99.0, 0.1))  # type: ignore[arg-type]
    assert hits.tokens(known, 0) == 2 * SIZE
    assert known.lookup is not None
    assert [key for _, key in known.lookup.hit.keys] == [full[0], full[1], window[1]]
    assert hits.left == 2
    known.lookup = None
    fast = HitLookup(Tiered(tiers), groups, None, 0.0, Estimates(0.1, 0.2, 0.1))  # type: ignore[arg-type]
    assert fast.tokens(known, 0) == 4 * SIZE
