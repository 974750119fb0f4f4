"""One sequence in a store: its block table, its tokens, and the sealing of its pages.

    sealed pages     owned by the store, pinned by this sequence's lease, read-only; later requests can reuse them
    private pages    owned by this sequence or shared with its forks; writable if not shared; freed on close
    hosted pages     the first pages, if they stream from host memory: sealed, and without a slot in HBM

This module works with tokens, keys and slots, and is independent of transformers. Feeding a token that is
already in the pages at its position writes nothing, so the last token of a fully stored prompt is computed
without changing its pages.
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
from tierstore.block_table import NO_PAGE, BlockTable, PrivateSlots
from tierstore.errors import StoreClosed
from tierstore.types import PageKey, Tier


class PageKeys:
    """The page keys of one sequence. Not thread-safe, like the sequence."""

    def __init__(self, terms: Terms, prompt: Sequence[int] = (), keys: Sequence[PageKey] = ()) -> None:
        """Start with the ``prompt`` that the sequence was opened for, and the ``keys`` of its full pages."""
        self._terms = terms
        self._prompt = prompt
        self._of_prompt = keys
        self._made: list[PageKey] = []

    def to(self, stop: int, known: Sequence[int]) -> list[PageKey]:
        """Return the keys of the first ``stop`` pages. The sequence's tokens, ``known``, must fill them."""
        if len(self._made) < stop:
            tokens = known[: stop * self._terms.pages.page_size]
            if len(self._of_prompt) >= stop and tokens == self._prompt[: len(tokens)]:
                return list(self._of_prompt[:stop])
            self._made = self._terms.store.keys(tokens, salt=self._terms.salt, extra=self._terms.extra)
        return self._made[:stop]

    def cut(self, pages: int) -> None:
        """Keep only the keys of the first ``pages`` pages, because the tokens after these pages change."""
        del self._made[pages:]

    def copy(self) -> PageKeys:
        """Return a copy for a fork."""
        other = PageKeys(self._terms, self._prompt, self._of_prompt)
        other._made = list(self._made)
        return other


