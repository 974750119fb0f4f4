"""Helpers for the tests of the prefetcher: a clock, and functions that store documents and run turns."""

from __future__ import annotations

from pathlib import Path

from prefetch import Compute, Prefetcher
from tests.support.pages import SPEC, chain, tiers, write
from tierstore.config import PrefetchConfig, StoreConfig
from tierstore.store import TierStore
from tierstore.types import Hint, HintResult, PageKey, Tier

UP = (Tier.NVME, Tier.HOST)
NBYTES = SPEC.page_nbytes


class Clock:
    """A clock that stands still unless the test advances it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prefetcher_of(
    store: TierStore, clock: Clock, compute: Compute | None = None, **limits: object
) -> Prefetcher:
    return Prefetcher(store, PrefetchConfig.model_validate(limits), compute, clock)


def stored(store: TierStore, name: str, length: int, tier: Tier = Tier.NVME) -> list[PageKey]:
    keys = chain(length, name)
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(60.0)
    return keys


def need(store: TierStore, name: str, keys: list[PageKey], deadline_s: float | None = None) -> None:
    assert store.hint(Hint(name, 1, tuple(keys), deadline_s=deadline_s)) is HintResult.DEFERRED


def run(prefetcher: Prefetcher, store: TierStore, clock: Clock, turns: int = 12) -> None:
    """Run turns. After each, wait until its copies have finished, and advance the clock by 0.1 s."""
    for _ in range(turns):
        prefetcher.turn(0.0)
        assert store.drain(60.0)
        clock.now += 0.1


def running(tmp_path: Path, **sections: object) -> tuple[TierStore, StoreConfig]:
    config = tiers(hbm=8, host=8, nvme=tmp_path)
    config = config.model_copy(update={"prefetch": PrefetchConfig.model_validate(sections)})
    return TierStore.open(config, SPEC), config
