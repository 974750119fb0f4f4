"""Pytest plugin that finds tests with race conditions: ``pytest -p tests.support.delays --delays 7 tests/store``.

It delays threads at random calls. Every test must still pass, because its result must not depend on which thread the
machine happens to run first. ``--delays`` is the seed. For each test, the plugin chooses at random which threads are
delayed, how often, and for how long. ``make test ARGS="-p tests.support.delays --delays 7"`` takes about an hour.
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
"""Maximum total of all delays of a test, in seconds."""

_FEWER = 10
"""Factor by which the probability of a delay is higher in threads that a test starts than in the test's own thread.

The reason is that the threads that a test starts make fewer calls.
"""


class Manner(NamedTuple):
    """The fraction of delayed calls among those in this checkout's files, and the delays to choose from."""

    share: float
    seconds: Sequence[float]


MANNERS = (
    Manner(0.3, (0.0001, 0.001, 0.005)),
    Manner(0.05, (0.002, 0.01, 0.04)),
    Manner(0.01, (0.03, 0.15)),
    Manner(0.002, (0.3,)),
)


class Delays:
    """The delays of one test. ``hold_up`` is a profile function.

    There is no lock, so two threads may draw the same random number.
    """

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self.left_s = MOST_S
        self._manner = self._chance.choice(MANNERS)
        self._own = threading.get_ident()
        self.who = self._chance.choice(["others", "own", "all"])
        """Which threads are delayed: those that the test starts, the one that it runs in, or both."""

    def hold_up(self, frame: FrameType, event: str, arg: Any) -> None:
        """Sleep with some probability at a call, a return or a call into C, where Python may switch threads anyway."""
        ours = event in ("call", "return", "c_call") and frame.f_code.co_filename.startswith(ROOMS)
        others = _FEWER if threading.get_ident() != self._own else 1
        if ours and self.left_s > 0 and self._chance.random() < others * self._manner.share:
            seconds = self._chance.choice(self._manner.seconds)
            self.left_s -= seconds
            sleep(seconds)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--delays", default="1", help="seed of the random delays of tests.support.delays")


_DELAYS = pytest.StashKey[Delays]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    """Delay threads during setup too, because threads that a fixture starts keep running during the test."""
    item.stash[_DELAYS] = Delays(f"{item.nodeid} {item.config.getoption('--delays')}")
    with _held_up(item.stash[_DELAYS]):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Delay threads during the test. Delays during setup do not count towards the limit on the test's delays."""
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
