"""Tests that the tests of admission and of the learning policies detect planted bugs. Each bug must make the
test that is listed next to it fail.
"""

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
        test_admission.test_pages_written_without_asking_admission_count,
    ),
    (
        Bug("the kinds that pay off least come first", "reverse=True", "reverse=False"),
        test_admission.test_cost_learns_which_kind_of_page_is_requested_again,
    ),
    (
        Bug("a use in memory counts as paying off", "+= below", "+= 1"),
        test_admission.test_hits_in_memory_do_not_count_for_the_disk,
    ),
    (
        Bug("runs are written in part", "record.lot < ", "self._put % 100 / 100 < "),
        test_admission.test_runs_of_a_partly_written_kind_are_written_whole_or_skipped,
    ),
    (
        Bug("the daily budget is ignored", "max(0.0, 1 - gone)", "1"),
        test_admission.test_cost_admits_fewer_pages_as_the_daily_budget_is_used,
    ),
    (
        Bug("the length of runs is ignored", "min(record.span.bit_length(), _SPANS - 1)", "0"),
        test_admission.test_short_runs_and_long_ones_are_of_different_kinds_from_their_first_page_on,
    ),
    (
        Bug("the limit on the share of pages is ignored", "else left / wished", "else 1.0"),
        test_admission.test_cost_writes_at_most_half_of_all_puts_in_the_long_run,
    ),
    (
        Bug("kinds that never pay off are written", "worth[kind] <= _LEAST * mean", "False"),
        test_admission.test_hits_in_memory_do_not_count_for_the_disk,
    ),
]

HISTORY: list[tuple[Bug, Test]] = [
    (
        Bug("a shared beginning counts as a branch", "before.followers < _SHARED", "True"),
        test_admission.test_history_records_how_runs_began_and_their_length,
    ),
    (
        Bug("a run is one page long", "self.place = before.place + 1", "self.place = 1"),
        test_admission.test_history_records_how_runs_began_and_their_length,
    ),
    (
        Bug("pages of one run have different lots", "before.branch, before.lot", "before.branch, self.lot"),
        test_admission.test_history_records_how_runs_began_and_their_length,
    ),
    (
        Bug("steps are not counted", "min(before.steps + 1, _MOST)", "1"),
        test_admission.test_history_records_how_runs_began_and_their_length,
    ),
    (
        Bug("recently used pages are forgotten first", "self._records.move_to_end(record.key)", "pass"),
        test_admission.test_history_forgets_the_least_recently_requested_page,
    ),
]

SESSION: list[tuple[Bug, Test]] = [
    (
        Bug(
            "pages without a further request are not counted",
            "ended[_bucket(now - epoch * self._epoch)] += number",
            "pass",
        ),
        test_learning_orders.test_curve_is_the_share_of_pages_that_returned_by_each_age,
    ),
    (
        Bug("new pages of all run lengths are one kind", "0 if record.span < _SHORT else", "0 if True else"),
        test_learning_orders.test_new_pages_are_of_one_kind_if_their_runs_are_of_similar_origin_and_length,
    ),
    (
        Bug("slots cost nothing", "point[1] - price * point[2]", "point[1]"),
        test_learning_orders.test_only_pages_of_kinds_requested_again_are_kept,
    ),
    (
        Bug(
            "pages kept longer are evicted sooner",
            "return self._history.now + (",
            "return self._history.now - (",
        ),
        test_learning_orders.test_page_with_the_earliest_expected_end_is_evicted_first,
    ),
]

ADAPTIVE: list[tuple[Bug, Test]] = [
    (
        Bug("session is always followed", "self._ghost.hits > self._lru.hits", "True"),
        test_learning_orders.test_adaptive_follows_session_while_it_hits_more_and_lru_otherwise,
    ),
    (
        Bug("LRU is always followed", "self._ghost.hits > self._lru.hits", "False"),
        test_learning_orders.test_adaptive_follows_session_while_it_hits_more_and_lru_otherwise,
    ),
    (
        Bug(
            "a ghost cache counts hits of unreachable pages",
            "self.hits += self._whole",
            "self.hits += page in self._values",
        ),
        test_learning_orders.test_ghost_cache_counts_hits_up_to_the_first_missing_page,
    ),
    (
        Bug(
            "ghost caches evict the beginnings of prompts first",
            "_DEEPEST - min(record.depth, _DEEPEST)",
            "record.depth",
        ),
        test_learning_orders.test_ghost_caches_evict_the_last_pages_of_a_request_first,
    ),
    (
        Bug(
            "a ghost cache does not evict in order of value",
            "heappush(self._heap, (value, page))",
            "self._heap.append((value, page))",
        ),
        test_learning_orders.test_ghost_cache_holds_the_pages_of_highest_value,
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
