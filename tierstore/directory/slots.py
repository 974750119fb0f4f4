"""HBM slots between callers and the store: owned, sealed by ``put``, or an engine's own, copied out. Metadata only.

If the store owns HBM, a caller owns slots from ``allocate`` until they are put or given back; ``put`` makes them pages
that can be matched. If an engine owns HBM, its pages are queued until HOST has space, and the engine is told when their
slots are free again: between ``put`` and that report a slot may neither be put again nor be loaded into.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tierstore.directory.leases import last_key
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
    """Slots that callers own, in a store that owns HBM."""

    def __init__(self, residency: Residency, space: Space, drops: Drops) -> None:
        self._residency = residency
        self._space = space
        self._drops = drops

    def allocate(self, n: int, *, reserve: int) -> list[int] | None:
        """Return ``n`` owned HBM slots; None, with nothing changed, if ``reserve`` are not free or droppable now."""
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
        """Take owned slots from their owner. Nobody else may use them until ``free``."""
        self.require(slots)
        for slot in slots:
            self._residency.retire(Tier.HBM, slot)

    def free(self, slots: Sequence[int]) -> None:
        """Make retired slots free."""
        for slot in slots:
            self._residency.release_retired(Tier.HBM, slot)

    def require(self, slots: Sequence[int]) -> None:
        """Raise LeaseError unless all slots are owned by callers, each named once."""
        owned = self._residency.tables[Tier.HBM].owned
        strange = [slot for slot in slots if slot not in owned]
        if strange:
            raise LeaseError(f"slot {strange[0]} is not owned by a caller")
        if len(set(slots)) != len(slots):
            raise LeaseError("a slot is named twice")

    def _could_drop(self, n: int) -> bool:
        """With no tier below to go to, a page is droppable when its last child goes: room() does not count it yet."""
        hbm = self._residency.tables[Tier.HBM]
        return len(hbm.free) + self._residency.unpinned(Tier.HBM) - len(hbm.dirty) >= n


class SealedSlots:
    """Takes over slots of callers. If an engine owns HBM, nothing is sealed."""

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
        """Seals owned slots: the slot that holds each key now, and the duplicates among yours (retired).

        ``parent`` is the page before the first key; None: the last page of the lease, if there is one. Under an exact
        lease it ends before a key of which a copy in memory is not exact and does not make way. ``replaceable``: keys
        whose copy in HBM is still being written by others. Yours takes its place, unless it is less exact: without a
        lease nobody could tell the caller when to read the other one.
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
        """Note that the engine has finished writing pages sealed earlier: copies may start from them."""
        for key, slot in zip(keys, slots, strict=True):
            if self._writeback.unwritten.get(key) == slot:
                del self._writeback.unwritten[key]
            self._residency.unpin((key,), Tier.HBM, (slot,))
            self._writeback.sinks.unpinned((key,), Tier.HBM)
            if self._residency.tables[Tier.HBM].ready(key):
                self._writeback.sealed(key)

    # -- inside -------------------------------------------------------------------------------------------------

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
        # Only now: whoever sees that a lease waits for no copy any more must see that its page is still being written.
        if old_slot is not None and old_slot in self._loads.by_slot:
            self._leases.moved(self._loads.cancel(old_slot), slot)

    def _replace(self, key: PageKey, slot: int, parent: PageKey | None, *, written: bool) -> bool:
        """Make ``slot`` the page's copy in place of one that is still being written; leases keep the old slot.

        False, nothing changed: there is no such copy, or this one would be less exact.
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
        """Return whether the lease may hold what will be the page's copy in HBM.

        For an exact page, copies that are inexact, unused and saved below give way.
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
    """A page that is to be copied out. ``following``: how many came after it at once. ``doubted``: it was computed over
    pages that are not exact."""

    key: PageKey
    slot: int
    parent: PageKey | None
    memory_only: bool
    following: int
    doubted: bool


