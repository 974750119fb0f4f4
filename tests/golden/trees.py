"""Reads, writes and compares frozen trees: nested mappings of plain values, stored as JSON in ``data/``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

DATA = Path(__file__).with_name("data")

Tree: TypeAlias = Any
"""A JSON value: nested mappings and lists of plain values."""


def load(name: str) -> Tree:
    """Read a frozen tree."""
    found: Tree = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return found


def save(name: str, tree: Tree) -> None:
    """Write a tree as the frozen tree of this name. Keys are sorted, so that a change produces a small diff."""
    DATA.mkdir(exist_ok=True)
    text = json.dumps(tree, indent=1, sort_keys=True, ensure_ascii=False)
    (DATA / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def require_frozen(name: str, found: Tree) -> None:
    """Raise an AssertionError that lists what is missing, new or changed relative to the frozen tree of this name."""
    require_same(name, load(name), json.loads(json.dumps(found)))


def require_same(name: str, frozen: Tree, found: Tree) -> None:
    """Raise an AssertionError that lists what is missing, new or changed in ``found``, unless it equals ``frozen``."""
    differences = list(_differences(_leaves(frozen), _leaves(found)))
    assert not differences, "\n".join(
        [
            f"{name}: {len(differences)} difference(s) from what users and their files rely on:",
            *differences,
            "A name that is missing or changed breaks users. If the change is meant, or a new name is an addition, run",
            f"    python -m tests.golden.make {name}",
            "and say so in the commit.",
        ]
    )


def _differences(frozen: Mapping[str, Tree], found: Mapping[str, Tree]) -> Iterable[str]:
    for path in sorted(frozen.keys() | found.keys()):
        if path not in found:
            yield f"  missing  {path} = {frozen[path]!r}"
        elif path not in frozen:
            yield f"  new      {path} = {found[path]!r}"
        elif frozen[path] != found[path] or type(frozen[path]) is not type(found[path]):
            yield f"  changed  {path}: {frozen[path]!r} -> {found[path]!r}"


def _leaves(tree: Tree, path: str = "") -> dict[str, Tree]:
    """Return every plain value, and every empty mapping or list, by its path."""
    if isinstance(tree, dict) and tree:
        parts = [(f"{path}.{name}" if path else name, part) for name, part in tree.items()]
    elif isinstance(tree, list) and tree:
        parts = [(f"{path}[{index}]", part) for index, part in enumerate(tree)]
    else:
        return {path: tree}
    return {leaf: value for name, part in parts for leaf, value in _leaves(part, name).items()}


def shape(value: object, maps: Iterable[str] = (), path: str = "") -> Tree:
    """Return the names and types in plain data, without the values.

    The items of a list are merged into one shape. ``maps`` are the paths of mappings whose keys are data; their values
    are merged, too.
    """
    if isinstance(value, Mapping):
        if path in maps:
            return {"<any>": _union(shape(part, maps, f"{path}.<any>") for part in value.values())}
        return {
            str(name): shape(part, maps, f"{path}.{name}" if path else str(name))
            for name, part in value.items()
        }
    if isinstance(value, list | tuple):
        return {"[]": _union(shape(part, maps, f"{path}[]") for part in value)}
    return "None" if value is None else type(value).__name__


def _union(shapes: Iterable[Tree]) -> Tree:
    found: Tree = None
    for one in shapes:
        found = one if found is None else _both(found, one)
    return "nothing" if found is None else found


def _both(one: Tree, other: Tree) -> Tree:
    if "nothing" in (one, other):
        return other if one == "nothing" else one
    if isinstance(one, dict) and isinstance(other, dict):
        shared = {name: _both(one[name], other[name]) for name in one if name in other}
        return {**other, **one, **shared}
    kinds = {kind for each in (one, other) if isinstance(each, str) for kind in each.split(" | ")}
    nested = next((each for each in (one, other) if isinstance(each, dict)), None)
    if nested is not None:
        return {**nested, "<or>": " | ".join(sorted(kinds))}
    return " | ".join(sorted(kinds))
