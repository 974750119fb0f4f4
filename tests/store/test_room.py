"""Tests of ``acquire(wait_for_room_s=...)``: it waits at most this long for HBM pages that are being saved to HOST."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.engine import Engine, page_major
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    read,
    require_right,
    tiers,
    write,
    write_down,
)
from tests.support.stalls import DOWN, IN, OUT
from tests.support.waiting import wait_for
from tierstore.errors import StoreClosed
from tierstore.lease import Lease
from tierstore.pump import Wakeup
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

FOR_EVER_S = 1e6
"""A timeout that no test reaches. Such a wait ends when space is free, or when no transfer can free any."""

WANTED, OTHER = chain(3, "wanted"), chain(4, "other")


@pytest.fixture(params=[False, True], ids=["polled", "pump"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """Yield a store with 4 pages in HBM and 8 in HOST, once without and once with a pump thread."""
    bench = open_bench(tiers(4, 8, tmp_path / "disk"), SPEC, pump=request.param)
    yield bench
    bench.store.check()
    bench.close()


class Asking:
    """Calls acquire in a separate thread."""

    def __init__(self, store: TierStore, keys: list[PageKey], **named: Any) -> None:
        self.lease: Lease | None = None
        self.error: BaseException | None = None
        self._keys, self._store, self._named = keys, store, {"wait_for_room_s": FOR_EVER_S, **named}
        self._thread = Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        try:
            self.lease = self._store.acquire(self._keys, **self._named)
        except StoreClosed as error:
            self.error = error

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def ended(self) -> Lease:
        self._thread.join(PATIENCE_S)
        assert self.lease is not None, "acquire did not return"
        return self.lease


def full_of_unsaved_pages(bench: Bench) -> None:
    """Put ``WANTED`` into HOST, and fill HBM with pages whose copies to HOST are held at the gate."""
    write_down(bench.store, WANTED, Tier.HOST)
    bench.copies.hold(OUT)
    write(bench.store, OTHER)
    bench.store.poll()


def in_line(bench: Bench) -> int:
    """Return the number of acquire calls that are waiting for space."""
    return sum(record.wants_room for record in list(bench.store._leases._line))


def waiting(bench: Bench, asking: Asking) -> None:
    """Wait until the acquire call is waiting for space. Assert that it has not returned."""
    wait_for(lambda: not asking.waits or in_line(bench) > 0)
    assert asking.waits


def require_all(bench: Bench, lease: Lease, keys: list[PageKey] = WANTED) -> None:
    with lease:
        assert (lease.num_pages, lease.missing_because) == (len(keys), None)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        require_right(bench.store, lease)


def test_acquire_does_not_wait_for_space_unless_asked_to(bench: Bench) -> None:
    full_of_unsaved_pages(bench)
    with bench.store.acquire(WANTED) as lease:
        assert (lease.num_pages, lease.missing_because) == (0, "no_room")


def test_acquire_waits_for_pages_that_are_being_saved(bench: Bench) -> None:
    full_of_unsaved_pages(bench)
    asking = Asking(bench.store, WANTED)
    waiting(bench, asking)
    assert bench.store.match(OTHER).num_pages == 4, "acquire must not hold the lock while it waits"
    bench.open_gates()
    require_all(bench, asking.ended())
    assert read(bench.store, OTHER) == 4


def test_a_lookup_keeps_its_pages_and_continues_with_the_rest(bench: Bench) -> None:
    write_down(bench.store, WANTED, Tier.HOST)
    bench.copies.hold(OUT)
    write(bench.store, OTHER[:3])
    asking = Asking(bench.store, WANTED)
    waiting(bench, asking)
    assert bench.store.stats()["leases"] == 1
    bench.open_gates()
    require_all(bench, asking.ended())


def test_acquire_waits_for_host_memory_that_is_being_saved_to_disk(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 4, tmp_path), SPEC)
    write_down(bench.store, WANTED, Tier.NVME)
    write(bench.store, OTHER)
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    write(bench.store, chain(4, "third"), timeout_s=PATIENCE_S)
    asking = Asking(bench.store, WANTED)
    waiting(bench, asking)
    bench.open_gates()
    require_all(bench, asking.ended())
    bench.store.check()
    bench.close()


def _freed(bench: Bench, event: ManualEvent) -> None:
    slots = bench.store.allocate(4, timeout_s=PATIENCE_S)
    bench.store.free(slots, after=event)


def _released(bench: Bench, event: ManualEvent) -> None:
    write(bench.store, OTHER)
    assert bench.store.drain(PATIENCE_S)
    bench.store.acquire(OTHER).release(after=event)


def _written(bench: Bench, event: ManualEvent) -> None:
    bench.store.put(OTHER, bench.store.allocate(4, timeout_s=PATIENCE_S), after=event)


@pytest.mark.parametrize("use", [_freed, _released, _written])
def test_acquire_waits_for_slots_that_an_event_is_about_to_free(
    bench: Bench, use: Callable[[Bench, ManualEvent], None]
) -> None:
    write_down(bench.store, WANTED, Tier.HOST)
    event = ManualEvent()
    use(bench, event)
    asking = Asking(bench.store, WANTED)
    waiting(bench, asking)
    event.happen()
    require_all(bench, asking.ended())


def test_acquire_waits_for_loads_whose_leases_were_released(bench: Bench) -> None:
    loaded = chain(4, "loaded")
    write_down(bench.store, WANTED, Tier.HOST)
    write_down(bench.store, loaded, Tier.HOST)
    bench.copies.hold(IN)
    bench.store.acquire(loaded).release()
    asking = Asking(bench.store, WANTED)
    waiting(bench, asking)
    bench.open_gates()
    require_all(bench, asking.ended())


def _leased(store: TierStore) -> Callable[[], None]:
    write(store, OTHER)
    assert store.drain(PATIENCE_S)
    return store.acquire(OTHER).release


def _owned(store: TierStore) -> Callable[[], None]:
    slots = store.allocate(4)
    return lambda: store.free(slots)


@pytest.mark.parametrize("hold", [_leased, _owned])
def test_acquire_returns_at_once_when_nothing_in_flight_can_free_space(
    bench: Bench, hold: Callable[[TierStore], Callable[[], None]]
) -> None:
    write_down(bench.store, WANTED, Tier.HOST)
    let_go = hold(bench.store)
    with Asking(bench.store, WANTED).ended() as lease:
        assert (lease.num_pages, lease.missing_because) == (0, "no_room")
    let_go()
    assert read(bench.store, WANTED) == 3


def test_saving_other_pages_does_not_prolong_a_wait_for_leased_pages(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 8, tmp_path), SPEC)
    write_down(bench.store, WANTED, Tier.HOST)
    let_go = _leased(bench.store)
    bench.records.hold(DOWN)
    bench.store.demote(WANTED, Tier.NVME)
    assert bench.records.waiting(DOWN)
    with Asking(bench.store, WANTED).ended() as lease:
        assert lease.missing_because == "no_room"
    let_go()
    bench.close()


@pytest.mark.parametrize("keys", [chain(2, "unknown"), [*WANTED, *chain(1, "unknown")], []])
def test_acquire_waits_only_for_space(bench: Bench, keys: list[PageKey]) -> None:
    write_down(bench.store, WANTED, Tier.HOST)
    with bench.store.acquire(keys, wait_for_room_s=FOR_EVER_S) as lease:
        assert lease.missing == [key for key in keys if key not in WANTED]


def test_a_host_that_refuses_pages_frees_space_by_dropping_them(bench: Bench) -> None:
    full_of_unsaved_pages(bench)
    for _ in range(4):
        bench.copies.fail_next(OUT, 0, 1, 2, 3)
    asking = Asking(bench.store, WANTED)
    waiting(bench, asking)
    bench.copies.let_go(OUT)
    require_all(bench, asking.ended())


def test_wait_for_space_ends_at_its_timeout_with_no_room(bench: Bench) -> None:
    full_of_unsaved_pages(bench)
    with bench.store.acquire(WANTED, wait_for_room_s=0.02) as lease:
        assert (lease.num_pages, lease.missing_because) == (0, "no_room")


@pytest.mark.parametrize("deadline_s", [-1.0, 0.0, 0.02])
def test_no_wait_for_space_is_longer_than_the_deadline(bench: Bench, deadline_s: float) -> None:
    full_of_unsaved_pages(bench)
    with Asking(bench.store, WANTED, deadline_s=deadline_s).ended() as lease:
        assert lease.num_pages == 0
        assert lease.missing_because in ("no_room", "deadline")


def test_closing_the_store_ends_the_wait(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 8, tmp_path), SPEC, pump=True)
    write_down(bench.store, WANTED, Tier.HOST)
    bench.store.put(OTHER, bench.store.allocate(4), after=ManualEvent())
    asking = Asking(bench.store, WANTED)
    waiting(bench, asking)
    bench.store.close(timeout_s=0.1)
    wait_for(lambda: not asking.waits)
    assert isinstance(asking.error, StoreClosed)


def test_waiting_callers_are_served_in_order(bench: Bench) -> None:
    second, last = chain(3, "second"), chain(4, "last")
    write_down(bench.store, second, Tier.HOST)
    write_down(bench.store, WANTED, Tier.HOST)
    event = ManualEvent()
    bench.store.put(last, bench.store.allocate(4), after=event)
    askings = [Asking(bench.store, WANTED)]
    waiting(bench, askings[0])
    askings.append(Asking(bench.store, second))
    wait_for(lambda: in_line(bench) == 2)
    event.happen()
    first = askings[0].ended()
    assert first.num_pages == 3
    assert first.wait(PATIENCE_S) is LeaseState.READY
    require_right(bench.store, first)
    other = askings[1].ended()
    assert other.num_pages == 1, "the first lease left only one slot"
    other.release()
    first.release()
    assert read(bench.store, second) == 3


def test_callers_holding_each_others_pages_both_return(bench: Bench) -> None:
    second = chain(3, "second")
    for keys in (second, WANTED):
        write_down(bench.store, keys, Tier.HOST)
    event = ManualEvent()
    bench.store.free(bench.store.allocate(1), after=event)
    with bench.store.acquire(second[:1]) as held:
        asking = Asking(bench.store, WANTED)
        waiting(bench, asking)
        other = Asking(bench.store, second)
        wait_for(lambda: in_line(bench) == 2)
        event.happen()
        assert asking.ended().num_pages + other.ended().num_pages == 4
        asking.ended().release()
        other.ended().release()
        assert held.wait(PATIENCE_S) is LeaseState.READY
    assert read(bench.store, second) == 3


def test_callers_waiting_for_the_same_pages_share_their_loads(bench: Bench) -> None:
    full_of_unsaved_pages(bench)
    askings = [Asking(bench.store, WANTED) for _ in range(2)]
    wait_for(lambda: in_line(bench) == 2)
    bench.open_gates()
    one, other = (asking.ended() for asking in askings)
    assert one.slots == other.slots
    require_all(bench, one)
    require_all(bench, other)


def test_interrupted_wait_for_space_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    full_of_unsaved_pages(bench)
    hits = bench.store.stats()["counters"]["misses_pages"]  # type: ignore[index]

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    wait = Wakeup.wait

    def interrupted(wakeup: Wakeup, *args: Any) -> None:
        if current_thread() is main_thread() and in_line(bench) > 0:
            signal.raise_signal(signal.SIGUSR1)
        wait(wakeup, *args)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Wakeup, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                bench.store.acquire(WANTED, wait_for_room_s=FOR_EVER_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert bench.store.stats()["leases"] == 0
    assert bench.store.stats()["counters"]["misses_pages"] == hits  # type: ignore[index]
    bench.open_gates()
    assert bench.store.drain(PATIENCE_S)
    assert read(bench.store, WANTED) == 3


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, -1, -0.001, 10**400])
def test_a_wait_for_space_must_be_finite_and_not_negative(bench: Bench, strange: float) -> None:
    with pytest.raises(
        ValueError, match="wait_for_room_s must be a finite number of seconds, 0 or more, got"
    ):
        bench.store.acquire(WANTED, wait_for_room_s=strange)
    assert bench.store.stats()["leases"] == 0


@pytest.mark.parametrize("strange", ["1", True, None, 1j, [1.0]])
def test_a_wait_for_space_must_be_a_number(bench: Bench, strange: Any) -> None:
    with pytest.raises(TypeError, match="wait_for_room_s must be a number of seconds, got"):
        bench.store.acquire(WANTED, wait_for_room_s=strange)


def test_an_engine_that_owns_hbm_never_waits_for_space() -> None:
    engine: Engine = page_major()
    bench = open_bench(tiers(8, 4, hbm_more={"owner": "engine"}), SPEC)
    bench.store.register(engine.pages)
    engine.fill(0, WANTED[0])
    bench.store.put(WANTED[:1], [0])
    assert bench.store.drain(PATIENCE_S)
    with bench.store.acquire(WANTED, into=[1, 2, 3], wait_for_room_s=FOR_EVER_S) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.missing_because == "not_found"
        assert engine.holds(1, WANTED[0])
    bench.close()


def test_every_lookup_finds_all_pages_while_hbm_is_full_of_unsaved_ones(tmp_path: Path) -> None:
    """Regression test for issue 20: 4 of 11 lookups found only 18 or 19 of 20 stored pages."""
    with TierStore.open(tiers(24, 64, tmp_path), SPEC) as store:
        for turn in range(11):
            wanted, others = chain(20, f"wanted{turn}"), chain(24, f"other{turn}")
            for keys in (wanted, others):
                for start in range(0, len(keys), 4):
                    write(store, keys[start : start + 4])
            with store.acquire(wanted, wait_for_room_s=PATIENCE_S) as lease:
                assert (lease.num_pages, lease.missing_because) == (20, None)
                assert lease.wait(PATIENCE_S) is LeaseState.READY
                require_right(store, lease)
            store.evict([*wanted, *others])
