"""Works out which versions of each page a killed process may have left, from the lines that it sent.

A page is identified by a number. Every write of a page has a new version; None stands for no record. The versions
found after the last turn are certain, and so are the effects of all calls before the last completed sync. Each later
call may or may not have taken effect.
"""

from __future__ import annotations

from collections.abc import Iterable


class Ledger:
    """The versions that each page of one directory may have, across all turns of a campaign."""

    def __init__(self) -> None:
        self.settled: dict[int, int] = {}
        """Version of each page that was found after the last turn."""
        self.history: dict[int, set[int]] = {}
        """All versions of each page that were ever written."""
        self.refused = 0
        """Number of page writes that were acknowledged as failed. The campaign resets it after each turn."""
        self._calls: list[tuple[int, int | None]] = []
        self._durable = 0
        self._failed: set[tuple[int, int]] = set()

    def hear(self, line: str) -> None:
        """Process a line from the victim.

        The victim sends ``write VERSION NUMBER...`` or ``erase NUMBER...`` before the call, ``failed VERSION
        NUMBER...`` after the ack of a write, and ``synced COUNT`` after a sync. COUNT is the number of pages that all
        writes and erases before the sync have named. Other lines are ignored.
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
        """Return the versions that may now be found, for every page that was ever written.

        Args:
            may_drop: Whether any page may be missing, because the capacity is lower or the payload has changed.
            may_fail: Whether writes may fail for lack of space. The victim may have been killed before it could
                report the last failures.
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
        """Record the versions that were found, and begin the next turn."""
        self.settled = dict(there)
        self._calls, self._durable, self._failed = [], 0, set()
