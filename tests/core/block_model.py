"""What block tables are checked against: sequences that are plain lists, and slots that are really written."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tierstore.block_table import NO_PAGE, BlockTable, PrivateSlots

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

NUM_SLOTS = 20
POISON = -7
"""What stands where nobody has written, and where a slot was freed."""


@dataclass(eq=False)
class Row:
    """A table and what it has to read back. ``tokens`` before page ``first_page`` are not read any more."""

    table: BlockTable
    tokens: list[int]
    first_page: int = 0
    lives: int = 0


@dataclass(eq=False)
class Ticket:
    """Pages on their way to the store. ``moved``: how many of them the store already holds, in other slots."""

    row: Row
    life: int
    generation: int
    first: int
    mine: list[int]
    contents: list[tuple[int, ...]]
    moved: int


@dataclass(frozen=True)
class Code:
    """The code under test."""

    table: type[BlockTable] = BlockTable
    private: type[PrivateSlots] = PrivateSlots


class BlockModel:
    """``owned``: given to tables and not heard of again. ``sealed``: the store's, by slot, with what is in them."""

    def begin(self, code: Code, page_size: int) -> None:
        self.code, self.page_size = code, page_size
        self.memory = {slot: [POISON] * page_size for slot in range(NUM_SLOTS)}
        self.free = list(self.memory)
        self.owned: set[int] = set()
        self.sealed: dict[int, tuple[int, ...]] = {}
        self.families = [code.private(), code.private()]
        self.rows: list[Row] = []
        self.tickets: list[Ticket] = []
        self.values = count()

    # -- what the model knows ------------------------------------------------------------------------------------

    def pointing(self) -> Counter[int]:
        return Counter(slot for row in self.rows for slot in row.table.slots if slot != NO_PAGE)

    def writable(self, slot: int) -> bool:
        return slot in self.owned and self.pointing()[slot] == 1

    def needs(self, row: Row, first: int, stop: int) -> int:
        """Slots that writing ``[first, stop)`` takes: new pages, and those that others may read too."""
        pages = range(first // self.page_size, -(-stop // self.page_size)) if stop > first else range(0)
        held = len(row.table.slots)
        return sum(page >= held or not self.writable(row.table.slots[page]) for page in pages)

    # -- what callers of a table do ------------------------------------------------------------------------------

    def take(self, num_slots: int) -> list[int]:
        """The store's side of ``allocate``: slots that no table names, then those of pages it can do without."""
        pointing = self.pointing()
        for slot in [slot for slot in self.sealed if not pointing[slot]]:
            if len(self.free) < num_slots:
                del self.sealed[slot]
                self.put_back(slot)
        taken, self.free = self.free[:num_slots], self.free[num_slots:]
        return taken

    def put_back(self, slot: int) -> None:
        self.memory[slot] = [POISON] * self.page_size
        self.free.append(slot)

    def freed(self, slots: Iterable[int]) -> None:
        """A table says that these are ours to give back."""
        for slot in slots:
            assert slot in self.owned, "freed twice, or not the table's"
            self.owned.remove(slot)
            self.put_back(slot)

    def write(self, row: Row, first: int, stop: int, reserve: int = 0) -> None:
        """Tokens ``[first, stop)`` anew, with room for ``reserve`` more; nothing if the store has no room."""
        needed = self.needs(row, first, stop + reserve)
        assert row.table.missing_slots(stop + reserve, first) == needed
        slots = self.take(needed)
        if len(slots) < needed:
            self.free += slots
            return
        self.owned.update(slots)
        for copy in row.table.extend(stop + reserve, slots, first):
            assert copy.dst in slots
            self.memory[copy.dst] = list(self.memory[copy.src])
        for position in range(first, stop):
            slot, offset = row.table.place(position)
            assert self.writable(slot), "written into a page that others read"
            self.memory[slot][offset] = next(self.values)
            row.tokens[position : position + 1] = [self.memory[slot][offset]]
        row.table.advance(len(row.tokens))

    def end_life(self, row: Row) -> None:
        self.freed(row.table.clear())
        row.tokens, row.first_page, row.lives = [], 0, row.lives + 1

    def expected_sealable(self, row: Row, limit: int) -> range:
        slots, full = row.table.slots, min(limit, len(row.tokens)) // self.page_size
        first = next((page for page in range(row.first_page, full) if slots[page] in self.owned), full)
        stop = first
        while stop < full and self.writable(slots[stop]):
            stop += 1
        return range(first, stop)

    def ticket(self, row: Row, pages: range, moved: int) -> Ticket:
        mine = row.table.slots[pages.start : pages.stop]
        contents = [tuple(self.memory[slot]) for slot in mine]
        return Ticket(
            row, row.lives, row.table.generation, pages.start, mine, contents, min(moved, len(mine))
        )

    def finish(self, ticket: Ticket) -> None:
        """The store has taken the pages: in the slots they were in, but for the first few, which it had already."""
        row = ticket.row
        size, stop = self.page_size, ticket.first + len(ticket.mine)
        late = row.lives != ticket.life
        here = row.table.slots[ticket.first : stop] == ticket.mine and stop * size <= len(row.tokens)
        if not late and not (here and all(map(self.writable, ticket.mine))):
            return  # Truncated, shared or dropped meanwhile: an engine does not tell of these.
        other = self.take(ticket.moved)
        slots = other + ticket.mine[len(other) :]
        for slot, content in zip(other, ticket.contents, strict=False):
            self.memory[slot], self.sealed[slot] = list(content), content
        if late:
            with self.nothing_changes(row):
                assert not row.table.seal(ticket.first, slots, ticket.generation)
            return
        current = [tuple(self.memory[slot]) for slot in ticket.mine]
        for slot, content in zip(slots, current, strict=True):  # an overwrite before the end counts
            self.memory[slot], self.sealed[slot] = list(content), content
        assert row.table.seal(ticket.first, slots, ticket.generation)
        self.owned.difference_update(ticket.mine)
        for slot in ticket.mine[: len(other)]:
            self.put_back(slot)

    # -- what holds ------------------------------------------------------------------------------------------------

    @contextmanager
    def nothing_changes(self, row: Row) -> Iterator[None]:
        def state() -> SimpleNamespace:
            table = row.table
            held = [(slot in table.private, table.private.sole(slot)) for slot in range(NUM_SLOTS)]
            return SimpleNamespace(
                slots=list(table.slots), count=table.num_tokens, life=table.generation, held=held
            )

        before = state()
        yield
        assert state() == before

    @contextmanager
    def refused(self, row: Row) -> Iterator[None]:
        """The call inside raises ValueError and leaves the table as it was."""
        with self.nothing_changes(row), pytest.raises(ValueError, match=r"."):
            yield

    def check_reading(self) -> None:
        for row in self.rows:
            table, size = row.table, self.page_size
            assert table.num_tokens == len(row.tokens)
            assert table.first_page == row.first_page
            assert table.slots[: row.first_page] == [NO_PAGE] * row.first_page
            assert NO_PAGE not in table.slots[row.first_page :]
            assert [
                self._read(row, at) for at in range(row.first_page * size, len(row.tokens))
            ] == row.tokens[row.first_page * size :]

    def _read(self, row: Row, position: int) -> int:
        slot, offset = row.table.place(position)
        return self.memory[slot][offset]

    def check_slots(self) -> None:
        pointing = self.pointing()
        assert not pointing.keys() & set(self.free), "free and in use"
        assert pointing.keys() <= self.owned | self.sealed.keys(), "pointed at, and nobody's"
        assert self.owned <= pointing.keys(), "owned by a family, and no table knows it"
        assert not self.owned & self.sealed.keys()
        assert sorted([*self.free, *self.owned, *self.sealed]) == list(range(NUM_SLOTS))
        assert sum(map(len, self.families)) == len(self.owned)
        for slot, content in self.sealed.items():
            assert tuple(self.memory[slot]) == content, "a sealed page was written"


def sequence_in(slots: Sequence[int], model: BlockModel) -> list[int]:
    """The tokens that sealed pages hold, in order."""
    return [token for slot in slots for token in model.sealed[slot]]
