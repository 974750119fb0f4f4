"""Saves pages from the engine's blocks: collects the blocks that a step fills, and decides when to copy them.

Each block that a step fills is collected once, while the request still owns it. In each step, a limited number of
the collected blocks is put into the store. vLLM may reassign a block to another request, which overwrites it. If the
block has not been put by then, it is not stored. If a copy is reading the block, the worker waits for the copy before
the step. Where vLLM overwrites blocks before the worker can wait, blocks are pinned in vLLM's pool until their copies
have ended.

Recurrent states are collected only when vLLM offers them, together with their block and number of tokens. The block
table alone does not tell which of its blocks have a state, or after which token.

A hit needs blocks of a sliding window only at the end of the hit. Blocks of windows are therefore stored only before
tokens at which hits are likely to end: the end of the prompt, the end of the request, and the token up to
which the request shares its prefix with earlier requests. vLLM's own cache keeps the same blocks
(``reachable_block_mask``), except that it keeps none at the end of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from tierstore.adapters.vllm.kv_groups import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence, Set

    from tierstore.adapters.vllm.events import Events
    from tierstore.adapters.vllm.kv_groups import Group, Groups
    from tierstore.adapters.vllm.requests import RequestState, Step
    from tierstore.store import TierStore
    from tierstore.types import PageKey

MOST_A_STEP = 2048
"""Maximum number of pages put per step, which takes about 10 to 20 ms of the scheduler's time.

