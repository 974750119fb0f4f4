"""Tests of waiting and locking between threads: no wake-up is lost, and the lock is exclusive and fair.

CPython runs signal handlers when a Python function starts, and after a call to a C function. It calls a profiling
function at the same points. The tests therefore run a handler from a profiling function, at each point in turn.
"""

from __future__ import annotations

import ast
import inspect
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event, Thread, get_ident, main_thread
from time import monotonic, sleep
from types import BuiltinMethodType, FrameType, ModuleType

import pytest

from tests.support.waiting import wait_for
from tierstore import lease, live_archive, pump, store
from tierstore.errors import StoreClosed
from tierstore.pump import FairLock, Guard, Wakeup

PATIENCE_S = 60.0


def test_an_event_between_the_check_and_the_wait_is_not_lost() -> None:
    wakeup = Wakeup()
    seen = wakeup.count
    wakeup.bump()
    start = monotonic()
    wakeup.wait(seen, None, PATIENCE_S)
    assert monotonic() - start < PATIENCE_S


def test_every_waiter_is_woken() -> None:
    wakeup = Wakeup()
    seen = wakeup.count
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(wakeup.wait, seen, None, PATIENCE_S) for _ in range(4)]
        wakeup.bump()
        start = monotonic()
        for wait in waits:
            wait.result(PATIENCE_S)
    assert monotonic() - start < PATIENCE_S


@pytest.mark.parametrize("in_s", [-1.0, 0.01])
def test_the_deadline_ends_a_wait_and_one_that_has_passed_ends_it_at_once(in_s: float) -> None:
    wakeup = Wakeup()
    deadline = monotonic() + in_s
    wakeup.wait(wakeup.count, deadline, PATIENCE_S)
    assert deadline - 0.005 <= monotonic() < deadline + PATIENCE_S / 2


def test_a_wait_without_a_deadline_ends_after_at_most_the_time_given() -> None:
    wakeup = Wakeup()
    start = monotonic()
    wakeup.wait(wakeup.count, None, 0.02)
    assert 0.015 <= monotonic() - start < PATIENCE_S / 2


