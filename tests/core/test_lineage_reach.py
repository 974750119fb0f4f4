"""Tests of marking unreachable pages: large trees are marked in bounded steps, which stop where nothing changes."""

from __future__ import annotations

import random

import pytest

from tests.support import lanes
from tests.support.pages import chain
from tierstore.directory.invariants import check_residency
from tierstore.directory.residency import Residency, TierTable
from tierstore.policy import Lru
from tierstore.types import PageKey, Tier

PAGES = 1000


def residency(slots: int = PAGES + 8) -> Residency:
    return Residency({Tier.HOST: TierTable(Lru(), num_slots=slots)})


def put(pages: Residency, key: PageKey, parent: PageKey | None) -> None:
    [(slot, _)] = pages.reserve((key,), Tier.HOST, parents=(parent,))
    pages.commit((key,), Tier.HOST, (slot,), parents=(parent,))


def long_chain(slots: int = PAGES + 8) -> tuple[Residency, list[PageKey]]:
    pages, keys = residency(slots), chain(PAGES)
    for parent, key in zip([None, *keys], keys, strict=False):
        put(pages, key, parent)
    return pages, keys


def test_one_lost_page_marks_a_few_pages_at_once_and_the_rest_in_steps() -> None:
    pages, keys = long_chain()
    pages.evict(keys[0], Tier.HOST)
    marked = len(pages.orphans)
    assert 0 < marked < 100
    while pages.orphans.advance(10):
        assert len(pages.orphans) <= marked + 10
        marked = len(pages.orphans)
    assert pages.orphans.keys == set(keys[1:])
    check_residency(pages)


def test_unreachable_pages_leave_before_others_while_most_of_them_are_not_marked_yet() -> None:
    pages, keys = long_chain(PAGES)
    loners = chain(PAGES, "loners")
    pages.evict(keys[0], Tier.HOST)
    for key in loners:
        put(pages, key, None)
    pages.evict(loners[0], Tier.HOST)
    put(pages, keys[0], None)
    assert all(drop.unreachable for drop in pages.dropped)
    assert len(pages.dropped) == PAGES - 1
    check_residency(pages)


def test_returning_page_stops_the_marking_in_progress() -> None:
    pages, keys = long_chain()
    for _ in range(50):
        pages.evict(keys[0], Tier.HOST)
        put(pages, keys[0], None)
    steps = 0
    while pages.orphans.advance(1):
        steps += 1
    assert steps < 100
    assert not len(pages.orphans)
    check_residency(pages)


@pytest.mark.parametrize("seed", lanes.some(range(5), lambda seed: seed < 2))
def test_marks_are_exact_after_any_losses_and_returns_in_a_tree_that_is_marked_slowly(seed: int) -> None:
    dice = random.Random(seed)
    keys = chain(PAGES, f"tree {seed}")
    parents: dict[PageKey, PageKey | None] = {keys[0]: None}
    for i, key in enumerate(keys[1:], 1):
        parents[key] = keys[dice.randrange(max(0, i - 3), i) if dice.random() < 0.9 else 0]
    pages, there = residency(), set[PageKey]()
    for key in keys:
        put(pages, key, parents[key])
        there.add(key)
    for _ in range(300):
        key = dice.choice(keys[: dice.choice((5, PAGES))])
        if key in there:
            pages.evict(key, Tier.HOST)
            there.remove(key)
        else:
            put(pages, key, parents[key])
            there.add(key)
        pages.orphans.advance(dice.randrange(3))
        check_residency(pages)
    while pages.orphans.advance(7):
        pass
    reached: set[PageKey] = set()
    for key in keys:
        if key in there and (parents[key] is None or parents[key] in reached):
            reached.add(key)
    assert pages.orphans.keys == there - reached
    check_residency(pages)


def test_all_children_of_a_lost_page_are_marked_and_return_with_it() -> None:
    pages, (root, *keys) = residency(), chain(PAGES)
    put(pages, root, None)
    for key in keys:
        put(pages, key, root)
    pages.evict(root, Tier.HOST)
    while pages.orphans.advance(10):
        pass
    assert pages.orphans.keys == set(keys)
    put(pages, root, None)
    while pages.orphans.advance(10):
        pass
    assert not pages.orphans.keys
    assert sorted(pages.orphans.revived) == sorted(keys)
    check_residency(pages)