A step that computes 32,768 tokens fills as many blocks of 16 tokens. If fewer pages were put, vLLM could reassign some
blocks before they are put.
"""


class _Page(NamedTuple):
    key: PageKey
    parent: PageKey | None


class Pins(Protocol):
    """The methods of ``compat.BlockPins``, which prevent vLLM from reassigning blocks."""

    def pin(self, blocks: Iterable[int]) -> None:
        """Prevent vLLM from reassigning these blocks."""
        ...

    def unpin(self, blocks: Iterable[int]) -> None:
        """Undo one ``pin`` of each block. vLLM may reassign a block once every ``pin`` of it has been undone."""
        ...


class Stores:
    """Collects full blocks, and puts them into the store as pages.

    Args:
        store: The store.
        groups: The KV groups of the model.
        events: Records all pages that are collected. None if events are disabled.
        pins: Pins blocks while the store reads them. If None, a step waits for copies of blocks that it overwrites.
    """

    def __init__(
        self, store: TierStore, groups: Groups, events: Events | None, pins: Pins | None = None
    ) -> None:
        self.busy: set[int] = set()
        """Blocks that the store may read."""
        self._store = store
        self._groups = groups
        self._events = events
        self._pins = pins
        self._collected: dict[int, _Page] = {}
        self._tails: dict[int, _Page] = {}
        """Blocks collected before they are full, for hits inside a block. They may be collected again when full."""

    @property
    def waiting(self) -> bool:
        """Return whether pages have yet to be put into the store, or the store is still reading blocks."""
        return bool(self._collected or self._tails or self.busy)

    def follow(self, known: RequestState, step: Step) -> None:
        """Collect the blocks that will be full once the step has run, and the states that vLLM offers."""
        if step.first:
            positional = [group for group in self._groups.all if not group.kind.handed_over]
            known.collected = {g.number: self._stored(known, g, step.computed) for g in positional}
            tokens = known.request.num_tokens
            known.ends = self._groups.ends((tokens - 1, tokens, known.shared, step.computed))
        end = step.computed + step.scheduled
        self.collect(known, step.tables, step.computed, end)
        for group in self._groups.states:
            for number, block, tokens in step.offers:
                if number == group.number and block != NULL_BLOCK and 0 < tokens <= end:
                    self._collect_state(known, group, block, tokens)
        if self._groups.tail_unit and step.offers:
            self._collect_tails(known, step)

    def collect(
        self, known: RequestState, tables: Sequence[Sequence[int]], before: int, computed: int
    ) -> None:
        """Collect the full blocks of the first ``computed`` tokens, as far as their hashes are known.

        Tokens that were sampled but not reported have no hash. In a windowed group, blocks that were no longer
        needed at token ``before``, where the step started, are skipped, because they may have been reassigned.
        """
        if self._groups.prompts_only:
            computed = min(computed, known.request.num_prompt_tokens)
        for group in self._groups.all:
            if group.kind.handed_over:
                continue
            table = tables[group.number]
            start = max(known.collected.get(group.number, 0), group.first_needed(before))
            full = min(len(table), computed // group.block_size)
            if full <= start:
                continue
            keys = known.chains[group.number].first(full)
            if start < len(keys):
                wanted = [i for i in range(start, len(keys)) if self._groups.reachable(group, i, known.ends)]
                self._collect(known, group, table, keys, wanted)
                known.collected[group.number] = len(keys)

    def ended(self, known: RequestState, tables: Sequence[Sequence[int]], computed: int) -> None:
        """Collect the remaining blocks of a request that ended after ``computed`` tokens.

        They are the full blocks that were not collected before, and the blocks in the windows at the request's end.
        """
        self.collect(known, tables, computed, computed)
        groups = self._groups
        positional = [group for group in groups.all if not group.kind.handed_over]
        lengths = [known.collected.get(group.number, 0) * group.block_size for group in positional]
        ends = groups.ends([min(lengths, default=0)])
        left = {
            group: [
                number
                for number in range(group.first_needed(min(ends)), max(ends) // group.block_size)
                if groups.reachable(group, number, ends) and not groups.reachable(group, number, known.ends)
            ]
            for group in positional
            if group.kind.sparse
        }
        for group, numbers in left.items():
            table = tables[group.number]
            if any(number >= len(table) or table[number] == NULL_BLOCK for number in numbers):
                return  # vLLM has freed a part of a window, or preempted the request, so the window is not complete
        for group, numbers in left.items():
            keys = known.chains[group.number].first(max(ends) // group.block_size)
            self._collect(known, group, tables[group.number], keys, numbers)

    def add(self, keys: Sequence[PageKey], blocks: Sequence[int], parents: Sequence[PageKey | None]) -> None:
        """Record that these blocks will contain these pages after the next step, until the blocks are reused.

        ``parents`` contains, for each page, the key of its parent or None.
        """
        for key, block, parent in zip(keys, blocks, parents, strict=True):
            self._collected.pop(block, None)
            self._collected[block] = _Page(key, parent)

    def reused(self, blocks: Iterable[int]) -> tuple[int, ...]:
        """Record that blocks were reassigned. Return those of them that copies are still reading.

        These copies must complete before the blocks are overwritten.
        """
        fresh = set(blocks)
        for collected in (self._collected, self._tails):
            for block in fresh & collected.keys():
                del collected[block]
        held = sorted(fresh & self.busy)
        if not held:
            return ()
        reading = self._store.withdraw(held)
        self.returned(set(held) - set(reading))
        return tuple(reading)

    def put(self, loading: Set[int]) -> None:
        """Put at most ``MOST_A_STEP`` collected pages into the store.

        Leave out blocks that copies are still reading, and blocks that loads will write (``loading``).
        """
        for collected in (self._tails, self._collected):
            ready = [b for b in collected if b not in self.busy and b not in loading][:MOST_A_STEP]
            self._put([(block, collected.pop(block)) for block in ready])

    def returned(self, blocks: Iterable[int]) -> None:
        """Record that the store no longer reads these blocks, and unpin them."""
        free = self.busy.intersection(blocks)
        self.busy -= free
        if self._pins is not None and free:
            self._pins.unpin(sorted(free))

    def forget(self) -> None:
        """Discard all collected pages that have not been put into the store yet."""
        self._collected.clear()
        self._tails.clear()

    def check(self, writing: Set[int]) -> None:
        """Raise AssertionError if a copy reads a block while a load writes it."""
        both = self.busy & writing
        if both:
            raise AssertionError(f"blocks {sorted(both)[:3]} are being saved and loaded at the same time")

    def _put(self, ready: Sequence[tuple[int, _Page]]) -> None:
        if not ready:
            return
        blocks = [block for block, _ in ready]
        keys, parents = [page.key for _, page in ready], [page.parent for _, page in ready]
        if self._pins is not None:
            self._pins.pin(blocks)
        self._store.put(keys, blocks, parents=parents)
        self.busy.update(blocks)

    def _stored(self, known: RequestState, group: Group, computed: int) -> int:
        """Return how many leading blocks are already stored, or are no longer needed after ``computed`` tokens."""
        first, full = group.first_needed(computed), computed // group.block_size
        chain = known.chains[group.number]
        if not group.partial and full:
            last = chain.at(full - 1)
            if last is not None and self._store.has_prefix(last):
                return full  # without a lookup of each block, which would delay the step
        there = chain.between(first, full)
        return first + self._store.match(there).num_pages

    def _collect(
        self,
        known: RequestState,
        group: Group,
        table: Sequence[int],
        keys: Sequence[PageKey],
        wanted: Sequence[int],
    ) -> None:
        """Collect the blocks with the numbers in ``wanted``, except those that the group has freed."""
        held = [i for i in wanted if not (group.partial and table[i] == NULL_BLOCK)]
        self.add(
            [keys[i] for i in held],
            [table[i] for i in held],
            [self._parent(known, group, keys, i) for i in held],
        )
        if self._events is not None:
            for run in _consecutive(wanted):
                self._events.learn(known.request, keys[run.start : run.stop], run.start, group)

    def _collect_state(self, known: RequestState, group: Group, block: int, tokens: int) -> None:
        """Collect the state after ``tokens`` tokens, unless no hit can end there."""
        number = tokens // group.block_size - 1
        key = None if tokens % self._groups.unit else known.chains[group.number].at(number)
        if key is None:
            return
        self.add([key], [block], [self._parent(known, group, [], number)])
        if self._events is not None:
            self._events.learn(known.request, [key], number, group)

    def _collect_tails(self, known: RequestState, step: Step) -> None:
        """Collect the states that vLLM offers inside a block, and the blocks with full attention that end there.

        Such a block is stored as it is now, and again when it is full. Pages inside a block have no events.
        """
        groups, spine = self._groups, self._groups.spine
        for tokens in {tokens for _, _, tokens in step.offers}:
            inside = tokens % groups.unit and not tokens % groups.tail_unit
            if not inside or tokens > step.computed + step.scheduled:
                continue
            number = tokens // groups.unit
            blocks = {group: block for group, block, at in step.offers if at == tokens}
            for group in groups.all:
                table = step.tables[group.number]
                if not group.partial and number < len(table):
                    blocks[group.number] = table[number]
            if any(blocks.get(group.number, NULL_BLOCK) == NULL_BLOCK for group in groups.all):
                continue
            parent = known.chains[spine.number].at(number - 1) if spine is not None and number else None
            for group in groups.all:
                for key in known.chains[group.number].ending([tokens // groups.tail_unit]):
                    self._tails[blocks[group.number]] = _Page(key, parent)

    def _parent(
        self, known: RequestState, group: Group, keys: Sequence[PageKey], number: int
    ) -> PageKey | None:
        """Return the key of the page that page ``number`` of the group depends on, or None.

        With full attention, this is the previous page. For a window or a state, it is the page with full attention
        that ends at the same token. This way, windows from which no request continues are evicted first, and no
        page depends on an earlier page of its window group.
        """
        spine = self._groups.spine
        if not group.partial:
            return keys[number - 1] if number else None
        if spine is None:
            return None
        end = (number + 1) * group.block_size // spine.block_size
        return known.chains[spine.number].at(end - 1) if end else None


def _consecutive(numbers: Sequence[int]) -> list[range]:
    """Return the runs of consecutive numbers in an ascending sequence."""
    runs: list[range] = []
    for number in numbers:
        if runs and runs[-1].stop == number:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs
