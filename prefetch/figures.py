"""Reading ``TierStore.stats``."""

from __future__ import annotations

from typing import Any


def section(figures: dict[str, object], name: str) -> dict[str, Any]:
    """A part of it that is a mapping; TypeError if it is none."""
    found = figures[name]
    if not isinstance(found, dict):
        raise TypeError(f"stats()[{name!r}] is {found!r}; allowed: a mapping")
    return found


def number(figures: dict[str, object], name: str) -> float:
    """A number in it; TypeError if it is none."""
    found = figures[name]
    if not isinstance(found, int | float):
        raise TypeError(f"stats()[{name!r}] is {found!r}; allowed: a number")
    return found
