"""Test the NVMe tier's guarantees: acked pages can be read, erased pages are gone, and a bad page affects no other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.nvme.rig import CAPACITY, PAGE, PATIENCE_S, PAYLOADS, Rig, blank, first_size, key, page
from tests.support import lanes
from tests.support.interrupts import interrupted_in
from tierstore.errors import ConfigError
from tierstore.nvme import tier as tier_module
from tierstore.nvme.catalogue import Catalogue
from tierstore.nvme.directory_lock import FileLock
from tierstore.nvme.extents import Sealer
from tierstore.nvme.lmdb_environment import Environment
from tierstore.nvme.reader import Readers, RecordReader
from tierstore.nvme.tombstones import Tombstones
from tierstore.nvme.writer import Writer
from tierstore.types import Failure

pytestmark = pytest.mark.usefixtures("payload")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "home")
    yield rig
    rig.close()


@pytest.mark.parametrize("count", [1, 2, 100])
def test_pages_are_read_back_as_written(rig: Rig, count: int) -> None:
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


def test_only_the_missing_page_fails(rig: Rig) -> None:
    rig.write([0, 2])
    ack, out = rig.read([0, 1, 2])
    assert not ack.ok
    assert ack.failures == ((1, Failure.NOT_FOUND),)
    assert (ack.num_ready, ack.nbytes) == (2, 2 * PAGE)
    np.testing.assert_array_equal(out[0], page(0))
    np.testing.assert_array_equal(out[2], page(2))


def test_erase_removes_earlier_writes_and_keeps_later_ones(rig: Rig) -> None:
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


def test_writes_beyond_the_budget_are_refused_and_freed_space_is_reused(rig: Rig) -> None:
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


def test_invalid_arguments_are_refused_at_once(rig: Rig) -> None:
    transfer = rig.transfer([key(0)])
    for pages in ([], [blank(PAGE - 1)], [blank().reshape(2, -1)]):
        with pytest.raises(ValueError, match=r"pages|flat"):
            rig.tier.submit_write(transfer, pages)
        with pytest.raises(ValueError, match=r"pages|flat"):
            rig.tier.submit_read(transfer, pages)


def test_two_shards_and_two_models_share_a_home_and_see_only_their_own_pages(tmp_path: Path) -> None:
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


def test_stats_count_reads_and_writes(rig: Rig) -> None:
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
        ConfigError, match=r"nvme\.capacity must be at least .* for pages of .*, got 4 KiB \(4,096 bytes\)"
    ) as caught:
        Rig(tmp_path / "home", capacity=4096)
    least = first_size(str(caught.value))
    rig = Rig(tmp_path / "home", capacity=least)
    for number in range(20):
        assert rig.write([number]).ok
        assert rig.present([number]) == {number}
        rig.erase([number])
    rig.close()


_BUSY: dict[str, tuple[type, str, Callable[..., object]]] = {
    "write": (Catalogue, "store", Writer.join),
    "read": (RecordReader, "fetch", Readers.join_until),
}
"""For each operation: the class and method in which a thread is held, and the method by which ``close`` waits."""


@pytest.mark.parametrize("busy", list(_BUSY))
def test_an_interrupted_close_leaves_open_what_a_thread_still_uses(
    tmp_path: Path, payload: str, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "home")
    assert rig.write([0]).ok
    inside, go_on = threading.Event(), threading.Event()
    owner, name, wait = _BUSY[busy]
    act = getattr(owner, name)

    def held(*args: Any) -> Any:
        inside.set()
        assert go_on.wait(PATIENCE_S)
        return act(*args)

    monkeypatch.setattr(owner, name, held)
    number = rig.submit_write([1]) if busy == "write" else rig.submit_read([0])[0]
    assert inside.wait(PATIENCE_S)
    with interrupted_in(wait):
        rig.tier.close(PATIENCE_S)
    assert not rig.tier.close(0.0)
    with pytest.raises(ConfigError, match="in use"):
        Rig(tmp_path / "home")
    go_on.set()
    rig.close()
    assert rig.ack(number).ok
    again = Rig(tmp_path / "home")
    assert again.present([0]) == {0}
    again.close()


@pytest.mark.parametrize(
    ("payload", "step", "handler"),
    lanes.some(
        product(PAYLOADS, [Sealer, Tombstones, Environment, FileLock], ["raises", "closes"]),
        lambda payload, step, handler: (payload == "lmdb") == (handler == "raises"),
    ),
    indirect=["payload"],
)
def test_a_close_that_was_interrupted_while_it_releases_the_directory_can_be_called_again(
    tmp_path: Path, step: type, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let a signal handler raise, or call ``close`` itself, before and after each step of ``close``."""
    name = "release" if step is FileLock else "close"
    act = getattr(step, name)
    for before in (True, False):
        rig = Rig(tmp_path / "home")
        assert rig.write([0]).ok
        left = [rig]

        def interrupted(part: Any, before: bool = before, left: list[Rig] = left) -> None:
            if not before:
                act(part)
            if left and handler == "raises":
                left.pop()
                raise KeyboardInterrupt
            if left:
                left.pop().close()
            if before:
                act(part)

        with monkeypatch.context() as patch:
            patch.setattr(step, name, interrupted)
            try:
                rig.close()
            except KeyboardInterrupt:
                rig.close()
        again = Rig(tmp_path / "home")
        assert again.present([0]) == {0}
        again.close()


def test_a_tier_that_cannot_be_opened_leaves_open_what_its_writer_still_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    closed: list[Catalogue] = []
    with monkeypatch.context() as patch:
        patch.setattr(tier_module, "Watchdog", refuse)
        patch.setattr(Writer, "join", lambda *_: False)  # the writer hangs
        patch.setattr(Catalogue, "close", lambda catalogue: closed.append(catalogue))
        with pytest.raises(RuntimeError, match="new thread"):
            Rig(tmp_path / "home")
    assert not closed
    with pytest.raises(ConfigError, match="in use"):
        Rig(tmp_path / "home")
