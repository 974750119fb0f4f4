"""Compares Lineage with a plain dictionary of parents, while pages are linked and removed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierstore.directory.lineage import Lineage
from tierstore.types import PageKey

KEYS = [PageKey(name.encode()) for name in ("a", "ab", "ac", "ad", "abc", "z")]
keys = st.sampled_from(KEYS)
steps = st.lists(st.one_of(st.tuples(keys, st.none() | keys), keys), max_size=40)


@given(steps)
def test_lineage_equals_a_dictionary_of_parents(
    steps: list[tuple[PageKey, PageKey | None] | PageKey],
) -> None:
    """Apply steps, which link (key, parent) or remove a key. A key's first parent stays until the key is removed."""
    lineage, model = Lineage(), dict[PageKey, PageKey]()
    for step in steps:
        if isinstance(step, tuple):
            key, parent = step
            lineage.link(key, parent)
            if parent is not None and parent != key:
                model.setdefault(key, parent)
        else:
            before = model.pop(step, None)
            bare = before is not None and before not in model.values()
            assert lineage.unlink(step) == (before if bare else None)
        assert dict(lineage.links()) == model
        for key in KEYS:
            children = {child for child, parent in model.items() if parent == key}
            assert lineage.parent(key) == model.get(key)
            assert lineage.has_children(key) == bool(children)
            assert set(lineage.children(key)) == children
            assert len(lineage.children(key)) == len(children)
            assert {child for child in KEYS if lineage.names(key, child)} == children


@given(st.lists(st.tuples(keys, keys), max_size=20))
def test_precedes_is_true_exactly_for_ancestors(links: list[tuple[PageKey, PageKey]]) -> None:
    lineage, model = Lineage(), dict[PageKey, PageKey]()
    for key, parent in links:
        if key != parent and not lineage.precedes(key, parent):
            lineage.link(key, parent)
            model.setdefault(key, parent)
    for old in KEYS:
        for young in KEYS:
            above = []
            at = model.get(young)
            while at is not None:
                above.append(at)
                at = model.get(at)
            assert lineage.precedes(old, young) == (old in above)


def test_removed_pages_leave_no_nodes() -> None:
    lineage = Lineage()
    for key, parent in zip(KEYS[1:], KEYS, strict=False):
        lineage.link(key, parent)
    for key in KEYS:
        lineage.unlink(key)
    assert not lineage._nodes
