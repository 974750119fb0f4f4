"""Test that the names, keys and fingerprints that users, their files and their dashboards rely on have not changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.make import TREES
from tests.golden.trees import require_frozen, require_same, shape


@pytest.mark.parametrize("name", TREES)
def test_golden_trees_are_unchanged(name: str, tmp_path: Path) -> None:
    require_frozen(name, TREES[name](tmp_path))


def test_a_difference_is_named_as_missing_new_or_changed() -> None:
    with pytest.raises(AssertionError) as caught:
        require_same("stats", {"a": {"gone": 1, "kept": 2}, "b": 1}, {"a": {"kept": 2, "more": 3}, "b": True})
    lines = str(caught.value).splitlines()
    assert lines[1:4] == ["  missing  a.gone = 1", "  new      a.more = 3", "  changed  b: 1 -> True"]
    assert any("python -m tests.golden.make stats" in line for line in lines)


def test_shape_has_names_types_and_the_union_of_list_items() -> None:
    rows = [{"n": 1, "why": None}, {"n": 2.5, "why": "x"}, {"n": 1, "more": []}]
    assert shape({"rows": rows, "by": {"k1": 1, "k2": 2}}, maps=("by",)) == {
        "rows": {"[]": {"n": "float | int", "why": "None | str", "more": {"[]": "nothing"}}},
        "by": {"<any>": "int"},
    }
