"""The sealed pages of a sequence: held by a lease, which a family of forks shares until one of them goes on alone."""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.adapters.huggingface.request import Terms
from tierstore.lease import Lease
from tierstore.types import LeaseState, PageKey


class SharedLease:
    """A lease that several sequences of a family hold; the last one to let go releases it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.holders = 1

    def share(self) -> SharedLease:
        """One more holder."""
        self.holders += 1
        return self

    def let_go(self) -> None:
        """One holder less. StoreClosed if the store has been closed."""
        self.holders -= 1
        if not self.holders:
            self.lease.release()


class Holding:
    """What one sequence holds: ``pages`` of its own numbers, without a gap. Not thread-safe, as the sequence."""

    def __init__(self, terms: Terms, lease: SharedLease, pages: range, exact: bool | None = None) -> None:
        """Takes over a hold of ``lease``. ``exact``: whether every lease before it was exact; None: there is none."""
        self.pages = pages
        self.exact = lease.lease.exact if exact is None else exact
        """Whether every lease that the sequence had was exact."""
        self._terms = terms
        self._lease = lease

    def share(self) -> Holding:
        """The same for a fork."""
        return Holding(self._terms, self._lease.share(), self.pages, self.exact)

    def own(self, keys: Sequence[PageKey], slots: Sequence[int], pages: range) -> bool:
        """Hold these pages, and no others, under a lease of this sequence alone.

        ``keys``, ``slots``: of the pages. The store takes the last page of a lease for the parent of the next one
        sealed under it. False, nothing changed, if one of the pages was evicted meanwhile: then nothing more of this
        sequence can be found, and nothing is sealed. Nor is what was computed over inexact pages once a window has left
        them behind: it would pass for exact.
        """
        lease = self._terms.store.acquire(keys, exact=self._terms.exact)
        if lease.slots != slots or (lease.exact and not self.exact):
            lease.release()
            return False
        old, self._lease, self.pages = self._lease, SharedLease(lease), pages
        old.let_go()
        return True

    def owns(self, pages: range) -> bool:
        """Whether it holds these pages, and no others, alone."""
        return self._lease.holders == 1 and self.pages == pages

    def seal(self, start: int, keys: Sequence[PageKey], slots: Sequence[int]) -> list[int]:
        """Give pages from number ``start`` on to the store, and hold them; the slots that it answers with."""
        kept = self._terms.store.put(
            keys,
            slots,
            lease=self._lease.lease,
            memory_only=self._terms.storing == "memory-only",
        )
        self.pages = range(self.pages.start, start + len(kept))
        self.exact = self.exact and self._lease.lease.exact
        return kept

    def wait_for_writers(self) -> None:
        """Wait until the held pages can be read: another request may have sealed the same ones and still write them.

        On a card the current stream waits, not the host. TimeoutError if they are not written in time.
        """
        timeout_s = self._terms.timeout_s
        if self._terms.pages.reach(self._lease.lease, timeout_s) is LeaseState.PENDING:
            raise TimeoutError(
                f"timed out after {timeout_s} s waiting for another request to write the same page"
            )

    def nothing(self) -> None:
        """Let go of every page, for whoever needs room."""
        self._lease.let_go()
        self._lease = SharedLease(self._terms.store.acquire([], exact=self._terms.exact))
        self.pages = range(0)

    def let_go(self) -> None:
        """The last call. StoreClosed if the store has been closed."""
        self._lease.let_go()
