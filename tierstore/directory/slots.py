"""HBM slots that are passed between callers and the store. Metadata only.

If the store owns HBM, a caller owns slots from ``allocate`` until it puts or frees them. ``put`` turns them
into pages that can be matched. If an engine owns HBM, the pages that it puts are queued until HOST has space,
and the store reports when their slots are free again. Between ``put`` and that report, the engine must neither
put the slot again nor load a page into it.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tierstore.directory.leases import last_key
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import CapacityError, LeaseError
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tierstore.directory.admission import AdmissionControl
    from tierstore.directory.eviction import Drops, Space
    from tierstore.directory.leases import LeaseRecord, Leases
    from tierstore.directory.loads import Loads
    from tierstore.directory.residency import Residency
    from tierstore.directory.writeback import Sinks, WriteBack
    from tierstore.types import PageKey


class OwnedSlots:
    """HBM slots that callers own. Used if the store owns HBM."""

    def __init__(self, residency: Residency, space: Space, drops: Drops) -> None:
        self._residency = residency
        self._space = space
        self._drops = drops

    def allocate(self, n: int, *, reserve: int) -> list[int] | None:
        """Take ``n`` HBM slots, which the caller then owns. Pages in droppable slots are evicted.

        ``reserve`` is the number of slots that the caller still needs in total, at least ``n``.

        Returns:
            The slots, or None if fewer than ``reserve`` slots are free or droppable now. In that case no slot
                is taken.
        """
        if self._space.room(Tier.HBM) < reserve and not self._could_drop(reserve):
            return None
        slots: list[int] = []
        try:
            for _ in range(n):
                slots.append(self._residency.take(Tier.HBM))
        except CapacityError:
            self.retire(slots)
            self.free(slots)
            return None
        finally:
            self._drops.note()
        return slots

    def retire(self, slots: Sequence[int]) -> None:
        """End the ownership of slots that their owner gives up. They become reusable only with ``free``."""
        self.require(slots)
        for slot in slots:
            self._residency.retire(Tier.HBM, slot)

    def free(self, slots: Sequence[int]) -> None:
        """Free slots that were retired."""
        for slot in slots:
            self._residency.release_retired(Tier.HBM, slot)

    def require(self, slots: Sequence[int]) -> None:
        """Raise LeaseError if a slot is not owned by a caller, or is given twice."""
        owned = self._residency.tables[Tier.HBM].owned
        strange = [slot for slot in slots if slot not in owned]
        if strange:
            raise LeaseError(
                f"slot {strange[0]} is not owned by a caller; pass slots from allocate that have not been put or freed"
            )
        if len(set(slots)) != len(slots):
            raise LeaseError("slots must be distinct, but a slot occurs twice; pass each slot once")

    def _could_drop(self, n: int) -> bool:
        """Return whether ``n`` slots could be freed by dropping pages.

        If no tier is below HBM, a page becomes droppable once its last child is dropped, which ``Space.room``
        does not take into account.
        """
        hbm = self._residency.tables[Tier.HBM]
        return len(hbm.free) + self._residency.unpinned(Tier.HBM) - len(hbm.dirty) >= n


class SealedSlots:
    """The implementation of ``put`` if the store owns HBM: turns filled slots of callers into pages."""

    def __init__(
        self,
        residency: Residency,
        admission: AdmissionControl,
        leases: Leases,
        loads: Loads,
        writeback: WriteBack,
    ) -> None:
        self._residency = residency
        self._admission = admission
        self._leases = leases
        self._loads = loads
        self._writeback = writeback

    def put(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        parent: PageKey | None,
        lease: LeaseRecord | None,
        *,
        written: bool,
        memory_only: bool = False,
        replaceable: Collection[PageKey] = (),
    ) -> tuple[list[int], list[int]]:
        """Turn filled slots into pages.

        Args:
            keys: The pages.
            slots: The slot of each page, owned by the caller.
            parent: The page before the first key. None: the last page of the lease, if any.
            lease: A lease that pins the pages. If it may cover only exact pages, the put stops before the
                first page that has an inexact copy in memory that cannot be dropped.
            written: Whether the bytes of the pages have been written.
            memory_only: Whether the pages must never be stored below memory.
            replaceable: Keys whose copy in HBM is still being written by another caller. The caller's slot
                replaces that copy, because the caller has no lease with which to wait for it. If the caller's
                page may be inexact, it does not replace the copy.

        Returns:
            Two lists: the slot of each page that was put, and the caller's slots that are not needed, which
                are retired.
        """
        table = self._residency.tables[Tier.HBM]
        kept: list[int] = []
        duplicates: list[int] = []
        parent = parent or last_key(lease)
        if not memory_only and parent is not None:
            self._residency.memory_only.permit_named(parent)
        for following, key, slot in zip(range(len(keys) - 1, -1, -1), keys, slots, strict=True):
            if not self._may_put(key, parent, lease):
                break
            if replaceable and key in replaceable and self._replace(key, slot, parent, written=written):
                if not memory_only:
                    self._admission.hit((key,), Tier.HBM)
            elif table.ready(key):
                self._residency.retire(Tier.HBM, slot)
                duplicates.append(slot)
                if not memory_only:
                    self._admission.hit((key,), Tier.HBM)
            else:
                self._seal(key, slot, parent, following, written=written, memory_only=memory_only)
                if lease is not None and lease.inexact:
                    self._residency.exactness.doubt(key)
            if not memory_only:
                self._residency.memory_only.permit_named(key)
            kept.append(table.copies[key].slot)
            if lease is not None:
                self._leases.hold(lease, key)
            parent = key
        self._residency.touch(keys)
        return kept, duplicates

    def written(self, keys: Sequence[PageKey], slots: Sequence[int]) -> None:
        """Record that the bytes of these pages are written, so that they can be copied to other tiers."""
        for key, slot in zip(keys, slots, strict=True):
            if self._writeback.unwritten.get(key) == slot:
                del self._writeback.unwritten[key]
            self._residency.unpin((key,), Tier.HBM, (slot,))
            self._writeback.sinks.unpinned((key,), Tier.HBM)
            if self._residency.tables[Tier.HBM].ready(key):
                self._writeback.sealed(key)

    # -- internals ----------------------------------------------------------------------------------------------

    def _seal(
        self,
        key: PageKey,
        slot: int,
        parent: PageKey | None,
        following: int,
        *,
        written: bool,
        memory_only: bool,
    ) -> None:
        table = self._residency.tables[Tier.HBM]
        copy = table.copies.get(key)
        old_slot = None if copy is None else copy.slot
        source = self._residency.where(key)
        if not memory_only and source is not None:
            self._admission.hit((key,), source)
        elif not memory_only and not self._residency.held(key):
            self._admission.put(key, parent, following)
        self._residency.adopt(key, Tier.HBM, slot, parent, memory_only=memory_only)
        if written:
            self._writeback.sealed(key)
        else:
            self._residency.pin((key,), Tier.HBM)
            self._writeback.unwritten[key] = slot
        # This comes last: code that finds that the lease no longer waits must also find the page unwritten.
        if old_slot is not None and old_slot in self._loads.by_slot:
            self._leases.moved(self._loads.cancel(old_slot), slot)

    def _replace(self, key: PageKey, slot: int, parent: PageKey | None, *, written: bool) -> bool:
        """Make ``slot`` the page's copy, in place of a copy that is still being written.

        Leases keep the old slot.

        Returns:
            False if no copy is being written, or if the new one would be less exact. In these cases, nothing
            has changed.
        """
        residency, unwritten = self._residency, self._writeback.unwritten
        copy = residency.tables[Tier.HBM].copies.get(key)
        if copy is None or not copy.ready or copy.slot != unwritten.get(key):
            return False
        if parent is not None and not residency.exactness.exact(parent):
            return False
        residency.replace(key, Tier.HBM, slot)
        if written:
            del unwritten[key]
            self._writeback.sealed(key)
        else:
            residency.pin((key,), Tier.HBM)
            unwritten[key] = slot
        return True

    def _may_put(self, key: PageKey, parent: PageKey | None, lease: LeaseRecord | None) -> bool:
        """Return whether the page may be put with this lease, which may be restricted to exact pages.

        If the caller's page is exact, inexact copies in memory that are unpinned and saved in a lower tier
        are dropped first.
        """
        exactness = self._residency.exactness
        if exactness.exact(key):
            return True
        if (parent is None or exactness.exact(parent)) and not (lease is not None and lease.inexact):
            for tier in exactness.tainted_in(key):
                if not self._residency.tables[tier].copies[key].pins and self._residency.saved_below(
                    key, tier
                ):
                    self._residency.dropped.append(self._residency.evict(key, tier))
        return lease is None or not lease.exact or not exactness.stays_tainted(key)


class _Page(NamedTuple):
    """A page to be copied out of an engine's slot.

    ``following`` is the number of later pages in the same call. ``doubted`` is True if the page was computed
    from pages that are not exact.
    """

    key: PageKey
    slot: int
    parent: PageKey | None
    memory_only: bool
    following: int
    doubted: bool


class OutgoingPages:
    """Pages that an engine has put and that are not copied out yet. Used if an engine owns HBM.

    ``num_slots`` is 0 until the engine's tensors are registered. A caller may ask to flush or demote such a page
    before any tier has it. This class therefore reports to ``sinks`` which pages are to be copied out, and when the
    copy of a page has ended or is given up.
    """

    def __init__(
        self, residency: Residency, space: Space, loads: Loads, admission: AdmissionControl, sinks: Sinks
    ) -> None:
        self.num_slots = 0
        self.reusable: list[int] = []
        """Slots that no copy reads or writes any more, to be reported by ``poll``."""
        self.given_up = 0
        """Number of pages given up since this was last reset: no space below, withdrawn, or never written."""
        self.num_forgotten = 0
        """Number of pages given up by ``forget``, since this was last reset."""
        self._forgotten: set[int] = set()
        """Slots whose pages ``forget`` has given up, until the slots are reported."""
        self._slots: dict[int, PageKey | None] = {}
        """Slots that the store may read. The value is the key of the page, or None if it is memory-only."""
        self._queue: deque[_Page] = deque()
        self._residency = residency
        self._space = space
        self._loads = loads
        self._admission = admission
        self._sinks = sinks

    @property
    def waiting(self) -> bool:
        """Whether any page is waiting for space in a lower tier."""
        return bool(self._queue)

    def require_usable(self, slots: Sequence[int]) -> None:
        """Raise LeaseError if a slot does not exist, is given twice, or is still being copied."""
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise LeaseError(f"the engine's slots are 0 to {self.num_slots - 1}, got slot {slot}")
            if slot in self._slots or slot in self._loads.by_slot:
                raise LeaseError(f"slot {slot} is still being copied; wait until that copy has finished")
        if len(set(slots)) != len(slots):
            raise LeaseError("slots must be distinct, but a slot occurs twice; pass each slot once")

    def accept(self, keys: Sequence[PageKey], slots: Sequence[int], *, memory_only: bool) -> None:
        """Accept slots from the engine. The store may read them until it reports them as no longer used."""
        self.require_usable(slots)
        self._unreport(slots)
        self._slots.update(zip(slots, [None] * len(slots) if memory_only else keys, strict=True))
        if not memory_only:
            self._sinks.coming.update(keys)

    def add(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        *,
        memory_only: bool,
        parent: PageKey | None = None,
        doubted: bool = False,
    ) -> None:
        """Queue the copies of accepted slots, now that the slots are written.

        ``parent`` is the page before the first key. See ``_Page`` for ``doubted``.
        """
        for following, key, slot in zip(range(len(keys) - 1, -1, -1), keys, slots, strict=True):
            if slot in self._forgotten:
                self._forgo(slot)
            else:
                self._queue.append(_Page(key, slot, parent, memory_only, following, doubted))
            parent = key

    def withdraw(self, slots: Collection[int]) -> list[int]:
        """Give slots back to the engine. See ``TierStore.withdraw``.

        Pages that are still waiting for space are given up. Their slots are free at once and are not reported.

        Returns:
            The slots that a copy is reading now, or will read once they have been written.
        """
        self._unreport(slots)
        wanted = set(slots) & self._slots.keys()
        if wanted:
            waiting = [page for page in self._queue if page.slot in wanted]
            self._queue = deque(page for page in self._queue if page.slot not in wanted)
            self._let_go([page.slot for page in waiting])
            self.given_up += len(waiting)
        return [slot for slot in slots if slot in self._slots]

    def give_up(self, slots: Sequence[int]) -> None:
        """Give up accepted slots that were never written."""
        for slot in slots:
            if slot in self._forgotten:
                self._forgo(slot)
            else:
                self.given_up += 1
                self.ended(slot)

    def forget(self) -> list[PageKey]:
        """Give up every page that was put and has not been copied out.

        Slots of pages that were only waiting for space are reported at once. Other slots are reported when
        they have been written, or when the copy that reads them has finished.

        Returns:
            The keys of all pages that were in the engine's slots, except memory-only pages.
        """
        waiting = [page.slot for page in self._queue]
        self._queue.clear()
        self._forgotten.update(self._slots)
        coming = [key for key in self._slots.values() if key is not None]
        self._slots = dict.fromkeys(self._slots)
        self._sinks.came(coming)
        for slot in waiting:
            self._forgo(slot)
        return coming

    def ended(self, *slots: int) -> None:
        """Report the slots as reusable in the next ``poll``, because no copy will read them any more."""
        self._let_go(slots)
        self.reusable += slots

    def _unreport(self, slots: Collection[int]) -> None:
        """Do not report that these slots are free, because the engine is using them again.

        Otherwise the engine would take the report to be about its new use of a slot.
        """
        if self.reusable:
            known = set(slots)
            self.reusable = [slot for slot in self.reusable if slot not in known]

    def _forgo(self, slot: int) -> None:
        self.num_forgotten += 1
        self.ended(slot)

    def _let_go(self, slots: Sequence[int]) -> None:
        self._forgotten.difference_update(slots)
        keys = map(self._slots.pop, slots)
        self._sinks.came([key for key in keys if key is not None])

    def advance(self, now: float) -> None:
        """Start the copies for which the next tier has space. Give up a page only if no space will become free.

        If a prompt does not fit into the tiers, its beginning is kept: a page is given up if its own parent is the
        only page that could be evicted to make space for it. No page is evicted for the pages that follow it in the
        prompt, because no request could reach them.

        While memory-only restrictions of other pages are being lifted, no copy starts, because it might evict
        those pages before they are saved.
        """
        dst = self._space.below(Tier.HBM)
        while self._queue and dst is not None and not self._residency.memory_only.lifting:
            page = self._queue[0]
            if self._residency.held(page.key):
                if not page.memory_only:
                    self._residency.memory_only.permit_named(page.key)
                    source = self._residency.where(page.key)
                    if source is not None:
                        self._admission.hit((page.key,), source)
            elif page.memory_only and dst > self._residency.memory_only.floor:
                pass
            elif self._start(self._run(), dst):
                continue
            else:
                if self._can_be_reached(page):
                    self._space.make_room(dst, len(self._queue), now)
                    self._space.relieve(dst, 1, now, spared=page.parent)
                    if self._start([page], dst):
                        continue
                    if self._space.room(dst) == 0 and not self._space.blocked(dst, now):
                        return
                self.given_up += 1
            self.ended(page.slot)
            self._queue.popleft()

    def _can_be_reached(self, page: _Page) -> bool:
        return page.parent in self._sinks.coming or not self._residency.orphans.after(page.parent)

    def _run(self) -> list[_Page]:
        """Return the first queued page, and the pages right after it that can be started in the same call."""
        memory_only, held = self._queue[0].memory_only, self._residency.held
        run: list[_Page] = []
        for page in islice(self._queue, BATCH_PAGES):
            if page.memory_only != memory_only or held(page.key):
                break
            run.append(page)
        return run

    def _start(self, run: Sequence[_Page], dst: Tier) -> int:
        """Start copying the first queued pages out of their slots, and remove them from the queue.

        Args:
            run: The first pages of the queue. They are in no tier, and either all of them are memory-only or none.
            dst: The destination.

        Returns:
            The number of pages. 0 if there is no space for the first one.
        """
        keys, slots, parents, *_ = zip(*run, strict=True)
        memory_only = run[0].memory_only
        started = self._space.copy_from_engine(
            keys, slots, dst, parents, memory_only=memory_only, coming=self._sinks.coming
        )
        for page in run[:started]:
            self._queue.popleft()
            if page.doubted:
                self._residency.exactness.doubt(page.key)
            if not memory_only:
                asked = self._sinks.to_disk(page.key)
                self._admission.put(page.key, page.parent, page.following, asked=asked)
        return started
