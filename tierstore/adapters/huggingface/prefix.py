"""Find the stored prefix of a prompt, load it into HBM, lease it, and wait for it layer by layer.

``open_prefix`` fills a block table with the longest stored prefix. ``Prefixes`` is an index that also finds a
stored page if only its beginning matches the prompt. ``Arrival`` lets the first layers be computed while the
bytes of the last ones are still in flight, like the layer-wise loads of LMCache and LayerKV. ``Holding``
keeps sealed pages under a lease.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock
from time import monotonic, sleep
from weakref import WeakKeyDictionary

import torch

from tierstore.adapters.huggingface.request import PageGroups, Terms
from tierstore.adapters.radix import RadixIndex, RadixMatch
from tierstore.block_table import BlockTable
from tierstore.errors import CapacityError, StoreClosed
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

_POLL_S = 0.001


class Arrival:
    """The pages that a sequence waits for. Use it from the sequence's thread only."""

    def __init__(self, pages: PageGroups, lease: Lease, slots: Sequence[int], timeout_s: float) -> None:
        """Wait for the pages of ``lease``, in ``slots``. The sequence, not this object, releases the lease."""
        self._pages = pages
        self._lease = lease
        self._slots = list(slots)
        self._deadline = monotonic() + timeout_s
        self.half: Lease | None = None
        """Lease of the page that is to be copied, or None. ``settle`` and ``drop`` release it."""
        self._into = -1
        self._missed = False
        """True if a layer was computed without its bytes or over other slots. It stays True if they arrive later."""
        self._copied: set[tuple[int, int]] = set()

    @property
    def over(self) -> bool:
        """Whether everything has arrived. Call ``settle`` all the same: it ends the arrival."""
        here = self.half is None and self._pages.reach(self._lease, 0.0) is LeaseState.READY
        return here and self._in_place()

    def comes(self) -> bool:
        """Wait until the first layer is in flight. False if a page failed or moved; then call ``settle``.

        During the wait a page can still move to another slot, if another caller puts the same page there.
        """
        self._missed |= not self._queued(self._lease, 0)
        return not self._missed and self._in_place()

    def copy_page(self, lease: Lease, into: int) -> None:
        """Copy the only page of ``lease`` into slot ``into``, layer by layer as it comes. Owns the lease."""
        self.half, self._into = lease, into

    def layer(self, group: int, index: int) -> None:
        """Make the caller's current stream (on the CPU: the caller) wait for this layer of KV group ``group``.

        The wait ends at the deadline. If a layer has not arrived by then, the result of this forward pass is
        void, even if the layer arrives before the pass ends.
        """
        here = self._queued(self._lease, index) and (self.half is None or self._queued(self.half, index))
        self._missed |= not here
        if self.half is None or not here:
            return
        if (group, index) not in self._copied and self.half.num_pages:
            self._pages.copy_layer(group, index, self.half.slots[0], self._into)
            self._copied.add((group, index))

    def settle(self) -> tuple[int, bool]:
        """Wait for the remaining layers and pages.

        Returns:
            The number of pages of the lease that arrived, and whether the copied page is right. If the
                deadline passed, in this call or at an earlier layer, no page counts and the sequence must release
                the lease.
        """
        here = not self._missed and self._ended(self._lease)
        pages = self._lease.num_pages if here else 0
        if self._lease.slots[:pages] != self._slots[:pages]:
            self._missed, pages = True, 0
        half, self.half = self.half, None
        if half is None:
            return pages, True
        whole = not self._missed and self._ended(half) and half.num_pages == 1
        if whole and len(self._copied) < self._pages.num_layers:
            self._pages.copy(half.slots[0], self._into)
        half.release()
        return pages, whole

    def drop(self) -> None:
        """Release the lease of the page to be copied, because the sequence ends."""
        half, self.half = self.half, None
        if half is not None:
            with suppress(StoreClosed):
                half.release()

    def _in_place(self) -> bool:
        return self._lease.slots == self._slots

    def _queued(self, lease: Lease, index: int) -> bool:
        try:
            event = lease.ready(index, self._left())
        except TimeoutError:
            return False
        if event is not None and self._pages.device.type == "cuda":
            torch.cuda.current_stream(self._pages.device).wait_event(event)  # type: ignore[arg-type]
            return True
        while event is not None and not event.query():
            if not self._left():
                return False
            sleep(_POLL_S)
        return True

    def _ended(self, lease: Lease) -> bool:
        return self._pages.reach(lease, self._left()) is not LeaseState.PENDING

    def _left(self) -> float:
        return max(0.0, self._deadline - monotonic())


