"""Tests of the upper bound on hits (a cache that knows the future), and of the file that keeps bounds between runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.traces import chats, mooncake, requests_of
from tierstore.replay import bounds
from tierstore.replay.bounds import Bounds, clairvoyant_hits, user_folder
from tierstore.replay.traces import Request, Trace, read_traces
from tierstore.types import PageKey


def test_the_bound_keeps_blocks_used_again_soonest_and_refuses_blocks_never_used_again() -> None:
    assert clairvoyant_hits(requests_of("ab", "cd", "ef", "ab"), 2) == [0, 0, 0, 2]
    assert clairvoyant_hits(requests_of("ab", "cd", "cd", "ab"), 2) == [0, 0, 2, 0]
    assert clairvoyant_hits(requests_of("ab", "ac", "ab"), 2) == [0, 1, 2]
    assert clairvoyant_hits(requests_of("abc", "abc"), 2) == [0, 2]


def best_possible(requests: Sequence[Request], pages: int) -> int:
    """Return the maximum number of hits, by trying every choice of prefix-closed sets of pages to keep."""
    states = {frozenset[PageKey](): 0}
    for request in requests:
        following: dict[frozenset[PageKey], int] = {}
        for kept, hits in states.items():
            found = sum(1 for _ in itertools.takewhile(kept.__contains__, request.keys))
            everything = sorted(kept.union(request.keys))
            for size in range(min(pages, len(everything)) + 1):
                for chosen in map(frozenset, itertools.combinations(everything, size)):
                    if all(len(key) == 1 or key[:-1] in chosen for key in chosen):
                        following[chosen] = max(following.get(chosen, 0), hits + found)
        states = following
    return max(states.values())


@pytest.mark.parametrize(
    "words",
    [
        ("a", "b", "c", "a", "b"),
        ("ab", "c", "ad", "ab", "c"),
        ("ab", "ac", "b", "ab", "b"),
        ("abc", "d", "ab", "d"),
    ],
)
@pytest.mark.parametrize("pages", [1, 2, 3])
def test_bound_equals_the_best_order_on_small_trees(words: tuple[str, ...], pages: int) -> None:
    requests = requests_of(*words)
    assert sum(clairvoyant_hits(requests, pages)) == best_possible(requests, pages)


# -- bounds kept between runs -----------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return read_traces([mooncake(tmp_path / "t.jsonl", chats(3, 5))])[0]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list that receives each capacity, in pages, for which a bound is computed."""
    seen: list[int] = []

    def counting(requests: Sequence[Request], pages: int) -> list[int]:
        seen.append(pages)
        return clairvoyant_hits(requests, pages)

    monkeypatch.setattr(bounds, "clairvoyant_hits", counting)
    return seen


def test_a_bound_is_computed_once_for_a_trace_and_a_capacity(
    tmp_path: Path, trace: Trace, computed: list[int]
) -> None:
    half = len(trace.requests) // 2
    expected = sum(clairvoyant_hits(trace.requests, 14)[half:]) * 512
    tokens = sum(request.tokens for request in trace.requests[half:])
    for _ in range(2):
        kept = Bounds(tmp_path / "kept" / "deep")
        for _ in range(2):
            assert kept.rate(trace, 14) == expected / tokens
        kept.rate(trace, 20)
    assert computed == [14, 20]


def test_bounds_depend_on_the_trace_contents_but_not_its_name(
    tmp_path: Path, trace: Trace, computed: list[int]
) -> None:
    kept = Bounds(tmp_path / "kept")
    kept.rate(trace, 14)
    rows = chats(3, 5)
    (same,) = read_traces([mooncake(tmp_path / "other.jsonl", rows)])
    (longer,) = read_traces([mooncake(tmp_path / "longer.jsonl", [*rows, rows[0]])])
    (fuller,) = read_traces([mooncake(tmp_path / "fuller.jsonl", [(rows[0][0] + 1, rows[0][1]), *rows[1:]])])
    assert set(same.requests[0].keys).isdisjoint(trace.requests[0].keys)
    kept.rate(same, 14)
    assert computed == [14]
    kept.rate(longer, 14)
    kept.rate(fuller, 14)
    assert computed == [14] * 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-5],
        lambda text: text.replace('"hits": ', '"hits": 1'),
        lambda text: text.replace('"hits": ', '"hits": -'),
        lambda text: text.replace('"version": ', '"version": 9'),
        lambda text: text.replace('"pages": ', '"pages": 1'),
        lambda text: "[" * 100_000,
        lambda text: "[]",
        lambda text: "\udcff",
    ],
    ids=["empty", "cut", "hits", "negative", "version", "pages", "deep", "list", "bytes"],
)
def test_damaged_bounds_file_is_ignored_and_rewritten(
    tmp_path: Path, trace: Trace, computed: list[int], damage: Callable[[str], str]
) -> None:
    right = Bounds(tmp_path / "kept").rate(trace, 14)
    (file,) = (tmp_path / "kept").iterdir()
    text = file.read_text()
    file.write_bytes(damage(text).encode("utf-8", "surrogateescape"))
    assert Bounds(tmp_path / "kept").rate(trace, 14) == right
    assert computed == [14, 14]
    assert file.read_text() == text
    assert Bounds(tmp_path / "kept").rate(trace, 14) == right
    assert computed == [14, 14]


def test_unwritable_bounds_folder_only_costs_time(tmp_path: Path, trace: Trace, computed: list[int]) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", None):
        assert Bounds(folder).rate(trace, 14) > 0
    assert computed == [14, 14]


def test_bounds_are_kept_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert user_folder() == tmp_path / ".cache" / "tierstore" / "bounds"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert user_folder() is None
