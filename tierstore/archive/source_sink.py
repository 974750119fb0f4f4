"""The protocols ``Source`` and ``Sink``, and helpers that call their methods in threads.

An export reads records from a ``Source``, and an import stores them in a ``Sink``. Each can be a running or a
closed store. Their methods block, so a coroutine calls them in threads: ``ahead`` runs several calls at once, and
``whole`` runs a single one. If the coroutine is cancelled, both wait until the calls that they started have ended.
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
"""Callback ``progress(done, total)`` with numbers of pages. It is called in the event loop's thread."""


class Taken(NamedTuple):
    """Result of ``Sink.take``.

    The first ``kept`` records were kept. If not all were kept, ``fault`` is the reason why the next record is
    invalid, or None if the store is full.
    """

    kept: int
    fault: str | None = None


class Source(Protocol):
    """A running or closed store from which pages are exported. ``description`` describes its pages."""

    description: Description

    def record(self, key: PageKey) -> Record | str:
        """Read and verify the record of a page. Thread-safe; calls run in parallel.

        Return the reason instead if the page does not exist, is damaged or cannot be read.

        Raises:
            TierStoreError: The source is closed or has failed, so no page can be read.
        """
        ...

    def release(self, record: Record) -> None:
        """Allow the memory of a record to be reused. The caller must not use the record afterwards."""
        ...


class Sink(Protocol):
    """A running or closed store into which pages are imported. ``description`` describes the pages it accepts."""

    description: Description

    def has(self, key: PageKey) -> bool:
        """Return whether the store has the page. Thread-safe, and fast enough to call in the event loop's thread."""
        ...

    def reaches(self, key: PageKey) -> bool:
        """Return whether the store has the page and all pages before it. Thread-safe and fast, like ``has``."""
        ...

    def take(self, records: Sequence[Record]) -> Taken:
        """Store records in order, up to the first that cannot be kept.

        When the call returns, ``has`` returns True for the records that were kept.

        Args:
            records: The records to store, parents before their children.

        Raises:
            TierStoreError: The store is closed or has failed, so it cannot store any page.
        """
        ...


def checked(item: Item, raw: bytes, payload: NDArray[np.uint8], description: Description) -> Record:
    """Verify the head and the payload of a record, compare them with the index, and return the record.

    Args:
        item: The item of the index.
        raw: The bytes of the record's head.
        payload: The record's payload.
        description: The description of the archive's pages.

    Raises:
        IntegrityError: The record is damaged or does not match the index.
    """
    head = record_format.verify(
        raw,
        payload,
        fingerprint=description.fingerprint,
        key=item.key,
        generation=record_format.parse(raw).generation,
    )
    if (head.parent, head.codec, head.raw_nbytes) != (item.parent, item.codec, item.raw_nbytes):
        raise IntegrityError("the record does not match the index")
    if raw[CHECKSUM] != item.checksum:
        raise IntegrityError("the record does not match the index")
    return Record(head, raw, payload)


_AHEAD_NBYTES = 32 << 20
_MOST_AHEAD = 64

_T = TypeVar("_T")


async def whole(call: Callable[[], _T]) -> _T:
    """Run ``call`` in a thread and return its result.

    If this coroutine is cancelled, it waits until the call has ended before it raises CancelledError.
    """
    running = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(running)
    finally:
        await _ended([running])


async def ahead(calls: Iterable[Callable[[], _T]], most: int) -> AsyncGenerator[_T]:
    """Run calls in threads, up to ``most`` at once, and yield their results in the order of ``calls``.

    A call is taken from ``calls`` only when it starts. Close the generator, for example with
    ``contextlib.aclosing``. Closing it early, such as after an error or a cancellation, waits for all calls that
    have started.
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
    """Return how many pages of this size to read at once: as many as fit into 32 MiB, but at least 2 and at most 64."""
    return max(2, min(_MOST_AHEAD, _AHEAD_NBYTES // page_nbytes))


async def _ended(running: Collection[asyncio.Future[_T]]) -> None:
    """Wait until all futures are done, even if the current task is cancelled meanwhile, and drop their exceptions."""
    while pending := [each for each in running if not each.done()]:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(pending)
    for each in running:
        if not each.cancelled():
            each.exception()  # marks the exception as retrieved, so that asyncio does not log it
