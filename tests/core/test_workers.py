"""Tests of threads whose join was interrupted, and of files that stay open as long as a thread uses them."""

from __future__ import annotations

import ast
import os
import warnings
from pathlib import Path
from threading import Event, current_thread
from types import ModuleType

import pytest

import prefetch
import tierstore
from tests.support.interrupts import interrupted_in
from tests.support.pages import PATIENCE_S
from tierstore.threads import SharedFile, Worker


def test_a_thread_is_alive_after_an_interrupted_wait_for_it() -> None:
    go_on = Event()
    worker = Worker(go_on.wait, name="worker")
    worker.start()
    with interrupted_in(Worker.join):
        worker.join()
    assert worker.is_alive()
    worker.join(0.0)
    assert worker.is_alive()
    go_on.set()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()


def test_a_thread_that_raises_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[BaseException | None] = []
    monkeypatch.setattr("threading.excepthook", lambda args: told.append(args.exc_value))
    worker = Worker([].pop, name="worker")
    worker.start()
    worker.join(PATIENCE_S)
    assert not worker.is_alive()
    assert isinstance(told[0], IndexError)


def test_a_thread_that_did_not_start_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    worker = Worker(Event().wait, name="worker")
    worker.join()
    monkeypatch.setattr("threading.Thread.start", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        worker.start()
    worker.join()
    assert not worker.is_alive()


def test_a_thread_cannot_wait_for_itself() -> None:
    told: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as found:
            current_thread().join()
        told.append(str(found.value))

    worker = Worker(wait, name="worker")
    worker.start()
    worker.join(PATIENCE_S)
    assert told == ["a thread cannot wait for itself"]


def test_forked_child_does_not_wait_for_the_thread() -> None:
    go_on = Event()
    worker = Worker(go_on.wait, name="worker")
    worker.start()
    with warnings.catch_warnings():
        # newer Pythons warn about a fork with several threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        worker.join()
        os._exit(int(worker.is_alive()))
    go_on.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("package", [tierstore, prefetch])
def test_every_thread_of_the_packages_is_a_worker(package: ModuleType) -> None:
    found = []
    for root in package.__path__:
        for path in Path(root).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if "Thread" not in text:  # unparsing every call of the package takes a second
                continue
            tree = ast.parse(text)
            calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
            found += [path.name for call in calls if call in ("Thread", "threading.Thread")]
    assert found == []


def test_a_file_stays_open_as_long_as_a_thread_uses_it(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one")
    file = SharedFile(os.open(tmp_path / "one", os.O_RDONLY))
    number, reading, go_on, found = file.fd, Event(), Event(), list[bytes]()

    def read(file: SharedFile) -> None:
        reading.set()
        assert go_on.wait(PATIENCE_S)
        found.append(os.pread(file.fd, 3, 0))

    worker = Worker(read, file, name="worker")
    worker.start()
    assert reading.wait(PATIENCE_S)
    del file
    (tmp_path / "two").write_bytes(b"two")
    with (tmp_path / "two").open("rb") as other:
        assert other.fileno() != number
        go_on.set()
        worker.join(PATIENCE_S)
    assert found == [b"one"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
