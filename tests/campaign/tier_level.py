"""The kill campaign on the NVMe tier: the victim, the check of the files it left, and the search for leaked space."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import numpy as np

from tests.campaign.children import Say, heard_warnings
from tests.campaign.turns import Look, Rig, Subject, Turn, disk_nbytes
from tests.nvme.rig import PATIENCE_S, key
from tierstore.types import Failure, PageKey

_CHUNK = 64
_IN_FLIGHT = 4


def act(say: Say, turn: Turn) -> None:
    """Write, overwrite, erase, read and sync until killed. Sends "begin", "open", and the lines of ``Ledger.hear``."""
    say("begin")
    victim = _Victim(say, turn)
    say("open")
    while True:
        victim.step()


class _Victim:
    def __init__(self, say: Say, turn: Turn) -> None:
        self._say, self._turn, self._subject = say, turn, turn.subject
        self._chance = random.Random(turn.seed)
        capacity = turn.capacity * 3 if turn.plant == "greedy disk" else turn.capacity
        self._rig = turn.subject.open(turn.home, capacity, turn.payload)
        self._budget = self._rig.tier.budget_nbytes
        numbers = {key(n): n for n in range(turn.subject.space)}
        self._takes = {numbers[found]: nbytes for found, _, nbytes in self._rig.tier.records()}
        self._version = {number: turn.there[number] for number in self._takes}
        self._next = turn.first_version
        self._named = 0
        self._in_flight: deque[tuple[int, int, list[int]]] = deque()

    def step(self) -> None:
        dice = self._chance.random()
        if dice < 0.6:
            self._write(self._chance.randint(1, 28))
        elif dice < 0.7:
            self._erase(self._some(self._chance.randint(1, 20)))
        elif dice < 0.84:
            self._read(self._some(8))
        elif dice < 0.99:
            self._sync()
        else:
            self._erase(list(self._version))

    def _write(self, count: int) -> None:
        numbers = self._chance.sample(range(self._subject.space), count)
        self._make_room(set(numbers))
        version, self._next = self._next, self._next + 1
        self._say(" ".join(["write", str(version), *map(str, numbers)]))
        written = version - 1 if self._turn.plant == "stale" else version
        transfer = self._rig.submit(numbers, written)
        self._named += count
        self._in_flight.append((transfer, version, numbers))
        for number in numbers:
            self._version[number], self._takes[number] = version, self._rig.tier.record_nbytes
        while len(self._in_flight) > _IN_FLIGHT:
            self._settle()

    def _make_room(self, wanted: set[int]) -> None:
        if self._turn.greedy:
            return
        room = self._budget - sum(self._takes.values()) - len(wanted) * self._rig.tier.record_nbytes
        gone = []
        for number in self._chance.sample(sorted(self._takes), len(self._takes)):
            if room >= 0:
                break
            gone.append(number)
            room += self._takes[number]
        self._erase(gone)

    def _erase(self, numbers: list[int]) -> None:
        for first in range(0, len(numbers), 200):  # so that a line is short enough to be written atomically
            part = numbers[first : first + 200]
            self._say(" ".join(["erase", *map(str, part)]))
            self._rig.erase(part)
            self._named += len(part)
            for number in part:
                del self._version[number], self._takes[number]

    def _read(self, numbers: list[int]) -> None:
        moving = {number for _, _, those in self._in_flight for number in those}
        numbers = [number for number in numbers if number not in moving]
        if not numbers:
            return
        ack, out = self._rig.read(numbers)
        for index, failure in ack.failures:
            self._say(
                f"fault page {numbers[index]} of version {self._version[numbers[index]]}: {failure.value}"
            )
        lost = {index for index, _ in ack.failures}
        for index, number in enumerate(numbers):
            if index not in lost and not self._is(out[index], number):
                self._say(f"fault page {number} has wrong bytes in the running tier")

    def _is(self, got: np.typing.NDArray[np.uint8], number: int) -> bool:
        return self._turn.plant == "stale" or np.array_equal(
            got, self._subject.page(number, self._version[number])
        )

    def _sync(self) -> None:
        named = self._named
        if self._turn.plant != "early":
            if not self._rig.tier.sync(PATIENCE_S):
                self._say("fault sync returned False")
                return
            while self._in_flight:
                self._settle()
        self._say(f"synced {named}")

    def _settle(self) -> None:
        transfer, version, numbers = self._in_flight.popleft()
        ack = self._rig.ack(transfer)
        failed = dict(ack.failures)
        ready = [number for index, number in enumerate(numbers) if index not in failed]
        sizes = ack.sizes or (ack.nbytes // max(1, ack.num_ready),) * ack.num_ready
        for number, nbytes in zip(ready, sizes, strict=True):
            if self._version.get(number) == version:
                self._takes[number] = nbytes
        for index, failure in failed.items():
            if self._version.get(numbers[index]) == version:
                del self._version[numbers[index]], self._takes[numbers[index]]
            if failure is not Failure.NO_SPACE:
                self._say(f"fault a write failed with {failure.value}")
        if failed:
            self._say(" ".join(["failed", str(version), *(str(numbers[index]) for index in failed)]))

    def _some(self, count: int) -> list[int]:
        there = sorted(self._version)
        return self._chance.sample(there, min(count, len(there)))


def look(say: Say, turn: Turn, allowed: dict[int, set[int | None]], history: dict[int, set[int]]) -> None:
    """Open the directory that the victim left, read every page, and send a ``Look``.

    ``allowed`` and ``history`` are those of the ledger.
    """
    faults, before = [], list(turn.home.glob("*.damaged-*"))
    with heard_warnings() as warnings:
        rig = turn.subject.open(turn.home, turn.capacity, turn.payload)
    if before or any(turn.home.glob("*.damaged-*")):
        faults.append(
            f"the directory was set aside {'by the victim' if before else 'after the kill'}: {warnings}"
        )
    listed = list(rig.tier.records())
    faults += _listing_faults(turn.subject, listed, rig.tier.budget_nbytes)
    if not rig.tier.sync(PATIENCE_S):  # erases the records that exceed the budget
        faults.append("sync returned False")
    there = _read_back(rig, turn.subject, allowed, history, faults)
    differs = {key(number) for number in there} ^ {found for found, _, _ in listed}
    if differs:
        faults.append(
            f"{len(differs)} pages are listed but cannot be read, or can be read but are not listed"
        )
    rig.close()
    found = Look(
        there=there,
        faults=faults,
        pages=len(there),
        nbytes=len(there) * turn.subject.page_nbytes,
        capacity=turn.capacity,
        disk_nbytes=disk_nbytes(turn.home),
    )
    say(found.line())


def _read_back(
    rig: Rig,
    subject: Subject,
    allowed: dict[int, set[int | None]],
    history: dict[int, set[int]],
    faults: list[str],
) -> dict[int, int]:
    """Return the version of each page that can be read. Add a description of each error to ``faults``."""
    there: dict[int, int] = {}
    for first in range(0, subject.space, _CHUNK):
        part = list(range(first, min(first + _CHUNK, subject.space)))
        ack, out = rig.read(part)
        failed = dict(ack.failures)
        for index, number in enumerate(part):
            may = allowed.get(number, {None})
            failure = failed.get(index)
            if failure is None:
                version = _version(subject, number, out[index], may, history.get(number, set()), faults)
                if version is not None:
                    there[number] = version
            elif failure is not Failure.NOT_FOUND:
                faults.append(f"page {number} cannot be read: {failure.value}")
            elif None not in may:
                faults.append(f"page {number} is lost; its version must be one of {sorted(map(str, may))}")
    return there


def _listing_faults(
    subject: Subject, listed: list[tuple[PageKey, PageKey | None, int]], budget: int
) -> list[str]:
    parents = {key(n): subject.parent(n) for n in range(subject.space)}
    faults = []
    for found, parent, _ in listed:
        if found not in parents:
            faults.append(f"a key is listed that was never written: {found.hex()}")
        elif parents[found] != parent:
            faults.append(f"the listed parent of {found.hex()} is wrong")
    if len({found for found, _, _ in listed}) != len(listed):
        faults.append("a key is listed twice")
    if (total := sum(nbytes for _, _, nbytes in listed)) > budget:
        faults.append(f"the records take {total} bytes, but the budget is {budget}")
    return faults


def _version(
    subject: Subject,
    number: int,
    got: np.typing.NDArray[np.uint8],
    may: set[int | None],
    history: set[int],
    faults: list[str],
) -> int | None:
    """Return the version in ``may`` that has these bytes. If no version has them, add a fault and return None."""
    for version in sorted(version for version in may if version is not None):
        if np.array_equal(got, subject.page(number, version)):
            return version
    old = [version for version in sorted(history) if np.array_equal(got, subject.page(number, version))]
    what = f"they are those of version {old[0]}" if old else "no version has these bytes"
    faults.append(f"page {number} has wrong bytes: {what}, allowed {sorted(map(str, may))}")
    return None


def fill(say: Say, subject: Subject, home: Path, capacity: int, payload: str) -> None:
    """Erase everything, then write pages that cannot be compressed until one is refused.

    Sends the number of pages accepted, how many of them can be read, how many fit into the budget, and the bytes on
    disk.
    """
    rig = subject.open(home, capacity, payload)
    rig.tier.submit_erase([found for found, _, _ in rig.tier.records()])
    if not rig.tier.sync(PATIENCE_S):
        raise AssertionError("sync returned False")
    numbers: list[int] = []
    while rig.ack(rig.submit([4 * (10_000 + len(numbers))], 0)).ok:
        numbers.append(4 * (10_000 + len(numbers)))
    ack, out = rig.read(numbers)
    failed = {index for index, _ in ack.failures}
    readable = sum(
        index not in failed and np.array_equal(out[index], subject.page(number, 0))
        for index, number in enumerate(numbers)
    )
    budget = rig.tier.budget_nbytes // rig.tier.record_nbytes
    rig.close()
    say(f"{len(numbers)} {readable} {budget} {disk_nbytes(home)}")
