"""Tests of the eviction policies that learn how soon pages are requested again, and of when they follow LRU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import chain
from tierstore.policy.history import History, Record
from tierstore.policy.orders import (
    KINDS,
    Adaptive,
    Ghost,
    Lifetimes,
    Returns,
    Rivals,
    Session,
    _corners,
    kind_of,
)
from tierstore.types import PageKey

asks = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 50)), max_size=150)


@given(asks, st.integers(1, 8))
def test_ghost_cache_holds_the_pages_of_highest_value(steps: list[tuple[int, int]], pages: int) -> None:
    ghost, model, hits, keys = Ghost(pages), dict[PageKey, int](), 0, chain(13)
    for number, (page, value) in enumerate(steps):
        worth = value * 1000 + number
        hits += keys[page] in model
        ghost.ask(keys[page], worth, number)
        model[keys[page]] = worth
        if len(model) > pages:
            del model[min(model, key=model.__getitem__)]
        assert (ghost.hits, ghost._values) == (hits, model)


def test_ghost_cache_counts_hits_up_to_the_first_missing_page() -> None:
    ghost, keys = Ghost(4), chain(6)
    for value, page in enumerate((0, 1, 3)):
        ghost.ask(keys[page], value, 1)
    for value, page in enumerate(range(4), 3):
        ghost.ask(keys[page], value, 2)
    assert ghost.hits == 2, "the ghost cache has the fourth page, but not the third"


def test_ghost_cache_memory_is_bounded() -> None:
    ghost, keys = Ghost(4), chain(4)
    for value in range(10_000):
        ghost.ask(keys[value % 4], value, value)
    assert len(ghost._heap) < 100


def test_curve_is_the_share_of_pages_that_returned_by_each_age() -> None:
    """Check the curve for 100 pages: 25 are requested again at age 10, 25 at age 100, and the others never."""
    returns = Returns(64)
    for i in range(100):
        returns.begin(i)
    for i in range(50):
        returns.end(i, i + (10 if i < 25 else 100), back=True)
    curve = returns.curve(100_000)
    by_age = {age: (chance, place) for age, chance, place in curve}
    assert by_age[0.0] == (0.0, 0.0)
    near, far = (max(p for age, p in by_age.items() if age <= limit) for limit in (64.0, 256.0))
    assert near[0] == pytest.approx(0.25, abs=0.02)
    assert far[0] == pytest.approx(0.5, abs=0.02)
    assert [chance for _, chance, _ in curve] == sorted(chance for _, chance, _ in curve)
    assert all(place <= age for age, _, place in curve)


def test_too_few_observations_give_no_curve() -> None:
    returns = Returns(64)
    returns.begin(0)
    assert returns.curve(1000) == [(0.0, 0.0, 0.0)]


def test_abandoned_wait_ends_without_effect() -> None:
    returns = Returns(8)
    for _ in range(20):
        returns.begin(0)
    returns.age(1.0, 100, 1000)
    before = returns.curve(1000)
    returns.end(0, 1000, back=True)
    assert returns.curve(1000) == before
    assert not returns._waiting


steps = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30)


@given(steps, st.integers(0, 40))
def test_at_every_price_some_hull_corner_is_optimal(steps: list[tuple[int, int]], price: int) -> None:
    """Use whole numbers, so that sums are exact."""
    curve = [(0.0, 0.0, 0.0)]
    for age, (chance, place) in enumerate(steps, 1):
        curve.append((float(age), curve[-1][1] + chance, curve[-1][2] + place))
    corners = _corners(curve)

    def best(points: list[tuple[float, float, float]]) -> float:
        return max(8 * chance - price * place for _, chance, place in points)

    assert set(corners) <= set(curve)
    assert best(corners) == best(curve)


def ask(history: History, key: PageKey, parent: PageKey | None = None) -> None:
    history.put(key, parent)


def chats(history: History, rounds: int) -> None:
    """Request eight pages again and again, each after 40 requests. All other requests are for new pages."""
    regulars = chain(8, "regular")
    for i in range(rounds):
        ask(history, regulars[i % 8])
        for j in range(4):
            ask(history, chain(1, f"{i}/{j}")[0])


def test_only_pages_of_kinds_requested_again_are_kept() -> None:
    history, lifetimes = History(1000), Lifetimes(16)
    history.watchers.append(lifetimes)
    chats(history, 600)
    assert lifetimes.kept[kind_of(Record(chain(1)[0], None))] == pytest.approx(0.0, abs=1.0)
    assert lifetimes.kept[7] >= 40


def test_new_pages_are_of_one_kind_if_their_runs_are_of_similar_origin_and_length() -> None:
    def run(name: str, number: int, after: PageKey | None = None) -> list[PageKey]:
        keys = chain(number, name)
        for i, key in enumerate(keys):
            history.put(key, after, number - 1 - i)
            after = key
        return keys

    history = History(1000)
    chat, other, long, book = run("chat", 7), run("other", 2), run("long", 8), run("book", 64)
    history.hit(chat[6], below=False)
    more, way = run("more", 2, chat[6]), run("way", 2, chat[6])
    kinds = [
        {kind_of(record) for key in keys if (record := history.get(key)) is not None}
        for keys in (chat[:6], other, long, book, more, way)
    ]
    assert all(len(kind) == 1 for kind in kinds)
    assert kinds[0] == kinds[1]
    assert len(set.union(*kinds)) == 5


def test_page_with_the_earliest_expected_end_is_evicted_first() -> None:
    history = History(1000)
    session = Session(history, 16)
    chats(history, 600)
    regular, passing = chain(8, "regular")[0], chain(1, "599/3")[0]
    known = history.get(regular)
    assert known is not None
    assert kind_of(known) == 7
    assert session.enter(passing) < session.enter(regular)
    assert session.enter(chain(1, "never seen")[0]) < session.enter(regular)


def test_ghost_caches_evict_the_last_pages_of_a_request_first() -> None:
    history = History(1000)
    rivals = Rivals(Session(history, 4), 4)
    history.watchers.append(rivals)
    request = chain(6)
    for key, parent in zip(request, [None, *request[:-1]], strict=True):
        history.put(key, parent)
    assert set(rivals._lru._values) == set(rivals._ghost._values) == set(request[:4])
    other = chain(1, "other")[0]
    history.put(other, None)
    assert set(rivals._lru._values) == {*request[:3], other}


def test_adaptive_follows_session_while_it_hits_more_and_lru_otherwise() -> None:
    history = History(1000)
    adaptive = Adaptive(history, 16)
    chats(history, 600)
    regular, passing = chain(8, "regular")[0], chain(1, "599/3")[0]
    assert adaptive.rivals.follow_session
    assert adaptive.enter(passing) < adaptive.enter(regular)
    for i in range(2000):
        # Lifetimes that do not fit these requests: pages of the first eight kinds are kept for very long.
        adaptive.lifetimes.kept = [10_000.0] * 8 + [0.0] * (KINDS - 8)
        ask(history, chain(1, f"old{i}")[0])
        ask(history, chain(1, f"old{i}")[0])
        ask(history, chain(1, f"old{max(0, i - 10)}")[0])
    assert not adaptive.rivals.follow_session
    assert adaptive.enter(regular) < adaptive.enter(passing), (
        "the page requested last must have the higher rank"
    )
