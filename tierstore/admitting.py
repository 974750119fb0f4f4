"""Puts and hits as the policies see them: told to the history, and asked of admission.

Pages that are not worth a write stay in memory, until they are or their room is needed.

Only pages that go down by themselves are asked about; what ``demote``, ``flush`` and ``close`` send down is written
whatever admission thinks, and counts against the day's budget. Metadata only; time comes with ``tick``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.residency import Residency
    from tierstore.policy import Admission, History, WriteBudget
    from tierstore.types import PageKey


class Admitting:
    """Tells ``history`` of puts and hits, asks ``admission`` and holds its answers. ``history`` is None where no policy
    needs one. Without an NVMe tier there is nothing to admit to.

    A page refused now is asked about again when it is hit. A page is written with all pages before it, so a budget
    must have room for them too.
    """

    def __init__(
        self,
        residency: Residency,
        history: History | None,
        admission: Admission,
        budget: WriteBudget,
        record_nbytes: int,
    ) -> None:
        self.budget = budget
        self._residency = residency
        self._memory_only = residency.memory_only
        self._history = history
        self._admission = admission
        self._record_nbytes = record_nbytes
        self._nvme = residency.tables.get(Tier.NVME)
        self._promised: dict[PageKey, None] = {}
        """Pages that were let through the budget and are not written yet."""
        self._asked = 0
        self._insisting = 0
        self._now = 0.0

    def tick(self, now: float) -> None:
        """Time, in seconds."""
        self._now = now

    # -- what happens to pages ----------------------------------------------------------------------------------

    def put(self, key: PageKey, parent: PageKey | None, following: int = 0, *, asked: bool = False) -> None:
        """A page that no tier holds, and that may be stored, is about to get its first copy, after ``parent``.

        ``following``: pages that come after it at once. ``asked``: somebody asked for it to be written already.
        """
        history, record, again = self._history, None, False
        if history is not None:
            record, again = history.put(key, parent, following)
        if self._nvme is None:
            return
        admitted = self._admission.put(record, self._gone(), again=again) and self._afford(key, parent)
        if not (admitted or asked or self._insisting):
            self._memory_only.refuse(key)

    def hit(self, keys: Sequence[PageKey], source: Tier) -> None:
        """Held pages were asked for, or put again; ``source`` is the fastest tier that had them."""
        if self._history is None and (self._nvme is None or not self._memory_only.refused):
            return
        for key in keys:
            self._hit(key, source)

    def _hit(self, key: PageKey, source: Tier) -> None:
        record = None
        if self._history is not None:
            record = self._history.hit(key, below=source == Tier.NVME)
        if self._nvme is None or key not in self._memory_only.refused:
            return
        if self._admission.hit(record, self._gone()) and self._afford(
            key, self._residency.lineage.parent(key)
        ):
            self._memory_only.permit(key)

    def insist(self, keys: Sequence[PageKey]) -> None:
        """Somebody asked for these pages to be written, and so for those before them."""
        for key in keys:
            if key in self._memory_only.refused:
                self._memory_only.permit(key, at_once=True)

    def insist_on_all(self) -> None:
        """Somebody asks for everything to be written: until ``insisted`` nothing more is refused."""
        self._insisting += 1
        self._memory_only.permit_refused()

    def insisted(self) -> None:
        """What was asked for is known by now: pages may be refused again."""
        self._insisting -= 1

    def written(self, key: PageKey, nbytes: int, now: float) -> None:
        """A record of so many bytes was written."""
        self._promised.pop(key, None)
        self.budget.spend(nbytes, now)
        self._admission.wrote()

    def stats(self) -> dict[str, int | None]:
        """Pages that wait in memory for a reason to be written, and the budget: bytes written in the last 24 hours,
        bytes left (None without a limit)."""
        return {
            "waiting_pages": len(self._memory_only.refused),
            "written_last_24h": self.budget.spent(self._now),
            "daily_writes": self.budget.daily_nbytes,
            "left_today": self.budget.left(self._now),
        }

    # -- inside -------------------------------------------------------------------------------------------------

    def _gone(self) -> float:
        """How much of the day's budget is used up or promised, 0 to 1."""
        daily = self.budget.daily_nbytes
        return 0.0 if daily is None else min(1.0, self._committed() / daily)

    def _committed(self) -> int:
        return self.budget.spent(self._now) + len(self._promised) * self._record_nbytes

    def _afford(self, key: PageKey, parent: PageKey | None) -> bool:
        """Whether the budget has room for the page and those before it that are not to be written yet; takes it."""
        if self.budget.daily_nbytes is None:
            return True
        pages = [key]
        while parent is not None and parent in self._memory_only.refused:
            pages.append(parent)
            parent = self._residency.lineage.parent(parent)
        self._forget_broken_promises(len(pages))
        if self._committed() + len(pages) * self._record_nbytes > self.budget.daily_nbytes:
            return False
        self._promised.update(dict.fromkeys(pages))
        return True

    def _forget_broken_promises(self, asked: int) -> None:
        """Pages that went before they were written. Looked for when as many were asked about: O(1) each."""
        self._asked += asked
        if self._asked <= len(self._promised):
            return
        self._asked = 0
        residency, nvme = self._residency, self._nvme
        assert nvme is not None
        self._promised = {k: None for k in self._promised if residency.held(k) and not nvme.ready(k)}
