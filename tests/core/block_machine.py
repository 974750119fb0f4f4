"""A state machine that calls the methods of block tables in random order and reads tokens back from the slots."""

from __future__ import annotations

from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.core.block_model import NUM_SLOTS, BlockModel, Code, Row, sequence_in


class BlockMachine(BlockModel, RuleBasedStateMachine):
    """Two families of block tables that share a store. ``code`` contains the classes under test."""

    code: ClassVar[Code] = Code()  # type: ignore[misc]

    @initialize(page_size=st.sampled_from((1, 2, 3, 4)))
    def start(self, page_size: int) -> None:
        self.begin(type(self).code, page_size)
        self._open(0)

    def _open(self, family: int) -> Row:
        self.rows.append(Row(self.code.table(self.page_size, self.families[family]), []))
        return self.rows[-1]

    def _row(self, data: st.DataObject) -> Row:
        return data.draw(st.sampled_from(self.rows), label="row")

    # -- sequences that start and end ---------------------------------------------------------------------------

    @precondition(lambda self: len(self.rows) < 4)
    @rule(family=st.integers(0, 1))
    def open(self, family: int) -> None:
        self._open(family)

    @precondition(lambda self: self.sealed and len(self.rows) < 4)
    @rule(data=st.data(), family=st.integers(0, 1), behind=st.sampled_from((0, 0, 1)))
    def share(self, data: st.DataObject, family: int, behind: int) -> None:
        """Start a sequence with sealed pages. The first ``behind`` pages are outside its window."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.sealed)), max_size=3, unique=True))
        row = self._open(family)
        row.table.reuse(slots, behind)
        row.tokens, row.first_page = [-1] * behind * self.page_size + sequence_in(slots, self), behind

    @precondition(lambda self: self.rows and len(self.rows) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row = self._row(data)
        self.rows.append(Row(row.table.fork(), list(row.tokens), row.first_page))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Clear the table and let its sequence start again. Puts in progress continue."""
        self.end_life(self._row(data))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        row = self._row(data)
        self.rows.remove(row)
        self.end_life(row)
        assert row.table.clear() == []

    # -- tokens -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(0, 9), reserve=st.sampled_from((0, 0, 1, 5)))
    def append(self, data: st.DataObject, more: int, reserve: int) -> None:
        row = self._row(data)
        self.write(row, len(row.tokens), len(row.tokens) + more, reserve)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(1, 9))
    def overwrite(self, data: st.DataObject, more: int) -> None:
        row = self._row(data)
        first = data.draw(st.integers(row.first_page * self.page_size, len(row.tokens)))
        self.write(row, first, first + more)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), back=st.integers(0, 9))
    def truncate(self, data: st.DataObject, back: int) -> None:
        row = self._row(data)
        stop = max(row.first_page * self.page_size, len(row.tokens) - back)
        self.freed(row.table.truncate(stop))
        del row.tokens[stop:]
        assert len(row.table.slots) == -(-stop // self.page_size), "stale slots"

    @precondition(lambda self: 0 < len(self.rows) < 4)
    @rule(data=st.data(), more=st.integers(0, 3))
    def lose(self, data: st.DataObject, more: int) -> None:
        """Let the load of a sealed page fail. A new sequence takes the page's slot before the table is told."""
        row = self._row(data)
        pointing, slots = self.pointing(), row.table.slots
        lost = [page for page, slot in enumerate(slots) if slot in self.sealed and pointing[slot] == 1]
        if not lost:
            return
        first = data.draw(st.sampled_from(lost))
        stop = next((page for page in range(first, len(slots)) if page not in lost), len(slots))
        self.rows.remove(row)
        for slot in slots[first:stop]:
            del self.sealed[slot]
            self.put_back(slot)
            self.free.insert(0, self.free.pop())
        family = next(at for at, private in enumerate(self.families) if private is row.table.private)
        other = self._open(family)
        self.write(other, 0, more)
        self.rows.append(row)
        self.freed(row.table.lose(first, stop))
        del row.tokens[first * self.page_size :]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def drop_behind_window(self, data: st.DataObject) -> None:
        row = self._row(data)
        position = data.draw(st.integers(0, len(row.tokens) + self.page_size))
        self.freed(row.table.drop_before(position))
        row.first_page = max(row.first_page, min(position, len(row.tokens)) // self.page_size)

    # -- pages that are handed over to the store ----------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), moved=st.integers(0, 2), less=st.sampled_from((0, 0, 0, 1)), late=st.booleans())
    def seal(self, data: st.DataObject, moved: int, less: int, late: bool) -> None:
        """Seal the full private pages of a sequence.

        Args:
            moved: Number of pages that the store already has in other slots.
            less: Number of tokens at the end that must not be sealed.
            late: Whether the store returns the slots only after other calls.
        """
        row = self._row(data)
        limit = len(row.tokens) - less
        pages = row.table.sealable(limit)
        wanted = self.expected_sealable(row, limit)
        assert (list(pages), list(row.table.sealable())) == (
            list(wanted),
            list(self.expected_sealable(row, len(row.tokens))),
        )
        if pages:
            ticket = self.ticket(row, pages, moved)
            if late:
                self.tickets.append(ticket)
            else:
                self.finish(ticket)

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def late_answer(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        self.tickets.remove(ticket)
        self.finish(ticket)

    @precondition(lambda self: any(self.expected_sealable(row, len(row.tokens)) for row in self.rows))
    @rule(data=st.data(), moved=st.integers(0, 2))
    def answer_after_the_sequence_came_back(self, data: st.DataObject, moved: int) -> None:
        """Preempt a sequence during a put, and write the same number of tokens again before the put ends."""
        row = data.draw(st.sampled_from([r for r in self.rows if self.expected_sealable(r, len(r.tokens))]))
        num_tokens = len(row.tokens)
        ticket = self.ticket(row, row.table.sealable(), moved)
        self.end_life(row)
        self.write(row, 0, num_tokens)
        self.finish(ticket)

    # -- calls that must be rejected ----------------------------------------------------------------------------

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), more=st.integers(1, 5))
    def wrong_slots(self, data: st.DataObject, more: int) -> None:
        """Try to extend a table with one slot too many, a slot that is owned already, or the same slot twice."""
        row = self._row(data)
        start, stop = len(row.tokens), len(row.tokens) + more
        needed = self.needs(row, start, stop)
        spare = range(NUM_SLOTS, 2 * NUM_SLOTS)
        wrong = [list(spare[: needed + 1])]
        if needed:
            mine = [slot for slot in self.owned if slot in row.table.private]
            wrong += [[*spare[: needed - 1], slot] for slot in mine]
            wrong += [[slot, *spare[: needed - 1]] for slot in mine]
        if needed > 1:
            wrong.append([spare[0]] * needed)
        for slots in wrong:
            with self.refused(row):
                row.table.extend(stop, slots)

    @precondition(lambda self: any(row.first_page for row in self.rows))
    @rule(data=st.data())
    def reach_behind_the_window(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if row.first_page]))
        gone = data.draw(st.integers(0, row.first_page * self.page_size - 1))
        with self.refused(row):
            row.table.truncate(gone)
        with self.refused(row):
            row.table.missing_slots(gone + 1, gone)
        with self.refused(row):
            row.table.place(gone)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def reach_beyond_the_end(self, data: st.DataObject) -> None:
        row = self._row(data)
        with self.refused(row):
            row.table.truncate(len(row.tokens) + 1)
        with self.refused(row):
            row.table.advance(len(row.table.slots) * self.page_size + 1)
        with self.refused(row):
            row.table.place(len(row.table.slots) * self.page_size)
        with self.refused(row):
            row.table.place(-1)

    @precondition(lambda self: any(row.table.slots for row in self.rows))
    @rule(data=st.data())
    def seal_what_is_not_owned_alone(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in self.rows if row.table.slots]))
        page = data.draw(st.integers(0, len(row.table.slots) - 1))
        slot = row.table.slots[page]
        if not self.writable(slot):
            with self.refused(row):
                row.table.seal(page, [slot], row.table.generation)
        with self.refused(row):
            row.table.seal(len(row.table.slots), [slot], row.table.generation)

    # -- invariants ---------------------------------------------------------------------------------------------

    @invariant()
    def each_sequence_reads_back_its_tokens(self) -> None:
        self.check_reading()

    @invariant()
    def every_slot_is_in_one_place(self) -> None:
        self.check_slots()
