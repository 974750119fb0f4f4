"""What every call asks of an argument before it changes anything."""

from __future__ import annotations

from math import isnan
from numbers import Real


def require_flag(name: str, value: object) -> None:
    """TypeError for what is neither True nor False: a word like "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; allowed: True, False")


def require_seconds(name: str, value: object) -> None:
    """TypeError for what is no number, ValueError for one that is no duration. Infinity is one: without end."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; allowed: a number of seconds, 0 or more")
    if isnan(value) or value < 0:
        raise ValueError(f"{name} is {value!r}; allowed: a number of seconds, 0 or more")
