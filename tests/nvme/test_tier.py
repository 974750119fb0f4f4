"""The tier's own promises: what was acked is there, what was erased is gone, one bad page costs one page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.nvme.rig import CAPACITY, PAGE, PATIENCE_S, Rig, blank, key, page
from tierstore.errors import ConfigError
from tierstore.types import Failure

pytestmark = pytest.mark.usefixtures("payload")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home")
    yield rig
    rig.close()


@pytest.mark.parametrize("count", [1, 2, 100])
def test_pages_come_back_as_they_were_written(rig: Rig, count: int) -> None:
    numbers = list(range(count))
    ack = rig.write(numbers)
    assert (ack.ok, ack.num_ready, ack.nbytes) == (True, count, count * rig.tier.record_nbytes)
    ack, out = rig.read(numbers)
    assert (ack.ok, ack.num_ready, ack.nbytes) == (True, count, count * PAGE)
    for number, got in zip(numbers, out, strict=True):
        np.testing.assert_array_equal(got, page(number))


def test_a_transfer_larger_than_a_batch_is_acked_once_when_all_of_it_is_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home", capacity=16 << 20)
    count = rig.tier.budget_nbytes // rig.tier.record_nbytes
    assert rig.write(range(count)).num_ready == count
    batches = rig.tier.stats()["batches"]
    assert isinstance(batches, int)
    assert batches > 1
    assert rig.present(range(count)) == set(range(count))
    rig.close()


@pytest.mark.parametrize("nbytes", [1, 256, 4096, 4097, 100_000])
def test_any_page_size_works(tmp_path: Path, nbytes: int) -> None:
    rig = Rig(tmp_path / "home", page_nbytes=nbytes)
    assert rig.write([0, 1]).ok
    assert rig.present([0, 1, 2]) == {0, 1}
    rig.close()
    rig = Rig(tmp_path / "home", page_nbytes=nbytes)
    assert rig.present([0, 1, 2]) == {0, 1}
    rig.close()


def test_a_missing_page_fails_alone(rig: Rig) -> None:
    rig.write([0, 2])
    ack, out = rig.read([0, 1, 2])
    assert not ack.ok
    assert ack.failures == ((1, Failure.NOT_FOUND),)
    assert (ack.num_ready, ack.nbytes) == (2, 2 * PAGE)
    np.testing.assert_array_equal(out[0], page(0))
    np.testing.assert_array_equal(out[2], page(2))


def test_erase_takes_what_was_written_before_and_spares_what_is_written_after(rig: Rig) -> None:
    first = rig.submit_write([0, 1])
    rig.erase([0, 7])
    second = rig.submit_write([2])
    rig.erase([1])
    third = rig.submit_write([1], version=1)
    assert all(rig.ack(transfer).ok for transfer in (first, second, third))
    assert rig.tier.sync(PATIENCE_S)
    assert rig.present([0, 2]) == {2}
    assert rig.present([1], version=1) == {1}


def test_a_second_write_of_a_key_replaces_the_first(rig: Rig) -> None:
    rig.write([0])
    rig.write([0], version=1)
    assert rig.present([0], version=1) == {0}
    assert rig.tier.stats()["records"] == 1


def test_records_survive_a_reopen_with_parents_and_sizes(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    assert list(rig.tier.records()) == []
    parents = [None, key(0), key(1)]
    transfer = rig.transfer([key(n) for n in range(3)], parents)
    rig.tier.submit_write(transfer, [page(n) for n in range(3)])
    assert rig.ack(transfer.id).ok
    rig.close()
    rig = Rig(tmp_path / "home")
    found = {record[0]: record[1:] for record in rig.tier.records()}
    assert found == {key(n): (parents[n], rig.tier.record_nbytes) for n in range(3)}
    assert rig.present(range(3)) == {0, 1, 2}
    rig.close()


def test_records_never_sum_to_more_than_the_budget(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home", capacity=4 << 20)
    count = (2 << 20) // rig.tier.record_nbytes
    assert rig.write(range(count)).ok
    rig.close()
    rig = Rig(tmp_path / "home", capacity=(2 << 20) + (192 << 10))
    kept = [record[0] for record in rig.tier.records()]
    assert 0 < len(kept) < count
    assert len(kept) * rig.tier.record_nbytes <= rig.tier.budget_nbytes
    assert rig.tier.sync(PATIENCE_S)
    assert rig.tier.stats()["records"] == len(kept)
    assert {key(n) for n in rig.present(range(count))} == set(kept)
    rig.close()


def test_everything_on_disk_stays_within_the_capacity_under_churn(rig: Rig) -> None:
    count = rig.tier.budget_nbytes // rig.tier.record_nbytes
    live = list(range(count))
    assert rig.write(live).ok
    following = count
    for step in range(120):
        size = 1 + step % 17
        gone, live = (
            live[:: count // size][:size],
            [n for n in live if n not in set(live[:: count // size][:size])],
        )
        rig.erase(gone)
        fresh = list(range(following, following + len(gone)))
        following += len(gone)
        assert rig.write(fresh).ok
        live += fresh
        live = live[step % 7 :] + live[: step % 7]
    assert rig.present(live) == set(live)
    used = sum(path.lstat().st_blocks * 512 for path in [rig.home, *rig.home.rglob("*")])
    assert used <= CAPACITY


def test_more_than_the_budget_is_refused_and_room_made_is_used_again(rig: Rig) -> None:
    count = CAPACITY // rig.tier.record_nbytes
    ack = rig.write(range(count))
    assert {failure for _, failure in ack.failures} == {Failure.NO_SPACE}
    assert ack.num_ready * rig.tier.record_nbytes >= rig.tier.budget_nbytes - rig.tier.record_nbytes
    assert len(rig.present(range(count))) == ack.num_ready
    rig.erase(range(50))
    assert rig.write(range(count, count + 50)).ok
    assert rig.tier.sync(PATIENCE_S)
    assert len(rig.present(range(count + 50))) == ack.num_ready
    assert rig.tier.stats()["read_only"] is False


def test_close_writes_what_is_queued_and_later_calls_are_acked_as_closed(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    write = rig.submit_write(range(100))
    rig.close()
    assert rig.ack(write).ok
    late = rig.submit_write([500])
    read, _ = rig.submit_read([0])
    rig.erase([1])
    closed = ((0, Failure.CLOSED),)
    assert rig.ack(late).failures == closed
    assert rig.ack(read).failures == closed
    assert rig.tier.sync(1.0) is False
    rig.close()
    rig = Rig(tmp_path / "home")
    assert rig.present([*range(100), 500]) == set(range(100))
    rig.close()


def test_close_settles_every_queued_read(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "home")
    rig.write(range(100))
    reads = [rig.submit_read(range(100)) for _ in range(20)]
    rig.close()
    for transfer_id, out in reads:
        ack = rig.ack(transfer_id)
        closed = {index for index, failure in ack.failures if failure is Failure.CLOSED}
        assert ack.num_ready + len(closed) == 100
        for index in set(range(100)) - closed:
            np.testing.assert_array_equal(out[index], page(index))


def test_arguments_that_cannot_be_meant_are_refused_at_once(rig: Rig) -> None:
    transfer = rig.transfer([key(0)])
    for pages in ([], [blank(PAGE - 1)], [blank().reshape(2, -1)]):
        with pytest.raises(ValueError, match=r"pages|flat"):
            rig.tier.submit_write(transfer, pages)
        with pytest.raises(ValueError, match=r"pages|flat"):
            rig.tier.submit_read(transfer, pages)


def test_two_shards_and_two_models_share_a_home_and_see_only_their_own(tmp_path: Path) -> None:
    home = tmp_path / "home"
    rigs = [Rig(home), Rig(home, shard=1), Rig(home, fingerprint="cd34")]
    for version, rig in enumerate(rigs):
        assert rig.write([version, 9], version).ok
    for version, rig in enumerate(rigs):
        assert rig.present([0, 1, 2, 9], version) == {version, 9}
        others = rig.tier.stats()["others"]
        assert isinstance(others, list)
        assert len(others) == 2
        rig.close()


def test_stats_count_what_happened(rig: Rig) -> None:
    rig.write([0, 1])
    rig.read([0, 5])
    stats = rig.tier.stats()
    assert stats["bytes_written"] == 2 * PAGE
    assert stats["bytes_read"] == PAGE
    assert stats["read_not_found"] == 1
    assert stats["records"] == 2
    assert stats["read_only"] is False
    assert isinstance(stats["disk_nbytes"], int)
    assert 2 * PAGE < stats["disk_nbytes"] <= CAPACITY


def test_the_smallest_capacity_that_opens_holds_a_page(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"nvme\.capacity must be at least (\d+) bytes .*, got 4096 bytes"
    ) as caught:
        Rig(tmp_path / "home", capacity=4096)
    least = int(str(caught.value).split("at least ")[1].split()[0])
    rig = Rig(tmp_path / "home", capacity=least)
    for number in range(20):
        assert rig.write([number]).ok
        assert rig.present([number]) == {number}
        rig.erase([number])
    rig.close()
