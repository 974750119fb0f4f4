"""Tests of signal handlers that raise, or call the store, during a call: no call hangs, no wrong page is served.

The signal is raised in a function that the store calls while it changes its tables. Some tests call the handler's
code there directly, without a signal.
"""

from __future__ import annotations

import itertools
import signal
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest

from tests.support.pages import PATIENCE_S, SPEC, chain, read, tiers, write
from tests.support.waiting import wait_for
from tierstore.errors import StoreClosed
from tierstore.store import TierStore
from tierstore.threads import Worker
from tierstore.types import LeaseState, Tier

PAGES = 4


def opened(path: Path) -> TierStore:
    """Return a store with the pages of ``chain(PAGES)`` both on disk and in memory."""
    store = TierStore.open(tiers(PAGES, PAGES, path), SPEC)
    write(store, chain(PAGES))
    store.flush()
    return store


def in_the_middle(store: TierStore, patch: pytest.MonkeyPatch, do: Any) -> None:
    """Let the store call ``do`` once, as a signal handler would be called, when it next creates a lease."""
    leasing: Any = store._directory.leases
    begin = leasing.begin

    def interrupted(*args: Any, **named: Any) -> Any:
        patch.setattr(leasing, "begin", begin)
        do()
        return begin(*args, **named)

    patch.setattr(leasing, "begin", interrupted)


def require_all_there(path: Path) -> None:
    """Assert that the directory can be opened, and that it contains all pages that were flushed."""
    with TierStore.open(tiers(PAGES, PAGES, path), SPEC) as store:
        assert read(store, chain(PAGES)) == PAGES


class SoftTimeLimit(Exception):
    """An exception like those that task queues raise from a signal handler when a task takes too long."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError, SoftTimeLimit])
def test_a_store_interrupted_during_a_change_is_closed_and_its_disk_stays_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def handler(*_: object) -> None:
        raise error

    store = opened(tmp_path)
    in_the_middle(store, monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(error):
            store.acquire(chain(PAGES))
    finally:
        signal.signal(signal.SIGUSR1, before)
    for call in (store.poll, store.stats, store.flush, store.check, lambda: store.match(chain(1))):
        with pytest.raises(StoreClosed, match="interrupted"):
            call()
    store.close()
    require_all_there(tmp_path)


def test_an_interrupted_store_wakes_all_waiting_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler() -> None:
        raise KeyboardInterrupt

    store = opened(tmp_path)
    ended: list[str] = []
    leases = [store.acquire(chain(PAGES))]

    def wait() -> None:
        try:
            store.allocate(PAGES, timeout_s=PATIENCE_S)
        except StoreClosed as closed:
            ended.append(str(closed))

    waiting = Thread(target=wait)
    waiting.start()
    in_the_middle(store, monkeypatch, handler)
    with pytest.raises(KeyboardInterrupt):
        store.acquire(chain(1))
    waiting.join(PATIENCE_S)
    assert "interrupted" in ended[0]
    with leases[0]:
        pass
    store.close()


def test_signal_handler_may_close_the_store_during_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    before = signal.signal(signal.SIGUSR1, lambda *_: store.close())
    try:
        in_the_middle(store, monkeypatch, lambda: signal.raise_signal(signal.SIGUSR1))
        with pytest.raises(StoreClosed):
            store.acquire(chain(PAGES))
        require_all_there(tmp_path)
        store.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_signal_handler_calling_the_store_during_a_call_is_refused_without_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    in_the_middle(store, monkeypatch, store.stats)
    with pytest.raises(StoreClosed, match="interrupted"):
        store.acquire(chain(PAGES))
    store.close()
    require_all_there(tmp_path)


def test_signal_handler_may_close_the_store_during_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    hints: Any = store._directory.hints
    close = hints.close

    def interrupted() -> None:
        monkeypatch.setattr(hints, "close", close)
        store.close()
        close()

    monkeypatch.setattr(hints, "close", interrupted)
    store.close()
    with pytest.raises(StoreClosed):
        store.poll()
    require_all_there(tmp_path)


def test_an_interrupt_during_a_plain_wait_leaves_the_store_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    with opened(tmp_path) as store:
        lease = store.acquire(chain(PAGES))
        before = signal.signal(signal.SIGUSR1, handler)
        pausing: Any = store._pump._wakeup
        wait = pausing.wait

        def interrupted(*args: Any) -> None:
            if current_thread() is main_thread():  # the store's own thread waits there as well
                monkeypatch.setattr(pausing, "wait", wait)
                signal.raise_signal(signal.SIGUSR1)
            wait(*args)

        monkeypatch.setattr(pausing, "wait", interrupted)
        try:
            with pytest.raises(KeyboardInterrupt):
                store.allocate(PAGES, timeout_s=PATIENCE_S)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        lease.release()
        assert read(store, chain(PAGES)) == PAGES
        store.demote(chain(PAGES), Tier.NVME)
        wait_for(lambda: store.match(chain(PAGES)).tiers == (Tier.NVME,) * PAGES)
        store.check()


@pytest.mark.parametrize("handler", ["raises", "closes"])
def test_a_close_that_was_interrupted_in_any_wait_for_a_thread_can_be_called_again(
    tmp_path: Path, handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt ``close`` with a signal handler that raises an exception or calls ``close`` itself."""
    join = Worker.join

    def interrupted_at(at: int) -> bool:
        """Close a store, and interrupt its wait number ``at``. Return whether there is such a wait."""
        store, waits = opened(tmp_path), itertools.count()

        def wait(worker: Worker, timeout: float | None = None) -> None:
            if next(waits) == at:
                if handler == "raises":
                    raise KeyboardInterrupt
                store.close()
            join(worker, timeout)

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "join", wait)
            try:
                store.close()
            except KeyboardInterrupt:
                store.close()
        require_all_there(tmp_path)
        return next(waits) > at + 1

    met = list(itertools.takewhile(interrupted_at, itertools.count()))
    assert len(met) >= 4, "close must wait for the pump, the writer, the copy threads and the readers"
