"""Save pages out of the engine's blocks: collect the blocks that a step fills, and choose when to copy them.

Each block that a step fills is collected once, while it belongs to the request. A limited number of blocks is
put in each step. vLLM may give a block to another request, which overwrites it. A page that has not been put
by then is given up. If a copy already reads the block, the worker waits for the copy before the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tierstore.adapters.vllm.kv_groups import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from tierstore.adapters.vllm.events import Events
    from tierstore.adapters.vllm.kv_groups import Group, Groups
    from tierstore.adapters.vllm.requests import RequestState, Step
    from tierstore.store import TierStore
    from tierstore.types import PageKey

MOST_A_STEP = 1024
"""Most pages put in one step: a few milliseconds of the scheduler's time."""


class _Page(NamedTuple):
    key: PageKey
    parent: PageKey | None


class Stores:
    """Pages to be stored, by the block that holds them. ``events`` records them."""

    def __init__(self, store: TierStore, groups: Groups, events: Events | None) -> None:
        self.busy: set[int] = set()
        """Blocks that the store may read."""
        self._store = store
        self._groups = groups
        self._events = events
        self._collected: dict[int, _Page] = {}

    @property
    def waiting(self) -> bool:
        """Whether pages are still to be put, or the store still reads blocks."""
        return bool(self._collected or self.busy)

    def follow(self, known: RequestState, step: Step) -> None:
        """Collect the blocks that are full once the step has run."""
        if step.first:
            known.collected = [self._stored(known, group, step.computed) for group in self._groups.all]
        self.collect(known, step.tables, step.computed, step.computed + step.scheduled)

    def collect(
        self, known: RequestState, tables: Sequence[Sequence[int]], before: int, computed: int
    ) -> None:
        """Collect full blocks whose hashes are known. Tokens that were sampled but not reported have no hash.

        Blocks before those that a window needed at token ``before``, where the step began, are left out,
        because they may have a new owner by now.
        """
        for group, table in zip(self._groups.all, tables, strict=True):
            start = max(known.collected[group.number], group.first_needed(before))
            full = min(len(table), computed // group.block_size)
            if full <= start:
                continue
            keys = known.chains[group.number].first(full)
            if start < len(keys):
                self._collect(known, group, table, start, keys)
                known.collected[group.number] = len(keys)

    def add(self, keys: Sequence[PageKey], blocks: Sequence[int], parents: Sequence[PageKey | None]) -> None:
        """Note that these blocks hold these pages after the coming step, until they are reused.

        ``parents`` has the parent of each page.
        """
        for key, block, parent in zip(keys, blocks, parents, strict=True):
            self._collected.pop(block, None)
            self._collected[block] = _Page(key, parent)

    def reused(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Note that blocks have a new owner. Returns those that copies still read; they must end first."""
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
        """Put pages, except from blocks that copies still read or that loads will write."""
        ready = [b for b in self._collected if b not in self.busy and b not in loading][:MOST_A_STEP]
        self._put([(block, self._collected.pop(block)) for block in ready])

    def returned(self, blocks: Iterable[int]) -> None:
        """Note that the store no longer reads these blocks."""
        self.busy.difference_update(blocks)

    def forget(self) -> None:
        """Give up every page that has not been put yet."""
        self._collected.clear()

    def check(self, writing: Set[int]) -> None:
        """Raise AssertionError if a copy reads a block while a load writes it."""
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

    def _stored(self, known: RequestState, group: Group, computed: int) -> int:
        """Return the number of leading blocks that the store holds."""
        first = group.first_needed(computed)
        there = known.chains[group.number].first(computed // group.block_size)[first:]
        return first + self._store.match(there).num_pages

    def _collect(
        self, known: RequestState, group: Group, table: Sequence[int], start: int, keys: Sequence[PageKey]
    ) -> None:
        held = [i for i in range(start, len(keys)) if not (group.partial and table[i] == NULL_BLOCK)]
        self.add(
            [keys[i] for i in held],
            [table[i] for i in held],
            [self._parent(known, group, keys, i) for i in held],
        )
        if self._events is not None:
            self._events.learn(known.request, keys[start:], start, group)

    def _parent(
        self, known: RequestState, group: Group, keys: Sequence[PageKey], number: int
    ) -> PageKey | None:
        """Return the page without which this one is useless.

        With full attention it is the page before. For a window it is the page of full attention that ends with it,
        so that windows that no request continues from are evicted first, and no page depends on those before it in
        its group.
        """
        spine = self._groups.spine
        if not group.partial:
            return keys[number - 1] if number else None
        if spine is None:
            return None
        end = (number + 1) * group.block_size // spine.block_size
        return known.chains[spine.number].at(end - 1) if end else None
