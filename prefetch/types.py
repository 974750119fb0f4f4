"""The planner's input and output: plain data. Times are seconds on the clock of its ``now``."""

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
        """To compute pages ``first`` to ``stop`` after those before them."""
        return self.page_s * (stop - first) + self.square_s * (stop * stop - first * first)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is to plan with. ``read_s``, ``load_s``: seconds a page from NVMe and into HBM; 0: not known yet.

    ``hbm_pages``: pages that expected requests may have in HBM together. ``host_pages``: places in host memory for
    pages on their way; None: there is no host tier, reads go into HBM. ``compute`` None: nothing is computed instead.
    """

    read_s: float
    load_s: float
    hbm_pages: int
    host_pages: int | None
    compute: Compute | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A request that is expected: ``keys`` of its prompt's full pages, ``tiers`` of the prefix that can be read now.

    ``deadline``: when it is expected to start, seconds on the clock of ``now``; inf: some time. Of equal deadlines the
    higher ``priority`` goes first, then the earlier in the sequence of wants.
    """

    request_id: str
    keys: tuple[PageKey, ...]
    tiers: tuple[Tier, ...]
    deadline: float = inf
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retained:
    """Pages that somebody comes back for by ``until``: those in HBM stay before any want with a later deadline."""

    keys: tuple[PageKey, ...]
    tiers: tuple[Tier, ...]
    until: float = inf


class Promotion(NamedTuple):
    """Consecutive pages of one request along one edge, ``planner.PIECE_PAGES`` at most; from ``starts`` to ``ends``."""

    request_id: str
    keys: tuple[PageKey, ...]
    src: Tier
    dst: Tier
    starts: float
    ends: float


class Outcome(NamedTuple):
    """What a want gets. ``load``: pages of its prefix in HBM in the end; the rest is computed, or waits for room.

    ``ready``: when these are there. ``done``: when its prompt is; where computing is not known, ``ready`` or its
    deadline.
    """

    load: int
    ready: float
    done: float


@dataclass(frozen=True, slots=True)
class Plan:
    """``promotions`` in the order of their starts; ``outcomes`` of every want, by request."""

    promotions: tuple[Promotion, ...]
    outcomes: Mapping[str, Outcome]
