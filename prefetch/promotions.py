"""The queue of pages to promote, with a limit on pages in flight.

A caller adds those pages of a hint that it wants in a tier (``want``), removes all waiting pages of a hint
(``over``), and starts as many promotions as the limit allows (``advance``). The prefetcher refills its queue with
each plan, in its own thread. In vLLM, the scheduler adds requests as they arrive and calls ``advance`` once per
step. The queue pins no pages and has no lock. The store decides which pages to displace, starts nothing for a
withdrawn hint (``TierStore.promote``), and counts how many of the promoted bytes are used.
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
"""The second half of the window may start after this fraction of the time that copying the first half takes.

With a much smaller fraction, both halves would be copied in one wave.
"""


class LoadWindow:
    """A limit on the pages in flight to HBM. Each half of this window is filled separately.

    Loads of the second half are started while those of the first are in flight. Pages that are loaded in groups of
    layers all arrive at the end of a wave (``tierstore.gpu.copy_queue``). If new loads were started only then, the
    link would be idle until the next wave starts. This class reads no clock: callers pass the time.
    """

    def __init__(self) -> None:
        self._begins = -inf
        self._pages = 0

    def room(self, now: float, arriving: int, most: int, page_s: float) -> int:
        """Return how many more page loads to HBM may start now. If the result is 0 or negative, none may.

        Opens the next half of the window if it is due.

        Args:
            now: Current time in seconds, on a monotonic clock.
            arriving: Number of pages in flight to HBM now.
            most: Maximum number of pages in flight to HBM. A small window is not split into halves.
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
        """Record that loads of ``pages`` pages were started in the current half of the window."""
        self._pages += pages


class Started(NamedTuple):
    """The result of one ``TierStore.promote`` call for a want.

    Attributes:
        hint: The hint of the want.
        covered: Keys of the want's pages that are now in the tier or in flight to it.
        started: Keys of the pages whose promotion was started by this call.
        in_force: False if the hint has ended. All wants of the hint have then been removed from the queue.
    """

    hint: Hint
    covered: Sequence[PageKey]
    started: Sequence[PageKey]
    in_force: bool


@dataclass(slots=True, eq=False)
class _Want:
    """The pages that one call to ``want`` has added. The pages ``keys[done:]`` are still waiting.

    Pages of the hints in ``later`` may be displaced.
    """

    hint: Hint
    keys: Sequence[PageKey]
    later: Sequence[Hint]
    order: tuple[float, ...]
    done: int = 0


_NOBODY = Hint("", 0, ())


class PromotionQueue:
    """The pages waiting to be promoted to each tier, and the limit on pages in flight.

    A want is the set of pages added by one call to ``want``. A want leaves the queue when all its pages are in the
    tier or in flight to it, when its hint has ended, when its next page is not readable in any tier, or when
    ``over`` is called. In all cases, copies in flight continue. Not thread-safe.

    Args:
        store: The store whose pages are promoted.
        most: Maximum number of pages in flight. The attribute of this name may be changed at any time.
        passes: Maximum number of wants that ``advance`` may skip at the head of the queue because they cannot start
            yet.
        clock: Returns the time in seconds. Tests replace it.
    """

    def __init__(
        self, store: TierStore, most: int, *, passes: int = 0, clock: Callable[[], float] = monotonic
    ) -> None:
        self.most = most
        self.load_s = 0.0
        """Seconds that the link takes to load one page into HBM, 0 if unknown. See ``LoadWindow.room``."""
        self.in_flight = 0
        """Number of pages that the store was promoting when the queue last called it."""
        self._store = store
        self._passes = passes
        self._clock = clock
        self._wants: dict[Tier, list[_Want]] = {}
        self._left: Counter[tuple[str, int]] = Counter()
        self._arriving: Counter[Tier] = Counter()
        self._window = LoadWindow()

    def __bool__(self) -> bool:
        """Return whether any page is waiting for its promotion to start."""
        return bool(self._left)

    @property
    def tiers(self) -> list[Tier]:
        """The tiers to which pages are waiting to be promoted, fastest first."""
        return sorted(tier for tier, wants in self._wants.items() if wants)

    def left(self, hint: Hint) -> int:
        """Return how many pages of the hint are still waiting for their promotion to start."""
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
        """Add pages of a ``will_need`` hint to be promoted to ``tier``. No promotion is started yet.

        Args:
            hint: The hint, which must be active.
            keys: The pages, in the order in which to promote them.
            tier: The destination.
            later: Hints whose pages may be displaced. Pages of the last hint are displaced first.
            order: Wants with a lower value start earlier. Wants with equal values start in the order of the
                calls.
        """
        if not keys:
            return
        wants = self._wants.setdefault(tier, [])
        insort(wants, _Want(hint, keys, later, order), key=_order)
        self._left[_mark(hint)] += len(keys)

    def over(self, hint: Hint) -> None:
        """Remove all waiting pages of the hint from the queue, if there are any."""
        mark = _mark(hint)
        if self._left.pop(mark, 0):
            for wants in self._wants.values():
                wants[:] = [want for want in wants if _mark(want.hint) != mark]

    def clear(self) -> None:
        """Remove all waiting pages from the queue."""
        self._wants.clear()
        self._left.clear()

    def keep(
        self, hint: Hint, keys: Sequence[PageKey], tier: Tier, later: Sequence[Hint]
    ) -> Sequence[PageKey]:
        """Ask the store to keep pages in the tier where they already are.

        A page that has been evicted from this tier in the meantime is promoted again, even if more than
        ``most`` pages are then in flight.

        Args:
            hint: The hint for which the store keeps the pages.
            keys: The pages, at most ``planner.PIECE_PAGES``.
            tier: The tier in which to keep them.
            later: Hints whose pages may be displaced, as in ``want``.

        Returns:
            The longest prefix of ``keys`` whose pages are in the tier or in flight to it.
        """
        return keys[: self._promote(hint, keys, tier, later).covered]

    def look(self, tier: Tier) -> None:
        """Ask the store how many pages are in flight, in total and to ``tier``. No promotion is started."""
        if self.in_flight:
            self._promote(_NOBODY, (), tier, ())

    def advance(self, tier: Tier, most: int | None = None) -> list[Started]:
        """Start promotions of the pages waiting for ``tier``, in order and within the limits.

        At most ``passes`` wants that cannot start yet are skipped. Wants that are finished leave the queue.

        Args:
            tier: The destination.
            most: Maximum number of pages whose promotion this call starts. None: only the other limits apply.

        Returns:
            One ``Started`` for each call to ``TierStore.promote``.
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
        """Record that ``pages`` more pages of a want no longer wait."""
        want.done += pages
        mark = _mark(want.hint)
        self._left[mark] -= pages
        if not self._left[mark]:
            del self._left[mark]


def _mark(hint: Hint) -> tuple[str, int]:
    return (hint.request_id, hint.revision)


def _order(want: _Want) -> tuple[float, ...]:
    return want.order
