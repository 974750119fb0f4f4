"""Sizes and times as people write them -> bytes and seconds. Pure.

The functions raise ValueError whose text is what is allowed; the caller knows what the value was for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Literal

_QUANTITY = re.compile(r"((?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)")
_SIZES = {"": Decimal(1), "b": Decimal(1)}
_SIZES |= {f"{prefix}b": Decimal(1000**power) for power, prefix in enumerate("kmgtpe", 1)}
_SIZES |= {f"{prefix}ib": Decimal(1024**power) for power, prefix in enumerate("kmgtpe", 1)}
_TIMES = {"": Decimal(1), "us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "min": Decimal(60)}
MOST_READERS = 64

_SIZE_ALLOWED = 'a size of at least 1 byte and less than 8 EiB, such as 1048576, "1e9", "10GB" or "24GiB"'
_TIME_ALLOWED = 'a time above 0 and up to an hour, such as 2, "1.5s" or "200ms"'
_SHARE_ALLOWED = "a number above 0 and up to 1"


def parse_size(value: object) -> int:
    """Bytes: GB and its kin are powers of 1000, GiB and its kin of 1024; a fraction of a byte is dropped."""
    nbytes = _quantity(value, _SIZES, _SIZE_ALLOWED)
    if not 1 <= nbytes < 1 << 63:
        raise ValueError(_SIZE_ALLOWED)
    return int(nbytes)


def parse_seconds(value: object) -> float:
    """Seconds, from a number or a number with us, ms, s or min."""
    seconds = float(_quantity(value, _TIMES, _TIME_ALLOWED))
    if not 0 < seconds <= 3600:
        raise ValueError(_TIME_ALLOWED)
    return seconds


def parse_share(value: object) -> float:
    """A part of a whole: above 0, at most 1."""
    share = float(_quantity(value, {"": Decimal(1)}, _SHARE_ALLOWED))
    if not 0 < share <= 1:
        raise ValueError(_SHARE_ALLOWED)
    return share


def parse_readers(value: object) -> int | Literal["auto"]:
    """A number of threads, or "auto"."""
    text = written(value)
    if text == "auto":
        return "auto"
    if re.fullmatch("[1-9][0-9]?", text) is None or int(text) > MOST_READERS:
        raise ValueError(f"'auto', or 1 to {MOST_READERS}")
    return int(text)


def written(value: object) -> str:
    """What stands in a file for this value; "" for True, False and an integer that Python would not write."""
    try:
        return "" if isinstance(value, bool) else str(value)
    except ValueError:  # thousands of digits
        return ""


def format_size(nbytes: int) -> str:
    """For people: at most four digits and a unit of 1024."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size == int(size) else f"{size:.1f} {units[0]}"


def _quantity(value: object, units: Mapping[str, Decimal], allowed: str) -> Decimal:
    text = written(value).strip() if isinstance(value, int | float | str) else ""
    found = _QUANTITY.fullmatch(text)
    if found is None or found[2].lower() not in units:
        raise ValueError(allowed)
    return Decimal(found[1]) * units[found[2].lower()]
