"""The state of the prefetcher between turns: expected requests, and pages to keep in memory.

``ExpectedRequests`` contains the latest hint of each request until the hint is withdrawn or expires.
``KeptPages`` asks the store to keep pages of expected requests that are in memory already. Neither class
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
    """An active ``will_need`` hint.

    Attributes:
        hint: The hint.
        deadline: The time at which the pages are needed, or inf if it is unknown.
        ends: The time at which the hint expires. Both times are in seconds, on the same clock as the argument
            ``now`` of ``ExpectedRequests.take``.
    """

    hint: Hint
    deadline: float
    ends: float

    @property
    def order(self) -> tuple[float, int]:
        """A sort key: earlier deadlines first, then higher priorities."""
        return (self.deadline, -self.hint.priority)


class ExpectedRequests:
    """The latest ``will_need`` hint of each expected request, for up to ``most`` requests.

    Beyond this number, the request with the latest deadline is dropped and counted in ``turned_away``.
    """

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.turned_away = 0
        self._most = most
        self._expected: dict[str, Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def take(self, hints: Iterable[Hint], now: float) -> None:
        """Process new hints.

        A hint with a higher revision replaces the known hint of its request. If the new hint has no keys, or
        is not a ``will_need`` hint, the request is no longer expected.
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
        """Forget a hint that is no longer active in the store. A newer hint of the request is kept."""
        known = self._expected.get(hint.request_id)
        if known is not None and known.hint.revision == hint.revision:
            del self._expected[hint.request_id]

    def expire(self, now: float) -> None:
        """Forget hints that have expired by the time ``now``."""
        for request_id in [name for name, each in self._expected.items() if each.ends <= now]:
            del self._expected[request_id]

    def in_order(self) -> list[Expected]:
        """Return the expected requests, earliest deadline first."""
        return sorted(self._expected.values(), key=lambda each: each.order)


class _There(NamedTuple):
    """Pages of a hint that are already in a tier. The store is to be asked to keep them there.

    ``later`` lists the hints of requests that start later, earliest first. Their pages may be displaced.
    """

    hint: Hint
    keys: tuple[PageKey, ...]
    later: tuple[Hint, ...]


class KeptPages:
    """Asks the store to keep pages that are already in the right tier for an expected request.

    It asks at most once per page, tier and hint revision. Not thread-safe.
    """

    def __init__(self, promotions: PromotionQueue, tiers: Iterable[Tier]) -> None:
        """Create an instance that has no pages to keep.

        Args:
            promotions: The queue that sends the requests to the store.
            tiers: The tiers to which pages are promoted.
        """
        self._promotions = promotions
        self._tiers = tuple(tiers)
        self._named: dict[tuple[str, int], set[tuple[PageKey, Tier]]] = {}
        """For each request ID and revision: the pages that the store was asked to keep, with their tiers."""
        self._there: dict[Tier, list[_There]] = {}
        """For each tier: pages that the latest plan found there and that the store was not yet asked to keep."""

    def clear(self) -> None:
        """Forget everything, because no request is expected."""
        self._named, self._there = {}, {}

    def plan(self, hints: Sequence[Hint], wants: Sequence[Want], loads: Sequence[int]) -> None:
        """Record which pages of ``wants`` are already in each tier, and forget all hints except ``hints``.

        Args:
            hints: The hints that ``wants`` were made from, earliest deadline first.
            wants: The wants of the latest plan.
            loads: For each want, the length of the prefix that the plan loads into HBM. Pages in HBM beyond
                this prefix are not recorded.
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
        """Ask the store to keep the pages recorded for ``tier``.

        Call this before pages are promoted to that tier.
        """
        for hint, keys, later in self._there.pop(tier, ()):
            self.note(hint, self._promotions.keep(hint, keys, tier, later), tier)

    def note(self, hint: Hint, keys: Sequence[PageKey], tier: Tier) -> None:
        """Record that the store was asked to keep pages in ``tier``, or to promote them to it.

        ``keys`` are pages of ``hint``. ``ask`` will not ask for them again.
        """
        known = self._named.get((hint.request_id, hint.revision))
        if known is not None:
            known.update((key, tier) for key in keys)
