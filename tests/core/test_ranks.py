"""Tests that the acks of all ranks are combined into one, and so are the ranks' lists of records."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import chain
from tierstore.ranks import Disk, Ranks, merged_disk
from tierstore.types import Ack, Erase, Failure, Tier, Transfer

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
