"""Tombstones: a file of fixed size with the keys of erased pages whose records LMDB could not delete yet.

LMDB needs free blocks to delete a record. On a disk that is full or refuses writes, the keys are written to
this file instead. The blocks of the file were allocated and written when it was created, so overwriting them needs
no disk space. When the directory is opened next, the records that the file names are deleted before anything can be
read.

The file is a Bloom filter (Bloom 1970), partitioned by hash function: a key sets one bit in each of four
blocks. The filter never fills up, but the more keys it contains, the more other records match it and are deleted as
well: fewer than 1 in 1,000,000 with 1,000 keys, 1 in 200 with 10,000 keys, and 1 in 8 with 30,000 keys. A cache may
lose a page, but must not bring an erased page back.

Each block has a checksum and an epoch, the number of the current set of keys. A new set begins once LMDB has
deleted the records of the previous one. LMDB's ``meta`` tree stores the epoch of the last set that was deleted
in full, so the file need not be cleared. If a block fails its checksum or is older than another block, all its bits
count as set.

A file system that never overwrites in place (btrfs, ZFS) may refuse the write when the disk is full. The keys then
stay in memory, and ``flush`` reports them.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_digest, xxh3_128_digest

from tierstore.nvme.directory_layout import TOMBSTONES_FILE, move_aside, odd_kind

_log = logging.getLogger(__name__)

RETIRED_KEY = b"erased"
"""Key in LMDB's ``meta`` tree. Its value is the last epoch whose records have all been deleted (see ``stamp``)."""

_BLOCK = 4096
_NUM_BLOCKS = 4
_HEAD = struct.Struct("<8sQ")
_MAGIC = b"TSerased"
_SUM_NBYTES = 16
_BITS_NBYTES = _BLOCK - _HEAD.size - _SUM_NBYTES
_NUM_BITS = 8 * _BITS_NBYTES
_WORDS = struct.Struct("<4I")
_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Tombstones:
    """The tombstone file of one sub-directory.

    Only the writer's thread, or the thread that opens the tier, may call ``record`` and ``retire``.
    """

    live: bool
    """Whether the file may name keys whose records LMDB has not deleted. Use ``in`` to test a single key."""

    epoch: int
    """The epoch that LMDB must store once the records of all recorded keys are deleted."""

    def __init__(self, directory: Path, retired: int, *, writable: bool = True) -> None:
        """Read the file.

        If the file is missing, no key counts as recorded: the directory is new, or was filled by a version without
        tombstones. If the file is unreadable or not a regular file, every key counts as recorded.

        Args:
            directory: The sub-directory.
            retired: The last epoch whose records have all been deleted, as stored in LMDB.
            writable: Whether to keep the directory open until ``close``, so that nothing is written to another
                directory that may replace it at its path.

        Raises:
            OSError: The file cannot be read.
        """
        self._path = directory / TOMBSTONES_FILE
        kind = odd_kind(self._path)
        raw = _contents(self._path) if kind is None else b""
        self._there = kind is None and raw is not None
        missing, raw = raw is None, raw or b""
        found = [_read(raw[at : at + _BLOCK]) for at in range(0, _NUM_BLOCKS * _BLOCK, _BLOCK)]
        epochs = [block[0] for block in found if block is not None]
        self.epoch = max([retired, *epochs])
        # A completed write has put its epoch into all four blocks. If a block is older, the last write was not
        # completed.
        self.live = not missing and all(epoch > retired for epoch in epochs)
        self._whole = len(epochs) == _NUM_BLOCKS
        self._bits = [
            bytearray(block[1] if block is not None and block[0] == self.epoch else b"\xff" * _BITS_NBYTES)
            for block in found
        ]
        if self.live and not epochs:
            self.epoch += 1
            _log.warning(
                "%s is %s: every page of this directory counts as erased", self._path, kind or "damaged"
            )
        self._fd = self._directory_fd = -1
        if writable:
            self._directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __contains__(self, key: object) -> bool:
        """Return whether the key was recorded. The result may be True, rarely, for a key that was not recorded."""
        return isinstance(key, bytes) and all(
            bits[at >> 3] >> (at & 7) & 1 for bits, at in zip(self._bits, _places(key), strict=True)
        )

    def prepare(self) -> None:
        """Create or repair the file while there is disk space, and open it.

        Must not be called while ``live``.

        Raises:
            OSError: The file cannot be created or opened.
        """
        if self._fd >= 0 and self._whole:
            return
        self._bits = [bytearray(_BITS_NBYTES) for _ in range(_NUM_BLOCKS)]
        if self._there and self._opens():
            if not self._whole:
                self._overwrite()
        else:
            self._make()

    def _opens(self) -> bool:
        """Open the file for writing.

        Return False if permissions forbid opening it. Raise OSError on any other failure.
        """
        if self._fd < 0:
            try:
                self._fd = os.open(TOMBSTONES_FILE, _WRITE, dir_fd=self._directory_fd)
            except PermissionError:
                return False
        return True

    def _make(self) -> None:
        """Create the file, replacing anything else that has its name. A directory is renamed, not deleted."""
        if odd_kind(self._path) == "a directory":
            move_aside(self._path)
        part, where = TOMBSTONES_FILE + ".new", self._directory_fd
        fd = os.open(part, _WRITE | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=where)
        try:
            self._write(fd)
            os.rename(part, TOMBSTONES_FILE, src_dir_fd=where, dst_dir_fd=where)
            os.fsync(where)
        except BaseException:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=where)
            raise
        self._fd = fd
        self._there = self._whole = True

    def record(self, keys: Iterable[bytes]) -> None:
        """Add keys durably.

        After an OSError, only some of the keys may have been recorded, so the caller must pass all of them again.
        """
        if not self.live:
            self.prepare()
            self.live = True
            self.epoch += 1
            self._bits = [bytearray(_BITS_NBYTES) for _ in range(_NUM_BLOCKS)]
        for key in keys:
            for bits, at in zip(self._bits, _places(key), strict=True):
                bits[at >> 3] |= 1 << (at & 7)
        self._overwrite()

    def retire(self) -> None:
        """Record that LMDB has durably deleted the records of all recorded keys and stored ``epoch``."""
        self.live = False

    def close(self) -> None:
        """Close the file. Idempotent. No other method may be called afterwards."""
        open_now, self._fd, self._directory_fd = (self._fd, self._directory_fd), -1, -1
        for fd in open_now:
            if fd >= 0:
                os.close(fd)

    def _overwrite(self) -> None:
        if self._fd < 0:
            self._fd = os.open(TOMBSTONES_FILE, _WRITE, dir_fd=self._directory_fd)
        self._write(self._fd)
        self._whole = True

    def _write(self, fd: int) -> None:
        raw = b"".join(_block(self.epoch, bits) for bits in self._bits)
        done = 0
        while done < len(raw):
            done += os.pwrite(fd, raw[done:], done)
        os.fsync(fd)


