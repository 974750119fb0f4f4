"""Tests of the list of expected requests, which keeps the newest hint of each of a limited number of requests."""

from __future__ import annotations

from math import inf
from typing import Literal

import pytest

from prefetch.hints import ExpectedRequests
from tests.support.pages import chain
from tierstore.types import Hint, PageKey


def hint(
    name: str,
    revision: int = 1,
    keys: list[PageKey] | None = None,
    need: Literal["will_need", "wont_need", "retain"] = "will_need",
    deadline_s: float | None = None,
    ttl_s: float | None = None,
    priority: int = 0,
) -> Hint:
    return Hint(
        name,
        revision,
        tuple(chain(2, name) if keys is None else keys),
        need,
        deadline_s=deadline_s,
        ttl_s=ttl_s,
        priority=priority,
    )


def names(intake: ExpectedRequests) -> list[str]:
    return [each.hint.request_id for each in intake.in_order()]


def test_requests_are_ordered_by_deadline_then_priority_then_arrival() -> None:
    intake = ExpectedRequests()
    intake.take([hint("none"), hint("nine", deadline_s=9.0), hint("five", deadline_s=5.0)], 100.0)
    intake.take([hint("urgent", deadline_s=9.0, priority=1), hint("last")], 100.0)
    assert names(intake) == ["five", "urgent", "nine", "none", "last"]
    assert [each.deadline for each in intake.in_order()] == [105.0, 109.0, 109.0, inf, inf]


def test_newer_revision_replaces_the_hint_and_an_older_one_is_ignored() -> None:
    intake = ExpectedRequests()
    intake.take([hint("a", 2, chain(1, "x")), hint("a", 1), hint("a", 2)], 0.0)
    assert [each.hint.keys for each in intake.in_order()] == [tuple(chain(1, "x"))]
    intake.take([hint("a", 3, chain(1, "y"))], 0.0)
    assert [each.hint.keys for each in intake.in_order()] == [tuple(chain(1, "y"))]


@pytest.mark.parametrize(
    "last", [hint("a", 2, []), hint("a", 2, need="retain"), hint("a", 2, need="wont_need")]
)
def test_request_that_needs_nothing_more_is_no_longer_expected(last: Hint) -> None:
    intake = ExpectedRequests()
    intake.take([hint("a"), last], 0.0)
    assert len(intake) == 0


def test_hint_expires_after_its_ttl() -> None:
    intake = ExpectedRequests()
    intake.take([hint("short", ttl_s=5.0), hint("due", deadline_s=10.0), hint("open")], 100.0)
    intake.expire(104.9)
    assert len(intake) == 3
    for now, left in ((105.0, ["due", "open"]), (170.0, ["open"]), (700.0, [])):
        intake.expire(now)
        assert names(intake) == left


def test_superseded_hint_is_dropped_but_not_a_newer_one() -> None:
    intake = ExpectedRequests()
    intake.take([hint("a"), hint("b", 2)], 0.0)
    intake.drop(hint("a"))
    intake.drop(hint("b"))
    assert names(intake) == ["b"]


def test_beyond_the_limit_the_request_with_the_latest_deadline_is_rejected() -> None:
    intake = ExpectedRequests(most=2)
    intake.take(
        [hint("far", deadline_s=90.0), hint("near", deadline_s=1.0), hint("mid", deadline_s=5.0)], 0.0
    )
    assert names(intake) == ["near", "mid"]
    intake.take([hint("never")], 0.0)
    assert names(intake) == ["near", "mid"]
    assert intake.turned_away == 2
