"""The prefetcher's memory between turns: expected requests, and pages to keep in memory.

``ExpectedRequests`` has the newest hint of each request until it is withdrawn or expires. ``KeptPages`` asks the
store to keep the pages of expected requests that are in memory already. No clock.
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
        """Sort key: earlier deadlines first, then higher priorities."""
        return (self.deadline, -self.hint.priority)


class ExpectedRequests:
    """Expected requests, at most ``most``. If there are more, the one needed last is rejected."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.turned_away = 0
        self._most = most
        self._expected: dict[str, Expected] = {}

    def __len__(self) -> int:
        return len(self._expected)

    def take(self, hints: Iterable[Hint], now: float) -> None:
        """Take new hints. A newer one replaces that of its request, or ends it if it has no keys or needs nothing
        brought up.
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
        """Return the requests, those needed first in front."""
        return sorted(self._expected.values(), key=lambda each: each.order)


class _There(NamedTuple):
    """A piece of a hint's pages. ``later`` has the hints that are needed later, the last of them last."""

    hint: Hint
    keys: tuple[PageKey, ...]
    later: tuple[Hint, ...]


class KeptPages:
    """Names each page to the store once per revision of a hint. For one thread at a time."""

    def __init__(self, promotions: PromotionQueue, tiers: Iterable[Tier]) -> None:
        """``tiers`` are those that pages are brought to."""
        self._promotions = promotions
        self._tiers = tuple(tiers)
        self._named: dict[tuple[str, int], set[tuple[PageKey, Tier]]] = {}
        """By hint: pages that were in place, and that the store was asked to keep there."""
        self._there: dict[Tier, list[_There]] = {}
        """Pieces that the last plan found in memory, and that the store has not been asked to keep yet."""

    def clear(self) -> None:
        """Forget everything: no request is expected."""
        self._named, self._there = {}, {}

    def plan(self, hints: Sequence[Hint], wants: Sequence[Want], loads: Sequence[int]) -> None:
        """Note which pages are in memory already, by tier; in HBM only the first of each want that the plan counts on,
        ``loads``.

        ``hints`` belong to the wants, those needed first in front. Other hints are forgotten.
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
        """Ask the store to keep the pages in a tier, before anything is brought there."""
        for hint, keys, later in self._there.pop(tier, ()):
            self.note(hint, self._promotions.keep(hint, keys, tier, later), tier)

    def note(self, hint: Hint, keys: Sequence[PageKey], tier: Tier) -> None:
        """Note that the store was asked for these pages in the tier."""
        known = self._named.get((hint.request_id, hint.revision))
        if known is not None:
            known.update((key, tier) for key in keys)
