"""Test ``HostCache`` with random calls, and test that planted bugs are found.

The caller of the machine overwrites all rows that it owns in every step. So a row that changes hands while somebody
copies from it, or that two pages share, shows wrong content.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.support import lanes, planting
from tests.support.planting import SEARCH, Bug
from tierstore.adapters.sglang import host_cache
from tierstore.errors import ConfigError

ROWS = 8
KEPT = 3
KEYS = st.integers(0, 5)
CALLS = st.integers(0, 2)


def key(number: int) -> bytes:
    return bytes([number]) * 36


class Machine(RuleBasedStateMachine):
    code: ModuleType = host_cache

    def __init__(self) -> None:
        super().__init__()
        self.cache = self.code.HostCache(range(ROWS - KEPT, ROWS))
        self.mine = [*range(ROWS - KEPT)]
        self.memory: list[Any] = ["nothing"] * ROWS
        self.held: list[int] = []
        """The model: pages, least recently used first."""
        self.pinned: list[tuple[int, int]] = []
        """Pins, each as a row and the number of its page."""
        self.calls: dict[int, int] = {}
        """The last call that used each page."""
        self.leaving: set[int] = set()
        """Rows whose pages were removed while they were pinned."""

    @rule(number=KEYS, call=CALLS, pinned=st.booleans())
    def keep(self, number: int, call: int, pinned: bool) -> None:
        row = self.mine.pop()
        self.memory[row] = number
        other = self.cache.keep(key(number), row, call, pinned=pinned)
        self.mine.append(other)
        if number in self.held:
            assert other == row
            return
        if len(self.held) + len(self.leaving) == KEPT:
            in_use = {each for row, each in self.pinned if row not in self.leaving}
            victim = next((each for each in self.held if each not in in_use), None)
            if victim is None or self.calls[victim] == call != 0:
                assert other == row
                return
            self.held.remove(victim)
        assert other != row
        self.held.append(number)
        self.calls[number] = call
        if pinned:
            self.pinned.append((row, number))

    @rule(numbers=st.lists(KEYS, max_size=3), call=CALLS)
    def pin(self, numbers: list[int], call: int) -> None:
        found = self.cache.pin([key(number) for number in numbers], call)
        assert sorted(found) == [index for index, number in enumerate(numbers) if number in self.held]
        self.pinned += [(row, numbers[index]) for index, row in found.items()]
        self._touch(numbers, call)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        row, _ = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        assert self.cache.owns(row)
        self.cache.unpin(row)
        if row not in [each for each, _ in self.pinned]:
            self.leaving.discard(row)

    @rule(numbers=st.lists(KEYS, max_size=3), call=CALLS)
    def use(self, numbers: list[int], call: int) -> None:
        self.cache.used([key(number) for number in numbers], call)
        self._touch(numbers, call)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.held.clear()
        self.leaving = {row for row, _ in self.pinned}

    @invariant()
    def rows_are_whole(self) -> None:
        for row in self.mine:
            self.memory[row] = "reused"
        assert sorted([*self.mine, *self.cache.rows()]) == [*range(ROWS)]
        assert self.cache.check() == []
        for row, number in self.pinned:
            assert self.memory[row] == number
        assert len(self.cache) == len(self.held)
        for number in self.held:
            assert key(number) in self.cache
            assert self.memory[self.cache._pages[key(number)].row] == number

    def _touch(self, numbers: list[int], call: int) -> None:
        for number in reversed(numbers):
            if number in self.held:
                self.held.remove(number)
                self.held.append(number)
                self.calls[number] = call


BUGS = [
    Bug(
        "a page that is copied is evicted",
        "                page.pins += 1\n                self._victims.withdraw(page.rank)\n",
        "                page.pins += 1\n",
    ),
    Bug(
        "a copy is no use",
        "                page.rank = self._order.touch(page.key, page.rank)\n                found",
        "                found",
    ),
    Bug("a page that is written is evicted", "        if not pinned:\n", "        if True:\n"),
    Bug("a second pin is forgotten", "        if page.pins:\n            return\n", ""),
    Bug(
        "a cleared row is reused at once",
        "                page.is_held = False\n",
        "                page.is_held = False\n                self._unused.append(page.row)\n",
    ),
    Bug(
        "a cleared row is never reused",
        "            del self._by_row[row]\n            self._unused.append(row)\n",
        "            del self._by_row[row]\n",
    ),
    Bug(
        "an evicted page is still found",
        "        del self._pages[page.key], self._by_row[page.row]\n",
        "        del self._by_row[page.row]\n",
    ),
    Bug(
        "use does not count",
        "page.rank = self._order.touch(page.key, page.rank)\n                self._victims.shift",
        "self._victims.shift",
    ),
    Bug(
        "the first page of a request is evicted first",
        "for key in reversed(keys):\n            page = self._pages",
        "for key in keys:\n            page = self._pages",
    ),
    Bug("a page is evicted for another one of its call", " or self._pages[victim].call == call != 0", ""),
    Bug(
        "a use by a call is forgotten",
        "page.call = call\n                self._victims.withdraw",
        "self._victims.withdraw",
    ),
    Bug("a copy by a call is forgotten", "page.call = call\n                page.pins", "page.pins"),
    Bug("a page takes two rows", "        if key in self._pages:\n            return row\n", ""),
]


def test_rows_in_use_never_change_hands_and_the_least_recently_used_page_is_evicted() -> None:
    run_state_machine_as_test(
        Machine, settings=settings(max_examples=lanes.examples(60, 500), stateful_step_count=40)
    )


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_machine_finds(bug: Bug) -> None:
    class Planted(Machine):
        code = planting.load(host_cache, bug)

    with pytest.raises(Exception):  # noqa: B017, PT011
        run_state_machine_as_test(Planted, settings=SEARCH)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [("policy", "fifo", "lru"), ("codec", "int8", "none"), ("pin", "always", "auto or never")],
)
def test_settings_without_a_meaning_below_another_host_tier_are_refused(
    name: str, value: str, allowed: str
) -> None:
    config = {"host": {"capacity": "1MiB", name: value}}
    with pytest.raises(
        ConfigError, match=f"host.{name} must be {allowed} for a host tier below SGLang's, got {value}"
    ):
        host_cache.host_and_nvme(config, "SGLang's")
