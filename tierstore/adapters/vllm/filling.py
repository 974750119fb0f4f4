"""Which blocks a step fills: they are handed on to be stored, each once, while they are the request's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierstore.adapters.vllm.kv_groups import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.events import Events
    from tierstore.adapters.vllm.kv_groups import Group, Groups
    from tierstore.adapters.vllm.requests import Known, Step
    from tierstore.adapters.vllm.storing import Storing
    from tierstore.store import TierStore
    from tierstore.types import PageKey


class Filling:
    """Follows the requests that run. ``events``: is told of what is to be stored."""

    def __init__(self, store: TierStore, storing: Storing, groups: Groups, events: Events | None) -> None:
        self._store = store
        self._storing = storing
        self._groups = groups
        self._events = events

    def follow(self, known: Known, step: Step) -> None:
        """Blocks that are full once the step has run are to be stored."""
        if step.first:
            known.collected = [self._stored(known, group, step.computed) for group in self._groups.all]
        self.collect(known, step.tables, step.computed, step.computed + step.scheduled)

    def collect(self, known: Known, tables: Sequence[Sequence[int]], before: int, computed: int) -> None:
        """Full blocks whose hashes are known: a token that was sampled but not told yet has none.

        What a window did not need any more at token ``before``, where the step began, may be somebody else's by now.
        """
        for group, table in zip(self._groups.all, tables, strict=True):
            start = max(known.collected[group.number], group.first_needed(before))
            full = min(len(table), computed // group.block_size)
            if full <= start:
                continue
            keys = known.chains[group.number].first(full)
            if start < len(keys):
                self._add(known, group, table, start, keys)
                known.collected[group.number] = len(keys)

    def _stored(self, known: Known, group: Group, computed: int) -> int:
        """Blocks up to the first that the request holds and the store does not."""
        first = group.first_needed(computed)
        there = known.chains[group.number].first(computed // group.block_size)[first:]
        return first + self._store.match(there).num_pages

    def _add(
        self, known: Known, group: Group, table: Sequence[int], start: int, keys: Sequence[PageKey]
    ) -> None:
        held = [i for i in range(start, len(keys)) if not (group.partial and table[i] == NULL_BLOCK)]
        self._storing.add(
            [keys[i] for i in held],
            [table[i] for i in held],
            [self._parent(known, group, keys, i) for i in held],
        )
        if self._events is not None:
            self._events.learn(known.request, keys[start:], start, group)

    def _parent(self, known: Known, group: Group, keys: Sequence[PageKey], number: int) -> PageKey | None:
        """The page without which this one is of no use.

        Of full attention the one before. Of a window the page of full attention that ends with it: where room is
        wanted windows that nobody goes on from leave first, and no page waits for those before it in its group.
        """
        spine = self._groups.spine
        if not group.partial:
            return keys[number - 1] if number else None
        if spine is None:
            return None
        end = (number + 1) * group.block_size // spine.block_size
        return known.chains[spine.number].at(end - 1) if end else None
