"""Clients whose engine owns HBM: the store copies pages from and to the engine's slots, and returns every slot."""

from __future__ import annotations

import random
from pathlib import Path

from tests.soak.account import Account, WrongBytes
from tests.soak.faults import Trouble
from tests.soak.own import DOCUMENTS, SECRETS
from tests.soak.waiting import losing, wait_final, wait_idle
from tests.support.bench import Bench, open_bench
from tests.support.engine import ENGINES, SLOTS
from tests.support.pages import SPEC, tiers
from tierstore.types import LeaseState, PageKey, Tier


class EngineClient:
    """Acts in one thread, as engines do. ``_free`` contains the slots that the store is not currently using."""

    threads = 1

    def __init__(self, home: Path, seed: int, account: Account) -> None:
        config = tiers(
            SLOTS, 10, home, nvme_pages=40, hbm_more={"owner": "engine"}, nvme_more={"payload": "extents"}
        )
        self.bench: Bench = open_bench(config, SPEC, pump=True, spill=True)
        self.trouble: Trouble | None = None
        self._store = self.bench.store
        self._account = account
        self._engine = ENGINES[seed % len(ENGINES)]()
        self._free = list(range(SLOTS))
        self._in_doubt: set[int] = set()
        """Slots of leases that were released before they were READY or FAILED."""
        self._store.register(self._engine.pages)

    def read_back(self) -> int:
        """Read all pages that earlier processes left. Returns the number of pages served."""
        for keys in SECRETS:
            if any(self._store.match([key]).num_pages for key in keys):
                raise WrongBytes("a memory-only page is offered after a restart")
        served = 0
        for keys in DOCUMENTS:
            for start in range(0, len(keys), SLOTS):
                served += self._load(keys[start : start + SLOTS], None)
        return served

    def plant(self) -> None:
        """Raise an error, because this kind of client cannot plant a wrong byte."""
        raise NotImplementedError

    def hand(self, seed: str) -> random.Random:
        """Return the random number generator of a thread."""
        return random.Random(seed)

    def act(self, chance: random.Random) -> None:
        """Do one random action of an engine."""
        self._take_back()
        keys: list[PageKey] = chance.choice(DOCUMENTS if chance.random() < 0.8 else SECRETS)
        keys = keys[: chance.randint(1, max(1, len(self._free)))]
        dice = chance.random()
        name = (
            "put"
            if dice < 0.4
            else "load"
            if dice < 0.8
            else "load in part"
            if dice < 0.85
            else "demote, evict"
        )
        self._account.count("actions", f"engine: {name}")
        if name == "demote, evict":
            self._store.demote(keys, chance.choice([Tier.HOST, Tier.NVME]))
            self._store.evict(keys[chance.randint(0, 3) :], chance.choice([None, Tier.HOST, Tier.NVME]))
        elif len(self._free) < len(keys):
            self._wait_for_all()
        elif name == "put":
            self._put(keys)
        elif name == "load":
            self._load(keys, chance.choice([None, None, 0.01]))
        else:
            self._give_up_a_load(keys)

    def rest(self, chance: random.Random) -> None:
        """Do nothing, because a thread keeps no lease between two actions."""

    def finish(self) -> None:
        """Check that the store returns every slot, unless acks were lost."""
        self._store.check()
        if not losing(self.trouble):
            self._wait_for_all()
            assert sorted(self._free) == list(range(SLOTS)), (
                f"the store returned only these slots: {sorted(self._free)}"
            )
            self._store.check()

    def _put(self, keys: list[PageKey]) -> None:
        slots = [self._free.pop() for _ in keys]
        for key, slot in zip(keys, slots, strict=True):
            self._engine.fill(slot, key)
        self._store.put(keys, slots, memory_only=keys[0] in {chain[0] for chain in SECRETS})

    def _load(self, keys: list[PageKey], deadline_s: float | None) -> int:
        slots = [self._free.pop() for _ in keys]
        with self._store.acquire(keys, deadline_s, into=slots) as lease:
            if wait_final(lease, self.trouble) is LeaseState.PENDING:
                self._in_doubt.update(slots)
                return 0
            for key, slot in zip(keys, lease.slots, strict=False):
                if not self._engine.holds(slot, key):
                    raise WrongBytes(f"wrong bytes in page {key.hex()}")
            served = lease.num_pages
        self._account.count("pages", "checked", served)
        self._free += slots
        return served

    def _give_up_a_load(self, keys: list[PageKey]) -> None:
        slots = [self._free.pop() for _ in keys]
        self._store.acquire(keys, into=slots).release()
        self._in_doubt.update(slots)

    def _take_back(self) -> None:
        """Take back the slots that no copy uses any more, according to the store."""
        came = self._store.poll()
        self._in_doubt.difference_update(came)
        self._free += came

    def _wait_for_all(self) -> None:
        """Wait until nothing is in flight, and take back all slots.

        If acks are lost, take back only the slots that the store returns.
        """
        idle = wait_idle(self._store, self.trouble)
        self._take_back()
        if idle:
            self._free += sorted(self._in_doubt)
            self._in_doubt.clear()
