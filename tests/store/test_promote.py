"""promote: pages brought up ahead of need, whom they may displace, when nothing starts, and how they are counted."""

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
    """A sequence of which only the copies in ``tier`` and below are left."""
    keys = chain(length, name)
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(PATIENCE_S)
    for key in keys:
        assert min(where(store, key)) == tier
    return keys


def others_pass_through(store: TierStore) -> None:
    """More pages than HBM holds are put and saved, one after the other."""
    for name in "abcde":
        write(store, chain(1, name))
        store.flush()


def need(
    store: TierStore, name: str, keys: list[PageKey], revision: int = 1, deadline_s: float | None = None
) -> Hint:
    hint = Hint(name, revision, tuple(keys), deadline_s=deadline_s)
    assert store.hint(hint) is HintResult.DEFERRED
    return hint


def test_pages_go_up_one_tier_at_a_time_and_are_what_was_put(store: TierStore) -> None:
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


def test_what_is_there_or_on_its_way_is_not_brought_again(bench: Bench) -> None:
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


def test_nothing_starts_for_a_hint_that_nobody_gave(store: TierStore) -> None:
    keys = stored(store, "a", 1, Tier.HOST)
    assert not store.promote(Hint("r", 1, tuple(keys)), keys, Tier.HBM).in_force
    store.hint(Hint("s", 1, tuple(keys), "retain"))
    assert not store.promote(Hint("s", 1, tuple(keys)), keys, Tier.HBM).in_force


def test_nothing_starts_once_the_time_of_a_hint_has_run_out(store: TierStore) -> None:
    keys = stored(store, "a", 1, Tier.HOST)
    hint = Hint("r", 1, tuple(keys), ttl_s=0.0)
    store.hint(hint)
    store.poll()
    assert not store.promote(hint, keys, Tier.HBM).in_force


