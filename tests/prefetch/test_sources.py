"""Tests of the sources of hints: a queue of requests, a list of documents, and sessions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from prefetch import Sessions, Waiting, ahead
from prefetch.prefetcher import PrefetchLoop
from prefetch.sources import OVERDUE_S, Pauses
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, read, tiers, write
from tierstore.config import PrefetchConfig
from tierstore.store import TierStore
from tierstore.types import Hint, PageKey, Tier


class Clock:
    """A clock that stands still unless the test advances it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(hbm=8, host=8, nvme=tmp_path), SPEC)
    bench.store.take_hints()
    yield bench
    bench.store.check()
    bench.close()


@pytest.fixture
def store(bench: Bench) -> TierStore:
    return bench.store


def told(store: TierStore) -> dict[str, float | None]:
    """Take the hints. Return the deadline of each in seconds, by request id, or None for a hint that was withdrawn."""
    return {hint.request_id: hint.deadline_s if hint.keys else None for hint in store.take_hints()}


# -- a queue ------------------------------------------------------------------------------------------------------


def test_queued_requests_are_expected_one_after_another(store: TierStore, clock: Clock) -> None:
    queue = Waiting(store, pace_s=2.0, clock=clock)
    for name in "abc":
        queue.add(name, chain(1, name))
    assert told(store) == {"queue a": 0.0, "queue b": 2.0, "queue c": 4.0}


def test_started_request_is_no_longer_expected_and_the_others_move_up(store: TierStore, clock: Clock) -> None:
    queue = Waiting(store, pace_s=2.0, clock=clock)
    for name in "abc":
        queue.add(name, chain(1, name))
    told(store)
    queue.started("a")
    assert told(store) == {"queue a": None, "queue b": 0.0, "queue c": 2.0}


def test_the_pace_is_learnt_from_starts_of_requests_that_waited(store: TierStore, clock: Clock) -> None:
    queue = Waiting(store, pace_s=1.0, clock=clock)
    for name in "abc":
        queue.add(name, chain(1, name))
    queue.started("a")
    clock.now += 5.0
    queue.started("b")
    assert queue.pace_s == 2.0
    queue.started("c")
    clock.now += 100.0
    queue.add("d", chain(1, "d"))
    queue.started("d")  # it did not wait, because the queue was empty
    assert queue.pace_s == 1.5


def test_hints_are_not_repeated_while_their_deadlines_are_about_right(store: TierStore, clock: Clock) -> None:
    queue = Waiting(store, pace_s=10.0, clock=clock)
    for name in "ab":
        queue.add(name, chain(1, name))
    told(store)
    clock.now += 1.0
    queue.add("c", chain(1, "c"))
    assert told(store) == {"queue c": 20.0}


def test_a_request_further_back_is_never_expected_sooner(store: TierStore, clock: Clock) -> None:
    queue = Waiting(store, pace_s=4.0, clock=clock)
    expected: dict[str, float] = {}
    for number in range(40):
        queue.add(f"{number:02}", chain(1, str(number)))
        clock.now += 0.3
        if number % 2:
            queue.started(f"{number // 2:02}")
        for hint in store.take_hints():
            expected.pop(hint.request_id, None)
            if hint.keys and hint.deadline_s is not None:
                expected[hint.request_id] = clock.now + hint.deadline_s
        in_order = [expected[name] for name in sorted(expected)]
        assert in_order == sorted(in_order)
        assert len(in_order) == len(queue)


def test_only_the_first_requests_of_a_long_queue_have_hints_and_later_ones_follow(
    store: TierStore, clock: Clock
) -> None:
    queue = Waiting(store, most=2, clock=clock)
    for name in "abc":
        queue.add(name, chain(1, name))
    assert set(told(store)) == {"queue a", "queue b"}
    queue.started("a")
    assert told(store)["queue c"] == 1.0


def test_a_known_start_time_counts_and_later_requests_wait_for_it(store: TierStore, clock: Clock) -> None:
    queue = Waiting(store, pace_s=1.0, clock=clock)
    queue.add("a", chain(1, "a"), starts_in_s=7.0, priority=3)
    queue.add("b", chain(1, "b"))
    hints = store.take_hints()
    assert [(h.deadline_s, h.priority) for h in hints] == [(7.0, 3), (7.0, 0)]


