"""Map a sequence's tokens to slots: forks that share pages, rollback, sliding windows. Metadata only.

A page of a table is in one of three states:

    sealed    owned by the store and read-only; a lease keeps it in its slot, the table only points at it
    private   owned by this family of tables; writable while exactly one table points at it
    dropped   behind the window; its slot is NO_PAGE

A family is a sequence and its forks. Writing into a sealed or shared page copies it first (copy-on-write, as in vLLM's
PagedAttention, Kwon et al. 2023). Tables know tokens and slots, not tiers, keys or bytes. Not thread-safe: use a family
from one thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NO_PAGE = -1
"""Slot of a page that was dropped behind the window."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """A copy from slot to slot that the caller must make before it writes."""

    src: int
    dst: int


class PrivateSlots:
    """Slots that a family of tables owns, with the number of tables that point at each."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, slot: int) -> bool:
        return slot in self._holders

    def sole(self, slot: int) -> bool:
        """Return whether the slot is private and exactly one table points at it."""
        return self._holders.get(slot) == 1

    def take(self, slot: int) -> None:
        """Add a slot to the family. ValueError if the family owns it already."""
        if slot in self._holders:
            raise ValueError(f"slot {slot} is owned by this family already")
        self._holders[slot] = 1

    def share(self, slots: Iterable[int]) -> None:
        """Count one more table for these slots; sealed and dropped pages are ignored."""
        for slot in slots:
            if slot in self._holders:
                self._holders[slot] += 1

    def let_go(self, slots: Iterable[int]) -> list[int]:
        """Count one table less for these slots. Return the slots without any table left, which the family gives up."""
        unused = []
        for slot in slots:
            if slot in self._holders:
                self._holders[slot] -= 1
                if not self._holders[slot]:
                    del self._holders[slot]
                    unused.append(slot)
        return unused

    def hand_over(self, slot: int) -> None:
        """Give a slot to the store. ValueError unless exactly one table points at it."""
        if not self.sole(slot):
            raise ValueError(f"slot {slot} cannot be sealed: it is not owned by exactly one table")
        del self._holders[slot]