@dataclass(slots=True)
class Written:
    """Records what one model has written: K/V of the first ``held`` tokens.

    ``tokens`` contains the IDs of these tokens, as far as they are known.
    """

    held: int = 0
    tokens: list[int] = field(default_factory=list)
    fed: int = 0
    """Number of tokens in the sequence at the end of the model's last forward pass."""

    def cut(self, num_tokens: int) -> None:
        """Discard everything after the first ``num_tokens`` tokens."""
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
    """A sequence that starts with the longest stored prefix of its prompt and grows page by page.

    Writing takes three steps, so that a batch can allocate space for all of its sequences at once. ``begin``
    determines which tokens will be written, ``missing_slots`` and ``grow`` allocate, and ``finish`` records
    that all layers of a model have written them. Not thread-safe.
    """

    def __init__(self, terms: Terms, table: BlockTable, prompt: Sequence[int]) -> None:
        """Take ownership of a table. Callers use ``open`` or ``fork`` instead."""
        self.table = table
        self.written = [Written() for _ in range(terms.num_models)]
        self.origins: list[tuple[Tier, int]] = []
        """The tiers in which the stored prefix was found, each with a number of tokens, in order."""
        self.copied_tokens = 0
        """Number of prefix tokens in a copied page, because the prompt diverges within the stored page."""
        self._terms = terms
        self.expected = list(prompt)
        """The part of the prompt that ``truncate`` has not removed."""
        self._keys = PageKeys(terms)
        self._unlisted: Sequence[PageKey] = ()
        """Keys of the first pages, for ``_list_sealed`` to add to the prefix index. Empty once they are in it."""
        self.arrival: Arrival | None = None
        """Tracks stored pages in flight. If not None, call ``settle`` before anything but a forward pass."""
        self.missed: str | None = None
        """Why the prefix is not longer: a value of ``Lease.missing_because``, "late", or None if unknown."""
        self._holding: Holding | None = None
        """Keeps the sealed pages under a lease. None once the sequence is closed."""
        self._confirmed = 0
        """Number of leading tokens that cannot be rejected drafts, so their pages may be sealed."""
        self._others_write = False
        """Whether other requests may still be writing pages of this sequence."""
        self.hosted: list[int] = []
        """Host slots that ``Terms.host`` holds. Those of the first ``num_hosted`` pages are used."""

    @classmethod
    def open(
        cls, terms: Terms, private: PrivateSlots, prompt: Sequence[int], tail: Tail | None = None
    ) -> PagedSequence:
        """Open a sequence for ``prompt``, load the prompt's stored pages, and pin them until ``close``.

        Takes ownership of ``tail``. With ``Terms.by_layers``, pages may still be in flight afterwards; see
        ``arrival``. Pages that are not loaded within ``terms.arrival_s`` must be computed instead.

        Raises:
            ValueError: The prompt is empty.
        """
        if not prompt:
            raise ValueError("the prompt is empty: it must have at least one token")
        sequence = cls(terms, BlockTable(terms.pages.page_size, private), prompt)
        opening = open_prefix(terms, sequence.table, prompt, tail)
        sequence._holding = Holding(terms, opening.lease, opening.leased)
        sequence._keys, sequence.arrival = PageKeys(terms, prompt, opening.keys), opening.arrival
        sequence.origins, sequence.copied_tokens = opening.origins, opening.copied_tokens
        sequence.hosted = opening.hosted
        sequence.missed = opening.missed
        count = sequence.table.num_tokens
        sequence.written = [Written(count, list(prompt[:count])) for _ in range(terms.num_models)]
        return sequence

    @property
    def held(self) -> int:
        """Return the number of leading tokens whose K/V every model has in the pages."""
        return min(each.held for each in self.written)

    @property
    def slots(self) -> list[int]:
        """Return the slots of the pages that the sequence has, without pages in flight that could not be loaded."""
        lost = set() if self.arrival is None else self.arrival.lost
        return [slot for slot in self.table.slots if slot != NO_PAGE and slot not in lost]

    @property
    def known(self) -> list[int]:
        """Return the tokens that were fed to the first model, as far as they are known."""
        return self.written[0].tokens

    def expect(self, start: int, token_ids: Sequence[int]) -> None:
        """Raise ValueError if these tokens, the first of which is at ``start``, differ from the prompt."""
        known = self.expected[start : start + len(token_ids)]
        if known != list(token_ids[: len(known)]):
            raise ValueError(
                f"the tokens fed at position {start} differ from the prompt that this cache was created for: create a "
                "TierStoreCache for each prompt"
            )

    def settle(self) -> bool:
        """Wait for stored pages in flight. Return whether any could not be loaded.

        In this case, the sequence is truncated to the full pages that were loaded. ``expected`` keeps the
        tokens of the others, which must be fed again.
        """
        if self.arrival is None or self._holding is None:
            return False
        # If this wait is interrupted, the pages are still in flight, and the next call waits again.
        pages, half = self.arrival.settle()
        arrival, self.arrival = self.arrival, None
        if pages == len(self._holding.pages) and half:
            arrival.drop()
            return False
        self.missed = arrival.missed
        leased, self._holding.pages = self._holding.pages.stop, range(pages)
        for written in self.written:
            written.cut(pages * self.table.page_size)
        self._keys.cut(0)
        self.copied_tokens = 0
        freed = self.table.lose(pages, leased)
        arrival.drop()
        if not pages:
            # the lease may be empty: perhaps only the copied page was in flight
            self._holding.nothing()
        self._give_back(freed)
        return True

    def begin(self, model: int, start: int, stop: int, token_ids: Sequence[int] | None) -> int:
        """Prepare to feed tokens ``[start, stop)`` to ``model``. Return the first position to be written.

        The pages already have K/V of the tokens before it. Everything that the model wrote from there on
        becomes invalid. The result is ``stop`` if nothing must be written.

        Args:
            model: Index of the model.
            start: Position of the first token.
            stop: Position after the last token.
            token_ids: The tokens. None if they are unknown; then all are written.

        Raises:
            TimeoutError: Another request is still writing a page of this sequence.
            RuntimeError: The device of such a request has failed. The sequence is now empty.
        """
        self._list_sealed()
        self._wait_for_writers()
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
        """Return the number of slots that ``grow`` needs for tokens ``[first, stop)``."""
        return self.table.missing_slots(stop, first) if first < stop else 0

    def grow(self, first: int, stop: int, slots: Sequence[int]) -> None:
        """Make tokens ``[first, stop)`` writable in ``slots``, which the sequence now owns.

        Shared pages are copied.
        """
        if first < stop:
            for copy in self.table.extend(stop, slots, first):
                self._terms.pages.copy(copy.src, copy.dst)

    @property
    def num_hosted(self) -> int:
        """Return the number of the first pages that stream from host memory. ``table`` counts them as dropped."""
        return self.table.first_page if self.hosted else 0

    @property
    def movable(self) -> list[int]:
        """Return the HBM slots of the pages that ``move_down`` can move, oldest first."""
        stop = 0 if self._holding is None or self.arrival is not None else self._holding.pages.stop
        return self.table.slots[
            self.table.first_page : min(stop, self.table.num_tokens // self.table.page_size)
        ]

    def move_down(self, count: int) -> None:
        """Move the first ``count`` pages of ``movable`` to host memory, from where they stream from now on.

        Raises:
            CapacityError: Host memory had no space in time. Nothing has changed.
        """
        assert self._terms.host is not None
        count = min(count, len(self.movable))
        if not count or self._holding is None:
            return
        start = self.table.first_page
        stop = start + count
        # An interrupted call may have left more host slots than pages without a slot in HBM.
        self.hosted[start:] = self._terms.host.take(self._keys_to(stop)[start:], self._terms.space_s)
        self._give_back(self.table.drop_before(stop * self.table.page_size))
        self._own_lease(self._holding.pages.stop)

    def finish(
        self, model: int, start: int, stop: int, token_ids: Sequence[int] | None, *, certain: bool = False
    ) -> None:
        """Record that ``model`` has written tokens ``[start, stop)`` in all layers.

        ``certain`` says that none of them is a draft.

        Pages that all models have filled are sealed, unless they contain draft tokens that may still be rejected.
        Pages that no window needs any more are released.

        Raises:
            TimeoutError, RuntimeError: Another request is writing a sealed page, as in ``begin``.
        """
        written = self.written[model]
        written.held, written.fed = max(written.held, stop), stop
        if token_ids is not None and len(written.tokens) >= start:
            written.tokens[start:stop] = token_ids
        self.table.advance(max(self.table.num_tokens, stop))
        if model == 0:
            # After the prompt, all tokens of a short pass except the first may be drafts, which may be removed.
            drafts = stop - start <= ROLLBACK and not certain
            self._confirmed = max(start + 1, min(stop, len(self.expected))) if drafts else stop
        self._seal(self._confirmed)
        self._wait_for_writers()
        self._drop_behind_window()

    def truncate(self, num_tokens: int) -> None:
        """Remove all tokens of every model after the first ``num_tokens``.

        Private pages after these tokens are freed, and sealed ones are released.

        Raises:
            ValueError: The next token's window includes pages that have been dropped. Nothing has changed.
        """
        window = self._terms.window
        needed = 0 if window is None else max(0, num_tokens - window + 1) // self.table.page_size
        if num_tokens < self.num_hosted * self.table.page_size:
            raise ValueError(
                f"cannot go back to {num_tokens} tokens: the first {self.num_hosted} pages of "
                f"{self.table.page_size} tokens stream from host memory and are not writable. Reset the cache instead"
            )
        needed = max(needed, self.num_hosted)
        if needed < self.table.first_page:
            raise ValueError(
                f"cannot go back to {num_tokens} tokens: pages in the next token's window were dropped. Reset the "
                "cache instead"
            )
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
        """Remove all tokens of every model. Private pages are freed, and sealed pages are released."""
        self._list_sealed()
        for written in self.written:
            written.cut(0)
        self.expected = []
        self._keys.cut(0)
        self._others_write = False
        self._give_back(self.table.clear())
        self.hosted = []
        if self._holding is not None:
            self._holding.nothing()

    def fork(self) -> PagedSequence:
        """Return a second sequence with the same content.

        Pages are shared until one of the two writes to them.
        """
        self._list_sealed()
        other = PagedSequence(self._terms, self.table.fork(), self.expected)
        other.written = [Written(each.held, list(each.tokens), each.fed) for each in self.written]
        other._keys = self._keys.copy()
        other._holding = None if self._holding is None else self._holding.share()
        other._confirmed = self._confirmed
        other.hosted = list(self.hosted)
        other._others_write = self._others_write
        return other

    def equals(self, other: PagedSequence) -> bool:
        """Return whether both sequences have the same tokens in the same pages."""
        return self.table.slots == other.table.slots and self.written == other.written

    def take_tail(self) -> Tail | None:
        """Remove the partially filled last page from the sequence and return it.

        Only tokens that every model has written are kept. Return None if they fill whole pages, if the page
        is shared, or if the sequence is closed. Full pages are sealed first. The caller owns the page's
        slot.
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
        # This also frees slots that were allocated but never written. Only the last page is handed to the caller.
        self._give_back(self.table.truncate(stop))
        self.table.private.hand_over(slot)
        del self.table.slots[page:]
        self.table.truncate(start)
        for written in self.written:
            written.cut(start)
        return Tail(slot, page, tokens, self._holding.exact, self._terms.root)

    def close(self) -> None:
        """Seal full pages, free the others and release the lease. Idempotent."""
        arrival, self.arrival = self.arrival, None
        if arrival is not None:
            arrival.drop()
        if self._holding is None:
            return
        try:
            if arrival is None:
                self._seal(self._agreed())
            else:
                # Leased pages that could not be loaded have lost their slots. No other page is full, so none is sealed.
                self._give_back(self.table.lose(0, self._holding.pages.stop))
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
        """Put the full private pages of the first ``num_tokens`` tokens into the store.

        The sequence then uses the slots that the store returns. Other requests may still be writing these pages.
        """
        full = min(num_tokens, self._agreed()) // self.table.page_size
        if not self._terms.keeps or not full or self.table.slots[full - 1] not in self.table.private:
            return
        pages = self.table.sealable(full * self.table.page_size)
        if not pages or not self._own_lease(pages.start):
            return
        keys = self._keys_to(pages.stop)
        mine = self.table.slots[pages.start : pages.stop]
        assert self._holding is not None
        parent = keys[pages.start - 1] if pages.start else None
        kept = self._holding.seal(pages.start, keys[pages.start :], mine, parent)
        self.table.seal(pages.start, kept, self.table.generation)
        self._others_write |= kept != mine[: len(kept)]
        stop = pages.start + len(kept)
        plain = self._terms.plain_tokens
        count = stop if plain is None else min(stop, plain // self.table.page_size)
        self._unlisted = keys[:count]

    def _wait_for_writers(self) -> None:
        """Wait for pages of this sequence that other requests put into the store first and may still be writing.

        Raises:
            TimeoutError: Another request is still writing. Call this again before the pages are read.
            RuntimeError: The device of such a request has failed. The sequence is now empty.
        """
        if not self._others_write or self._holding is None:
            return
        if not self._holding.wait_for_writers():
            # The store has taken back slots of held pages. Another row may own them by now.
            self._give_back(self.table.lose(0, self._holding.pages.stop))
            self.reset()
            raise RuntimeError(
                "another request was writing the same page when its device failed: create another TierStoreCache, "
                "or reset this one and feed all tokens again"
            )
        self._others_write = False

    def _list_sealed(self) -> None:
        """Add newly sealed pages to the prefix index.

        Called at the start of the next operation, not when the pages are sealed, so that the forward pass
        returns its token without delay.
        """
        keys, self._unlisted = self._unlisted, ()
        if keys:
            tokens = self.known[: len(keys) * self.table.page_size]
            prefixes_of(self._terms.store, self.table.page_size).insert(self._terms.root, tokens, keys)

    def _own_lease(self, stop: int) -> bool:
        """Hold exactly the pages from the first one in the window to page ``stop - 1``.

        They are held under a lease that no fork shares. Return False if this is impossible. In this case, no more
        pages can be sealed.
        """
        wanted = range(self.table.first_page, stop)
        if self._holding is None or self._holding.owns(wanted):
            return self._holding is not None
        keys, slots = self._keys_to(stop)[wanted.start :], self.table.slots[wanted.start : stop]
        return self._holding.own(keys, slots, wanted)

    def _drop_behind_window(self) -> None:
        """Release the pages that all windows have passed."""
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
