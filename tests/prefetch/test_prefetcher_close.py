"""Tests of closing a prefetcher, and of closing a store that has a prefetcher."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event

import pytest

from prefetch import Prefetcher
from tests.prefetch.rig import NBYTES, Clock, need, prefetcher_of, running, stored
from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, read, tiers
from tierstore.errors import StoreClosed
from tierstore.store import TierStore
from tierstore.types import Hint, HintResult, Tier


def test_prefetcher_ends_when_the_store_closes_and_close_is_idempotent(tmp_path: Path) -> None:
    store, _ = running(tmp_path)
    prefetcher = Prefetcher.attach(store)
    store.close()
    assert prefetcher._thread is not None
    prefetcher._thread.join(PATIENCE_S)
    assert not prefetcher._thread.is_alive()
    prefetcher.close()
    prefetcher.close()
    with pytest.raises(StoreClosed):
        asyncio.run(prefetcher.ready(chain(1), by=0.0))


def test_after_closing_the_store_works_and_another_prefetcher_may_attach(tmp_path: Path) -> None:
    store, _ = running(tmp_path)
    keys = stored(store, "a", 4)
    first = Prefetcher.attach(store)
    first.close()
    assert store.hint(Hint("r", 1, tuple(keys))) is HintResult.REJECTED
    assert read(store, keys) == 4
    with Prefetcher.attach(store) as second:
        first.close()
        store.demote(keys, Tier.NVME)
        store.drain(PATIENCE_S)
        need(store, "r", keys, 1.0)

        async def wait() -> int:
            return await second.ready(keys, by=asyncio.get_running_loop().time() + 60.0)

        assert asyncio.run(wait()) == 4
    assert store.hint(Hint("r", 2, tuple(keys))) is HintResult.REJECTED
    store.close()


def test_once_its_thread_has_exited_hints_are_rejected_although_closing_did_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = running(tmp_path)
    looking, go_on = Event(), Event()
    take = store.take_hints

    def late(timeout_s: float = 0.0) -> list[Hint]:
        looking.set()
        assert go_on.wait(PATIENCE_S)
        return take(timeout_s)

    with store:
        prefetcher = Prefetcher.attach(store)
        monkeypatch.setattr(store, "take_hints", late)
        assert looking.wait(PATIENCE_S)
        prefetcher.close(timeout_s=0.0)
        go_on.set()
        assert prefetcher._thread is not None
        prefetcher._thread.join(PATIENCE_S)
        assert store.hint(Hint("r", 1, tuple(chain(1)))) is HintResult.REJECTED


def test_closing_store_starts_no_more_promotions(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the prefetcher started more copies, closing the store would wait for them."""
    bench = open_bench(tiers(hbm=8, host=16, nvme=tmp_path), SPEC)
    store, prefetcher = bench.store, prefetcher_of(bench.store, clock, max_in_flight=NBYTES)
    keys, wait_idle = stored(store, "a", 8, Tier.HOST), store._pump.wait_idle
    need(store, "r", keys)
    prefetcher.turn(0.0)
    started: list[object] = []

    def turn_meanwhile(deadline: float) -> bool:
        before = prefetcher.stats()["loaded_bytes"]
        for _ in range(3):
            prefetcher.turn(0.0)
            clock.now += 0.1
        started.append((before, prefetcher.stats()["loaded_bytes"]))
        assert store.hint(Hint("late", 1, tuple(keys))) is HintResult.REJECTED
        return wait_idle(deadline)

    monkeypatch.setattr(store._pump, "wait_idle", turn_meanwhile)
    store.close()
    assert started == [(NBYTES, NBYTES)]
    prefetcher.close()


def test_a_store_closes_with_a_running_prefetcher_that_has_much_to_do_and_its_thread_ends(
    tmp_path: Path,
) -> None:
    config = tiers(hbm=8, host=8, nvme=tmp_path)
    store = TierStore.open(config, SPEC)
    documents = [stored(store, name, 8) for name in "abcd"]
    prefetcher = Prefetcher.attach(store)
    for revision in range(1, 4):
        for number, keys in enumerate(documents):
            store.hint(Hint(f"r{number}", revision, tuple(keys), deadline_s=1.0))
    store.close()
    assert prefetcher._thread is not None
    prefetcher._thread.join(PATIENCE_S)
    assert not prefetcher._thread.is_alive()
    assert prefetcher.stats()["faults"] == 0
    prefetcher.close()
    with TierStore.open(config, SPEC) as again:
        assert [read(again, keys) for keys in documents] == [8] * 4
