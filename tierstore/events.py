"""Actions that wait for an event of the caller: work was launched that still writes or reads their slots."""

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
    """``act``: what to do when the event has happened; returns whether to call it again.

    ``give_up``: what to do instead if it never will, because its device has failed.
    """

    event: Event
    act: Callable[[], bool]
    give_up: Callable[[], bool]


class PendingEvents:
    """Directory calls deferred until an event has happened. Guarded by the store's lock.

    An event that raises belongs to a device that has failed, on which nothing runs any more. Pages that it should have
    written are dropped; slots that it should have read are free.
    """

    def __init__(self, directory: Directory) -> None:
        self.writing: list[Pages] = []
        """Pages sealed before their bytes are written. Each holds a pin."""
        self.retired: list[int] = []
        """Slots given up whose last use has not ended."""
        self._directory = directory
        self._unwritten_pages = directory.writeback.unwritten
        self._waiting: list[_Deferred] = []
        self._writers: dict[int, Event] = {}

    @property
    def waiting(self) -> bool:
        """Whether an event is awaited."""
        return bool(self._waiting)

    def poll(self) -> None:
        """Perform what events that have happened allow, a bounded amount per call."""
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
        """Put pages: they are matchable at once, and copies of them start once they are written.

        Returns:
            The slot of each key; fewer if the directory's put ended early.
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
        """Whether no page waits for its writer.

        May be read without the lock: a page is counted before a lease has it.
        """
        return not (self._unwritten_pages or self.writing)

    def writers(self, lease: LeaseRecord) -> list[Event]:
        """Return the events that end the writing of a lease's pages, covered or sealed under it, without duplicates.

        An empty list means that all bytes are there. The event of a failed device stays, because its page was never
        written.
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
        """Put pages of an engine's slots: they are copied out once ``after`` has happened.

        Args:
            keys: The pages.
            slots: The engine's slots.
            after: The event that ends the writing of the slots, or None.
            memory_only: Keep the pages off disk.
            parents: The page before each.
            doubted: The pages were computed over pages that are not exact.
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
        """Free slots, which are reused once the event has happened."""
        self._directory.owned.retire(slots)
        if after is None or _happened(after):
            self._directory.owned.free(slots)
        else:
            self.retired.extend(slots)
            self._defer(after, partial(self._freed, slots))

    def release(self, lease: LeaseRecord, after: Event | None) -> bool:
        """End some pins of a lease, or defer that. Returns whether to call again."""
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
        """Drop pages whose slots have undefined content; without another copy they are missing.

        They are also missing from the leases that have these slots.
        """
        self._directory.drop_unwritten(*pages)
        self._directory.leases.never_written(set(pages[1]), event)
        return self._written(pages)

    def _written_by_others(self, keys: Sequence[PageKey], after: Event | None) -> set[PageKey]:
        """Return those of ``keys`` whose HBM bytes are not written yet, and come with another event than ``after``."""
        unwritten = self._unwritten_pages
        if not unwritten:
            return set()
        writers = self._writers
        return {key for key in keys if key in unwritten and not _is(writers.get(unwritten[key]), after)}

    def _never_written(self, slots: Sequence[int]) -> bool:
        """Give slots of pages that were never written back to the engine."""
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
        """Add the chains one by one; only the last one copies what fits, so batches are not split."""
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
    """Return whether the caller's own work writes the page, or it has been written by now."""
    return writer is None or writer is after or _happened(writer)


def _happened(event: Event) -> bool:
    """Return whether the event has happened. For one that never will, ``poll`` acts."""
    return _ask(event) is True


def _still_waits(deferred: _Deferred) -> bool:
    """Do what the event allows, if anything. Returns whether to check again."""
    happened = _ask(deferred.event, log=True)
    if happened is None:
        return deferred.give_up()
    return not happened or deferred.act()


def _ask(event: Event, *, log: bool = False) -> bool | None:
    """Return whether the event has happened, or None if ``query`` raised: its device has failed, or it is no event.

    Any exception of one caller's event is caught, because it must not end the calls of all others. TimeoutError passes:
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
