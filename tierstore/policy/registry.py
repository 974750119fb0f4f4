"""Creates the eviction and admission policies that the configuration names."""

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
"""Names of the policies that need no history."""


@dataclass(frozen=True)
class Known:
    """The data that policies may use.

    Attributes:
        history: The recently requested pages.
        doubling_depth: Depth of a page, as the number of pages before it, at which computing the page costs
            twice as much as computing the first page of a sequence.
    """

    history: History
    doubling_depth: float


def make_history(names: Iterable[str], pages: int) -> History | None:
    """Create a history for tiers of ``pages`` pages in total, or return None if no named policy needs one.

    The history remembers ``32 * pages`` pages, but no more than 262,144 or ``2 * pages``, whichever is larger.
    Each remembered page takes about 270 bytes.
    """
    if WITHOUT_HISTORY.issuperset(names):
        return None
    return History(max(2 * pages, min(_HORIZON * pages, _MOST_REMEMBERED)))


def make_policy(name: str, known: Known | None = None, pages: int = 1) -> Fifo:
    """Create the eviction policy with this name, for one tier.

    Args:
        name: Name of the policy in the configuration.
        known: Data for the policy. Required by all policies except "lru", "fifo" and "priority".
        pages: Capacity of the tier in pages.

    Raises:
        KeyError: No policy has this name.
        ValueError: The policy requires ``known``.
    """
    return _ORDERS[name](_needed(name, known), pages)


def make_admission(name: str, known: Known | None = None) -> Admission:
    """Create the admission policy with this name: "all", "second_hit" or "cost".

    Raises:
        KeyError: No policy has this name.
        ValueError: The policy requires ``known``.
    """
    return _ADMISSIONS[name](_needed(name, known))


def _needed(name: str, known: Known | None) -> Known:
    if known is not None:
        return known
    if name not in WITHOUT_HISTORY:
        raise ValueError(f"policy {name!r} needs a history: `known` must not be None")
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
"""Assumed number of query heads per KV head, as in Llama 3."""


def doubling_depth(spec: PageSpec) -> float:
    """Return how many pages must precede a page for it to cost twice as much to compute as the first page.

    In a model with ``L`` layers of width ``d``, computing a token takes about ``24 L d^2`` operations for the
    layers, and ``4 L d t`` operations for attention to the ``t`` tokens before it. The two numbers are equal at
    ``t = 6 d``. The width of the model is assumed to be that of the queries.
    """
    width = spec.num_kv_heads * spec.head_dim * (_QUERY_HEADS if spec.kind == "mha" else 1)
    return 6 * width / spec.page_size
