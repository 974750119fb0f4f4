"""Pages on their way into HBM: straight from the tier below it, or promoted from NVMe to HOST first. Metadata only.

A load owns an HBM slot from the moment it starts and pins its source, so its page cannot leave before it arrives.
Promotions take HOST slots as they come free: a lease of any size streams through a HOST tier of any size.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tierstore.directory.transfers import BATCH_PAGES, Move
from tierstore.errors import CapacityError
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.residency import Residency
    from tierstore.directory.transfers import Traffic
    from tierstore.leasing import LeaseRecord
    from tierstore.types import PageKey


@dataclass(slots=True, eq=False)
class Load:
    """One page being brought into one HBM slot. ``submitted``: a transfer writes the slot and holds the source pin."""

    key: PageKey
    slot: int
    source: Tier
    source_slot: int
    submitted: bool = False
    abandoned: bool = False
    waiters: list[tuple[LeaseRecord, int]] = field(default_factory=list)


class Loads:
    """All loads in progress, by HBM slot; finished ones wait in ``ended`` for the directory."""

    def __init__(self, residency: Residency, traffic: Traffic, *, owned: bool) -> None:
        self.by_slot: dict[int, Load] = {}
        self.ended: list[tuple[Load, bool]] = []
        self.abandoned: list[int] = []
        """An engine's slots whose lease was released before they were loaded, once nothing writes them."""
        self._residency = residency
        self._traffic = traffic
        self.owned = owned
        """Whether HBM has a residency table; an engine's slots have none."""
        self.gate: Tier = next(tier for tier in (Tier.HOST, Tier.NVME, Tier.HBM) if tier in residency.tables)
        self.promoting: dict[PageKey, list[Load]] = {}
        """Those that wait for their page to come up to HOST; all others are submitted."""
        self._queue: deque[PageKey] = deque()

    @property
    def queued(self) -> int:
        """Promotions that wait for a HOST slot."""
        return len(self._queue)

    def start(self, key: PageKey, slot: int, source: Tier, source_slot: int) -> Load:
        """Begins to bring the page from its copy in ``source``, pinned for it, into a slot that no other load fills."""
        load = Load(key, slot, source, source_slot)
        self.by_slot[slot] = load
        if source == self.gate:
            self._submit(load)
        else:
            waiting = self.promoting.setdefault(key, [])
            if not waiting:
                self._queue.append(key)
            waiting.append(load)
        return load

    def start_run(
        self,
        lease: LeaseRecord | None,
        index: int,
        keys: Sequence[PageKey],
        places: Sequence[tuple[int, int]],
    ) -> None:
        """As ``start`` for pages of a lease from ``index`` on, or of none, straight from the tier above all promotions.

        ``places``: the slots reserved for them, and those of their sources, pinned.
        """
        by_slot, gate, parent = self.by_slot, self.gate, self._residency.lineage.parent
        moves = []
        for number, (key, (slot, source_slot)) in enumerate(zip(keys, places, strict=True), index):
            waiters = [] if lease is None else [(lease, number)]
            by_slot[slot] = Load(key, slot, gate, source_slot, True, False, waiters)
            moves.append(Move(key, source_slot, slot, 0, parent(key)))
        self._traffic.add_all(gate, Tier.HBM, moves)

    def promote_queued(self) -> None:
        """Starts queued promotions for which HOST has room now, a bounded number.

        One that nobody waits for ends where it would cost another page its slot: it is no request's any more, and
        its source may stand still.
        """
        residency, queue = self._residency, self._queue
        most = self._traffic.carrying(Tier.NVME, Tier.HOST) + BATCH_PAGES
        while queue and self._traffic.carrying(Tier.NVME, Tier.HOST) < most:
            key = queue[0]
            if key in self.promoting and key not in residency.tables[Tier.HOST].copies:
                if not residency.tables[Tier.NVME].ready(key):
                    self.lost(key)
                elif not residency.tables[Tier.HOST].free and self._unheld(key):
                    self._end_unheld(self.promoting[key])
                else:
                    try:
                        slot = residency.reserve(key, Tier.HOST, 0, Tier.NVME)
                    except CapacityError:
                        return
                    source_slot = residency.tables[Tier.NVME].copies[key].slot
                    parent = residency.lineage.parent(key)
                    self._traffic.add(Tier.NVME, Tier.HOST, Move(key, source_slot, slot, 0, parent))
            elif residency.tables[Tier.HOST].ready(key):
                self.promoted(key)
            queue.popleft()

    def promoted(self, key: PageKey) -> None:
        """The page is readable in HOST: its loads go on from there."""
        for load in self.promoting.pop(key, ()):
            source_slot = self._residency.pin(key, Tier.HOST)
            self._residency.unpin(key, load.source, load.source_slot)
            load.source, load.source_slot = Tier.HOST, source_slot
            self._submit(load)

    def lost(self, key: PageKey) -> None:
        """The page cannot be promoted: its loads end without it."""
        for load in self.promoting.pop(key, ()):
            self._residency.unpin(key, load.source, load.source_slot)
            self._end(load, arrived=False)

    def give_up_queued(self) -> None:
        """HOST will not get room: the loads that wait for a promotion end without their pages."""
        for key in self._queue:
            self.lost(key)
        self._queue.clear()

    def arrived(self, key: PageKey, slot: int) -> None:
        """A transfer has filled the slot."""
        load = self.by_slot.get(slot)
        if self.owned and not self._residency.commit(key, Tier.HBM, slot):
            return
        if load is not None and load.key == key and load.submitted:
            self._end(load, arrived=True)

    def all_arrived(
        self, keys: Sequence[PageKey], src: Tier, src_slots: Sequence[int], slots: Sequence[int]
    ) -> None:
        """As ``arrived`` for each; their sources are let go. Where HBM is the store's own."""
        readable = self._residency.runs.arrive(keys, src, src_slots, Tier.HBM, slots)
        by_slot = self.by_slot
        for key, slot, there in zip(keys, slots, readable, strict=True):
            load = by_slot.get(slot)
            if there and load is not None and load.key == key and load.submitted:
                self._end(load, arrived=True)

    def failed(self, key: PageKey, slot: int) -> None:
        """A transfer has ended without filling the slot."""
        load = self.by_slot.get(slot)
        if load is not None and load.key == key and load.submitted:
            self._end(load, arrived=False)
        elif self.owned:
            self._residency.fail(key, Tier.HBM, slot)

    def late(self, key: PageKey, slot: int) -> None:
        """A transfer takes too long to fill the slot: the load ends without it, the slot stays the transfer's."""
        load = self.by_slot.pop(slot)
        self._residency.abort(key, Tier.HBM)
        self.ended.append((load, False))

    def cancel(self, slot: int) -> Load:
        """The page's HBM copy on its way was aborted or replaced; nobody waits for this load any more."""
        load = self.by_slot.pop(slot)
        if not load.submitted:
            waiting = self.promoting[load.key]
            waiting.remove(load)
            if not waiting:
                del self.promoting[load.key]
            self._residency.unpin(load.key, load.source, load.source_slot)
            if self.owned:
                self._residency.fail(load.key, Tier.HBM, slot)
        return load

    def give_back(self, wanted: int) -> None:
        """Ends up to ``wanted`` loads that nobody holds and nothing has begun to write, the newest first.

        They wait for a promotion, which may never come; their HBM slots are free at once.
        """
        if wanted <= 0 or not self.owned:
            return
        unheld = [x for key, loads in self.promoting.items() for x in loads if self._unheld(key)]
        self._end_unheld(unheld[-wanted:])

    def any_unheld(self) -> bool:
        """Whether a load is under way whose page no lease holds: its slot can be had once it has ended."""
        return any(load.submitted and self._unheld(load.key) for load in self.by_slot.values())

    def abandon(self, slot: int) -> None:
        """Engine-owned HBM: nobody waits for this load any more; its slot is told once nothing writes it."""
        load = self.by_slot[slot]
        load.abandoned = True
        if not load.submitted:
            self.cancel(slot)
            self.abandoned.append(slot)

    def _unheld(self, key: PageKey) -> bool:
        """Whether no lease holds the page's HBM copy on its way. An engine's loads are abandoned one by one instead."""
        return self.owned and not self._residency.tables[Tier.HBM].copies[key].pins

    def _end_unheld(self, loads: Sequence[Load]) -> None:
        for load in list(loads):
            self._residency.abort(load.key, Tier.HBM)
            self.cancel(load.slot)

    def _submit(self, load: Load) -> None:
        load.submitted = True
        parent = self._residency.lineage.parent(load.key)
        move = Move(load.key, load.source_slot, load.slot, 0, parent)
        self._traffic.add(load.source, Tier.HBM, move)

    def _end(self, load: Load, *, arrived: bool) -> None:
        del self.by_slot[load.slot]
        if load.abandoned:
            self.abandoned.append(load.slot)
        if self.owned and not arrived:
            self._residency.fail(load.key, Tier.HBM, load.slot)
        self.ended.append((load, arrived))
