"""flush and drain: what is durable, and what is over, when they return."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import Bench
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    counter,
    read_soon,
    records,
    tiers,
    where,
    write,
    write_each,
)
from tests.support.stalls import DOWN, OUT
from tierstore.store import TierStore
from tierstore.types import Tier


def test_flush_makes_every_page_durable_and_keeps_the_upper_copies(store: TierStore) -> None:
    keys = chain(4)
    write(store, keys)
    store.flush()
    assert where(store, keys[0]) == {Tier.HBM: "ready", Tier.HOST: "ready", Tier.NVME: "ready"}
    assert records(store) == 4


def test_flush_returns_when_writes_fail_and_loses_nothing(bench: Bench) -> None:
    keys = chain(4)
    write(bench.store, keys)
    assert bench.store.drain(PATIENCE_S)
    for _ in range(4):
        bench.records.fail_next(DOWN, 0, 1, 2, 3)
    bench.store.flush()
    assert bench.store.match(keys).tiers == (Tier.HBM,) * 4
    assert counter(bench.store, "failed_pages", "HOST,NVME,io_error") > 0
    bench.open_gates()
    bench.store.flush()
    assert records(bench.store) == 4


def test_flush_gives_up_on_a_disk_that_stands_still(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierstore.store._FLUSH_STALL_S", 0.2)
    write(bench.store, chain(2))
    assert bench.store.drain(PATIENCE_S)
    bench.records.hold(DOWN)
    bench.store.flush()
    assert bench.store.match(chain(2)).num_pages == 2


def test_flush_without_a_disk_returns(tmp_path: Path) -> None:
    with TierStore.open(tiers(hbm=2, host=2), SPEC) as store:
        write(store, chain(2))
        store.flush()
        assert store.match(chain(2)).num_pages == 2


def test_everything_written_is_on_disk_sooner_or_later_without_being_asked(tmp_path: Path) -> None:
    # F088: a turnover faster than the spill still leaves something useful
    with TierStore.open(tiers(hbm=4, host=8, nvme=tmp_path), SPEC) as store:
        keys = [key for i in range(30) for key in chain(2, str(i))]
        for i in range(0, 60, 2):
            write(store, keys[i : i + 2])
        assert store.match(keys[-2:]).num_pages == 2
        assert sum(read_soon(store, keys[i : i + 2]) for i in range(0, 60, 2)) == 60


def test_drain_waits_for_what_is_under_way_and_says_so(bench: Bench) -> None:
    assert bench.store.drain(0.0) is True
    bench.copies.hold(OUT)
    write(bench.store, chain(2))
    assert bench.store.drain(0.02) is False
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S) is True


def test_a_sequence_longer_than_hbm_comes_back_whole_page_by_page(store: TierStore) -> None:
    keys = chain(20)
    write_each(store, keys)
    assert store.match(keys).num_pages == 20
    for key in reversed(keys):
        assert read_soon(store, [key]) == 1
