"""Random walks of an engine that overwrites each of its slots as soon as the store allows this."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import lanes
from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, Engine, page_major
from tests.support.events import ManualEvent
from tests.support.pages import PATIENCE_S, SPEC, chain, tiers
from tests.support.stalls import IN, OUT
from tierstore.directory.slots import OutgoingPages
from tierstore.lease import Lease
from tierstore.types import LeaseState, PageKey, Tier

SEQUENCES = [chain(4, "a"), chain(3, "b"), [*chain(4, "a")[:2], *chain(2, "c")]]
PARENTS = {key: (keys[i - 1] if i else None) for keys in SEQUENCES for i, key in enumerate(keys)}
RUBBISH = chain(1, "rubbish")[0]


class Walk:
    """Makes random calls, chosen by a seed. ``free`` contains the slots that the engine may write at any time."""

    def __init__(self, bench: Bench, engine: Engine, seed: int) -> None:
        self.bench, self.store, self.engine = bench, bench.store, engine
        self.dice = random.Random(seed)
        self.free = set(range(SLOTS))
        self.busy: dict[int, ManualEvent | None] = {}
        self.leases: list[tuple[Lease, list[int]]] = []
        self.cleared: set[PageKey] = set()
        """Keys that were not put since the last ``clear``."""

    def act(self) -> None:
        """Make one random call, and check what must hold after it."""
        acts = [self.put, self.put, self.poll, self.poll, self.take_back, self.load, self.load, self.release]
        self.dice.choice([*acts, self.stall, self.open_gates, self.evict, self.happen, self.clear])()
        assert not any(self.store.match([key]).num_pages for key in self.cleared), "a cleared page is found"
        for lease, _ in self.leases:
            self.require_right(lease)
        self.store.check()

    def end(self) -> None:
        """End all transfers and leases. Assert that all slots are returned and that all served pages are correct."""
        self.open_gates()
        for event in self.busy.values():
            if event is not None:
                event.happen()
        while self.leases:
            assert self.leases[0][0].wait(PATIENCE_S) is not LeaseState.PENDING
            self.release()
        assert self.store.drain(PATIENCE_S)
        self.poll()
        assert self.free == set(range(SLOTS)), "the store did not return every slot"
        for keys in SEQUENCES:
            with self.store.acquire(keys, into=list(range(len(keys)))) as lease:
                assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
                self.require_right(lease)

    def put(self) -> None:
        keys = self.dice.choice(SEQUENCES)
        keys = keys[self.dice.randrange(len(keys)) :][: len(self.free)]
        if not keys:
            return
        slots = self.dice.sample(sorted(self.free), len(keys))
        for key, slot in zip(keys, slots, strict=True):
            self.engine.fill(slot, key)
        event = ManualEvent() if self.dice.random() < 0.25 else None
        self.store.put(keys, slots, after=event, parents=[PARENTS[key] for key in keys])
        self.cleared.difference_update(keys)
        self.free.difference_update(slots)
        self.busy.update(dict.fromkeys(slots, event))

    def poll(self) -> None:
        told = self.store.poll()
        # A slot that is reported twice in one call is not in ``busy`` the second time.
        assert sorted(told) == sorted(set(told) & set(self.busy)), (
            "poll returned a slot that the engine owned already"
        )
        for slot in told:
            event = self.busy.pop(slot)
            assert event is None or event.query(), "poll returned a slot before it was written"
            self.write(slot)

    def take_back(self) -> None:
        slots = self.dice.sample(sorted(self.busy), len(self.busy) // 2)
        reading = self.store.withdraw(slots)
        for slot in set(slots) - set(reading):
            del self.busy[slot]
            self.write(slot)

    def load(self) -> None:
        keys = self.dice.choice(SEQUENCES)[: len(self.free)]
        slots = self.dice.sample(sorted(self.free), len(keys))
        self.leases.append((self.store.acquire(keys, into=slots), slots))
        self.free.difference_update(slots)

    def release(self) -> None:
        for each in [x for x in self.leases if x[0].wait(0.0) is not LeaseState.PENDING]:
            self.leases.remove(each)
            each[0].release()
            for slot in each[1]:
                self.write(slot)

    def stall(self) -> None:
        self.bench.copies.hold(self.dice.choice([IN, OUT]))

    def open_gates(self) -> None:
        self.bench.open_gates()

    def evict(self) -> None:
        self.store.evict(self.dice.choice(SEQUENCES)[1:], self.dice.choice([None, Tier.HOST]))

    def clear(self) -> None:
        self.store.clear()
        self.cleared.update(PARENTS)

    def happen(self) -> None:
        for event in self.busy.values():
            if event is not None:
                event.happen()

    def write(self, slot: int) -> None:
        """Overwrite a slot that the engine owns again."""
        self.engine.fill(slot, RUBBISH)
        self.free.add(slot)

    def require_right(self, lease: Lease) -> None:
        if lease.wait(0.0) is not LeaseState.PENDING:
            keys: list[PageKey] = list(lease.keys[: lease.num_pages])
            pages = zip(keys, lease.slots, strict=True)
            assert all(self.engine.holds(slot, key) for key, slot in pages), "wrong bytes"


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Path]:
    """Return an iterator over paths of folders that do not exist yet."""
    return (tmp_path / str(number) for number in range(1000))


def walk(folders: Iterator[Path], seeds: range) -> None:
    for seed in seeds:
        walk_once(next(folders), seed)


def walk_once(folder: Path, seed: int) -> None:
    engine = page_major()
    host, nvme = (1, 2, 4, 8)[seed % 4], folder if seed % 3 else None
    bench = open_bench(tiers(SLOTS, host, nvme, hbm_more={"owner": "engine"}), SPEC)
    bench.store.register(engine.pages)
    steps = Walk(bench, engine, seed)
    try:
        for _ in range(60):
            steps.act()
        steps.end()
    finally:
        bench.open_gates()
        steps.happen()
        bench.close()


def test_engine_may_write_every_slot_once_it_is_reported(folders: Iterator[Path]) -> None:
    walk(folders, range(lanes.examples(20, 60)))


def test_walk_detects_reports_of_slots_the_engine_reused(
    folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutgoingPages, "_unreport", lambda self, slots: None)
    with pytest.raises(AssertionError, match="poll returned a slot that the engine owned already"):
        walk(folders, range(60))


def test_walk_detects_pages_in_engine_slots_that_clear_keeps(
    folders: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OutgoingPages, "forget", lambda self: [])
    with pytest.raises(AssertionError, match="a cleared page is found"):
        walk(folders, range(60))