class BlockTable:
    """The slots of one sequence: page ``i`` holds tokens ``[i * page_size, (i + 1) * page_size)`` in ``slots[i]``.

    Methods that free slots return each freed slot once; the caller returns them to the store.
    """

    def __init__(self, page_size: int, private: PrivateSlots | None = None) -> None:
        """Make an empty sequence, in the family that owns ``private``, or in a new one."""
        self.page_size = page_size
        self.slots: list[int] = []
        self.num_tokens = 0
        """Tokens whose KV is written, tokens dropped behind the window included."""
        self.first_page = 0
        """Number of the first page that was not dropped."""
        self.generation = 0
        """Number of ``clear`` calls; a ``seal`` that was started before the last one is refused."""
        self.private = PrivateSlots() if private is None else private

    def reuse(self, slots: Sequence[int], first_page: int = 0) -> None:
        """Start an empty table with full, sealed pages.

        Args:
            slots: Slots of pages ``first_page`` and later.
            first_page: Number of the first page inside the window; earlier pages count as dropped.

        Raises:
            ValueError: The table is not empty.
        """
        if self.slots or self.num_tokens:
            raise ValueError("reuse needs an empty table, this one has pages")
        self.first_page = first_page
        self.slots = [NO_PAGE] * first_page + list(slots)
        self.num_tokens = len(self.slots) * self.page_size

    def missing_slots(self, stop: int, first: int | None = None) -> int:
        """Return how many slots ``extend`` needs: for new pages, and for copies of sealed or shared pages."""
        return max(0, self._pages(stop) - len(self.slots)) + len(self._to_copy(stop, first))

    def extend(self, stop: int, new: Sequence[int], first: int | None = None) -> list[PageCopy]:
        """Make tokens ``[first, stop)`` writable. ``num_tokens`` does not change: call ``advance`` after writing.

        Args:
            stop: End of the tokens to write.
            new: Free slots, as many as ``missing_slots`` says; private to this table from now on.
            first: Start of the tokens to write, ``num_tokens`` by default; a lower value overwrites tokens.

        Returns:
            Copies that the caller must make before it writes.

        Raises:
            ValueError: Wrong number of slots, a slot that is owned already or given twice, or tokens behind the window.
                Nothing has changed then.
        """
        if len(new) != self.missing_slots(stop, first):
            raise ValueError(f"extend needs {self.missing_slots(stop, first)} slots, got {len(new)}")
        if len(set(new)) < len(new) or any(slot in self.private for slot in new):
            raise ValueError(f"extend needs slots that are free and different, got {list(new)}")
        fresh = list(new)
        copies = []
        for page in self._to_copy(stop, first):
            copies.append(PageCopy(self.slots[page], fresh.pop()))
            # The source is sealed, or another table points at it too, so releasing it frees no slot.
            self.private.let_go([self.slots[page]])
            self.private.take(copies[-1].dst)
            self.slots[page] = copies[-1].dst
        for slot in fresh:
            self.private.take(slot)
        self.slots += fresh
        return copies

    def place(self, position: int) -> tuple[int, int]:
        """Return slot and offset of the token at ``position``. ValueError behind the window or past the last page."""
        if not self.first_page * self.page_size <= position < len(self.slots) * self.page_size:
            raise ValueError(
                f"position {position} is in no page of this sequence, whose pages hold tokens "
                f"{self.first_page * self.page_size} to {len(self.slots) * self.page_size - 1}"
            )
        return self.slots[position // self.page_size], position % self.page_size

    def advance(self, num_tokens: int) -> None:
        """Declare the KV of all tokens before ``num_tokens`` written. ValueError if the pages cannot hold them."""
        if not self.num_tokens <= num_tokens <= len(self.slots) * self.page_size:
            raise ValueError(
                f"cannot advance from {self.num_tokens} to {num_tokens} tokens in {len(self.slots)} pages"
            )
        self.num_tokens = num_tokens

    def truncate(self, num_tokens: int) -> list[int]:
        """Keep only the first ``num_tokens`` tokens, as after rejected speculative tokens. Return freed slots.

        Raises:
            ValueError: The tokens end inside a dropped page or beyond the sequence. Nothing has changed then.
        """
        if not self.first_page * self.page_size <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"truncate needs {self.first_page * self.page_size} to {self.num_tokens} tokens, got {num_tokens}"
            )
        self.num_tokens = num_tokens
        keep = self._pages(num_tokens)
        freed = self.private.let_go(self.slots[keep:])
        del self.slots[keep:]
        return freed

    def drop_before(self, position: int) -> list[int]:
        """Drop pages that end at or before ``position``, which no token reads any more. Return freed slots.

        A position beyond ``num_tokens`` counts as ``num_tokens``: a page that is still to be written stays.
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
        """Return the run of full pages that only this table owns, starting at the first page that is not sealed.

        Args:
            num_tokens: Ignore pages that end beyond this many tokens; ``self.num_tokens`` by default.
        """
        full = min(self.num_tokens, self.num_tokens if num_tokens is None else num_tokens) // self.page_size
        first = next((i for i in range(self.first_page, full) if self.slots[i] in self.private), full)
        stop = next((i for i in range(first, full) if not self.private.sole(self.slots[i])), full)
        return range(first, stop)

    def seal(self, first: int, slots: Sequence[int], generation: int) -> bool:
        """Mark pages from ``first`` on as sealed: the store owns them, in ``slots``.

        Returns:
            False if ``generation`` is from before the last ``clear``; nothing has changed then.

        Raises:
            ValueError: A page was not owned by this table alone.
        """
        if generation != self.generation:
            return False
        mine = self.slots[first : first + len(slots)]
        if len(mine) != len(slots) or not all(self.private.sole(slot) for slot in mine):
            raise ValueError(
                f"pages {first} to {first + len(slots) - 1} cannot be sealed: not all are owned by this table alone"
            )
        for slot in mine:
            self.private.hand_over(slot)
        self.slots[first : first + len(slots)] = slots
        return True

    def fork(self) -> BlockTable:
        """Return a second sequence of the family that shares all pages of this one.

        Pages that ``extend`` made writable are shared now: call ``extend`` again before writing in either.
        """
        other = BlockTable(self.page_size, self.private)
        other.slots, other.num_tokens, other.first_page = list(self.slots), self.num_tokens, self.first_page
        self.private.share(self.slots)
        return other

    def clear(self) -> list[int]:
        """Release all pages because the sequence ended or was preempted. Return freed slots."""
        freed = self.private.let_go(self.slots)
        self.slots, self.num_tokens, self.first_page = [], 0, 0
        self.generation += 1
        return freed

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _to_copy(self, stop: int, first: int | None) -> list[int]:
        """Return existing pages with tokens of ``[first, stop)`` that are sealed or shared."""
        start = self.num_tokens if first is None else first
        if not self.first_page * self.page_size <= start <= self.num_tokens:
            raise ValueError(
                f"writing must start at token {self.first_page * self.page_size} to {self.num_tokens}, got {start}"
            )
        pages = range(start // self.page_size, min(self._pages(stop), len(self.slots)))
        return [page for page in pages if not self.private.sole(self.slots[page])] if stop > start else []
