"""Test that an export writes a whole archive or none, despite cancellation, a full disk, a kill or another writer."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import resource
import signal
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiofiles.threadpool import wrap

from tests.archive.rig import Shelf, archive, cancelled_at, exported, imported, run
from tests.support import forked
from tests.support.pages import chain
from tierstore.archive import export, source_sink
from tierstore.archive.atomic_file import Draft
from tierstore.archive.export import write_archive
from tierstore.archive.intake import read_contents
from tierstore.errors import ArchiveError


class Trouble:
    """A wrapped file that also awaits ``meet`` in its call number ``at``: before the call, or after it if ``after``."""

    def __init__(self, file: io.BufferedWriter, at: int, meet: Callable[[], Awaitable[None]], *, after: bool):
        self._file = wrap(file)
        self._at = at
        self._meet = meet
        self._after = after
        self.calls = 0

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self.calls += 1
        due = self.calls == self._at
        if due and not self._after:
            await self._meet()
        result = await call()
        if due and self._after:
            await self._meet()
        return result

    async def write(self, piece: Any) -> Any:
        return await self._call(lambda: self._file.write(piece))

    async def flush(self) -> Any:
        return await self._call(self._file.flush)


async def cancelled() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def interrupted() -> None:
    raise KeyboardInterrupt


def calls_of_a_whole_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int) -> int:
    seen: list[Trouble] = []

    def counted(file: io.BufferedWriter) -> Trouble:
        seen.append(Trouble(file, -1, full, after=False))
        return seen[-1]

    monkeypatch.setattr(export, "wrap", counted)
    archive(tmp_path / "counted.tier", pages)
    (tmp_path / "counted.tier").unlink()
    return seen[0].calls


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("meet", "error"),
    [(cancelled, asyncio.CancelledError), (full, OSError), (interrupted, KeyboardInterrupt)],
)
def test_failure_at_any_write_leaves_no_draft_and_keeps_the_old_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meet: Callable[[], Awaitable[None]],
    error: type[BaseException],
    after: bool,
) -> None:
    pages = 3
    total = calls_of_a_whole_export(tmp_path, monkeypatch, pages)
    assert total == 2 + 2 * pages + 2  # header, two pieces per record, index, trailer, flush
    old = tmp_path / "old.tier"
    old.write_bytes(b"what was there before")
    for at in range(1, total + 1):
        monkeypatch.setattr(export, "wrap", lambda file, at=at: Trouble(file, at, meet, after=after))
        for path in (old, tmp_path / "new.tier"):
            with pytest.raises(error):
                exported(path, Shelf.of(chain(pages)))
        assert [path.name for path in tmp_path.iterdir()] == ["old.tier"]
        assert old.read_bytes() == b"what was there before"


def test_an_export_that_is_cancelled_at_any_of_its_waits_leaves_nothing(tmp_path: Path) -> None:
    source = Shelf.of(chain(3))
    path = tmp_path / "x.tier"
    waits = 0
    while cancelled_at(waits + 1, write_archive(path, list(source.records), source)) is None:
        assert list(tmp_path.iterdir()) == []
        waits += 1
    assert (
        waits >= 1 + 2 + 2 * 3 + 2 + 1
    )  # at least: reading the first page in a thread, writing each piece, syncing the file
    assert imported(path, Shelf()).complete


def test_a_sync_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        archive(tmp_path / "x.tier")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_really_full_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            archive(tmp_path / "x.tier")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_draft_of_a_killed_writer_is_removed_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x.tier"
    program = (
        "import os, sys, pathlib; from tierstore.archive.atomic_file import Draft\n"
        "draft = Draft(pathlib.Path(sys.argv[1])); draft.file.write(b'x' * 100_000); draft.file.flush()\n"
        "os.kill(os.getpid(), 9)"
    )
    done = forked.run(program, path)
    assert done.returncode == -signal.SIGKILL
    assert [each.name for each in tmp_path.iterdir()] == ["x.tier.part"]
    _, keys = archive(path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.tier"]
    assert run(read_contents(path)).items[0].key == keys[0]


def test_draft_of_a_killed_writer_is_removed_by_the_next_even_if_it_fails(tmp_path: Path) -> None:
    (tmp_path / "x.tier.part").write_bytes(b"half")
    with pytest.raises(ArchiveError, match="none of the 1 pages could be read"):
        exported(tmp_path / "x.tier", Shelf(), chain(1))
    assert list(tmp_path.iterdir()) == []


def test_second_writer_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.tier"
    with Draft(path), pytest.raises(ArchiveError, match="being written by another"):
        archive(path)
    assert list(tmp_path.iterdir()) == []


def test_writer_starting_as_another_commits_does_not_write_into_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.tier"
    first = Draft(path)
    first.file.write(b"whole")
    first.file.flush()
    lock = fcntl.flock

    def ended_meanwhile(fd: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        with first:
            first.commit()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", ended_meanwhile)
    with Draft(path):
        assert path.read_bytes() == b"whole"
    assert [each.name for each in tmp_path.iterdir()] == ["x.tier"]


@pytest.mark.parametrize("keys", [[], chain(2, "elsewhere")])
def test_an_export_of_nothing_makes_no_file(tmp_path: Path, keys: list[Any]) -> None:
    with pytest.raises(ArchiveError):
        exported(tmp_path / "x.tier", Shelf.of(chain(3)), keys)
    assert list(tmp_path.iterdir()) == []


def test_export_to_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="is a directory"):
        archive(tmp_path)
    with pytest.raises(FileNotFoundError):
        archive(tmp_path / "missing" / "x.tier")


def test_export_does_not_replace_a_pipe_or_link(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / "elsewhere")
    for place, found in ((pipe, "device, pipe or socket"), (link, "link")):
        before = place.lstat()
        with pytest.raises(
            ArchiveError, match=rf"is a .*{found}.*; choose a path that is new or a regular file"
        ):
            run(write_archive(place, [], Shelf()))
        assert place.lstat() == before
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def test_missing_pages_are_named_and_the_others_written_once(tmp_path: Path) -> None:
    here, elsewhere = chain(3), chain(2, "elsewhere")
    done = exported(tmp_path / "x.tier", Shelf.of(here), [here[2], *elsewhere, *here, here[0]])
    assert done.missing == tuple((key, "not found") for key in elsewhere)
    assert (done.pages, done.codecs) == (3, {"none": 3})
    assert done.nbytes == (tmp_path / "x.tier").stat().st_size
    sink = Shelf()
    assert imported(tmp_path / "x.tier", sink).complete
    assert sink.records.keys() == set(here)


def test_equal_pages_make_equal_files_that_only_their_owner_reads(tmp_path: Path) -> None:
    one, _ = archive(tmp_path / "one.tier")
    two, _ = archive(tmp_path / "two.tier")
    assert one.read_bytes() == two.read_bytes()
    assert one.stat().st_mode & 0o777 == 0o600


def test_cancelling_a_call_in_a_thread_waits_for_its_end(tmp_path: Path) -> None:
    ended: list[int] = []

    async def play() -> None:
        begun = asyncio.Event()
        loop = asyncio.get_running_loop()
        gate = threading.Event()

        def work() -> None:
            loop.call_soon_threadsafe(begun.set)
            assert gate.wait(60)
            ended.append(1)

        task = asyncio.ensure_future(source_sink.whole(work))
        await begun.wait()
        try:
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
            assert not task.done()
        finally:
            gate.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert ended == [1]

    run(play())
