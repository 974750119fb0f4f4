"""Actions that wait for an event of the caller, because earlier device work may still use their slots."""

from __future__ import annotations

import logging
from functools import partial
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from tierstore.directory.transfers import BATCH_PAGES
from tierstore.gpu.driver import has_happened

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.directory.directory import Directory
    from tierstore.directory.leases import LeaseRecord
    from tierstore.types import Event, PageKey

_log = logging.getLogger("tierstore.pending")

Pages = tuple[tuple["PageKey", ...], tuple[int, ...]]


class _Deferred(NamedTuple):
    """An action that waits for an event.

    ``act`` is called when the event has happened, ``give_up`` instead if the event's device has failed, so
    that it never will. Both return whether to call them again.
    """

    event: Event
    act: Callable[[], bool]
    give_up: Callable[[], bool]


class PendingEvents:
    """Directory calls deferred until an event has happened. Guarded by the store's lock.

    If an event raises, its device has failed and no work runs there any more. Pages that the work before the
    event should have written are dropped. Slots that it should have read become free.
    """

    def __init__(self, directory: Directory) -> None:
        self.writing: list[Pages] = []
        """Pages that were sealed and whose bytes are not written yet. Each is pinned."""
        self.retired: list[int] = []
        """Slots that were given up and whose last use has not ended."""
        self._directory = directory
        self._unwritten_pages = directory.writeback.unwritten
        self._waiting: list[_Deferred] = []
        self._writers: dict[int, Event] = {}

    @property
    def waiting(self) -> bool:
        """Return whether any action waits for an event."""
        return bool(self._waiting)

    def poll(self) -> None:
        """Perform the actions whose events have happened, a bounded amount of each per call."""
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
        """Put pages. They can be matched at once; copies of them start when their bytes are written.

        Returns:
            The slot of each key. Fewer slots than keys if the directory's put ended early.
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
        """Return whether the bytes of all pages are written.

        May be read without the lock, because a page counts as unwritten before any lease has it.
        """
        return not (self._unwritten_pages or self.writing)

    def writers(self, lease: LeaseRecord) -> list[Event]:
        """Return the events that end the writing of a lease's pages, covered or sealed under it, without duplicates.

        An empty list means that all bytes are written. The event of a failed device remains in the list,
        because its page was never written.
        """
        events = [] if lease.never_written is None else [lease.never_written]
        if not self._writers:
            return events
        found: dict[int, Event] = {}
        for slots in (lease.slots, [slot for _, slot in lease.held]):
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
        """Put pages of an engine's slots, which are copied out once ``after`` has happened.

        Args:
            keys: The pages.
            slots: The engine's slots.
            after: The event that ends the writing of the slots, or None.
            memory_only: Keep the pages off disk.
            parents: The page before each page.
            doubted: Whether the pages were computed over pages that are not exact.
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
        """Free slots of the caller. They are reused once the event has happened."""
        self._directory.owned.retire(slots)
        if after is None or _happened(after):
            self._directory.owned.free(slots)
        else:
            self.retired.extend(slots)
            self._defer(after, partial(self._freed, slots))

    def release(self, lease: LeaseRecord, after: Event | None) -> bool:
        """Release some pins of a lease, or all of them once ``after`` has happened.

        Returns whether to call again.
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
        """Drop pages that were never written, so that the content of their slots is undefined.

        A page without another copy is then missing, also for the leases that have these slots.
        """
        self._directory.drop_unwritten(*pages)
        self._directory.leases.never_written(set(pages[1]), event)
        return self._written(pages)

    def _written_by_others(self, keys: Sequence[PageKey], after: Event | None) -> set[PageKey]:
        """Return those of ``keys`` whose bytes in HBM are not written yet and wait for another event."""
        unwritten = self._unwritten_pages
        if not unwritten:
            return set()
        writers = self._writers
        return {key for key in keys if key in unwritten and not _is(writers.get(unwritten[key]), after)}

    def _never_written(self, slots: Sequence[int]) -> bool:
        """Give the engine back slots whose pages were never written."""
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
        """Add the chains one by one. Copies start only with the last chain, so that no batch is split."""
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
    """Return whether the page is written by now or will be when the caller's ``after`` happens."""
    return writer is None or writer is after or _happened(writer)


def _happened(event: Event) -> bool:
    """Return whether the event has happened. False if its device has failed; ``poll`` handles such events."""
    return _ask(event) is True


def _still_waits(deferred: _Deferred) -> bool:
    """Perform the action if its event has happened or failed. Returns whether to check again."""
    happened = _ask(deferred.event, log=True)
    if happened is None:
        return deferred.give_up()
    return not happened or deferred.act()


def _ask(event: Event, *, log: bool = False) -> bool | None:
    """Return whether the event has happened, or None if ``query`` raised.

    ``query`` raises if the device has failed or the object is not an event. All exceptions of one caller's
    event are caught, because they must not end the calls of other callers. Only TimeoutError passes, because
    it comes from a signal handler.
    """
    try:
        return has_happened(event)
    except TimeoutError:
        raise
    except Exception:  # noqa: BLE001 - code of the caller, asked in other callers' calls
        if log:
            _log.exception(
                "an event that ends the use of slots failed, and so did what it was recorded after"
            )
        return None
