"""Which slots of the extent files are free, used, or still read: bookkeeping only, no file, no catalogue.

A slot is taken before it is written and freed once no committed entry names it. One that a reader has pinned comes
back with its last pin. All methods may be called from any thread.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tierstore.errors import IntegrityError
from tierstore.nvme.direct import BLOCK


class Place(NamedTuple):
    """A slot: number of its extent file (from 1), and its first block there."""

    extent: int
    block: int


class Slots:
    """Slots of ``slot_nbytes`` (whole blocks), extent by extent; the lowest free ones are taken first."""

    def __init__(self, slot_nbytes: int) -> None:
        self._blocks = slot_nbytes // BLOCK
        self._lock = threading.Lock()
        self._used: dict[int, NDArray[np.bool_]] = {}
        self._pins: Counter[Place] = Counter()
        self._waiting: set[Place] = set()
        self._num_free = 0

    @property
    def total(self) -> int:
        """Slots of all extents."""
        with self._lock:
            return sum(len(used) for used in self._used.values())

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        with self._lock:
            return self._num_free

    @property
    def num_waiting(self) -> int:
        """Slots that come back with their last pin."""
        with self._lock:
            return len(self._waiting)

    def add_extent(self, number: int, slots: int) -> None:
        """A new extent file of so many free slots."""
        with self._lock:
            self._used[number] = np.zeros(slots, dtype=np.bool_)
            self._num_free += slots

    def drop_extent(self, number: int) -> None:
        """Forget an extent none of whose slots is used or pinned."""
        with self._lock:
            used = self._used.pop(number)
            self._num_free -= len(used) - int(used.sum())

    def mark(self, number: int, blocks: NDArray[np.int64]) -> None:
        """At open: the slots of an extent that hold records. IntegrityError for one outside, or marked before."""
        used = self._used.get(number)
        index, rest = np.divmod(blocks, self._blocks)
        if used is None or rest.any() or index.min() < 0 or index.max() >= len(used):
            raise IntegrityError(f"a record outside of extent file {number}")
        if used[index].any() or len(np.unique(index)) != len(index):
            raise IntegrityError(f"two records in one slot of extent file {number}")
        used[index] = True
        self._num_free -= len(index)

    def has(self, place: Place) -> bool:
        """Whether there is such a slot, used or not."""
        index, rest = divmod(place.block, self._blocks)
        used = self._used.get(place.extent)
        return used is not None and not rest and index < len(used)

    def take(self, count: int) -> list[Place]:
        """``count`` free slots, neighbours next to each other; fewer if there are not so many."""
        taken: list[Place] = []
        with self._lock:
            for number in sorted(self._used):
                if len(taken) == count or not self._num_free:
                    break
                used = self._used[number]
                found = np.flatnonzero(~used)[: count - len(taken)]
                used[found] = True
                self._num_free -= len(found)
                taken += [Place(number, int(index) * self._blocks) for index in found]
        return taken

    def free(self, places: Iterable[Place]) -> None:
        """No committed entry names these any more: they may be taken again, pinned ones after their last pin."""
        with self._lock:
            for place in places:
                if self._pins[place] > 0:
                    self._waiting.add(place)
                else:
                    del self._pins[place]
                    self._give_back(place)

    @contextmanager
    def pinned(self, place: Place) -> Iterator[None]:
        """While this lasts the slot is not taken again. To be held before the entry is looked at for the last time."""
        with self._lock:
            self._pins[place] += 1
        try:
            yield
        finally:
            with self._lock:
                self._pins[place] -= 1
                if not self._pins[place]:
                    del self._pins[place]
                    if place in self._waiting:
                        self._waiting.remove(place)
                        self._give_back(place)

    def _give_back(self, place: Place) -> None:
        self._used[place.extent][place.block // self._blocks] = False
        self._num_free += 1
