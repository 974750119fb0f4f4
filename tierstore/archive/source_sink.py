"""The protocols of sources and sinks of an archive, and helpers that call them in threads.

A ``Source`` gives records and a ``Sink`` takes them, from a running or a closed store. Their methods block, so the
event loop runs them in threads: ``ahead`` keeps several calls running, ``whole`` waits for a single one. A cancelled
task waits until the calls that were started have ended.
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
"""Called on the event loop's thread with the number of pages done and the total."""


class Taken(NamedTuple):
    """Result of ``Sink.take``: how many records of the batch were kept, counted from the first.

    ``fault`` says why the next record was refused; None means that the store is full.
    """

    kept: int
    fault: str | None = None


class Source(Protocol):
    """A store that pages are exported from."""

    description: Description

    def record(self, key: PageKey) -> Record | str:
        """Return the record of a page with every byte checked, or the reason why it is unavailable.

        Thread-safe, and several calls may run at once.

        Raises:
            TierStoreError: No page is available any more.
        """
        ...

    def release(self, record: Record) -> None:
        """Return a record's memory for reuse."""
        ...


class Sink(Protocol):
    """A store that pages are imported into."""

    description: Description

    def has(self, key: PageKey) -> bool:
        """Return whether the page exists. Fast enough for the event loop's thread; thread-safe."""
        ...

    def reaches(self, key: PageKey) -> bool:
        """Return whether the page and all pages before it exist. Like ``has``, fast and thread-safe."""
        ...

    def take(self, records: Sequence[Record]) -> Taken:
        """Store records up to the first that cannot be kept. Those kept are visible when this returns.

        Args:
            records: Parents come before their children.

        Raises:
            TierStoreError: The store cannot take any page.
        """
        ...


def checked(item: Item, raw: bytes, payload: NDArray[np.uint8], description: Description) -> Record:
    """Return the record of an item after comparing every byte of head and payload with the index.

    Raises:
        IntegrityError: The bytes are not those that the index describes.
    """
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
    """Run ``call`` in a thread and return its result.

    If the task is cancelled, it first waits until the call has ended.
    """
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    finally:
        await _ended([running])


async def ahead(calls: Iterable[Callable[[], _T]], most: int) -> AsyncGenerator[_T]:
    """Run calls in threads and yield their results in order, with up to ``most`` of them started ahead.

    Close the generator (``contextlib.aclosing``). Leaving early, after an error or a cancellation, waits for all calls
    that were started. A call is taken from ``calls`` only when it starts.
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
    """Return how many pages of this size may be in flight: 32 MiB worth, at least 2, at most 64."""
    return max(2, min(_MOST_AHEAD, _AHEAD_NBYTES // page_nbytes))


async def _ended(running: Collection[asyncio.Future[_T]]) -> None:
    """Wait until all futures are done, even if this task is cancelled repeatedly."""
    while pending := [each for each in running if not each.done()]:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(pending)
    for each in running:
        if not each.cancelled():
            each.exception()  # retrieve it, or asyncio logs that the exception was never retrieved
