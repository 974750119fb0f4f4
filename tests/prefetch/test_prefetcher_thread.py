"""Tests of the prefetcher's thread: hints, errors, and large numbers of hints."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prefetch import Prefetcher
from tests.prefetch.rig import NBYTES, need, running, stored
from tests.support import lanes
from tests.support.bench import open_bench
from tests.support.pages import SPEC, page_tensor, same, tier_stats, tiers
from tierstore.types import Hint, LeaseState, Tier


def test_the_section_of_the_configuration_sets_its_limits(tmp_path: Path) -> None:
    store, _ = running(tmp_path, max_in_flight=3 * NBYTES, share_of_host=0.5)
    with store, Prefetcher.attach(store) as prefetcher:
        figures = prefetcher.stats()
        assert (figures["max_in_flight"], figures["share_of_host"]) == (3 * NBYTES, 0.5)


def test_its_thread_promotes_pages_and_ready_reports_when_they_are_in_hbm(tmp_path: Path) -> None:
    store, _ = running(tmp_path)
    keys = stored(store, "a", 6)

    async def wait(prefetcher: Prefetcher) -> int:
        loop = asyncio.get_running_loop()
        assert await prefetcher.ready(keys, by=loop.time()) == 0
        need(store, "r", keys, 1.0)
        return await prefetcher.ready(keys, by=loop.time() + 60.0)

    with store, Prefetcher.attach(store) as prefetcher:
        assert asyncio.run(wait(prefetcher)) == 6
        assert store.match(keys).tiers == (Tier.HBM,) * 6
        assert prefetcher.stats()["faults"] == 0


def test_a_second_prefetcher_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    store, _ = running(tmp_path / "a")
    other, _ = running(tmp_path / "b")
    keys = stored(store, "a", 4)
    with store, other, Prefetcher.attach(store) as first, Prefetcher.attach(other):
        with pytest.raises(ValueError, match="the store already has a prefetcher"):
            Prefetcher.attach(store)
        need(store, "r", keys, 1.0)

        async def wait() -> int:
            return await first.ready(keys, by=asyncio.get_running_loop().time() + 60.0)

        assert asyncio.run(wait()) == 4
        first.close()
        Prefetcher.attach(store).close()


def test_an_error_is_counted_and_logged_once_and_the_prefetcher_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = running(tmp_path)
    keys = stored(store, "a", 2)
    prefetcher = Prefetcher(store)
    turn, broken = prefetcher.turn, [True, True]

    def break_twice(timeout_s: float) -> float:
        if broken:
            broken.pop()
            raise RuntimeError("planted")
        if store.match(keys).tiers == (Tier.HBM,) * 2:
            prefetcher._closing.set()
        return turn(timeout_s)

    monkeypatch.setattr(prefetcher, "turn", break_twice)
    need(store, "r", keys)
    prefetcher._run()
    assert prefetcher.stats()["faults"] == 2
    assert [record.message for record in caplog.records] == [
        "unexpected error in the prefetcher thread, which continues (logged once)"
    ]
    store.close()


def test_many_hints_leave_memory_and_queues_bounded_and_leases_uncut(tmp_path: Path) -> None:
    """Send thousands of hints, some of which are cancelled or expire, to a small store, and acquire leases."""
    bench = open_bench(tiers(hbm=8, host=4, nvme=tmp_path), SPEC, pump=True)
    store, directory = bench.store, bench.directory
    documents = [stored(store, name, 3) for name in "abcdef"]
    with Prefetcher.attach(store) as prefetcher:
        for number in range(lanes.examples(5_000, 100_000)):
            keys, revision = tuple(documents[number % 6]), number // 500 + 1
            need_s, ttl_s = (number % 7) / 10, 0.0 if number % 5 == 0 else None
            name = f"r{number % 500}"
            store.hint(Hint(name, revision, () if number % 3 == 0 else keys, deadline_s=need_s, ttl_s=ttl_s))
            if number % 2_000 == 0:
                with store.acquire(keys) as lease:
                    assert lease.wait(60.0) is not LeaseState.PENDING
                    assert not lease._record.cut
                    assert all(
                        same(page_tensor(store)[slot], key)
                        for key, slot in zip(keys, lease.slots, strict=False)
                    )
                assert len(prefetcher._loop.expected) <= 500
        for name in {f"r{number}" for number in range(500)}:
            store.hint(Hint(name, 1000, ()))
    assert store.drain(60.0)
    store.take_hints()
    store.poll()
    assert prefetcher.stats()["faults"] == 0
    hints, promoting = directory.hints, directory.promotions
    assert (
        len(hints._queue),
        len(hints._needed),
        len(hints.ended),
        len(promoting._kept) + len(promoting._ending),
    ) == (0, 0, 0, 0)
    assert len(hints._expiries) <= 2 * 500 + 64
    assert len(hints._revisions) == 500
    assert len(promoting._brought) <= 12
    assert len(promoting._moving) <= 12
    assert tier_stats(store, Tier.HBM)["pinned"] == 0
    bench.close()
