"""Tests of the radix index: prompts that diverge inside a page, the order of evictions, and rejected input."""

from __future__ import annotations

import tracemalloc
from dataclasses import FrozenInstanceError

import pytest

from tierstore.adapters.radix import RadixIndex, RadixMatch
from tierstore.keys import page_keys
from tierstore.types import PageKey

ROOT = b"tenant"


def keys_of(token_ids: list[int], *, page_size: int = 4) -> list[PageKey]:
    return page_keys(token_ids, page_size=page_size, namespace=b"model")


def index_of(*sequences: list[int], max_pages: int = 1 << 20) -> RadixIndex:
    index = RadixIndex(page_size=4, max_pages=max_pages)
    for token_ids in sequences:
        index.insert(ROOT, token_ids, keys_of(token_ids))
    return index


def test_empty_index_matches_nothing() -> None:
    index = RadixIndex(page_size=4)
    assert index.longest(ROOT, [1, 2, 3, 4, 5]) == RadixMatch((), None, 0)
    assert len(index) == 0


def test_prompt_diverging_inside_a_page_matches_that_page_up_to_the_split() -> None:
    held = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    first, second, _ = keys_of(held)
    found = index_of(held).longest(ROOT, [1, 2, 3, 4, 5, 6, 70, 80, 9, 10, 11, 12])
    assert found == RadixMatch((first,), second, 2)


def test_prompt_ending_inside_a_page_may_match_to_its_last_token() -> None:
    held = [1, 2, 3, 4, 5, 6, 7, 8]
    first, second = keys_of(held)
    assert index_of(held).longest(ROOT, held[:7]) == RadixMatch((first,), second, 3)


def test_full_next_page_is_one_of_the_matched_keys() -> None:
    held = [1, 2, 3, 4, 5, 6, 7, 8]
    assert index_of(held).longest(ROOT, held) == RadixMatch(tuple(keys_of(held)), None, 0)
    assert index_of(held).longest(ROOT, [*held, 9]) == RadixMatch(tuple(keys_of(held)), None, 0)


def test_prompt_may_diverge_inside_the_first_page() -> None:
    held = [1, 2, 3, 4]
    assert index_of(held).longest(ROOT, [1, 9]) == RadixMatch((), keys_of(held)[0], 1)
    assert index_of(held).longest(ROOT, [9, 2, 3, 4]) == RadixMatch((), None, 0)
    assert index_of(held).longest(ROOT, []) == RadixMatch((), None, 0)


def test_among_thousands_of_siblings_the_one_with_the_longest_common_prefix_is_found() -> None:
    """Use token IDs that sort differently by packed bytes than by value, including the limits of int64."""
    firsts = [*range(-1500, 1500), -(1 << 63), (1 << 63) - 1, 1 << 40]
    index = index_of(
        *([first, 7, 8, 9] for first in firsts), *([300, 7, 8, last] for last in range(100, 400))
    )
    for first in firsts:
        found = index.longest(ROOT, [first, 7, 50, 9])
        assert found.next_tokens == 2
        assert first == 300 or found.next_key == keys_of([first, 7, 8, 9])[0]
    assert index.longest(ROOT, [300, 7, 8, 1000]).next_tokens == 3
    assert index.longest(ROOT, [5000, 7, 8, 9]).next_key is None


def test_pages_are_not_found_under_another_root() -> None:
    held = [1, 2, 3, 4, 5, 6, 7, 8]
    assert index_of(held).longest(b"other", held) == RadixMatch((), None, 0)


def test_page_inserted_after_its_parent_becomes_its_child() -> None:
    """Insert a parent first and its child later, as the next turn of a chat does."""
    held = [1, 2, 3, 4, 5, 6, 7, 8]
    index = index_of(held[:4], held, held)
    assert len(index) == 2
    assert index.longest(ROOT, held).keys == tuple(keys_of(held))


def test_full_pages_without_a_key_and_the_tokens_of_a_partial_page_do_not_count() -> None:
    held = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    index = RadixIndex(page_size=4)
    index.insert(ROOT, held, keys_of(held)[:1])
    assert index.longest(ROOT, held) == RadixMatch((keys_of(held)[0],), None, 0)
    index.insert(ROOT, held, [])
    assert len(index) == 1


def test_at_the_limit_the_least_recently_used_leaf_is_dropped() -> None:
    old, young, new = [1, 2, 3, 4, 5, 6, 7, 8], [20, 2, 3, 4], [30, 2, 3, 4]
    index = index_of(old, young, max_pages=3)
    assert index.longest(ROOT, [1, 2, 3, 4, 5, 60]).next_key == keys_of(old)[1]  # this lookup counts as a use
    index.insert(ROOT, new, keys_of(new))
    assert [keys_of(ids)[-1] in index for ids in (old, young, new)] == [True, False, True]


