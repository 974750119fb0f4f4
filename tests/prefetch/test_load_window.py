"""How many loads are started at once; a link that carries them layer group by layer group does not stand still."""

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


def test_a_half_is_started_and_the_next_once_most_of_it_has_crossed() -> None:
    window = LoadWindow()
    assert window.room(0.0, 0, MOST, 1.0) == HALF
    window.started(PIECE_PAGES)
    assert window.room(0.0, PIECE_PAGES, MOST, 1.0) == HALF - PIECE_PAGES
    window.started(PIECE_PAGES)
    assert window.room(HALF / 2, HALF, MOST, 1.0) == 0
    assert window.room(HALF * 0.7, HALF, MOST, 1.0) == HALF


def test_a_half_that_was_started_ahead_counts_from_the_end_of_the_one_before() -> None:
    window = LoadWindow()
    window.room(0.0, 0, MOST, 1.0)
    window.started(HALF)
    window.room(HALF * 0.7, HALF, MOST, 1.0)
    window.started(HALF)
    assert window.room(HALF * 1.5, HALF, MOST, 1.0) == 0
    assert window.room(HALF * 1.7, HALF, MOST, 1.0) == HALF


def test_there_is_never_more_under_way_than_may_be() -> None:
    window = LoadWindow()
    assert window.room(0.0, 0, MOST, 1.0) == HALF
    window.started(HALF)
    assert window.room(1000.0, MOST - 3, MOST, 1.0) == 3


def test_where_the_rate_is_not_known_or_little_may_be_under_way_only_that_counts() -> None:
    window = LoadWindow()
    window.room(0.0, 0, MOST, 0.0)
    window.started(HALF)
    assert window.room(0.0, HALF, MOST, 0.0) == HALF
    assert LoadWindow().room(0.0, 5, PIECE_PAGES, 1.0) == PIECE_PAGES - 5


def idle_s(room: Callable[[float, int], int], started: Callable[[int], None]) -> float:
    """How long a link stood still that carried 32 windows: a page a second, a group of a piece at a time, and somebody
    who looks every few seconds."""
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


def test_the_link_does_not_stand_still_between_two_waves() -> None:
    window = LoadWindow()
    assert idle_s(lambda now, arriving: window.room(now, arriving, MOST, 1.0), window.started) <= TURN_S


def test_filled_up_only_when_pages_have_ended_it_would_stand_still_after_each() -> None:
    """So it is the window that the test before holds, and not the way the link is played."""
    assert idle_s(lambda _, arriving: MOST - arriving, lambda _: None) > 16 * TURN_S
