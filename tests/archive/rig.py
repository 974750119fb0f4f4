"""Helpers that write archives of small generated pages, and a store that is only a dictionary."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, TypeVarTuple, Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from tests.support.pages import SPEC, chain, content
from tierstore.archive.export import Exported, write_archive
from tierstore.archive.file_format import Description
from tierstore.archive.intake import Imported, read_archive
from tierstore.archive.source_sink import Taken
from tierstore.nvme import record_format
from tierstore.nvme.reader import Record
from tierstore.page import PageLayout
from tierstore.types import PageKey

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

LAYOUT = PageLayout.of(SPEC)
DESCRIPTION = Description(LAYOUT)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


class TurnByTurn(asyncio.SelectorEventLoop):
    """An event loop that completes executor calls in its next turn, so tasks wait at the same points every time."""

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def call() -> None:
            with ThreadPoolExecutor(1) as threads:
                ended = threads.submit(func, *args)
            error = ended.exception()
            if future.cancelled():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(ended.result())

        self.call_soon(call)
        return future


class CancelledAt(Generic[T]):
    """An awaitable that runs ``work``, and cancels the current task when ``work`` waits for the ``at``-th time."""

    def __init__(self, at: int, work: Coroutine[Any, Any, T]) -> None:
        self._at = at
        self._work = work
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, T]:
        steps = self._work.__await__()
        while True:
            try:
                waited_for = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            self.waits += 1
            if self.waits == self._at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                yield waited_for
            except asyncio.CancelledError as error:
                try:
                    yield steps.throw(error)
                except StopIteration as end:
                    late: T = end.value
                    return late


def cancelled_at(at: int, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``, and cancel it when it waits for the ``at``-th time. Return its result, or None if cancelled."""

    async def play() -> T:
        return await CancelledAt(at, work)

    try:
        with asyncio.Runner(loop_factory=TurnByTurn) as runner:
            return runner.run(play())
    except asyncio.CancelledError:
        return None


def page(key: PageKey) -> NDArray[np.uint8]:
    """Return the bytes of the key's page."""
    return content(key).view(-1).view(torch.uint8).numpy()


def record(key: PageKey, parent: PageKey | None, description: Description = DESCRIPTION) -> Record:
    payload = page(key)
    head = record_format.Head(
        fingerprint=description.fingerprint,
        key=key,
        parent=parent,
        codec=record_format.Codec.NONE,
        raw_nbytes=payload.nbytes,
        stored_nbytes=payload.nbytes,
    )
    return Record(head, record_format.seal(head, payload), payload)


@dataclass
class Shelf:
    """A source and sink that keeps at most ``room`` records in a dictionary."""

    description: Description = DESCRIPTION
    records: dict[PageKey, Record] = field(default_factory=dict)
    room: int = 1 << 30

    @classmethod
    def of(cls, *chains: Sequence[PageKey], description: Description = DESCRIPTION) -> Shelf:
        """Return a shelf with these chains of pages. Each page in a chain is the parent of the next."""
        shelf = cls(description)
        for keys in chains:
            for key, parent in zip(keys, [None, *keys], strict=False):
                shelf.records[key] = record(key, parent, description)
        return shelf

    def record(self, key: PageKey) -> Record | str:
        return self.records.get(key, "not found")

    def release(self, record: Record) -> None:
        """Do nothing: the record stays on the shelf."""

    def has(self, key: PageKey) -> bool:
        return key in self.records

    def reaches(self, key: PageKey | None) -> bool:
        while key is not None and key in self.records:
            key = self.records[key].head.parent
        return key is None

    def take(self, records: Sequence[Record]) -> Taken:
        for number, each in enumerate(records):
            if len(self.records) == self.room:
                return Taken(number)
            self.records[each.head.key] = each
        return Taken(len(records))

    def require_right(self) -> None:
        """Require that every page has the content that belongs to its key, and that its parent is on the shelf too."""
        for key, each in self.records.items():
            assert each.head.key == key
            np.testing.assert_array_equal(each.payload, page(key))
            assert each.head.parent is None or each.head.parent in self.records


def exported(path: Path, source: Shelf, keys: Sequence[PageKey] | None = None) -> Exported:
    return run(write_archive(path, list(source.records) if keys is None else keys, source))


def imported(path: Path, sink: Shelf) -> Imported:
    return run(read_archive(path, sink))


def archive(path: Path, pages: int = 6) -> tuple[Path, list[PageKey]]:
    """Write an archive with one chain of pages, and return its path and the keys."""
    keys = chain(pages)
    exported(path, Shelf.of(keys))
    return path, keys


def spoiled(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> Path:
    """Write a changed copy of the file, and return its path."""
    copy = path.with_name("spoiled.tier")
    copy.write_bytes(change(bytearray(path.read_bytes())))
    return copy
