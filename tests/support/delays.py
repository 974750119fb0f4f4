"""Finds tests that race: ``pytest -p tests.support.delays --delays 7 tests/store`` holds threads up at random calls.

A test under it has to pass like any other, only later: what it says of several threads must not follow from which of
them the machine runs first. The number is of the random choices, which are each test's own: whom it holds up, how
often and for how long. ``make test ARGS="-p tests.support.delays --delays 7"`` is for an hour with nothing else to do.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from types import FrameType
from typing import Any, NamedTuple

import pytest

CHECKOUT = Path(__file__).parents[2]
ROOMS = tuple(f"{CHECKOUT / name}/" for name in ("tierstore", "prefetch", "tests"))
MOST_S = 0.8
"""All delays of a test together."""

_FEWER = 10
"""A thread that a test starts makes fewer calls than the test: each is so much more likely to be held up."""


class Manner(NamedTuple):
    """Which of the calls in our files are held up, and for how long."""

    share: float
    seconds: Sequence[float]


MANNERS = (
    Manner(0.3, (0.0001, 0.001, 0.005)),
    Manner(0.05, (0.002, 0.01, 0.04)),
    Manner(0.01, (0.03, 0.15)),
    Manner(0.002, (0.3,)),
)


class Delays:
    """``hold_up`` is a profile function. Without a lock: what several threads draw at once need not be told apart."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self.left_s = MOST_S
        self._manner = self._chance.choice(MANNERS)
        self._own = threading.get_ident()
        self.who = self._chance.choice(["others", "own", "all"])
        """Threads that a test starts, the one it runs in, or both."""

    def hold_up(self, frame: FrameType, event: str, arg: Any) -> None:
        """At a call, a return, and a call into C: there threads take turns."""
        ours = event in ("call", "return", "c_call") and frame.f_code.co_filename.startswith(ROOMS)
        others = _FEWER if threading.get_ident() != self._own else 1
        if ours and self.left_s > 0 and self._chance.random() < others * self._manner.share:
            seconds = self._chance.choice(self._manner.seconds)
            self.left_s -= seconds
            sleep(seconds)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--delays", default="1", help="number of the random choices of tests.support.delays")


_DELAYS = pytest.StashKey[Delays]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Threads that a fixture starts live on in its test."""
    item.stash[_DELAYS] = Delays(f"{item.nodeid} {item.config.getoption('--delays')}")
    with _held_up(item.stash[_DELAYS]):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """The test itself, with all its time again."""
    item.stash[_DELAYS].left_s = MOST_S
    with _held_up(item.stash[_DELAYS]):
        return (yield)


@contextmanager
def _held_up(delays: Delays) -> Iterator[None]:
    if delays.who != "own":
        threading.setprofile(delays.hold_up)
    if delays.who != "others":
        sys.setprofile(delays.hold_up)
    try:
        yield
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