class OutgoingPages:
    """What an engine that owns HBM has put and not got back. ``num_slots``: 0 until its tensors are registered.

    ``sinks`` is told which pages come, and what becomes of them: they may be sent further down before they are there.
    """

    def __init__(
        self, residency: Residency, space: Space, loads: Loads, admission: AdmissionControl, sinks: Sinks
    ) -> None:
        self.num_slots = 0
        self.reusable: list[int] = []
        """Slots that no copy reads or writes any more, for ``poll`` to report."""
        self.given_up = 0
        """Pages that found no room below since this was last looked at."""
        self.num_forgotten = 0
        """Pages given up because of ``forget`` since this was last looked at."""
        self._forgotten: set[int] = set()
        """Slots whose pages ``forget`` gave up, and that are not reported yet."""
        self._slots: dict[int, PageKey | None] = {}
        """Slots of the store's to read, and what goes further down than memory from there."""
        self._queue: deque[_Page] = deque()
        self._residency = residency
        self._space = space
        self._loads = loads
        self._admission = admission
        self._sinks = sinks

    @property
    def waiting(self) -> bool:
        """Whether pages wait for space."""
        return bool(self._queue)

    def require_usable(self, slots: Sequence[int]) -> None:
        """Raise LeaseError unless the engine has these slots, names each once, and no copy uses them."""
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise LeaseError(f"slot {slot} is none of the engine's {self.num_slots}")
            if slot in self._slots or slot in self._loads.by_slot:
                raise LeaseError(f"slot {slot} is still being copied")
        if len(set(slots)) != len(slots):
            raise LeaseError("a slot is named twice")

    def accept(self, keys: Sequence[PageKey], slots: Sequence[int], *, memory_only: bool) -> None:
        """Let the store read the slots until they are reported."""
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
        """Start copies of accepted slots that are written. ``parent``: the page before the first key."""
        for following, key, slot in zip(range(len(keys) - 1, -1, -1), keys, slots, strict=True):
            if slot in self._forgotten:
                self._forgo(slot)
            else:
                self._queue.append(_Page(key, slot, parent, memory_only, following, doubted))
            parent = key

    def withdraw(self, slots: Collection[int]) -> list[int]:
        """Return slots to the engine: those whose copies have not begun belong to it at once, and are not reported.

        Returns those of ``slots`` that a copy reads now, or will read once they are written.
        """
        self._unreport(slots)
        wanted = set(slots) & self._slots.keys()
        if wanted:
            waiting = [page for page in self._queue if page.slot in wanted]
            self._queue = deque(page for page in self._queue if page.slot not in wanted)
            for page in waiting:
                self._let_go(page.slot)
            self.given_up += len(waiting)
        return [slot for slot in slots if slot in self._slots]

    def give_up(self, slots: Sequence[int]) -> None:
        """Give up accepted slots whose writing has failed."""
        for slot in slots:
            if slot in self._forgotten:
                self._forgo(slot)
            else:
                self.given_up += 1
                self.ended(slot)

    def forget(self) -> list[PageKey]:
        """Give up every page that was put; return the keys that no copy comes for any more.

        A slot that no copy reads and whose page is written is reported at once. The others are reported once their
        page is written, or their copy has ended.
        """
        waiting = [page.slot for page in self._queue]
        self._queue.clear()
        self._forgotten.update(self._slots)
        coming = [key for key in self._slots.values() if key is not None]
        self._slots = dict.fromkeys(self._slots)
        for key in coming:
            self._sinks.came(key)
        for slot in waiting:
            self._forgo(slot)
        return coming

    def ended(self, slot: int) -> None:
        """Note that nothing reads the slot any more."""
        self._let_go(slot)
        self.reusable.append(slot)

    def _unreport(self, slots: Collection[int]) -> None:
        """The engine goes on with these: told of later, an end of before would be taken for that of a newer copy."""
        if self.reusable:
            known = set(slots)
            self.reusable = [slot for slot in self.reusable if slot not in known]

    def _forgo(self, slot: int) -> None:
        self.num_forgotten += 1
        self.ended(slot)

    def _let_go(self, slot: int) -> None:
        self._forgotten.discard(slot)
        key = self._slots.pop(slot)
        if key is not None:
            self._sinks.came(key)

    def advance(self, now: float) -> None:
        """Start the copies for which there is space; give pages up only if there will be none.

        So a prompt longer than the tiers keeps its beginning: the first page that only its parent could make room for
        is given up, and later pages displace nothing, because no request could reach them. It waits while pages are to
        be lifted that may be stored from now on: they would be dropped to make room.
        """
        dst = self._space.below(Tier.HBM)
        while self._queue and dst is not None and not self._residency.memory_only.lifting:
            page = self._queue[0]
            key, slot, memory_only = page.key, page.slot, page.memory_only
            if self._residency.held(key):
                if not memory_only:
                    self._residency.memory_only.permit_named(key)
                    source = self._residency.where(key)
                    if source is not None:
                        self._admission.hit((key,), source)
                self.ended(slot)
            elif memory_only and dst > self._residency.memory_only.floor:
                self.ended(slot)
            elif not self._start(page, dst):
                if self._can_be_reached(page):
                    self._space.make_room(dst, len(self._queue), now)
                    self._space.relieve(dst, 1, now, spared=page.parent)
                    if self._start(page, dst):
                        self._queue.popleft()
                        continue
                    if self._space.room(dst) == 0 and not self._space.blocked(dst, now):
                        return
                self.given_up += 1
                self.ended(slot)
            self._queue.popleft()

    def _can_be_reached(self, page: _Page) -> bool:
        return page.parent in self._sinks.coming or not self._residency.orphans.after(page.parent)

    def _start(self, page: _Page, dst: Tier) -> bool:
        """Begin to copy the page out of its slot. False if there is no space for it."""
        key, parent = page.key, page.parent
        if not self._space.copy_from_engine(
            key,
            page.slot,
            dst,
            parent,
            memory_only=page.memory_only,
            coming=parent is not None and parent in self._sinks.coming,
        ):
            return False
        if page.doubted:
            self._residency.exactness.doubt(key)
        if not page.memory_only:
            self._admission.put(key, parent, page.following, asked=self._sinks.to_disk(key))
        return True
