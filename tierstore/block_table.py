"""A sequence and its pages: forks that share them, rollback, a window that moves on. Metadata only.

A page of a table is one of

    sealed    the store's, read only; a lease keeps it in its slot, the table only points at it
    private   owned by this family of tables, writable while exactly one of them points at it
    dropped   behind the window: NO_PAGE

A family is a sequence and its forks. Who writes into a page that is sealed or shared gets a copy of it first
(copy-on-write, as in vLLM's PagedAttention, Kwon et al. 2023). It knows tokens and slots; no tiers, keys or bytes.
One thread at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

NO_PAGE = -1
"""The slot of a page that was dropped behind the window."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """The bytes of one slot are to be copied into another before anything is written there."""

    src: int
    dst: int


class PrivateSlots:
    """The slots that a family of tables owns, and how many of its tables point at each."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, slot: int) -> bool:
        return slot in self._holders

    def sole(self, slot: int) -> bool:
        """Whether the slot is private and one table alone points at it."""
        return self._holders.get(slot) == 1

    def take(self, slot: int) -> None:
        """The family owns one more slot. ValueError if it owned it already."""
        if slot in self._holders:
            raise ValueError(f"slot {slot} is owned already")
        self._holders[slot] = 1

    def share(self, slots: Iterable[int]) -> None:
        """One more table points at these; sealed and dropped pages are not counted."""
        for slot in slots:
            if slot in self._holders:
                self._holders[slot] += 1

    def let_go(self, slots: Iterable[int]) -> list[int]:
        """One table less points at these. Returns those that nobody points at any more: they are owned no longer."""
        unused = []
        for slot in slots:
            if slot in self._holders:
                self._holders[slot] -= 1
                if not self._holders[slot]:
                    del self._holders[slot]
                    unused.append(slot)
        return unused

    def hand_over(self, slot: int) -> None:
        """The slot became the store's. ValueError unless one table alone points at it."""
        if not self.sole(slot):
            raise ValueError(f"slot {slot} is not owned by one table alone")
        del self._holders[slot]


