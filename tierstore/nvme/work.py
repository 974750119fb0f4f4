"""What waits for the writer, and how much of it goes into one batch."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from tierstore.nvme.acks import Job
from tierstore.types import PageKey


@dataclass(slots=True)
class EraseWork:
    """Records to remove: the keys, in order."""

    keys: dict[PageKey, None]


@dataclass(slots=True)
class SyncWork:
    """A mark in the queue. ``done`` is set when everything before it is settled.

    ``synced``: every write before it that succeeded is durable. ``ok``: every erase too.
    """

    done: threading.Event = field(default_factory=threading.Event)
    synced: bool = False
    ok: bool = False


@dataclass(slots=True)
class Batch:
    """``erases`` come first, then ``writes`` (job, index of its page), then ``sync``."""

    erases: list[PageKey] = field(default_factory=list)
    writes: list[tuple[Job, int]] = field(default_factory=list)
    sync: SyncWork | None = None


class WorkQueue:
    """First in, first out, as far as anyone can see. Not thread-safe: the writer's lock guards it."""

    def __init__(self, batch_pages: int) -> None:
        self.batch_pages = batch_pages
        """Pages of the next batch at most."""
        self._items: deque[Job | EraseWork | SyncWork] = deque()

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def num_erases(self) -> int:
        """Records that queued erases name, each once."""
        return len(set[PageKey]().union(*(item.keys for item in self._items if isinstance(item, EraseWork))))

    def add(self, item: Job | EraseWork | SyncWork) -> None:
        """Queue at the end. An erase right behind another becomes a part of it: a queue that stands still is bounded
        by the pages there are.
        """
        last = self._items[-1] if self._items else None
        if isinstance(item, EraseWork) and isinstance(last, EraseWork):
            last.keys.update(item.keys)
        else:
            self._items.append(item)

    def take_jobs(self) -> list[Job]:
        """Every queued write, of which nothing is done any more."""
        jobs = [item for item in self._items if isinstance(item, Job)]
        self._items = deque(item for item in self._items if not isinstance(item, Job))
        return jobs

    def take(self) -> Batch:
        """The next batch, at most ``batch_pages`` pages and one sync mark.

        An erase moves ahead of writes of other keys queued before it, never ahead of one of its own.
        """
        batch = Batch()
        written: set[PageKey] = set()
        while self._items and batch.sync is None:
            item = self._items[0]
            if isinstance(item, SyncWork):
                batch.sync = item
            elif isinstance(item, EraseWork):
                if not written.isdisjoint(item.keys):
                    break
                batch.erases.extend(item.keys)
            elif not self._take_pages(item, batch, written):
                break
            self._items.popleft()
        return batch

    def take_erases(self, written: set[PageKey]) -> list[PageKey]:
        """Every queued erase that may come before the rest: none of its keys in ``written`` or in a write before it."""
        taken: list[PageKey] = []
        kept: deque[Job | EraseWork | SyncWork] = deque()
        blocked = set(written)
        for item in self._items:
            if isinstance(item, Job):
                blocked.update(item.transfer.keys)
            elif isinstance(item, EraseWork) and blocked.isdisjoint(item.keys):
                taken.extend(item.keys)
                continue
            kept.append(item)
        self._items = kept
        return taken

    def _take_pages(self, job: Job, batch: Batch, written: set[PageKey]) -> bool:
        """Move pages of ``job`` into ``batch``; whether it was the last of them."""
        room = self.batch_pages - len(batch.writes)
        end = min(len(job.pages), job.next + room)
        batch.writes.extend((job, index) for index in range(job.next, end))
        written.update(job.transfer.keys[job.next : end])
        job.next = end
        return end == len(job.pages)