def test_leaving_the_queue_ends_a_hint_and_closing_ends_all(bench: Bench, clock: Clock) -> None:
    with Waiting(bench.store, clock=clock) as queue:
        for name in "abc":
            queue.add(name, chain(1, name))
        queue.withdraw("b")
        assert not bench.directory.hints._needed.keys() & {"queue b"}
        with pytest.raises(KeyError):
            queue.started("b")
        with pytest.raises(ValueError, match="is already waiting"):
            queue.add("a", chain(1))
    assert not bench.directory.hints._needed
    queue.close()


def test_queue_works_over_a_store_without_a_prefetcher_and_a_closed_store(
    tmp_path: Path, clock: Clock
) -> None:
    bench = open_bench(tiers(hbm=4, host=None, nvme=tmp_path), SPEC)
    queue = Waiting(bench.store, clock=clock)
    queue.add("a", chain(1))
    queue.add("b", ())
    bench.store.take_hints()
    queue.started("b")
    assert set(told(bench.store)) == {"queue a"}  # the first take_hints made the store accept hints
    bench.close()
    queue.add("c", chain(1))
    queue.started("a")
    queue.close()


# -- a list of documents ------------------------------------------------------------------------------------------


def test_window_of_documents_is_expected_beyond_the_current_one(bench: Bench, clock: Clock) -> None:
    hints, names = bench.directory.hints, list("abcde")
    documents = ahead(bench.store, names, lambda name: chain(2, name), window=2, clock=clock)
    seen = []
    for number, name in enumerate(documents):
        seen.append(name)
        assert set(hints._needed) == {f"batch {i}" for i in range(number, min(number + 3, 5))}
    assert seen == names
    assert not hints._needed


def test_documents_are_read_no_further_than_the_window(store: TierStore) -> None:
    taken = []

    def source() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    documents = ahead(store, source(), lambda number: chain(1, str(number)), window=3)
    assert taken == []
    assert next(documents) == 0
    assert taken == [0, 1, 2, 3]
    documents.close()  # type: ignore[attr-defined]


def test_abandoned_batch_no_longer_expects_documents(bench: Bench) -> None:
    documents = ahead(bench.store, "abc", lambda name: chain(1, name), name="job 7")
    next(documents)
    assert set(bench.directory.hints._needed) == {"job 7 0", "job 7 1", "job 7 2"}
    documents.close()  # type: ignore[attr-defined]
    assert not bench.directory.hints._needed


def test_a_window_below_one_is_refused(store: TierStore) -> None:
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        ahead(store, "abc", lambda name: chain(1, name), window=0)


def test_documents_are_in_hbm_at_their_turn_although_only_two_fit(store: TierStore, clock: Clock) -> None:
    """HBM has 8 slots, and each document has 4 pages."""
    names = list("abcdef")
    for name in names:
        write(store, chain(4, name))
        store.demote(chain(4, name), Tier.NVME)
        assert store.drain(PATIENCE_S)
    loop = PrefetchLoop(store, PrefetchConfig(share_of_host=1.0), None, clock)
    found = []
    for name in ahead(store, names, lambda name: chain(4, name), window=1, clock=clock):
        found.append(store.match(chain(4, name)).tiers.count(Tier.HBM))
        with store.acquire(chain(4, name)) as lease:
            lease.wait(PATIENCE_S)
        for _ in range(8):  # while the document is being processed
            loop.turn(0.0)
            assert store.drain(PATIENCE_S)
            clock.now += 0.1
        assert read(store, chain(4, name)) == 4
    assert found == [0, 4, 4, 4, 4, 4]


# -- sessions -----------------------------------------------------------------------------------------------------


def turns(sessions: Sessions, clock: Clock, *pauses: float, keys: list[PageKey] | None = None) -> float:
    """Run turns of session "s": one now, and one after each of ``pauses`` (in seconds).

    Returns:
        The time in seconds for which the pages of the last turn are to be retained.
    """
    sessions.began("s")
    found = sessions.ended("s", keys or chain(2), 600.0)
    for pause in pauses:
        clock.now += pause
        sessions.began("s")
        found = sessions.ended("s", keys or chain(2), 600.0)
    return found