def test_a_page_is_never_dropped_before_its_successors() -> None:
    long, short = list(range(16)), [90, 91, 92, 93]
    index = index_of(long, short, max_pages=5)
    for first in (100, 200, 300):
        index.longest(ROOT, short)
        index.insert(ROOT, [first, 0, 0, 0], keys_of([first, 0, 0, 0]))
    assert [key in index for key in keys_of(long)] == [True, False, False, False]


def test_the_first_pages_of_a_sequence_longer_than_the_index_are_kept() -> None:
    long = list(range(40))
    index = index_of([70, 71, 72, 73], long, max_pages=3)
    assert index.longest(ROOT, long).keys == tuple(keys_of(long)[:3])
    assert len(index) == 3


def test_discarding_a_page_removes_exactly_its_descendants() -> None:
    held, fork = list(range(16)), [*range(4), 50, 51, 52, 53]
    index = index_of(held, fork)
    index.discard(keys_of(held)[1])
    index.discard(keys_of(held)[1])
    assert index.longest(ROOT, held) == RadixMatch((keys_of(held)[0],), None, 0)
    assert index.longest(ROOT, fork).keys == tuple(keys_of(fork))


def test_discarding_a_stale_best_match_exposes_the_next_best() -> None:
    best, second = [1, 2, 3, 4], [1, 2, 30, 40]
    index = index_of(best, second)
    prompt = [1, 2, 3, 99]
    stale = index.longest(ROOT, prompt).next_key
    assert stale == keys_of(best)[0]
    index.discard(stale)
    assert index.longest(ROOT, prompt) == RadixMatch((), keys_of(second)[0], 2)


def test_a_very_long_sequence_needs_no_deep_recursion() -> None:
    long = list(range(80_000))
    index = index_of(long)
    assert len(index) == 20_000
    index.discard(keys_of(long)[0])
    assert len(index) == 0


def test_roots_without_pages_take_no_memory() -> None:
    index = RadixIndex(page_size=4, max_pages=1)
    key, other = (PageKey(bytes([byte]) * 36) for byte in (1, 2))

    def cycle(number: int) -> None:
        index.insert(b"a%d" % number, [1, 2, 3, 4], [key])
        index.insert(b"b%d" % number, [1, 2, 3, 4], [other])  # evicts the first page
        index.discard(other)

    cycle(0)
    tracemalloc.start()
    try:
        for number in range(3000):
            cycle(number)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 20_000


def test_a_dropped_page_may_be_inserted_again_under_its_key() -> None:
    held = [1, 2, 3, 4]
    index = index_of(held)
    index.discard(keys_of(held)[0])
    index.insert(b"other", held, keys_of(held))
    assert index.longest(b"other", held).keys == tuple(keys_of(held))


@pytest.mark.parametrize(
    ("root", "token_ids", "keys", "message"),
    [
        (ROOT, [1, 2, 3, 4, 5], [PageKey(b"a"), PageKey(b"b")], "2 keys for 1 full pages"),
        (ROOT, [9, 2, 3, 4, 5, 6, 7, 8], [PageKey(b"a"), PageKey(b"a")], "a key occurs twice"),
        (ROOT, [1, 2, 3, 4], [PageKey(b"a")], r"keys\[0\] differs from"),
        (ROOT, [9, 2, 3, 4], keys_of([1, 2, 3, 4]), r"keys\[0\] was already inserted for other tokens"),
        (
            b"other",
            [1, 2, 3, 4],
            keys_of([1, 2, 3, 4]),
            r"keys\[0\] was already inserted for other tokens or another root",
        ),
        (ROOT, [1 << 63, 2, 3, 4], [PageKey(b"a")], "must fit in int64"),
    ],
)
def test_insertions_that_contradict_the_index_are_refused_and_change_nothing(
    root: bytes, token_ids: list[int], keys: list[PageKey], message: str
) -> None:
    held = [1, 2, 3, 4]
    index = index_of(held)
    with pytest.raises(ValueError, match=message):
        index.insert(root, token_ids, keys)
    assert len(index) == 1
    assert index.longest(ROOT, held).keys == tuple(keys_of(held))


def test_tokens_that_are_not_a_sequence_of_integers_are_refused() -> None:
    index = RadixIndex(page_size=4)
    for wrong in (b"12345678", "1234", [1.0, 2.0]):
        with pytest.raises(TypeError):
            index.longest(ROOT, wrong)  # type: ignore[arg-type]


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size and max_pages must be at least 1, got 0"):
        RadixIndex(page_size=0)
    with pytest.raises(ValueError, match="must be at least 1, got 4 and 0"):
        RadixIndex(page_size=4, max_pages=0)


def test_a_match_does_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        RadixMatch((), None, 0).next_tokens = 1  # type: ignore[misc]
