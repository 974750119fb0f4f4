"""Tests of promote: which pages it loads early, which pages it may evict, and when it starts nothing.

Also tests how promoted pages are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    read,
    require_nothing_held,
    tiers,
    where,
    write,
)
from tests.support.stalls import IN
from tierstore.errors import StoreClosed
from tierstore.store import TierStore
from tierstore.types import Hint, HintResult, PageKey, Tier

UP = (Tier.NVME, Tier.HOST)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=8, nvme=tmp_path), SPEC)
    bench.store.take_hints()
    yield bench
    bench.open_gates()
    bench.store.check()
    require_nothing_held(bench.store)
    bench.close()


def stored(store: TierStore, name: str, length: int, tier: Tier = Tier.NVME) -> list[PageKey]:
    """Write a sequence, and demote it, so that ``tier`` is the fastest tier that contains it. Return its keys."""
    keys = chain(length, name)
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(PATIENCE_S)
    for key in keys:
        assert min(where(store, key)) == tier
    return keys


def others_pass_through(store: TierStore) -> None:
    """Put and flush more pages than HBM holds, one after the other."""
    for name in "abcde":
        write(store, chain(1, name))
        store.flush()


def need(
    store: TierStore, name: str, keys: list[PageKey], revision: int = 1, deadline_s: float | None = None
) -> Hint:
    hint = Hint(name, revision, tuple(keys), deadline_s=deadline_s)
    assert store.hint(hint) is HintResult.DEFERRED
    return hint


def test_pages_are_promoted_one_tier_at_a_time_and_unchanged(store: TierStore) -> None:
    keys = stored(store, "a", 2)
    hint = need(store, "r", keys)
    assert store.promote(hint, keys, Tier.HBM).keys == ()
    assert store.promote(hint, keys, Tier.HOST).keys == tuple(keys)
    assert store.drain(PATIENCE_S)
    assert store.promote(hint, keys, Tier.HBM).keys == tuple(keys)
    assert store.drain(PATIENCE_S)
    assert store.match(keys).tiers == (Tier.HBM, Tier.HBM)
    assert read(store, keys) == 2
    assert counter(store, "hits_pages", "HBM") == 2
    assert counter(store, "prefetch_bytes", "useful") == 2 * SPEC.page_nbytes


def test_pages_in_the_tier_or_in_flight_are_not_promoted_again(bench: Bench) -> None:
    store, keys = bench.store, stored(bench.store, "a", 2, Tier.HOST)
    hint = need(store, "r", keys)
    bench.copies.hold(IN)
    assert store.promote(hint, keys[:1], Tier.HBM).keys == tuple(keys[:1])
    again = store.promote(hint, keys, Tier.HBM)
    assert again.keys == tuple(keys[1:])
    assert again.covered == 2
    assert again.in_flight == 2
    bench.open_gates()
    assert store.drain(PATIENCE_S)
    assert store.promote(hint, keys, Tier.HBM).in_flight == 0


@pytest.mark.parametrize(
    "newer", [Hint("r", 2, ()), Hint("r", 2, tuple(chain(1, "z"))), Hint("r", 2, tuple(chain(1)), "retain")]
)
def test_nothing_starts_for_a_hint_that_was_withdrawn_or_replaced(store: TierStore, newer: Hint) -> None:
    keys = stored(store, "a", 2, Tier.HOST)
    hint = need(store, "r", keys)
    store.hint(newer)
    found = store.promote(hint, keys, Tier.HBM)
    assert (found.keys, found.in_force) == ((), False)
    assert store.match(keys).tiers == (Tier.HOST, Tier.HOST)


def test_nothing_starts_for_an_unknown_hint(store: TierStore) -> None:
    keys = stored(store, "a", 1, Tier.HOST)
    assert not store.promote(Hint("r", 1, tuple(keys)), keys, Tier.HBM).in_force
    store.hint(Hint("s", 1, tuple(keys), "retain"))
    assert not store.promote(Hint("s", 1, tuple(keys)), keys, Tier.HBM).in_force


def test_nothing_starts_once_a_hint_has_expired(store: TierStore) -> None:
    keys = stored(store, "a", 1, Tier.HOST)
    hint = Hint("r", 1, tuple(keys), ttl_s=0.0)
    store.hint(hint)
    store.poll()
    assert not store.promote(hint, keys, Tier.HBM).in_force


def test_a_promotion_displaces_pages_without_a_hint_but_no_kept_or_leased_ones(
    store: TierStore,
) -> None:
    keys = stored(store, "a", 3, Tier.HOST)
    stays = chain(1, "stays")
    write(store, stays)
    store.hint(Hint("session", 1, tuple(stays), "retain"))
    held = chain(1, "held")
    write(store, held)
    assert store.drain(PATIENCE_S)
    with store.acquire(held) as lease:
        found = store.promote(need(store, "r", keys), keys, Tier.HBM)
        assert (found.keys, found.covered) == (tuple(keys[:2]), 2)
        assert store.drain(PATIENCE_S)
        assert lease.num_pages == 1
    assert store.match(stays).tiers == (Tier.HBM,)


def test_promoted_pages_make_space_for_another_hint_only_if_it_may_displace_them(
    store: TierStore,
) -> None:
    later, sooner = stored(store, "later", 2, Tier.HOST), stored(store, "sooner", 2, Tier.HOST)
    taken = store.allocate(2)
    first = need(store, "later", later, deadline_s=50.0)
    assert store.promote(first, later, Tier.HBM).keys == tuple(later)
    assert store.drain(PATIENCE_S)
    second = need(store, "sooner", sooner, deadline_s=5.0)
    assert store.promote(second, sooner, Tier.HBM).keys == ()
    assert store.promote(second, sooner[:1], Tier.HBM, over=[first]).keys == tuple(sooner[:1])
    assert store.drain(PATIENCE_S)
    assert store.match(later).tiers == (Tier.HBM, Tier.HOST)
    store.free(taken)


def test_page_shared_by_hints_is_displaced_only_if_all_of_them_are_later(
    store: TierStore,
) -> None:
    shared, sooner = stored(store, "shared", 1, Tier.HOST), stored(store, "sooner", 1, Tier.HOST)
    own, more = stored(store, "own", 1, Tier.HOST), stored(store, "more", 1, Tier.HOST)
    taken = store.allocate(2)
    second, third = (need(store, name, shared) for name in ("second", "third"))
    fourth = need(store, "fourth", own)
    for hint, keys in ((second, shared), (third, shared), (fourth, own)):
        store.promote(hint, keys, Tier.HBM)
    assert store.drain(PATIENCE_S)
    first = need(store, "first", sooner)
    assert store.promote(first, sooner, Tier.HBM, over=[third]).keys == ()
    assert store.promote(first, sooner, Tier.HBM, over=[second]).keys == ()  # no page was evicted for nothing
    assert store.promote(first, sooner, Tier.HBM, over=[second, third, fourth]).keys == tuple(sooner)
    assert store.match(own).tiers == (Tier.HOST,)
    assert store.promote(need(store, "too", more), more, Tier.HBM, over=[second, third]).keys == tuple(more)
    assert store.match(shared).tiers == (Tier.HOST,)
    store.free(taken)


def test_page_not_in_the_next_lower_tier_ends_the_promotion(store: TierStore) -> None:
    keys = [*stored(store, "a", 1, Tier.HOST), *stored(store, "b", 1), *stored(store, "c", 1, Tier.HOST)]
    found = store.promote(need(store, "r", keys), keys, Tier.HBM)
    assert (found.keys, found.covered) == ((keys[0],), 1)
    assert store.drain(PATIENCE_S)


def test_kept_page_evicted_and_loaded_by_a_lease_is_kept_again(
    store: TierStore,
) -> None:
    keys = stored(store, "kept", 2, Tier.HOST)
    assert store.promote(need(store, "r", keys), keys, Tier.HBM).covered == 2
    assert store.drain(PATIENCE_S)
    store.evict(keys, Tier.HBM)
    assert read(store, keys) == 2
    others_pass_through(store)
    assert store.match(keys).tiers == (Tier.HBM, Tier.HBM)
    store.hint(Hint("r", 2, ()))
    others_pass_through(store)
    assert Tier.HBM not in store.match(keys).tiers


def test_a_page_that_is_kept_stays_so_when_a_retention_of_it_ends(store: TierStore) -> None:
    keys = stored(store, "kept", 2, Tier.HOST)
    store.hint(Hint("session", 1, tuple(keys), "retain"))
    assert store.promote(need(store, "r", keys), keys, Tier.HBM).covered == 2
    assert store.drain(PATIENCE_S)
    store.hint(Hint("session", 2, ()))
    others_pass_through(store)
    assert store.match(keys).tiers == (Tier.HBM, Tier.HBM)


def test_a_retained_page_stays_retained_when_no_request_expects_it(store: TierStore) -> None:
    keys = stored(store, "kept", 2, Tier.HOST)
    assert store.promote(need(store, "r", keys), keys, Tier.HBM).covered == 2
    assert store.drain(PATIENCE_S)
    store.hint(Hint("session", 1, tuple(keys), "retain"))
    store.hint(Hint("r", 2, ()))
    others_pass_through(store)
    assert store.match(keys).tiers == (Tier.HBM, Tier.HBM)


@pytest.mark.parametrize("ending", ["cancel", "time"])
def test_promoted_pages_are_ordinary_once_their_hint_has_ended(store: TierStore, ending: str) -> None:
    one, other = stored(store, "one", 2, Tier.HOST), stored(store, "other", 2, Tier.HOST)
    taken = store.allocate(2)
    hint = need(store, "r", one)
    store.promote(hint, one, Tier.HBM)
    assert store.drain(PATIENCE_S)
    second = need(store, "s", other)
    assert store.promote(second, other, Tier.HBM).keys == ()
    if ending == "cancel":
        store.hint(Hint("r", 2, ()))
    else:
        store.hint(Hint("r", 2, tuple(one), ttl_s=0.0))
    store.poll()
    assert store.promote(second, other, Tier.HBM).keys == tuple(other)
    assert store.drain(PATIENCE_S)
    assert counter(store, "prefetch_bytes", "cancelled") == 2 * SPEC.page_nbytes
    store.free(taken)


def test_a_page_that_two_hints_need_is_kept_until_both_have_ended(store: TierStore) -> None:
    shared, other = stored(store, "shared", 1, Tier.HOST), stored(store, "other", 1, Tier.HOST)
    taken = store.allocate(3)
    for name in "ab":
        store.promote(need(store, name, shared), shared, Tier.HBM)
    assert store.drain(PATIENCE_S)
    third = need(store, "c", other)
    for name in "ab":
        assert store.promote(third, other, Tier.HBM).keys == ()
        store.hint(Hint(name, 2, ()))
    assert store.promote(third, other, Tier.HBM).keys == tuple(other)
    assert store.drain(PATIENCE_S)
    store.free(taken)


def test_host_slot_a_page_passed_through_is_free_for_the_next(tmp_path: Path) -> None:
    bench = open_bench(tiers(hbm=8, host=2, nvme=tmp_path), SPEC)
    store = bench.store
    store.take_hints()
    keys = [key for name in "abc" for key in stored(store, name, 2)]
    hint = need(store, "r", keys)
    for start in (0, 2, 4):
        piece = keys[start : start + 2]
        assert store.promote(hint, piece, Tier.HOST).keys == tuple(piece)
        assert store.drain(PATIENCE_S)
        assert store.promote(hint, piece, Tier.HBM).keys == tuple(piece)
        assert store.drain(PATIENCE_S)
    assert [min(where(store, key)) for key in keys] == [Tier.HBM] * 6
    bench.close()


def test_nothing_starts_while_a_lease_waits_for_pages_on_the_same_edge(bench: Bench) -> None:
    store = bench.store
    asked, expected = stored(store, "asked", 1, Tier.HOST), stored(store, "expected", 1, Tier.HOST)
    hint = need(store, "r", expected)
    bench.copies.hold(IN)
    with store.acquire(asked):
        assert store.promote(hint, expected, Tier.HBM).keys == ()
        bench.open_gates()
        assert store.drain(PATIENCE_S)
        assert store.promote(hint, expected, Tier.HBM).keys == tuple(expected)


def test_a_lease_takes_over_pages_in_flight_which_count_as_late(bench: Bench) -> None:
    store, keys = bench.store, stored(bench.store, "a", 2, Tier.HOST)
    bench.copies.hold(IN)
    store.promote(need(store, "r", keys), keys, Tier.HBM)
    with store.acquire(keys) as lease:
        store.hint(Hint("r", 2, ()))
        bench.open_gates()
        lease.wait(PATIENCE_S)
        assert lease.num_pages == 2
    assert read(store, keys) == 2
    assert counter(store, "prefetch_bytes", "late") == 2 * SPEC.page_nbytes
    assert counter(store, "prefetch_bytes", "useful") == 0


def test_promoted_pages_evicted_unused_during_their_hint_count_as_wasted(store: TierStore) -> None:
    keys = stored(store, "a", 2, Tier.HOST)
    store.promote(need(store, "r", keys), keys, Tier.HBM)
    assert store.drain(PATIENCE_S)
    store.evict(keys, Tier.HBM)
    assert counter(store, "prefetch_bytes", "wasted") == 2 * SPEC.page_nbytes


def avoided(store: TierStore) -> float:
    return counter(store, "prefetch_avoided_seconds", "total")


def know_rates(bench: Bench, **rates: float) -> None:
    """Set the throughput of edges in bytes per second, in place of the measured values."""
    for edge, rate in rates.items():
        src, dst = edge.split("_")
        bench.directory.transfers.rates[Tier[src], Tier[dst]] = rate


def test_a_lease_reports_how_much_load_time_it_avoided(bench: Bench) -> None:
    """A promotion to HBM saves the longer of the read from disk and the load. A promotion to HOST saves the read."""
    store, loaded, waits = bench.store, stored(bench.store, "a", 1), stored(bench.store, "b", 1)
    hint = need(store, "r", [*loaded, *waits])
    store.promote(hint, loaded, Tier.HOST)
    store.promote(hint, waits, Tier.HOST)
    assert store.drain(PATIENCE_S)
    store.promote(hint, loaded, Tier.HBM)
    assert store.drain(PATIENCE_S)
    know_rates(bench, NVME_HOST=SPEC.page_nbytes / 8.0, HOST_HBM=SPEC.page_nbytes / 2.0)
    with store.acquire(loaded):
        assert avoided(store) == 8.0
    bench.copies.hold(IN)
    with store.acquire(waits):
        assert avoided(store) == 16.0
        bench.open_gates()
    with store.acquire(loaded):
        assert avoided(store) == 16.0


def test_load_in_flight_avoids_no_time_but_its_finished_read_does(bench: Bench) -> None:
    store, keys, other = bench.store, stored(bench.store, "a", 1), stored(bench.store, "b", 1, Tier.HOST)
    hint = need(store, "r", [*keys, *other])
    store.promote(hint, keys, Tier.HOST)
    assert store.drain(PATIENCE_S)
    bench.copies.hold(IN)
    store.promote(hint, [*keys, *other], Tier.HBM)
    know_rates(bench, NVME_HOST=SPEC.page_nbytes / 8.0, HOST_HBM=SPEC.page_nbytes / 2.0)
    with store.acquire([*keys, *other]):
        assert counter(store, "prefetch_bytes", "late") == 2 * SPEC.page_nbytes
        assert avoided(store) == 8.0
        bench.open_gates()


def test_unpromoted_and_unused_pages_avoid_no_load_time(store: TierStore) -> None:
    keys, unused = stored(store, "a", 2, Tier.HOST), stored(store, "b", 2, Tier.HOST)
    store.promote(need(store, "r", unused), unused, Tier.HBM)
    assert store.drain(PATIENCE_S)
    store.evict(unused, Tier.HBM)
    assert read(store, keys) == 2
    assert avoided(store) == 0.0


def test_every_promoted_page_is_counted_exactly_once(store: TierStore) -> None:
    """Check that the bytes of each promoted page are counted once, as useful, late, wasted or cancelled."""
    useful, wasted, cancelled = (stored(store, name, 1, Tier.HOST) for name in ("u", "w", "c"))
    for name, keys in (("u", useful), ("w", wasted), ("c", cancelled)):
        store.promote(need(store, name, keys), keys, Tier.HBM)
        assert store.drain(PATIENCE_S)
    for _ in range(2):
        assert read(store, useful) == 1
        store.evict(wasted, Tier.HBM)
        store.hint(Hint("c", 2, ()))
        store.evict([*cancelled, *useful], Tier.HBM)
    counts = {r: counter(store, "prefetch_bytes", r) for r in ("useful", "late", "wasted", "cancelled")}
    page = SPEC.page_nbytes
    assert counts == {"useful": page, "late": 0.0, "wasted": page, "cancelled": page}


def test_staying_lists_the_pages_under_leases_and_the_retained_pages(store: TierStore) -> None:
    leased, retained, idle = chain(1, "leased"), chain(2, "retained"), chain(1, "idle")
    for keys in (leased, retained, idle):
        write(store, keys)
    store.drain(PATIENCE_S)
    store.hint(Hint("r", 1, (*retained, *chain(3, "elsewhere")), "retain"))
    with store.acquire(leased):
        assert sorted(store.staying()) == sorted([*leased, *retained])
    assert sorted(store.staying()) == sorted(retained)
    with store.acquire(retained[:1]):
        store.hint(Hint("r", 2, ()))
        assert store.staying() == retained[:1]
    assert store.staying() == []


def test_staying_includes_pages_a_lease_waits_for_or_sealed(bench: Bench) -> None:
    store, coming = bench.store, stored(bench.store, "a", 1, Tier.HOST)
    sealed = chain(1, "sealed")
    bench.copies.hold(IN)
    with store.acquire(coming) as lease:
        write(store, sealed, lease)
        assert sorted(store.staying()) == sorted([*coming, *sealed])
        bench.open_gates()


def test_page_that_fails_in_flight_is_neither_counted_nor_kept(bench: Bench) -> None:
    store, keys = bench.store, stored(bench.store, "a", 2)
    hint = need(store, "r", keys)
    bench.records.fail_next(UP, 0)
    assert store.promote(hint, keys, Tier.HOST).in_flight == 2
    assert store.drain(PATIENCE_S)
    assert store.promote(hint, keys, Tier.HOST).in_flight == 0
    assert store.match(keys).num_pages == 0


def test_wont_need_of_another_request_does_not_evict_kept_pages(
    store: TierStore,
) -> None:
    shared = stored(store, "shared", 2, Tier.HOST)
    hint = need(store, "expected", shared)
    assert store.promote(hint, shared, Tier.HBM).covered == 2
    assert store.drain(PATIENCE_S)
    write(store, chain(2, "other"))
    store.flush()
    store.hint(Hint("gone", 1, tuple(shared), "wont_need"))
    store.free(store.allocate(2))
    assert store.match(shared).tiers == (Tier.HBM,) * 2
    store.hint(Hint("expected", 2, tuple(shared), "wont_need"))
    write(store, chain(2, "more"))
    store.flush()
    store.free(store.allocate(2))
    assert Tier.HBM not in store.match(shared).tiers


def test_full_hbm_without_victims_starts_no_promotion(store: TierStore) -> None:
    expected = stored(store, "e", 2, Tier.HOST)
    hint = need(store, "r", expected)
    taken = store.allocate(4)
    assert store.promote(hint, expected, Tier.HBM).keys == ()
    store.free(taken)


def test_only_a_tier_with_one_below_can_be_promoted_to(store: TierStore) -> None:
    hint = need(store, "r", chain(1))
    with pytest.raises(ValueError, match=r"cannot promote to .*; choose one of HBM, HOST"):
        store.promote(hint, chain(1), Tier.NVME)
    with pytest.raises(ValueError, match="33 pages"):
        store.promote(hint, chain(33), Tier.HOST)
    bench = open_bench(tiers(hbm=4, host=None), SPEC)
    with pytest.raises(ValueError, match=r"cannot promote to .*; this store has no such tier"):
        bench.store.promote(hint, chain(1), Tier.HBM)
    bench.close()
    with pytest.raises(StoreClosed):
        bench.store.promote(hint, chain(1), Tier.HBM)


def test_without_host_memory_pages_are_read_directly_from_disk(tmp_path: Path) -> None:
    bench = open_bench(tiers(hbm=4, host=None, nvme=tmp_path), SPEC)
    store = bench.store
    store.take_hints()
    keys = chain(2)
    write(store, keys)
    store.flush()
    store.evict(keys, Tier.HBM)
    assert store.promote(need(store, "r", keys), keys, Tier.HBM).keys == tuple(keys)
    assert store.drain(PATIENCE_S)
    assert read(store, keys) == 2
    bench.close()


def test_a_prefetcher_that_waits_for_hints_is_woken_by_one(tmp_path: Path) -> None:
    from threading import Thread

    bench = open_bench(tiers(hbm=4, host=None), SPEC)
    store = bench.store
    store.take_hints()
    found: list[list[Hint]] = []
    thread = Thread(target=lambda: found.append(store.take_hints(timeout_s=PATIENCE_S)))
    thread.start()
    hint = need(store, "r", chain(1))
    thread.join(PATIENCE_S)
    assert found == [[hint]]
    assert store.take_hints(timeout_s=0.01) == []
    bench.close()


def test_ended_hints_leave_no_state(store: TierStore, bench: Bench) -> None:
    keys = stored(store, "a", 2, Tier.HOST)
    for revision in range(1, 200, 2):
        hint = need(store, "r", keys, revision)
        store.promote(hint, keys, Tier.HBM)
        store.hint(Hint("r", revision + 1, ()))
    assert store.drain(PATIENCE_S)
    store.poll()
    promoting = bench.directory.promotions
    assert not promoting._residency.queues.kept
    assert not promoting._keepers
    assert not bench.directory.hints._needed
