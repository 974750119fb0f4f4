"""The queue of pages to promote ahead of need, with its limit on pages in flight.

A caller adds the pages of a hint that it wants in a tier (``want``), drops those of a hint (``over``), and
starts as many as the limit allows (``advance``). The prefetcher refills its queue with each plan, in a thread
of its own; the vLLM scheduler adds requests as they come and calls ``advance`` once per step. The queue pins
no page and holds no lock. The store decides which pages to displace, starts nothing for a withdrawn hint
(``TierStore.promote``), and counts which of the promoted bytes are used.
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
"""Share of the time that one half takes on the link after which the other half may start.

With a much smaller share both halves would join one wave.
"""


class LoadWindow:
    """Limits pages in flight to HBM in two halves: the second is started while the first crosses the link.

    Pages loaded by layer groups end together, at the end of a wave (``tierstore.gpu.copy_queue``). If pages
    were started only when others end, the link would idle until the next wave begins. The caller gives the
    time.
    """

    def __init__(self) -> None:
        self._begins = -inf
        self._pages = 0

    def room(self, now: float, arriving: int, most: int, page_s: float) -> int:
        """Return how many pages may be started now.

        Args:
            now: The time in seconds.
            arriving: Number of pages in flight to HBM.
            most: Most pages in flight to HBM at once.
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
        """Count ``pages`` started pages in the current half."""
        self._pages += pages


class Started(NamedTuple):
    """The result of one ``TierStore.promote`` call for a want.

    ``covered`` are the pages that are now in the tier or in flight to it, ``started`` those whose promotion
    this call started. ``in_force`` is False if the hint has ended; its wants are then dropped.
    """

    hint: Hint
    covered: Sequence[PageKey]
    started: Sequence[PageKey]
    in_force: bool


@dataclass(slots=True, eq=False)
class _Want:
    """A call of ``want``: pages ``keys[done:]`` still wait.

    Pages of the hints in ``later`` may be displaced.
    """

    hint: Hint
    keys: Sequence[PageKey]
    later: Sequence[Hint]
    order: tuple[float, ...]
    done: int = 0


_NOBODY = Hint("", 0, ())


class PromotionQueue:
    """Wanted pages by tier, started in order while at most ``most`` pages are in flight. Not thread-safe.

    A want ends when each of its pages is in the tier or in flight to it, when its hint has ended, when its
    next page is not readable in any tier, or with ``over``. Copies in flight continue.

    Args:
        store: The store whose pages are promoted.
        most: Most pages in flight at once. May be changed at any time.
        passes: Number of wants that may be skipped in one ``advance`` because they cannot start yet.
        clock: Returns the time in seconds. Tests replace it.
    """

    def __init__(
        self, store: TierStore, most: int, *, passes: int = 0, clock: Callable[[], float] = monotonic
    ) -> None:
        self.most = most
        self.load_s = 0.0
        """Seconds per page into HBM, 0 if unknown.

        Sets how soon the second half of ``most`` follows the first.
        """
        self.in_flight = 0
        """Number of pages that promotions of the store were moving when the store was last called."""
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
        """Return the tiers that pages wait for, the fastest first."""
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
        """Add pages of a ``will_need`` hint that are to be promoted to ``tier``. Starts nothing.

        Args:
            hint: The hint in force.
            keys: The pages, in the order in which they are started.
            tier: The tier to promote them to.
            later: Hints whose pages may be displaced, those of the last one first.
            order: Wants with a lower value start earlier. Wants with equal values start in the order of the
                calls.
        """
        if not keys:
            return
        wants = self._wants.setdefault(tier, [])
        insort(wants, _Want(hint, keys, later, order), key=_order)
        self._left[_mark(hint)] += len(keys)

    def over(self, hint: Hint) -> None:
        """Drop all waiting pages of the hint. Does nothing if no page of it waits."""
        mark = _mark(hint)
        if self._left.pop(mark, 0):
            for wants in self._wants.values():
                wants[:] = [want for want in wants if _mark(want.hint) != mark]

    def clear(self) -> None:
        """Drop all waiting pages."""
        self._wants.clear()
        self._left.clear()

    def keep(
        self, hint: Hint, keys: Sequence[PageKey], tier: Tier, later: Sequence[Hint]
    ) -> Sequence[PageKey]:
        """Ask the store now to keep pages in a tier that they are in.

        A page that has left the tier in the meantime is promoted again, even beyond ``most`` pages in flight.

        Args:
            hint: The hint for which the store keeps them.
            keys: The pages, at most ``planner.PIECE_PAGES``.
            tier: The tier that they are in.
            later: As for ``want``.

        Returns:
            The longest prefix of ``keys`` whose pages are in the tier or in flight to it.
        """
        return keys[: self._promote(hint, keys, tier, later).covered]

    def look(self, tier: Tier) -> None:
        """Update the numbers of pages in flight from the store. Starts nothing."""
        if self.in_flight:
            self._promote(_NOBODY, (), tier, ())

    def advance(self, tier: Tier, most: int | None = None) -> list[Started]:
        """Start the pages that wait for ``tier``, in order, as far as the limit and the store allow.

        At most ``passes`` wants that cannot start yet are skipped.

        Args:
            tier: The tier to promote pages to.
            most: Most pages to start in this call. None sets no further limit.

        Returns:
            One ``Started`` for each call of the store.
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
