"""The prefetcher's memory between turns: expected requests, and pages to keep in memory.

``ExpectedRequests`` has the newest hint of each request until that hint is withdrawn or expires.
``KeptPages`` asks the store to keep those pages of expected requests that are in memory already. Neither
reads a clock.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, NamedTuple

from prefetch.planner import PIECE_PAGES
from tierstore.directory.hints import lifetime
from tierstore.types import Hint, Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prefetch.promotions import PromotionQueue
    from prefetch.types import Want
    from tierstore.types import PageKey

MOST_REQUESTS = 4096


class Expected(NamedTuple):
    """A ``will_need`` hint in force, with the times at which its pages are needed and at which it expires.

    Both are on the clock of the ``now`` that ``ExpectedRequests.take`` was given. A ``deadline`` of inf means
    none.
    """

    hint: Hint
    deadline: float
    ends: float

    @property
    def order(self) -> tuple[float, int]:
        """Return a sort key that puts earlier deadlines first, then higher priorities."""
        return (self.deadline, -self.hint.priority)


class ExpectedRequests:
    """The newest ``will_need`` hint of each expected request, of at most ``most`` requests.

    If there are more, the request that is needed last is dropped and counted in ``turned_away``.
    """

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.turned_away = 0
        self._most = most
        self._expected: dict[str, Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def take(self, hints: Iterable[Hint], now: float) -> None:
        """Take new hints.

        A hint with a higher revision replaces the known hint of its request. If it has no keys, or is not a
        ``will_need`` hint, it only ends the known one.
        """
        for hint in hints:
            known = self._expected.get(hint.request_id)
            if known is not None and hint.revision <= known.hint.revision:
                continue
            self._expected.pop(hint.request_id, None)
            if hint.keys and hint.need == "will_need":
                deadline = inf if hint.deadline_s is None else now + hint.deadline_s
                self._expected[hint.request_id] = Expected(hint, deadline, now + lifetime(hint))
            if len(self._expected) > self._most:
                last = max(self._expected.values(), key=lambda each: each.order)
                del self._expected[last.hint.request_id]
                self.turned_away += 1

    def drop(self, hint: Hint) -> None:
        """Forget a hint that the store no longer has."""
        known = self._expected.get(hint.request_id)
        if known is not None and known.hint.revision == hint.revision:
            del self._expected[hint.request_id]

    def expire(self, now: float) -> None:
        """Forget expired hints."""
        for request_id in [name for name, each in self._expected.items() if each.ends <= now]:
            del self._expected[request_id]

    def in_order(self) -> list[Expected]:
        """Return the requests, the one needed first at index 0."""
        return sorted(self._expected.values(), key=lambda each: each.order)


class _There(NamedTuple):
    """Some of a hint's pages, with the hints in ``later`` whose requests start later, in that order."""

    hint: Hint
    keys: tuple[PageKey, ...]
    later: tuple[Hint, ...]


class KeptPages:
    """Asks the store to keep pages where they are, once per page, tier and revision of a hint.

    Not thread-safe.
    """

    def __init__(self, promotions: PromotionQueue, tiers: Iterable[Tier]) -> None:
        """Set the queue that asks the store, and the ``tiers`` that pages are promoted to."""
        self._promotions = promotions
        self._tiers = tuple(tiers)
        self._named: dict[tuple[str, int], set[tuple[PageKey, Tier]]] = {}
        """By request ID and revision of a hint: pages that the store was asked to keep, with their tiers."""
        self._there: dict[Tier, list[_There]] = {}
        """By tier: pages that the last plan found there and that the store has not been asked to keep yet."""

    def clear(self) -> None:
        """Forget everything: no request is expected."""
        self._named, self._there = {}, {}

    def plan(self, hints: Sequence[Hint], wants: Sequence[Want], loads: Sequence[int]) -> None:
        """Note for each tier which pages of ``wants`` are in it already. Forget all hints but ``hints``.

        Args:
            hints: The hints of the wants, the one needed first at index 0.
            wants: The wants of the last plan.
            loads: For each want, the number of leading pages that the plan has in HBM. Of the pages that are
                in HBM, only those within it are noted.
        """
        before, self._named, self._there = self._named, {}, {tier: [] for tier in self._tiers}
        for rank, (hint, want, load) in enumerate(zip(hints, wants, loads, strict=True)):
            later = tuple(hints[rank + 1 :])
            places = list(zip(want.keys, want.tiers, strict=False))
            known = before.get((hint.request_id, hint.revision), set()).intersection(places)
            self._named[hint.request_id, hint.revision] = known
            for tier, there in self._there.items():
                within = places[:load] if tier == Tier.HBM else places
                fresh = [place[0] for place in within if place[1] == tier and place not in known]
                for start in range(0, len(fresh), PIECE_PAGES):
                    there.append(_There(hint, tuple(fresh[start : start + PIECE_PAGES]), later))

    def ask(self, tier: Tier) -> None:
        """Ask the store to keep the pages noted for ``tier``.

        Call it before pages are promoted to that tier.
        """
        for hint, keys, later in self._there.pop(tier, ()):
            self.note(hint, self._promotions.keep(hint, keys, tier, later), tier)

    def note(self, hint: Hint, keys: Sequence[PageKey], tier: Tier) -> None:
        """Note that the store was asked to keep these pages in ``tier``, or to promote them to it."""
        known = self._named.get((hint.request_id, hint.revision))
        if known is not None:
            known.update((key, tier) for key in keys)
