"""Victim order: what each policy makes of entering, use and hints, and a queue that finds the lowest rank."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.policy import Fifo, Lru, VictimQueue, make_policy
from tierstore.types import PageKey

KEYS = [PageKey(bytes([i])) for i in range(6)]


def order(ranks: dict[str, int]) -> str:
    return "".join(sorted(ranks, key=ranks.__getitem__))


def test_use_makes_a_page_the_last_to_leave_under_lru_and_not_under_fifo() -> None:
    for name, expected in (("lru", "bca"), ("fifo", "abc")):
        policy = make_policy(name)
        ranks = {page: policy.enter() for page in "abc"}
        ranks["a"] = policy.touch(ranks["a"])
        assert order(ranks) == expected


@pytest.mark.parametrize("policy", [Lru(), Fifo()], ids=["lru", "fifo"])
def test_unwanted_pages_leave_first_and_retained_ones_last(policy: Fifo) -> None:
    ranks = {page: policy.enter() for page in "abcd"}
    ranks["a"], ranks["c"] = policy.retained(), policy.unwanted()
    assert order(ranks) == "cbda"
    ranks["e"] = policy.enter()
    assert order(ranks) == "cbdea"


@pytest.mark.parametrize("policy", [Lru(), Fifo()], ids=["lru", "fifo"])
def test_use_takes_back_that_nobody_wants_a_page_and_keeps_a_retention(policy: Fifo) -> None:
    ranks = {"a": policy.unwanted(), "b": policy.enter(), "c": policy.retained(), "d": policy.enter()}
    ranks["a"], ranks["c"] = policy.touch(ranks["a"]), policy.touch(ranks["c"])
    assert order(ranks) == "bdac"


@pytest.mark.parametrize("policy", [Lru(), Fifo()], ids=["lru", "fifo"])
def test_the_end_of_a_retention_makes_a_page_normal_and_leaves_others_alone(policy: Fifo) -> None:
    ranks = {"a": policy.retained(), "b": policy.enter(), "c": policy.unwanted()}
    ended = {page: policy.ordinary(rank) for page, rank in ranks.items()}
    assert order(ended) == "cba"
    assert (ended["b"], ended["c"]) == (ranks["b"], ranks["c"])


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(KeyError):
        make_policy("random")


@given(st.lists(st.tuples(st.sampled_from(("offer", "withdraw")), st.integers(0, 200)), max_size=400))
def test_a_queue_does_what_a_sorted_dict_does(steps: list[tuple[str, int]]) -> None:
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


def test_withdrawn_ranks_do_not_pile_up() -> None:
    queue = VictimQueue()
    for rank in range(10_000):
        queue.offer(rank, KEYS[0])
        queue.withdraw(rank)
    assert len(queue._heap) < 200
