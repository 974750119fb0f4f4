"""Finds the stored prefix of a prompt, loads it into HBM under a lease, and waits for it layer by layer.

``open_prefix`` fills a block table with the longest stored prefix. ``Prefixes`` is an index that also finds
stored pages of which only the first tokens match the prompt. ``Arrival`` waits for each layer separately, so that
the first layers can be computed while later ones are still in flight, as in LMCache and LayerKV. ``Holding``
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

from tierstore.adapters.huggingface.request import HostPages, PageGroups, Terms
from tierstore.adapters.radix import RadixIndex, RadixMatch
from tierstore.block_table import BlockTable
from tierstore.errors import CapacityError, StoreClosed
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

_POLL_S = 0.001
LATE = "late"
"""The reason given for pages that were not loaded before the request stopped waiting for them."""


class Arrival:
    """The stored pages that a sequence is waiting for. Not thread-safe, like the sequence."""

    def __init__(self, pages: PageGroups, lease: Lease, slots: Sequence[int], timeout_s: float) -> None:
        """Track the pages of ``lease`` while they are loaded into ``slots``. Does not block.

        Pages that are not loaded ``timeout_s`` seconds from now count as missing. This object never releases
        ``lease``; the sequence does.
        """
        self._pages = pages
        self._lease = lease
        self._slots = list(slots)
        self._deadline = monotonic() + timeout_s
        self.half: Lease | None = None
        """The lease given to ``copy_page``, or None. ``drop`` releases it."""
        self._into = -1
        self._missed = False
        """Whether a layer was not loaded when it was needed, or was loaded into other slots.

        Stays True even if the layer is loaded later.
        """
        self._copied: set[tuple[int, int]] = set()

    @property
    def lost(self) -> set[int]:
        """Return the slots that the lease has given up, because a page could not be loaded into them."""
        return set(self._slots).difference(self._lease.slots)

    @property
    def over(self) -> bool:
        """Return whether all pages are in their slots and no page remains to be copied."""
        here = self.half is None and self._pages.reach(self._lease, 0.0) is LeaseState.READY
        return here and self._in_place()

    def comes(self) -> bool:
        """Wait until the copies of the first layer have been submitted.

        Return False if a page failed, was late, or moved; the caller must then call ``settle``. A page moves to another
        slot if, during the wait, another caller puts the same page.
        """
        self._missed |= not self._queued(self._lease, 0)
        return not self._missed and self._in_place()

    def copy_page(self, lease: Lease, into: int) -> None:
        """Schedule the copy of a page into slot ``into``, layer by layer. ``lease`` covers only this page.

        ``layer`` and ``settle`` make the copies. Takes ownership of the lease.
        """
        self.half, self._into = lease, into

    def layer(self, group: int, index: int) -> None:
        """Make the caller's current stream wait for layer ``index`` of KV group ``group``.

        On the CPU, the caller itself waits. On every device, the method then also copies this layer of the page that
        was given to ``copy_page``.

        The wait ends at the deadline. If the layer is not loaded by then, ``settle`` reports that no page was
        loaded, even if the layer arrives later, because the forward pass has already read wrong data.
        """
        here = self._queued(self._lease, index) and (self.half is None or self._queued(self.half, index))
        self._missed |= not here
        if self.half is None or not here:
            return
        slots = self.half.slots  # read once: the store's thread may truncate the lease at any time
        if (group, index) not in self._copied and slots:
            self._pages.copy_layer(group, index, slots[0], self._into)
            self._copied.add((group, index))

    def settle(self) -> tuple[int, bool]:
        """Wait for the remaining layers and pages, and finish the copy.

        If the wait is interrupted, call this method again. After it has returned, call ``drop``.

        Returns:
            The number of leased pages that were loaded, and whether the copied page is valid (True if no page
            was to be copied). If the deadline passed, in this call or for an earlier layer, or if a page has
            moved, no page counts as loaded, and the sequence must release its lease.
        """
        here = not self._missed and self._ended(self._lease)
        pages = self._lease.num_pages if here else 0
        if self._lease.slots[:pages] != self._slots[:pages]:
            self._missed, pages = True, 0
        if self.half is None:
            return pages, True
        whole = not self._missed and self._ended(self.half) and self.half.num_pages == 1
        if whole and len(self._copied) < self._pages.num_layers:
            self._pages.copy(self.half.slots[0], self._into)
        return pages, whole

    @property
    def missed(self) -> str:
        """Return why pages of the lease were not loaded: a value of ``Lease.missing_because``, or "late"."""
        return self._lease.missing_because or LATE

    def drop(self) -> None:
        """Release the lease on the page that was to be copied. Called when nothing reads the page any more."""
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
    """A lease that a sequence shares with its forks. It is released when the last of them gives it up."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.holders = 1

    def share(self) -> SharedLease:
        """Count one more holder of the lease, and return this object for the holder to keep."""
        self.holders += 1
        return self

    def let_go(self) -> None:
        """Remove a holder, and release the lease if it was the last one.

        Raises:
            StoreClosed: The store is closed.
        """
        self.holders -= 1
        if not self.holders:
            self.lease.release()


