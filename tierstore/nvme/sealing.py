"""Records made ready for extent files: payload encoded or as it is, head and checksum before it, in aligned memory.

A chunk of pages is made ready by threads of the sealer's own while the chunk before it is written.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore import codec
from tierstore.codecs import PageEncoder
from tierstore.nvme.capacity import Sizing
from tierstore.nvme.direct_io import BLOCK, aligned, is_aligned
from tierstore.nvme.extents import PREFIX
from tierstore.nvme.record import Coding, Page

_CHUNK_NBYTES = 8 << 20
_MOST_THREADS = 4


class Sealed(NamedTuple):
    """Head block and payload of a record, which fills its slot with them. Valid until the chunk after the next."""

    parts: tuple[NDArray[np.uint8], NDArray[np.uint8]]
    generation: int
    stored_nbytes: int

    @property
    def nbytes(self) -> int:
        """Of the slot."""
        return self.parts[0].nbytes + self.parts[1].nbytes


class Sealer:
    """The writer's thread alone calls it."""

    def __init__(self, sizing: Sizing, *, fingerprint: bytes, coding: Coding) -> None:
        self._sizing = sizing
        self._fingerprint = fingerprint
        self._coding = coding
        self._threads = min(_MOST_THREADS, len(os.sched_getaffinity(0))) if coding.changes else 1
        self._idle: list[PageEncoder] = []  # an encoder serves one share at a time, whichever thread has it
        self._step = max(self._threads, _CHUNK_NBYTES // sizing.slot_nbytes)
        rows = 2 * self._step  # one chunk is written, one is made
        self._heads = aligned(rows * BLOCK).reshape(rows, BLOCK)
        self._heads[:, : len(PREFIX)] = np.frombuffer(PREFIX, dtype=np.uint8)
        self._bodies = aligned(rows * (sizing.slot_nbytes - BLOCK)).reshape(rows, -1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="tierstore-nvme-seal")

    def seal(self, pages: Sequence[Page], generations: Iterator[int]) -> Generator[list[Sealed]]:
        """The pages' records in their order, a chunk at a time.

        The pages may change again once this has ended, whether at its end or by ``close``.
        """
        numbers = [next(generations) for _ in pages]
        first = min(len(pages), max(self._threads, self._step // 4))  # nothing is written while it is made
        starts = [*range(first, len(pages), self._step), len(pages)]
        chunks = [range(first), *(range(start, end) for start, end in pairwise(starts))]
        made: list[Future[list[Sealed]]] = []
        ahead: list[Future[list[Sealed]]] = []
        try:
            for chunk in [*chunks, range(0)]:
                made, ahead = ahead, self._begin(chunk, pages, numbers)
                if made:
                    yield _in_order([future.result() for future in made])
        finally:
            wait([*made, *ahead])  # they read pages that are the caller's again once they have failed

    def close(self) -> None:
        """End the threads. No call may follow."""
        self._pool.shutdown()

    def _begin(
        self, chunk: range, pages: Sequence[Page], numbers: Sequence[int]
    ) -> list[Future[list[Sealed]]]:
        """A share of the chunk for every thread: every so many-th page."""
        begun: list[Future[list[Sealed]]] = []
        for first in range(min(self._threads, len(chunk))):
            share = chunk[first :: self._threads]
            try:
                begun.append(self._pool.submit(self._share, share, pages, numbers))
            except RuntimeError:  # the interpreter ends, and no thread begins anything
                done: Future[list[Sealed]] = Future()
                begun.append(done)
                done.set_result(self._share(share, pages, numbers))
        return begun

    def _share(self, share: range, pages: Sequence[Page], numbers: Sequence[int]) -> list[Sealed]:
        encoder = self._encoder()
        try:
            rows = len(self._heads)
            return [self._seal(index % rows, pages[index], numbers[index], encoder) for index in share]
        finally:
            if encoder is not None:
                self._idle.append(encoder)

    def _encoder(self) -> PageEncoder | None:
        try:
            return self._idle.pop()
        except IndexError:
            return self._coding.encoder()

    def _seal(self, row: int, page: Page, generation: int, encoder: PageEncoder | None) -> Sealed:
        payload, body = self._payload(row, page.payload, None if page.head else encoder)
        head = page.head or codec.Head(
            fingerprint=self._fingerprint,
            key=page.key,
            parent=page.parent,
            codec=self._coding.plain
            if payload.nbytes == page.payload.nbytes
            else codec.CODECS[self._coding.name],
            raw_nbytes=self._coding.raw_nbytes(page.payload),
            stored_nbytes=payload.nbytes,
        )
        head = replace(head, generation=generation)
        block = self._heads[row]
        block[len(PREFIX) :] = np.frombuffer(codec.seal(head, payload), dtype=np.uint8)
        return Sealed((block, body), generation, payload.nbytes)

    def _payload(
        self, row: int, page: NDArray[np.uint8], encoder: PageEncoder | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Payload of a page, and the memory it fills up to the end of its slot: the page itself where it may be."""
        body = self._bodies[row]
        length = None if encoder is None else encoder.encode(page, body[: page.nbytes])
        if length is None and is_aligned(page) and page.nbytes == body.nbytes:
            return page, page
        if length is None:
            length = page.nbytes
            np.copyto(body[:length], page)
        body = body[: self._sizing.slot(length) - BLOCK]
        body[length:] = 0
        return body[:length], body


def _in_order(shares: list[list[Sealed]]) -> list[Sealed]:
    """What every so many-th share made, one after the other."""
    made: list[Sealed] = []
    for turn in range(len(shares[0])):
        made += [share[turn] for share in shares if turn < len(share)]
    return made