def test_a_promotion_displaces_what_nobody_announced_and_nothing_that_is_kept_or_held(
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


def test_what_was_brought_for_one_hint_makes_no_room_for_another_unless_that_is_said_to_go_first(
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


def test_a_page_that_several_later_hints_share_makes_way_and_not_where_one_of_them_is_sooner(
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
    assert store.promote(first, sooner, Tier.HBM, over=[second]).keys == ()  # nobody lost it in vain
    assert store.promote(first, sooner, Tier.HBM, over=[second, third, fourth]).keys == tuple(sooner)
    assert store.match(own).tiers == (Tier.HOST,)
    assert store.promote(need(store, "too", more), more, Tier.HBM, over=[second, third]).keys == tuple(more)
    assert store.match(shared).tiers == (Tier.HOST,)
    store.free(taken)


def test_a_page_that_is_not_right_below_ends_it(store: TierStore) -> None:
    keys = [*stored(store, "a", 1, Tier.HOST), *stored(store, "b", 1), *stored(store, "c", 1, Tier.HOST)]
    found = store.promote(need(store, "r", keys), keys, Tier.HBM)
    assert (found.keys, found.covered) == ((keys[0],), 1)
    assert store.drain(PATIENCE_S)


def test_a_page_that_left_while_it_was_kept_is_kept_again_once_a_lease_brings_it_back(
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


def test_a_page_that_is_retained_stays_so_when_nobody_expects_it_any_more(store: TierStore) -> None:
    keys = stored(store, "kept", 2, Tier.HOST)
    assert store.promote(need(store, "r", keys), keys, Tier.HBM).covered == 2
    assert store.drain(PATIENCE_S)
    store.hint(Hint("session", 1, tuple(keys), "retain"))
    store.hint(Hint("r", 2, ()))
    others_pass_through(store)
    assert store.match(keys).tiers == (Tier.HBM, Tier.HBM)


@pytest.mark.parametrize("ending", ["cancel", "time"])
def test_what_was_brought_is_as_others_once_its_hint_has_ended(store: TierStore, ending: str) -> None:
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


def test_host_memory_that_a_page_came_through_is_free_for_the_next(tmp_path: Path) -> None:
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


def test_nothing_starts_while_a_lease_waits_for_pages_on_the_same_way(bench: Bench) -> None:
    store = bench.store
    asked, expected = stored(store, "asked", 1, Tier.HOST), stored(store, "expected", 1, Tier.HOST)
    hint = need(store, "r", expected)
    bench.copies.hold(IN)
    with store.acquire(asked):
        assert store.promote(hint, expected, Tier.HBM).keys == ()
        bench.open_gates()
        assert store.drain(PATIENCE_S)
        assert store.promote(hint, expected, Tier.HBM).keys == tuple(expected)


def test_a_lease_takes_over_what_is_on_its_way_and_it_counts_as_late(bench: Bench) -> None:
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


def test_what_leaves_unused_while_its_hint_stands_is_wasted(store: TierStore) -> None:
    keys = stored(store, "a", 2, Tier.HOST)
    store.promote(need(store, "r", keys), keys, Tier.HBM)
    assert store.drain(PATIENCE_S)
    store.evict(keys, Tier.HBM)
    assert counter(store, "prefetch_bytes", "wasted") == 2 * SPEC.page_nbytes


def avoided(store: TierStore) -> float:
    return counter(store, "prefetch_avoided_seconds", "total")


def know_rates(bench: Bench, **rates: float) -> None:
    """Bytes a second of the edges from now on: transfers in between count for nothing."""
    for edge, rate in rates.items():
        src, dst = edge.split("_")
        bench.directory.transfers.rates[Tier[src], Tier[dst]] = rate


def test_a_lease_tells_how_much_load_time_was_behind_it(bench: Bench) -> None:
    """Of a page that was read and loaded the longer of the two; of one that was only read, the reading."""
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


def test_a_load_that_is_still_under_way_avoids_nothing_yet_but_the_read_before_it_did(bench: Bench) -> None:
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


def test_what_nobody_brought_or_nobody_takes_avoids_nothing(store: TierStore) -> None:
    keys, unused = stored(store, "a", 2, Tier.HOST), stored(store, "b", 2, Tier.HOST)
    store.promote(need(store, "r", unused), unused, Tier.HBM)
    assert store.drain(PATIENCE_S)
    store.evict(unused, Tier.HBM)
    assert read(store, keys) == 2
    assert avoided(store) == 0.0


def test_every_page_that_was_brought_is_counted_once_and_no_more_than_once(store: TierStore) -> None:
    """Useful, late, wasted and cancelled add up to what was brought and is not waiting to be used any more."""
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


def test_what_stays_are_the_pages_under_leases_and_those_retained(store: TierStore) -> None:
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


def test_pages_that_a_lease_waits_for_or_sealed_stay_too(bench: Bench) -> None:
    store, coming = bench.store, stored(bench.store, "a", 1, Tier.HOST)
    sealed = chain(1, "sealed")
    bench.copies.hold(IN)
    with store.acquire(coming) as lease:
        write(store, sealed, lease)
        assert sorted(store.staying()) == sorted([*coming, *sealed])
        bench.open_gates()


def test_a_page_that_breaks_on_its_way_is_not_counted_on_and_not_kept(bench: Bench) -> None:
    store, keys = bench.store, stored(bench.store, "a", 2)
    hint = need(store, "r", keys)
    bench.records.fail_next(UP, 0)
    assert store.promote(hint, keys, Tier.HOST).in_flight == 2
    assert store.drain(PATIENCE_S)
    assert store.promote(hint, keys, Tier.HOST).in_flight == 0
    assert store.match(keys).num_pages == 0


def test_what_is_kept_for_a_request_is_no_victim_because_another_has_no_use_for_it(store: TierStore) -> None:
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


def test_hbm_full_of_leased_pages_takes_nothing_and_keeps_what_it_keeps(store: TierStore) -> None:
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


def test_without_host_memory_pages_come_straight_from_disk(tmp_path: Path) -> None:
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


def test_nothing_is_remembered_of_hints_that_have_ended(store: TierStore, bench: Bench) -> None:
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