class Holding:
    """The consecutive pages that a sequence holds under a lease. Not thread-safe, like the sequence."""

    def __init__(self, terms: Terms, lease: SharedLease, pages: range, exact: bool | None = None) -> None:
        """Take over the caller's share of ``lease``.

        Args:
            terms: Options of the request.
            lease: The lease.
            pages: Numbers of the leased pages within the sequence.
            exact: Whether all leases that the sequence has had were exact, including this one. None if this
                is its first lease.
        """
        self.pages = pages
        self.exact = lease.lease.exact if exact is None else exact
        """Whether all leases that the sequence has had were exact."""
        self._terms = terms
        self._lease = lease
        self._sealed = 0
        """Number of held pages that were put under the lease. ``Lease.num_pages`` counts only the others."""

    def share(self) -> Holding:
        """Return a ``Holding`` of the same pages for a fork, which thereby shares the lease."""
        other = Holding(self._terms, self._lease.share(), self.pages, self.exact)
        other._sealed = self._sealed
        return other

    def own(self, keys: Sequence[PageKey], slots: Sequence[int], pages: range) -> bool:
        """Replace the lease with a lease on exactly these pages that no other sequence shares.

        This is needed before sealing, because the store treats the last page of a lease as the parent of the
        next page sealed under it. If the sequence had inexact pages that have since left its window, an exact
        lease is rejected. Otherwise, pages computed from the inexact ones would count as exact.

        Args:
            keys: Keys of the pages.
            slots: Slots of the pages.
            pages: Numbers of the pages within the sequence.

        Returns:
            Whether the lease was replaced. False if a page was evicted or the new lease is rejected. In this
            case nothing has changed, and the caller must not seal any more pages of this sequence.
        """
        lease = self._terms.store.acquire(keys, exact=self._terms.exact)
        if lease.slots != slots or (lease.exact and not self.exact):
            lease.release()
            return False
        old, self._lease, self.pages, self._sealed = self._lease, SharedLease(lease), pages, 0
        old.let_go()
        return True

    def owns(self, pages: range) -> bool:
        """Return whether this sequence holds exactly these pages and shares the lease with no fork.

        Also return False if the lease has lost all of its pages. Such a lease has failed for good, even if pages are
        added to it later.
        """
        lease = self._lease.lease
        return self._lease.holders == 1 and self.pages == pages and (bool(pages) or not lease.keys)

    def seal(
        self, start: int, keys: Sequence[PageKey], slots: Sequence[int], parent: PageKey | None
    ) -> list[int]:
        """Put pages into the store under the lease, which then pins them.

        ``start`` is the number of the first of these pages within the sequence, and ``parent`` the page before it.

        Return the slots in which the store keeps the pages. They differ from ``slots`` where the store had a
        page already. With ``Terms.exact``, the store may accept only the first pages.
        """
        kept = self._terms.store.put(
            keys,
            slots,
            lease=self._lease.lease,
            memory_only=self._terms.storing == "memory-only",
            parent=parent,
        )
        self._sealed += len(kept)
        self.pages = range(self.pages.start, start + len(kept))
        self.exact = self.exact and self._lease.lease.exact
        return kept

    def wait_for_writers(self) -> bool:
        """Wait until all held pages are written.

        Another request may have sealed the same pages and may still be writing them. On a GPU, the host does
        not wait for these writes; the caller's current stream does.

        Returns:
            False if a page will never be written, because the other request's device has failed. The store has then
            taken back the page's slot.

        Raises:
            TimeoutError: The pages were not written within ``Terms.space_s``.
        """
        timeout_s = self._terms.space_s
        state = self._terms.pages.reach(self._lease.lease, timeout_s)
        if state is LeaseState.PENDING:
            raise TimeoutError(
                f"timed out after {timeout_s} s waiting for another request to write the same page"
            )
        return state is LeaseState.READY and self._lease.lease.num_pages == len(self.pages) - self._sealed

    def nothing(self) -> None:
        """Release all pages, so that the store may evict them, and continue with an empty lease."""
        self._lease.let_go()
        self._lease = SharedLease(self._terms.store.acquire([], exact=self._terms.exact))
        self.pages, self._sealed = range(0), 0

    def let_go(self) -> None:
        """Give up this share of the lease. No method may be called afterwards.

        Raises:
            StoreClosed: The store is closed.
        """
        self._lease.let_go()