def test_a_next_turn_is_expected_after_three_pauses_at_their_median(store: TierStore, clock: Clock) -> None:
    sessions = Sessions(store, clock=clock)
    assert turns(sessions, clock, 10.0, 90.0) == 600.0
    assert store.take_hints() == []
    assert sessions.expected_s("s") is None
    clock.now += 20.0
    sessions.began("s")
    assert sessions.ended("s", chain(3), 600.0) == 20.0 + OVERDUE_S
    (hint,) = store.take_hints()
    assert (hint.request_id, hint.keys, hint.deadline_s) == ("next turn of s", tuple(chain(3)), 20.0)
    assert hint.ttl_s == 20.0 + OVERDUE_S
    assert sessions.expected_s("s") == 20.0


def test_a_turn_reported_as_ended_twice_counts_its_pause_from_the_last_time(
    store: TierStore, clock: Clock
) -> None:
    sessions = Sessions(store, clock=clock)
    for _ in range(4):
        sessions.began("s")
        sessions.ended("s", chain(1), 600.0)
        clock.now += 3.0
        sessions.ended("s", chain(2), 600.0)
        clock.now += 7.0
    sessions.began("s")
    assert sessions.expected_s("s") == 7.0


def test_a_turn_expected_after_the_time_to_retain_is_not_hinted(store: TierStore, clock: Clock) -> None:
    sessions = Sessions(store, clock=clock)
    assert turns(sessions, clock, 700.0, 800.0, 900.0) == 600.0
    assert store.take_hints() == []


def test_without_a_prefetcher_pages_are_retained_for_the_full_time(tmp_path: Path, clock: Clock) -> None:
    bench = open_bench(tiers(hbm=4, host=None), SPEC)
    assert turns(Sessions(bench.store, clock=clock), clock, 5.0, 5.0, 5.0) == 600.0
    bench.close()
    assert turns(Sessions(bench.store, clock=clock), clock, 5.0, 5.0, 5.0) == 600.0


def test_forgotten_session_is_no_longer_expected(bench: Bench, clock: Clock) -> None:
    sessions = Sessions(bench.store, clock=clock)
    turns(sessions, clock, 5.0, 5.0, 5.0)
    assert "next turn of s" in bench.directory.hints._needed
    sessions.forget("s")
    sessions.forget("s")
    assert not bench.directory.hints._needed
    assert sessions.expected_s("s") is None


def test_sessions_are_bounded(store: TierStore, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefetch.sources.MOST_SESSIONS", 10)
    sessions = Sessions(store, clock=clock)
    for number in range(100):
        sessions.began(f"{number}")
    assert list(sessions._sessions) == [str(number) for number in range(90, 100)]


def test_pauses_below_zero_count_as_none_and_old_ones_are_forgotten() -> None:
    pauses = Pauses()
    for seconds in [-1.0, 0.0, 0.0]:
        pauses.note(seconds)
    assert pauses.expected_s == 0.0
    for _ in range(32):
        pauses.note(9.0)
    pauses.note(1.0)
    assert sorted(pauses._seconds) == [1.0] + [9.0] * 31


def test_pages_of_a_session_are_back_in_hbm_when_its_usual_pause_is_over(
    store: TierStore, clock: Clock
) -> None:
    loop, keys = PrefetchLoop(store, PrefetchConfig(), None, clock), chain(4, "talk")
    write(store, keys)
    sessions = Sessions(store, clock=clock)
    turns(sessions, clock, 30.0, 30.0, 30.0, keys=keys)
    store.demote(keys, Tier.NVME)
    assert store.drain(PATIENCE_S)
    while clock.now < 100.0 + 4 * 30.0:
        loop.turn(0.0)
        assert store.drain(PATIENCE_S)
        clock.now += 1.0
    assert store.match(keys).tiers == (Tier.HBM,) * 4
    assert store.hint(Hint("x", 1, tuple(keys))).value == "deferred"
