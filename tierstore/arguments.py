"""What every call asks of an argument before it changes anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from math import inf
from numbers import Real
from operator import index
from typing import Any, SupportsIndex

_MOST_SECONDS = 1e15
_LONGEST_WAIT_S = 1e9
"""Thirty years. Threads refuse to wait for ever in so many seconds."""


def require_flag(name: str, value: object) -> None:
    """TypeError for what is neither True nor False: a word like "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; allowed: True, False")


def are_seconds(value: Any) -> bool:
    """Whether a clock's time and this have a sum: whole numbers have no end, and a NaN is in no order."""
    known = isinstance(value, Real) and not isinstance(value, bool)
    return known and bool(value == inf or abs(value) <= _MOST_SECONDS)


def require_seconds(name: str, value: Any) -> None:
    """TypeError for what is no number, ValueError for one that is no duration. Infinity is one: without end."""
    _require_number(name, value, "a number of seconds, 0 or more")
    if not are_seconds(value) or value < 0:
        raise ValueError(f"{name} is {value!r:.60}; allowed: a number of seconds, 0 or more")


def require_finite(name: str, value: object) -> None:
    """``require_seconds`` of what is to be multiplied: without infinity."""
    require_seconds(name, value)
    if value == inf:
        raise ValueError(f"{name} is inf; allowed: a finite number of seconds")


def seconds_at_most(name: str, value: Any) -> float:
    """Return a finite number of seconds, 0 or more. TypeError for what is not a number, ValueError for others."""
    if type(value) is float and 0.0 <= value <= _LONGEST_WAIT_S:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r:.60}")
    if not are_seconds(value) or value < 0 or value == inf:
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value!r:.60}")
    return min(float(value), _LONGEST_WAIT_S)


def require_time(name: str, value: object) -> None:
    """As ``require_seconds``, of a time that may have passed already: below 0 is allowed."""
    _require_number(name, value, "a number of seconds")
    if not are_seconds(value):
        raise ValueError(f"{name} is {value!r:.60}; allowed: a number of seconds")


def seconds_to_wait(name: str, value: Any) -> float:
    """``require_seconds`` of what a thread may wait at most: infinity is thirty years then."""
    require_seconds(name, value)
    return min(float(value), _LONGEST_WAIT_S)


def whole(name: str, value: SupportsIndex, least: int = 0) -> int:
    """An integer of any kind, numpy's and torch's too, as Python's. TypeError for others, ValueError below ``least``.

    True is none, and neither is 1.0: they look like a place in a list and are none further down.
    """
    found = value if type(value) is int else _index(name, value)
    if found < least:
        raise ValueError(f"{name} is {found}; allowed: an integer of at least {least}")
    return found


def require_member(call: str, value: object, allowed: Sequence[Enum], *others: str) -> None:
    """ValueError for what is none of these: True, 1 and 1.0 equal a member that counts as 1, and have no name.

    ``call``: what was asked for, in the message. ``others``: what else is allowed, in words.
    """
    if not any(value is member for member in allowed):
        names = ", ".join([*(member.name for member in allowed), *others]) or "none"
        raise ValueError(f"{call} {value!r:.60}; allowed: {names}")


def slot_numbers(slots: Iterable[SupportsIndex]) -> list[int]:
    """Slots as Python's integers; TypeError unless each is one, of any kind. Whose they are is not looked at."""
    return [slot if type(slot) is int else _index("a slot", slot) for slot in slots]


def _index(name: str, value: SupportsIndex) -> int:
    refused = TypeError(f"{name} is {value!r:.60}; allowed: an integer")
    if isinstance(value, bool):
        raise refused
    try:
        return index(value)
    except TypeError as error:
        raise refused from error


def _require_number(name: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r:.60}; allowed: {allowed}")
