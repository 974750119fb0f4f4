"""Faults inside a client: copies and acks are late, reordered, failed or lost, and the disk is faulty."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Self
from unittest import mock

from tests.soak.account import Account
from tests.support.bench import Bench
from tests.support.stalls import IN, OUT, Gate, Lane
from tierstore.nvme.catalogue import Catalogue, Page
from tierstore.types import Tier

UP: Lane = (Tier.NVME, Tier.HOST)
LANES: list[Lane] = [OUT, IN, (Tier.HOST, Tier.NVME), UP, (Tier.HBM, Tier.NVME), (Tier.NVME, Tier.HBM)]

PROFILES: dict[str, frozenset[str]] = {
    "none": frozenset(),
    "delays": frozenset({"hold", "late"}),
    "failures": frozenset({"fail"}),
    "disk": frozenset({"read", "write"}),
    "full": frozenset({"full"}),
    "lost": frozenset({"hold", "fail", "lost"}),
    "all": frozenset({"hang", "hold", "late", "fail", "read", "write", "full"}),
}
"""The faults of each profile, by its name."""

_DELAYS_S = [0.0, 0.005, 0.02, 0.1, 0.1, 2.5]  # the last is longer than eviction.STALL_S
_DISK_FAULTS = 0.15


class Trouble:
    """A thread that injects the faults of a profile into an open store during a ``with`` block.

    The fault ``lost`` begins late in a client's run. A transfer whose ack is lost never ends, so once ``losing`` is
    True, the client must limit the time that it waits for a transfer.
    """

    def __init__(
        self, bench: Bench, home: Path, profile: str, seed: int, seconds: float, account: Account
    ) -> None:
        self.losing = False
        self._what = PROFILES[profile]
        self._bench = bench
        self._home = home
        self._account = account
        self._chance = random.Random(f"faults {seed}")
        self._disk_chance = random.Random(f"disk {seed}")
        self._over = Event()
        self._loses_at = monotonic() + 0.6 * seconds if "lost" in self._what else None
        self._ends: dict[tuple[str, Lane], float] = {}
        self._full_until: float | None = None
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self._patches = ExitStack()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, name="soak-trouble", daemon=True)

    def __enter__(self) -> Self:
        if "read" in self._what:
            self._patches.enter_context(mock.patch.object(os, "preadv", self._reading(os.preadv)))
        if "write" in self._what:
            writing = self._writing(Catalogue.store)
            self._patches.enter_context(mock.patch.object(Catalogue, "store", writing))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self._patches.close()
        self._make_room()
        with self._bench.store._lock:
            for gate in self._gates():
                losing = set(gate.losing)
                gate.open()
                gate.losing |= losing  # these lanes lose acks until the end
        self._bench.store.match([])
        self._tell()
        if self._error is not None and error is None:
            raise self._error

    def _gates(self) -> list[Gate]:
        mover = self._bench.mover
        return [gate for gate in (mover.copies, mover.records) if gate is not None]

    def _gate(self, lane: Lane) -> Gate | None:
        return self._bench.mover.records if Tier.NVME in lane else self._bench.mover.copies

    def _run(self) -> None:
        try:
            self._play()
        except BaseException as error:  # noqa: BLE001  raised again by __exit__
            self._error = error

    def _play(self) -> None:
        moves: list[Callable[[Lane], None]] = [
            move
            for name, move in [
                ("hold", self._hold),
                ("hold", self._overtake),
                ("hang", self._hang),
                ("late", self._be_late),
                ("fail", self._fail),
                ("full", self._fill_the_disk),
            ]
            if name in self._what
        ]
        while moves and not self._over.wait(self._chance.uniform(0.001, 0.02)):
            with self._bench.store._lock:
                self._end_what_is_over()
                self._tell()
                self._chance.choice(moves)(self._chance.choice(LANES))
                if self._loses_at is not None and monotonic() >= self._loses_at:
                    self._lose()
            self._bench.store.match([])

    # -- copies: the caller holds the store's lock, as it does when the store calls a gate -----------------------

    def _hold(self, lane: Lane) -> None:
        if (gate := self._gate(lane)) is not None:
            gate.hold(lane)
            self._ends.setdefault(("held", lane), monotonic() + self._chance.choice(_DELAYS_S))

    def _overtake(self, lane: Lane) -> None:
        gate = self._gate(UP)
        if gate is not None and gate.waiting(UP) > 1:
            gate.overtake(UP)
            self._account.count("faults", "reordered")

    def _hang(self, lane: Lane) -> None:
        """Acknowledge a held read as if the disk hung: report two pages as late and the others as not attempted."""
        gate = self._gate(UP)
        if gate is not None and gate.tell_late(UP, set(self._chance.sample(range(4), 2))):
            self._account.count("faults", "reads told late")

    def _be_late(self, lane: Lane) -> None:
        if (gate := self._gate(lane)) is not None:
            gate.late.add(lane)
            self._ends.setdefault(("late", lane), monotonic() + self._chance.choice(_DELAYS_S[:-1]))

    def _fail(self, lane: Lane) -> None:
        gate = self._gate(lane)
        if gate is not None and len(gate.failing.get(lane, ())) < 2:
            gate.fail_next(lane, *self._chance.sample(range(4), self._chance.randint(1, 3)))

    def _lose(self) -> None:
        self._loses_at, self.losing = None, True
        for gate in self._gates():
            gate.losing.update(self._chance.sample(LANES, self._chance.choice([4, 6])))

    def _end_what_is_over(self) -> None:
        now = monotonic()
        for (how, lane), end in list(self._ends.items()):
            gate = self._gate(lane)
            if end <= now and gate is not None:
                del self._ends[how, lane]
                if how == "late":
                    self._account.count("faults", "late acks")
                    gate.deliver()
                    continue
                self._account.count("faults", "delayed", gate.waiting(lane))
                gate.holding.discard(lane)
                gate.let_go(lane)
        if self._full_until is not None and self._full_until <= now:
            self._make_room()

    def _tell(self) -> None:
        for gate in self._gates():
            self._account.count("faults", "pages failed", gate.num_failed)
            self._account.count("faults", "acks lost", gate.num_lost)
            gate.num_failed = gate.num_lost = 0

    # -- the disk ------------------------------------------------------------------------------------------------

    def _fill_the_disk(self, lane: Lane) -> None:
        """Simulate a full disk: limit the size of this process's files to that of the store's largest data.mdb."""
        nvme = self._bench.parts.nvme
        if self._full_until is None and nvme is not None and self._chance.random() < 0.2:
            sizes = [p.stat().st_size for p in self._home.rglob("data.mdb")]
            resource.setrlimit(resource.RLIMIT_FSIZE, (max([1 << 16, *sizes]), self._limits[1]))
            self._full_until = monotonic() + self._chance.choice([0.05, 0.5])
            self._account.count("faults", "disk full")

    def _make_room(self) -> None:
        if self._full_until is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)
            self._full_until = None

    def _reading(
        self, real: Callable[[int, Sequence[memoryview], int], int]
    ) -> Callable[[int, Sequence[memoryview], int], int]:
        def preadv(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            dice = self._disk_chance.random()
            if dice > _DISK_FAULTS:
                return real(fd, buffers, offset)
            if dice < _DISK_FAULTS / 3:
                self._account.count("faults", "read error")
                raise OSError(errno.EIO, "simulated disk error")
            if dice < _DISK_FAULTS * 2 / 3:
                self._account.count("faults", "short read")
                return real(fd, buffers[:1], offset)
            got = real(fd, buffers, offset)
            self._account.count("faults", "flipped bit read")
            page = buffers[-1]
            page[self._disk_chance.randrange(len(page))] ^= 1 << self._disk_chance.randrange(8)
            return got

        return preadv

    def _writing(
        self, real: Callable[[Catalogue, Sequence[Page]], list[int | None]]
    ) -> Callable[[Catalogue, Sequence[Page]], list[int | None]]:
        def store(catalogue: Catalogue, pages: Sequence[Page]) -> list[int | None]:
            dice = self._disk_chance.random()
            if dice < _DISK_FAULTS / 2:
                self._account.count("faults", "write error")
                raise OSError(self._disk_chance.choice([errno.EIO, errno.ENOSPC]), "simulated disk error")
            sizes = real(catalogue, pages)
            if dice < _DISK_FAULTS:
                self._account.count("faults", "write error after writing")
                raise OSError(errno.EIO, "simulated error after a write that took effect")
            return sizes

        return store
