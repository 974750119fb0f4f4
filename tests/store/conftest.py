"""Fixtures for a store with a few pages in every tier. Its invariants are checked when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.pages import SPEC, tiers
from tierstore.store import TierStore


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=4, host=8, nvme=tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


@pytest.fixture
def store(bench: Bench) -> TierStore:
    return bench.store
