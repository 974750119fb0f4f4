"""Test the tier with the codec ``exp``: records shrink, pages stay the same, and the budget counts stored bytes."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread, current_thread
from time import sleep

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.nvme.rig import LAYOUT, Rig, blank, change, find, key, page
from tierstore.codecs import exp
from tierstore.codecs.exp import Encoder, Geometry
from tierstore.nvme import extents
from tierstore.nvme.inspection import verify
from tierstore.nvme.record_format import HEAD_NBYTES
from tierstore.page import PageLayout
from tierstore.types import Ack, Failure

pytestmark = pytest.mark.usefixtures("payload")

NBYTES = 32 << 10
NOISE = range(1000, 2000)
"""Numbers of the pages that are noise, which is stored unencoded."""


def content(number: int, version: int = 0) -> NDArray[np.uint8]:
    """Return page ``number``: normally distributed bfloat16 numbers, or noise if it is in NOISE."""
    if number in NOISE:
        return page(number, version, NBYTES)
    drawn = np.random.default_rng([number, version]).standard_normal(NBYTES // 2, dtype=np.float32)
    return (drawn.view(np.uint32) >> 16).astype("<u2").view(np.uint8)


class ExpRig(Rig):
    """A ``Rig`` with the pages of ``content``. ``at`` creates one with the codec ``exp``, ``plain`` without a codec."""

    @classmethod
    def at(cls, home: Path, capacity: int = 16 << 20) -> ExpRig:
        return cls(home, capacity=capacity, page_nbytes=NBYTES, codec="exp", layout=LAYOUT)

    @classmethod
    def plain(cls, home: Path, *, layout: PageLayout | None = LAYOUT) -> ExpRig:
        return cls(home, capacity=16 << 20, page_nbytes=NBYTES, layout=layout)

    def submit_write(self, numbers: list[int] | range, version: int = 0) -> int:  # type: ignore[override]
        transfer = self.transfer([key(n) for n in numbers])
        self.tier.submit_write(transfer, [content(n, version) for n in numbers])
        return transfer.id

    def require(self, numbers: list[int] | range, version: int = 0) -> None:
        """Assert that every page can be read and has the expected bytes."""
        ack, out = self.read(numbers)
        assert ack.ok
        for number, got in zip(numbers, out, strict=True):
            np.testing.assert_array_equal(got, content(number, version))

    def live_nbytes(self) -> int:
        found = self.tier.stats()["live_nbytes"]
        assert isinstance(found, int)
        return found


def sizes_of(ack: Ack) -> list[int]:
    return list(ack.sizes) or [ack.nbytes // ack.num_ready] * ack.num_ready


def test_each_page_takes_its_encoded_size_and_is_read_back(tmp_path: Path) -> None:
    rig = ExpRig.at(tmp_path / "home")
    numbers = [0, 1000, 1, 1001, 2]
    ack = rig.write(numbers)
    assert ack.ok
    assert ack.nbytes == sum(ack.sizes) == rig.live_nbytes()
    for number, nbytes in zip(numbers, ack.sizes, strict=True):
        assert nbytes == rig.tier.record_nbytes if number in NOISE else nbytes <= 0.8 * rig.tier.record_nbytes
    rig.require(numbers)
    stats = rig.tier.stats()
    assert (stats["codec"], stats["bytes_written"], stats["bytes_stored"]) == ("exp", 5 * NBYTES, ack.nbytes)
    rig.close()


def test_space_of_replaced_and_erased_records_is_freed(tmp_path: Path) -> None:
    rig = ExpRig.at(tmp_path / "home")
    small = rig.write(range(4)).nbytes
    large = rig.write([1000]).nbytes
    assert rig.live_nbytes() == small + large
    assert rig.write(range(4), version=1).ok
    rig.require(range(4), version=1)
    rig.erase([1000, 1001])
    assert rig.tier.sync(60.0)
    assert rig.live_nbytes() == rig.write(range(4), version=2).nbytes
    rig.erase(range(4))
    assert rig.tier.sync(60.0)
    assert rig.live_nbytes() == 0
    rig.close()


def test_reopened_tier_knows_each_records_size(tmp_path: Path) -> None:
    rig = ExpRig.at(tmp_path / "home")
    numbers = [0, 1000, 1, 2]
    sizes = dict(zip([key(n) for n in numbers], sizes_of(rig.write(numbers)), strict=True))
    rig.close()
    rig = ExpRig.at(tmp_path / "home")
    assert {found: nbytes for found, _, nbytes in rig.tier.records()} == sizes
    assert rig.live_nbytes() == sum(sizes.values())
    rig.require(numbers)
    rig.close()


def test_records_of_both_codecs_live_in_one_directory(tmp_path: Path) -> None:
    rig = ExpRig.plain(tmp_path / "home")
    assert set(sizes_of(rig.write(range(3)))) == {rig.tier.record_nbytes}
    rig.close()
    rig = ExpRig.at(tmp_path / "home")
    rig.require(range(3))
    assert rig.write(range(3, 6)).ok
    rig.require(range(6))
    rig.close()
    rig = ExpRig.plain(tmp_path / "home")
    assert rig.tier.stats()["codec"] == "none"
    rig.require(range(6))
    assert set(sizes_of(rig.write(range(2, 5), version=1))) == {rig.tier.record_nbytes}
    rig.require(range(2, 5), version=1)
    rig.require([0, 1, 5])
    rig.close()


def test_an_encoded_record_is_missing_if_the_layout_is_unknown(tmp_path: Path) -> None:
    rig = ExpRig.at(tmp_path / "home")
    assert rig.write([0, 1000]).ok
    rig.close()
    rig = ExpRig.plain(tmp_path / "home", layout=None)
    ack, _ = rig.read([0, 1000])
    assert ack.failures == ((0, Failure.INTEGRITY),)
    rig.close()


def test_any_flipped_bit_of_an_encoded_record_is_a_miss_and_found_by_verify(tmp_path: Path) -> None:
    rig = ExpRig.at(tmp_path / "home")
    numbers = range(24)
    assert rig.write(numbers).ok
    rig.close()
    out, chance = np.empty(NBYTES, dtype=np.uint8), random.Random(0)
    for number in numbers:
        length = Encoder(Geometry.of(LAYOUT)).encode(content(number), out)
        assert length is not None
        path, start = find(tmp_path / "home", out[:length].tobytes())
        at = (
            start - HEAD_NBYTES + chance.randrange(HEAD_NBYTES)
            if number % 3 == 0
            else start + chance.randrange(length)
        )
        change(path, at, bytes([path.read_bytes()[at] ^ 1 << chance.randrange(8)]))
    [verdict] = verify(tmp_path / "home")
    assert (verdict.checked, len(verdict.bad)) == (24, 24)
    rig = ExpRig.at(tmp_path / "home")
    ack, _ = rig.read(numbers)
    assert ack.failures == tuple((number, Failure.INTEGRITY) for number in numbers)
    rig.close()


def test_verify_finds_nothing_in_intact_records_of_both_codecs(tmp_path: Path) -> None:
    rig = ExpRig.at(tmp_path / "home")
    assert rig.write([0, 1000, 1]).ok
    rig.close()
    [verdict] = verify(tmp_path / "home")
    assert (verdict.checked, verdict.bad, verdict.skipped) == (3, (), None)


def test_the_budget_takes_more_pages_and_the_disk_no_more_bytes(tmp_path: Path) -> None:
    capacity = 4 << 20
    rig = ExpRig.at(tmp_path / "home", capacity)
    raw = rig.tier.budget_nbytes // rig.tier.record_nbytes
    used, stored = 0, 0
    while used + rig.tier.record_nbytes <= rig.tier.budget_nbytes:
        ack = rig.write([stored])
        assert ack.ok
        used, stored = used + ack.nbytes, stored + 1
    assert stored > 1.2 * raw
    assert rig.live_nbytes() == used
    assert rig.tier.sync(60.0)
    disk = rig.tier.stats()["disk_nbytes"]
    assert isinstance(disk, int)
    assert disk <= capacity
    rig.require(range(stored))
    rig.close()


def test_a_full_tier_with_changing_records_stays_within_its_capacity(tmp_path: Path) -> None:
    # Records of two lengths leave holes, so a write may be refused. Every page acked as written must be readable.
    capacity, chance = 4 << 20, random.Random(1)
    rig = ExpRig.at(tmp_path / "home", capacity)
    held: dict[int, int] = {}
    for number in range(400):
        number += 1000 * chance.randrange(2)
        while sum(held.values()) + rig.tier.record_nbytes > rig.tier.budget_nbytes:
            victim = chance.choice(list(held))
            del held[victim]
            rig.erase([victim])
        ack = rig.write([number])
        if ack.ok:
            held[number] = ack.nbytes
    assert rig.tier.sync(60.0)
    assert rig.live_nbytes() == sum(held.values())
    disk = rig.tier.stats()["disk_nbytes"]
    assert isinstance(disk, int)
    assert disk <= capacity
    rig.require(sorted(held))
    rig.close()


def test_sixteen_threads_get_their_own_pages_through_one_tier(tmp_path: Path) -> None:
    # F108: the writer has its own encoder, and each reader its own decoder
    rig = ExpRig.at(tmp_path / "home")
    assert rig.write(range(40)).ok
    pending: list[tuple[int, list[int], list[NDArray[np.uint8]]]] = []
    barrier = Barrier(16)

    def work(index: int) -> None:
        chance = random.Random(index)
        barrier.wait()
        for turn in range(12):
            numbers = [chance.randrange(40) for _ in range(4)]
            transfer = replace(rig.transfer([key(n) for n in numbers]), id=10_000 + 100 * index + turn)
            out = [blank(NBYTES) for _ in numbers]
            pending.append((transfer.id, numbers, out))
            rig.tier.submit_read(transfer, out)
            again = replace(rig.transfer([key(numbers[0])]), id=50_000 + 100 * index + turn)
            rig.tier.submit_write(again, [content(numbers[0])])

    threads = [Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for transfer_id, numbers, out in pending:
        assert rig.ack(transfer_id).ok
        for number, got in zip(numbers, out, strict=True):
            np.testing.assert_array_equal(got, content(number))
    rig.require(range(40))
    rig.close()


def test_encoding_requires_the_page_layout(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layout"):
        ExpRig(tmp_path / "home", page_nbytes=NBYTES, codec="exp")
    assert not (tmp_path / "home").exists()


def test_batches_of_several_chunks_are_encoded_by_several_threads_and_each_encoder_by_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, overlaps, makers = set[int](), list[int](), set[str]()

    class Watched(Encoder):
        def encode(self, page: NDArray[np.uint8], out: NDArray[np.uint8]) -> int | None:
            if id(self) in busy:
                overlaps.append(id(self))
                return None  # two threads in one zstandard context would crash the process
            busy.add(id(self))
            makers.add(current_thread().name)
            sleep(0.003)  # long enough for the work on two chunks to overlap
            try:
                return super().encode(page, out)
            finally:
                busy.discard(id(self))

    monkeypatch.setattr(exp, "Encoder", Watched)
    monkeypatch.setattr(extents, "_CHUNK_NBYTES", 4 * NBYTES)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    rig = ExpRig(
        tmp_path / "home",
        capacity=64 << 20,
        page_nbytes=NBYTES,
        payload="extents",
        codec="exp",
        layout=LAYOUT,
    )
    numbers = [*range(60), *NOISE[:20], *range(60, 100)]
    assert rig.write(numbers).ok
    assert not overlaps
    assert len(makers) > 1
    rig.require(numbers)
    rig.close()
