"""The stored prefix of a prompt: how it is found, brought into HBM, held by a lease, and awaited layer by layer.

``open_prefix`` fills a block table with the longest stored prefix. ``Prefixes`` is the index that finds a stored page
which only begins like the prompt. ``Arrival`` lets the first layers be computed while the bytes of the last ones are
still in flight, as LMCache's and LayerKV's layer-wise loads do. ``Holding`` keeps sealed pages under a lease.
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
    """What one sequence waits for. For the thread of its sequence."""

    def __init__(self, pages: PageGroups, lease: Lease, slots: Sequence[int], timeout_s: float) -> None:
        """``lease``: of the prefix, in ``slots``. The sequence releases it, not this object."""
        self._pages = pages
        self._lease = lease
        self._slots = list(slots)
        self._deadline = monotonic() + timeout_s
        self.half: Lease | None = None
        """Of a page that is to be copied; released in the end."""
        self._into = -1
        self._missed = False
        """A layer was computed without its bytes, or over other slots, whatever came later."""
        self._copied: set[tuple[int, int]] = set()

    @property
    def over(self) -> bool:
        """Whether all of it is there. Ends nothing: say ``settle``."""
        here = self.half is None and self._pages.reach(self._lease, 0.0) is LeaseState.READY
        return here and self._in_place()

    def comes(self) -> bool:
        """Waits until the first layer is on its way; False: some of the prefix is lost already, say ``settle``.

        Until then a page may come into another slot than it was to, where somebody else has put it.
        """
        self._missed |= not self._queued(self._lease, 0)
        return not self._missed and self._in_place()

    def copy_page(self, lease: Lease, into: int) -> None:
        """Copy the only page of ``lease`` into a slot, layer by layer as it comes. Releases the lease in the end."""
        self.half, self._into = lease, into

    def layer(self, group: int, index: int) -> None:
        """From now on the caller's current stream, on the CPU the caller, has this layer of KV group ``group``.

        Waits no longer than the time that there is; what is computed over a layer that did not come does not count,
        also where it came before the end.
        """
        here = self._queued(self._lease, index) and (self.half is None or self._queued(self.half, index))
        self._missed |= not here
        if self.half is None or not here:
            return
        if (group, index) not in self._copied and self.half.num_pages:
            self._pages.copy_layer(group, index, self.half.slots[0], self._into)
            self._copied.add((group, index))

    def settle(self) -> tuple[int, bool]:
        """Waits for the rest: how many pages of the lease there are, and whether the copied page is right.

        The time being up, then or at a layer before, none: the sequence must let go of the lease.
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
        """Nobody goes on from it."""
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


class Prefixes:
    """A ``RadixIndex`` that several threads may use. It forgets with the process: after a restart it fills anew."""

    def __init__(self, page_size: int) -> None:
        self._index = RadixIndex(page_size)
        self._lock = Lock()

    def insert(self, root: bytes, token_ids: Sequence[int], keys: Sequence[PageKey]) -> None:
        """These pages were sealed."""
        with self._lock:
            self._index.insert(root, token_ids, keys)

    def longest(self, root: bytes, token_ids: Sequence[int]) -> RadixMatch:
        """The pages that were sealed with these tokens, and the one that begins like the rest."""
        with self._lock:
            return self._index.longest(root, token_ids)

    def discard(self, key: PageKey) -> None:
        """The store does not hold this page any more."""
        with self._lock:
            self._index.discard(key)


# Requests of one store share what they know, whoever opened them; it goes with the store.
_of_store: WeakKeyDictionary[TierStore, Prefixes] = WeakKeyDictionary()
_lock = Lock()


def prefixes_of(store: TierStore, page_size: int) -> Prefixes:
    """The index of this store. Any thread."""
    with _lock:
        if store not in _of_store:
            _of_store[store] = Prefixes(page_size)
        return _of_store[store]


