"""Plant bugs in a copy of the code that checks LMDB's file, and test that the test listed for each bug finds it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nvme import test_page_headers, test_tree_damage
from tests.support import planting
from tests.support.planting import Bug

pytestmark = pytest.mark.deep

FOUND = test_tree_damage.test_damage_that_would_crash_lmdb_is_found

BUGS: dict[str, tuple[str, str, Callable[..., None]]] = {
    "the free list is not walked": (
        "    count.free_list()\n",
        "",
        test_tree_damage.test_damage_of_the_free_list_sets_the_directory_aside_and_ends_no_process,
    ),
    "small trees are not walked": (
        "        count.small(tree, f\"{name.decode(errors='replace')} tree\")\n",
        "        pass\n",
        FOUND,
    ),
    "the length of a value is not compared": (
        "value.nbytes != _HEAD_NBYTES + stored",
        "False",
        test_tree_damage.test_every_meaningful_bit_of_a_leaf_is_checked,
    ),
    "flags of a page are not all compared": ("flags != kind", "not flags & kind", FOUND),
    "a node's flags are not compared": (
        "any(raw[at : at + NODE.size] != _ENTRY_NODE for at in steps)",
        "any(raw[at : at + 4] != _ENTRY_NODE[:4] for at in steps)",
        FOUND,
    ),
    "pages of values count as unused": (
        "                    self._take_value(first, nbytes, name)\n                count += 1",
        "                count += 1",
        test_tree_damage.test_a_free_list_that_names_a_page_of_a_value_is_found,
    ),
    "a large value must have exactly the pages that it needs": (
        "or more < 0:",
        "or more != 0:",
        test_tree_damage.test_value_shortened_in_place_passes_the_walk,
    ),
    "the bounds of branches are not compared": ("keys[0] >= part.low and", "True or", FOUND),
    "records are not counted": ("if count != tree.entries:", "if False:", FOUND),
    "trees are created in separate transactions": (
        "with env.begin(write=True) as txn:",
        "for txn in [None]:",
        test_tree_damage.test_a_new_directory_has_all_its_trees_or_none,
    ),
    "headers of values are not examined": (
        "                    self._take_value(first, nbytes, name)\n                count += 1",
        "                    self._take(first, self._length(nbytes), name)\n                count += 1",
        test_page_headers.test_false_page_header_sets_the_directory_aside,
    ),
    "a shorter value keeps the pages of a longer one": (
        "if page.key in self._fresh:",
        "if False:",
        test_page_headers.test_overflow_pages_match_after_two_writes_in_a_transaction,
    ),
}


def test_a_copy_without_a_bug_passes(tmp_path: Path) -> None:
    planting.copy_of_checkout(tmp_path, "nvme", "campaign")
    assert planting.outcome(tmp_path, (test for *_, test in BUGS.values())) == 0


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str, tmp_path: Path) -> None:
    right, wrong, test = BUGS[bug]
    planting.copy_of_checkout(tmp_path, "nvme", "campaign")
    planting.plant(tmp_path, "tierstore.nvme", Bug(bug, right, wrong))
    assert planting.outcome(tmp_path, [test]) in (1, -6, -7, -11)  # failed tests, or a crash in LMDB
