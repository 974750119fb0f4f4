"""Test which records are kept when a directory is opened with a capacity that is too small for all of them."""

from __future__ import annotations

from tests.support.pages import chain
from tierstore.nvme.tier import _split_by_depth
from tierstore.types import PageKey


def test_surplus_records_are_dropped_orphans_first_then_leaves() -> None:
    a, b = chain(3), chain(2, "other")
    lost, cycle = chain(2, "lost"), chain(2, "cycle")
    records: list[tuple[PageKey, PageKey | None, int]] = [
        (lost[1], lost[0], 1),
        (cycle[0], cycle[1], 1),
        (cycle[1], cycle[0], 1),
        (a[2], a[1], 5),
        (a[1], a[0], 40),
        (b[1], b[0], 20),
        (a[0], None, 10),
        (b[0], None, 30),
    ]
    kept, surplus = _split_by_depth(records, 100)
    assert {key for key, _, _ in kept} == {*a[:2], *b}
    assert set(surplus) == {a[2], lost[1], *cycle}
    kept, surplus = _split_by_depth(records, 108)
    assert len(list(kept)) == len(records)
    assert surplus == []
