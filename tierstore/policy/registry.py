"""Eviction orders and admission policies by the names used in a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.policy.admission import Admission, All, Cost, SecondHit
from tierstore.policy.history import History
from tierstore.policy.orders import Adaptive, Fifo, Gdsf, Lru, Priority, Session

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.page import PageSpec

_MOST_REMEMBERED = 1 << 18
_HORIZON = 32

WITHOUT_HISTORY = frozenset({"fifo", "lru", "priority", "all"})
"""Names of those that need no memory of evicted pages."""


@dataclass(frozen=True)
class Known:
    """What orders and admissions may use.

    ``doubling_depth``: pages before a page that costs twice as much as the first.
    """

    history: History
    doubling_depth: float


def make_history(names: Iterable[str], pages: int) -> History | None:
    """Return a memory for tiers of ``pages`` pages in total, or None if none of the named policies needs one.

    It remembers 32 times as many pages as the tiers hold, up to 262,144, but at least twice as many. A page takes about
    270 bytes.
    """
    if WITHOUT_HISTORY.issuperset(names):
        return None
    return History(max(2 * pages, min(_HORIZON * pages, _MOST_REMEMBERED)))


def make_policy(name: str, known: Known | None = None, pages: int = 1) -> Fifo:
    """Return the order that a configuration names, for a tier of ``pages``.

    Args:
        name: Name of the order.
        known: Needed by all orders but "lru", "fifo" and "priority".
        pages: Capacity of the tier.

    Raises:
        KeyError: There is no such order.
        ValueError: The order needs ``known``.
    """
    return _ORDERS[name](_needed(name, known), pages)


def make_admission(name: str, known: Known | None = None) -> Admission:
    """Return the admission that a configuration names: "all", "second_hit" or "cost". Errors as in ``make_policy``."""
    return _ADMISSIONS[name](_needed(name, known))


def _needed(name: str, known: Known | None) -> Known:
    if known is not None:
        return known
    if name not in WITHOUT_HISTORY:
        raise ValueError(f"{name!r} needs a history")
    return Known(History(1), 1.0)


_ORDERS: dict[str, Callable[[Known, int], Fifo]] = {
    "lru": lambda known, pages: Lru(),
    "fifo": lambda known, pages: Fifo(),
    "priority": lambda known, pages: Priority(),
    "gdsf": lambda known, pages: Gdsf(known.history, known.doubling_depth),
    "session": lambda known, pages: Session(known.history, pages),
    "adaptive": lambda known, pages: Adaptive(known.history, pages),
}
_ADMISSIONS: dict[str, Callable[[Known], Admission]] = {
    "all": lambda known: All(),
    "second_hit": lambda known: SecondHit(),
    "cost": lambda known: Cost(known.history),
}

_QUERY_HEADS = 4
"""Assumed query heads per KV head. Llama 3 has 4."""


def doubling_depth(spec: PageSpec) -> float:
    """Return the number of pages before a page that costs twice as much as the first.

    A token costs about ``24 L d^2`` operations in the layers and ``4 L d t`` in attention over ``t`` tokens, where
    ``d`` is the width of the model; they are equal at ``t = 6 d``. The width is taken to be that of the queries.
    """
    width = spec.num_kv_heads * spec.head_dim * (_QUERY_HEADS if spec.kind == "mha" else 1)
    return 6 * width / spec.page_size