def in_a_thread(do: Callable[[], None]) -> None:
    """Call ``do`` in a new thread, and re-raise its exception in the calling thread. Fail if it does not return."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except BaseException as error:  # noqa: BLE001  carried to this thread
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


class Interrupted(BaseException):
    """The exception that a signal handler raises."""


def interruptions(call: Callable[[], None], handler: Callable[[], None]) -> Iterator[int]:
    """Call ``call`` again and again, each time in a new thread, and run ``handler`` at one point of each call.

    In the first call, the handler runs at the first point where a signal handler can run, in the second call at the
    second point, and so on. Yields after each call. Ends when a call has no further point.
    """

    def run(at: int, met: list[bool]) -> None:
        left = at

        def profile(frame: FrameType, event: str, argument: object) -> None:
            nonlocal left
            if event in ("call", "c_return") and left >= 0:
                left -= 1
                if left < 0:
                    handler()

        sys.setprofile(profile)
        try:
            call()
        except (Interrupted, StoreClosed):
            pass
        finally:
            sys.setprofile(None)
        met.append(left < 0)

    met: list[bool] = []
    for at in range(1000):
        in_a_thread(partial(run, at, met))
        if not met[-1]:
            return
        yield at
    raise AssertionError("no end")


def test_the_lock_lets_one_thread_in() -> None:
    lock, inside, done = FairLock(), Event(), Event()

    def second() -> None:
        inside.set()
        with lock:
            done.set()

    with lock:
        thread = Thread(target=second)
        thread.start()
        assert inside.wait(PATIENCE_S)
        assert not done.wait(0.05)
    assert done.wait(PATIENCE_S)
    thread.join()


def test_a_thread_that_waits_for_the_lock_has_it_before_one_that_takes_it_again() -> None:
    lock = FairLock()
    order: list[str] = []

    def wait() -> None:
        with lock:
            order.append("waiting")

    for _ in range(20):
        lock.__enter__()
        thread = Thread(target=wait)
        thread.start()
        wait_for(lambda: not in_line(lock))
        lock.__exit__(None, None, None)
        with lock:
            order.append("again")
        thread.join(PATIENCE_S)
    assert order == ["waiting", "again"] * 20


def in_line(lock: FairLock) -> bool:
    """Return whether no thread is next in line for the lock."""
    taken = lock._turn.acquire(blocking=False)
    if taken:
        lock._turn.release()
    return taken


def test_the_longest_hold_stays_and_sleep_is_no_cpu_time() -> None:
    guard = Guard()
    with guard:
        sleep(0.02)
    with guard:
        pass
    assert guard.longest_s >= 0.02
    assert 0 <= guard.longest_cpu_s < guard.longest_s


def test_error_inside_releases_the_lock_and_keeps_it_usable() -> None:
    lock, guard = FairLock(), Guard()
    with pytest.raises(ValueError, match="inside"), lock, guard:
        raise ValueError("inside")
    with lock, guard:
        pass


def test_no_python_code_runs_between_a_hold_and_the_release_of_its_lock() -> None:
    assert isinstance(FairLock().__exit__, BuiltinMethodType)


@pytest.mark.parametrize("module", [lease, live_archive, pump, store])
def test_every_hold_of_the_store_has_its_guard(module: ModuleType) -> None:
    tree = ast.parse(inspect.getsource(module))
    holds = [
        [ast.unparse(item.context_expr) for item in node.items]
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
    ]
    locked = [hold for hold in holds if hold[0].rpartition(".")[2] in ("lock", "_lock")]
    assert locked
    for lock, *guard in locked:
        assert guard == [lock.replace("lock", "guard")]


class Change:
    """Two numbers that change together while the lock is held."""

    def __init__(self) -> None:
        self.begin_again()

    def begin_again(self) -> None:
        self.lock, self.guard = FairLock(), Guard()
        self.first = self.second = 0

    def make(self) -> None:
        with self.lock, self.guard:
            self.first = _next(self.first)
            self.second = _next(self.second)

    def require_whole_or_ended(self) -> None:
        """Assert that the lock is free, and that its next holder sees equal numbers or gets StoreClosed."""
        assert self.lock._lock.acquire(blocking=False), "left locked"
        self.lock._lock.release()
        try:
            with self.lock, self.guard:
                assert self.first == self.second
        except StoreClosed:
            assert self.guard.broken


def _next(figure: int) -> int:
    return figure + 1


def test_raising_signal_handler_leaves_the_lock_free_and_no_change_half_visible() -> None:
    change = Change()

    def interrupt() -> None:
        raise Interrupted

    ended = []
    for _ in interruptions(change.make, interrupt):
        change.require_whole_or_ended()
        ended.append(change.guard.broken)
        change.begin_again()
    assert {True, False} == set(ended)


def test_signal_handler_taking_the_lock_does_not_deadlock_or_see_partial_changes() -> None:
    change = Change()
    seen = []

    def look() -> None:
        with change.lock, change.guard:
            seen.append((change.first, change.second))

    met = 0
    for _ in interruptions(change.make, look):
        met += 1
        change.require_whole_or_ended()
        change.begin_again()
    assert set(seen) == {(0, 0), (1, 1)}
    assert len(seen) < met, "no call was refused in the middle of the change"


def test_signal_handler_takes_the_lock_though_its_thread_is_next_in_line() -> None:
    assert get_ident() == main_thread().ident
    lock, started, held = FairLock(), Event(), Event()
    order: list[str] = []

    def handler(*_: object) -> None:
        started.set()
        with lock:
            order.append("handler")

    def hold() -> None:
        with lock:
            held.set()
            wait_for(lambda: not in_line(lock))
            signal.pthread_kill(main, signal.SIGUSR1)
            assert started.wait(PATIENCE_S)

    main = get_ident()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        thread = Thread(target=hold)
        thread.start()
        assert held.wait(PATIENCE_S)
        with lock:
            order.append("call")
        thread.join(PATIENCE_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert order == ["handler", "call"]


class TimeIsUp(Exception):
    """An exception of the application, which a signal handler raises."""


def raising(*_: object) -> None:
    raise TimeIsUp


class Raising:
    def __call__(self, *_: object) -> None:
        raise TimeIsUp

    def method(self, *_: object) -> None:
        raise TimeIsUp


@pytest.mark.parametrize("handler", [raising, Raising(), Raising().method, partial(partial(raising), 1)])
def test_an_exception_that_a_handler_raises_ends_the_store_and_the_same_from_elsewhere_does_not(
    handler: Callable[..., None],
) -> None:
    lock, guard = FairLock(), Guard()
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(TimeIsUp), lock, guard:
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    with pytest.raises(StoreClosed, match="interrupted"), lock, guard:
        pass
    other = Guard()
    with pytest.raises(TimeIsUp), other:
        raise TimeIsUp
    assert not other.broken


def test_a_signal_handler_that_wakes_threads_hangs_none_and_loses_no_event() -> None:
    wakeup = Wakeup()
    for _ in interruptions(wakeup.bump, wakeup.bump):
        assert not wakeup._waiting
    woken = 0
    for _ in interruptions(lambda: wakeup.wait(wakeup.count, None, 0.0), wakeup.bump):
        woken += 1
        assert not wakeup._waiting
    assert woken