def stamp(epoch: int) -> bytes:
    """Encode an epoch for storage under RETIRED_KEY."""
    raw = epoch.to_bytes(8, "little")
    return raw + xxh3_64_digest(raw)


def retired(raw: bytes | None) -> int:
    """Decode a stamp. Return 0 if it is missing or damaged, so that every tombstone counts."""
    if raw is None or xxh3_64_digest(raw[:8]) != raw[8:]:
        return 0
    return int.from_bytes(raw[:8], "little")


def _contents(path: Path) -> bytes | None:
    """Return the file's bytes, b"" if permissions forbid reading it, or None if it is missing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except PermissionError:
        return b""
    try:
        return os.pread(fd, _NUM_BLOCKS * _BLOCK, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def _places(key: bytes) -> tuple[int, ...]:
    """Return the position of the key's bit in each block."""
    words: tuple[int, ...] = _WORDS.unpack(xxh3_128_digest(key))
    return tuple(word % _NUM_BITS for word in words)


def _block(epoch: int, bits: bytearray) -> bytes:
    body = _HEAD.pack(_MAGIC, epoch) + bytes(bits)
    return body + xxh3_128_digest(body)


def _read(raw: bytes) -> tuple[int, bytes] | None:
    """Return the epoch and bits of a block, or None if it is damaged."""
    body = raw[: _BLOCK - _SUM_NBYTES]
    if len(raw) < _BLOCK or xxh3_128_digest(body) != raw[len(body) :]:
        return None
    magic, epoch = _HEAD.unpack_from(body)
    return (epoch, body[_HEAD.size :]) if magic == _MAGIC else None
