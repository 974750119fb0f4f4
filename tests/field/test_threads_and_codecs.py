"""Tests that many threads can encode and check records at once, because they share no state of a codec."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.nvme.rig import Rig, key, page
from tests.support.pages import SPEC, chain, read_soon, tiers, write
from tierstore.config import load_config
from tierstore.errors import ConfigError, IntegrityError
from tierstore.nvme import record_format
from tierstore.store import TierStore
from tierstore.types import Tier

THREADS, TIMES = 16, 2400
FINGERPRINT = record_format.fingerprint_digest("a model")


def together(work: Callable[[int], int], threads: int = THREADS) -> list[int]:
    """Call ``work(i)`` on ``threads`` threads at once. Return the results in order, or raise the first error."""
    barrier = Barrier(threads)
    results: list[int | BaseException] = [0] * threads

    def run(index: int) -> None:
        barrier.wait()
        try:
            results[index] = work(index)
        except BaseException as error:  # noqa: BLE001  carried to the test's own thread
            results[index] = error

    workers = [Thread(target=run, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    found: list[int] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def record(number: int, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
    out = np.empty(record_format.record_nbytes(payload.nbytes), dtype=np.uint8)
    record_format.encode(payload, out, fingerprint=FINGERPRINT, key=key(number), parent=key(number + 1))
    return out


def test_sixteen_threads_encode_and_check_like_one() -> None:
    # F108: 16 threads encode and check 2,400 records each, of several sizes. A shared context corrupted records.
    pages = [page(number, nbytes=nbytes) for number, nbytes in enumerate((64, 512, 4096, 64 << 10))]
    alone = [record(number, payload).tobytes() for number, payload in enumerate(pages)]

    def work(index: int) -> int:
        chance, wrong = random.Random(index), 0
        for _ in range(TIMES):
            number = chance.choices(range(4), (8, 8, 4, 1))[0]
            made = record(number, pages[number])
            wrong += made.tobytes() != alone[number]
            head, payload = made[: record_format.HEAD_NBYTES], made[record_format.HEAD_NBYTES :]
            found = record_format.verify(head, payload, fingerprint=FINGERPRINT, key=key(number))
            wrong += (found.key, found.parent) != (key(number), key(number + 1))
        return wrong

    assert together(work) == [0] * THREADS


def test_broken_record_is_detected_by_any_reading_thread_and_affects_no_other() -> None:
    # F108: every second record that is checked has a flipped bit
    payload = page(1, nbytes=512)
    good = record(1, payload)
    bad = good.copy()
    bad[record_format.HEAD_NBYTES + 100] ^= 1

    def work(index: int) -> int:
        found = 0
        for _ in range(300):
            record_format.verify(
                good[: record_format.HEAD_NBYTES],
                good[record_format.HEAD_NBYTES :],
                fingerprint=FINGERPRINT,
                key=key(1),
            )
            with pytest.raises(IntegrityError):
                record_format.verify(
                    bad[: record_format.HEAD_NBYTES],
                    bad[record_format.HEAD_NBYTES :],
                    fingerprint=FINGERPRINT,
                    key=key(1),
                )
            found += 1
        return found

    assert together(work) == [300] * THREADS


def test_threads_that_submit_to_one_disk_tier_get_their_own_pages(tmp_path: Path) -> None:
    # F108: the writer and the readers have separate buffers
    pending: list[tuple[int, list[int], list[NDArray[np.uint8]]]] = []
    rig = Rig(tmp_path / "home", capacity=32 << 20)
    assert rig.write(range(128)).ok

    def work(index: int) -> int:
        chance = random.Random(index)
        for turn in range(20):
            numbers = [chance.randrange(128) for _ in range(3)]
            transfer = replace(rig.transfer([key(n) for n in numbers]), id=1000 + 20 * index + turn)
            out = [np.empty(rig.page_nbytes, dtype=np.uint8) for _ in numbers]
            pending.append((transfer.id, numbers, out))
            rig.tier.submit_read(transfer, out)
        return 20

    assert together(work) == [20] * THREADS
    for transfer_id, numbers, out in pending:
        assert rig.ack(transfer_id).ok
        for number, got in zip(numbers, out, strict=True):
            np.testing.assert_array_equal(got, page(number))
    rig.close()


def test_pages_of_many_threads_are_read_back_from_disk_unchanged(tmp_path: Path) -> None:
    # F108, in the store: HBM and HOST have space for some pages only, so that all codec paths are used
    with TierStore.open(tiers(40, 24, tmp_path, nvme_pages=400), SPEC) as store:

        def work(index: int) -> int:
            served = 0
            for turn in range(8):
                keys = chain(2, f"{index}/{turn}")
                write(store, keys)
                store.demote(keys, Tier.NVME)
                served += read_soon(store, chain(2, f"{index}/{max(0, turn - 2)}"))
            return served

        assert together(work, threads=8) == [16] * 8
        store.flush()
        store.check()


@pytest.mark.parametrize(
    ("section", "allowed", "names"),
    [
        ("host", "'none', 'fp8', .* or 'int4-64'", ("exp", "int8-zstd", "zstd")),
        ("nvme", "'none', 'exp', 'fp8', .* or 'int4-64'", ("int2", "zstd", "int8-zstd")),
    ],
)
def test_unknown_codec_is_refused(section: str, allowed: str, names: tuple[str, ...]) -> None:
    # F108
    source = {
        "host": {"capacity": "1MiB"},
        "nvme": {"path": "somewhere", "capacity": "1GiB"},
    }
    for name in names:
        source[section]["codec"] = name
        with pytest.raises(ConfigError, match=rf"{section}\.codec is '{name}', but must be {allowed}"):
            load_config(source)
