"""Fixtures: a store with space for a few pages in every tier, and a clock that stands still."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.prefetch.rig import Clock
from tests.support.bench import Bench, open_bench
from tests.support.pages import SPEC, tiers
from tierstore.store import TierStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=8, host=16, nvme=tmp_path), SPEC)
    yield bench
    bench.open_gates()
    bench.store.check()
    bench.close()


@pytest.fixture
def store(bench: Bench) -> TierStore:
    return bench.store
