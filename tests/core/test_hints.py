"""Tests of the hint table: revisions, eviction order, end of retention, and the bounded queue for a prefetcher."""

from __future__ import annotations

import math
from typing import Any, Literal

import pytest

from tierstore.directory import hints
from tierstore.directory.hints import HintTable
from tierstore.directory.residency import Residency, TierTable
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.policy import make_policy
from tierstore.types import Hint, HintResult, PageKey, Tier

A, B, C = (PageKey(name) for name in (b"a", b"b", b"c"))
Need = Literal["will_need", "wont_need", "retain"]


@pytest.fixture
def residency() -> Residency:
    """Return a residency whose only tier contains A, B and C. A is evicted first."""
    residency = Residency({Tier.HBM: TierTable(make_policy("lru"), num_slots=3)})
    for key in (A, B, C):
        residency.adopt(key, Tier.HBM, residency.take(Tier.HBM), None)
    return residency


@pytest.fixture
def table(residency: Residency) -> HintTable:
    return HintTable(residency)


def hint(
    need: Need,
    *keys: PageKey,
    revision: int = 1,
    who: str = "r",
    ttl_s: float | None = None,
    priority: int = 0,
) -> Hint:
    return Hint(who, revision, keys, need, ttl_s=ttl_s, priority=priority)


def order(residency: Residency) -> list[PageKey]:
    return list(residency.tables[Tier.HBM].droppable)


def test_unwanted_pages_are_evicted_first_and_retained_pages_last(
    residency: Residency, table: HintTable
) -> None:
    assert table.apply(hint("retain", A), 0.0) is HintResult.APPLIED
    assert table.apply(hint("wont_need", C, who="other"), 0.0) is HintResult.APPLIED
    assert order(residency) == [C, B, A]


def test_the_tail_of_unwanted_pages_is_evicted_before_the_head(
    residency: Residency, table: HintTable
) -> None:
    table.apply(hint("wont_need", A, B, C), 0.0)
    assert order(residency) == [C, B, A]


def test_wont_need_of_one_request_does_not_override_will_need_of_another(
    residency: Residency, table: HintTable
) -> None:
    table.take()
    table.apply(hint("will_need", B, C, who="a", ttl_s=5.0), 0.0)
    table.apply(hint("will_need", C, who="b", ttl_s=9.0), 0.0)
    residency.queues.keep(C, Tier.HBM, 0)  # as the store does for a prefetcher
    table.apply(hint("wont_need", B, C), 0.0)
    assert order(residency) == [A, B, C]
    table.expire(5.0)
    table.apply(hint("wont_need", B, C, revision=2), 5.0)
    assert order(residency) == [B, A, C]
    table.apply(hint("wont_need", C, revision=2, who="b"), 6.0)
    assert order(residency) == [B, C, A]


def test_ended_hints_are_not_counted(table: HintTable) -> None:
    table.take()
    table.apply(hint("will_need", A, B, A, who="a"), 0.0)
    table.apply(hint("will_need", B, who="b"), 0.0)
    table.apply(hint("will_need", B, C, revision=2, who="b"), 0.0)
    table.apply(hint("retain", A, B, A), 0.0)
    assert (table._expecting, table._holders) == ({A: 2, B: 2, C: 1}, {A: 2, B: 1})
    table.apply(hint("retain", revision=2, who="a"), 0.0)
    table.apply(hint("retain", revision=2), 0.0)
    assert (table._expecting, table._holders) == ({B: 1, C: 1}, {})
    table.detach()
    assert not table._expecting


def test_retained_pages_with_lower_priority_are_evicted_first(residency: Residency, table: HintTable) -> None:
    table.apply(hint("retain", A, who="a", priority=2), 0.0)
    table.apply(hint("retain", B, who="b", priority=1), 0.0)
    table.apply(hint("retain", C, who="c", priority=3), 0.0)
    assert order(residency) == [B, A, C]


def test_a_revision_that_is_not_newer_changes_nothing(residency: Residency, table: HintTable) -> None:
    table.apply(hint("retain", A, revision=5), 0.0)
    for revision in (5, 4):
        assert table.apply(hint("wont_need", B, revision=revision), 0.0) is HintResult.DUPLICATE
    assert order(residency) == [B, C, A]


def test_a_retention_ends_in_time_or_with_the_next_revision(residency: Residency, table: HintTable) -> None:
    table.apply(hint("retain", A, ttl_s=5.0), 10.0)
    assert table.next_expiry == 15.0
    table.expire(14.9)
    assert order(residency) == [B, C, A]
    table.apply(hint("retain", B, who="other"), 14.9)
    table.expire(15.0)
    assert order(residency) == [C, A, B]
    assert table.next_expiry is None
    table.apply(hint("retain", revision=2, who="other"), 16.0)
    assert order(residency) == [C, A, B]
    table.apply(hint("retain", C, who="third"), 17.0)
    assert order(residency) == [A, B, C]


def test_the_end_of_an_older_revision_does_not_end_the_newer_one(
    residency: Residency, table: HintTable
) -> None:
    table.apply(hint("retain", A, ttl_s=5.0), 0.0)
    table.apply(hint("retain", A, revision=2), 1.0)
    table.expire(100.0)
    assert order(residency) == [B, C, A]


