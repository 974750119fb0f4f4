"""Keys of erased pages that LMDB could not delete yet, in a file of fixed size that is written in place.

LMDB needs free blocks to delete a record. On a disk that is full or refuses writes, the keys go into this file instead:
its blocks were allocated and written when it was made, so that overwriting them needs no room. The next open deletes
what the file names before anything can be read.

The file is a Bloom filter (Bloom 1970), partitioned by hash function: a key sets one bit in each of four blocks. It
never fills up: the more keys it holds, the more other records are dropped with them (1,000 keys: fewer than 1 of
1,000,000 records; 10,000: 1 of 200; 30,000: 1 of 8). A cache may lose a page, and must not bring one back.

Each block has an epoch and a checksum. LMDB's ``meta`` tree keeps the last epoch whose keys are all deleted, in the
same transaction as the deletions, so that the file need not be cleared. A block that differs from its checksum, or that
is older than another one, counts as all ones.

A filesystem that never overwrites in place (btrfs, ZFS) may refuse the write where it is full; then the keys stay in
memory, and ``flush`` reports them.
"""

from __future__ import annotations

import logging
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from xxhash import xxh3_128_digest

from tierstore.nvme.home import TOMBSTONES_FILE

_log = logging.getLogger(__name__)

_BLOCK = 4096
_NUM_BLOCKS = 4
_HEAD = struct.Struct("<8sQ")
_MAGIC = b"TSerased"
_SUM_NBYTES = 16
_BITS_NBYTES = _BLOCK - _HEAD.size - _SUM_NBYTES
_NUM_BITS = 8 * _BITS_NBYTES
_WORDS = struct.Struct("<4I")


class Tombstones:
    """The file of one sub-directory. ``record`` and ``retire``: the writer's thread, or at open."""

    live: bool
    """Whether the file may name keys that LMDB has not deleted: ``in`` tells which."""

    epoch: int
    """What LMDB is to keep once all these keys are deleted."""

    def __init__(self, directory: Path, retired: int) -> None:
        """Read the file. ``retired``: the last epoch whose keys are all deleted. OSError if it cannot be read.

        A missing file names nothing: the directory is new, or older than this file.
        """
        self._path = directory / TOMBSTONES_FILE
        raw = _contents(self._path)
        self._there = raw is not None
        raw = raw or b""
        found = [_read(raw[at : at + _BLOCK]) for at in range(0, _NUM_BLOCKS * _BLOCK, _BLOCK)]
        epochs = [block[0] for block in found if block is not None]
        self.epoch = max([retired, *epochs])
        # A record that was synced has its epoch in all four blocks: an older block shows that there is none.
        self.live = self._there and all(epoch > retired for epoch in epochs)
        self._bits = [
            bytearray(block[1] if block is not None and block[0] == self.epoch else b"\xff" * _BITS_NBYTES)
            for block in found
        ]
        if self.live and not epochs:
            self._there = self._path.is_file()
            self.epoch += 1
            _log.warning("%s is damaged: every page of this directory counts as erased", self._path)

    def __contains__(self, key: bytes) -> bool:
        """Whether the key was recorded; now and then True for another one."""
        return all(bits[at >> 3] >> (at & 7) & 1 for bits, at in zip(self._bits, _places(key), strict=True))

    def prepare(self) -> None:
        """Make the file while there is room for it, if it is missing. OSError if it cannot be made."""
        if self._there:
            return
        self._bits = [bytearray(_BITS_NBYTES) for _ in range(_NUM_BLOCKS)]
        part = self._path.with_name(self._path.name + ".new")
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._write(fd)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        part.replace(self._path)
        self._sync_directory()
        self._there = True

    def record(self, keys: Iterable[bytes]) -> None:
        """Add keys, durably. OSError: some of them may be recorded, and all are to be given again."""
        self.prepare()
        if not self.live:
            self.live = True
            self.epoch += 1
            self._bits = [bytearray(_BITS_NBYTES) for _ in range(_NUM_BLOCKS)]
        for key in keys:
            for bits, at in zip(self._bits, _places(key), strict=True):
                bits[at >> 3] |= 1 << (at & 7)
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._write(fd)
        finally:
            os.close(fd)

    def retire(self) -> None:
        """LMDB has deleted all that was recorded, and has durably kept ``epoch``."""
        self.live = False

    def _write(self, fd: int) -> None:
        raw = b"".join(_block(self.epoch, bits) for bits in self._bits)
        done = 0
        while done < len(raw):
            done += os.pwrite(fd, raw[done:], done)
        os.fsync(fd)

    def _sync_directory(self) -> None:
        fd = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _contents(path: Path) -> bytes | None:
    """The file's bytes, none if it is not a regular file; None if there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.pread(fd, _NUM_BLOCKS * _BLOCK, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def _places(key: bytes) -> tuple[int, ...]:
    """The key's bit in each block."""
    words: tuple[int, ...] = _WORDS.unpack(xxh3_128_digest(key))
    return tuple(word % _NUM_BITS for word in words)


def _block(epoch: int, bits: bytes) -> bytes:
    body = _HEAD.pack(_MAGIC, epoch) + bits
    return body + xxh3_128_digest(body)


def _read(raw: bytes) -> tuple[int, bytes] | None:
    """Epoch and bits of a block, or None unless it is whole."""
    body = raw[: _BLOCK - _SUM_NBYTES]
    if len(raw) < _BLOCK or xxh3_128_digest(body) != raw[len(body) :]:
        return None
    magic, epoch = _HEAD.unpack_from(body)
    return (epoch, body[_HEAD.size :]) if magic == _MAGIC else None
