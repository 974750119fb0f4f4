"""Which pages may be written below memory. Metadata only; time comes with ``tick``.

A page stays in memory because a caller wants it to (``memory_only``), because the admission policy has refused it so
far, or because the tier below memory was opened read-only. A caller's wish holds from the page's first copy to its
last, unless a request that may use the disk names the page or one after it: such a request has the same tokens. So no
page that may be stored ever follows one that may not.

The policy is asked only about pages that are written automatically. ``demote``, ``flush`` and ``close`` write pages
regardless of admission, and these writes count against the daily budget.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.hierarchy import Hierarchy
    from tierstore.directory.lineage import Lineage
    from tierstore.directory.residency import Residency
    from tierstore.policy import Admission, History, WriteBudget
    from tierstore.types import PageKey, Tier


class MemoryOnly:
    """The pages of a store that stay in memory. Changed only by residency and admission."""

    def __init__(self, hierarchy: Hierarchy, lineage: Lineage) -> None:
        self.lowest = hierarchy.lowest
        self.floor = hierarchy.memory_floor
        """The slowest tier that is memory."""
        self.keys: set[PageKey] = set()
        self.refused: set[PageKey] = set()
        """Those of ``keys`` that stay because admission refused them, not because a caller wants it."""
        self.frozen = hierarchy.frozen
        """Whether nothing is ever written below memory: what is memory-only stays that."""
        self._lineage = lineage
        self._lifting: OrderedDict[PageKey, None] = OrderedDict()

    def __contains__(self, key: PageKey) -> bool:
        return key in self.keys

    def lowest_for(self, key: PageKey) -> Tier:
        """Return the slowest tier that may ever hold the page. Decides whether a page may be copied down."""
        return self.floor if key in self.keys else self.lowest

    def restrict(self, key: PageKey) -> None:
        """Keep a page in memory that no tier holds and that gets its first copy.

        No effect if a page follows it that may be stored, now or once admission wants it: after a restart that one
        would be unreachable.
        """
        if self.frozen or all(
            child in self.keys and child not in self.refused for child in self._lineage.children(key)
        ):
            self.keys.add(key)

    def refuse(self, key: PageKey) -> None:
        """Record that admission refuses a page that gets its first copy. No effect if a storable page follows it."""
        if self.frozen or all(child in self.keys for child in self._lineage.children(key)):
            self.keys.add(key)
            self.refused.add(key)

    def forget(self, key: PageKey) -> None:
        """Record that the page's last copy is gone."""
        self.keys.discard(key)
        self.refused.discard(key)
        self._lifting.pop(key, None)

    def permit(self, key: PageKey, *, at_once: bool = False) -> None:
        """Allow the page and all before it to be stored. ``lift`` carries it out; ``at_once``: before all others."""
        if key in self.keys and not self.frozen:
            self._lifting[key] = None
            if at_once:
                self._lifting.move_to_end(key, last=False)

    def permit_named(self, key: PageKey) -> None:
        """End a caller's wish, but not a refusal, because a request that may use the disk names the page."""
        if key not in self.refused:
            self.permit(key)

    def permit_refused(self) -> None:
        """Allow all pages to be stored that only admission keeps in memory, and those before them."""
        if not self.frozen:
            self._lifting.update(dict.fromkeys(self.refused))

    def lift(self, limit: int) -> list[PageKey]:
        """Lift the restriction of up to ``limit`` permitted pages and pages before them, and return them."""
        lifted: list[PageKey] = []
        for _ in range(limit):
            if not self._lifting:
                break
            key, _ = self._lifting.popitem(last=False)
            self.keys.discard(key)
            self.refused.discard(key)
            lifted.append(key)
            parent = self._lineage.parent(key)
            if parent is not None:
                self.permit(parent)
        return lifted

    @property
    def lifting(self) -> bool:
        """Whether ``lift`` has something to do."""
        return bool(self._lifting)

    def will_lift(self, key: PageKey) -> bool:
        """Return whether the page is among the next to be lifted."""
        return key in self._lifting


