"""What gives pages to an archive and what takes them from one, and how they are called: in threads, some calls ahead.

A ``Source`` is a store that gives records, a ``Sink`` one that takes them, whichever store it is. They block, so the
event loop calls them in threads: ``ahead`` keeps the next results ready, ``whole`` waits for one call to its end. A
cancellation waits until the calls that run have ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tierstore.archive.file_format import CHECKSUM, Description, Item
from tierstore.errors import IntegrityError
from tierstore.nvme import record_format
from tierstore.nvme.reader import Record
from tierstore.types import PageKey

Progress = Callable[[int, int], None]
"""Called on the event loop's thread with the pages done so far and their total."""


class Taken(NamedTuple):
    """How many records of a batch are kept, from the first on. What is wrong with the next; None: there is no room."""

    kept: int
    fault: str | None = None


class Source(Protocol):
    """A store that gives pages."""

    description: Description

    def record(self, key: PageKey) -> Record | str:
        """The page as the store has it, every byte checked, or why it cannot be had. TierStoreError if none can.

        Any thread, several at once.
        """
        ...

    def release(self, record: Record) -> None:
        """The record is not used any more: its memory may hold another."""
        ...


class Sink(Protocol):
    """A store that takes pages."""

    description: Description

    def has(self, key: PageKey) -> bool:
        """Whether the page is there already. Quick: also called on the event loop's thread. Any thread."""
        ...

    def reaches(self, key: PageKey) -> bool:
        """Return whether the page and every page before it are there. As ``has``."""
        ...

    def take(self, records: Sequence[Record]) -> Taken:
        """Keep records up to the first that cannot be kept; those kept are there on return.

        No record comes before its parent. TierStoreError if no page can be kept.
        """
        ...


def checked(item: Item, raw: bytes, payload: NDArray[np.uint8], description: Description) -> Record:
    """The record of an item. IntegrityError unless head and payload are what the index says, every byte of them."""
    head = record_format.verify(
        raw,
        payload,
        fingerprint=description.fingerprint,
        key=item.key,
        generation=record_format.parse(raw).generation,
    )
    if (head.parent, head.codec, head.raw_nbytes) != (item.parent, item.codec, item.raw_nbytes):
        raise IntegrityError("another record of this page")
    if raw[CHECKSUM] != item.checksum:
        raise IntegrityError("another record of this page")
    return Record(head, raw, payload)


_AHEAD_NBYTES = 32 << 20
_MOST_AHEAD = 64

_T = TypeVar("_T")


async def whole(call: Callable[[], _T]) -> _T:
    """Run ``call`` in a thread. Who cancels this waits for its end."""
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    finally:
        await _ended([running])


async def ahead(calls: Iterable[Callable[[], _T]], most: int) -> AsyncGenerator[_T]:
    """What the calls return, in their order. Up to ``most`` of them are begun before their result is asked for.

    To be closed (``contextlib.aclosing``): whoever leaves early, cancelled or with an error of a call, waits for the
    end of all that were begun. A call is taken from ``calls`` as it begins.
    """
    begun: deque[asyncio.Future[_T]] = deque()
    try:
        for call in calls:
            begun.append(asyncio.get_running_loop().run_in_executor(None, call))
            if len(begun) == most:
                yield await asyncio.shield(begun[0])
                begun.popleft()
        while begun:
            yield await asyncio.shield(begun[0])
            begun.popleft()
    finally:
        await _ended(begun)


def most_ahead(page_nbytes: int) -> int:
    """How many pages of this length may be on their way at once: 32 MiB of them, but 2 at least and 64 at most."""
    return max(2, min(_MOST_AHEAD, _AHEAD_NBYTES // page_nbytes))


async def _ended(running: Collection[asyncio.Future[_T]]) -> None:
    """All of them have ended, however often this is cancelled meanwhile."""
    while pending := [each for each in running if not each.done()]:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(pending)
    for each in running:
        if not each.cancelled():
            each.exception()  # looked at, so that nobody says that it was not
