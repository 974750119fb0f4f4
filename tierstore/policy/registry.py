"""The eviction orders and admissions by the names that a configuration gives them, and what they may look at."""

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
"""Names of those that need to know nothing of pages that are gone."""


@dataclass(frozen=True)
class Known:
    """What orders and admissions may look at. ``doubling_depth``: pages before one that costs twice the first."""

    history: History
    doubling_depth: float


def make_history(names: Iterable[str], pages: int) -> History | None:
    """A memory for tiers of so many pages in all; None if none of the named needs one.

    It remembers 32 times as many pages as the tiers hold, up to 262,144, and twice as many in any case: about 270
    bytes each.
    """
    if WITHOUT_HISTORY.issuperset(names):
        return None
    return History(max(2 * pages, min(_HORIZON * pages, _MOST_REMEMBERED)))


def make_policy(name: str, known: Known | None = None, pages: int = 1) -> Fifo:
    """The order a configuration names, for a tier of ``pages``. All but "lru", "fifo" and "priority" need ``known``.

    KeyError for a name that is none; ValueError without what it needs.
    """
    return _ORDERS[name](_needed(name, known), pages)


def make_admission(name: str, known: Known | None = None) -> Admission:
    """The admission a configuration names: "all", "second_hit" or "cost"; errors as ``make_policy``."""
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
"""Query heads a KV head, where nothing tells: Llama 3 has 4."""


def doubling_depth(spec: PageSpec) -> float:
    """Pages before one that costs twice what the first costs.

    A token costs about ``24 L d^2`` operations in the layers and ``4 L d t`` in attention over ``t`` tokens, ``d`` the
    width of the model: equal at ``t = 6 d``. The width is taken as that of the queries.
    """
    width = spec.num_kv_heads * spec.head_dim * (_QUERY_HEADS if spec.kind == "mha" else 1)
    return 6 * width / spec.page_size
