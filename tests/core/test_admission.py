"""Tests of what admission policies decide, what a history remembers, and how a write budget counts writes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pages import chain
from tierstore.page import PageSpec
from tierstore.policy import History, Known, make_admission, make_history
from tierstore.policy.admission import DAY_S, Cost, WriteBudget
from tierstore.policy.history import Record
from tierstore.policy.registry import doubling_depth
from tierstore.types import PageKey

LLAMA = PageSpec(num_layers=32, page_size=64, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="8b")


class Asked:
    """Calls an admission policy and its history like a directory. Admitted pages count as written at once."""

    def __init__(self, name: str, remembered: int = 16) -> None:
        self.history = History(remembered)
        self.admission = make_admission(name, Known(self.history, 1000.0))
        self.puts = self.writes = 0

    def put(self, key: PageKey, parent: PageKey | None = None, gone: float = 0.0, following: int = 0) -> bool:
        record, again = self.history.put(key, parent, following)
        self.puts += 1
        return self._wrote(self.admission.put(record, gone, again=again))

    def put_all(
        self, keys: Sequence[PageKey], parent: PageKey | None = None, gone: float = 0.0
    ) -> list[bool]:
        answers = []
        for i, key in enumerate(keys):
            answers.append(self.put(key, parent, gone, len(keys) - 1 - i))
            parent = key
        return answers

    def hit(self, key: PageKey, *, below: bool, gone: float = 0.0) -> bool:
        return self._wrote(self.admission.hit(self.history.hit(key, below=below), gone))

    def pay(self, length: int) -> None:
        """Put 40 runs of ``length`` pages. Put every fourth run twice, as if it had been evicted in between."""
        for i in range(40):
            for _ in range(1 + (i % 4 == 0)):
                self.put_all(chain(length, f"paid{length}/{i}"))

    def _wrote(self, wanted: bool) -> bool:
        if wanted:
            self.writes += 1
            self.admission.wrote()
        return wanted


def test_all_admits_every_page_regardless_of_write_cost() -> None:
    asked, key = Asked("all"), chain(1)[0]
    assert asked.put(key, gone=1.0)
    assert asked.hit(key, below=False, gone=1.0)


def test_second_hit_admits_a_page_put_twice_while_remembered() -> None:
    asked, keys = Asked("second_hit", remembered=3), chain(4)
    assert [asked.put(key) for key in keys] == [False] * 4
    assert asked.put(keys[1])
    assert not asked.put(keys[0]), "the history remembers only three of the four pages"


def test_second_hit_admits_a_page_that_is_hit() -> None:
    asked, key = Asked("second_hit"), chain(1)[0]
    asked.put(key)
    assert asked.hit(key, below=False, gone=1.0)


def test_an_unknown_admission_is_refused() -> None:
    with pytest.raises(KeyError):
        make_admission("some", Known(History(1), 1.0))
    with pytest.raises(ValueError, match="history"):
        make_admission("cost")


def test_only_policies_that_need_it_have_a_bounded_history() -> None:
    assert make_history(["lru", "fifo", "all"], 10) is None
    sizes = [make_history(["lru", "cost"], pages) for pages in (10, 100_000, 1_000_000)]
    assert [history.limit for history in sizes if history is not None] == [320, 1 << 18, 2_000_000]


def test_cost_writes_at_most_half_of_all_puts_in_the_long_run() -> None:
    rng, asked, pool = random.Random(5), Asked("cost", remembered=4096), chain(3000, "pool")
    for i in range(600):
        begin = rng.randrange(len(pool) - 20)
        for key in pool[begin : begin + rng.randrange(1, 20)]:
            asked.hit(key, below=True) if rng.random() < 0.3 else asked.put(key)
        asked.put_all(chain(rng.choice((1, 3, 30)), str(i)))
    assert asked.puts > 10_000
    assert 0.4 * asked.puts < asked.writes < 0.5 * asked.puts


def test_pages_written_without_asking_admission_count() -> None:
    answers = []
    for flushed in (0, 2000):
        asked = Asked("cost", remembered=4096)
        asked.pay(1)
        asked.put_all(chain(64, "first"))
        for _ in range(flushed):
            asked.admission.wrote()
        answers.append(sum(asked.put(chain(1, str(i))[0]) for i in range(1000)))
    assert answers[0] > 300
    assert answers[1] < answers[0] / 2


def going_on(asked: Asked, name: str) -> PageKey:
    """Put the first turn of a chat and hit its last page. Return this page, after which the next turn starts."""
    first = chain(2, name)
    asked.put_all(first)
    asked.hit(first[1], below=True)
    return first[1]


def test_cost_learns_which_kind_of_page_is_requested_again() -> None:
    """Put the second turns of chats again, as after an eviction, but put prompts without a second turn only once."""
    asked = Asked("cost", remembered=4096)
    for i in range(300):
        asked.put_all(chain(6, f"gone{i}"))
        last, after = going_on(asked, f"chat{i}"), chain(1, f"after{i}")[0]
        asked.put(after, last)
        asked.put(after, last)
    new = [asked.put_all(chain(6, f"new{i}")) for i in range(10)]
    assert new == [[False] * 6] * 10
    assert all(asked.put(chain(1, f"next{i}")[0], going_on(asked, f"more{i}")) for i in range(10))


def test_short_runs_and_long_ones_are_of_different_kinds_from_their_first_page_on() -> None:
    asked = Asked("cost", remembered=4096)
    for i in range(200):
        asked.put_all(chain(20, f"long{i}"))
        for _ in range(2):
            asked.put_all(chain(2, f"short{i}"))
    assert asked.put_all(chain(2, "short")) == [True, True]
    assert asked.put_all(chain(20, "long")) == [False] * 20


def test_runs_of_a_partly_written_kind_are_written_whole_or_skipped() -> None:
    asked = Asked("cost", remembered=4096)
    asked.pay(8)
    found = [tuple(asked.put_all(chain(8, str(i)))) for i in range(400)]
    whole = [run for run in found if len(set(run)) == 1]
    assert len(whole) > 350, "only few runs may be written in part"
    assert 100 < sum(run[0] for run in whole) < 250


def test_cost_admits_fewer_pages_as_the_daily_budget_is_used() -> None:
    written = []
    for gone in (0.0, 0.5, 1.0):
        asked = Asked("cost", remembered=4096)
        asked.pay(1)
        asked.writes = 0
        for i in range(1500):
            for _ in range(1 + (i % 4 == 0)):
                asked.put(chain(1, str(i))[0], gone=gone)
        written.append(asked.writes / (asked.puts - 50))
    assert written[0] == pytest.approx(0.48, abs=0.05)
    assert written[1] == pytest.approx(0.24, abs=0.05)
    assert written[2] == 0
    assert not Asked("cost").hit(chain(1)[0], below=True, gone=1.0)


def test_hits_in_memory_do_not_count_for_the_disk() -> None:
    asked = Asked("cost", remembered=4096)
    for i in range(300):
        used, read = chain(6, f"used{i}"), chain(2, f"read{i}")
        asked.put_all(used)
        asked.put_all(read)
        for key in used:
            asked.hit(key, below=False)
        for key in read:
            asked.hit(key, below=True)
    assert [asked.put_all(chain(6, f"new{i}")) for i in range(10)] == [[False] * 6] * 10
    assert [asked.put_all(chain(2, f"more{i}")) for i in range(10)] == [[True] * 2] * 10


def test_cost_writes_nothing_more_while_memory_serves_all_requests() -> None:
    asked = Asked("cost", remembered=4096)
    for i in range(200):
        for key in (keys := chain(3, str(i))):
            asked.put(key)
        for key in keys:
            asked.hit(key, below=False)
    assert asked.writes < 2 * 64, "only writes before the first read from disk are expected"


def test_a_forgotten_page_is_admitted_when_it_is_hit() -> None:
    assert Cost(History(1)).hit(None, 0.9)


def test_history_records_turns_depths_and_uses() -> None:
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


def test_history_records_how_runs_began_and_their_length() -> None:
    history = History(100)

    def put(name: str, number: int, after: PageKey | None = None) -> list[PageKey]:
        keys = chain(number, name)
        for i, key in enumerate(keys):
            history.put(key, after, number - 1 - i)
            after = key
        return keys

    def run(key: PageKey) -> tuple[int, bool, int, int]:
        record = history.get(key)
        assert record is not None
        return record.steps, record.branch, record.place, record.span

    chat = put("chat", 3)
    assert [run(key) for key in chat] == [(0, False, 1, 3), (0, False, 2, 3), (0, False, 3, 3)]
    history.hit(chat[2], below=False)
    more = put("more", 2, chat[2])
    assert [run(key) for key in more] == [(1, False, 1, 2), (1, False, 2, 2)]
    history.hit(more[1], below=False)
    assert run(put("yet more", 1, more[1])[0]) == (2, False, 1, 1)
    assert run(put("another way", 1, chat[2])[0]) == (0, True, 1, 1)
    for i in range(14):
        put(f"way{i}", 1, chat[2])
    assert run(put("the last way", 1, chat[2])[0]) == (0, False, 1, 1), (
        "a page that 16 chats share does not count as a branch"
    )
    lots = [record.lot for key in chat + more if (record := history.get(key)) is not None]
    assert len(set(lots[:3])) == len(set(lots[3:])) == 1
    assert lots[0] != lots[3]


class Log:
    """A watcher that records its calls."""

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
def test_history_forgets_the_least_recently_requested_page(asked: list[int], limit: int) -> None:
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


def test_watcher_gets_the_age_and_tier_of_each_requested_page() -> None:
    history, log, keys = History(8), Log(), chain(3)
    history.watchers.append(log)
    for key in keys:
        history.put(key, None)
    history.hit(keys[0], below=False)
    history.hit(keys[2], below=True)
    history.put(keys[0], None)
    assert log.asked_for == [(3, False), (2, True), (2, True)]


def test_write_budget_counts_only_the_last_day() -> None:
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


def test_write_budget_without_a_limit_only_counts() -> None:
    budget = WriteBudget(None)
    budget.spend(7, 0.0)
    assert (budget.spent(1.0), budget.left(1.0)) == (7, None)


@given(st.lists(st.tuples(st.floats(0, 20_000), st.integers(0, 50)), max_size=60))
def test_write_budget_never_undercounts_a_day(steps: list[tuple[float, int]]) -> None:
    budget, now, log = WriteBudget(1000), 0.0, list[tuple[float, int]]()
    for wait, nbytes in steps:
        now += wait
        budget.spend(nbytes, now)
        log.append((now, nbytes))
        exact = sum(n for at, n in log if at > now - DAY_S)
        longer = sum(n for at, n in log if at > now - DAY_S - 900)
        assert exact <= budget.spent(now) <= longer


def test_doubling_depth_is_where_attention_costs_as_much_as_the_rest() -> None:
    assert doubling_depth(LLAMA) == 6 * 4096 / 64
