"""Block tables: they map a sequence's tokens to slots, with rollback, sliding windows, and forks that share pages.

Each page of a table is in one of three states:

    sealed    owned by the store and read-only; the table refers to its slot, which a lease keeps in place
    private   owned by this family of tables; writable if exactly one table refers to it
    dropped   outside the sliding window; its slot is NO_PAGE

A family consists of a sequence and its forks. A sealed or shared page is copied before it is written
(copy-on-write, as in vLLM's PagedAttention, Kwon et al. 2023). A table contains only metadata: it maps tokens
to slots, and knows nothing of tiers, keys or bytes. Not thread-safe: use all tables of a family from one
thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NO_PAGE = -1
"""Slot of a page that was dropped because it is outside the sliding window."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy from slot ``src`` to slot ``dst``, which the caller must perform before it writes to ``dst``."""

    src: int
    dst: int


class PrivateSlots:
    """The private slots of a family of tables, with the number of tables that refer to each slot."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, slot: int) -> bool:
        return slot in self._holders

    def sole(self, slot: int) -> bool:
        """Return whether the family owns the slot and exactly one table refers to it."""
        return self._holders.get(slot) == 1

    def take(self, slot: int) -> None:
        """Add a slot to the family, with one table that refers to it.

        Raises:
            ValueError: The family owns the slot already.
        """
        if slot in self._holders:
            raise ValueError(f"slot {slot} is already owned by this family of tables")
        self._holders[slot] = 1

    def share(self, slots: Iterable[int]) -> None:
        """Record that one more table refers to each of these slots. Slots that the family does not own are ignored."""
        for slot in slots:
            if slot in self._holders:
                self._holders[slot] += 1

    def let_go(self, slots: Iterable[int]) -> list[int]:
        """Record that a table no longer refers to these slots. Slots that the family does not own are ignored.

        Returns:
            The slots that no table refers to any more. The family no longer owns them.
        """
        unused = []
        for slot in slots:
            if slot in self._holders:
                self._holders[slot] -= 1
                if not self._holders[slot]:
                    del self._holders[slot]
                    unused.append(slot)
        return unused

    def hand_over(self, slot: int) -> None:
        """Transfer ownership of a slot to the store.

        Raises:
            ValueError: The family does not own the slot, or several tables refer to it.
        """
        if not self.sole(slot):
            raise ValueError(f"slot {slot} cannot be sealed: it must be owned by exactly one table")
        del self._holders[slot]


class BlockTable:
    """The slots of one sequence.

    The page in ``slots[i]`` contains tokens ``[i * page_size, (i + 1) * page_size)``. Methods that free slots
    return each freed slot once. The caller must give these slots back to the store.
    """

    def __init__(self, page_size: int, private: PrivateSlots | None = None) -> None:
        """Create the table of an empty sequence, in the family that owns ``private`` or in a new family."""
        self.page_size = page_size
        self.slots: list[int] = []
        self.num_tokens = 0
        """Number of tokens whose K and V are written, including tokens whose pages were dropped."""
        self.first_page = 0
        """Number of the first page that was not dropped."""
        self.generation = 0
        """Number of ``clear`` calls so far. ``seal`` rejects a generation from before the last call."""
        self.private = PrivateSlots() if private is None else private

    def reuse(self, slots: Sequence[int], first_page: int = 0) -> None:
        """Fill an empty table with full, sealed pages that the store already has.

        Args:
            slots: Slots of the pages from ``first_page`` on.
            first_page: Number of the first page inside the sliding window. Earlier pages count as dropped.

        Raises:
            ValueError: The table is not empty.
        """
        if self.slots or self.num_tokens:
            raise ValueError("reuse needs an empty table, but this one has pages")
        self.first_page = first_page
        self.slots = [NO_PAGE] * first_page + list(slots)
        self.num_tokens = len(self.slots) * self.page_size

    def missing_slots(self, stop: int, first: int | None = None) -> int:
        """Return the number of slots that ``extend(stop, ..., first)`` needs, for new pages and for copies."""
        return max(0, self._pages(stop) - len(self.slots)) + len(self._to_copy(stop, first))

    def extend(self, stop: int, new: Sequence[int], first: int | None = None) -> list[PageCopy]:
        """Make tokens ``[first, stop)`` writable. After writing them, call ``advance``.

        Args:
            stop: End of the range of tokens to write.
            new: Free slots, exactly ``missing_slots(stop, first)``. They become private to this table.
            first: Start of the range, by default ``num_tokens``. A lower value overwrites tokens.

        Returns:
            Copies that the caller must perform before it writes.

        Raises:
            ValueError: The number of slots is wrong, a slot is already owned or is given twice, or the range
                starts outside the window or beyond ``num_tokens``. Nothing has changed.
        """
        if len(new) != self.missing_slots(stop, first):
            raise ValueError(f"extend needs {self.missing_slots(stop, first)} new slots, got {len(new)}")
        if len(set(new)) < len(new) or any(slot in self.private for slot in new):
            raise ValueError(
                f"extend needs distinct new slots that are not in use, got {', '.join(map(str, new))}"
            )
        fresh = list(new)
        copies = []
        for page in self._to_copy(stop, first):
            copies.append(PageCopy(self.slots[page], fresh.pop()))
            # The source page is sealed, or another table refers to it too, so this frees no slot.
            self.private.let_go([self.slots[page]])
            self.private.take(copies[-1].dst)
            self.slots[page] = copies[-1].dst
        for slot in fresh:
            self.private.take(slot)
        self.slots += fresh
        return copies

    def place(self, position: int) -> tuple[int, int]:
        """Return the slot that contains the token at ``position``, and the token's offset in the page.

        Raises:
            ValueError: The position is in a dropped page or beyond the last page.
        """
        if not self.first_page * self.page_size <= position < len(self.slots) * self.page_size:
            raise ValueError(
                f"position {position} is outside the pages of this sequence, which start at token "
                f"{self.first_page * self.page_size} and end before token {len(self.slots) * self.page_size}"
            )
        return self.slots[position // self.page_size], position % self.page_size

    def advance(self, num_tokens: int) -> None:
        """Record that K and V of the first ``num_tokens`` tokens of the sequence are written.

        Args:
            num_tokens: Total number of tokens, including those that were written before.

        Raises:
            ValueError: ``num_tokens`` is lower than before, or exceeds the pages of the table.
        """
        if not self.num_tokens <= num_tokens <= len(self.slots) * self.page_size:
            raise ValueError(
                f"num_tokens must be between {self.num_tokens} (already written) and "
                f"{len(self.slots) * self.page_size} (space in {len(self.slots)} pages), got {num_tokens}"
            )
        self.num_tokens = num_tokens

    def truncate(self, num_tokens: int) -> list[int]:
        """Keep only the first ``num_tokens`` tokens, for example after speculative tokens were rejected.

        Returns:
            The freed slots.

        Raises:
            ValueError: ``num_tokens`` ends in a dropped page or exceeds the sequence. Nothing has changed.
        """
        if not self.first_page * self.page_size <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"num_tokens must be between {self.first_page * self.page_size} (the first token of a page that was "
                f"not dropped) and {self.num_tokens} (already written), got {num_tokens}"
            )
        self.num_tokens = num_tokens
        keep = self._pages(num_tokens)
        freed = self.private.let_go(self.slots[keep:])
        del self.slots[keep:]
        return freed

    def lose(self, first: int, stop: int) -> list[int]:
        """Remove page ``first`` and all pages after it, because the store took back sealed pages ``[first, stop)``.

        The store takes them back if a page that was in flight could not be loaded. Their slots may since have
        become private to another table of this family, so this method does not release them. It releases the
        slots of private pages from ``stop`` on.

        Returns:
            The freed slots.
        """
        freed = self.private.let_go(self.slots[stop:])
        del self.slots[first:]
        self.num_tokens = min(self.num_tokens, first * self.page_size)
        return freed

    def drop_before(self, position: int) -> list[int]:
        """Drop pages that end at or before ``position``, because no token will read them any more.

        A position beyond ``num_tokens`` counts as ``num_tokens``, so that a page that is still to be written
        is kept.

        Returns:
            The freed slots.
        """
        stop = min(position, self.num_tokens) // self.page_size
        if stop <= self.first_page:
            return []
        dropped = slice(self.first_page, stop)
        freed = self.private.let_go(self.slots[dropped])
        self.slots[dropped] = [NO_PAGE] * (stop - self.first_page)
        self.first_page = stop
        return freed

    def sealable(self, num_tokens: int | None = None) -> range:
        """Return the numbers of the full pages that can be sealed next.

        These are consecutive pages, starting with the first private page. They end before the first page that
        is sealed, shared with another table, or only partly filled.

        Args:
            num_tokens: Ignore pages that end beyond this number of tokens, by default ``self.num_tokens``.
        """
        full = min(self.num_tokens, self.num_tokens if num_tokens is None else num_tokens) // self.page_size
        first = next((i for i in range(self.first_page, full) if self.slots[i] in self.private), full)
        stop = next((i for i in range(first, full) if not self.private.sole(self.slots[i])), full)
        return range(first, stop)

    def seal(self, first: int, slots: Sequence[int], generation: int) -> bool:
        """Mark pages as sealed after a ``put``: the store now owns them, in the slots that it returned.

        Args:
            first: Number of the first page.
            slots: The slots of this page and the following ones, as returned by ``TierStore.put``.
            generation: The value of ``generation`` when the put was started.

        Returns:
            False if the table was cleared after the put was started. In this case nothing has changed.

        Raises:
            ValueError: A page is sealed already or shared with another table.
        """
        if generation != self.generation:
            return False
        mine = self.slots[first : first + len(slots)]
        if len(mine) != len(slots) or not all(self.private.sole(slot) for slot in mine):
            raise ValueError(
                f"pages {first} to {first + len(slots) - 1} cannot be sealed: at least one does not exist, is sealed "
                "already, or is shared with another table"
            )
        for slot in mine:
            self.private.hand_over(slot)
        self.slots[first : first + len(slots)] = slots
        return True

    def fork(self) -> BlockTable:
        """Return the table of a second sequence, in the same family, that shares all pages of this one.

        Pages that ``extend`` made writable are now shared, so call ``extend`` again before writing to either
        sequence.
        """
        other = BlockTable(self.page_size, self.private)
        other.slots, other.num_tokens, other.first_page = list(self.slots), self.num_tokens, self.first_page
        self.private.share(self.slots)
        return other

    def clear(self) -> list[int]:
        """Release all pages because the sequence has finished or was preempted.

        Returns:
            The freed slots.
        """
        freed = self.private.let_go(self.slots)
        self.slots, self.num_tokens, self.first_page = [], 0, 0
        self.generation += 1
        return freed

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _to_copy(self, stop: int, first: int | None) -> list[int]:
        """Return the numbers of existing pages with tokens in ``[first, stop)`` that are sealed or shared."""
        start = self.num_tokens if first is None else first
        if not self.first_page * self.page_size <= start <= self.num_tokens:
            raise ValueError(
                f"the first token to write must be from {self.first_page * self.page_size} to {self.num_tokens}, "
                f"got {start}"
            )
        pages = range(start // self.page_size, min(self._pages(stop), len(self.slots)))
        return [page for page in pages if not self.private.sole(self.slots[page])] if stop > start else []
