"""What admission and the learning orders promise notices planted bugs: each breaks one of the tests named beside it."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.core import test_admission, test_learning_orders
from tests.support.planting import Bug, install
from tierstore.policy import admission, history, orders

pytestmark = pytest.mark.deep

Test = Callable[[], None]

ADMISSION: list[tuple[Bug, Test]] = [
    (
        Bug("a write is not counted", "self._credit -= 1", "self._credit -= 0"),
        test_admission.test_what_is_written_without_being_asked_about_counts,
    ),
    (
        Bug("the worst kinds come first", "reverse=True", "reverse=False"),
        test_admission.test_cost_learns_which_kind_of_page_comes_back,
    ),
    (
        Bug("a use in memory pays", "+= below", "+= 1"),
        test_admission.test_a_use_in_memory_does_not_speak_for_the_disk,
    ),
    (
        Bug("half a run is written", "record.lot < ", "self._put % 100 / 100 < "),
        test_admission.test_of_a_kind_that_is_written_in_part_a_run_is_written_whole_or_not,
    ),
    (
        Bug("the day's budget is not asked", "max(0.0, 1 - gone)", "1"),
        test_admission.test_cost_asks_more_of_a_page_as_the_day_s_budget_goes,
    ),
    (
        Bug("all runs are as long", "min(record.span.bit_length(), _SPANS - 1)", "0"),
        test_admission.test_short_runs_and_long_ones_are_of_different_kinds_from_their_first_page_on,
    ),
    (
        Bug("the share is not kept", "else left / wished", "else 1.0"),
        test_admission.test_cost_writes_at_most_half_of_what_is_put_in_the_long_run_whatever_comes,
    ),
    (
        Bug("what never pays is written too", "worth[kind] <= _LEAST * mean", "False"),
        test_admission.test_a_use_in_memory_does_not_speak_for_the_disk,
    ),
]

HISTORY: list[tuple[Bug, Test]] = [
    (
        Bug("a shared beginning is a branch", "before.followers < _SHARED", "True"),
        test_admission.test_a_history_knows_how_runs_began_and_how_long_they_are,
    ),
    (
        Bug("a run is one page long", "self.place = before.place + 1", "self.place = 1"),
        test_admission.test_a_history_knows_how_runs_began_and_how_long_they_are,
    ),
    (
        Bug("each page has a lot of its own", "before.branch, before.lot", "before.branch, self.lot"),
        test_admission.test_a_history_knows_how_runs_began_and_how_long_they_are,
    ),
    (
        Bug("steps are not counted", "min(before.steps + 1, _MOST)", "1"),
        test_admission.test_a_history_knows_how_runs_began_and_how_long_they_are,
    ),
    (
        Bug("what was used is forgotten first", "self._records.move_to_end(record.key)", "pass"),
        test_admission.test_a_history_forgets_the_page_that_was_asked_for_longest_ago,
    ),
]

SESSION: list[tuple[Bug, Test]] = [
    (
        Bug("what waits still is not counted", "ended[_bucket(now - epoch * self._epoch)] += number", "pass"),
        test_learning_orders.test_a_curve_is_the_share_that_came_back_by_each_age,
    ),
    (
        Bug("runs of any length are alike", "0 if record.span < _SHORT else", "0 if True else"),
        test_learning_orders.test_new_pages_are_of_one_kind_if_their_runs_began_alike_and_are_about_as_long,
    ),
    (
        Bug("a place costs nothing", "point[1] - price * point[2]", "point[1]"),
        test_learning_orders.test_kinds_that_come_back_are_kept_until_they_do_and_others_not_at_all,
    ),
    (
        Bug(
            "what is kept longer leaves sooner",
            "return self._history.now + (",
            "return self._history.now - (",
        ),
        test_learning_orders.test_the_page_whose_time_is_up_first_leaves_first,
    ),
]

ADAPTIVE: list[tuple[Bug, Test]] = [
    (
        Bug("session is followed always", "self._ghost.hits > self._lru.hits", "True"),
        test_learning_orders.test_adaptive_is_session_while_that_hits_more_and_lru_when_it_does_not,
    ),
    (
        Bug("LRU is followed always", "self._ghost.hits > self._lru.hits", "False"),
        test_learning_orders.test_adaptive_is_session_while_that_hits_more_and_lru_when_it_does_not,
    ),
    (
        Bug(
            "a ghost counts what cannot be reached",
            "self.hits += self._whole",
            "self.hits += page in self._values",
        ),
        test_learning_orders.test_a_ghost_counts_what_a_request_finds_up_to_the_first_page_that_is_missing,
    ),
    (
        Bug("the ghosts let heads go first", "_DEEPEST - min(record.depth, _DEEPEST)", "record.depth"),
        test_learning_orders.test_of_one_request_the_ghosts_let_the_last_pages_go_first,
    ),
    (
        Bug(
            "a ghost keeps what came first",
            "heappush(self._heap, (value, page))",
            "self._heap.append((value, page))",
        ),
        test_learning_orders.test_a_ghost_holds_the_pages_of_highest_value,
    ),
]

BUGS = [
    *((admission, bug, test) for bug, test in ADMISSION),
    *((history, bug, test) for bug, test in HISTORY),
    *((orders, bug, test) for bug, test in SESSION),
    *((orders, bug, test) for bug, test in ADAPTIVE),
]


@pytest.mark.parametrize(("module", "bug", "test"), BUGS, ids=[bug.name for _, bug, _ in BUGS])
def test_a_planted_bug_is_noticed(
    module: ModuleType, bug: Bug, test: Test, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, module, bug)
    with pytest.raises((AssertionError, ExceptionGroup)):
        test()
