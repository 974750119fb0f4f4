"""Tests that the state machine of residency detects planted bugs: each change to the source makes it fail."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.core.machine import ResidencyMachine
from tests.core.model import Code
from tests.support import planting
from tests.support.planting import Bug
from tierstore.directory import residency
from tierstore.errors import TierStoreError

pytestmark = pytest.mark.deep

SEARCH = settings(planting.SEARCH, stateful_step_count=50)


BUGS = [
    Bug(
        "abort frees the slot at once",
        "table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins + 1)",
        "table.put_back(copy.slot, copy.nbytes)",
    ),
    Bug(
        "abort frees the slot at once, and the end of the copy is ignored",
        """        table.quarantine[copy.slot] = Dead(key, copy.nbytes, copy.pins + 1)
""",
        """        table.put_back(copy.slot, copy.nbytes)
        self._let_go = lambda *_: None
""",
    ),
    Bug(
        "an aborted copy does not count its writer",
        "Dead(key, copy.nbytes, copy.pins + 1)",
        "Dead(key, copy.nbytes, max(1, copy.pins))",
    ),
    Bug(
        "evict ignores pins",
        "        if copy.pins:\n            table.quarantine",
        "        if False:\n            table.quarantine",
    ),
    Bug(
        "the source is not pinned",
        "                below.pins += 1\n                if below.pins == 1:",
        "                if False:",
    ),
    Bug(
        "a copy is readable before commit",
        "Copy(slot, nbytes, rank, pins=pins)",
        "Copy(slot, nbytes, rank, True, pins=pins)",
    ),
    Bug(
        "a pinned copy may be evicted",
        "        table.withdraw(copy)\n        if self._memory_only",
        "        if self._memory_only",
    ),
    Bug(
        "a source that is still in flight is copied",
        "if key in copies or (copied and (below is None or not below.ready)):",
        "if key in copies or (copied and below is None):",
    ),
    Bug(
        "an existing copy is overwritten",
        "if key in copies or (copied and (below is None or not below.ready)):",
        "if copied and (below is None or not below.ready):",
    ),
    Bug(
        "a copy that is pinned from its start is not counted as pinned",
        "        table.pinned += len(places) if pins else 0\n",
        "",
    ),
    Bug(
        "a mirror of a pinned copy keeps its queue",
        "        if self._memory_only.lowest_for(key) != tier:\n            self.settle_mirror",
        "        if False:\n            self.settle_mirror",
    ),
    Bug(
        "the first pin of a source is not reported",
        "                    held(key, origin, source, below)\n",
        "                    pass\n",
    ),
    Bug(
        "the first pin of a copy in flight is not counted",
        "                else:\n                    table.pinned += 1\n            slots.append",
        "            slots.append",
    ),
    Bug(
        "a copy that arrived stays in its queues",
        "            resettle(key)\n        return found",
        "            pass\n        return found",
    ),
    Bug("a copy that arrived is not counted as ready", "            table.arriving -= 1\n", ""),
    Bug(
        "an unpinned copy that arrived is not counted as idle",
        "            table.idle += not copy.pins\n",
        "",
    ),
    Bug(
        "a source stays pinned",
        "                    below.pins -= 1\n                    if not",
        "                    if not",
    ),
    Bug("a released source stays counted as pinned", "                        source.pinned -= 1\n", ""),
    Bug(
        "the source of an aborted copy stays in its queues",
        "                if below is not None:\n                    resettle(key)\n",
        "",
    ),
    Bug(
        "an evicted source keeps a pin",
        "                    self._let_go(src, source, src_slots[i])\n",
        "",
    ),
    Bug(
        "a run that was released is not queued for eviction",
        "                if copy.ready and not copy.pins:\n",
        "                if False:\n",
    ),
    Bug("a released run keeps its pins", "                    copy.pins -= 1\n", ""),
    Bug(
        "a new rank of a run leaves the old one in the order",
        "                    table.withdraw(copy)\n",
        "",
    ),
    Bug("a run releases another copy", "if other == tier and copy.slot == slot:", "if other == tier:"),
    Bug(
        "an evicted slot is not freed",
        "            table.put_back(copy.slot, copy.nbytes)\n",
        "",
    ),
    Bug("lineage is not unlinked", "bare = self.lineage.unlink(key)\n", "bare = None\n"),
    Bug(
        "pages with children may be evicted",
        "if not mirror and self._lineage.has_children(key):",
        "if False:",
    ),
    Bug(
        "a parent that becomes known is not protected",
        "            if parent != unsettled:\n                self.queues.resettle(parent)\n",
        "",
    ),
    Bug(
        "the parent of a lost page stays protected",
        "            self.queues.resettle(bare)\n",
        "            pass\n",
    ),
    Bug(
        "commit does not return the bytes that it did not need",
        "                table.used_nbytes += sizes[i] - copy.nbytes\n",
        "",
    ),
    Bug("a freed slot keeps its bytes", "        self.used_nbytes -= nbytes\n", ""),
    Bug(
        "the record of a newer copy is erased",
        "key is not None and key not in table.copies:",
        "key is not None:",
    ),
    Bug(
        "the record of an aborted copy is never erased",
        "            table.put_back(slot, dead.nbytes)\n            self._note_erased(tier, table, dead.key)",
        "            table.put_back(slot, dead.nbytes)",
    ),
    Bug(
        "a quarantined slot is freed with one holder left",
        "        if dead.holders == 0:",
        "        if dead.holders <= 1:",
    ),
    Bug(
        "the first pin is not reported",
        "                    held(key, tier, table, copy)\n                else",
        "                    table.pinned += 1\n                else",
    ),
    Bug("a copy that may not be evicted counts as queued", "        copy.queue = None\n", ""),
    Bug(
        "a copy is in two queues",
        "            self.withdraw(copy)\n            copy.queue = queue",
        "            copy.queue = queue",
    ),
    Bug(
        "adopt loses the pins of the copy it replaces",
        "pins = table.copies[key].pins\n",
        "pins = 0\n",
    ),
    Bug(
        "the end of an aborted transfer aborts the newer copy",
        "if copy is not None and copy.slot == slot and not copy.ready:",
        "if copy is not None and not copy.ready:",
    ),
    Bug(
        "the end of an aborted transfer makes the newer copy readable",
        "            if copy is None or copy.slot != slot:\n                self._let_go(dst",
        "            if copy is None:\n                self._let_go(dst",
    ),
    Bug(
        "descendants of an evicted page count as reachable",
        "            self.orphans.gone(key)",
        "            self.orphans.keys.discard(key)",
    ),
    Bug(
        "an evicted page is still marked as unreachable",
        "        self._unreachable.discard(key)\n",
        "",
    ),
    Bug(
        "a page put after a missing one counts as reachable",
        "            self.orphans.recheck(key, before)\n",
        "            pass\n",
    ),
    Bug(
        "descendants of a returned page count as unreachable",
        "        if first and followed:\n            self.orphans.recheck_children(key)\n\n    def _precedes",
        "\n    def _precedes",
    ),
    Bug(
        "descendants of a page in flight count as unreachable",
        "            if first:\n                self.orphans.recheck_children(key)\n",
        "",
    ),
    Bug(
        "a page in flight counts as reachable whatever page it follows",
        "        self.orphans.begin(key, self.lineage.parent(key))\n",
        "",
    ),
    Bug(
        "only the children of a lost page become unreachable",
        "            self._push(key)\n\n    def _push",
        "            pass\n\n    def _push",
    ),
    Bug(
        "a page in flight does not count as present",
        "not self._pages.held(parent))",
        "self._pages.where(parent) is None)",
    ),
    Bug(
        "a page after an unreachable one is reachable",
        "(parent in self._unreachable or not",
        "(not",
    ),
    Bug(
        "an unreachable page is not evicted before the pages after it",
        "        if key in self.unreachable:\n            table.wait(copy, key, table.droppable)\n            return\n",
        "",
    ),
    Bug(
        "use gives an unreachable page an ordinary rank",
        "        if copy.rank < 0 and key in self.unreachable:\n            return copy.rank\n",
        "",
    ),
    Bug(
        "the rank of an unreachable page may change",
        "if rank != copy.rank and key not in self.unreachable:",
        "if rank != copy.rank:",
    ),
    Bug(
        "a new copy of an unreachable page gets an ordinary rank",
        "table.policy.unreachable(key) if key in self.unreachable else table.policy.enter(key)",
        "table.policy.enter(key)",
    ),
    Bug(
        "an unreachable page evicts a page in a lower tier",
        "if full and (self.orphans.after(parent) if first else key in self.orphans):",
        "if False:",
    ),
    Bug(
        "a page evicts the page before it",
        "if parent is not None and parent in victims and not self._elsewhere(parent, table):",
        "if False:",
    ),
    Bug(
        "a page that is reachable again is still evicted first",
        "                self._rerank(key, tier, table, copy, rank)\n\n    def entered",
        "                pass\n\n    def entered",
    ),
    Bug(
        "a copy that was saved to a lower tier counts as unsaved",
        "            self.queues.resettle(key)\n        return drop",
        "        return drop",
    ),
    Bug(
        "too few victims are dropped",
        "    victims: dict[PageKey, None] = {}\n",
        "    return [first]\n",
    ),
    Bug(
        "a new rank leaves the old one in the order",
        "        table.withdraw(copy)\n        copy.rank = rank",
        "        copy.rank = rank",
    ),
    Bug("a second child hides the first", "{above.children, key}", "key"),
    Bug("a lost child stays in its parent's set", "            above.children.discard(key)\n", ""),
    Bug(
        "a memory-only page may be stored",
        "return self.floor if key in self.keys else self.lowest",
        "return self.lowest",
    ),
    Bug(
        "a memory-only page is forgotten while a copy is in flight",
        "        if not self.held(key):\n            self.memory_only.forget(key)",
        "        if True:\n            self.memory_only.forget(key)",
    ),
    Bug(
        "a memory-only page that is gone is remembered",
        "        self.keys.discard(key)\n        self.refused.discard(key)\n        self._lifting.pop(key, None)\n",
        "        pass\n",
    ),
    Bug(
        "a page that is put again becomes memory-only",
        "        if memory_only and fresh:\n            self.memory_only.restrict(key)\n        self.ex",
        "        if memory_only:\n            self.memory_only.restrict(key)\n        self.ex",
    ),
    Bug(
        "a page before a stored one becomes memory-only",
        "        if self.frozen or all(\n            child in self.keys and child not in self.refused for child in "
        "self._lineage.children(key)\n        ):\n",
        "        if True:\n",
    ),
    Bug(
        "a stored page leaves the one before it memory-only",
        "                self.memory_only.permit(before)\n",
        "                pass\n",
    ),
    Bug(
        "lifting stops at the first page",
        "            if parent is not None:\n                self.permit(parent)\n",
        "",
    ),
    Bug(
        "a lifted page stays in its queue",
        "                    table.withdraw(table.copies[key])\n            self.queues.resettle(key)\n",
        "                    table.withdraw(table.copies[key])\n",
    ),
    Bug(
        "a mirror of a memory-only page is not evicted last",
        "        lowest = self._memory_only.lowest_for(key)\n        if above",
        "        lowest = self._memory_only.lowest\n        if above",
    ),
    Bug(
        "a page before a stored one is refused",
        "        if self.frozen or all(child in self.keys for child in self._lineage.children(key)):\n",
        "        if True:\n",
    ),
    Bug(
        "a page before a refused one becomes memory-only",
        "            child in self.keys and child not in self.refused for child",
        "            child in self.keys for child",
    ),
    Bug(
        "a refusal outlives the page",
        "        self.keys.discard(key)\n        self.refused.discard(key)\n        self._lifting",
        "        self.keys.discard(key)\n        self._lifting",
    ),
    Bug(
        "a lifted page counts as refused",
        "            self.refused.discard(key)\n            lifted",
        "            lifted",
    ),
    Bug(
        "a request that names a refused page has it written",
        "        if key not in self.refused:\n            self.permit(key)",
        "        self.permit(key)",
    ),
    Bug(
        "a refused page does not lift the restriction of the page before it",
        "                self.memory_only.permit_named(before)\n",
        "                pass\n",
    ),
    Bug(
        "a request to write all pages does not permit refused pages",
        "self._lifting.update(dict.fromkeys(self.refused))",
        "pass",
    ),
    Bug(
        "a withdrawn victim is found",
        "return self._keys.pop(rank, None) is not None",
        "return rank in self._keys",
    ),
]


def with_bug(bug: Bug) -> Code:
    """Return classes from a copy of the module that contains the bug. The loaded modules do not change."""
    code = planting.load(residency, bug, "tierstore")
    return Code(code.Residency, code.TierTable)


def machine(code: Code) -> type[ResidencyMachine]:
    return type("Mutant", (ResidencyMachine,), {"code": code})


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_machine_notices(bug: Bug) -> None:
    code = with_bug(bug)  # before the ``with``, so that an outdated ``old`` fails the test
    with pytest.raises((AssertionError, LookupError, ValueError, TierStoreError, pytest.fail.Exception)):
        run_state_machine_as_test(machine(code), settings=SEARCH)


def test_the_loaded_copy_without_a_bug_passes() -> None:
    """Show that failures come from the planted bugs, and not from loading a copy of the module."""
    line = "class Residency:"
    same = Bug("none", line, line)
    run_state_machine_as_test(machine(with_bug(same)), settings=settings(SEARCH, max_examples=30))
