"""Tests that the acks of all ranks are combined into one, and so are the ranks' lists of records."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import chain
from tierstore.ranks import Disk, Ranks, merged_disk, owner
from tierstore.types import Ack, Erase, Failure, PageKey, Tier, Transfer

KEYS = tuple(chain(3))


def transfer(src: Tier = Tier.NVME, dst: Tier = Tier.HOST, number: int = 7) -> Transfer:
    return Transfer(number, KEYS, src, (0, 1, 2), dst, (3, 4, 5), 0, (None, *KEYS[:2]))


def ranks_with(command: Transfer, number: int = 2) -> Ranks:
    ranks = Ranks(number)
    ranks.records = (Tier.NVME,)
    ranks.submit(command)
    assert ranks.take() == [command]
    return ranks


def arrived(pages: int = 3, nbytes: int = 10) -> Ack:
    return Ack(7, True, pages, pages * nbytes)


def test_a_page_is_there_only_when_every_rank_has_it() -> None:
    ranks = ranks_with(transfer())
    ranks.deliver(0, [arrived()])
    assert ranks.poll() == []
    assert ranks.waiting
    ranks.deliver(1, [arrived()])
    (ack,) = ranks.poll()
    assert (ack.ok, ack.num_ready, ack.sizes, ack.failures) == (True, 3, (10, 10, 10), ())
    assert not ranks.waiting


def test_a_page_that_fails_on_one_rank_has_failed() -> None:
    ranks = ranks_with(transfer())
    ranks.deliver(1, [Ack(7, False, 2, 20, failures=((1, Failure.INTEGRITY),))])
    ranks.deliver(0, [Ack(7, False, 2, 20, failures=((1, Failure.UNAVAILABLE),))])
    (ack,) = ranks.poll()
    assert not ack.ok
    # INTEGRITY takes precedence over UNAVAILABLE, which means that the disk was not asked.
    assert ack.failures == ((1, Failure.INTEGRITY),)
    assert ack.num_ready == 2
    assert ranks.take() == []


def test_transfer_that_fails_without_page_results_fails_every_page() -> None:
    ranks = ranks_with(transfer())
    ranks.deliver(0, [Ack(7, False, 0, 0)])
    ranks.deliver(1, [arrived()])
    (ack,) = ranks.poll()
    assert [i for i, _ in ack.failures] == [0, 1, 2]


def test_records_that_only_some_ranks_could_store_are_erased_on_all() -> None:
    ranks = ranks_with(transfer(Tier.HOST, Tier.NVME))
    ranks.deliver(0, [arrived()])
    ranks.deliver(1, [Ack(7, False, 2, 20, failures=((2, Failure.NO_SPACE),))])
    assert ranks.take() == [Erase(Tier.NVME, (KEYS[2],))]


def test_a_page_no_rank_could_store_needs_no_erase() -> None:
    ranks = ranks_with(transfer(Tier.HOST, Tier.NVME))
    for rank in (0, 1):
        ranks.deliver(rank, [Ack(7, False, 2, 20, failures=((2, Failure.NO_SPACE),))])
    assert ranks.take() == []


def test_largest_record_of_all_ranks_counts() -> None:
    ranks = ranks_with(transfer(Tier.HOST, Tier.NVME))
    ranks.deliver(0, [Ack(7, True, 3, 60, sizes=(10, 20, 30))])
    ranks.deliver(1, [Ack(7, True, 3, 66, sizes=(30, 20, 16))])
    (ack,) = ranks.poll()
    assert ack.sizes == (30, 20, 30)
    assert ack.nbytes == 80


def test_pages_late_on_one_rank_settle_with_its_second_ack() -> None:
    ranks = ranks_with(transfer())
    ranks.deliver(1, [Ack(7, True, 1, 10, late=(0, 2))])
    assert ranks.poll() == []
    ranks.deliver(0, [arrived()])
    (first,) = ranks.poll()
    assert (first.ok, first.num_ready, first.late, first.failures) == (True, 1, (0, 2), ())
    ranks.deliver(1, [Ack(7, False, 1, 10, failures=((1, Failure.IO_ERROR),))])
    (second,) = ranks.poll()
    assert second.failures == ((1, Failure.IO_ERROR),)
    assert (second.num_ready, second.late) == (1, ())
    assert not ranks.waiting


def test_late_answers_of_two_ranks_are_combined() -> None:
    ranks = ranks_with(transfer())
    ranks.deliver(0, [Ack(7, True, 2, 20, late=(0,))])
    ranks.deliver(1, [Ack(7, True, 2, 20, late=(2,))])
    (first,) = ranks.poll()
    assert first.late == (0, 2)
    ranks.deliver(0, [Ack(7, True, 1, 10)])
    assert ranks.poll() == []
    ranks.deliver(1, [Ack(7, True, 1, 10)])
    (second,) = ranks.poll()
    assert second.num_ready == 2


@given(st.data())
def test_each_page_is_answered_for_exactly_once_in_any_order(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 3))
    ranks = ranks_with(transfer(), number)
    fate = st.sampled_from(["ready", "failed", "late"])
    waiting: dict[int, list[str]] = {
        r: data.draw(st.lists(fate, min_size=3, max_size=3)) for r in range(number)
    }
    good = {i for i in range(3) if all(waiting[r][i] == "ready" for r in waiting)}
    ready: set[int] = set()
    places, settled = [0, 1, 2], 0
    while waiting:
        rank = data.draw(st.sampled_from(sorted(waiting)))
        fates = waiting.pop(rank)
        late = tuple(i for i, x in enumerate(fates) if x == "late")
        failures = tuple((i, Failure.IO_ERROR) for i, x in enumerate(fates) if x == "failed")
        pages = fates.count("ready")
        ranks.deliver(rank, [Ack(7, not failures, pages, pages, failures=failures, late=late)])
        if late:
            waiting[rank] = ["failed"] * len(late)
        for ack in pickle.loads(pickle.dumps(ranks.poll())):
            failed = {i for i, _ in ack.failures}
            assert ack.num_ready + len(failed) + len(ack.late) == len(places)
            ready |= {places[i] for i in range(len(places)) if i not in failed and i not in ack.late}
            settled += ack.num_ready + len(failed)
            places = [places[i] for i in ack.late]
    assert settled == 3
    assert ready == good
    assert not ranks.waiting


def test_merged_catalogue_holds_the_records_of_every_rank() -> None:
    a, b, c = KEYS
    disk, halves = merged_disk(
        [
            Disk(100, 1000, [(a, None, 10), (b, a, 20)]),
            Disk(90, 900, [(b, a, 30), (a, None, 5), (c, b, 1)]),
        ]
    )
    assert sorted(disk.records()) == sorted([(a, None, 10), (b, a, 30)])
    assert (disk.record_nbytes, disk.budget_nbytes) == (100, 900)
    assert halves == (c,)


def test_catalogue_of_a_single_rank_is_unchanged() -> None:
    found = [(KEYS[0], None, 10), (KEYS[1], KEYS[0], 20)]
    disk, halves = merged_disk([Disk(100, 1000, found)])
    assert (list(disk.records()), halves) == (found, ())


KEY_OF_BOTH = tuple(sorted(chain(12), key=lambda key: owner(key, 2)))
"""Keys that rank 0 owns, followed by keys that rank 1 owns."""
SHARED = (KEY_OF_BOTH[0], KEY_OF_BOTH[-1], KEY_OF_BOTH[1])
"""Of two ranks with the same shards, rank 0 owns the first and the last of these keys, and rank 1 the other."""


def shared(dst: Tier, ranks: int = 2, src: Tier = Tier.NVME) -> Ranks:
    """Return ranks that store each page once per two ranks, and were sent a transfer of ``SHARED``."""
    found = Ranks(ranks, 2)
    found.records = (Tier.NVME,)
    found.submit(Transfer(7, SHARED, src, (0, 1, 2), dst, (3, 4, 5), 0, (None,) * 3))
    found.take()
    return found


def test_owners_are_the_same_everywhere_and_own_about_the_same_number_of_pages() -> None:
    assert [owner(PageKey(bytes([n]) + bytes(35)), 8) for n in (0, 1, 9, 255)] == [0, 1, 1, 7]
    keys = chain(3000)
    for replicas in (2, 3, 8):
        counts = Counter(owner(key, replicas) for key in keys)
        assert set(counts) == set(range(replicas))
        assert max(counts.values()) < 1.2 * 3000 / replicas
    assert owner(PageKey(keys[0][:-2] + b"\0\7"), 8) == owner(keys[0], 8), "the shard must not matter"


def test_a_page_is_in_memory_once_its_owner_has_it_and_in_hbm_once_all_ranks_have_it() -> None:
    memory = shared(Tier.HOST)
    memory.deliver(0, [Ack(7, True, 2, 20)])
    assert memory.poll() == []
    memory.deliver(1, [Ack(7, True, 1, 12)])
    (ack,) = memory.poll()
    assert (ack.ok, ack.num_ready, ack.sizes, ack.nbytes) == (True, 3, (10, 12, 10), 32)
    assert not memory.waiting

    hbm = shared(Tier.HBM, src=Tier.HOST)
    hbm.deliver(1, [arrived()])
    assert hbm.poll() == []
    hbm.deliver(0, [arrived()])
    (ack,) = hbm.poll()
    assert (ack.ok, ack.sizes) == (True, (10, 10, 10))


def test_a_rank_that_owns_no_page_of_a_transfer_reports_nothing() -> None:
    found = Ranks(2, 2)
    found.submit(Transfer(7, SHARED[:1], Tier.NVME, (0,), Tier.HOST, (3,), 0, (None,)))
    found.take()
    found.deliver(0, [Ack(7, True, 1, 10)])
    (ack,) = found.poll()
    assert (ack.ok, ack.sizes) == (True, (10,))
    assert not found.waiting


def test_record_that_its_owner_could_not_store_is_erased_only_if_another_stage_has_it() -> None:
    failed = Ack(7, False, 1, 10, failures=((1, Failure.NO_SPACE),))
    alone = shared(Tier.NVME, src=Tier.HOST)
    alone.deliver(0, [failed])
    alone.deliver(1, [Ack(7, True, 1, 10)])
    (ack,) = alone.poll()
    assert ack.failures == ((2, Failure.NO_SPACE),)
    assert alone.take() == []

    stages = shared(Tier.NVME, 4, src=Tier.HOST)
    for rank, found in enumerate([failed, Ack(7, True, 1, 10), Ack(7, True, 2, 20), Ack(7, True, 1, 10)]):
        assert stages.poll() == []
        stages.deliver(rank, [found])
    (ack,) = stages.poll()
    assert ack.failures == ((2, Failure.NO_SPACE),)
    assert stages.take() == [Erase(Tier.NVME, (SHARED[2],))]


def test_page_that_is_late_on_its_owner_settles_with_the_owners_second_ack() -> None:
    found = shared(Tier.HOST)
    found.deliver(0, [Ack(7, True, 1, 10, late=(1,))])
    assert found.poll() == []
    found.deliver(1, [Ack(7, True, 1, 10)])
    (first,) = found.poll()
    assert (first.ok, first.num_ready, first.late) == (True, 2, (2,))
    found.deliver(0, [Ack(7, True, 1, 10)])
    (second,) = found.poll()
    assert (second.num_ready, second.late) == (1, ())
    assert not found.waiting


@given(st.data())
def test_each_page_of_ranks_that_share_memory_is_answered_for_exactly_once(data: st.DataObject) -> None:
    replicas, stages = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 2))
    keys = tuple(chain(data.draw(st.integers(1, 6))))
    ranks = Ranks(replicas * stages, replicas)
    slots = tuple(range(len(keys)))
    ranks.submit(Transfer(7, keys, Tier.NVME, slots, Tier.HOST, slots, 0, (None,) * len(keys)))
    ranks.take()
    mine = {
        rank: [place for place, key in enumerate(keys) if owner(key, replicas) == rank % replicas]
        for rank in range(replicas * stages)
    }
    waiting = {rank: places for rank, places in mine.items() if places}
    good = set(range(len(keys)))
    ready: set[int] = set()
    failed: set[int] = set()
    places = list(range(len(keys)))
    while waiting:
        assert ranks.waiting
        rank = data.draw(st.sampled_from(sorted(waiting)))
        left = waiting.pop(rank)
        first = left == mine[rank]
        fates = [data.draw(st.sampled_from(["ready", "failed", *(["late"] if first else [])])) for _ in left]
        late = tuple(i for i, fate in enumerate(fates) if fate == "late")
        failures = tuple((i, Failure.IO_ERROR) for i, fate in enumerate(fates) if fate == "failed")
        good -= {left[i] for i, _ in failures}
        pages = fates.count("ready")
        ranks.deliver(rank, [Ack(7, not failures, pages, pages, failures=failures, late=late)])
        if late:
            waiting[rank] = [left[i] for i in late]
            mine[rank] = []  # pages are late only once
        for ack in ranks.poll():
            lost = {i for i, _ in ack.failures}
            ready |= {place for i, place in enumerate(places) if i not in lost and i not in ack.late}
            failed |= {places[i] for i in lost}
            places = [places[i] for i in ack.late]
    assert not ranks.waiting
    assert ready == good
    assert failed == set(range(len(keys))) - good


def test_records_of_ranks_that_share_memory_are_found_if_each_stage_has_them() -> None:
    mine, others = SHARED[::2], SHARED[1:2]

    def disk(keys: Sequence[PageKey], nbytes: int = 10, budget: int = 10_000) -> Disk:
        return Disk(10, budget, [(key, None, nbytes) for key in keys])

    found, halves = merged_disk([disk(mine), disk(others)], 2)
    assert {key for key, _, _ in found.records()} == set(SHARED)
    assert halves == ()

    stray, halves = merged_disk([disk([*mine, *others]), disk([])], 2)
    assert {key for key, _, _ in stray.records()} == set(mine), "a record counts only on its owner"
    assert halves == ()

    stages, halves = merged_disk([disk(mine), disk(others), disk(mine[:1]), disk(others, 14)], 2)
    assert {key: nbytes for key, _, nbytes in stages.records()} == {mine[0]: 10, others[0]: 14}
    assert halves == (mine[1],)


def test_records_of_ranks_that_share_memory_are_ordered_by_their_age_on_each_rank() -> None:
    mine = [key for key in KEY_OF_BOTH if not owner(key, 2)]
    others = [key for key in KEY_OF_BOTH if owner(key, 2)]
    disks = [Disk(10, 1000, [(key, None, 10) for key in keys]) for keys in (mine, others)]
    keys = [key for key, _, _ in merged_disk(disks, 2)[0].records()]
    assert {keys[0], keys[1]} == {mine[0], others[0]}
    assert [key for key in keys if key in mine] == mine
    assert [key for key in keys if key in others] == others
    assert {keys[-1], keys[-2]} == {mine[-1], others[-1]}


@pytest.mark.parametrize(("pages", "replicas"), [(40, 2), (1_000, 8), (20_000, 4)])
def test_space_of_ranks_that_share_memory_is_enough_for_almost_every_distribution(
    pages: int, replicas: int
) -> None:
    merged, _ = merged_disk([Disk(10, pages * 10, []) for _ in range(replicas)], replicas)
    kept = merged.budget_nbytes // 10
    assert replicas * pages // 2 <= kept < replicas * pages
    chance = random.Random(0)
    runs = 50
    tight = sum(
        max(Counter(chance.randrange(replicas) for _ in range(kept)).values()) > pages for _ in range(runs)
    )
    assert tight <= runs // 20
    full = Disk(10, pages * 10, [(key, None, 10 * pages) for key in KEY_OF_BOTH[:1]])
    assert merged_disk([full, full], 2)[0].budget_nbytes >= 10 * pages, "records that exist are kept"
