"""Extent files: preallocated, cut into slots on 4 KiB boundaries, written and read in place, never mapped.

A slot is a block of 16 bytes that say so and the record's head, and the payload behind it, padded to the slot's end.
Nothing here knows which slots are used. Reads by any thread; the rest by the writer's thread, or at open.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tierstore.codec import HEAD_NBYTES
from tierstore.errors import IntegrityError
from tierstore.nvme import home
from tierstore.nvme.allocator import Move, Place, Slots
from tierstore.nvme.direct_io import BLOCK, aligned, is_aligned, padded, set_direct
from tierstore.nvme.entry import slot_blocks, unpack
from tierstore.nvme.environment import Environment
from tierstore.nvme.record import TRIES, Fetched, MovedError, look_again, lookup, memory_for
from tierstore.types import PageKey

PREFIX = b"TierStore extent"
"""In front of a head, where LMDB has its page header."""

_HEAD_AT = BLOCK - HEAD_NBYTES
_SLOTS_A_CALL = 500  # two buffers each; the kernel takes 1,024
_BLOCKS_A_CALL = (64 << 20) // BLOCK  # a call that ends is the only sign that a slow disk still takes writes


class ExtentFiles:
    """Every extent file of a directory, open. ``direct``: past the page cache; else through it."""

    def __init__(self, directory: Path, *, direct: bool, writable: bool = True) -> None:
        """OSError if one cannot be opened; then none stays open."""
        self._directory = directory
        self._direct = direct
        self._has_new = False  # files whose names may not be durable yet
        self._fds: dict[int, int] = {}
        self.sizes = home.extent_sizes(directory)
        """Number and bytes of each file."""
        try:
            for number in self.sizes:
                self._open(number, os.O_RDWR if writable else os.O_RDONLY)
        except BaseException:
            self.close()
            raise

    def add(self, nbytes: int) -> int:
        """Make a file of ``nbytes`` that the disk has set aside; its number. OSError, and no file, if it has not."""
        number = next(number for number in itertools.count(1) if number not in self.sizes)
        try:
            self._open(number, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.posix_fallocate(self._fds[number], 0, nbytes)
        except BaseException:
            if number in self._fds:
                os.close(self._fds.pop(number))
                home.extent_path(self._directory, number).unlink(missing_ok=True)
            raise
        self.sizes[number] = nbytes
        self._has_new = True
        return number

    def remove(self, number: int) -> None:
        """Delete a file, which gives its room back to the disk."""
        os.close(self._fds.pop(number))
        del self.sizes[number]
        home.extent_path(self._directory, number).unlink(missing_ok=True)

    def cut(self, number: int, nbytes: int) -> None:
        """Shorten a file, which gives room back to the disk."""
        os.ftruncate(self._fds[number], nbytes)
        self.sizes[number] = nbytes

    def write(
        self, places: Sequence[Place], parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.uint8]]]
    ) -> None:
        """Write head block and padded payload, which fill the slot, of each; neighbours in one call. Not durable yet.
        OSError: any of them may have changed.
        """
        for first, end in _runs(places):
            buffers = deque(buffer for pair in parts[first:end] for buffer in pair)
            _write_all(self._fds[places[first].extent], buffers, places[first].block * BLOCK)

    def sync(self, places: Sequence[Place]) -> None:
        """Make what was written there durable."""
        for number in {place.extent for place in places}:
            os.fdatasync(self._fds[number])
        if self._has_new:
            self._sync_directory()
            self._has_new = False

    def read(self, place: Place, out: NDArray[np.uint8], scratch: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fill ``out`` with a slot's payload and return its head, a part of ``scratch`` (at least a block).

        Straight into ``out`` where it may be, else by way of ``scratch`` if that is aligned and large enough, else of
        a buffer made for it. IntegrityError: there is no such slot, or it is cut. OSError: it could not be read.
        """
        fd = self._fds.get(place.extent)
        if fd is None:
            raise IntegrityError(f"no extent file {place.extent}")
        if self._direct and not (is_aligned(out) and is_aligned(scratch[:BLOCK])):
            self._read_bounced(fd, place, out, scratch)
        else:
            got = os.preadv(fd, [scratch[:BLOCK].data, out.data], place.block * BLOCK)
            _require(got, out.nbytes)
        if scratch[:_HEAD_AT].tobytes() != PREFIX:
            raise IntegrityError("no record begins there")
        return scratch[_HEAD_AT:BLOCK]

    def close(self) -> None:
        """No call may be running, and none may follow."""
        while self._fds:
            os.close(self._fds.popitem()[1])

    def _read_bounced(
        self, fd: int, place: Place, out: NDArray[np.uint8], scratch: NDArray[np.uint8]
    ) -> None:
        length = BLOCK + padded(out.nbytes)
        bounce = scratch[:length]
        if bounce.nbytes < length or not is_aligned(bounce):
            bounce = aligned(length)
        got = os.preadv(fd, [bounce.data], place.block * BLOCK)
        _require(got, out.nbytes)
        np.copyto(out, bounce[BLOCK : BLOCK + out.nbytes])
        if bounce.base is not scratch.base:
            np.copyto(scratch[:BLOCK], bounce[:BLOCK])

    def _open(self, number: int, flags: int) -> None:
        path = home.extent_path(self._directory, number)
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if self._direct:
                set_direct(fd)
        except BaseException:
            os.close(fd)
            raise
        self._fds[number] = fd

    def _sync_directory(self) -> None:
        fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _runs(places: Sequence[Place]) -> Iterator[tuple[int, int]]:
    """Slices of slots that lie one behind the other."""
    first = 0
    for end in range(1, len(places) + 1):
        before = places[end - 1]
        if (
            end == len(places)
            or end - first == _SLOTS_A_CALL
            or places[end].first + places[end].blocks - places[first].first > _BLOCKS_A_CALL
            or places[end].first != before.first + before.blocks
        ):
            yield first, end
            first = end