class Prefixes:
    """A thread-safe ``RadixIndex`` of the pages that this process has sealed. It is not stored on disk."""

    def __init__(self, page_size: int) -> None:
        self._index = RadixIndex(page_size)
        self._lock = Lock()

    def insert(self, root: bytes, token_ids: Sequence[int], keys: Sequence[PageKey]) -> None:
        """Record that these pages were sealed."""
        with self._lock:
            self._index.insert(root, token_ids, keys)

    def longest(self, root: bytes, token_ids: Sequence[int]) -> RadixMatch:
        """Return the sealed pages that match the first tokens, and a page that starts with the tokens after them."""
        with self._lock:
            return self._index.longest(root, token_ids)

    def discard(self, key: PageKey) -> None:
        """Record that the page is no longer in the store."""
        with self._lock:
            self._index.discard(key)


# The index of each store. All requests to a store share it, and it is deleted together with the store.
_of_store: WeakKeyDictionary[TierStore, Prefixes] = WeakKeyDictionary()
_lock = Lock()


def prefixes_of(store: TierStore, page_size: int) -> Prefixes:
    """Return the index of this store. Thread-safe."""
    with _lock:
        if store not in _of_store:
            _of_store[store] = Prefixes(page_size)
        return _of_store[store]


ROLLBACK = 64
"""Number of tokens kept before each window, because a rollback (rejected drafts) needs them again."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The partially filled last page of a session, and the slot that contains it."""

    slot: int
    page: int
    """Number of the page within the sequence."""
    tokens: tuple[int, ...]
    """All tokens of the sequence up to the last one in the page. The page's K/V depend on all of them."""
    exact: bool
    """Whether all earlier pages were exact when this page was written."""
    root: bytes
    """Root of the request that wrote the page. Requests with another salt, extra or weights cannot use it."""


@dataclass(slots=True)
class Opening:
    """The stored prefix of a prompt: the first ``table.num_tokens`` tokens, in the slots of ``table``.

    ``lease`` pins the full pages. A partly filled last page is private to the table: it was taken over from an earlier
    request or copied.
    """

    table: BlockTable
    lease: SharedLease
    leased: range
    """Numbers of the pages under the lease."""
    origins: list[tuple[Tier, int]] = field(default_factory=list)
    """The tiers in which the tokens were found, each with a number of tokens, in the order of the prompt."""
    copied_tokens: int = 0
    """Number of these tokens that are in a copied page, because the prompt diverges within the stored page."""
    keys: Sequence[PageKey] = ()
    """Keys of the prompt's full pages. Empty if the request does not look up pages."""
    arrival: Arrival | None = None
    """Tracks the pages that are still in flight. None if all have arrived."""
    missed: str | None = None
    """Why the prefix is not longer: a value of ``Lease.missing_because``, "late", or None if unknown."""
    hosted: list[int] = field(default_factory=list)
    """The host slots of the first pages, if the prefix stays in host memory. ``table`` has no slots for them."""


