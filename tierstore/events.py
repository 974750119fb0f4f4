"""What waits for an event of the caller: slots still written or read by work that was launched and has not ended."""

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
    """``act``: what to do when the event has happened; whether to call it again. ``give_up``: what to do instead when
    it never will, as its device has failed."""

    event: Event
    act: Callable[[], bool]
    give_up: Callable[[], bool]


class PendingEvents:
    """Directory calls deferred until an event has happened. Used under the store's lock.

    An event that raises belongs to a device that has failed: nothing runs there any more. What it was to write is not
    there, and is dropped; what it was to read is free.
    """

    def __init__(self, directory: Directory) -> None:
        self.writing: list[Pages] = []
        """Pages sealed before their bytes are written: each holds a pin."""
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
        """Does what events that have happened allow, a bounded amount."""
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
        """``put``: the pages are matchable at once, copies of them start once they are written.

        The slot of each key now; fewer where the directory's put ended early.
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
        """Whether no page waits for its writer. May be read without the lock: a page counts before a lease has it."""
        return not (self._unwritten_pages or self.writing)

    def writers(self, lease: LeaseRecord) -> list[Event]:
        """The events that end the writing of the pages a lease covers and of those sealed under it, each once.

        Empty: all bytes are there. An event of a failed device stays, since its page was never written.
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
        """``put`` of an engine's slots, with the page before each: the copy starts once they are written.

        ``doubted``: they were computed over pages that are not exact.
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
        """``free``: nobody owns the slots from now on; they are reused after the event."""
        self._directory.owned.retire(slots)
        if after is None or _happened(after):
            self._directory.owned.free(slots)
        else:
            self.retired.extend(slots)
            self._defer(after, partial(self._freed, slots))

    def release(self, lease: LeaseRecord, after: Event | None) -> bool:
        """``release``: ends some pins, or defers that; whether to call again."""
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
        """Nobody knows what these slots hold: where the pages have no other copy they are missing.

        They are missing for the leases too that have these slots.
        """
        self._directory.drop_unwritten(*pages)
        self._directory.leases.never_written(set(pages[1]), event)
        return self._written(pages)

    def _written_by_others(self, keys: Sequence[PageKey], after: Event | None) -> set[PageKey]:
        """Those of ``keys`` whose bytes in HBM are not there yet, and come with another event than ``after``."""
        unwritten = self._unwritten_pages
        if not unwritten:
            return set()
        writers = self._writers
        return {key for key in keys if key in unwritten and not _is(writers.get(unwritten[key]), after)}

    def _never_written(self, slots: Sequence[int]) -> bool:
        """An engine's slots whose pages were never there go back to it."""
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
        """The chains among them one after the other, and only then what there is room for: batches stay whole."""
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
    """Whether a page is written by the very work of the caller, or has been written by now."""
    return writer is None or writer is after or _happened(writer)


def _happened(event: Event) -> bool:
    """Whether it has; one that never will has not, and ``poll`` sees to it."""
    return _ask(event) is True


def _still_waits(deferred: _Deferred) -> bool:
    """Does what the event allows, if anything; whether to look again."""
    happened = _ask(deferred.event, log=True)
    if happened is None:
        return deferred.give_up()
    return not happened or deferred.act()


def _ask(event: Event, *, log: bool = False) -> bool | None:
    """Return whether the event has happened, or None if ``query`` raised: its device has failed, or it is no event.

    One caller's event must not end the calls of all others, so every error counts. TimeoutError passes: it comes from
    a signal's handler.
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
