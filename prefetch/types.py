"""Input and output types of the planner. Times are in seconds, on the clock of the ``now`` passed to ``plan``."""

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
        """Return how long it takes to compute pages ``[first, stop)`` of a prompt, in seconds.

        K and V of the pages before ``first`` must be available.
        """
        return self.page_s * (stop - first) + self.square_s * (stop * stop - first * first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates and the space that the planner can use.

    Attributes:
        read_s: Time in seconds to read a page from NVMe, 0 if unknown.
        load_s: Time in seconds to load a page from host memory into HBM, 0 if unknown.
        hbm_pages: Number of HBM slots that retained pages and expected requests may occupy.
        host_pages: Number of host slots that pages on the way to HBM may occupy. None: there is no
            host tier, and pages are read directly into HBM.
        compute: Cost of computing pages. None: the planner never prefers computing to loading.
    """

    read_s: float
    load_s: float
    hbm_pages: int
    host_pages: int | None
    compute: Compute | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """An expected request.

    Attributes:
        request_id: ID of the request.
        keys: The keys of the full pages of its prompt.
        tiers: For each page in the prefix of ``keys`` that is readable now, the fastest tier that has it.
        deadline: The time at which the request is expected to start, inf if unknown.
        priority: Among wants with equal deadlines, those with a higher priority are served first. If
            priorities are equal too, wants are served in the order in which they were given.
    """

    request_id: str
    keys: tuple[PageKey, ...]
    tiers: tuple[Tier, ...]
    deadline: float = inf
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """Pages that are needed again by the time ``until``.

    Pages that are in HBM keep their slots, unless wants with earlier deadlines need all of HBM.
    """

    keys: tuple[PageKey, ...]
    tiers: tuple[Tier, ...]
    until: float = inf


class Promotion(NamedTuple):
    """A planned copy of consecutive pages of one request from ``src`` to ``dst``.

    The copy takes place from time ``starts`` to time ``ends``. It contains at most ``planner.PIECE_PAGES`` pages.
    """

    request_id: str
    keys: tuple[PageKey, ...]
    src: Tier
    dst: Tier
    starts: float
    ends: float


class Outcome(NamedTuple):
    """The plan for a want.

    Attributes:
        load: Length of the prefix that will be in HBM. The remaining pages are computed, or wait for space.
        ready: The time at which all pages of that prefix are in HBM.
        done: The time at which the whole prompt is computed. If the deadline or the compute cost is unknown, this is
            the later of ``ready`` and the deadline.
    """

    load: int
    ready: float
    done: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of the planner: promotions in the order of their start times, and an outcome for each request ID."""

    promotions: tuple[Promotion, ...]
    outcomes: Mapping[str, Outcome]
