"""What each admission answers, what a history remembers, and how a budget counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import chain
from tierstore.policy import make_admission
from tierstore.policy.admission import Cost
from tierstore.policy.budget import DAY_S, WriteBudget
from tierstore.policy.history import History, Record
from tierstore.policy.recompute import doubling_depth
from tierstore.types import PageSpec

LLAMA = PageSpec(num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="8b")


def test_all_takes_every_page_whatever_a_write_costs() -> None:
    admission = make_admission("all", remembered=4, doubling_depth=1.0)
    key = chain(1)[0]
    assert admission.put(key, None, float("inf"))
    assert admission.hit(key, float("inf"), below=False)


def test_second_hit_takes_a_page_put_twice_while_it_is_remembered() -> None:
    admission = make_admission("second_hit", remembered=3, doubling_depth=1.0)
    keys = chain(4)
    assert [admission.put(key, None, 0.0) for key in keys] == [False] * 4
    assert admission.put(keys[1], None, 0.0)
    assert not admission.put(keys[0], None, 0.0), "four are one more than it remembers"


def test_second_hit_takes_what_is_hit() -> None:
    admission = make_admission("second_hit", remembered=3, doubling_depth=1.0)
    key = chain(1)[0]
    admission.put(key, None, 0.0)
    assert admission.hit(key, 9.0, below=False)


def test_an_unknown_admission_is_refused() -> None:
    with pytest.raises(KeyError):
        make_admission("some", remembered=1, doubling_depth=1.0)


def test_cost_takes_everything_where_a_write_displaces_nothing() -> None:
    admission = Cost(16, 10.0)
    for i in range(200):
        assert admission.put(chain(1, str(i))[0], None, 0.0)


def test_cost_learns_which_kind_of_page_comes_back() -> None:
    """Second turns come back after they left, first turns never do."""
    admission = Cost(8, 1000.0)
    root = chain(1, "root")[0]
    admission.put(root, None, 0.5)
    for i in range(300):
        first, after = chain(1, f"first{i}")[0], chain(1, f"after{i}")[0]
        admission.put(first, None, 0.5)
        admission.hit(root, 0.5, below=True)
        admission.put(after, root, 0.5)
        admission.put(after, root, 0.5)
    assert not admission.put(chain(1, "new")[0], None, 0.5)
    assert admission.put(chain(1, "next")[0], root, 0.5)


def test_cost_asks_more_of_a_page_as_a_write_becomes_dearer() -> None:
    key = chain(1)[0]
    assert Cost(8, 10.0).put(key, None, 0.9)
    assert not Cost(8, 10.0).put(key, None, 1.5)
    assert not Cost(8, 10.0).put(key, None, float("inf"))


def test_cost_takes_a_deep_page_sooner_than_a_shallow_one_of_its_kind() -> None:
    admission, keys = Cost(64, 10.0), chain(30)
    answers = [admission.put(key, parent, 2.0) for key, parent in zip(keys, [None, *keys[:-1]], strict=True)]
    assert answers == sorted(answers)
    assert answers[0] != answers[-1]


def test_a_use_in_memory_does_not_speak_for_the_disk() -> None:
    admission = Cost(8, 1000.0)
    for i in range(200):
        key = chain(1, str(i))[0]
        admission.put(key, None, 0.5)
        admission.hit(key, 0.5, below=False)
        used = chain(1, f"used{i}")[0]
        admission.put(used, key, 0.5)
        admission.put(used, key, 0.5)
    assert not admission.put(chain(1, "new")[0], None, 0.5)


def test_a_history_knows_turns_depths_and_uses() -> None:
    history, keys = History(10), chain(5)
    for key, parent in zip(keys[:3], [None, *keys[:2]], strict=True):
        history.first(key, parent)
    record = history.get(keys[2])
    assert record is not None
    history.again(keys[2], record)
    history.first(keys[3], keys[2])
    history.first(keys[4], keys[3])
    found = [history.get(key) for key in keys]
    assert [None if r is None else (r.turn, r.depth, r.uses) for r in found] == [
        (0, 0, 0),
        (0, 1, 0),
        (0, 2, 1),
        (1, 3, 0),
        (1, 4, 0),
    ]


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 12))
def test_a_history_forgets_the_page_that_was_asked_for_longest_ago(asked: list[int], limit: int) -> None:
    keys, firsts = chain(31), 0
    gone: list[Record] = []
    history = History(limit, gone.append)
    model: list[int] = []
    for i in asked:
        record = history.get(keys[i])
        assert (record is not None) == (i in model)
        if record is None:
            history.first(keys[i], None)
            firsts += 1
        else:
            model.remove(i)
            history.again(keys[i], record)
        model = [*model, i][-limit:]
        assert len(history) == len(model)
    assert len(gone) == firsts - len(model)


def test_a_budget_counts_the_last_day_and_no_more() -> None:
    budget = WriteBudget(100)
    budget.spend(30, 10.0)
    budget.spend(50, 3600.0)
    assert (budget.spent(3600.0), budget.left(3600.0)) == (80, 20)
    assert budget.left(DAY_S) == 20
    assert budget.left(DAY_S + 1000.0) == 50
    budget.spend(200, DAY_S + 1000.0)
    assert budget.left(DAY_S + 1000.0) == 0
    assert budget.left(3 * DAY_S) == 100


def test_without_a_limit_there_is_no_end_but_a_count() -> None:
    budget = WriteBudget(None)
    budget.spend(7, 0.0)
    assert (budget.spent(1.0), budget.left(1.0)) == (7, None)


@given(st.lists(st.tuples(st.floats(0, 20_000), st.integers(0, 50)), max_size=60))
def test_a_budget_never_counts_less_than_was_written_in_a_day(steps: list[tuple[float, int]]) -> None:
    budget, now, log = WriteBudget(1000), 0.0, list[tuple[float, int]]()
    for wait, nbytes in steps:
        now += wait
        budget.spend(nbytes, now)
        log.append((now, nbytes))
        exact = sum(n for at, n in log if at > now - DAY_S)
        longer = sum(n for at, n in log if at > now - DAY_S - 900)
        assert exact <= budget.spent(now) <= longer


def test_the_page_that_costs_twice_as_much_is_where_attention_costs_as_much_as_the_rest() -> None:
    assert doubling_depth(LLAMA) == 6 * 4096 / 64
