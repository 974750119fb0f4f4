"""What of a hit is loaded where computing may be quicker: against every number of pages there is, and in an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.support.pages import SPEC, chain
from tierstore.adapters.vllm import costs as choosing
from tierstore.adapters.vllm.costs import ComputeRate, MeasuredCosts, worth_loading
from tierstore.adapters.vllm.hit import Hit, Span
from tierstore.adapters.vllm.kv_groups import Group
from tierstore.adapters.vllm.loads import DiskPrefetch
from tierstore.config import load_config
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.ranks import Disk as OpenedDisk
from tierstore.ranks import Opened, Ranks, assemble_apart
from tierstore.store import TierStore
from tierstore.types import Ack, Hint, PageKey, Tier, Transfer

HOST, NVME = Tier.HOST, Tier.NVME
NBYTES = SPEC.page_nbytes
SIZE = 16


class RequestState:
    """Seconds to load a page, to read one, to compute a token, and more of that for each before it."""

    def __init__(self, load: float, read: float, token: float | None, before: float = 0.0) -> None:
        self.load, self.read, self.token, self.before = load, read, token, before

    def load_s(self, pages: int, on_disk: int, coming: int = 0) -> float:
        return (pages - on_disk) * self.load + on_disk * self.read

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
)
def test_no_other_number_of_pages_is_done_sooner_but_by_a_quarter(
    tiers: list[Tier], first: int, more: int, load: float, read: float, token: float, before: float
) -> None:
    plan, costs = hit(tiers, first), RequestState(min(load, token * SIZE), read, token, before)
    total = plan.end + more

    def done(pages: int) -> float:
        computing = costs.compute_s(plan.start + pages * SIZE, total)
        assert computing is not None
        return costs.load_s(pages, tiers[:pages].count(NVME)) + computing

    least = min(done(pages) for pages in range(len(tiers) + 1))
    tokens = worth_loading(plan, total, costs)
    assert tokens % SIZE == 0
    if tokens == plan.tokens:
        assert done(len(tiers)) <= 1.25 * least * (1 + 1e-9)
    else:
        assert done(tokens // SIZE) == pytest.approx(least, rel=1e-9)
        assert tiers[tokens // SIZE] == NVME


@pytest.mark.parametrize(
    ("tiers", "costs", "pages"),
    [
        ([NVME] * 4, RequestState(0.1, 3.0, 0.1), 0),
        ([HOST, HOST, NVME, HOST], RequestState(0.1, 9.0, 0.1), 2),
        ([NVME, HOST, HOST, HOST], RequestState(0.1, 3.0, 0.1), 4),
        ([NVME] * 4, RequestState(0.1, 1.65, 0.1), 4),  # not clearly quicker
        ([HOST] * 4, RequestState(9.0, 9.0, 0.1), 4),  # memory is not asked about
        ([NVME] * 4, RequestState(0.1, 9.0, None), 4),
        ([], RequestState(0.1, 9.0, 0.1), 0),
    ],
)
def test_what_is_loaded_of_a_hit(tiers: list[Tier], costs: RequestState, pages: int) -> None:
    plan = hit(tiers)
    assert worth_loading(plan, plan.end + 1, costs) == pages * SIZE


@pytest.mark.parametrize(
    ("tokens", "disk_gbps", "loaded"),
    [(16384, 1.8, False), (65536, 1.8, False), (131072, 1.8, True), (16384, 4.2, True), (16384, 6.0, True)],
)
def test_a_card_computes_short_prompts_sooner_than_a_slow_disk_gives_them(
    tokens: int, disk_gbps: float, loaded: bool
) -> None:
    # an H200 and the 8B shape: 128 KiB a token, 2.28e-5 n + 4.33e-10 n^2 seconds
    page = SIZE * (128 << 10)
    costs = RequestState(page / 54e9, page / (disk_gbps * 1e9), 2.28e-5, 2 * 4.33e-10)
    plan = hit([NVME] * (tokens // SIZE - 4))
    assert worth_loading(plan, tokens, costs) == (plan.tokens if loaded else 0)


def test_a_hit_with_windows_is_loaded_whole_or_not_at_all() -> None:
    full = Span(Group(0, SIZE), 0, chain(3), [HOST, HOST, NVME])
    window = Span(Group(1, SIZE, window=SIZE + 1), 2, chain(1), [NVME])
    plan = Hit(0, 3 * SIZE, (full, window))
    assert worth_loading(plan, plan.end + 1, RequestState(0.1, 9.0, 0.1)) == 0
    assert worth_loading(plan, plan.end + 1, RequestState(0.1, 1.0, 0.1)) == plan.tokens


class Disk:
    """A store whose bytes are in another process, as ``MeasuredCosts`` sees it. ``clock``: now.

    The test says when the other process has read something, and how long that took.
    """

    def __init__(self, pages_per_s: float | None) -> None:
        """``pages_per_s``: what the disk was found to give at open."""
        config = load_config(
            {
                "host": {"capacity": 300 * NBYTES, "pin": "never"},
                "nvme": {"path": "/nowhere", "capacity": "1GiB"},
            }
        )
        self._left = chain(300)
        """Pages on disk that were not asked for."""
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
        """So many pages are to be read into memory."""
        keys, self._left = self._left[:pages], self._left[pages:]
        for start in range(0, pages, 32):
            self.store.promote(self._hint, keys[start : start + 32], HOST)
        return self.ordered(), keys

    def ordered(self) -> list[Transfer]:
        """What the other process was told to do since the last call."""
        return [command for command in self.ranks.take() if isinstance(command, Transfer)]

    def end(self, transfer: Transfer, now: float, seconds: float) -> None:
        self.clock = now
        pages = len(transfer.keys)
        self.ranks.deliver(0, [Ack(transfer.id, True, pages, pages * NBYTES, seconds)])
        self.store.poll()
        self.costs.look()


@pytest.fixture
def open_disk() -> Iterator[Callable[[float | None], Disk]]:
    """Opens disks, and closes their stores when the test has ended."""
    disks: list[Disk] = []

    def opened(pages_per_s: float | None) -> Disk:
        disks.append(Disk(pages_per_s))
        return disks[-1]

    yield opened
    for disk in disks:
        disk.store.close(timeout_s=0)


OpenDisk = Callable[["float | None"], Disk]


@pytest.mark.parametrize(("rate", "seconds"), [(0.5, 6.0), (None, 0.0)])
def test_before_it_has_read_a_disk_gives_what_it_was_found_to_give_at_open(
    rate: float | None, seconds: float, open_disk: OpenDisk
) -> None:
    disk = open_disk(rate)
    disk.costs.look()
    assert (disk.costs.load_s(3, 3), disk.costs.load_s(3, 0)) == (seconds, 0.0)
    assert disk.costs.compute_s(0, 9) is None


def test_a_disk_gives_what_it_gave_while_it_had_something_to_read(open_disk: OpenDisk) -> None:
    disk = open_disk(0.5)
    disk.costs.look()
    (one, two), keys = disk.order(64)
    disk.costs.look()
    disk.end(one, 0.10, 0.09)  # both at once: their times overlap
    disk.end(two, 0.16, 0.15)
    page_s = (0.8 * 0.10 + 0.06) / (0.8 * 32 + 32)  # the newest counts most
    assert disk.costs.load_s(3, 3) == pytest.approx(3 * page_s)
    disk.clock = 50.0
    disk.costs.look()  # nothing was read: no time
    assert disk.costs.load_s(3, 3) == pytest.approx(3 * page_s)
    (three,), _ = disk.order(4)
    disk.costs.look()
    assert disk.costs.load_s(3, 3) == pytest.approx((4 + 3) * page_s)  # those before it are read first
    disk.end(three, 50.1, 0.1)
    page_s = (0.8 * (0.8 * 0.10 + 0.06) + 0.1) / (0.8 * (0.8 * 32 + 32) + 4)
    assert disk.costs.load_s(3, 3) == pytest.approx(3 * page_s)
    with disk.store.acquire(keys[:1], into=[0]):
        (load,) = disk.ordered()
        disk.end(load, 50.6, 0.5)
    assert disk.costs.load_s(3, 0) == 1.5
    assert disk.costs.load_s(5, 3) == pytest.approx(2 * 0.5 + max(3 * 0.5, 3 * page_s))


def test_what_is_on_its_way_from_disk_is_known_from_its_order_on(open_disk: OpenDisk) -> None:
    disk = open_disk(1.0)
    (first, _), pages = disk.order(40)
    _, later = disk.order(1)
    assert disk.costs.coming(pages[30:] + later) == 11
    disk.end(first, 1.0, 1.0)
    assert disk.costs.coming(pages[30:] + later) == 9
    assert disk.costs.coming(chain(9, "elsewhere")) == 0


@pytest.mark.parametrize(("others", "loaded"), [(0, 64), (5, 0)])
def test_reads_of_the_hit_itself_that_are_under_way_are_waited_for_once(
    others: int, loaded: int, monkeypatch: pytest.MonkeyPatch, open_disk: OpenDisk
) -> None:
    """It takes 4 s to read, as fast as if nothing was ordered, and 5.12 s to compute."""
    disk = open_disk(1.0)
    monkeypatch.setattr(disk.costs, "compute_s", lambda start, end: 0.08 * (end - start))
    plan = hit([NVME] * 4)
    assert disk.order(4)[1] == plan.spans[0].keys
    disk.order(others)
    assert worth_loading(plan, plan.end, disk.costs) == loaded


def test_what_a_disk_gave_more_than_a_minute_ago_says_nothing_any_more(open_disk: OpenDisk) -> None:
    disk = open_disk(None)
    (slow,), _ = disk.order(1)
    disk.costs.look()
    disk.end(slow, 0.2, 0.2)
    disk.clock = 60.0
    assert disk.costs.load_s(3, 3) == pytest.approx(0.6)
    disk.clock = 61.0  # too old: it is tried again
    assert disk.costs.load_s(3, 3) == 0.0
    (quick,), _ = disk.order(10)
    disk.costs.look()
    disk.end(quick, 61.1, 0.1)
    assert disk.costs.load_s(3, 3) == pytest.approx(0.03)


def test_what_a_disk_gives_is_not_taken_from_the_time_of_steps_that_compute(open_disk: OpenDisk) -> None:
    disk = open_disk(0.5)
    (one,), _ = disk.order(2)
    disk.costs.look(computes=True)
    disk.end(one, 0.2, 0.01)  # it was there soon, and told of at the step's end
    assert disk.costs.load_s(3, 3) == 6.0
    (two,), _ = disk.order(2)
    disk.costs.look()
    disk.clock = 0.24
    disk.costs.look(computes=True)  # what it read so far is told of later
    disk.end(two, 0.4, 0.05)
    (three,), _ = disk.order(10)
    disk.costs.look()
    disk.end(three, 0.5, 0.1)
    assert disk.costs.load_s(3, 3) == pytest.approx(0.03)


def test_what_a_disk_gives_is_not_taken_from_the_time_of_an_engine_that_nobody_asked(
    open_disk: OpenDisk,
) -> None:
    disk = open_disk(0.5)
    (one,), _ = disk.order(2)
    disk.costs.look()
    disk.end(one, 3600.0, 0.01)
    assert disk.costs.load_s(3, 3) == 6.0


def on_disk(tmp_path: Path, load: str = "if_faster") -> Engine:
    """An engine of which only the disk holds ``DOCUMENT``, read in 9 s a page where a token is computed in one."""
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
    monkeypatch.setattr(choosing.MeasuredCosts, "load_s", lambda self, pages, on_disk, coming: 9.0 * on_disk)
    monkeypatch.setattr(choosing.MeasuredCosts, "compute_s", lambda self, start, end: float(end - start))


@pytest.mark.usefixtures("slow_disk")
def test_what_is_quicker_to_compute_is_computed_and_comes_up_to_memory_behind_for_the_next(
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
def test_what_is_left_behind_a_beginning_that_is_loaded_comes_up_too(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    store, tables = engine.half._tiers.store, engine.half._tiers.store._directory.residency.tables
    engine.add(DOCUMENT[:5], 1)  # two pages, which come up
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing.MeasuredCosts, "load_s", lambda self, pages, on_disk, coming: 0.0)
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
def test_what_is_left_comes_up_though_its_request_has_ended_and_the_engine_steps_on_for_it(
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
def test_steps_that_are_there_for_what_was_left_alone_may_be_waited_in(tmp_path: Path) -> None:
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
def test_pages_that_are_left_are_counted_once_though_vllm_asks_again(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    name = engine.add(DOCUMENT, 1)
    for _ in range(2):
        assert engine.half.offer(engine.requests[name], 0) == 0
        engine.half._known[name].lookup = None
    assert engine.half._tiers.counted()["left_pages"] == {"NVME": 4.0}
    engine.run()
    engine.close()


def test_the_disk_is_looked_at_before_and_after_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[bool] = []
    monkeypatch.setattr(MeasuredCosts, "look", lambda self, *, computes=False: looks.append(computes))
    engine = on_disk(tmp_path)
    looks.clear()
    engine.step()
    engine.add([1, 2], 1)
    engine.step()
    assert looks == [False, False, True, False]
    engine.run()
    engine.close()


@pytest.mark.usefixtures("slow_disk")
def test_it_is_loaded_all_the_same_where_that_was_said(tmp_path: Path) -> None:
    engine = on_disk(tmp_path, load="always")
    engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 8
    assert engine.half._tiers.counted()["left_pages"] == {"NVME": 0.0}
    engine.close()


@pytest.mark.usefixtures("slow_disk")
def test_it_is_loaded_while_others_want_the_engine(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    other = engine.add([1, 2], 9)  # it leaves room in the step in which the next one is asked about
    name = engine.add(DOCUMENT, 1)
    engine.step()
    assert engine.requests[name].status == "loading"
    engine.run()
    assert engine.taken == 8
    assert {other, name} <= engine.answers.keys()
    engine.close()


def test_before_anything_was_measured_all_is_loaded(tmp_path: Path) -> None:
    engine = on_disk(tmp_path)
    engine.add(DOCUMENT, 1)
    engine.run()
    assert engine.taken == 8
    engine.close()


def test_pages_of_a_request_that_runs_come_up_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_disk(tmp_path)
    monkeypatch.setattr(engine.half._tiers.hits, "tokens", lambda known, computed, others: 0)
    engine.add(DOCUMENT, 1)
    engine.step()
    assert engine.half._tiers.disk_prefetch._queue == {}
    engine.run()
    engine.close()
