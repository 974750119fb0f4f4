"""Test the radix index with random orders of calls, and test that planted bugs are found."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.adapters.radix_machine import RadixMachine
from tests.support import lanes
from tests.support.planting import SEARCH, Bug, load
from tierstore.adapters import radix

BUGS = [
    Bug(
        "only the left neighbour is looked at",
        "siblings[max(0, at - 1) : at + 1]",
        "siblings[max(0, at - 1) : at]",
    ),
    Bug(
        "only the right neighbour is looked at", "siblings[max(0, at - 1) : at + 1]", "siblings[at : at + 1]"
    ),
    Bug(
        "siblings are not sorted",
        "above.below.insert(bisect_left(above.below, label, key=_label), node)",
        "above.below.append(node)",
    ),
    Bug(
        "a token counts that agrees in some bytes only",
        "(8 * size - differs.bit_length()) // (8 * _TOKEN_NBYTES)",
        "-(-(8 * size - differs.bit_length()) // (8 * _TOKEN_NBYTES))",
    ),
    Bug(
        "the rest counts although a full page comes before it",
        "labels[len(path)] if len(path) < len(labels) else rest",
        "rest",
    ),
    Bug(
        "a prompt's rest is not looked up",
        "labels[len(path)] if len(path) < len(labels) else rest",
        'labels[len(path)] if len(path) < len(labels) else b""',
    ),
    Bug("a lookup is not a use", "        self._use([*path, best])\n", ""),
    Bug("a partial match is not a use", "self._use([*path, best])", "self._use(path)"),
    Bug(
        "a prompt without a partial match is not a use",
        "            self._use(path)\n            return RadixMatch",
        "            return RadixMatch",
    ),
    Bug("inserting again is not a use", "        self._use(path)\n        while", "        while"),
    Bug("a page is dropped before its successors", "for node in reversed(path):", "for node in path:"),
    Bug("the newest leaf is dropped", "self._remove_leaf(next(iter", "self._remove_leaf(next(reversed"),
    Bug("the index is unbounded", "while len(self._pages) > self._max_pages:", "while False:"),
    Bug(
        "one page too many",
        "while len(self._pages) > self._max_pages:",
        "while len(self._pages) > self._max_pages + 1:",
    ),
    Bug(
        "successors of a discarded page stay in the index",
        "            doomed.extend(node.below)\n",
        "            pass\n",
    ),
    Bug(
        "roots are not told apart", "path = self._descend(root, labels)", 'path = self._descend(b"", labels)'
    ),
    Bug(
        "a root goes while pages hang below it",
        "if above.above is None and not above.below:",
        "if above.above is None:",
    ),
    Bug(
        "a removed page stays among its siblings",
        "        del above.below[bisect_left(above.below, node.label, key=_label)]\n",
        "",
    ),
    Bug("the path stops at the wrong page", " or node.below[at].label != label:", ":"),
    Bug("a key of other tokens is taken", "            elif key in self._pages:", "            elif False:"),
    Bug(
        "known tokens take another key",
        "                if path[index].key != key:",
        "                if False:",
    ),
]


def with_bug(bug: Bug) -> type[RadixMachine]:
    """Return the machine for a copy of the code with the bug in it."""
    return type("Mutant", (RadixMachine,), {"index_type": vars(load(radix, bug))["RadixIndex"]})


def test_no_order_of_calls_breaks_the_index() -> None:
    run_state_machine_as_test(
        RadixMachine, settings=settings(max_examples=lanes.examples(35, 800), stateful_step_count=30)
    )


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_machine_notices(bug: Bug) -> None:
    machine = with_bug(bug)  # outside ``raises``: an outdated ``old`` must fail the test
    with pytest.raises((AssertionError, LookupError, ValueError, pytest.fail.Exception)):
        run_state_machine_as_test(machine, settings=SEARCH)


@pytest.mark.deep
def test_the_loaded_copy_without_a_bug_passes() -> None:
    """Show that failures come from the planted bugs, and not from loading a copy of the module."""
    same = Bug("none", "class RadixIndex:", "class RadixIndex:")
    run_state_machine_as_test(with_bug(same), settings=settings(SEARCH, max_examples=30))
