"""Pages that wait to be brought up ahead of need, in order, and the budget of pages in flight. All callers use it.

A caller says which pages of a hint it wants in a tier (``want``), takes that back (``over``), and starts what the
budget allows (``advance``). The prefetcher refills the queue with each plan, in a thread of its own; the vLLM
scheduler adds requests as they come and advances once a step. The queue holds no page and no lock. The store decides
which pages make way, starts nothing for a withdrawn hint (``TierStore.promote``), and counts what becomes of the bytes.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from prefetch.planner import PIECE_PAGES
from tierstore.types import Hint, Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.store import TierStore
    from tierstore.types import PageKey, Promoted

_NEXT_AT = 0.6
"""Share of a half's time on the link after which the other half may start. Much earlier, both would join one wave."""


class LoadWindow:
    """The pages on their way into HBM, in two halves: the second is started while the first crosses the link.

    Pages that go up by layer groups end together, at the end of a wave (``tierstore.gpu.copy_queue``). If pages
    were started only when others end, the link would idle until the next wave begins. No clock.
    """

    def __init__(self) -> None:
        self._begins = -inf
        self._pages = 0

    def room(self, now: float, arriving: int, most: int, page_s: float) -> int:
        """Return how many pages may be started now.

        Args:
            now: The time in seconds.
            arriving: Pages on their way.
            most: Most pages on their way at once.
            page_s: Seconds per page on the link, 0 if unknown.
        """
        if most < 2 * PIECE_PAGES:
            return most - arriving
        took = self._pages * page_s
        if not arriving:
            self._begins, self._pages = now, 0
        elif now >= self._begins + _NEXT_AT * took:
            self._begins, self._pages = max(now, self._begins + took), 0
        return min(most // 2 - self._pages, most - arriving)

    def started(self, pages: int) -> None:
        """Note that pages were started."""
        self._pages += pages


class Started(NamedTuple):
    """What one call of the store did for a want. ``in_force`` is False if its hint has ended: the want is over.

    ``covered`` are pages that are in the tier or on their way there now; of these, ``started`` were not before.
    """

    hint: Hint
    covered: Sequence[PageKey]
    started: Sequence[PageKey]
    in_force: bool


@dataclass(slots=True, eq=False)
class _Want:
    """``done`` pages of ``keys`` have been covered. ``later`` has the hints whose pages make way."""

    hint: Hint
    keys: Sequence[PageKey]
    later: Sequence[Hint]
    order: tuple[float, ...]
    done: int = 0


_NOBODY = Hint("", 0, ())


class PromotionQueue:
    """Wanted pages by tier, started in order while at most ``most`` pages are in flight. For one thread at a time.

    A want ends when all its pages are covered, when its hint has ended, when the next page of it can be read nowhere,
    or with ``over``. What is in flight then goes on.

    Args:
        store: The store whose pages are brought up.
        most: Most pages in flight at once. May be changed at any time.
        passes: How many wants that cannot start yet may be passed by those after them.
        clock: For tests.
    """

    def __init__(
        self, store: TierStore, most: int, *, passes: int = 0, clock: Callable[[], float] = monotonic
    ) -> None:
        self.most = most
        self.load_s = 0.0
        """Seconds per page into HBM, 0 if unknown: the pace at which the second half of ``most`` follows the first."""
        self.in_flight = 0
        """Pages that promotions of the store were bringing when it was last asked. Later there may be fewer."""
        self._store = store
        self._passes = passes
        self._clock = clock
        self._wants: dict[Tier, list[_Want]] = {}
        self._left: Counter[tuple[str, int]] = Counter()
        self._arriving: Counter[Tier] = Counter()
        self._window = LoadWindow()

    def __bool__(self) -> bool:
        """Return whether pages wait to be started."""
        return bool(self._left)

    @property
    def tiers(self) -> list[Tier]:
        """Return the tiers for which pages wait, the fastest first."""
        return sorted(tier for tier, wants in self._wants.items() if wants)

    def left(self, hint: Hint) -> int:
        """Return how many pages of the hint wait to be started."""
        return self._left[_mark(hint)]

    def want(
        self,
        hint: Hint,
        keys: Sequence[PageKey],
        tier: Tier,
        *,
        later: Sequence[Hint] = (),
        order: tuple[float, ...] = (),
    ) -> None:
        """Add pages that the hint, a ``will_need``, is to have in a tier. Starts nothing.

        Args:
            hint: The hint in force.
            keys: The pages, in the order in which they are started.
            tier: Where they are to be.
            later: Hints whose pages make way, the one whose pages go first last.
            order: Wants with a lower value start earlier; with equal values, those added earlier.
        """
        if not keys:
            return
        wants = self._wants.setdefault(tier, [])
        insort(wants, _Want(hint, keys, later, order), key=_order)
        self._left[_mark(hint)] += len(keys)

    def over(self, hint: Hint) -> None:
        """Drop everything that the hint still waits for. Without effect if it waits for nothing."""
        mark = _mark(hint)
        if self._left.pop(mark, 0):
            for wants in self._wants.values():
                wants[:] = [want for want in wants if _mark(want.hint) != mark]

    def clear(self) -> None:
        """Drop everything that waits."""
        self._wants.clear()
        self._left.clear()

    def keep(
        self, hint: Hint, keys: Sequence[PageKey], tier: Tier, later: Sequence[Hint]
    ) -> Sequence[PageKey]:
        """Ask the store at once to keep pages in a tier, where they are. Returns the first of them that are there.

        At most ``planner.PIECE_PAGES``. A page that has left the tier meanwhile is brought back, whatever the budget.
        """
        return keys[: self._promote(hint, keys, tier, later).covered]

    def look(self, tier: Tier) -> None:
        """Update the figures of pages in flight. Starts nothing."""
        if self.in_flight:
            self._promote(_NOBODY, (), tier, ())

    def advance(self, tier: Tier, most: int | None = None) -> list[Started]:
        """Start the pages that wait for a tier, in order, as far as the budget and the store allow.

        A want that cannot start yet is passed by at most ``passes`` others. ``most``: most pages to start in this
        call. Returns what was done, call by call of the store.
        """
        if self.most - self.in_flight < PIECE_PAGES:
            self.look(tier)
        wants = self._wants.get(tier, [])
        done: list[Started] = []
        left, at = 1 << 30 if most is None else most, 0
        while at < min(len(wants), 1 + self._passes):
            room = min(self._room(tier), PIECE_PAGES, left)
            if room <= 0:
                break
            want = wants[at]
            keys = want.keys[want.done : want.done + room]
            found = self._promote(want.hint, keys, tier, want.later)
            done.append(Started(want.hint, keys[: found.covered], found.keys, found.in_force))
            left -= len(found.keys)
            if not found.in_force:
                self.over(want.hint)
                at = 0
                continue
            self._note(want, found.covered)
            if found.covered < len(keys) and self._store.match(keys[found.covered :][:1]).num_pages:
                at += 1
            elif found.covered < len(keys) or want.done == len(want.keys):
                self._note(want, len(want.keys) - want.done)
                del wants[at]
        return done

    def _room(self, tier: Tier) -> int:
        room = self.most - self.in_flight
        if tier != Tier.HBM:
            return room
        return min(room, self._window.room(self._clock(), self._arriving[tier], self.most, self.load_s))

    def _promote(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, later: Sequence[Hint]) -> Promoted:
        found = self._store.promote(hint, keys, tier, later)
        self.in_flight = found.in_flight
        self._arriving[tier] = found.arriving
        if tier == Tier.HBM:
            self._window.started(len(found.keys))
        return found

    def _note(self, want: _Want, pages: int) -> None:
        """Count ``pages`` more pages of a want as settled: nothing has to be started for them any more."""
        want.done += pages
        mark = _mark(want.hint)
        self._left[mark] -= pages
        if not self._left[mark]:
            del self._left[mark]


def _mark(hint: Hint) -> tuple[str, int]:
    return (hint.request_id, hint.revision)


def _order(want: _Want) -> tuple[float, ...]:
    return want.order