def open_prefix(terms: Terms, table: BlockTable, prompt: Sequence[int], tail: Tail | None) -> Opening:
    """Fill an empty ``table`` with the stored prefix of ``prompt``. Waits up to ``terms.arrival_s``.

    Takes ownership of ``tail``. Its page continues the prefix if its tokens match the prompt. Otherwise, or
    if an exception is raised, its slot is freed.
    """
    with given_back(terms.store, tail):
        keys = terms.store.keys(prompt, salt=terms.salt, extra=terms.extra) if terms.looks_up else []
        hosted: list[int] = []
        # If the prompt has at least as many pages as HBM, they do not fit even if nothing else is in HBM.
        fits = terms.host is None or len(keys) < terms.hbm_slots
        lease, slots, tiers, missed = _hold(terms, keys if fits else [], table.page_size)
        if terms.host is not None and not fits:
            lease.release()
            hosted, tiers, missed = _keep_in_host(terms, terms.host, keys)
            lease, slots = terms.store.acquire([], exact=terms.exact), []
    first = len(tiers) - len(slots)
    table.reuse(slots, first)
    opening = Opening(
        table, SharedLease(lease), range(first, len(tiers)), keys=keys, missed=missed, hosted=hosted
    )
    if terms.by_layers and not hosted:
        opening.arrival = Arrival(terms.pages, lease, slots, terms.arrival_s(len(tiers) * table.page_size))
    opening.origins = [(tier, table.page_size) for tier in tiers]
    try:
        if tail is not None:
            _take_tail(terms, opening, prompt, tail)
        if terms.looks_up and table.num_tokens == len(tiers) * table.page_size:
            _copy_half_page(terms, opening, prompt, keys)
        if opening.arrival is not None and opening.arrival.over:
            opening.arrival = None
        terms.store.poll()  # starts more copies, because the caller now computes without calling the store
    except BaseException:
        if opening.arrival is not None:
            opening.arrival.drop()
        with suppress(StoreClosed):
            terms.store.free(table.clear())
            lease.release()
        raise
    return opening


def give_back(store: TierStore, tail: Tail | None) -> None:
    """Free the slot of a tail that no request will continue. Does nothing for None or a closed store."""
    if tail is not None:
        with suppress(StoreClosed):
            store.free([tail.slot])


@contextmanager
def given_back(store: TierStore, tail: Tail | None) -> Iterator[None]:
    """Free the slot of ``tail`` if the block raises an exception."""
    try:
        yield
    except BaseException:
        give_back(store, tail)
        raise


def first_needed(terms: Terms, num_tokens: int, page_size: int) -> int:
    """Return the number of the first page that a query after ``num_tokens`` tokens can see.

    The result also suffices for a query up to ROLLBACK tokens earlier. It is 0 if a layer has no window.
    """
    return 0 if terms.window is None else max(0, num_tokens - terms.window - ROLLBACK) // page_size


def _hold(
    terms: Terms, keys: Sequence[PageKey], page_size: int
) -> tuple[Lease, list[int], list[Tier], str | None]:
    """Lease the stored prefix of ``keys``, and wait for its pages as ``_comes`` does.

    Returns:
        The lease, its slots, the tier in which each page of the prefix was found, and the reason why the
        next page is missing (None if no page is missing). If all layers have windows, the lease may not include
        the first pages of the prefix, because no query needs them. With ``Terms.by_layers``, loading a leased
        page may still fail.
    """
    store = terms.store
    found = [] if terms.window is None else list(store.match(keys).tiers)
    count = len(keys) if terms.window is None else len(found)
    missed = None
    known = terms.compute_s(len(keys) * page_size) is not None
    stored = store.match(keys).num_pages if known and terms.window is None else count
    room_s = terms.room_s(stored * page_size)
    while count:
        first = first_needed(terms, count * page_size, page_size)
        lease = store.acquire(
            keys[first:count],
            deadline_s=terms.deadline_s,
            exact=terms.exact,
            wait_for_room_s=room_s,
        )
        if not _comes(terms, lease):
            lease.release()
            missed = LATE
            break
        slots, tiers, missed = lease.slots, lease.tiers, lease.missing_because
        if len(slots) == count - first or terms.window is None:
            # A page may fail between the reads of ``slots`` and ``tiers``, so they may differ in length.
            del slots[len(tiers) :], tiers[len(slots) :]
            return lease, slots, found[:first] + tiers, missed
        # A page in the window is missing. Try the shorter prefix before it, whose window starts earlier.
        count = first + len(slots) if slots else 0
        lease.release()
    return store.acquire([], exact=terms.exact), [], [], missed


