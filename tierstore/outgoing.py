"""Pages on their way out of an engine's slots: queued until HOST has room, told of when their slots are free again.

Metadata only. Between ``put`` and the report a slot may neither be put again nor be loaded into.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from tierstore.errors import LeaseError
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tierstore.directory.admission import Admitting
    from tierstore.directory.eviction import Space
    from tierstore.directory.loads import Loads
    from tierstore.directory.residency import Residency
    from tierstore.directory.writeback import Sinks
    from tierstore.types import PageKey


class _Page(NamedTuple):
    """A page that is to be copied out. ``following``: how many came after it at once. ``doubted``: it was computed over
    pages that are not exact."""

    key: PageKey
    slot: int
    parent: PageKey | None
    memory_only: bool
    following: int
    doubted: bool


class Outgoing:
    """What an engine that owns HBM has put and not got back. ``num_slots``: 0 until its tensors are registered.

    ``sinks`` is told which pages come, and what becomes of them: they may be sent further down before they are there.
    """

    def __init__(
        self, residency: Residency, space: Space, loads: Loads, admitting: Admitting, sinks: Sinks
    ) -> None:
        self.num_slots = 0
        self.reusable: list[int] = []
        """Slots that no copy reads or writes any more, for ``poll`` to report."""
        self.given_up = 0
        """Pages that found no room below since this was last looked at."""
        self._slots: dict[int, PageKey | None] = {}
        """Slots of the store's to read, and what goes further down than memory from there."""
        self._queue: deque[_Page] = deque()
        self._residency = residency
        self._space = space
        self._loads = loads
        self._admitting = admitting
        self._sinks = sinks

    @property
    def waiting(self) -> bool:
        """Whether pages wait for room."""
        return bool(self._queue)

    def require_usable(self, slots: Sequence[int]) -> None:
        """LeaseError unless the engine has these slots, each is named once, and no copy reads or writes them."""
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise LeaseError(f"slot {slot} is none of the engine's {self.num_slots}")
            if slot in self._slots or slot in self._loads.by_slot:
                raise LeaseError(f"slot {slot} is still being copied")
        if len(set(slots)) != len(slots):
            raise LeaseError("a slot is named twice")

    def accept(self, keys: Sequence[PageKey], slots: Sequence[int], *, memory_only: bool) -> None:
        """The slots are the store's to read until they are reported."""
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
        """The accepted slots are written: their copies may start. ``parent``: the page before the first key."""
        for following, key, slot in zip(range(len(keys) - 1, -1, -1), keys, slots, strict=True):
            self._queue.append(_Page(key, slot, parent, memory_only, following, doubted))
            parent = key

    def withdraw(self, slots: Collection[int]) -> list[int]:
        """The engine takes slots back: those whose copies have not begun are its own at once, and not reported.

        Which of ``slots`` a copy reads now, or is to read once they are written.
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
        """Accepted slots that are not to be copied: whatever was to write them has failed."""
        self.given_up += len(slots)
        for slot in slots:
            self.ended(slot)

    def ended(self, slot: int) -> None:
        """Nothing reads the slot any more."""
        self._let_go(slot)
        self.reusable.append(slot)

    def _unreport(self, slots: Collection[int]) -> None:
        """The engine goes on with these: told of later, an end of before would be taken for that of a newer copy."""
        if self.reusable:
            known = set(slots)
            self.reusable = [slot for slot in self.reusable if slot not in known]

    def _let_go(self, slot: int) -> None:
        key = self._slots.pop(slot)
        if key is not None:
            self._sinks.came(key)

    def advance(self, now: float) -> None:
        """Starts the copies for which there is room; gives pages up only where no room will come for them.

        So a prompt longer than the tiers keeps its beginning: the first page that only its parent could make room for
        is given up, and what follows it takes nobody's place, for no request could reach it.

        Not while pages wait to be lifted that may be stored from now on: they would be dropped to make room.
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
                        self._admitting.hit((key,), source)
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
        """Begin to copy the page out of its slot; False if there is no room for it."""
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
            self._admitting.put(key, parent, page.following, asked=self._sinks.to_disk(key))
        return True
