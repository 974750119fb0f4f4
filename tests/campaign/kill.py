"""The kill campaign: repeatedly kills a process that uses a directory, and checks what the process left in it.

In each turn, a child process (the victim) opens the directory, sometimes with another capacity or payload than before.
It is killed while it opens the directory, or after a random number of calls. Then another child takes a look: it opens
the directory and reads every page. Each directory is used for several turns.
"""

from __future__ import annotations

import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from time import monotonic
from typing import Any, Literal, Protocol

from tests.campaign.children import PATIENCE_S, Child, Failed, Say, Silent
from tests.campaign.ledger import Ledger
from tests.campaign.turns import Look, Subject, Turn, disk_nbytes

LIFE = 25
"""Number of turns on one directory."""

PAGES = (8192, 10_000, 16_384, 32_768)
"""Page sizes in bytes, for one directory after the other. One size is not a multiple of a block."""

_FACTORS = {"same": 1.0, "larger": 1.6, "smaller": 0.6, "much smaller": 0.15}
_OTHER = {"lmdb": "extents", "extents": "lmdb"}
_SLICE_S = 0.004


ENOUGH = 20
"""Number of faults after which a campaign stops."""


class Enough(Exception):
    """Raised when ``ENOUGH`` faults have been found."""


class Level(Protocol):
    """The functions that the children of a campaign run. See ``tier_level`` for what they do."""

    def act(self, say: Say, turn: Turn) -> None: ...
    def look(
        self, say: Say, turn: Turn, allowed: dict[int, set[int | None]], history: dict[int, set[int]]
    ) -> None: ...
    def fill(self, say: Say, subject: Subject, home: Path, capacity: int, payload: str) -> None: ...


