"""A signal's handler may raise, or call the store, in the middle of a call: no call hangs, and nothing wrong is served.

The signal comes from what the store calls while it changes its tables, at the very place that is to be met; where no
exception is raised, that place calls the store itself.
"""

from __future__ import annotations

import signal
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any

import pytest

from tests.support.pages import PATIENCE_S, SPEC, chain, read, tiers, write
from tests.support.waiting import wait_for
from tierstore.errors import StoreClosed
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

PAGES = 4


def opened(path: Path) -> TierStore:
    """A store with all of a chain on disk and in memory."""
    store = TierStore.open(tiers(PAGES, PAGES, path), SPEC)
    write(store, chain(PAGES))
    store.flush()
    return store


def in_the_middle(store: TierStore, patch: pytest.MonkeyPatch, do: Any) -> None:
    """Once: what a handler does while the store looks for room."""
    leasing: Any = store._directory.leases
    begin = leasing.begin

    def interrupted(*args: Any, **named: Any) -> Any:
        patch.setattr(leasing, "begin", begin)
        do()
        return begin(*args, **named)

    patch.setattr(leasing, "begin", interrupted)


def require_all_there(path: Path) -> None:
    """The directory is free, and all that was flushed is in it."""
    with TierStore.open(tiers(PAGES, PAGES, path), SPEC) as store:
        assert read(store, chain(PAGES)) == PAGES


class SoftTimeLimit(Exception):
    """As task queues raise it from a handler when a task has taken too long."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, TimeoutError, SoftTimeLimit])
def test_a_store_interrupted_in_the_middle_of_a_change_has_ended_and_its_disk_has_not(
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


def test_those_who_wait_when_a_store_is_interrupted_wait_no_more(
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


def test_a_handler_may_close_the_store_in_the_middle_of_a_call(
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


def test_a_handler_that_asks_the_store_in_the_middle_of_a_call_is_refused_and_does_not_wait_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    in_the_middle(store, monkeypatch, store.stats)
    with pytest.raises(StoreClosed, match="interrupted"):
        store.acquire(chain(PAGES))
    store.close()
    require_all_there(tmp_path)


def test_a_handler_may_close_the_store_in_the_middle_of_its_close(
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


def test_who_is_interrupted_while_it_only_waits_has_its_store_as_it_was(
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
