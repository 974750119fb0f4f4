"""Moves that callers ask for, ahead of need or down, and what they expect: a bounded piece at each hold of the lock."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from tierstore import metrics as report
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.keys import require_key_list
from tierstore.types import Hint, Tier, require_member, seconds_to_wait

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.directory.directory import Directory
    from tierstore.metrics import Metrics
    from tierstore.pump import Progress
    from tierstore.types import HintResult, PageKey, Promoted

_LOOKED_UP = 1024
"""Keys that are looked up in one hold of the lock."""


class Moving:
    """Hints, promotions, demotions and evictions of one store: ``TierStore`` says what each guarantees. Any thread."""

    def __init__(self, directory: Directory, progress: Progress, metrics: Metrics) -> None:
        self._directory = directory
        self._progress = progress
        self._metrics = metrics
        self._lock = progress.lock

    # -- what a scheduler expects, and who acts on it ------------------------------------------------------------

    def hint(self, hint: Hint) -> HintResult:
        """``TierStore.hint``."""
        self._progress.advance()
        _require_hints(hint)
        with self._lock:
            result = self._directory.hints.apply(hint, monotonic())
        while self._directory.hints.pending:
            with self._lock:
                self._directory.hints.advance(BATCH_PAGES)
        self._progress.notify()
        self._progress.hinted.bump()
        self._metrics.hinted(result.value)
        return result

    def take_hints(self, timeout_s: float) -> list[Hint]:
        """``TierStore.take_hints``."""
        self._progress.require_open()
        deadline = monotonic() + seconds_to_wait("timeout_s", timeout_s)
        found: list[Hint] = []
        for _ in self._progress.until(deadline, self._progress.hinted):
            with self._lock:
                found = self._directory.hints.take()
            if found:
                break
        return found

    def reject_hints(self) -> None:
        """``TierStore.reject_hints``."""
        self._progress.advance()
        with self._lock:
            self._directory.hints.detach()
        self._progress.notify()

    def staying(self) -> list[PageKey]:
        """``TierStore.staying``."""
        self._progress.advance()
        with self._lock:
            named = report.held_or_retained(self._directory)
        found: list[PageKey] = []
        for start in range(0, len(named), _LOOKED_UP):
            with self._lock:
                found += report.of_hbm(self._directory, named[start : start + _LOOKED_UP])
        return found

    # -- up, down and out ---------------------------------------------------------------------------------------

    def promote(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint]) -> Promoted:
        """``TierStore.promote``."""
        self._progress.advance()
        _require_hints(hint, *over)
        require_key_list(keys)
        tables = self._directory.residency.tables
        above = [t for t in tables if self._directory.promoting.source(t) is not None]
        require_member("promote to", tier, above)
        if len(keys) > BATCH_PAGES:
            raise ValueError(f"promote of {len(keys)} pages; allowed: {BATCH_PAGES} at most")
        with self._lock:
            found = self._directory.promote(hint, keys, tier, over, monotonic())
            self._progress.submit()
        return found

    def demote(self, keys: Sequence[PageKey], tier: Tier) -> int:
        """``TierStore.demote``."""
        self._progress.advance()
        require_key_list(keys)
        below = [t for t in self._directory.residency.tables if t > Tier.HBM]
        require_member("demote to", tier, below, *([] if below else ["no tier is below HBM"]))
        accepted = 0
        for chunk in _chunks(keys):
            with self._lock:
                accepted += self._directory.demote(chunk, tier)
                self._progress.step()
        return accepted

    def evict(self, keys: Sequence[PageKey], tier: Tier | None) -> int:
        """``TierStore.evict``."""
        self._progress.advance()
        require_key_list(keys)
        if tier is not None:
            require_member("evict from", tier, list(Tier), "or None for all")
        tiers = [t for t in self._directory.residency.tables if tier is None or t == tier]
        dropped = 0
        for chunk in reversed(_chunks(keys)):
            with self._lock:
                dropped += self._directory.evict(chunk, tiers)
                self._progress.step()
        self._progress.notify()
        return dropped


def _require_hints(*hints: object) -> None:
    strange = next((hint for hint in hints if not isinstance(hint, Hint)), None)
    if strange is not None:
        raise TypeError(f"{strange!r:.60} is no hint; allowed: a Hint")


def _chunks(keys: Sequence[PageKey]) -> list[Sequence[PageKey]]:
    """Pieces short enough for one hold of the lock."""
    return [keys[i : i + BATCH_PAGES] for i in range(0, len(keys), BATCH_PAGES)]