class Kills:
    """Runs the turns of a campaign one after the other, and adds up the results."""

    def __init__(
        self,
        level: Level,
        folder: Path,
        *,
        payload: str,
        codec: Literal["none", "exp"],
        seed: int,
        plant: str = "",
    ) -> None:
        self._level, self._folder = level, folder
        self._payload, self._codec, self._plant = payload, codec, plant
        self._chance = random.Random(seed)
        self._opens_s = [0.3]
        self._fraction = 0.0
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._begin_life(0)

    def play(self, turns: int, tell: Callable[[int], None]) -> None:
        """Run ``turns`` turns. ``tell`` is called with the number of turns so far.

        After its last turn, each directory is checked for leaked space.
        """
        with suppress(Enough):
            for number in range(turns):
                if number and number % LIFE == 0:
                    self._end_life()
                    self._begin_life(number // LIFE)
                self._turn(number)
                tell(number + 1)
            self._end_life()

    def summary(self) -> dict[str, Any]:
        """Return all counts, and the faults that were found.

        ``most_of_capacity`` is the largest fraction of the capacity that was allocated on disk in any sample.
        """
        found = {name: self.counts[name] for name in sorted(self.counts)}
        return {**found, "most_of_capacity": round(self._fraction, 4), "faults": self.faults}

    def _begin_life(self, life: int) -> None:
        self._home = self._folder / f"life-{life}"
        page = PAGES[life % len(PAGES)]
        self._subject = Subject(codec=self._codec, page_nbytes=page, space=800)
        self._base = 450 * (page + 8192)
        self._capacity = self._looked_at = self._base
        self._kind = self._payload
        self._ledger = Ledger()

    def _turn(self, number: int) -> None:
        how = self._chance.choice(["same", "same", "same", *_FACTORS])
        before = self._capacity
        self._capacity = int(self._base * _FACTORS[how]) if how != "same" else before
        kind = self._kind
        if self._chance.random() < 0.12:
            kind = _OTHER[kind]
        elif self._chance.random() < 0.5:
            kind = self._payload
        turn = Turn(
            subject=self._subject,
            home=self._home,
            payload=kind,
            capacity=self._capacity,
            seed=self._chance.getrandbits(32),
            first_version=(number + 1) * 100_000,
            there=self._ledger.settled,
            greedy=self._chance.random() < 0.1,
            plant=self._plant,
        )
        lowered = self._capacity < before or kind != self._kind
        self.counts["turns"] += 1
        self.counts["turns with a lower capacity"] += self._capacity < before
        self.counts["turns with another payload"] += kind != self._kind
        try:
            self._kill(turn, before)
            self._look(turn, may_drop=lowered or turn.greedy)
        except Failed as failed:
            self._fault(turn, str(failed))
            self._begin_life(number // LIFE + 1000 + number)
            return
        self._kind = kind

    def _kill(self, turn: Turn, before: int) -> None:
        opening = self._chance.random() < 0.3
        child = Child(self._level.act, turn)
        most = max(before, turn.capacity)
        try:
            self._wait_for(child, "begin", turn, most)
            start = monotonic()
            if opening:
                self._wait(child, start + self._chance.random() * 1.1 * fmean(self._opens_s), turn, most)
                self.counts["killed while opening"] += 1
            else:
                self._wait_for(child, "open", turn, most)
                self._opens_s = [*self._opens_s[-20:], monotonic() - start]
                for _ in range(self._chance.randint(0, 70)):
                    self._wait_for(child, "", turn, turn.capacity)
                self._wait(child, monotonic() + self._chance.random() * 0.006, turn, turn.capacity)
                self.counts["killed while working"] += 1
        except Silent:
            raise Failed("the victim exited before it was killed") from None
        finally:
            child.kill()
        self._sample(turn, most if opening else turn.capacity)
        self._drain(child, turn)

    def _wait_for(self, child: Child, word: str, turn: Turn, capacity: int) -> None:
        """Wait until the child sends a line that begins with ``word``, or any line if ``word`` is empty."""
        deadline = monotonic() + PATIENCE_S
        while True:
            line = child.hear(_SLICE_S)
            self._sample(turn, capacity)
            if line is not None:
                self._hear(line, turn)
                if not word or line.startswith(word):
                    return
            if monotonic() > deadline:
                raise Failed("the victim hangs")

    def _wait(self, child: Child, until: float, turn: Turn, capacity: int) -> None:
        while (left := until - monotonic()) > 0:
            if (line := child.hear(min(left, _SLICE_S))) is not None:
                self._hear(line, turn)
            self._sample(turn, capacity)

    def _drain(self, child: Child, turn: Turn) -> None:
        try:
            while (line := child.hear(PATIENCE_S)) is not None:
                self._hear(line, turn)
        except Silent:
            return
        raise Failed("the pipe of a killed victim is still open")

    def _hear(self, line: str, turn: Turn) -> None:
        if line.startswith("fault"):
            self._fault(turn, line)
        self.counts["calls"] += line.startswith(("write", "erase"))
        self.counts["syncs"] += line.startswith("synced")
        self._ledger.hear(line)

    def _sample(self, turn: Turn, capacity: int) -> None:
        taken = disk_nbytes(turn.home)
        self.counts["samples of the disk"] += 1
        self._fraction = max(self._fraction, taken / capacity)
        if taken > capacity:
            self._fault(turn, f"{taken} bytes are on disk, but the capacity is {capacity}")

    def _look(self, turn: Turn, *, may_drop: bool) -> None:
        ledger = self._ledger
        allowed = ledger.allowed(may_drop=may_drop, may_fail=turn.greedy)
        found = Look.heard(Child(self._level.look, turn, allowed, ledger.history).end()[-1])
        for aside in list(turn.home.glob("*.damaged-*")):  # the next look must not report it again
            aside.rename(turn.home.with_name(f"turn-{self.counts['turns']}-{aside.name}"))
        for fault in found.faults:
            self._fault(turn, fault)
        self.counts["pages compared"] += found.pages
        self.counts["bytes compared"] += found.nbytes
        self.counts["absent pages checked"] += len(allowed) - len(found.there)
        self.counts["writes refused"] += ledger.refused
        ledger.refused = 0
        self._fraction = max(self._fraction, found.disk_nbytes / found.capacity)
        if found.disk_nbytes > found.capacity:
            self._fault(
                turn,
                f"{found.disk_nbytes} bytes are on disk after a close, but the capacity is {found.capacity}",
            )
        ledger.settle(found.there.items())

    def _end_life(self) -> None:
        """Check that no space has leaked: as many pages fit into the directory as into a new one."""
        new = self._home.with_name(self._home.name + "-new")
        told = []
        for home in (self._home, new):
            arguments = (self._subject, home, 2 * self._base, self._kind)
            try:
                told.append([int(word) for word in Child(self._level.fill, *arguments).end()[-1].split()])
            except Failed as failed:
                self.faults.append(f"filling {home.name}: {failed}")
                return
        (old, readable, least, disk), (fresh, _, _, _) = told
        self.counts["directories filled"] += 1
        if not (old == readable and old >= least and disk <= 2 * self._base):
            self.faults.append(
                f"{old} pages accepted, {readable} readable, space for {least} in the budget, {disk} bytes on disk"
            )
        if old < fresh * (1.0 if self._kind == "extents" else 0.97):
            self.faults.append(
                f"{old} pages fit after the turns, but {fresh} fit into a new directory ({self._kind})"
            )
        shutil.rmtree(new)
        if not self.faults:
            shutil.rmtree(self._home)

    def _fault(self, turn: Turn, what: str) -> None:
        where = f"turn {self.counts['turns']}, {turn.payload}, {turn.capacity} bytes, {turn.home.name}"
        sys.stderr.write(f"{where}: {what}\n")
        self.faults.append(f"{where}: {what.strip().splitlines()[-1]}")
        if len(self.faults) == ENOUGH:
            raise Enough
