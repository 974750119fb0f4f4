"""Tests of the eviction order that each policy derives from puts, use and hints, and of the queue of victims."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.order_model import ORDERS, Tier, pages, run
from tierstore.policy import Fifo, History, Known, Lru, VictimQueue, make_policy
from tierstore.types import PageKey

KEYS = [PageKey(bytes([i])) for i in range(6)]


def test_use_makes_a_page_the_last_to_leave_under_lru_and_not_under_fifo() -> None:
    for name, expected in (("lru", "bca"), ("fifo", "abc")):
        tier = Tier(name)
        tier.put("abc")
        tier.hit("a")
        assert tier.order() == expected


@pytest.mark.parametrize("name", ORDERS)
def test_unwanted_pages_leave_first_and_retained_ones_last(name: str) -> None:
    tier = Tier(name)
    tier.put("abcd")
    tier.retain("a")
    tier.unwant("c")
    assert tier.order()[0] + tier.order()[-1] == "ca"
    tier.put("e")
    tier.hit("b")
    assert tier.order()[0] + tier.order()[-1] == "ca"


@pytest.mark.parametrize("name", ORDERS)
def test_use_makes_an_unwanted_page_ordinary_and_keeps_a_retention(name: str) -> None:
    tier = Tier(name)
    tier.put("abcd")
    tier.unwant("a")
    tier.retain("c")
    tier.hit("a")
    tier.hit("c")
    assert tier.order()[-1] == "c"
    assert tier.ranks["a"] >= 0


@pytest.mark.parametrize("name", ORDERS)
def test_end_of_a_retention_makes_only_its_page_normal(name: str) -> None:
    tier = Tier(name)
    tier.put("abcd")
    tier.retain("a")
    tier.unwant("c")
    before = dict(tier.ranks)
    tier.end_retention("abc")
    assert (tier.ranks["b"], tier.ranks["c"]) == (before["b"], before["c"])
    tier.retain("d")
    assert tier.order()[0] + tier.order()[-1] == "cd"
    assert tier.ranks["a"] < tier.ranks["d"]


@pytest.mark.parametrize("name", ORDERS)
@given(steps=st.lists(st.tuples(st.sampled_from("prRhuxecb"), st.sampled_from(pages())), max_size=80))
def test_every_policy_orders_pages_consistently(name: str, steps: list[tuple[str, str]]) -> None:
    run(Tier(name), steps)


@pytest.mark.parametrize("name", ORDERS)
def test_among_equal_pages_the_last_of_a_sequence_is_evicted_first(name: str) -> None:
    tier = Tier(name, pages=400)
    tier.put("abcd")
    tier.touch("abcd")
    assert tier.order() == ("abcd" if name == "fifo" else "dcba")


def test_priority_outlives_its_hint_and_equal_ones_are_lru() -> None:
    tier = Tier("priority")
    tier.put("abcde")
    tier.retain("a", 2)
    tier.retain("b", 1)
    tier.retain("c", 2)
    assert tier.order() == "debac"
    tier.end_retention("abc")
    assert tier.order() == "debac"
    tier.hit("d")
    tier.hit("a")
    assert tier.order() == "edbca"
    tier.leave("a")
    tier.put("a")
    assert tier.order() == "edabc"


@pytest.mark.parametrize("name", ORDERS)
def test_among_retained_pages_lower_priorities_are_evicted_first(name: str) -> None:
    tier = Tier(name)
    tier.put("abcd")
    for page, priority in (("a", 3), ("b", -1), ("c", 7), ("d", 0)):
        tier.retain(page, priority)
    assert tier.order() == "bdac"
    for page in "cab":
        tier.touch(page)
    assert tier.order()[2:] == "ac"
    tier.end_retention("a")
    assert tier.order()[-1] == "c"


def test_gdsf_keeps_deep_pages_longer_and_ages_old_uses() -> None:
    tier = Tier("gdsf", doubling_depth=1.0)
    tier.put("ab", parents={"b": "a"})
    assert tier.order() == "ab"
    for _ in range(3):
        tier.hit("a")
    for page in "cdefghijklmnop":
        tier.put(page)
        tier.leave(page)
    tier.put("q", parents={"q": "b"})
    for page in "rstuvwxyz":
        tier.put(page)
        tier.hit(page)
        tier.hit(page)
        tier.leave(page)
    tier.put("0")
    assert tier.order()[-1] == "0"


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(KeyError):
        make_policy("random", Known(History(1), 1.0))
    with pytest.raises(ValueError, match="history"):
        make_policy("session")


def test_lru_and_fifo_need_no_history() -> None:
    assert type(make_policy("lru")) is Lru
    assert type(make_policy("fifo")) is Fifo


@given(st.lists(st.tuples(st.sampled_from(("offer", "withdraw")), st.integers(0, 200)), max_size=400))
def test_queue_equals_a_sorted_dict(steps: list[tuple[str, int]]) -> None:
    queue, model = VictimQueue(), dict[int, PageKey]()
    for verb, rank in steps:
        key = PageKey(rank.to_bytes(2, "big"))
        if verb == "offer":
            queue.offer(rank, key)
            model[rank] = key
        else:
            queue.withdraw(rank)
            model.pop(rank, None)
        expected = [model[r] for r in sorted(model)]
        assert queue.first() == (expected[0] if expected else None)
        assert list(queue) == expected
        assert len(queue) == len(expected)
        odd = [k for k in expected if k[-1] % 2]
        assert queue.first_where(lambda k: bool(k[-1] % 2)) == (odd[0] if odd else None)


def test_withdrawn_ranks_do_not_accumulate() -> None:
    queue = VictimQueue()
    for rank in range(10_000):
        queue.offer(rank, KEYS[0])
        queue.withdraw(rank)
    assert len(queue._heap) < 200
