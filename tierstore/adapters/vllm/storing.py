"""Pages on their way out of the engine's blocks: collected, put a bounded number a step, fenced against reuse.

A block may be overwritten once vLLM has given it to somebody else. What still waits then is given up; what a copy
already reads is waited for by the worker, before the step that overwrites it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from tierstore.store import TierStore
    from tierstore.types import PageKey

MOST_A_STEP = 1024
"""Pages put in one step at most: some milliseconds of the scheduler's time."""


class _Page(NamedTuple):
    key: PageKey
    parent: PageKey | None


class Storing:
    """Pages by the block that holds them."""

    def __init__(self, store: TierStore) -> None:
        self.busy: set[int] = set()
        """Blocks that the store may read."""
        self._store = store
        self._collected: dict[int, _Page] = {}

    @property
    def waiting(self) -> bool:
        """Whether pages wait to be put, or to be copied out."""
        return bool(self._collected or self.busy)

    def add(self, keys: Sequence[PageKey], blocks: Sequence[int], parents: Sequence[PageKey | None]) -> None:
        """These blocks hold these pages once the coming step has run, until they are reused. ``parents``: the page
        before each.
        """
        for key, block, parent in zip(keys, blocks, parents, strict=True):
            self._collected.pop(block, None)
            self._collected[block] = _Page(key, parent)

    def reused(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """These blocks have a new owner. Those out of which copies are under way: they must end before it writes."""
        fresh = set(blocks)
        for block in fresh & self._collected.keys():
            del self._collected[block]
        held = sorted(fresh & self.busy)
        if not held:
            return ()
        reading = self._store.withdraw(held)
        self.busy.difference_update(set(held) - set(reading))
        return tuple(reading)

    def put(self, loading: Set[int]) -> None:
        """Puts what may be put now: not out of blocks that are still being read, or that loads are about to write."""
        ready = [b for b in self._collected if b not in self.busy and b not in loading][:MOST_A_STEP]
        self._put([(block, self._collected.pop(block)) for block in ready])

    def returned(self, blocks: Iterable[int]) -> None:
        """The store reads these no more."""
        self.busy.difference_update(blocks)

    def forget(self) -> None:
        """What was not copied out by now is not wanted any more."""
        self._collected.clear()
        held = sorted(self.busy)
        self.busy = set(self._store.withdraw(held))

    def check(self, writing: Set[int]) -> None:
        """AssertionError if a block is read by a copy out while a load writes it."""
        both = self.busy & writing
        if both:
            raise AssertionError(f"blocks {sorted(both)[:3]} are being copied out and loaded into")

    def _put(self, ready: Sequence[tuple[int, _Page]]) -> None:
        if not ready:
            return
        blocks = [block for block, _ in ready]
        keys, parents = [page.key for _, page in ready], [page.parent for _, page in ready]
        self._store.put(keys, blocks, parents=parents)
        self.busy.update(blocks)
