"""Actions that are deferred until a caller's event completes.

Until the event completes, work on the device may still use the slots that the actions affect.
"""

from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from tierstore.directory.transfers import BATCH_PAGES
from tierstore.gpu.driver import has_happened
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.directory.directory import Directory
    from tierstore.directory.leases import LeaseRecord
    from tierstore.types import Event, PageKey

_log = logging.getLogger("tierstore.pending")

Pages = tuple[tuple["PageKey", ...], tuple[int, ...]]


class _Deferred(NamedTuple):
    """An action that waits for an event.

    ``act`` is called once the event has completed. ``give_up`` is called instead if the event will never
    complete because its device has failed. Each of them returns whether it must be called again.
    """

    event: Event
    act: Callable[[], bool]
    give_up: Callable[[], bool]


class PendingEvents:
    """Queue of directory calls, each of which waits for an event. Protected by the store's lock.

    If ``Event.query`` raises an exception, the event's device has failed and executes no more work. Pages
    that the device was to write are then dropped, and slots that it was to read become free.
    """

    def __init__(self, directory: Directory) -> None:
        self.writing: list[Pages] = []
        """Pages that were put and whose bytes the device has not written yet. Their HBM copies are pinned."""
        self.retired: list[int] = []
        """Slots that their owner has freed, but that the device may still use."""
        self._directory = directory
        self._unwritten_pages = directory.writeback.unwritten
        self._waiting: list[_Deferred] = []
        self._writers: dict[int, Event] = {}

    @property
    def waiting(self) -> bool:
        """Whether any action waits for an event."""
        return bool(self._waiting)

    def poll(self) -> None:
        """Run the actions whose events have completed. Each action does a bounded amount of work per call."""
        if self._waiting:
            self._waiting = [deferred for deferred in self._waiting if _still_waits(deferred)]

    def seal(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        parent: PageKey | None,
        lease: LeaseRecord | None,
        after: Event | None,
        *,
        memory_only: bool = False,
    ) -> list[int]:
        """Put pages. See ``TierStore.put`` for the arguments.

        The pages can be matched at once, but are copied to other tiers only after ``after`` has completed.

        Returns:
            The slot of each key. The list is shorter than ``keys`` if an exact ``lease`` cannot cover all
            pages.
        """
        written = after is None or _happened(after)
        kept, duplicates = self._directory.sealed.put(
            keys,
            slots,
            parent,
            lease,
            written=written,
            memory_only=memory_only,
            replaceable=() if lease is not None else self._written_by_others(keys, after),
        )
        if after is None or written:
            self._directory.owned.free(duplicates)
            return kept
        self.retired.extend(duplicates)
        self._defer(after, partial(self._freed, duplicates))
        fresh = [(k, s) for k, s in zip(keys[: len(kept)], slots, strict=False) if s not in set(duplicates)]
        if fresh:
            pages: Pages = (tuple(k for k, _ in fresh), tuple(s for _, s in fresh))
            self.writing.append(pages)
            self._writers.update(dict.fromkeys(pages[1], after))
            self._defer(after, partial(self._written, pages), partial(self._unwritten, pages, after))
        return kept

    @property
    def all_written(self) -> bool:
        """Whether the bytes of all pages are written.

        May be read without the lock, because a page is registered as unwritten before any lease covers it.
        """
        return not (self._unwritten_pages or self.writing)

    def writers(self, lease: LeaseRecord) -> list[Event]:
        """Return the events that must complete before all pages of the lease are written, without duplicates.

        The pages are those that the lease covers and those that were put with it. An empty list means that
        all of them are written. An event of a failed device stays in the list, because its pages were never
        written.
        """
        events = [] if lease.never_written is None else [lease.never_written]
        if not self._writers:
            return events
        found: dict[int, Event] = {}
        covered = lease.slots if lease.tier == Tier.HBM else []  # pages in HOST are always written
        for slots in (covered, [slot for _, slot in lease.held]):
            if not self._writers.keys().isdisjoint(slots):
                found.update((id(e), e) for e in map(self._writers.get, slots) if e is not None)
        return events + [event for event in found.values() if not _happened(event)]

    def copy_out(
        self,
        keys: tuple[PageKey, ...],
        slots: tuple[int, ...],
        after: Event | None,
        *,
        memory_only: bool,
        parents: tuple[PageKey | None, ...],
        doubted: bool,
    ) -> None:
        """Put pages that are in an engine's slots. They are copied out once ``after`` has completed.

        Args:
            keys: The pages.
            slots: The engine's slots.
            after: An event that completes once the slots are written, or None.
            memory_only: Whether to keep the pages off disk.
            parents: For each page, the page before it, or None.
            doubted: Whether the pages were computed from pages that are not exact.
        """
        self._directory.outgoing.accept(keys, slots, memory_only=memory_only)
        if after is None or _happened(after):
            self._copied_out(keys, slots, memory_only, parents, doubted)
        else:
            self._defer(
                after,
                partial(self._copied_out, keys, slots, memory_only, parents, doubted),
                partial(self._never_written, slots),
            )

    def free(self, slots: tuple[int, ...], after: Event | None) -> None:
        """Free slots that callers own. They can be reused once ``after`` has completed."""
        self._directory.owned.retire(slots)
        if after is None or _happened(after):
            self._directory.owned.free(slots)
        else:
            self.retired.extend(slots)
            self._defer(after, partial(self._freed, slots))

    def release(self, lease: LeaseRecord, after: Event | None) -> bool:
        """Release some pins of a lease, or defer the release until ``after`` has completed.

        Returns:
            Whether the method must be called again to release further pins.
        """
        if after is None or _happened(after):
            return self._directory.leases.release_some(lease, BATCH_PAGES)
        self._directory.leases.stop_waiting(lease)
        self._defer(after, partial(self._directory.leases.release_some, lease, BATCH_PAGES))
        return False

    def _defer(
        self, after: Event, act: Callable[[], bool], give_up: Callable[[], bool] | None = None
    ) -> None:
        self._waiting.append(_Deferred(after, act, give_up or act))

    def _written(self, pages: Pages) -> bool:
        self._directory.sealed.written(*pages)
        self.writing.remove(pages)
        for slot in pages[1]:
            del self._writers[slot]
        return False

    def _unwritten(self, pages: Pages, event: Event) -> bool:
        """Drop the HBM copies of pages that were never written, because their slots have undefined contents.

        A page without another copy is then missing, even for leases that cover its slot.
        """
        self._directory.drop_unwritten(*pages)
        self._directory.leases.never_written(set(pages[1]), event)
        return self._written(pages)

    def _written_by_others(self, keys: Sequence[PageKey], after: Event | None) -> set[PageKey]:
        """Return those of ``keys`` whose HBM copy is not written yet and waits for an event other than ``after``."""
        unwritten = self._unwritten_pages
        if not unwritten:
            return set()
        writers = self._writers
        return {key for key in keys if key in unwritten and not _is(writers.get(unwritten[key]), after)}

    def _never_written(self, slots: Sequence[int]) -> bool:
        """Release an engine's slots whose pages were never written. Return False, as no second call is needed."""
        self._directory.outgoing.give_up(slots)
        return False

    def _freed(self, slots: Sequence[int]) -> bool:
        for slot in slots:
            self.retired.remove(slot)
        self._directory.owned.free(slots)
        return False

    def _copied_out(
        self,
        keys: tuple[PageKey, ...],
        slots: tuple[int, ...],
        memory_only: bool,
        parents: tuple[PageKey | None, ...],
        doubted: bool,
    ) -> bool:
        """Queue the pages, and start their copies.

        ``outgoing.add`` needs a chain, in which each page is the parent of the next, so it is called once for
        each chain. The copies do not start until the last chain is queued, so that one transfer can hold pages of
        several chains.
        """
        starts = [i for i, parent in enumerate(parents) if not i or parent != keys[i - 1]]
        for start, end in pairwise(starts):
            self._directory.outgoing.add(
                keys[start:end],
                slots[start:end],
                memory_only=memory_only,
                parent=parents[start],
                doubted=doubted,
            )
        last = starts[-1] if starts else 0
        before = parents[last] if parents else None
        self._directory.copy_out(
            keys[last:], slots[last:], monotonic(), memory_only=memory_only, parent=before, doubted=doubted
        )
        return False


def _is(writer: Event | None, after: Event | None) -> bool:
    """Return whether a page is written by the time ``after`` completes.

    ``writer`` is the event for which the page waits, or None if the page is already written.
    """
    return writer is None or writer is after or _happened(writer)


def _happened(event: Event) -> bool:
    """Return whether the event has completed. False if its device has failed, which ``poll`` handles."""
    return _ask(event) is True


def _still_waits(deferred: _Deferred) -> bool:
    """Run the action if its event has completed or failed. Return whether to keep it in the queue."""
    happened = _ask(deferred.event, log=True)
    if happened is None:
        return deferred.give_up()
    return not happened or deferred.act()


def _ask(event: Event, *, log: bool = False) -> bool | None:
    """Return whether the event has completed, or None if ``query`` raised an exception.

    ``query`` raises an exception if the device has failed or if the object is not really an event. Other
    callers' calls also query this event and must not fail because of it, so the exception is caught.
    TimeoutError is not caught, because it comes from a signal handler.
    """
    try:
        return has_happened(event)
    except TimeoutError:
        raise
    except Exception:  # noqa: BLE001 - the caller's code, run in other callers' calls
        if log:
            _log.exception(
                "querying an event that was passed as `after` failed; the device work before it counts as failed"
            )
        return None
