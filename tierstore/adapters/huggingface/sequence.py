"""One sequence on a store: its block table, what each model has written, and when its pages are sealed.

    sealed pages     the store's, held by this sequence's lease, read-only; found by later requests
    private pages    its own, or shared with its forks: writable if not shared, given back on close

It knows tokens, keys and slots, but nothing of transformers. Feeding a token that the pages already hold at its
position writes nothing, so a fully stored prompt computes its last token without changing its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.adapters.huggingface.prefix import (
    ROLLBACK,
    Arrival,
    Holding,
    Tail,
    common_prefix,
    first_needed,
    open_prefix,
    prefixes_of,
)
from tierstore.adapters.huggingface.request import Terms
from tierstore.block_table import BlockTable, PrivateSlots
from tierstore.errors import StoreClosed
from tierstore.types import PageKey, Tier


class PageKeys:
    """The page keys of one sequence. Not thread-safe, like the sequence."""

    def __init__(self, terms: Terms, prompt: Sequence[int] = (), keys: Sequence[PageKey] = ()) -> None:
        """Begin with the ``prompt`` that the sequence was opened for, and the ``keys`` of its full pages."""
        self._terms = terms
        self._prompt = prompt
        self._of_prompt = keys
        self._made: list[PageKey] = []

    def to(self, stop: int, known: Sequence[int]) -> list[PageKey]:
        """Return the keys of the first ``stop`` pages of the ``known`` tokens, which fill them."""
        if len(self._made) < stop:
            tokens = known[: stop * self._terms.pages.page_size]
            if len(self._of_prompt) >= stop and tokens == self._prompt[: len(tokens)]:
                return list(self._of_prompt[:stop])
            self._made = self._terms.store.keys(tokens, salt=self._terms.salt, extra=self._terms.extra)
        return self._made[:stop]

    def cut(self, pages: int) -> None:
        """Forget the keys after the first ``pages``, because later tokens change."""
        del self._made[pages:]

    def copy(self) -> PageKeys:
        """Return the same for a fork."""
        other = PageKeys(self._terms, self._prompt, self._of_prompt)
        other._made = list(self._made)
        return other


@dataclass(slots=True)
class Written:
    """What one model has written: K/V of the first ``held`` tokens, of which the first ``len(tokens)`` are known."""

    held: int = 0
    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    """Where its last forward pass ended."""

    def cut(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens``."""
        self.held, self.fed = min(self.held, num_tokens), min(self.fed, num_tokens)
        del self.tokens[num_tokens:]


def agreed(models: Sequence[Written]) -> int:
    """Return the number of leading tokens that are known and whose K/V every model has written."""
    known = models[0].tokens
    stop = min(min(each.held, len(each.tokens)) for each in models)
    if all(each.tokens[:stop] == known[:stop] for each in models[1:]):
        return stop
    return min(stop, *(common_prefix(each.tokens, known) for each in models[1:]))


