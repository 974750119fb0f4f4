"""In which order the layer groups of many loads are copied. No bytes, no thread, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Job = TypeVar("Job")


@dataclass(slots=True)
class _Entry(Generic[Job]):
    job: Job
    size: int
    group: int = 0
    """Comes next."""


class Waves(Generic[Job]):
    """Jobs of ``groups`` layer groups each: all jobs of a wave get a group before any of them gets the next.

    A new job joins the wave under way, from its first group on, until half of the groups have been handed out of a job
    in it; then it waits for the next wave, so that nothing is overtaken for ever. Jobs get their last group in the
    order in which they came. Not thread-safe.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._wave: list[_Entry[Job]] = []
        self._later: deque[_Entry[Job]] = deque()
        self._handed_out = 0
        """Groups, of the job of the wave that was furthest."""

    def __len__(self) -> int:
        """Jobs that have groups to come."""
        return len(self._wave) + len(self._later)

    @property
    def open(self) -> bool:
        """Whether a new job would join the wave under way."""
        return not self._later and self._handed_out * 2 <= self._groups

    def add(self, job: Job, size: int) -> None:
        """``size``: of one group of the job, in the caller's unit."""
        (self._wave if self.open else self._later).append(_Entry(job, size))

    def first(self) -> tuple[Job, int]:
        """The first of those that ``take`` gives, and the group. IndexError if empty."""
        entries = self._wave or self._later
        if not entries:
            raise IndexError("no job is waiting")
        entry = min(entries, key=lambda entry: entry.group)
        return entry.job, entry.group

    def size_at_hand(self) -> int:
        """Of all jobs together that could get the group that ``first`` gets. IndexError if empty."""
        _, group = self.first()
        return sum(entry.size for entry in self._wave or self._later if entry.group == group)

    def take(self, most: int) -> tuple[list[Job], int]:
        """The next jobs, at least one, of ``most`` size together, and the group they get now. IndexError if empty."""
        if not self._wave:
            self._wave, self._later = list(self._later), deque()
        group = min((entry.group for entry in self._wave), default=-1)
        taken: list[_Entry[Job]] = []
        total = 0
        for entry in self._wave:
            if entry.group == group and (not taken or total + entry.size <= most):
                taken.append(entry)
                total += entry.size
            elif taken:
                break
        if not taken:
            raise IndexError("no job is waiting")
        for entry in taken:
            entry.group += 1
        self._handed_out = max(self._handed_out, group + 1)
        self._drop(lambda entry: entry.group == self._groups)
        return [entry.job for entry in taken], group

    def take_whole(self) -> Job:
        """The only job, none of whose groups was handed out: all of its groups at once."""
        [entry] = self._wave or self._later
        assert not entry.group
        self.clear()
        return entry.job

    def remove(self, job: Job) -> None:
        """The job gets no more groups, if it was to get any."""
        self._drop(lambda entry: entry.job is job)
        self._later = deque(entry for entry in self._later if entry.job is not job)

    def clear(self) -> list[Job]:
        """Removes all jobs: these."""
        jobs = [entry.job for entry in (*self._wave, *self._later)]
        self._drop(lambda _: True)
        self._later.clear()
        return jobs

    def _drop(self, done: Callable[[_Entry[Job]], bool]) -> None:
        self._wave = [entry for entry in self._wave if not done(entry)]
        if not self._wave:
            self._handed_out = 0