class BlockTable:
    """Page ``i`` holds tokens ``[i * page_size, (i + 1) * page_size)`` of the sequence, in slot ``slots[i]``.

    Methods that free slots return them, each once: the caller gives them back to the store.
    """

    def __init__(self, page_size: int, private: PrivateSlots | None = None) -> None:
        """An empty sequence. ``private``: the slots of its family; a new family without it."""
        self.page_size = page_size
        self.slots: list[int] = []
        self.num_tokens = 0
        """Tokens whose K/V is in the pages (those dropped behind the window included)."""
        self.first_page = 0
        """Pages before this one were dropped."""
        self.generation = 0
        """Grows with each ``clear``: what was begun in an earlier life of the sequence comes too late."""
        self.private = PrivateSlots() if private is None else private

    def reuse(self, slots: Sequence[int], first_page: int = 0) -> None:
        """Begin an empty table with sealed pages, all full. ``first_page``: those before it are behind the window.

        ValueError if the table is not empty.
        """
        if self.slots or self.num_tokens:
            raise ValueError("the table is not empty")
        self.first_page = first_page
        self.slots = [NO_PAGE] * first_page + list(slots)
        self.num_tokens = len(self.slots) * self.page_size

    def missing_slots(self, stop: int, first: int | None = None) -> int:
        """Slots that ``extend`` with these needs: new pages, and one for the copy of each page that is not ours."""
        return max(0, self._pages(stop) - len(self.slots)) + len(self._to_copy(stop, first))

    def extend(self, stop: int, new: Sequence[int], first: int | None = None) -> list[PageCopy]:
        """Make tokens ``[first, stop)`` writable in ``new`` slots, ``missing_slots`` of them, private from now on.

        ``first``: ``num_tokens`` unless said otherwise; a lower one overwrites. Returns the copies that have to be
        made before anything is written. ``num_tokens`` does not change: say ``advance`` once they are written.
        ValueError for another count of slots, a slot the family owns already or given twice, or tokens behind the
        window, nothing changed then.
        """
        if len(new) != self.missing_slots(stop, first):
            raise ValueError(f"{len(new)} slots; allowed: {self.missing_slots(stop, first)}")
        if len(set(new)) < len(new) or any(slot in self.private for slot in new):
            raise ValueError(f"slots {list(new)}: one is owned already, or given twice")
        fresh = list(new)
        copies = []
        for page in self._to_copy(stop, first):
            copies.append(PageCopy(self.slots[page], fresh.pop()))
            # The source is sealed, or another table points at it too: letting go of it frees nothing.
            self.private.let_go([self.slots[page]])
            self.private.take(copies[-1].dst)
            self.slots[page] = copies[-1].dst
        for slot in fresh:
            self.private.take(slot)
        self.slots += fresh
        return copies

    def place(self, position: int) -> tuple[int, int]:
        """Slot and offset of the token at ``position``. ValueError behind the window and where there is no room."""
        if not self.first_page * self.page_size <= position < len(self.slots) * self.page_size:
            raise ValueError(f"position {position} is in no page of this sequence")
        return self.slots[position // self.page_size], position % self.page_size

    def advance(self, num_tokens: int) -> None:
        """The K/V of all tokens before ``num_tokens`` is in the pages. ValueError where there is no room for them."""
        if not self.num_tokens <= num_tokens <= len(self.slots) * self.page_size:
            raise ValueError(f"advance from {self.num_tokens} to {num_tokens} in {len(self.slots)} pages")
        self.num_tokens = num_tokens

    def truncate(self, num_tokens: int) -> list[int]:
        """Forget all but the first ``num_tokens`` tokens (speculative decoding took them back); freed slots.

        ValueError, nothing changed, below a page that was dropped, or beyond the end.
        """
        if not self.first_page * self.page_size <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"truncate to {num_tokens}; allowed: {self.first_page * self.page_size} to {self.num_tokens}"
            )
        self.num_tokens = num_tokens
        keep = self._pages(num_tokens)
        freed = self.private.let_go(self.slots[keep:])
        del self.slots[keep:]
        return freed

    def drop_before(self, position: int) -> list[int]:
        """No token before ``position`` is read any more: pages that end at or before it are dropped; freed slots.

        Positions beyond ``num_tokens`` count as it: a page that is still to be written stays.
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
        """The full pages that this table alone owns, from the first that is not the store's on.

        ``num_tokens``: pages that end beyond it do not count; all tokens unless said otherwise.
        """
        full = min(self.num_tokens, self.num_tokens if num_tokens is None else num_tokens) // self.page_size
        first = next((i for i in range(self.first_page, full) if self.slots[i] in self.private), full)
        stop = next((i for i in range(first, full) if not self.private.sole(self.slots[i])), full)
        return range(first, stop)

    def seal(self, first: int, slots: Sequence[int], generation: int) -> bool:
        """Pages from ``first`` on became the store's, and are in ``slots`` now. False: too late, nothing changed.

        Too late is what was begun before the last ``clear``. ValueError for a page that was not owned alone.
        """
        if generation != self.generation:
            return False
        mine = self.slots[first : first + len(slots)]
        if len(mine) != len(slots) or not all(self.private.sole(slot) for slot in mine):
            raise ValueError(
                f"pages {first} to {first + len(slots) - 1} are not all owned by this table alone"
            )
        for slot in mine:
            self.private.hand_over(slot)
        self.slots[first : first + len(slots)] = slots
        return True

    def fork(self) -> BlockTable:
        """A second sequence of the family that begins like this one and shares all its pages.

        What ``extend`` made writable in either is so no longer: say it again before writing.
        """
        other = BlockTable(self.page_size, self.private)
        other.slots, other.num_tokens, other.first_page = list(self.slots), self.num_tokens, self.first_page
        self.private.share(self.slots)
        return other

    def clear(self) -> list[int]:
        """Let go of everything: the sequence ends, or is preempted and will begin anew; freed slots."""
        freed = self.private.let_go(self.slots)
        self.slots, self.num_tokens, self.first_page = [], 0, 0
        self.generation += 1
        return freed

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _to_copy(self, stop: int, first: int | None) -> list[int]:
        """The pages that hold tokens of ``[first, stop)``, exist, and are sealed or shared."""
        start = self.num_tokens if first is None else first
        if not self.first_page * self.page_size <= start <= self.num_tokens:
            raise ValueError(
                f"write from {start} on; allowed: {self.first_page * self.page_size} to {self.num_tokens}"
            )
        pages = range(start // self.page_size, min(self._pages(stop), len(self.slots)))
        return [page for page in pages if not self.private.sole(self.slots[page])] if stop > start else []