class SharedLease:
    """A lease that a sequence and its forks hold. The last one to let go releases it."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.holders = 1

    def share(self) -> SharedLease:
        """Add a holder."""
        self.holders += 1
        return self

    def let_go(self) -> None:
        """Remove a holder. Raises StoreClosed if the store has been closed."""
        self.holders -= 1
        if not self.holders:
            self.lease.release()


class Holding:
    """The pages that a sequence holds, with consecutive numbers. Not thread-safe, like the sequence."""

    def __init__(self, terms: Terms, lease: SharedLease, pages: range, exact: bool | None = None) -> None:
        """Take over one hold of ``lease``.

        Args:
            exact: Whether every lease of the sequence, this one included, was exact; None if this is the
                first.
        """
        self.pages = pages
        self.exact = lease.lease.exact if exact is None else exact
        """Whether every lease that the sequence has held was exact."""
        self._terms = terms
        self._lease = lease

    def share(self) -> Holding:
        """Add a holder to the lease and return the fork's holding of the same pages."""
        return Holding(self._terms, self._lease.share(), self.pages, self.exact)

    def own(self, keys: Sequence[PageKey], slots: Sequence[int], pages: range) -> bool:
        """Hold exactly these pages, under a lease of this sequence alone.

        The store takes the last page of a lease as the parent of the next page sealed under it. If the
        sequence held inexact pages that its window has since left behind, an exact lease is refused: pages
        computed over the inexact ones would be taken for exact.

        Args:
            keys: Keys of the pages.
            slots: Slots of the pages.
            pages: Numbers of the pages in the sequence.

        Returns:
            False, with nothing changed, if a page was evicted or the lease is refused. The caller must then
                seal no more pages of this sequence.
        """
        lease = self._terms.store.acquire(keys, exact=self._terms.exact)
        if lease.slots != slots or (lease.exact and not self.exact):
            lease.release()
            return False
        old, self._lease, self.pages = self._lease, SharedLease(lease), pages
        old.let_go()
        return True

    def owns(self, pages: range) -> bool:
        """Return whether this sequence alone holds exactly these pages."""
        return self._lease.holders == 1 and self.pages == pages

    def seal(self, start: int, keys: Sequence[PageKey], slots: Sequence[int]) -> list[int]:
        """Put pages from number ``start`` on into the store and hold them.

        Returns the slots in which the store keeps them.
        """
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
        """Wait until the held pages can be read.

        Another request may have sealed the same pages and still be writing them. On a GPU the current stream
        waits, not the host.

        Raises:
            TimeoutError: The pages are not written in time.
        """
        timeout_s = self._terms.timeout_s
        if self._terms.pages.reach(self._lease.lease, timeout_s) is LeaseState.PENDING:
            raise TimeoutError(
                f"timed out after {timeout_s} s waiting for another request to write the same page"
            )

    def nothing(self) -> None:
        """Release every page, to make space, and go on holding none."""
        self._lease.let_go()
        self._lease = SharedLease(self._terms.store.acquire([], exact=self._terms.exact))
        self.pages = range(0)

    def let_go(self) -> None:
        """Release everything. No call may follow. Raises StoreClosed if the store has been closed."""
        self._lease.let_go()


class Prefixes:
    """A thread-safe ``RadixIndex`` in memory. Empty after a restart, it fills up as pages are sealed."""

    def __init__(self, page_size: int) -> None:
        self._index = RadixIndex(page_size)
        self._lock = Lock()

    def insert(self, root: bytes, token_ids: Sequence[int], keys: Sequence[PageKey]) -> None:
        """Record that these pages were sealed."""
        with self._lock:
            self._index.insert(root, token_ids, keys)

    def longest(self, root: bytes, token_ids: Sequence[int]) -> RadixMatch:
        """Return the pages sealed with these tokens, and the page that begins with the tokens after them."""
        with self._lock:
            return self._index.longest(root, token_ids)

    def discard(self, key: PageKey) -> None:
        """Record that the store no longer holds this page."""
        with self._lock:
            self._index.discard(key)