ROLLBACK = 64
"""Tokens that are kept behind a window, so that a rollback (rejected drafts) finds what it needs."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The page that a session left half full: a slot of our own, and what each model has written in it."""

    slot: int
    page: int
    tokens: tuple[int, ...]
    """All tokens of the sequence up to the last one in the page: its K/V depend on them all."""
    exact: bool
    """Whether no page before it was inexact when it was written."""
    root: bytes
    """Of the request that wrote it: another salt, extra or other weights have no use for it."""


@dataclass(slots=True)
class Opening:
    """What was found: ``table`` with ``num_tokens`` of the prompt in it, pages held by ``lease``."""

    table: BlockTable
    lease: SharedLease
    leased: range
    """The pages under the lease."""
    origins: list[tuple[Tier, int]] = field(default_factory=list)
    """Where the tokens were found, in order: a tier and how many."""
    copied_tokens: int = 0
    """Tokens of a page that was copied because the prompt leaves it half way."""
    keys: Sequence[PageKey] = ()
    """Of the prompt's full pages; none where nothing is looked up."""
    arrival: Arrival | None = None
    """What of it is still on its way; None: it is all there."""


def open_prefix(terms: Terms, table: BlockTable, prompt: Sequence[int], tail: Tail | None) -> Opening:
    """Fill an empty ``table`` with what the store has of ``prompt``. Waits up to ``terms.timeout_s``.

    ``tail`` is used if it fits, else given back, in any case.
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
        terms.store.poll()  # whoever computes for long without asking the store leaves the link without work
    except BaseException:
        if opening.arrival is not None:
            opening.arrival.drop()
        with suppress(StoreClosed):
            terms.store.free(table.clear())
            lease.release()
        raise
    return opening


def give_back(store: TierStore, tail: Tail | None) -> None:
    """Free the slot of a tail that nobody will go on in. A closed store has taken it back by itself."""
    if tail is not None:
        with suppress(StoreClosed):
            store.free([tail.slot])


@contextmanager
def given_back(store: TierStore, tail: Tail | None) -> Iterator[None]:
    """Where this block raises nobody goes on in ``tail``."""
    try:
        yield
    except BaseException:
        give_back(store, tail)
        raise


def first_needed(terms: Terms, num_tokens: int, page_size: int) -> int:
    """The first page that a query after ``num_tokens`` tokens, or a little before, still looks at."""
    return 0 if terms.window is None else max(0, num_tokens - terms.window - ROLLBACK) // page_size


def _hold(terms: Terms, keys: Sequence[PageKey], page_size: int) -> tuple[Lease, list[int], list[Tier]]:
    """A lease on the stored prefix of ``keys``, its slots, and where each page of the prefix was found.

    The lease may begin later than the prefix: with windows, pages that no query looks at stay where they are. By layers
    (``Terms.by_layers``) a page of it may still fail to come.
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
            # A page may get lost between the two.
            del slots[len(tiers) :], tiers[len(slots) :]
            return lease, slots, found[:first] + tiers
        # A page of the window is gone: what ends before it has a window of its own.
        count = first + len(slots) if slots else 0
        lease.release()
    return store.acquire([], exact=terms.exact), [], []


def _comes(terms: Terms, lease: Lease) -> bool:
    """Whether pages are there in time; by layers, those from disk: whether the first layer of them is on its way."""
    if not terms.by_layers:
        return terms.pages.reach(lease, terms.timeout_s) is not LeaseState.PENDING
    if all(terms.store.tiers[tier].in_memory for tier in set(lease.tiers)):
        return True
    with suppress(TimeoutError):
        lease.ready(0, terms.timeout_s)
        return True
    return False


def _take_tail(terms: Terms, opening: Opening, prompt: Sequence[int], tail: Tail) -> None:
    """Go on in the page that the session kept, as far as the prompt agrees with it.

    Not in one that was computed with other weights, nor in an inexact one after exact pages: what is sealed under their
    lease passes for exact.
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
    """Where a stored page begins like the rest of the prompt: a copy of it, to be written on after the split.

    After exact pages an exact one only, as with a tail.
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
    """At once, or layer by layer while it comes: then the lease is the arrival's."""
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
    """How many items two sequences begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
