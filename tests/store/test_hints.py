"""Tests of hint and take_hints: valid hints, which of them act at once, and which wait for a prefetcher."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, counter, read, tier_stats, tiers, write
from tierstore.store import TierStore
from tierstore.types import Hint, HintResult, Tier


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=None), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def test_will_need_without_a_prefetcher_is_rejected(store: TierStore) -> None:
    assert store.hint(Hint("r", 1, tuple(chain(2)))) is HintResult.REJECTED
    assert counter(store, "hints", "rejected") == 1


def test_invalid_hints_and_a_single_key_in_place_of_a_list_are_refused(store: TierStore) -> None:
    with pytest.raises(TypeError, match="a hint must be a Hint"):
        store.hint("r")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a hint must be a Hint"):
        store.promote(Hint("r", 1, ()), [], Tier.HBM, over=("r",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Hint\.keys"):
        Hint("r", 1, chain(1)[0])  # type: ignore[arg-type]


def test_will_need_waits_for_an_attached_prefetcher_the_newest_revision_of_each_request(
    store: TierStore,
) -> None:
    assert store.take_hints() == []
    first, second = Hint("a", 1, tuple(chain(2))), Hint("b", 1, tuple(chain(3)))
    newer = Hint("a", 2, tuple(chain(1)), deadline_s=0.5, priority=3)
    assert [store.hint(h) for h in (first, second, newer)] == [HintResult.DEFERRED] * 3
    assert store.take_hints() == [second, newer]
    assert store.take_hints() == []


@pytest.mark.parametrize("revision", [0, 4, 5])
def test_a_revision_not_above_the_last_is_a_duplicate(store: TierStore, revision: int) -> None:
    store.take_hints()
    assert store.hint(Hint("r", 5, tuple(chain(2)))) is HintResult.DEFERRED
    assert store.hint(Hint("r", revision, ())) is HintResult.DUPLICATE
    assert [hint.revision for hint in store.take_hints()] == [5]


def test_rejected_hint_does_not_count_as_a_revision(store: TierStore) -> None:
    hint = Hint("r", 1, tuple(chain(2)))
    assert store.hint(hint) is HintResult.REJECTED
    store.take_hints()
    assert store.hint(hint) is HintResult.DEFERRED


def test_a_detached_prefetcher_leaves_no_hints_behind_and_new_ones_are_rejected(bench: Bench) -> None:
    store, hints = bench.store, bench.directory.hints
    store.take_hints()
    taken, waits = Hint("a", 1, tuple(chain(2))), Hint("b", 1, tuple(chain(3)))
    store.hint(taken)
    assert store.take_hints() == [taken]
    store.hint(waits)
    store.reject_hints()
    assert store.hint(Hint("c", 1, tuple(chain(2)))) is HintResult.REJECTED
    assert not hints.in_force(taken)
    assert not hints.in_force(waits)
    assert store.take_hints() == []
    assert store.hint(Hint("c", 1, tuple(chain(2)))) is HintResult.DEFERRED


def test_retained_pages_stay_retained_when_hints_are_rejected(bench: Bench) -> None:
    store, keys = bench.store, chain(2)
    store.take_hints()
    store.hint(Hint("r", 1, tuple(keys), "retain"))
    store.reject_hints()
    assert all(bench.directory.hints.retained(key) for key in keys)


def test_an_empty_hint_with_a_higher_revision_cancels_and_the_prefetcher_is_notified(
    store: TierStore,
) -> None:
    store.take_hints()
    store.hint(Hint("r", 1, tuple(chain(2))))
    cancel = Hint("r", 2, ())
    assert store.hint(cancel) is HintResult.APPLIED
    assert store.take_hints() == [cancel]
    assert store.hint(Hint("r", 1, tuple(chain(2)))) is HintResult.DUPLICATE


def test_wont_need_pages_are_evicted_first_and_retained_pages_last(store: TierStore) -> None:
    a, b, c, d = (chain(1, name) for name in "abcd")
    for keys in (a, b, c, d):
        write(store, keys)
    assert store.hint(Hint("r1", 1, tuple(a), "retain")) is HintResult.APPLIED
    assert store.hint(Hint("r2", 1, tuple(d), "wont_need")) is HintResult.APPLIED
    order = []
    for _ in range(4):
        store.allocate(1)
        gone = [k for k in (a, b, c, d) if store.match(k).num_pages == 0]
        order += [keys for keys in gone if keys not in order]
    assert order == [d, b, c, a]


def test_the_tail_of_pages_that_will_not_be_needed_is_evicted_before_the_head(store: TierStore) -> None:
    keys = chain(3)
    write(store, keys)
    store.hint(Hint("r", 1, tuple(keys), "wont_need"))
    for left in (2, 1, 0):
        store.allocate(1 if left < 2 else 2)
        assert store.match(keys).num_pages == left


@pytest.mark.parametrize("host", [None, 8])
def test_a_retained_page_that_was_evicted_and_loaded_again_is_evicted_last_again(
    tmp_path: Path, host: int | None
) -> None:
    bench = open_bench(tiers(4, host, tmp_path), SPEC)
    store, kept, other = bench.store, chain(2, "kept"), chain(2, "other")
    write(store, kept)
    store.hint(Hint("r", 1, tuple(kept), "retain"))
    store.free(store.allocate(4, PATIENCE_S))
    assert Tier.HBM not in store.match(kept).tiers
    assert read(store, kept) == 2
    write(store, other)
    store.flush()  # pages that are not saved yet could not be evicted at once
    slots = store.allocate(2)
    assert store.match(kept).tiers == (Tier.HBM,) * 2
    assert store.match(other).num_pages == 2
    assert Tier.HBM not in store.match(other).tiers
    store.free(slots)
    bench.close()


def test_a_retained_page_that_was_unreachable_is_evicted_last_again_once_it_is_used(store: TierStore) -> None:
    """Evict the first page, which makes the second one unreachable. Then put the first page again."""
    first, after = chain(2, "retained")
    write(store, [first, after])
    store.hint(Hint("r", 1, (first, after), "retain"))
    store.evict([first])
    store.poll()
    write(store, [first])
    with store.acquire([first, after]) as lease:
        assert lease.num_pages == 2
    for key in chain(9, "others"):
        write(store, [key])
    assert store.match([first, after]).num_pages == 2


def test_a_page_may_be_retained_before_it_is_put(store: TierStore) -> None:
    kept, other = chain(2, "kept"), chain(2, "other")
    store.hint(Hint("r", 1, tuple(kept), "retain"))
    write(store, kept)
    write(store, other)
    store.allocate(2)
    assert store.match(kept).tiers == (Tier.HBM,) * 2


def test_a_request_that_does_not_need_a_page_does_not_end_the_retention_of_another(store: TierStore) -> None:
    kept, other = chain(2, "kept"), chain(2, "other")
    write(store, kept)
    store.hint(Hint("r", 1, tuple(kept), "retain"))
    store.hint(Hint("s", 1, tuple(kept), "wont_need"))
    write(store, other)
    store.allocate(2)
    assert store.match(kept).tiers == (Tier.HBM,) * 2
    store.hint(Hint("r", 2, ()))
    store.hint(Hint("s", 2, tuple(kept), "wont_need"))
    store.allocate(2)
    assert Tier.HBM not in store.match(kept).tiers


def test_retention_ends_after_its_ttl(store: TierStore) -> None:
    old, new = chain(1, "old"), chain(1, "new")
    write(store, old)
    store.hint(Hint("r", 1, tuple(old), "retain", ttl_s=0.0))
    write(store, new)
    store.poll()
    assert store.hint(Hint("s", 1, tuple(new), "retain", ttl_s=3600.0)) is HintResult.APPLIED
    store.allocate(3)
    assert store.match(old).num_pages == 0
    assert store.match(new).num_pages == 1


def test_a_cancelled_retention_ends_at_once(store: TierStore) -> None:
    kept, other = chain(1, "kept"), chain(1, "other")
    write(store, kept)
    store.hint(Hint("r", 1, tuple(kept), "retain"))
    store.hint(Hint("r", 2, ()))
    write(store, other)
    store.hint(Hint("s", 1, tuple(other), "retain"))
    store.allocate(3)
    assert store.match(kept).num_pages == 0


def test_a_hint_never_pins(store: TierStore) -> None:
    keys = chain(4)
    write(store, keys)
    store.hint(Hint("r", 1, tuple(keys), "retain"))
    assert tier_stats(store, Tier.HBM)["pinned"] == 0
    assert len(store.allocate(4, timeout_s=0.0)) == 4


def test_hints_on_pages_in_no_tier_are_harmless(store: TierStore) -> None:
    assert store.hint(Hint("r", 1, tuple(chain(3)), "wont_need")) is HintResult.APPLIED
    assert store.hint(Hint("r", 2, tuple(chain(3)), "retain")) is HintResult.APPLIED
    assert store.match(chain(3)).num_pages == 0