def _write_all(fd: int, buffers: deque[NDArray[np.uint8]], offset: int) -> None:
    while buffers:
        done = os.pwritev(fd, [buffer.data for buffer in buffers], offset)
        if not done:
            raise OSError(errno.EIO, "nothing was written")
        offset += done
        while buffers and done >= buffers[0].nbytes:
            done -= buffers.popleft().nbytes
        if done:
            buffers[0] = buffers[0][done:]


def _require(got: int, nbytes: int) -> None:
    if got < BLOCK + nbytes:
        raise IntegrityError(f"{got} bytes where the record has {BLOCK + nbytes}")


class ExtentBytes:
    """Of records in extent files, whose slots are pinned while they are read. ``close`` closes the files."""

    def __init__(self, env: Environment, files: ExtentFiles, slots: Slots) -> None:
        self._env = env
        self._files = files
        self._slots = slots

    def fetch(
        self,
        key: PageKey,
        out: NDArray[np.uint8],
        scratch: NDArray[np.uint8],
        held: int | None,
    ) -> Fetched:
        raw = lookup(self._env, key)
        for _ in range(TRIES):
            entry = unpack(key, raw)
            body, payload = memory_for(entry, out, scratch, held)
            place = Place(entry.extent, entry.block, slot_blocks(entry.nbytes))
            try:
                with self._slots.pinned(place):  # nothing new is put there while the disk works
                    self._files.read(place, body, scratch)
            except (IntegrityError, OSError) as error:
                raw = look_again(self._env, key, raw, error)
            else:
                return Fetched(payload, raw, entry.generation)
        raise MovedError(f"replaced {TRIES} times while it was read")

    def close(self) -> None:
        self._files.close()


def copy_records(files: ExtentFiles, planned: Sequence[Move]) -> None:
    """Write the records into their new slots, byte for byte and durably; the old ones stay. OSError, IntegrityError."""
    longest = max(move.old.blocks for move in planned)
    body, head = aligned((longest - 1) * BLOCK), aligned(BLOCK)
    for old, new in planned:
        payload = body[: (old.blocks - 1) * BLOCK]
        files.read(old, payload, head)
        files.write([new], [(head, payload)])
    files.sync([move.new for move in planned])
