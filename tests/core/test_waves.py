"""Tests of the order of layer groups: none is left out or repeated, and no job is overtaken indefinitely."""

from __future__ import annotations

from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import lanes
from tests.support.planting import SEARCH, Bug, load
from tierstore.gpu import copy_queue as module
from tierstore.gpu.copy_queue import Waves

Script = list[int | None]
"""The steps of a run. A number adds a job of that size, and None takes the next jobs."""

scripts = st.lists(st.one_of(st.none(), st.integers(1, 5)), max_size=40)


def run(waves_module: ModuleType, groups: int, most: int, script: Script) -> None:
    """Run a script and assert that the order of groups keeps every promise of ``Waves``."""
    waves = waves_module.Waves(groups)
    sizes: list[int] = []
    got: dict[int, int] = {}
    ended: list[int] = []
    next_wave: set[int] = set()
    furthest = 0
    for size in [*script, *[None] * (groups * len(script) + 1)]:
        left = [job for job, count in got.items() if count < groups]
        if next_wave.issuperset(left):
            next_wave.clear()
            furthest = 0
        if size is not None:
            if next_wave or 2 * furthest > groups:
                next_wave.add(len(sizes))
            waves.add(len(sizes), size)
            got[len(sizes)] = 0
            sizes.append(size)
            continue
        assert len(waves) == len(left)
        if not left:
            continue
        jobs, group = waves.take(most)
        assert jobs == sorted(set(jobs))
        assert len(jobs) == 1 or sum(sizes[job] for job in jobs) <= most
        for job in jobs:
            assert got[job] == group, "each job must get its groups in order, and each group once"
            got[job] += 1
        furthest = max(furthest, group + 1)
        assert next_wave.isdisjoint(jobs), "a job of the next wave overtakes earlier jobs"
        behind = [job for job in left if got[job] < group and job not in next_wave]
        assert not behind, "a group is taken before every job of the wave has had the previous group"
        ended += [job for job in jobs if got[job] == groups]
    assert ended == list(range(len(sizes))), "jobs must end in the order in which they were added"


@given(st.integers(1, 6), st.integers(1, 9), scripts)
@settings(max_examples=lanes.examples(150, 2000))
def test_every_job_gets_every_group_once_and_in_order(groups: int, most: int, script: Script) -> None:
    run(module, groups, most, script)


def test_new_job_catches_up_before_the_others_continue() -> None:
    waves: Waves[str] = Waves(4)
    waves.add("a", 1)
    assert waves.take(9) == (["a"], 0)
    assert waves.take(9) == (["a"], 1)
    waves.add("b", 1)
    assert [waves.take(9) for _ in range(4)] == [(["b"], 0), (["b"], 1), (["a", "b"], 2), (["a", "b"], 3)]


def test_late_job_and_those_behind_it_wait_for_the_next_wave() -> None:
    waves: Waves[str] = Waves(4)
    waves.add("a", 1)
    for _ in range(3):
        waves.take(9)
    waves.add("b", 1)
    assert waves.take(9) == (["a"], 3)
    waves.add("c", 1)
    assert waves.take(9) == (["b", "c"], 0)


def test_each_group_is_taken_for_as_many_jobs_as_fit_and_at_least_one() -> None:
    waves: Waves[str] = Waves(2)
    for name, size in (("a", 2), ("b", 2), ("c", 9)):
        waves.add(name, size)
    assert [waves.take(4) for _ in range(4)] == [(["a", "b"], 0), (["c"], 0), (["a", "b"], 1), (["c"], 1)]
    with pytest.raises(IndexError):
        waves.take(4)


def test_a_removed_job_receives_no_more_groups() -> None:
    waves: Waves[str] = Waves(2)
    waves.add("a", 1)
    waves.add("b", 1)
    waves.take(9)
    waves.remove("a")
    assert waves.take(9) == (["b"], 1)
    waves.add("c", 1)
    assert waves.take_whole() == "c"
    waves.add("d", 1)
    waves.add("e", 1)
    assert waves.clear() == ["d", "e"]
    assert not len(waves)


def test_a_job_that_has_had_a_group_is_not_handed_out_whole() -> None:
    waves: Waves[str] = Waves(2)
    waves.add("a", 1)
    waves.take(1)
    with pytest.raises(AssertionError):
        waves.take_whole()
    assert waves.take(1) == (["a"], 1)


BUGS = [
    Bug("the highest group comes first", "in enumerate(self._wave):", "in [*enumerate(self._wave)][::-1]:"),
    Bug("jobs join a wave at any time", "self._handed_out * 2 <= self._groups", "True"),
    Bug("a new job overtakes waiting jobs", "return not self._later.entries and", "return"),
    Bug("the last group is left out", "if group + 1 < self._groups:", "if group + 2 < self._groups:"),
    Bug(
        "a group is repeated",
        "self._wave[group + 1].add(entry)",
        "self._wave[group + (len(taken) < 3)].add(entry)",
    ),
    Bug("more pages are taken than fit", "total + row.entries[0].size <= most", "total <= most"),
    Bug("the newest job comes first", "self.entries.popleft()", "self.entries.pop()"),
    Bug("a wave never ends", "if not self._size:", "if self._size < 0:"),
    Bug("jobs that have ended stay counted", "self._size -= jobs", "self._size -= 0"),
]


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    planted = load(module, bug)

    @given(st.integers(1, 6), st.integers(1, 9), scripts)
    @settings(SEARCH, stateful_step_count=1)
    def hunt(groups: int, most: int, script: Script) -> None:
        run(planted, groups, most, script)

    with pytest.raises((AssertionError, IndexError)):
        hunt()
