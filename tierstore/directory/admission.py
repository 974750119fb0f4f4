"""Admission: decides which pages may be written below memory. Metadata only; ``tick`` sets the time.

A page is kept off disk for one of three reasons: a caller put it with ``memory_only``, the admission policy
has refused it so far, or the tier below memory was opened read-only. A caller's restriction lasts as long as
any copy of the page exists. It ends early if the page, or a page after it, is put without ``memory_only``,
because that put covers the same tokens. As a result, a page that may be stored never follows a page that must
not be stored.

The policy decides only about pages that would be written automatically. ``demote``, ``flush`` and ``close``
write pages regardless of the policy. These writes count against the daily budget, too.
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
    """The pages of a store that must not be written below memory. Only residency and admission change this set."""

    def __init__(self, hierarchy: Hierarchy, lineage: Lineage) -> None:
        self.lowest = hierarchy.lowest
        self.floor = hierarchy.memory_floor
        """The slowest tier that is memory."""
        self.keys: set[PageKey] = set()
        self.refused: set[PageKey] = set()
        """Keys that are in ``keys`` only because admission refused them."""
        self.frozen = hierarchy.frozen
        """Whether nothing is ever written below memory, so that memory-only restrictions are never lifted."""
        self._lineage = lineage
        self._lifting: OrderedDict[PageKey, None] = OrderedDict()

    def __contains__(self, key: PageKey) -> bool:
        return key in self.keys

    def lowest_for(self, key: PageKey) -> Tier:
        """Return the slowest tier that may store the page now."""
        return self.floor if key in self.keys else self.lowest

    def restrict(self, key: PageKey) -> None:
        """Restrict a page to memory, because a caller puts it with ``memory_only``.

        The page is in no tier and is about to get its first copy. If a following page may be stored below
        memory, now or after a later admission, this call has no effect: after a restart, the following page
        would be unreachable without this one.
        """
        if self.frozen or all(
            child in self.keys and child not in self.refused for child in self._lineage.children(key)
        ):
            self.keys.add(key)

    def refuse(self, key: PageKey) -> None:
        """Restrict a page to memory, because admission refuses it.

        If a following page may be stored below memory, this call has no effect.
        """
        if self.frozen or all(child in self.keys for child in self._lineage.children(key)):
            self.keys.add(key)
            self.refused.add(key)

    def forget(self, key: PageKey) -> None:
        """Forget the restriction of a page whose last copy is gone."""
        self.keys.discard(key)
        self.refused.discard(key)
        self._lifting.pop(key, None)

    def permit(self, key: PageKey, *, at_once: bool = False) -> None:
        """Queue a restricted page for ``lift``, which lifts its restriction and then those of all pages before it.

        If ``at_once``, ``lift`` processes this page first.
        """
        if key in self.keys and not self.frozen:
            self._lifting[key] = None
            if at_once:
                self._lifting.move_to_end(key, last=False)

    def permit_named(self, key: PageKey) -> None:
        """Queue the page for ``lift`` if a caller restricted it. No effect on a page that admission refused.

        Called if this page, or a page after it, was put without ``memory_only``.
        """
        if key not in self.refused:
            self.permit(key)

    def permit_refused(self) -> None:
        """Queue all pages that admission refused, and the pages before them, for ``lift``."""
        if not self.frozen:
            self._lifting.update(dict.fromkeys(self.refused))

    def lift(self, limit: int) -> list[PageKey]:
        """Lift the restriction of up to ``limit`` queued pages. The page before each of them is queued, too.

        Returns:
            The pages whose restriction was lifted.
        """
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
        """Whether ``lift`` has work to do."""
        return bool(self._lifting)

    def will_lift(self, key: PageKey) -> bool:
        """Return whether the page's restriction is queued to be lifted."""
        return key in self._lifting


class AdmissionControl:
    """The link between a store and its admission policy: asks the policy, and applies its decisions.

    The policy decides which pages are written to the fastest record tier; without record tiers it is not
    asked. When a refused page is hit, the policy is asked again. A page is written together with all pages before it,
    so the daily budget must suffice for those, too. ``history`` is None if no policy needs one.
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
        """The tier to which pages are admitted, or None if there are no record tiers."""
        self._below = None if self.guarded is None else residency.tables[self.guarded]
        self._record_nbytes = 0 if self._below is None else self._below.record_nbytes
        self._promised: dict[PageKey, None] = {}
        """Pages that are not written yet and for which bytes of the daily budget are reserved."""
        self._asked = 0
        self._insisting = 0
        self._now = 0.0

    def tick(self, now: float) -> None:
        """Set the current monotonic time, in seconds."""
        self._now = now

    # -- puts, hits and writes ----------------------------------------------------------------------------------

    def put(self, key: PageKey, parent: PageKey | None, following: int = 0, *, asked: bool = False) -> None:
        """Decide whether to write a page that is in no tier and is about to get its first copy.

        Args:
            key: The page. It is not memory-only.
            parent: The page before it, or None.
            following: Number of pages after it in the same call to ``TierStore.put``.
            asked: Whether a caller has already requested that the page be written.
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
        """Decide again whether to write these pages, which were requested or put again.

        ``source`` is the fastest tier that had them.
        """
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
        """Admit refused pages among ``keys``, and all pages before them, as a caller requested.

        Restrictions by ``memory_only`` remain.
        """
        for key in keys:
            if key in self._memory_only.refused:
                self._memory_only.permit(key, at_once=True)

    def insist_on_all(self) -> None:
        """Admit all pages until ``insisted`` is called, because a caller requested a flush."""
        self._insisting += 1
        self._memory_only.permit_refused()

    def insisted(self) -> None:
        """End the effect of ``insist_on_all``, because the flush now knows all pages that it has to save."""
        self._insisting -= 1

    def written(self, key: PageKey, nbytes: int, now: float) -> None:
        """Count a record of ``nbytes`` bytes that was written, and end the page's reservation."""
        self._promised.pop(key, None)
        self.budget.spend(nbytes, now)
        self._admission.wrote()

    def stats(self) -> dict[str, int | None]:
        """Return the number of pages that admission keeps off disk, and the state of the daily budget.

        The state consists of the bytes written in the last 24 hours, the limit, and the remaining bytes. The
        limit and the remaining bytes are None if there is no limit.
        """
        return {
            "waiting_pages": len(self._memory_only.refused),
            "written_last_24h": self.budget.spent(self._now),
            "daily_writes": self.budget.daily_nbytes,
            "left_today": self.budget.left(self._now),
        }

    # -- internals ----------------------------------------------------------------------------------------------

    def _gone(self) -> float:
        """Return the fraction of the daily budget that is used or reserved, 0 to 1."""
        daily = self.budget.daily_nbytes
        return 0.0 if daily is None else min(1.0, self._committed() / daily)

    def _committed(self) -> int:
        return self.budget.spent(self._now) + len(self._promised) * self._record_nbytes

    def _afford(self, key: PageKey, parent: PageKey | None) -> bool:
        """Reserve budget for the page and for the refused pages before it.

        Returns:
            False if the budget does not suffice. Nothing is reserved then.
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
        """From time to time, release the reservations of pages that were evicted before they were written.

        ``asked`` is the number of pages for which budget is about to be reserved. Takes amortized O(1) time per page.
        """
        self._asked += asked
        if self._asked <= len(self._promised):
            return
        self._asked = 0
        residency, below = self._residency, self._below
        assert below is not None
        self._promised = {k: None for k in self._promised if residency.held(k) and not below.ready(k)}
