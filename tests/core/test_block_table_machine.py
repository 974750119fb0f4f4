"""Tests block tables with random sequences of calls. Also tests that the state machine detects planted bugs."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.block_machine import BlockMachine
from tests.core.block_model import Code
from tests.support import lanes
from tests.support.planting import SEARCH, Bug, load
from tierstore import block_table

BUGS = [
    Bug("a fork is not counted as a holder of its slots", "        self.private.share(self.slots)\n", ""),
    Bug(
        "a fork belongs to a new family",
        "BlockTable(self.page_size, self.private)",
        "BlockTable(self.page_size)",
    ),
    Bug(
        "a fork forgets its window",
        "= list(self.slots), self.num_tokens, self.first_page\n",
        "= list(self.slots), self.num_tokens, 0\n",
    ),
    Bug(
        "a fork shares its parent's list of slots",
        "= list(self.slots), self.num_tokens, self.first_page\n",
        "= self.slots, self.num_tokens, self.first_page\n",
    ),
    Bug(
        "truncate frees slots that other tables hold",
        "        freed = self.private.let_go(self.slots[keep:])\n",
        "        freed = self.slots[keep:]\n",
    ),
    Bug(
        "truncate at a page boundary keeps one page too many",
        "        keep = self._pages(num_tokens)\n",
        "        keep = num_tokens // self.page_size + 1\n",
    ),
    Bug(
        "truncate inside a page releases that page",
        "        keep = self._pages(num_tokens)\n",
        "        keep = num_tokens // self.page_size\n",
    ),
    Bug(
        "lost pages are released although others own their slots",
        "        freed = self.private.let_go(self.slots[stop:])\n",
        "        freed = self.private.let_go(self.slots[first:])\n",
    ),
    Bug(
        "private pages after lost ones are not released",
        "        freed = self.private.let_go(self.slots[stop:])\n",
        "        freed = []\n",
    ),
    Bug("lost pages stay in the table", "        del self.slots[first:]\n", ""),
    Bug(
        "tokens of lost pages still count", "min(self.num_tokens, first * self.page_size)", "self.num_tokens"
    ),
    Bug("truncate leaves stale slots in the table", "        del self.slots[keep:]\n", ""),
    Bug(
        "truncate releases no slot",
        "        freed = self.private.let_go(self.slots[keep:])\n",
        "        freed = []\n",
    ),
    Bug(
        "truncate accepts positions before the window",
        "if not self.first_page * self.page_size <= num_tokens <= self.num_tokens:",
        "if not num_tokens <= self.num_tokens:",
    ),
    Bug(
        "a sealed page is written",
        "if not self.private.sole(self.slots[page])] if",
        "if self.slots[page] in self.private and not self.private.sole(self.slots[page])] if",
    ),
    Bug(
        "a shared page is written",
        "if not self.private.sole(self.slots[page])] if",
        "if self.slots[page] not in self.private] if",
    ),
    Bug(
        "a write into a partly filled page makes no copy",
        "pages = range(start // self.page_size,",
        "pages = range(-(-start // self.page_size),",
    ),
    Bug(
        "an overwrite copies only its first page",
        "min(self._pages(stop), len(self.slots)))\n",
        "min(start // self.page_size + 1, len(self.slots)))\n",
    ),
    Bug(
        "the table keeps the old slot of a copied page", "            self.slots[page] = copies[-1].dst\n", ""
    ),
    Bug("the source of a copy keeps its holder", "            self.private.let_go([self.slots[page]])\n", ""),
    Bug("a copy is not owned", "            self.private.take(copies[-1].dst)\n", ""),
    Bug(
        "a slot is owned twice",
        "if len(set(new)) < len(new) or any(slot in self.private for slot in new):",
        "if len(set(new)) < len(new):",
    ),
    Bug(
        "the number of new slots is not checked",
        "        if len(new) != self.missing_slots(stop, first):\n",
        "        if False:\n",
    ),
    Bug(
        "a slot is freed while another table holds it",
        "                if not self._holders[slot]:\n",
        "                if self._holders[slot] <= 1:\n",
    ),
    Bug("freed slots stay owned", "                    del self._holders[slot]\n", ""),
    Bug(
        "the window drops a page that is partly inside it",
        "        stop = min(position, self.num_tokens) // self.page_size\n",
        "        stop = self._pages(min(position, self.num_tokens))\n",
    ),
    Bug(
        "the window drops pages that are not written yet",
        "        stop = min(position, self.num_tokens) // self.page_size\n",
        "        stop = min(position // self.page_size, len(self.slots))\n",
    ),
    Bug(
        "the window drops nothing",
        "        freed = self.private.let_go(self.slots[dropped])\n",
        "        freed = []\n",
    ),
    Bug(
        "dropped pages stay in the table",
        "        self.slots[dropped] = [NO_PAGE] * (stop - self.first_page)\n",
        "",
    ),
    Bug("the start of the window is not updated", "        self.first_page = stop\n", ""),
    Bug(
        "place accepts positions before the window",
        "if not self.first_page * self.page_size <= position <",
        "if not 0 <= position <",
    ),
    Bug(
        "a shared page may be sealed",
        "stop = next((i for i in range(first, full) if not self.private.sole(self.slots[i])), full)",
        "stop = next((i for i in range(first, full) if self.slots[i] not in self.private), full)",
    ),
    Bug(
        "a partly filled page may be sealed",
        "full = min(self.num_tokens, self.num_tokens if num_tokens is None else num_tokens) // self.page_size",
        "full = self._pages(min(self.num_tokens, self.num_tokens if num_tokens is None else num_tokens))",
    ),
    Bug(
        "the result of an outdated put is applied",
        "        if generation != self.generation:\n",
        "        if False:\n",
    ),
    Bug("clear does not change the generation", "        self.generation += 1\n", ""),
    Bug(
        "the table keeps the old slot of a sealed page",
        "        self.slots[first : first + len(slots)] = slots\n",
        "",
    ),
    Bug("a sealed page stays private", "            self.private.hand_over(slot)\n", "            pass\n"),
    Bug(
        "a put may seal pages that are not private",
        "        if len(mine) != len(slots) or not all(self.private.sole(slot) for slot in mine):\n",
        "        if False:\n",
    ),
    Bug(
        "clear releases no slot",
        "        freed = self.private.let_go(self.slots)\n",
        "        freed = []\n",
    ),
    Bug(
        "clear keeps the window",
        "        self.slots, self.num_tokens, self.first_page = [], 0, 0\n",
        "        self.slots, self.num_tokens = [], 0\n",
    ),
    Bug(
        "sealed pages count as private",
        "    def let_go(self, slots: Iterable[int]) -> list[int]:\n",
        "    def let_go(self, slots: Iterable[int]) -> list[int]:\n"
        "        self._holders.update({slot: 1 for slot in slots if slot not in self._holders and slot >= 0})\n",
    ),
]


def with_bug(bug: Bug) -> type[BlockMachine]:
    """Return the state machine for a copy of the module that contains the bug."""
    room = vars(load(block_table, bug))
    return type("Mutant", (BlockMachine,), {"code": Code(room["BlockTable"], room["PrivateSlots"])})


def test_no_order_of_calls_breaks_block_tables() -> None:
    run_state_machine_as_test(
        BlockMachine, settings=settings(max_examples=lanes.examples(35, 800), stateful_step_count=40)
    )


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_machine_notices(bug: Bug) -> None:
    machine = with_bug(bug)  # before the ``with``, so that an outdated ``old`` fails the test
    with pytest.raises((AssertionError, LookupError, ValueError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=SEARCH)


@pytest.mark.deep
def test_the_loaded_copy_without_a_bug_passes() -> None:
    """Show that failures come from the planted bugs, and not from loading a copy of the module."""
    same = Bug("none", "class BlockTable:", "class BlockTable:")
    run_state_machine_as_test(with_bug(same), settings=settings(SEARCH, max_examples=30))
