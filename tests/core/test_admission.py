"""What each admission answers, what a history remembers, and how a budget counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import chain
from tierstore.policy import History, Known, make_admission, make_history
from tierstore.policy.admission import Cost
from tierstore.policy.budget import DAY_S, WriteBudget
from tierstore.policy.history import Record
from tierstore.policy.recompute import doubling_depth
from tierstore.types import PageKey, PageSpec

LLAMA = PageSpec(num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="8b")


class Asked:
    """An admission with its history, told and asked as a directory does it."""

    def __init__(self, name: str, remembered: int = 16, doubling_depth: float = 1000.0) -> None:
        self.history = History(remembered)
        self.admission = make_admission(name, Known(self.history, doubling_depth))

    def put(self, key: PageKey, parent: PageKey | None = None, pressure: float = 0.5) -> bool:
        record, again = self.history.put(key, parent)
        return self.admission.put(record, pressure, again=again)

    def hit(self, key: PageKey, *, below: bool, pressure: float = 0.5) -> bool:
        return self.admission.hit(self.history.hit(key, below=below), pressure)


def test_all_takes_every_page_whatever_a_write_costs() -> None:
    asked, key = Asked("all"), chain(1)[0]
    assert asked.put(key, pressure=float("inf"))
    assert asked.hit(key, below=False, pressure=float("inf"))


def test_second_hit_takes_a_page_put_twice_while_it_is_remembered() -> None:
    asked, keys = Asked("second_hit", remembered=3), chain(4)
    assert [asked.put(key) for key in keys] == [False] * 4
    assert asked.put(keys[1])
    assert not asked.put(keys[0]), "four are one more than it remembers"


def test_second_hit_takes_what_is_hit() -> None:
    asked, key = Asked("second_hit"), chain(1)[0]
    asked.put(key)
    assert asked.hit(key, below=False, pressure=9.0)


def test_an_unknown_admission_is_refused() -> None:
    with pytest.raises(KeyError):
        make_admission("some", Known(History(1), 1.0))
    with pytest.raises(ValueError, match="history"):
        make_admission("cost")


def test_only_what_looks_back_has_a_history_and_a_bounded_one() -> None:
    assert make_history(["lru", "fifo", "all"], 10) is None
    sizes = [make_history(["lru", "cost"], pages) for pages in (10, 100_000, 1_000_000)]
    assert [history.limit for history in sizes if history is not None] == [320, 1 << 18, 2_000_000]


def test_cost_takes_everything_where_a_write_displaces_nothing() -> None:
    asked = Asked("cost")
    assert all(asked.put(chain(1, str(i))[0], pressure=0.0) for i in range(200))


def test_cost_learns_which_kind_of_page_comes_back() -> None:
    """Second turns come back after they left, first turns never do."""
    asked, root = Asked("cost", remembered=8), chain(1, "root")[0]
    asked.put(root)
    for i in range(300):
        after = chain(1, f"after{i}")[0]
        asked.put(chain(1, f"first{i}")[0])
        asked.hit(root, below=True)
        asked.put(after, root)
        asked.put(after, root)
    assert not asked.put(chain(1, "new")[0])
    assert asked.put(chain(1, "next")[0], root)


def test_cost_asks_more_of_a_page_as_a_write_becomes_dearer() -> None:
    key = chain(1)[0]
    answers = [Asked("cost").put(key, pressure=pressure) for pressure in (0.5, 1.5, float("inf"))]
    assert answers == [True, False, False]


def test_cost_takes_a_deep_page_sooner_than_a_shallow_one_of_its_kind() -> None:
    asked, keys = Asked("cost", remembered=64, doubling_depth=10.0), chain(30)
    for i in range(200):
        asked.put(chain(1, str(i))[0])
        asked.put(chain(1, str(i))[0])
    answers = [asked.put(k, parent, 2.0) for k, parent in zip(keys, [None, *keys[:-1]], strict=True)]
    assert answers == sorted(answers)
    assert answers[0] != answers[-1]


def test_a_use_in_memory_does_not_speak_for_the_disk() -> None:
    asked = Asked("cost", remembered=8)
    for i in range(200):
        key, used = chain(1, str(i))[0], chain(1, f"used{i}")[0]
        asked.put(key)
        asked.hit(key, below=False)
        asked.put(used, key)
        asked.put(used, key)
    assert not asked.put(chain(1, "new")[0])


def test_what_waits_to_be_asked_for_again_does_not_speak_for_its_kind() -> None:
    """One page in ten has come back so far, and nothing is forgotten yet: nine in ten are no reason to write."""
    asked = Asked("cost", remembered=10_000)
    for i in range(300):
        asked.put(chain(1, str(i))[0])
        if i % 10 == 0:
            asked.put(chain(1, str(i))[0])
        used = chain(1, f"used{i}")[0]
        asked.put(used, chain(1, "0")[0])
        asked.put(used, chain(1, "0")[0])
    assert not asked.put(chain(1, "new")[0], pressure=1.0)
    assert asked.put(chain(1, "next")[0], chain(1, "0")[0], pressure=1.0)


def test_what_is_not_remembered_is_taken_when_it_is_hit() -> None:
    assert Cost(History(1), 1.0).hit(None, 5.0)


def test_a_history_knows_turns_depths_and_uses() -> None:
    history, keys = History(10), chain(5)
    for key, parent in zip(keys[:3], [None, *keys[:2]], strict=True):
        history.put(key, parent)
    history.hit(keys[2], below=False)
    history.put(keys[3], keys[2])
    history.put(keys[4], keys[3])
    found = [history.get(key) for key in keys]
    assert [None if r is None else (r.turn, r.depth, r.uses, r.last) for r in found] == [
        (0, 0, 0, 0),
        (0, 1, 0, 1),
        (0, 2, 1, 3),
        (1, 3, 0, 4),
        (1, 4, 0, 5),
    ]


class Log:
    """A watcher that writes down what it is told."""

    def __init__(self) -> None:
        self.asked_for: list[tuple[int, bool]] = []
        self.gone: list[PageKey] = []
        self.begun = 0

    def asked(self, record: Record, now: int, *, below: bool) -> None:
        self.asked_for.append((now - record.last, below))

    def began(self, record: Record, now: int) -> None:
        self.begun += 1

    def forgotten(self, record: Record, now: int) -> None:
        self.gone.append(record.key)


@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 12))
def test_a_history_forgets_the_page_that_was_asked_for_longest_ago(asked: list[int], limit: int) -> None:
    keys, history, log = chain(31), History(limit), Log()
    history.watchers.append(log)
    model: list[int] = []
    gone: list[PageKey] = []
    for i in asked:
        known = i in model
        assert history.put(keys[i], None)[1] == known
        model = [*(m for m in model if m != i), i]
        gone += [keys[m] for m in model[:-limit]]
        model = model[-limit:]
        assert len(history) == len(model)
    assert log.gone == gone
    assert log.begun == history.now == len(asked)


def test_a_watcher_hears_how_long_a_page_was_waited_for_and_where_it_was() -> None:
    history, log, keys = History(8), Log(), chain(3)
    history.watchers.append(log)
    for key in keys:
        history.put(key, None)
    history.hit(keys[0], below=False)
    history.hit(keys[2], below=True)
    history.put(keys[0], None)
    assert log.asked_for == [(3, False), (2, True), (2, True)]


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
    assert budget.total == 280


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