# All requests of a store share its index, which is dropped together with the store.
_of_store: WeakKeyDictionary[TierStore, Prefixes] = WeakKeyDictionary()
_lock = Lock()


def prefixes_of(store: TierStore, page_size: int) -> Prefixes:
    """Return the index of this store. Thread-safe."""
    with _lock:
        if store not in _of_store:
            _of_store[store] = Prefixes(page_size)
        return _of_store[store]


ROLLBACK = 64
"""Number of tokens kept behind a window, so that a rollback (rejected drafts) still finds its K and V."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The half-full page that a session kept, in a slot of its own."""

    slot: int
    page: int
    tokens: tuple[int, ...]
    """All tokens of the sequence up to the last one in the page, since its K/V depend on all of them."""
    exact: bool
    """Whether all pages before it were exact when it was written."""
    root: bytes
    """Root of the request that wrote it. A request whose salt, extra or weights differ cannot use it."""


@dataclass(slots=True)
class Opening:
    """The stored part of a prompt. ``table`` has its first ``num_tokens``, in pages that ``lease`` holds."""

    table: BlockTable
    lease: SharedLease
    leased: range
    """Numbers of the pages under the lease."""
    origins: list[tuple[Tier, int]] = field(default_factory=list)
    """Where the tokens were found, in order: tier and number of tokens."""
    copied_tokens: int = 0
    """Tokens of a page that was copied because the prompt diverges from it inside."""
    keys: Sequence[PageKey] = ()
    """Keys of the prompt's full pages; empty if the request does not look up pages."""
    arrival: Arrival | None = None
    """The pages still in flight, or None."""


def open_prefix(terms: Terms, table: BlockTable, prompt: Sequence[int], tail: Tail | None) -> Opening:
    """Fill an empty ``table`` with the stored prefix of ``prompt``. Waits up to ``terms.timeout_s``.

    ``tail`` is used if it fits; otherwise, and if this raises, its slot is freed.
    """
    with given_back(terms.store, tail):
        keys = terms.store.keys(prompt, salt=terms.salt, extra=terms.extra) if terms.looks_up else []
        lease, slots, tiers = _hold(terms, keys, table.page_size)
    first = len(tiers) - len(slots)
    table.reuse(slots, first)
    opening = Opening(table, SharedLease(lease), range(first, len(tiers)), keys=keys)
    if terms.by_layers:
        opening.arrival = Arrival(terms.pages, lease, slots, terms.timeout_s)
    opening.origins = [(tier, table.page_size) for tier in tiers]
    try:
        if tail is not None:
            _take_tail(terms, opening, prompt, tail)
        if terms.looks_up and table.num_tokens == len(tiers) * table.page_size:
            _copy_half_page(terms, opening, prompt, keys)
        if opening.arrival is not None and opening.arrival.over:
            opening.arrival = None
        terms.store.poll()  # keeps the link busy while the caller computes without calling the store
    except BaseException:
        if opening.arrival is not None:
            opening.arrival.drop()
        with suppress(StoreClosed):
            terms.store.free(table.clear())
            lease.release()
        raise
    return opening


def give_back(store: TierStore, tail: Tail | None) -> None:
    """Free the slot of a tail that no request will continue. A closed store has already freed it."""
    if tail is not None:
        with suppress(StoreClosed):
            store.free([tail.slot])


@contextmanager
def given_back(store: TierStore, tail: Tail | None) -> Iterator[None]:
    """Free the slot of ``tail`` if this block raises."""
    try:
        yield
    except BaseException:
        give_back(store, tail)
        raise


def first_needed(terms: Terms, num_tokens: int, page_size: int) -> int:
    """Return the first page that a query after ``num_tokens`` tokens, or up to ROLLBACK earlier, looks at."""
    return 0 if terms.window is None else max(0, num_tokens - terms.window - ROLLBACK) // page_size