def test_will_need_waits_for_a_prefetcher_and_is_rejected_without_one(table: HintTable) -> None:
    assert table.apply(hint("will_need", A), 0.0) is HintResult.REJECTED
    assert table.take() == []
    asked = hint("will_need", A)
    assert table.apply(asked, 0.0) is HintResult.DEFERRED
    assert table.apply(asked, 0.0) is HintResult.DUPLICATE
    assert table.take() == [asked]
    assert table.take() == []


def test_newer_revision_replaces_the_waiting_hint_and_one_without_keys_cancels_it(table: HintTable) -> None:
    table.take()
    table.apply(hint("will_need", A), 0.0)
    newer = hint("will_need", B, revision=2)
    table.apply(newer, 0.0)
    assert table.take() == [newer]
    table.apply(hint("will_need", C, revision=3), 0.0)
    cancel = hint("will_need", revision=4)
    assert table.apply(cancel, 0.0) is HintResult.APPLIED
    assert table.take() == [cancel]


def test_a_full_queue_rejects_new_requests_and_takes_newer_revisions(
    table: HintTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "MAX_QUEUED", 2)
    table.take()
    for who in "ab":
        assert table.apply(hint("will_need", A, who=who), 0.0) is HintResult.DEFERRED
    assert table.apply(hint("will_need", A, who="c"), 0.0) is HintResult.REJECTED
    assert table.apply(hint("will_need", B, who="a", revision=2), 0.0) is HintResult.DEFERRED
    assert len(table.take()) == 2
    assert table.apply(hint("will_need", A, who="c"), 0.0) is HintResult.DEFERRED


def test_the_longest_unchanged_request_is_forgotten_with_its_retention(
    residency: Residency, table: HintTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "MAX_REQUESTS", 2)
    table.apply(hint("retain", A, who="a"), 0.0)
    table.apply(hint("retain", B, who="b"), 0.0)
    table.apply(hint("retain", C, who="c"), 0.0)
    assert order(residency) == [A, B, C]
    assert table.apply(hint("wont_need", C, who="a"), 0.0) is HintResult.APPLIED


def test_hints_never_pin(residency: Residency, table: HintTable) -> None:
    table.apply(hint("retain", A, B, C), 0.0)
    assert all(copy.pins == 0 for copy in residency.tables[Tier.HBM].copies.values())
    assert residency.take(Tier.HBM) >= 0


def test_a_page_that_two_requests_retain_stays_until_both_have_ended(
    residency: Residency, table: HintTable
) -> None:
    table.apply(hint("retain", A, B, who="one", ttl_s=1.0), 0.0)
    table.apply(hint("retain", A, who="two", ttl_s=5.0), 0.0)
    table.expire(2.0)
    residency.touch([C])
    assert order(residency) == [B, C, A]
    table.expire(6.0)
    residency.touch([B, C])
    assert order(residency) == [A, C, B]


def test_a_request_that_renews_its_retention_keeps_one_end(table: HintTable) -> None:
    for revision in range(5000):
        table.apply(hint("retain", A, revision=revision, ttl_s=3600.0), float(revision))
    assert len(table._expiries) < 200
    assert table.next_expiry is not None


def test_hint_about_many_pages_is_applied_completely_in_batches() -> None:
    keys = [PageKey(i.to_bytes(4, "big")) for i in range(3 * BATCH_PAGES)]
    many = Residency({Tier.HBM: TierTable(make_policy("lru"), num_slots=len(keys) + 1)})
    for key in [*keys, A]:
        many.adopt(key, Tier.HBM, many.take(Tier.HBM), None)
    table = HintTable(many)
    table.apply(hint("retain", *keys), 0.0)
    assert table.pending
    table.advance(BATCH_PAGES)
    table.advance(BATCH_PAGES)
    assert not table.pending
    assert order(many) == [A, *reversed(keys)]


def test_unknown_need_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Hint\.need must be 'will_need', .*, got 'retian'"):
        Hint("r", 1, (A,), "retian")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"priority": "high"}, r"priority must be an integer, got 'high'"),
        ({"priority": 1.5}, r"priority must be an integer, got 1\.5"),
        ({"priority": True}, r"priority must be an integer, got True"),
        ({"ttl_s": math.nan}, r"ttl_s must be a number of seconds or None, got nan"),
        ({"ttl_s": "1"}, r"ttl_s must be a number of seconds or None, got '1'"),
        ({"ttl_s": 10**400}, r"ttl_s must be a number of seconds or None, got 10+"),
        ({"deadline_s": -math.inf}, r"deadline_s must be a number of seconds or None, got -inf"),
        ({"deadline_s": 10**400}, r"deadline_s must be a number of seconds or None, got 10+"),
    ],
)
def test_hint_with_an_unusable_priority_or_time_is_refused(more: dict[str, Any], why: str) -> None:
    """If such a hint were accepted, every call that advances or closes the store would fail."""
    with pytest.raises(ValueError, match=rf"Hint\.{why}"):
        Hint("r", 1, (A,), **more)


def test_a_hint_may_last_forever_with_the_highest_priority() -> None:
    assert Hint("r", 1, (A,), "retain", ttl_s=math.inf, priority=-(10**30), deadline_s=-5.0).ttl_s == math.inf
