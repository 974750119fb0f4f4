"""What a killed process may have left of each page: worked out from what it said before each call.

A page is a number, and what is written under it is a version, never used twice; None is no record. What was there at
the last look and what the last completed sync covers is settled; each call since may have come about or not.
"""

from __future__ import annotations

from collections.abc import Iterable


class Ledger:
    """The pages of one directory over its turns."""

    def __init__(self) -> None:
        self.settled: dict[int, int] = {}
        """Version of each page that was there at the last look."""
        self.history: dict[int, set[int]] = {}
        """Every version that was ever written."""
        self.refused = 0
        """Writes that were acknowledged as failed, in all turns."""
        self._calls: list[tuple[int, int | None]] = []
        self._durable = 0
        self._failed: set[tuple[int, int]] = set()

    def hear(self, line: str) -> None:
        """``write VERSION NUMBER...`` or ``erase NUMBER...`` before the call, ``failed VERSION NUMBER...`` after its
        ack, ``synced CALLS`` after a sync: so many pages were named by calls before it. Other words say nothing.
        """
        word, *rest = line.split()
        match word:
            case "write":
                version, *numbers = (int(text) for text in rest)
                self._calls += [(number, version) for number in numbers]
                for number in numbers:
                    self.history.setdefault(number, set()).add(version)
            case "erase":
                self._calls += [(int(text), None) for text in rest]
            case "failed":
                version, *numbers = (int(text) for text in rest)
                self._failed |= {(number, version) for number in numbers}
                self.refused += len(numbers)
            case "synced":
                self._durable = int(rest[0])

    def allowed(self, *, may_drop: bool, may_fail: bool = False) -> dict[int, set[int | None]]:
        """Of every page that was ever named: what may be found.

        ``may_drop``: any may be gone, since there is less room, or another kind of directory. ``may_fail``: writes
        may fail for lack of room, of which the last may not have been told yet.
        """
        found: dict[int, set[int | None]] = {number: {None} for number in self.history}
        found |= {number: {version} for number, version in self.settled.items()}
        for number, version in self._calls[: self._durable]:
            failed = version is not None and (number, version) in self._failed
            found[number] = {None if failed else version}
        for number, version in self._calls[self._durable :]:
            before = found.setdefault(number, {None})
            before.add(version)
            if may_fail or (version is not None and (number, version) in self._failed):
                before.add(None)
        if may_drop:
            for versions in found.values():
                versions.add(None)
        return found

    def settle(self, there: Iterable[tuple[int, int]]) -> None:
        """A look found these versions; the next turn begins."""
        self.settled = dict(there)
        self._calls, self._durable, self._failed = [], 0, set()
