"""How a sequence begins: the longest stored prefix of its prompt, brought into HBM and held there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tierstore.adapters.huggingface.arrival import Arrival
from tierstore.adapters.huggingface.holding import SharedLease
from tierstore.adapters.huggingface.prefixes import prefixes_of
from tierstore.adapters.huggingface.request import Terms
from tierstore.block_table import BlockTable
from tierstore.errors import CapacityError, StoreClosed
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

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
    if all(tier < Tier.NVME for tier in lease.tiers):
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