def _keep_in_host(
    terms: Terms, host: HostPages, keys: Sequence[PageKey]
) -> tuple[list[int], list[Tier], str | None]:
    """Bring the stored prefix of ``keys`` into host memory, and hold it there for the request.

    Pages that only the disk has are loaded into HBM in between, some at a time.

    Returns:
        The host slots, the tiers in which the pages were found, and the reason why the next page is missing.
    """
    store = terms.store
    found = store.match(keys, exact=True).tiers
    slots: list[int] = []
    step = max(1, terms.hbm_slots // 2)
    while len(slots) < len(found):
        there = host.find(keys[len(slots) : len(found)])
        slots += there
        following = keys[len(slots) : min(len(slots) + step, len(found))]
        if there or not following:
            continue
        room_s = terms.room_s(len(following) * terms.pages.page_size)
        with store.acquire(following, exact=True, wait_for_room_s=room_s) as lease:
            state = terms.pages.reach(lease, terms.arrival_s(len(following) * terms.pages.page_size))
            count = lease.num_pages if state is LeaseState.READY else 0
            if not count:
                break
            try:
                slots += host.take(following[:count], terms.space_s)
            except CapacityError:
                break
    missed = "no_room" if len(slots) < len(found) else "not_found"
    return slots, list(found[: len(slots)]), None if len(slots) == len(keys) else missed


def _comes(terms: Terms, lease: Lease, *, whole: bool = False) -> bool:
    """Wait up to ``Terms.arrival_s`` for the leased pages. Return False if they did not arrive in time.

    With ``Terms.by_layers``, and unless ``whole``, wait only until the copies of the first layer have been submitted,
    and do not wait at all if all pages are in memory.
    """
    wait_s = terms.arrival_s(lease.num_pages * terms.pages.page_size)
    if whole or not terms.by_layers:
        return terms.pages.reach(lease, wait_s) is not LeaseState.PENDING
    if all(terms.store.tiers[tier].in_memory for tier in set(lease.tiers)):
        return True
    with suppress(TimeoutError):
        lease.ready(0, wait_s)
        return True
    return False


def _take_tail(terms: Terms, opening: Opening, prompt: Sequence[int], tail: Tail) -> None:
    """Append the tokens of ``tail`` that match the prompt, and take over its slot. Free it if the page is unusable.

    A page of another root (salt, extra or weights) is not used. An inexact page after exact ones is not used
    either, because later pages sealed under the exact lease would count as exact.
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
    """Find a stored page that starts with the prompt's next tokens, and copy it. The sequence continues the copy.

    After exact pages, only an exact page is copied, for the reason given in ``_take_tail``.
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
            comes = _comes(terms, lease, whole=bool(opening.hosted))
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
    """Copy a leased page into a new slot, and append the copy's first ``count`` tokens to ``opening.table``.

    If the page is still in flight, ``opening.arrival`` takes over the lease and copies the page layer by
    layer. Does nothing if no slot becomes free in time.
    """
    try:
        (slot,) = terms.store.allocate(1, timeout_s=terms.space_s)
    except CapacityError:
        return
    table, tier = opening.table, next(iter(lease.tiers), Tier.HBM)
    start = table.num_tokens
    table.extend(start + count, [slot])  # if an exception is raised below, the slot is freed with the table
    if opening.arrival is not None and terms.pages.reach(lease, 0.0) is LeaseState.PENDING:
        opening.arrival.copy_page(lease, slot)
    elif lease.num_pages:
        terms.pages.copy(lease.slots[0], slot)
    else:
        terms.store.free(table.truncate(start))
        return
    table.advance(start + count)
    opening.origins.append((tier, count))
    opening.copied_tokens = count


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading items that two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
