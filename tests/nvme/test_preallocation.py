"""Tests on file systems that cannot preallocate: files are filled with zeros, and a full disk is detected."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.nvme.rig import Rig, data_file, extent_files, wait_until_writable
from tests.nvme.watch import Calls
from tierstore.nvme import direct_io
from tierstore.nvme.direct_io import BLOCK, reserve
from tierstore.types import Failure

CANNOT = [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS]


def refusing(number: int) -> Callable[[int, int, int], None]:
    """Return a stand-in for ``posix_fallocate`` that fails with this error number."""

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces system calls of ``direct_io``, by name. Without arguments, it restores them."""

    def replace(**calls: Callable[..., object]) -> None:
        monkeypatch.setattr(direct_io, "os", Calls(**calls))

    return replace


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def blocks(path: Path) -> int:
    """Return the number of bytes that the disk has allocated for a file."""
    return path.stat().st_blocks * 512


@pytest.mark.parametrize("number", CANNOT)
def test_a_tier_without_preallocation_keeps_pages_in_files_without_holes(
    tmp_path: Path, disk: Callable[..., None], number: int, payload: str, caplog: pytest.LogCaptureFixture
) -> None:
    disk(posix_fallocate=refusing(number))
    rig = Rig(tmp_path / "home")
    try:
        assert rig.write(range(20)).ok
        assert rig.tier.state == "ok"
        files = extent_files(rig.home)
        assert bool(files) == (payload == "extents")
        for path in files:
            assert blocks(path) >= path.stat().st_size > 0
        assert blocks(data_file(rig.home).with_name("lock.mdb")) >= BLOCK, (
            "access to a hole in this file would cause SIGBUS"
        )
    finally:
        rig.close()
    again = Rig(tmp_path / "home")
    try:
        assert again.present(range(20)) == set(range(20))
    finally:
        again.close()
    assert not caplog.records


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_disk_that_fills_up_during_preallocation_makes_the_tier_read_only_until_space_is_freed(
    tmp_path: Path, disk: Callable[..., None], number: int
) -> None:
    rig = Rig(tmp_path / "home", payload="extents")
    try:
        assert rig.write(range(5)).ok
        before = extent_files(rig.home)

        def full(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if offset:
                raise OSError(number, os.strerror(number))
            return os.pwritev(fd, [buffers[0][:BLOCK]], offset)

        disk(posix_fallocate=refusing(errno.EOPNOTSUPP), pwritev=full)
        ack = rig.write(range(100, 200))
        assert {failure for _, failure in ack.failures} == {Failure.NO_SPACE}
        assert extent_files(rig.home) == before, "the partly written new file must be removed"
        assert rig.present(range(5)) == set(range(5))
        disk(posix_fallocate=refusing(errno.EOPNOTSUPP))
        wait_until_writable(rig)
        assert rig.write(range(100, 200)).ok
        assert rig.present([*range(5), *range(100, 200)]) == {*range(5), *range(100, 200)}
    finally:
        rig.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EPERM])
def test_other_preallocation_errors_are_raised(file: int, disk: Callable[..., None], number: int) -> None:
    disk(posix_fallocate=refusing(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        reserve(file, BLOCK)
    assert os.fstat(file).st_size == 0


@pytest.mark.parametrize("there", [0, 1, BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("wanted", [1, BLOCK, 3 * BLOCK + 4, (8 << 20) + 3])
def test_existing_bytes_are_kept_and_zeros_follow(
    file: int, disk: Callable[..., None], there: int, wanted: int
) -> None:
    old = os.urandom(there)
    os.pwrite(file, old, 0)
    disk(posix_fallocate=refusing(errno.ENOSYS))
    reserve(file, wanted)
    found = os.pread(file, 9 << 20, 0)
    assert found == old + bytes(max(0, wanted - there))


def test_short_writes_continue_and_a_zero_byte_write_fails(file: int, disk: Callable[..., None]) -> None:
    def short(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, [buffers[0][:1000]], offset)

    disk(posix_fallocate=refusing(errno.ENOSYS), pwritev=short)
    reserve(file, 3500)
    assert os.fstat(file).st_size == 3500
    disk(posix_fallocate=refusing(errno.ENOSYS), pwritev=lambda *_: 0)
    with pytest.raises(OSError, match="wrote 0 bytes"):
        reserve(file, 3501)
