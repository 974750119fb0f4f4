"""Tests of the traffic that a store reports: transferred pages, pages in flight, and whether the store is idle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import PATIENCE_S, SPEC, chain, tiers, write, write_down
from tests.support.stalls import DOWN, IN, UP
from tierstore.errors import StoreClosed
from tierstore.store import TierStore
from tierstore.types import Tier, Traffic


def test_an_edge_reports_pages_in_flight_and_pages_that_arrived(bench: Bench) -> None:
    assert bench.store.traffic() == {}
    write_down(bench.store, chain(3), Tier.HOST)
    bench.copies.hold(IN)
    with bench.store.acquire(chain(3)) as lease:
        assert bench.store.traffic()[IN] == Traffic(in_flight=3, arrived=0)
        bench.open_gates()
        lease.wait(PATIENCE_S)
    assert bench.store.traffic()[IN] == Traffic(in_flight=0, arrived=3)


def test_pages_in_flight_to_a_tier_are_counted_until_they_can_be_read_there(bench: Bench) -> None:
    keys = chain(3)
    write_down(bench.store, keys, Tier.NVME)
    bench.records.hold(UP)
    with bench.store.acquire(keys[:2]) as lease:
        assert bench.store.arriving([*keys, *chain(2, "elsewhere")], Tier.HOST) == 2
        assert bench.store.arriving(keys[1:], Tier.HOST) == 1
        assert bench.store.arriving(keys, Tier.NVME) == 0
        assert bench.store.arriving(keys, Tier.REMOTE) == 0
        bench.open_gates()
        lease.wait(PATIENCE_S)
        assert bench.store.arriving(keys, Tier.HOST) == 0


def test_an_invalid_tier_is_refused(store: TierStore) -> None:
    with pytest.raises(ValueError, match="pages on their way to 'HOST'; choose one of HBM, HOST"):
        store.arriving(chain(1), "HOST")  # type: ignore[arg-type]


def test_a_store_is_idle_once_nothing_moves(bench: Bench) -> None:
    assert bench.store.idle()
    write(bench.store, chain(2))
    assert not bench.store.idle(), "the pages are being copied to HOST"
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.store.demote(chain(2), Tier.NVME)
    assert not bench.store.idle()
    bench.open_gates()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.idle()


def test_a_store_that_waits_for_an_event_is_not_idle(bench: Bench) -> None:
    event = ManualEvent()
    bench.store.free(bench.store.allocate(1), after=event)
    assert not bench.store.idle()
    event.happen()
    assert not bench.store.idle(), "idle() must not process the event"
    bench.store.poll()
    assert bench.store.idle()


def test_a_store_whose_pages_wait_for_the_next_spill_is_not_idle(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 8, tmp_path), SPEC)  # without timed spills
    write(bench.store, chain(1))
    assert bench.store.drain(PATIENCE_S)
    assert not bench.store.idle()
    bench.directory.writeback._next_spill = 0.0  # the next spill is due
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.idle()
    bench.close()


@pytest.mark.parametrize("ask", [TierStore.idle, TierStore.traffic, lambda s: s.arriving([], Tier.HOST)])
def test_traffic_queries_of_a_closed_store_raise(ask: Callable[[TierStore], object]) -> None:
    store = TierStore.open(tiers(2, 2), SPEC)
    store.close()
    with pytest.raises(StoreClosed):
        ask(store)