class AdmissionControl:
    """Reports puts and hits to ``history``, asks ``admission``, and remembers its answers.

    ``history`` is None if no policy needs one. Pages are admitted to the fastest tier that keeps records; without one
    there is nothing to admit to. A page that is refused is asked about again when it is hit. A page is written with all
    pages before it, so the budget must have space for them, too.
    """

    def __init__(
        self,
        residency: Residency,
        history: History | None,
        admission: Admission,
        budget: WriteBudget,
    ) -> None:
        self.budget = budget
        self._residency = residency
        self._memory_only = residency.memory_only
        self._history = history
        self._admission = admission
        self._records = residency.hierarchy.records
        self.guarded = residency.hierarchy.first_records
        """The tier to which pages are admitted; None: there is none."""
        self._below = None if self.guarded is None else residency.tables[self.guarded]
        self._record_nbytes = 0 if self._below is None else self._below.record_nbytes
        self._promised: dict[PageKey, None] = {}
        """Pages that were let through the budget and are not written yet."""
        self._asked = 0
        self._insisting = 0
        self._now = 0.0

    def tick(self, now: float) -> None:
        """Set the time, in seconds."""
        self._now = now

    # -- what happens to pages ----------------------------------------------------------------------------------

    def put(self, key: PageKey, parent: PageKey | None, following: int = 0, *, asked: bool = False) -> None:
        """Decide about a page that no tier holds, that may be stored, and that is about to get its first copy.

        Args:
            parent: The page before it.
            following: Number of pages that come after it in the same call.
            asked: A caller has requested already that it is written.
        """
        history, record, again = self._history, None, False
        if history is not None:
            record, again = history.put(key, parent, following)
        if self._below is None:
            return
        if self._memory_only.frozen:
            self._memory_only.refuse(key)
            return
        admitted = self._admission.put(record, self._gone(), again=again) and self._afford(key, parent)
        if not (admitted or asked or self._insisting):
            self._memory_only.refuse(key)

    def hit(self, keys: Sequence[PageKey], source: Tier) -> None:
        """Decide about held pages that were requested or put again; ``source`` is the fastest tier that had them."""
        if self._history is None and (self._below is None or not self._memory_only.refused):
            return
        for key in keys:
            self._hit(key, source)

    def _hit(self, key: PageKey, source: Tier) -> None:
        record = None
        if self._history is not None:
            record = self._history.hit(key, below=source in self._records)
        if self._below is None or self._memory_only.frozen or key not in self._memory_only.refused:
            return
        if self._admission.hit(record, self._gone()) and self._afford(
            key, self._residency.lineage.parent(key)
        ):
            self._memory_only.permit(key)

    def insist(self, keys: Sequence[PageKey]) -> None:
        """Admit these pages and those before them, because a caller asked for them to be written."""
        for key in keys:
            if key in self._memory_only.refused:
                self._memory_only.permit(key, at_once=True)

    def insist_on_all(self) -> None:
        """Refuse nothing until ``insisted``, because a caller asked for everything to be written."""
        self._insisting += 1
        self._memory_only.permit_refused()

    def insisted(self) -> None:
        """End ``insist_on_all``: the requested pages are known, and pages may be refused again."""
        self._insisting -= 1

    def written(self, key: PageKey, nbytes: int, now: float) -> None:
        """Count a record of this many bytes that was written."""
        self._promised.pop(key, None)
        self.budget.spend(nbytes, now)
        self._admission.wrote()

    def stats(self) -> dict[str, int | None]:
        """Return the number of pages kept in memory by admission, and the state of the budget.

        The budget is the bytes written in the last 24 hours and the bytes left (None without a limit).
        """
        return {
            "waiting_pages": len(self._memory_only.refused),
            "written_last_24h": self.budget.spent(self._now),
            "daily_writes": self.budget.daily_nbytes,
            "left_today": self.budget.left(self._now),
        }

    # -- inside -------------------------------------------------------------------------------------------------

    def _gone(self) -> float:
        """Return the fraction of the daily budget that is used or promised, 0 to 1."""
        daily = self.budget.daily_nbytes
        return 0.0 if daily is None else min(1.0, self._committed() / daily)

    def _committed(self) -> int:
        return self.budget.spent(self._now) + len(self._promised) * self._record_nbytes

    def _afford(self, key: PageKey, parent: PageKey | None) -> bool:
        """Reserve budget for the page and those before it that are not to be written yet. False if it does not
        suffice.
        """
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
        """Forget pages that were evicted before they were written. Amortized O(1) per page."""
        self._asked += asked
        if self._asked <= len(self._promised):
            return
        self._asked = 0
        residency, below = self._residency, self._below
        assert below is not None
        self._promised = {k: None for k in self._promised if residency.held(k) and not below.ready(k)}
