"""Test that a file holds exactly the bytes written: with direct writes, without them, and if the disk refuses them."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tierstore.archive import atomic_file as output
from tierstore.archive.atomic_file import Output
from tierstore.nvme.direct_io import BLOCK

STAGED = 4 * BLOCK


def opened(path: Path, patch: pytest.MonkeyPatch) -> Output:
    patch.setattr(output, "_STAGED_NBYTES", STAGED)
    return Output(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def as_it_is(patch: pytest.MonkeyPatch) -> None:
    """Change nothing: whether writes are direct depends on the disk that the tests use."""


def not_direct(patch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    patch.setattr(output, "set_direct", refuse)


def refused_later(patch: pytest.MonkeyPatch) -> None:
    """Let the file be switched to direct writes, and then refuse each direct write."""
    write = os.pwrite
    not_direct: set[int] = set()
    patch.setattr(output, "set_direct", lambda fd: None)

    def set_flags(fd: int, command: int, flags: int = 0) -> int:
        not_direct.add(fd)
        return 0

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        if fd not in not_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(fd, data, offset)

    patch.setattr(fcntl, "fcntl", set_flags)
    patch.setattr(os, "pwrite", pwrite)


def a_little_at_a_time(patch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    patch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:BLOCK], offset))


@pytest.mark.parametrize("disk", [as_it_is, not_direct, refused_later, a_little_at_a_time])
def test_pieces_of_any_length_are_written_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Callable[[pytest.MonkeyPatch], None]
) -> None:
    disk(monkeypatch)
    dice = Random(0)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, STAGED - 1, STAGED, STAGED + 1, 3 * STAGED + 5]
    for number in range(40):
        expected = b""
        with opened(tmp_path / "x", monkeypatch) as file:
            for _ in range(dice.randrange(5)):
                piece = dice.randbytes(dice.choice(lengths))
                assert file.write(piece) == len(piece)
                expected += piece
                if dice.random() < 0.3:
                    file.flush()
                    assert (tmp_path / "x").read_bytes() == expected
            file.flush()
        assert (tmp_path / "x").read_bytes() == expected, number
        (tmp_path / "x").unlink()


def test_old_bytes_beyond_the_end_of_the_file_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x").write_bytes(bytes(100_000))
    with opened(tmp_path / "x", monkeypatch) as file:
        file.write(b"short")
        file.flush()
    assert (tmp_path / "x").read_bytes() == b"short"


def test_full_disk_raises_and_close_raises_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = opened(tmp_path / "x", monkeypatch)
    file.write(b"x" * 100)
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        file.flush()
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.write(b"x")
