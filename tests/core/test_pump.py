"""Waiting between threads: a wake-up before the wait is not lost, and the lock excludes and knows its longest hold."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event, Thread
from time import monotonic, sleep
from types import FrameType

import pytest

from tierstore import pump
from tierstore.errors import StoreClosed
from tierstore.pump import _LOOK_S, TimedLock, Wakeup

PATIENCE_S = 60.0


def test_what_happened_between_the_look_and_the_wait_is_not_lost() -> None:
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


def test_the_lock_lets_one_thread_in() -> None:
    lock, inside, done = TimedLock(), Event(), Event()

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


def test_the_longest_hold_stays_and_sleep_is_no_cpu_time() -> None:
    lock = TimedLock()
    with lock:
        sleep(0.02)
    with lock:
        pass
    assert lock.longest_s >= 0.02
    assert 0 <= lock.longest_cpu_s < lock.longest_s


def test_an_error_inside_gives_the_lock_back() -> None:
    lock = TimedLock()
    with pytest.raises(ValueError, match="inside"), lock:
        raise ValueError("inside")
    with lock:
        pass


def test_who_takes_the_lock_again_and_again_lets_in_who_waits() -> None:
    lock, done = TimedLock(), Event()
    holds = 0

    def hog() -> None:
        nonlocal holds
        while not done.is_set():
            with lock:
                holds += 1
                sum(range(10_000))

    thread = Thread(target=hog)
    thread.start()
    missed = []
    for _ in range(50):
        before = holds
        with lock:
            missed.append(holds - before)
        sleep(0.001)
    done.set()
    thread.join(PATIENCE_S)
    # Half of the turns: the system may stop this thread for long before it waits, and the other goes on meanwhile.
    assert sorted(missed)[len(missed) // 2] < 20


def leave_locked(lock: TimedLock) -> None:
    """What an exception does that a signal's handler raises just before the lock is let go."""
    lock.__enter__()


def test_a_lock_that_was_left_locked_is_waited_for_by_nobody() -> None:
    lock = TimedLock()
    leave_locked(lock)
    with pytest.raises(StoreClosed, match="interrupted"), lock:
        pass


def test_others_see_that_a_lock_was_left_locked_though_who_left_it_does_not_come_back() -> None:
    lock, told = TimedLock(), Event()

    def second() -> None:
        with pytest.raises(StoreClosed, match="interrupted"), lock:
            pass
        told.set()

    leave_locked(lock)
    thread = Thread(target=second)
    thread.start()
    assert told.wait(PATIENCE_S)
    thread.join(PATIENCE_S)


def test_a_lock_that_is_held_for_long_is_waited_for() -> None:
    lock, done = TimedLock(), Event()

    def second() -> None:
        with lock:
            done.set()

    with lock:
        thread = Thread(target=second)
        thread.start()
        assert not done.wait(1.5 * _LOOK_S)
    assert done.wait(PATIENCE_S)
    thread.join(PATIENCE_S)


def test_a_lock_that_is_let_go_while_its_holders_frames_are_walked_was_not_left_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock, inside, leave = TimedLock(), Event(), Event()

    def first() -> None:
        with lock:
            inside.set()
            assert leave.wait(PATIENCE_S)

    def walk(holder: int | None, block: FrameType | None) -> bool:
        leave.set()
        thread.join(PATIENCE_S)
        left = has_left(holder, block)
        assert left  # as far as its frames tell
        return left

    has_left = pump._has_left
    monkeypatch.setattr(pump, "_has_left", walk)
    thread = Thread(target=first)
    thread.start()
    assert inside.wait(PATIENCE_S)
    with lock:
        pass
    assert leave.is_set()
    assert not lock.broken
