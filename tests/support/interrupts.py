"""Interrupts a waiting main thread with a signal whose handler raises an exception."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread, get_ident
from types import CodeType, FrameType
from typing import NoReturn

import pytest


@contextmanager
def interrupted_in(function: Callable[..., object]) -> Iterator[None]:
    """Raise KeyboardInterrupt when this thread runs ``function``, and assert that it ends the ``with`` block."""
    waiting, over = get_ident(), Event()

    def send() -> None:
        while not over.is_set() and function.__code__ not in _stack(waiting):
            over.wait(0.001)
        if not over.is_set():
            signal.pthread_kill(waiting, signal.SIGUSR1)

    def handler(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    sender = Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)


def _stack(thread: int) -> list[CodeType]:
    """Return the code of the functions that a thread is executing, innermost first."""
    found, frame = [], sys._current_frames().get(thread)
    while frame is not None:
        found.append(frame.f_code)
        frame = frame.f_back
    return found
