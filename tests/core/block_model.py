"""A reference model for block tables: sequences are plain lists, and the slots contain real tokens."""

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
"""Content of slots that were never written, or that were freed."""


@dataclass(eq=False)
class Row:
    """A table and the tokens that its pages must contain. Tokens before page ``first_page`` are not read again.

    ``lives`` is the number of times that the table was cleared.
    """

    table: BlockTable
    tokens: list[int]
    first_page: int = 0
    lives: int = 0


@dataclass(eq=False)
class Ticket:
    """A put in progress. ``moved`` is the number of leading pages that the store already has in other slots."""

    row: Row
    life: int
    generation: int
    first: int
    mine: list[int]
    contents: list[tuple[int, ...]]
    moved: int


@dataclass(frozen=True)
class Code:
    """The classes under test."""

    table: type[BlockTable] = BlockTable
    private: type[PrivateSlots] = PrivateSlots


class BlockModel:
    """A store of ``NUM_SLOTS`` slots, and the sequences in its block tables.

    ``owned`` contains the slots that were given to tables and are still private. ``sealed`` maps the slot of each
    sealed page to its tokens.
    """

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

    # -- state of the model --------------------------------------------------------------------------------------

    def pointing(self) -> Counter[int]:
        return Counter(slot for row in self.rows for slot in row.table.slots if slot != NO_PAGE)

    def writable(self, slot: int) -> bool:
        return slot in self.owned and self.pointing()[slot] == 1

    def needs(self, row: Row, first: int, stop: int) -> int:
        """Return how many slots a write of tokens ``[first, stop)`` needs, for new pages and for copies."""
        pages = range(first // self.page_size, -(-stop // self.page_size)) if stop > first else range(0)
        held = len(row.table.slots)
        return sum(page >= held or not self.writable(row.table.slots[page]) for page in pages)

    # -- steps of a caller ---------------------------------------------------------------------------------------

    def take(self, num_slots: int) -> list[int]:
        """Return up to ``num_slots`` free slots. If necessary, evict sealed pages that no table refers to."""
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
        """Return to the store the slots that a table freed."""
        for slot in slots:
            assert slot in self.owned, "a slot was freed twice, or did not belong to the table"
            self.owned.remove(slot)
            self.put_back(slot)

    def write(self, row: Row, first: int, stop: int, reserve: int = 0) -> None:
        """Write tokens ``[first, stop)``, with space for ``reserve`` more, unless the store has too few slots."""
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
            assert self.writable(slot), "a page that others read was overwritten"
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
        """End a put and seal its pages.

        The first ``ticket.moved`` pages get other slots, because the store already has them. The rest keep theirs.
        """
        row = ticket.row
        size, stop = self.page_size, ticket.first + len(ticket.mine)
        late = row.lives != ticket.life
        here = row.table.slots[ticket.first : stop] == ticket.mine and stop * size <= len(row.tokens)
        if not late and not (here and all(map(self.writable, ticket.mine))):
            return  # The pages were truncated, shared or dropped. An engine does not seal such pages.
        other = self.take(ticket.moved)
        slots = other + ticket.mine[len(other) :]
        for slot, content in zip(other, ticket.contents, strict=False):
            self.memory[slot], self.sealed[slot] = list(content), content
        if late:
            with self.nothing_changes(row):
                assert not row.table.seal(ticket.first, slots, ticket.generation)
            return
        current = [tuple(self.memory[slot]) for slot in ticket.mine]
        for slot, content in zip(slots, current, strict=True):  # includes overwrites during the put
            self.memory[slot], self.sealed[slot] = list(content), content
        assert row.table.seal(ticket.first, slots, ticket.generation)
        self.owned.difference_update(ticket.mine)
        for slot in ticket.mine[: len(other)]:
            self.put_back(slot)

    # -- checks ----------------------------------------------------------------------------------------------------

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
        """Assert that the code in the ``with`` block raises ValueError and does not change the table."""
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
        assert not pointing.keys() & set(self.free), "a slot is free although a table refers to it"
        assert pointing.keys() <= self.owned | self.sealed.keys(), (
            "a table refers to a slot that has no owner and no sealed page"
        )
        assert self.owned <= pointing.keys(), "a family owns a slot to which no table refers"
        assert not self.owned & self.sealed.keys()
        assert sorted([*self.free, *self.owned, *self.sealed]) == list(range(NUM_SLOTS))
        assert sum(map(len, self.families)) == len(self.owned)
        for slot, content in self.sealed.items():
            assert tuple(self.memory[slot]) == content, "a sealed page was overwritten"


def sequence_in(slots: Sequence[int], model: BlockModel) -> list[int]:
    """Return the tokens of these sealed pages, in order."""
    return [token for slot in slots for token in model.sealed[slot]]