def _hold(terms: Terms, keys: Sequence[PageKey], page_size: int) -> tuple[Lease, list[int], list[Tier]]:
    """Return a lease on the stored prefix of ``keys``, its slots, and where each page of the prefix was found.

    The lease may begin later than the prefix: with windows, pages that no query looks at are not loaded. With
    ``Terms.by_layers``, a page of the lease may still fail to arrive.
    """
    store = terms.store
    found = [] if terms.window is None else list(store.match(keys).tiers)
    count = len(keys) if terms.window is None else len(found)
    while count:
        first = first_needed(terms, count * page_size, page_size)
        lease = store.acquire(
            keys[first:count],
            deadline_s=terms.deadline_s,
            exact=terms.exact,
            wait_for_room_s=min(terms.wait_for_room_s, terms.timeout_s),
        )
        if not _comes(terms, lease):
            lease.release()
            break
        slots, tiers = lease.slots, lease.tiers
        if len(slots) == count - first or terms.window is None:
            # a page may be evicted between the two calls
            del slots[len(tiers) :], tiers[len(slots) :]
            return lease, slots, found[:first] + tiers
        # A page of the window is missing: try the shorter prefix before it, whose window begins earlier.
        count = first + len(slots) if slots else 0
        lease.release()
    return store.acquire([], exact=terms.exact), [], []


def _comes(terms: Terms, lease: Lease) -> bool:
    """Wait for the pages; with ``Terms.by_layers``, until the first layer of those on disk is in flight."""
    if not terms.by_layers:
        return terms.pages.reach(lease, terms.timeout_s) is not LeaseState.PENDING
    if all(terms.store.tiers[tier].in_memory for tier in set(lease.tiers)):
        return True
    with suppress(TimeoutError):
        lease.ready(0, terms.timeout_s)
        return True
    return False


def _take_tail(terms: Terms, opening: Opening, prompt: Sequence[int], tail: Tail) -> None:
    """Continue the page that the session kept, as far as the prompt agrees with it.

    A page computed with other weights is not used. Neither is an inexact page after exact ones, because pages
    sealed under their lease would be taken for exact.
    """
    table = opening.table
    start, same = tail.page * table.page_size, common_prefix(tail.tokens, prompt)
    other = tail.root != terms.root or (opening.lease.lease.exact and not tail.exact)
    if same <= start or table.num_tokens != start or other:
        give_back(terms.store, tail)
        return
    table.extend(same, [tail.slot])
    table.advance(same)
    opening.origins.append((Tier.HBM, same - start))


def _copy_half_page(terms: Terms, opening: Opening, prompt: Sequence[int], keys: Sequence[PageKey]) -> None:
    """Copy a stored page that begins like the rest of the prompt, to continue in the copy.

    After exact pages it must be exact, like a tail.
    """
    pages = opening.leased.stop
    prefixes = prefixes_of(terms.store, terms.pages.page_size)
    limit = len(prompt) if terms.plain_tokens is None else min(len(prompt), terms.plain_tokens)
    while True:
        match = prefixes.longest(terms.root, prompt[:limit])
        if match.next_key is None or list(match.keys) != list(keys[:pages]):
            return
        exact = opening.lease.lease.exact
        lease = terms.store.acquire([match.next_key], deadline_s=terms.deadline_s, exact=exact)
        try:
            comes = _comes(terms, lease)
            if comes and lease.num_pages:
                _copy(terms, opening, lease, match.next_tokens)
                return
            if not comes or lease.missing_because in ("no_room", "deadline", "inexact"):
                return
        finally:
            if opening.arrival is None or opening.arrival.half is not lease:
                lease.release()
        prefixes.discard(match.next_key)


def _copy(terms: Terms, opening: Opening, lease: Lease, count: int) -> None:
    """Copy the page now, or let ``opening.arrival`` copy it layer by layer and own the lease."""
    try:
        (slot,) = terms.store.allocate(1, timeout_s=terms.timeout_s)
    except CapacityError:
        return
    table, tier = opening.table, next(iter(lease.tiers), Tier.HBM)
    if opening.arrival is not None and terms.pages.reach(lease, 0.0) is LeaseState.PENDING:
        opening.arrival.copy_page(lease, slot)
    elif lease.num_pages:
        terms.pages.copy(lease.slots[0], slot)
    else:
        terms.store.free([slot])
        return
    table.extend(table.num_tokens + count, [slot])
    table.advance(table.num_tokens + count)
    opening.origins.append((tier, count))
    opening.copied_tokens = count


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading items that two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
