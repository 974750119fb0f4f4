"""Tests of how many loads are started at once: few, but enough to keep the link busy when it copies by layer group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from prefetch.planner import PIECE_PAGES
from prefetch.promotions import LoadWindow
from tierstore.gpu.copy_queue import Waves

MOST = 4 * PIECE_PAGES
HALF = MOST // 2
GROUPS = 16
TURN_S = 20.0


def test_next_half_window_starts_once_most_of_the_first_has_crossed() -> None:
    window = LoadWindow()
    assert window.room(0.0, 0, MOST, 1.0) == HALF
    window.started(PIECE_PAGES)
    assert window.room(0.0, PIECE_PAGES, MOST, 1.0) == HALF - PIECE_PAGES
    window.started(PIECE_PAGES)
    assert window.room(HALF / 2, HALF, MOST, 1.0) == 0
    assert window.room(HALF * 0.7, HALF, MOST, 1.0) == HALF


def test_half_window_started_ahead_counts_from_the_end_of_the_previous() -> None:
    window = LoadWindow()
    window.room(0.0, 0, MOST, 1.0)
    window.started(HALF)
    window.room(HALF * 0.7, HALF, MOST, 1.0)
    window.started(HALF)
    assert window.room(HALF * 1.5, HALF, MOST, 1.0) == 0
    assert window.room(HALF * 1.7, HALF, MOST, 1.0) == HALF


def test_pages_in_flight_never_exceed_the_window() -> None:
    window = LoadWindow()
    assert window.room(0.0, 0, MOST, 1.0) == HALF
    window.started(HALF)
    assert window.room(1000.0, MOST - 3, MOST, 1.0) == 3


def test_with_unknown_rate_or_small_limit_only_pages_in_flight_count() -> None:
    window = LoadWindow()
    window.room(0.0, 0, MOST, 0.0)
    window.started(HALF)
    assert window.room(0.0, HALF, MOST, 0.0) == HALF
    assert LoadWindow().room(0.0, 5, PIECE_PAGES, 1.0) == PIECE_PAGES - 5


def idle_s(room: Callable[[float, int], int], started: Callable[[int], None]) -> float:
    """Return for how many seconds a simulated link is idle while 32 windows of pages are loaded.

    The link takes 1 s per page, and copies one layer group of one piece at a time. Loads are started every
    ``TURN_S`` seconds.

    Args:
        room: Returns how many pages may be started, given the time and the number of pages in flight.
        started: Called with the number of pages of each piece that is started.
    """
    waves: Waves[int] = Waves(GROUPS)
    crossed: dict[int, list[float]] = defaultdict(list)
    left, arriving, now, free, idle = 32 * MOST // PIECE_PAGES, 0, 0.0, 0.0, 0.0
    while left or arriving:
        while free <= now and waves:
            (piece,), _ = waves.take(1)
            free += PIECE_PAGES / GROUPS
            crossed[piece].append(free)
        for piece in [x for x, ends in crossed.items() if len(ends) == GROUPS and ends[-1] <= now]:
            del crossed[piece]
            arriving -= PIECE_PAGES
        idle += max(0.0, now - free)
        free = max(now, free)
        while left and room(now, arriving) >= PIECE_PAGES:
            started(PIECE_PAGES)
            waves.add(left, 1)
            left, arriving = left - 1, arriving + PIECE_PAGES
        now += TURN_S
    return idle


def test_link_is_not_idle_between_two_half_windows() -> None:
    window = LoadWindow()
    assert idle_s(lambda now, arriving: window.room(now, arriving, MOST, 1.0), window.started) <= TURN_S


def test_a_window_refilled_only_when_all_pages_have_arrived_would_leave_the_link_idle() -> None:
    """Check that the simulation detects an idle link: without ``LoadWindow``, the link is idle for a long time."""
    assert idle_s(lambda _, arriving: MOST - arriving, lambda _: None) > 16 * TURN_S
