"""HBM slots between callers and the store: taken, filled, sealed and given back, or an engine's own, copied out.

The two classes answer to the same calls; a store has one of them. Any thread.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from tierstore import metrics
from tierstore.directory.leases import last_key
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import CapacityError, ConfigError
from tierstore.keys import require_keys_and_slots
from tierstore.types import Tier, slot_numbers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.directory import Directory
    from tierstore.directory.leases import LeaseRecord
    from tierstore.events import PendingEvents
    from tierstore.pump import Progress
    from tierstore.types import Event, PageKey


class OwnSlots:
    """Slots of the store's own pool."""

    def __init__(
        self, directory: Directory, pending: PendingEvents, progress: Progress, page_nbytes: int
    ) -> None:
        self._directory = directory
        self._pending = pending
        self._progress = progress
        self._page_nbytes = page_nbytes

    def allocate(self, n: int, timeout_s: float) -> list[int]:
        """``TierStore.allocate``."""
        self._require_fits(n)
        deadline = monotonic() + timeout_s
        for _ in self._progress.until(deadline):
            slots = self._try_allocate(n)
            if len(slots) == n:
                return slots
        with self._progress.lock:
            occupied = metrics.occupancy(self._directory, Tier.HBM)
        raise CapacityError(f"{n} HBM pages were not to be had within {timeout_s} s: {occupied}")

    def put(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        after: Event | None,
        lease: LeaseRecord | None,
        *,
        memory_only: bool,
        parent: PageKey | None = None,
        parents: Sequence[PageKey | None] | None = None,
    ) -> list[int]:
        """``TierStore.put``, a chunk at each hold of the lock; under an exact lease it may end early."""
        slots = slot_numbers(slots)
        require_keys_and_slots(keys, slots, (parent,))
        if parents is not None:
            raise ConfigError("put(parents=...): HBM belongs to the store; allowed with hbm.owner: engine")
        with self._progress.lock:
            self._directory.owned.require(slots)
        kept: list[int] = []
        for i in range(0, len(keys), BATCH_PAGES):
            parent = keys[i - 1] if i else parent
            chunk = slice(i, i + BATCH_PAGES)
            with self._progress.lock:
                kept += self._pending.seal(
                    keys[chunk], slots[chunk], parent, lease, after, memory_only=memory_only
                )
                self._progress.step()
            if len(kept) < min(i + BATCH_PAGES, len(keys)):
                break
        self._progress.notify()
        return kept

    def free(self, slots: Sequence[int], after: Event | None) -> None:
        """``TierStore.free``."""
        numbers = tuple(slot_numbers(slots))
        with self._progress.lock:
            self._pending.free(numbers, after)
        self._progress.notify()

    def withdraw(self, slots: Sequence[int]) -> list[int]:
        """ConfigError: the slots are the store's own."""
        raise ConfigError("withdraw: HBM belongs to the store; allowed with hbm.owner: engine")

    def checked_into(self, keys: Sequence[PageKey], into: Sequence[int] | None) -> None:
        """The store chooses the slots of a lease: ConfigError if the caller names some."""
        if into is not None:
            raise ConfigError("acquire(into=...): HBM belongs to the store; allowed with hbm.owner: engine")

    def _try_allocate(self, n: int) -> list[int]:
        """``n`` slots, or none; again at once where room was made, a batch at a time."""
        for _ in range(2 + n // BATCH_PAGES):
            slots, made_room = self._take(n)
            if slots or not made_room:
                return slots
        return []

    def _take(self, n: int) -> tuple[list[int], bool]:
        """``n`` slots a chunk at a time, or none: what was taken goes back when the rest is not to be had.

        With none: whether there is more room now.
        """
        slots: list[int] = []
        made_room = False
        while len(slots) < n:
            with self._progress.lock:
                taken = self._directory.owned.allocate(
                    min(n - len(slots), BATCH_PAGES), reserve=n - len(slots)
                )
                if taken is None:
                    self._directory.owned.retire(slots)
                    self._directory.owned.free(slots)
                    made_room = self._directory.want_slots(n, monotonic())
                self._progress.submit()
            if taken is None:
                return [], made_room
            slots += taken
        return slots, False

    def _require_fits(self, n: int) -> None:
        slots = self._directory.residency.tables[Tier.HBM].num_slots
        nbytes = self._page_nbytes
        if slots is not None and n > slots:
            raise CapacityError(
                f"{n} pages ({n * nbytes} bytes) exceed HBM, which holds {slots} pages ({slots * nbytes} bytes)"
            )


class EngineSlots:
    """Slots of an engine's tensors: the store copies pages out of them and into them, and owns none."""

    def __init__(self, directory: Directory, pending: PendingEvents, progress: Progress) -> None:
        self._directory = directory
        self._pending = pending
        self._progress = progress

    def allocate(self, n: int, timeout_s: float) -> list[int]:
        """ConfigError: an engine takes its slots from itself."""
        raise _not_ours("allocate")

    def put(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        after: Event | None,
        lease: LeaseRecord | None,
        *,
        memory_only: bool,
        parent: PageKey | None = None,
        parents: Sequence[PageKey | None] | None = None,
    ) -> list[int]:
        """``TierStore.put``: the pages are copied out, the slots stay the engine's."""
        with self._progress.lock:
            parent = last_key(lease) if parent is None else parent
            doubted = lease is not None and lease.inexact
        slots = slot_numbers(slots)
        before = _before(keys, parent) if parents is None else tuple(parents)
        require_keys_and_slots(keys, slots, before)
        self._require_registered()
        if len(before) != len(keys):
            raise ValueError(f"{len(keys)} keys with {len(before)} parents; allowed: one a key")
        with self._progress.lock:
            self._pending.copy_out(
                tuple(keys), tuple(slots), after, memory_only=memory_only, parents=before, doubted=doubted
            )
            self._progress.submit()
        self._progress.notify()
        return slots

    def withdraw(self, slots: Sequence[int]) -> list[int]:
        """``TierStore.withdraw``."""
        numbers = slot_numbers(slots)
        with self._progress.lock:
            reading = self._directory.outgoing.withdraw(numbers)
            self._progress.step()
        return reading

    def free(self, slots: Sequence[int], after: Event | None) -> None:
        """ConfigError: an engine frees its slots itself."""
        raise _not_ours("free")

    def checked_into(self, keys: Sequence[PageKey], into: Sequence[int] | None) -> list[int]:
        """The engine chooses the slots of a lease: ValueError unless it names one a key."""
        if into is None or len(into) != len(keys):
            raise ValueError(
                f"acquire of {len(keys)} keys; allowed where an engine owns HBM: into= one slot a key"
            )
        numbers = slot_numbers(into)
        self._require_registered()
        return numbers

    def _require_registered(self) -> None:
        if not self._directory.outgoing.num_slots:
            raise ConfigError(
                "the engine's pages are not registered; allowed: register(EnginePages(...)) first"
            )


def _before(keys: Sequence[PageKey], parent: PageKey | None) -> tuple[PageKey | None, ...]:
    """The page before each of a chain."""
    return (parent, *keys[:-1]) if keys else ()


def _not_ours(verb: str) -> ConfigError:
    return ConfigError(f"{verb}: HBM belongs to the engine; allowed with hbm.owner: store")
