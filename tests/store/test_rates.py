"""Test the measured throughput per edge that ``rates`` returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, tiers, write
from tierstore.errors import StoreClosed
from tierstore.types import Tier


def test_rates_name_the_edges_that_have_carried_pages(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 4, tmp_path), SPEC)
    assert bench.store.rates() == {}
    write(bench.store, chain(2))
    bench.store.flush()
    assert bench.store.drain(PATIENCE_S)
    rates = bench.store.rates()
    assert {(Tier.HBM, Tier.HOST), (Tier.HOST, Tier.NVME)} <= rates.keys()
    assert all(rate > 0 for rate in rates.values())
    assert bench.store.stats()["bytes_per_s"] == {
        f"{s.name}->{d.name}": rate for (s, d), rate in rates.items()
    }
    bench.close()


def test_rates_of_a_closed_store_raise(tmp_path: Path) -> None:
    bench = open_bench(tiers(4, 4, tmp_path), SPEC)
    bench.close()
    with pytest.raises(StoreClosed):
        bench.store.rates()