class PagedSequence:
    """A sequence that begins with the longest stored prefix of its prompt and grows page by page.

    Writing takes three steps, so that a batch can allocate space for all its sequences at once: ``begin`` says what is
    to be written, ``missing_slots`` and ``grow`` allocate, ``finish`` declares it written in all layers of a model. Not
    thread-safe.
    """

    def __init__(self, terms: Terms, table: BlockTable, prompt: Sequence[int]) -> None:
        """Take over a table; use ``open`` or ``fork``."""
        self.table = table
        self.written = [Written() for _ in range(terms.num_models)]
        self.origins: list[tuple[Tier, int]] = []
        """Where the tokens it began with were found, in order: tier and number of tokens."""
        self.copied_tokens = 0
        """Tokens of these in a page that was copied because the prompt diverges from it inside."""
        self._terms = terms
        self.expected = list(prompt)
        """The part of its prompt that was not removed by ``truncate``."""
        self._keys = PageKeys(terms)
        self._unlisted: Sequence[PageKey] = ()
        """Tokens of the first pages, if the last sealed ones are not in the index of prefixes yet."""
        self.arrival: Arrival | None = None
        """Stored pages that are still in flight. Call ``settle`` before anything but a forward pass."""
        self._holding: Holding | None = None
        """Its sealed pages; None once it is closed."""
        self._confirmed = 0
        """Tokens that will not be removed as rejected drafts."""

    @classmethod
    def open(
        cls, terms: Terms, private: PrivateSlots, prompt: Sequence[int], tail: Tail | None = None
    ) -> PagedSequence:
        """Open a sequence for ``prompt``; stored pages are loaded and stay pinned. Takes over ``tail``.

        Layer by layer (``Terms.by_layers``) they may still be in flight; see ``arrival``. A prefix that does not arrive
        within ``terms.timeout_s`` is computed instead.

        Raises:
            ValueError: The prompt is empty.
        """
        if not prompt:
            raise ValueError("the prompt is empty")
        sequence = cls(terms, BlockTable(terms.pages.page_size, private), prompt)
        opening = open_prefix(terms, sequence.table, prompt, tail)
        sequence._holding = Holding(terms, opening.lease, opening.leased)
        sequence._keys, sequence.arrival = PageKeys(terms, prompt, opening.keys), opening.arrival
        sequence.origins, sequence.copied_tokens = opening.origins, opening.copied_tokens
        count = sequence.table.num_tokens
        sequence.written = [Written(count, list(prompt[:count])) for _ in range(terms.num_models)]
        return sequence

    @property
    def held(self) -> int:
        """Number of leading tokens whose K/V every model has in the pages."""
        return min(each.held for each in self.written)

    @property
    def known(self) -> list[int]:
        """The tokens that the first model was fed, as far as they are known."""
        return self.written[0].tokens

    def expect(self, start: int, token_ids: Sequence[int]) -> None:
        """Raise ValueError if these tokens, fed from position ``start`` on, contradict the prompt."""
        known = self.expected[start : start + len(token_ids)]
        if known != list(token_ids[: len(known)]):
            raise ValueError(
                f"the tokens fed at position {start} are not those of the prompt this cache was made for"
            )

    def settle(self) -> bool:
        """Wait for pages in flight. Returns whether some failed: they are not held any more, but still expected."""
        arrival, self.arrival = self.arrival, None
        if arrival is None or self._holding is None:
            return False
        pages, half = arrival.settle()
        if pages == len(self._holding.pages) and half:
            return False
        if not pages:
            # it may have started to wait for the next page only
            self._holding.nothing()
        self._holding.pages = range(pages)
        for written in self.written:
            written.cut(pages * self.table.page_size)
        self._keys.cut(0)
        self.copied_tokens = 0
        self._cut_table(pages * self.table.page_size)
        return True

    def begin(self, model: int, start: int, stop: int, token_ids: Sequence[int] | None) -> int:
        """Prepare for ``model`` to be fed tokens ``[start, stop)``. Returns the first of them that must be written.

        Everything that the model wrote from there on becomes void. ``token_ids``: None if they are not known.
        """
        self._list_sealed()
        written = self.written[model]
        first = start
        if token_ids is not None:
            first += common_prefix(token_ids, written.tokens[start : min(stop, written.held)])
        if first < stop:
            written.cut(first)
            self._cut_table(max(each.held for each in self.written))
            self._keys.cut(len(self.known) // self.table.page_size)
        return first

    def missing_slots(self, first: int, stop: int) -> int:
        """Return the number of slots that ``grow`` needs for these tokens."""
        return self.table.missing_slots(stop, first) if first < stop else 0

    def grow(self, first: int, stop: int, slots: Sequence[int]) -> None:
        """Make tokens ``[first, stop)`` writable in ``slots``, which belong to the sequence now.

        Copies shared pages.
        """
        if first < stop:
            for copy in self.table.extend(stop, slots, first):
                self._terms.pages.copy(copy.src, copy.dst)

    def finish(self, model: int, start: int, stop: int, token_ids: Sequence[int] | None) -> None:
        """Note that ``model`` has written tokens up to ``stop`` in all layers, and seal pages that all models
        filled.
        """
        written = self.written[model]
        written.held, written.fed = max(written.held, stop), stop
        if token_ids is not None and len(written.tokens) >= start:
            written.tokens[start:stop] = token_ids
        self.table.advance(max(self.table.num_tokens, stop))
        if model == 0:
            # Beyond the prompt, all tokens of a pass but the first may be drafts that will be removed.
            drafts = stop - start <= ROLLBACK
            self._confirmed = max(start + 1, min(stop, len(self.expected))) if drafts else stop
        self._seal(self._confirmed)
        self._drop_behind_window()

    def truncate(self, num_tokens: int) -> None:
        """Forget all but the first ``num_tokens`` tokens, of every model.

        Private pages behind them return to the store, and sealed ones are released.

        Raises:
            ValueError: The window behind them is gone. Nothing changes.
        """
        window = self._terms.window
        needed = 0 if window is None else max(0, num_tokens - window + 1) // self.table.page_size
        if needed < self.table.first_page:
            raise ValueError(f"cannot go back to {num_tokens} tokens: the pages of their window were dropped")
        self._list_sealed()
        pages = -(-num_tokens // self.table.page_size)
        if self._holding is not None and self._holding.pages.stop > pages:
            self._own_lease(pages)
        for written in self.written:
            written.cut(num_tokens)
        del self.expected[num_tokens:]
        self._keys.cut(num_tokens // self.table.page_size)
        self._cut_table(num_tokens)

    def reset(self) -> None:
        """Forget every token, of every model. Private pages return to the store, and sealed ones are released."""
        self._list_sealed()
        for written in self.written:
            written.cut(0)
        self.expected = []
        self._keys.cut(0)
        self._give_back(self.table.clear())
        if self._holding is not None:
            self._holding.nothing()

    def fork(self) -> PagedSequence:
        """Return a second sequence that begins like this one. Pages are shared until one of them writes."""
        self._list_sealed()
        other = PagedSequence(self._terms, self.table.fork(), self.expected)
        other.written = [Written(each.held, list(each.tokens), each.fed) for each in self.written]
        other._keys = self._keys.copy()
        other._holding = None if self._holding is None else self._holding.share()
        other._confirmed = self._confirmed
        return other

    def equals(self, other: PagedSequence) -> bool:
        """Return whether both have the same tokens in the same pages."""
        return self.table.slots == other.table.slots and self.written == other.written

    def take_tail(self) -> Tail | None:
        """Return the half-full last page, if it is not shared and all models wrote the same.

        The caller owns it then.
        """
        stop = self._agreed()
        if self._holding is not None:
            self._seal(stop)
        self._list_sealed()
        page, count = divmod(stop, self.table.page_size)
        start = stop - count
        if not count or self._holding is None or not self.table.private.sole(slot := self.table.slots[page]):
            return None
        tokens = tuple(self.known[:stop])
        # also what was allocated and never written: only the one page leaves the family
        self._give_back(self.table.truncate(stop))
        self.table.private.hand_over(slot)
        del self.table.slots[page:]
        self.table.truncate(start)
        for written in self.written:
            written.cut(start)
        return Tail(slot, page, tokens, self._holding.exact, self._terms.root)

    def close(self) -> None:
        """Seal full pages, give back the rest and release the lease. A second call has no effect."""
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            arrival.drop()
        if self._holding is None:
            return
        try:
            self._seal(self._agreed())
            self._list_sealed()
            holding, self._holding = self._holding, None
            self._give_back(self.table.clear())
            holding.let_go()
        except StoreClosed:
            self._holding = None

    # -- inside -------------------------------------------------------------------------------------------------

    def _agreed(self) -> int:
        """Return the number of leading tokens that are known and whose K/V every model has written."""
        return agreed(self.written)

    def _seal(self, num_tokens: int) -> None:
        """Give every full private page within ``num_tokens`` to the store, and use the slots it answers with."""
        full = min(num_tokens, self._agreed()) // self.table.page_size
        if not self._terms.keeps or not full or self.table.slots[full - 1] not in self.table.private:
            return
        pages = self.table.sealable(full * self.table.page_size)
        if not pages or not self._own_lease(pages.start):
            return
        keys = self._keys_to(pages.stop)
        mine = self.table.slots[pages.start : pages.stop]
        assert self._holding is not None
        kept = self._holding.seal(pages.start, keys[pages.start :], mine)
        self.table.seal(pages.start, kept, self.table.generation)
        if kept != mine[: len(kept)]:
            self._holding.wait_for_writers()
        stop = pages.start + len(kept)
        plain = self._terms.plain_tokens
        count = stop if plain is None else min(stop, plain // self.table.page_size)
        self._unlisted = keys[:count]

    def _list_sealed(self) -> None:
        """Add sealed pages to the index of prefixes.

        Done only once the token that waits for the end of a pass is out.
        """
        keys, self._unlisted = self._unlisted, ()
        if keys:
            tokens = self.known[: len(keys) * self.table.page_size]
            prefixes_of(self._terms.store, self.table.page_size).insert(self._terms.root, tokens, keys)

    def _own_lease(self, stop: int) -> bool:
        """Hold exactly the pages before ``stop``, alone. False: nothing more of this sequence can be sealed."""
        wanted = range(self.table.first_page, stop)
        if self._holding is None or self._holding.owns(wanted):
            return self._holding is not None
        keys, slots = self._keys_to(stop)[wanted.start :], self.table.slots[wanted.start : stop]
        return self._holding.own(keys, slots, wanted)

    def _drop_behind_window(self) -> None:
        """Release pages that no layer looks at any more because of sliding windows."""
        fed = min(each.fed for each in self.written)
        first = first_needed(self._terms, fed, self.table.page_size)
        if first <= self.table.first_page:
            return
        self._give_back(self.table.drop_before(first * self.table.page_size))
        if self._holding is not None and self._holding.pages.stop > self.table.first_page:
            self._own_lease(self._holding.pages.stop)

    def _cut_table(self, num_tokens: int) -> None:
        if num_tokens < self.table.num_tokens:
            self._give_back(self.table.truncate(num_tokens))

    def _give_back(self, slots: list[int]) -> None:
        if slots:
            self._terms.store.free(slots)

    def _keys_to(self, stop: int) -> list[PageKey]:
        """Return the keys of the first ``stop`` pages."""
        return self._keys.to(stop, self.known)
