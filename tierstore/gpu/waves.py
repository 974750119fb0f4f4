"""In which order the layer groups of many loads are copied. No bytes, no thread, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Job = TypeVar("Job")


@dataclass(slots=True)
class _Entry(Generic[Job]):
    job: Job
    size: int


class _Row(Generic[Job]):
    """Jobs that get the same group next, in the order in which they came, and their size together."""

    def __init__(self) -> None:
        self.entries: deque[_Entry[Job]] = deque()
        self.size = 0

    def add(self, entry: _Entry[Job]) -> None:
        self.entries.append(entry)
        self.size += entry.size

    def pop(self) -> _Entry[Job]:
        entry = self.entries.popleft()
        self.size -= entry.size
        return entry

    def remove(self, job: Job) -> int:
        left = [entry for entry in self.entries if entry.job is not job]
        removed = len(self.entries) - len(left)
        self.entries, self.size = deque(left), sum(entry.size for entry in left)
        return removed


class Waves(Generic[Job]):
    """Jobs of ``groups`` layer groups each: all jobs of a wave get a group before any of them gets the next.

    A new job joins the wave under way, from its first group on, until half of the groups have been handed out of a job
    in it; then it waits for the next wave, so that nothing is overtaken for ever. Jobs get their last group in the
    order in which they came. What it costs does not depend on how many wait. Not thread-safe.
    """

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._wave: list[_Row[Job]] = [_Row() for _ in range(groups)]
        """By the group that comes next: jobs that came sooner are never behind."""
        self._later: _Row[Job] = _Row()
        self._handed_out = 0
        """Groups, of the job of the wave that was furthest."""
        self._size = 0
        """Jobs of the wave."""

    def __len__(self) -> int:
        """Jobs that have groups to come."""
        return self._size + len(self._later.entries)

    @property
    def open(self) -> bool:
        """Whether a new job would join the wave under way."""
        return not self._later.entries and self._handed_out * 2 <= self._groups

    def add(self, job: Job, size: int) -> None:
        """``size``: of one group of the job, in the caller's unit."""
        if self.open:
            self._size += 1
            self._wave[0].add(_Entry(job, size))
        else:
            self._later.add(_Entry(job, size))

    def first(self) -> tuple[Job, int]:
        """The first of those that ``take`` gives, and the group. IndexError if empty."""
        row, group = self._at_hand()
        return row.entries[0].job, group

    def size_at_hand(self) -> int:
        """Of all jobs together that could get the group that ``first`` gets. IndexError if empty."""
        return self._at_hand()[0].size

    def take(self, most: int) -> tuple[list[Job], int]:
        """The next jobs, at least one, of ``most`` size together, and the group they get now. IndexError if empty."""
        row, group = self._at_hand()
        if row is self._later:
            self._size = len(row.entries)
            self._wave[0], self._later = row, _Row()
        taken = [row.pop()]
        total = taken[0].size
        while row.entries and total + row.entries[0].size <= most:
            taken.append(row.pop())
            total += taken[-1].size
        self._handed_out = max(self._handed_out, group + 1)
        if group + 1 < self._groups:
            for entry in taken:
                self._wave[group + 1].add(entry)
        else:
            self._leave(len(taken))
        return [entry.job for entry in taken], group

    def take_whole(self) -> Job:
        """The only job, none of whose groups was handed out: all of its groups at once."""
        _, group = self._at_hand()
        assert not group
        [job] = self.clear()
        return job

    def remove(self, job: Job) -> None:
        """The job gets no more groups, if it was to get any."""
        self._leave(sum(row.remove(job) for row in self._wave))
        self._later.remove(job)

    def clear(self) -> list[Job]:
        """Removes all jobs: these, in the order in which they came."""
        rows = [*reversed(self._wave), self._later]
        jobs = [entry.job for row in rows for entry in row.entries]
        self._wave, self._later = [_Row() for _ in self._wave], _Row()
        self._leave(self._size)
        return jobs

    def _at_hand(self) -> tuple[_Row[Job], int]:
        """Whose turn it is, and for which group. IndexError if empty."""
        for group, row in enumerate(self._wave):
            if row.entries:
                return row, group
        if not self._later.entries:
            raise IndexError("no job is waiting")
        return self._later, 0

    def _leave(self, jobs: int) -> None:
        self._size -= jobs
        if not self._size:
            self._handed_out = 0
