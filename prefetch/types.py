"""Plain data: input and output of the planner. Times are in seconds on the clock of the planner's ``now``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from tierstore.types import require_finite

if TYPE_CHECKING:
    from tierstore.types import PageKey, Tier


@dataclass(frozen=True, slots=True)
class Compute:
    """The cost of prefill: the first n pages of a prompt take ``page_s * n + square_s * n * n`` seconds."""

    page_s: float
    square_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("page_s", "square_s"):
            require_finite(f"Compute.{name}", getattr(self, name))

    def seconds(self, first: int, stop: int) -> float:
        """Return the seconds to compute pages ``[first, stop)`` of a prompt, given those before them."""
        return self.page_s * (stop - first) + self.square_s * (stop * stop - first * first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates and the space that the planner can use.

    ``read_s`` is the time in seconds to read a page from NVMe, ``load_s`` the time to load one from host
    memory into HBM; 0 means unknown.

    ``hbm_pages`` is the number of pages in HBM that retained pages and expected requests may take.
    ``host_pages`` is the number that requests may take in host memory on the way to HBM; None means that
    there is no host tier and reads go directly into HBM. With ``compute`` None, the planner never prefers
    computing a page to loading it.
    """

    read_s: float
    load_s: float
    hbm_pages: int
    host_pages: int | None
    compute: Compute | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """An expected request.

    ``keys`` are those of the full pages of its prompt. ``tiers`` has the tier of each page of the prefix that
    can be read now. ``deadline`` is the time at which the request is expected to start, inf if that is
    unknown. If deadlines are equal, the want with the higher ``priority`` goes first; if priorities are equal
    too, the one earlier in the list.
    """

    request_id: str
    keys: tuple[PageKey, ...]
    tiers: tuple[Tier, ...]
    deadline: float = inf
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """Pages that are needed again by ``until``.

    Those in HBM keep their space there, unless wants with an earlier deadline need all of it.
    """

    keys: tuple[PageKey, ...]
    tiers: tuple[Tier, ...]
    until: float = inf


class Promotion(NamedTuple):
    """A planned copy of consecutive pages of one request along one edge, from ``starts`` to ``ends``.

    It has at most ``planner.PIECE_PAGES`` pages.
    """

    request_id: str
    keys: tuple[PageKey, ...]
    src: Tier
    dst: Tier
    starts: float
    ends: float


class Outcome(NamedTuple):
    """The plan for a want: ``load`` pages of its prefix will be in HBM.

    The rest is computed, or waits for space.

    ``ready`` is the time at which those ``load`` pages are in HBM, ``done`` the time at which the whole
    prompt is computed. Without a deadline, or if the compute time is unknown, ``done`` is ``ready`` or the
    deadline, whichever is later.
    """

    load: int
    ready: float
    done: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of the planner: promotions in the order of their starts, and an outcome per request ID."""

    promotions: tuple[Promotion, ...]
    outcomes: Mapping[str, Outcome]
