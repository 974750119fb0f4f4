"""The children of the damage campaign: one fills a directory; the other, the survivor, opens it after the damage."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

import lmdb
import numpy as np

from tests.campaign.children import Say, heard_warnings
from tests.campaign.regions import large_values
from tests.campaign.turns import Rig, Subject
from tests.nvme.rig import PATIENCE_S, data_file, key
from tierstore.errors import ConfigError
from tierstore.nvme import catalogue_entry, record_format
from tierstore.types import Failure, PageKey

PLANTS = ("unchecked", "signal")
"""Faults that can be planted in a survivor: it does not verify records, or it kills itself with a signal."""

NEW = 10_000
"""Number of the first new page that a survivor writes."""

_CHUNK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordeal:
    """Arguments of a survivor.

    ``there`` maps each page to its version before the damage, ``history`` to all versions ever written.
    """

    subject: Subject
    home: Path
    payload: str
    capacity: int
    seed: int
    there: dict[int, int]
    history: dict[int, list[int]]
    plant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """Result of a survivor.

    Attributes:
        refused: The error if the directory could not be opened, else empty.
        set_aside: Whether the directory was set aside as damaged when it was opened.
        outcomes: "ok" or the failure of each page that was read before anything was written.
        faults: Descriptions of the errors found.
        compared: Number of pages whose bytes were compared.
        older: Number of pages that had an earlier version, or were erased and came back.
        later: Counts of what happened after the first reads.
        warnings: Warnings that were logged.
    """

    refused: str = ""
    set_aside: bool = False
    outcomes: dict[int, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    compared: int = 0
    older: int = 0
    later: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def line(self) -> str:
        """Return the result as the line that a child sends."""
        return json.dumps(asdict(self))

    @classmethod
    def heard(cls, line: str) -> Self:
        """Return the result that a child has sent as this line."""
        told = json.loads(line)
        told["outcomes"] = {int(number): outcome for number, outcome in told["outcomes"].items()}
        return cls(**told)


def prepare(say: Say, ordeal: Ordeal) -> None:
    """Fill a new directory with pages. Many are written twice or erased, which leaves a free list and stale pages.

    Sends the version of each page, and the location of its record: file, offset and number of bytes.
    """
    chance = random.Random(ordeal.seed)
    rig = ordeal.subject.open(ordeal.home, ordeal.capacity, ordeal.payload)
    there: dict[int, int] = {}
    history: dict[int, list[int]] = {}
    for version in range(1, 14):
        numbers = chance.sample(range(ordeal.subject.space), ordeal.subject.space // 6)
        if not rig.ack(rig.submit(numbers, version)).ok:
            raise AssertionError("the capacity is too small for the pages to be damaged")
        there |= dict.fromkeys(numbers, version)
        for number in numbers:
            history.setdefault(number, []).append(version)
        for number in chance.sample(sorted(there), len(there) // 8):
            rig.erase([number])
            del there[number]
    if not rig.tier.sync(PATIENCE_S):
        raise AssertionError("sync returned False")
    rig.close()
    say(json.dumps({"there": there, "history": history, "records": _places(ordeal, there)}))


def _places(ordeal: Ordeal, there: dict[int, int]) -> dict[int, tuple[str, int, int]]:
    numbers = {key(n): n for n in there}
    found = {}
    directory = data_file(ordeal.home).parent
    inline = large_values(data_file(ordeal.home).read_bytes(), "pages")
    with lmdb.open(str(directory), readonly=True, lock=False, max_dbs=catalogue_entry.MAX_DBS) as env:
        catalogue = env.open_db(catalogue_entry.CATALOGUE_DB, create=False)
        with env.begin() as txn:
            for raw_key, raw in txn.cursor(db=catalogue):
                at = catalogue_entry.unpack(raw_key, raw)
                name = f"extent-{at.extent:05}.bin" if at.extent else "data.mdb"
                first = at.block if at.extent else inline[raw_key]
                found[numbers[PageKey(raw_key)]] = (name, first * 4096, at.stored_nbytes)
    return found


def survive(say: Say, ordeal: Ordeal) -> None:
    """Open the directory, read every page, write and erase some, reopen it and read again. Sends a ``Fate``."""
    if ordeal.plant == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if ordeal.plant == "unchecked":
        setattr(record_format, "verify", _trust)  # noqa: B010  mypy rejects an assignment to a module's function
    with heard_warnings() as warnings:
        try:
            survivor = _Survivor(ordeal)
        except ConfigError as error:
            say(Fate(refused=str(error), warnings=warnings).line())
            return
        survivor.read_all(survivor.outcomes)
        older = survivor.older
        survivor.require_counted()
        survivor.go_on()
        survivor.reopen()
    fate = Fate(
        set_aside=any(ordeal.home.glob("*.damaged-*")),
        outcomes=survivor.outcomes,
        faults=survivor.faults,
        compared=survivor.compared,
        older=older,
        later=dict(survivor.later),
        warnings=warnings,
    )
    say(fate.line())


class _Survivor:
    def __init__(self, ordeal: Ordeal) -> None:
        self._ordeal, self._chance = ordeal, random.Random(ordeal.seed)
        self._want: dict[int, set[int]] = {number: set() for number in ordeal.history}
        self._want |= {number: {version} for number, version in ordeal.there.items()}
        self._new: list[int] = []
        self.older = 0
        self.outcomes: dict[int, str] = {}
        self.faults: list[str] = []
        self.compared = 0
        self.later: Counter[str] = Counter()
        self._rig = self._open()

    def _open(self) -> Rig:
        ordeal = self._ordeal
        rig = ordeal.subject.open(ordeal.home, ordeal.capacity, ordeal.payload)
        listed = [found for found, _, _ in rig.tier.records()]
        known = {key(number) for number in self._want}
        self._offered = {number for number in self._want if key(number) in set(listed)}
        self.faults += [f"a key is offered that was never there: {k.hex()}" for k in listed if k not in known]
        return rig

    def read_all(self, outcomes: dict[int, str]) -> None:
        """Read every page that was ever written. Pages that can be read must have the expected bytes."""
        numbers = sorted(self._want)
        for first in range(0, len(numbers), _CHUNK):
            part = numbers[first : first + _CHUNK]
            ack, out = self._rig.read(part)
            failed = dict(ack.failures)
            for index, number in enumerate(part):
                failure = failed.get(index)
                outcomes[number] = "ok" if failure is None else failure.value
                if failure is None:
                    self.compared += 1
                    self._judge(out[index], number)
                elif failure is Failure.NOT_FOUND and number in self._offered:
                    self.later["offered and not found"] += 1

    def require_counted(self) -> None:
        """Check that the tier's statistics count all pages that failed."""
        counts = Counter(self.outcomes.values())
        stats = self._rig.tier.stats()
        for failure, name in ((Failure.INTEGRITY, "read_integrity"), (Failure.IO_ERROR, "read_io_error")):
            if stats[name] != counts[failure.value]:
                self.faults.append(f"{counts[failure.value]} pages failed, {name} is {stats[name]}")

    def go_on(self) -> None:
        """Write new pages and new versions, erase other pages, and read all pages. No write may be refused."""
        old = sorted(self._want)
        chosen = self._chance.sample(old, 40)
        again, gone = chosen[:20], chosen[20:]
        for numbers in ([*range(NEW, NEW + 40)], again):
            ack = self._rig.ack(self._rig.submit(numbers, 99))
            self.later["writes failed"] += len(ack.failures)
            self.faults += [f"a write fails with {failure.value}" for _, failure in ack.failures[:1]]
            failed = {numbers[index] for index, _ in ack.failures}
            for number in numbers:  # if the write was refused, the old version may still be there
                self._want[number] = {99} | (self._want.get(number, set()) if number in failed else set())
            self._new += [number for number in numbers if number not in failed]
        self._rig.erase(gone)
        if self._rig.tier.sync(PATIENCE_S):
            self._want |= {number: set() for number in gone}
        else:
            self.later["syncs failed"] += 1
            self.faults.append("sync returned False")
        self._read_later("after writes")

    def reopen(self) -> None:
        """Reopen the tier and read all pages. Then erase them, write new ones, and close the tier."""
        self._rig.close()
        self._rig = self._open()
        self._read_later("after a reopen")
        self._erase_all()
        self._rig.close()

    def _erase_all(self) -> None:
        """Erase all pages, so that every record is freed, and write new pages into the freed space."""
        self._rig.erase([*self._want])
        numbers = [*range(2 * NEW, 2 * NEW + 40)]
        ack = self._rig.ack(self._rig.submit(numbers, 99))
        if not self._rig.tier.sync(PATIENCE_S) or not ack.ok:
            self.faults.append(
                "after a reopen, records could not be erased, or new ones could not be written"
            )
        self._want |= {number: set() for number in self._want} | {number: {99} for number in numbers}
        self._new = numbers
        self._read_later("after the last erase")

    def _read_later(self, when: str) -> None:
        outcomes: dict[int, str] = {}
        before = self.older
        self.read_all(outcomes)
        self.later[f"older versions {when}"] += self.older - before
        lost = [number for number in self._new if outcomes[number] != "ok"]
        self.later[f"new pages lost {when}"] += len(lost)

    def _judge(self, got: np.typing.NDArray[np.uint8], number: int) -> None:
        def is_one_of(versions: Iterable[int]) -> bool:
            return any(
                np.array_equal(got, self._ordeal.subject.page(number, version)) for version in versions
            )

        if is_one_of(self._want[number]):
            return
        if is_one_of(self._ordeal.history.get(number, [])):
            self.older += 1
        else:
            self.faults.append(f"page {number} has wrong bytes")


def _trust(head: np.typing.NDArray[np.uint8] | bytes, *_: object, **__: object) -> record_format.Head:
    """Replaces ``record_format.verify`` as a planted bug: it accepts every record."""
    return record_format.parse(bytes(head))
