"""Input and output of the planner: plain data. Times are in seconds on the clock of its ``now``."""

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
    """Seconds to compute the first n pages of a prompt: ``page_s * n + square_s * n * n``."""

    page_s: float
    square_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("page_s", "square_s"):
            require_finite(f"Compute.{name}", getattr(self, name))

    def seconds(self, first: int, stop: int) -> float:
        """Return the time to compute pages ``first`` to ``stop`` after those before them."""
        return self.page_s * (stop - first) + self.square_s * (stop * stop - first * first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the planner can use.

    ``read_s`` and ``load_s`` are seconds per page from NVMe and into HBM; 0 means unknown.

    ``hbm_pages`` is the space in HBM for expected requests. ``host_pages`` is the space in host memory for pages on
    their way; None means that there is no host tier and reads go into HBM. With ``compute`` None, nothing is
    recomputed instead.
    """

    read_s: float
    load_s: float
    hbm_pages: int
    host_pages: int | None
    compute: Compute | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """An expected request: ``keys`` of its prompt's full pages, ``tiers`` of the prefix that can be read now.

    ``deadline`` is when it is expected to start; inf: at some time. With equal deadlines the higher ``priority``
    goes first, then the earlier want.
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
    """Consecutive pages of one request along one edge, at most ``planner.PIECE_PAGES``, from ``starts`` to ``ends``."""

    request_id: str
    keys: tuple[PageKey, ...]
    src: Tier
    dst: Tier
    starts: float
    ends: float


class Outcome(NamedTuple):
    """The plan for a want. ``load`` pages of its prefix will be in HBM; the rest is computed, or waits for space.

    ``ready`` is the time at which those ``load`` pages are in HBM, ``done`` the time at which the whole
    prompt is computed. Without a deadline, or if the compute time is unknown, ``done`` is ``ready`` or the
    deadline, whichever is later.
    """

    load: int
    ready: float
    done: float


@dataclass(frozen=True, slots=True)
class Plan:
    """``promotions`` in the order of their starts, and ``outcomes`` of every want, by request."""

    promotions: tuple[Promotion, ...]
    outcomes: Mapping[str, Outcome]
