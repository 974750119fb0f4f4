"""The kill campaign on a whole store: HBM on the CPU, host memory and the NVMe tier. See ``tier_level``.

Each number in the ledger stands for a sequence of one to six pages. The content of a sequence never changes, so every
version is 1.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from tests.campaign import tier_level
from tests.campaign.children import Say, heard_warnings
from tests.campaign.turns import Look, Subject, Turn, disk_nbytes
from tests.support.pages import PATIENCE_S, chain, read, read_soon, require_nothing_held
from tests.support.pages import fill as fill_pages
from tierstore.config import load_config
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import PageKey, Tier

SPACE = 120
_HBM, _HOST = 8, 12
_STRICT = 0.5
"""Fraction of the disk's budget that a victim uses, unless it is greedy. It is so low that the disk never evicts."""


def spec(subject: Subject) -> PageSpec:
    """Return a spec for pages of about the same size as the subject's."""
    heads = max(1, subject.page_nbytes // 4096)
    return PageSpec(
        num_layers=2, page_size=16, num_kv_heads=heads, head_dim=32, dtype="float16", model="campaign"
    )


def sequence(number: int) -> list[PageKey]:
    """Return the keys of the sequence with this number."""
    return chain(number % 6 + 1, f"campaign{number}")


def act(say: Say, turn: Turn) -> None:
    """Put, read, evict, demote and flush until killed. Sends the same lines as ``tier_level.act``."""
    say("begin")
    victim = _Victim(say, turn)
    say("open")
    while True:
        victim.step()


class _Victim:
    def __init__(self, say: Say, turn: Turn) -> None:
        self._say, self._turn, self._spec = say, turn, spec(turn.subject)
        self._chance = random.Random(turn.seed)
        capacity = turn.capacity * 3 if turn.plant == "greedy disk" else turn.capacity
        self._store = _open(turn, capacity)
        nvme = self._store.stats()["nvme"]
        assert isinstance(nvme, dict)
        self._most = int(_STRICT * nvme["budget_nbytes"] / nvme["record_nbytes"])
        kept = sorted(n for n in turn.there if self._store.match(sequence(n)).num_pages == n % 6 + 1)
        self._live = set(kept)
        self._flushed: set[int] = set(kept)
        self._named = 0

    def step(self) -> None:
        dice = self._chance.random()
        if dice < 0.5:
            self._put(self._chance.randrange(SPACE))
        elif dice < 0.62:
            self._evict(self._some(2))
        elif dice < 0.8:
            self._read(self._some(1))
        elif dice < 0.85:
            for number in self._some(1):
                self._store.demote(sequence(number), self._chance.choice([Tier.HOST, Tier.NVME]))
        else:
            self._flush()

    def _put(self, number: int) -> None:
        if not self._turn.greedy:
            others = self._chance.sample(sorted(self._live - {number}), len(self._live - {number}))
            while sum(n % 6 + 1 for n in {*self._live, number}) > self._most and others:
                self._evict([others.pop()])
        self._say(f"write 1 {number}")
        keys = sequence(number)
        slots = self._store.allocate(len(keys), PATIENCE_S)
        fill_pages(self._store, keys[::-1] if self._turn.plant == "stale" else keys, slots, self._spec)
        self._store.put(keys, slots)
        self._named += 1
        self._live.add(number)

    def _evict(self, numbers: list[int]) -> None:
        for number in numbers:
            self._say(f"erase {number}")
            self._store.evict(sequence(number))
            self._named += 1
            self._live.discard(number)
            self._flushed.discard(number)

    def _read(self, numbers: list[int]) -> None:
        for number in numbers:
            try:
                served = read(self._store, sequence(number), self._spec)
            except AssertionError:
                self._say(f"fault wrong bytes in sequence {number} of the running store")
                continue
            matched = self._store.match(sequence(number)).num_pages
            if number in self._flushed and not self._turn.greedy and matched < number % 6 + 1:
                self._say(f"fault {matched} pages match of flushed sequence {number}, {served} were served")

    def _flush(self) -> None:
        if self._turn.plant != "early":
            self._store.flush()
        self._flushed = set(self._live)
        self._say(f"synced {self._named}")

    def _some(self, count: int) -> list[int]:
        return self._chance.sample(sorted(self._live), min(count, len(self._live)))


def look(say: Say, turn: Turn, allowed: dict[int, set[int | None]], history: dict[int, set[int]]) -> None:
    """Open the directory that the victim left, read every sequence, and send a ``Look``."""
    faults, before = [], list(turn.home.glob("*.damaged-*"))
    with heard_warnings() as warnings:
        store = _open(turn, turn.capacity)
    if before or any(turn.home.glob("*.damaged-*")):
        faults.append(
            f"the directory was set aside {'by the victim' if before else 'after the kill'}: {warnings}"
        )
    own = spec(turn.subject)
    there, pages = {}, 0
    for number in range(SPACE):
        served = _read_back(store, own, number, allowed.get(number, {None}), faults)
        pages += served
        if served == len(sequence(number)):
            there[number] = 1
        else:
            store.evict(sequence(number))
    store.flush()
    require_nothing_held(store)
    store.close()
    found = Look(
        there=there,
        faults=faults,
        pages=pages,
        nbytes=pages * own.page_nbytes,
        capacity=turn.capacity,
        disk_nbytes=disk_nbytes(turn.home),
    )
    say(found.line())


def _read_back(store: TierStore, own: PageSpec, number: int, may: set[int | None], faults: list[str]) -> int:
    """Return how many pages of a sequence are served. Add a description of each error to ``faults``."""
    keys = sequence(number)
    matched = store.match(keys).num_pages
    try:
        served = read_soon(store, keys, own)
    except AssertionError:
        faults.append(f"wrong bytes in sequence {number}")
        return 0
    if served != matched:
        faults.append(f"sequence {number}: {matched} pages match, but {served} are served")
    if matched and may == {None}:
        faults.append(f"sequence {number} was evicted, but {matched} of its pages match")
    if matched < len(keys) and None not in may:
        faults.append(f"only {matched} of {len(keys)} pages of sequence {number} match")
    return served


def fill(say: Say, subject: Subject, home: Path, capacity: int, payload: str) -> None:
    """Do the same as ``tier_level.fill``, in the directory of the store."""
    own = spec(subject)
    plain = replace(subject, page_nbytes=own.page_nbytes, fingerprint=own.fingerprint)
    tier_level.fill(say, plain, home, capacity, payload)


def _open(turn: Turn, capacity: int) -> TierStore:
    own = spec(turn.subject)
    nvme = {
        "path": turn.home,
        "capacity": capacity,
        "flush": "10ms",
        "payload": turn.payload,
        "codec": turn.subject.codec,
    }
    memory = {"hbm": {"capacity": _HBM * own.page_nbytes, "device": "cpu"}}
    host = {"host": {"capacity": _HOST * own.page_nbytes, "pin": "never"}}
    return TierStore.open(load_config({**memory, **host, "nvme": nvme}), own)
