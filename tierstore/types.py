"""Data types that are shared between packages and processes. Standard library only.

Terms, and their equivalents in other systems:

    page   = vLLM block = SGLang / FlashInfer page = Hugging Face block: K and V of ``page_size`` tokens
    slot   = vLLM block id = SGLang page index: a place for one page in a tier
    lease  = a reference to pages, with a named owner (vLLM ref_cnt, SGLang lock_ref)
    key    = the identity of a page: a digest of its namespace and of all tokens up to the end of the page
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from math import inf
from numbers import Integral, Real
from operator import index
from typing import Any, Literal, NewType, Protocol, SupportsIndex, runtime_checkable

MOST_READERS = 64
"""Largest number of reader threads that an NVMe tier may have."""

_MOST_SECONDS = 1e15
_LONGEST_WAIT_S = 1e9
"""Longest timeout in seconds, about thirty years. Python's threading functions reject much longer ones."""


def format_size(nbytes: int) -> str:
    """Return a human-readable size with a binary unit and at most four integer digits, such as "1.5 KiB"."""
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(size) >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if size == int(size) else f"{size:.1f} {units[0]}"


def exact_size(nbytes: int) -> str:
    """Return a size for messages, both readable and exact: "1.5 KiB (1,536 bytes)"."""
    return f"{nbytes} bytes" if abs(nbytes) < 1024 else f"{format_size(nbytes)} ({nbytes:,} bytes)"


def require_flag(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False. Otherwise a string such as "no" would mean True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def are_seconds(value: Any) -> bool:
    """Return whether ``value`` is a number of seconds that can be added to a clock time.

    False for NaN, for booleans, and for numbers beyond 1e15. Positive infinity is accepted.
    """
    known = isinstance(value, Real) and not isinstance(value, bool)
    return known and bool(value == inf or abs(value) <= _MOST_SECONDS)


def require_seconds(name: str, value: Any) -> None:
    """Check that ``value`` is a number of seconds, 0 or more. Infinity is allowed.

    Raises:
        TypeError: The value is not a number.
        ValueError: The value is negative or NaN.
    """
    _require_number(name, value, "a number of seconds, 0 or more")
    if not are_seconds(value) or value < 0:
        raise ValueError(f"{name} must be a number of seconds, 0 or more, got {value!r:.60}")


def require_finite(name: str, value: object) -> None:
    """Check ``value`` as ``require_seconds`` does, but reject infinity, because callers multiply the value."""
    require_seconds(name, value)
    if value == inf:
        raise ValueError(f"{name} must be a finite number of seconds, got inf")


def seconds_at_most(name: str, value: Any) -> float:
    """Check that ``value`` is a finite number of seconds, 0 or more, and return it as a timeout.

    Timeouts above 1e9 s, about thirty years, are reduced to that.

    Raises:
        TypeError: The value is not a number.
        ValueError: The value is negative, infinite or NaN.
    """
    if type(value) is float and 0.0 <= value <= _LONGEST_WAIT_S:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r:.60}")
    if not are_seconds(value) or value < 0 or value == inf:
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value!r:.60}")
    return min(float(value), _LONGEST_WAIT_S)


def require_time(name: str, value: object) -> None:
    """Check ``value`` as ``require_seconds`` does, but allow negative values, which are times in the past."""
    _require_number(name, value, "a number of seconds")
    if not are_seconds(value):
        raise ValueError(f"{name} must be a number of seconds, got {value!r:.60}")


def seconds_to_wait(name: str, value: Any) -> float:
    """Check ``value`` as ``require_seconds`` does, and return it as a timeout of at most about thirty years."""
    require_seconds(name, value)
    return min(float(value), _LONGEST_WAIT_S)


def whole(name: str, value: SupportsIndex, least: int = 0) -> int:
    """Return an integer of any type, including NumPy and torch integers, as a Python int.

    Booleans and floats are rejected, because some code accepts them as an index and other code fails.

    Raises:
        TypeError: The value is not an integer.
        ValueError: The value is less than ``least``.
    """
    found = value if type(value) is int else _index(name, value)
    if found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {found}")
    return found


def require_member(call: str, value: object, allowed: Sequence[Enum], *others: str) -> None:
    """Check that ``value`` is one of the ``allowed`` enum members.

    Numbers are rejected, although 1, for example, compares equal to ``Tier.HOST``.

    Args:
        call: The requested operation, for the error message, such as "demote to".
        value: The value to check.
        allowed: The permitted members.
        others: Further permitted choices, in words, for the error message.

    Raises:
        ValueError: The value is not one of the permitted members.
    """
    if not any(value is member for member in allowed):
        names = ", ".join([*(member.name for member in allowed), *others])
        advice = f"choose one of {names}" if allowed else names or "this store has no such tier"
        given = value.name if isinstance(value, Enum) else f"{value!r:.60}"
        raise ValueError(f"cannot {call} {given}; {advice}")


def slot_numbers(slots: Iterable[SupportsIndex]) -> list[int]:
    """Return slots as Python ints. Ownership is not checked.

    Raises:
        TypeError: A slot is not an integer.
    """
    return [slot if type(slot) is int else _index("a slot", slot) for slot in slots]


def _index(name: str, value: SupportsIndex) -> int:
    refused = TypeError(f"{name} must be an integer, got {value!r:.60}")
    if isinstance(value, bool):
        raise refused
    try:
        return index(value)
    except TypeError as error:
        raise refused from error


def _require_number(name: str, value: object, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be {allowed}, got {value!r:.60}")


PageKey = NewType("PageKey", bytes)
"""The key of a page, 36 bytes: digest (32 bytes) | group (u16, big endian) | shard (u16, big endian)."""


class Tier(IntEnum):
    """A level of the memory hierarchy. Lower values are faster."""

    HBM = 0
    """Memory of the GPU, or ordinary memory with ``hbm.device: cpu``."""
    HOST = 1
    """Host memory, page-locked if HBM is on a GPU."""
    NVME = 2
    """A directory on disk."""
    REMOTE = 3
    """Reserved for a tier below NVMe that you add (docs/adding-a-tier.md)."""


@dataclass(frozen=True, slots=True)
class TierDescription:
    """The properties of a tier. The store's code depends only on them, not on the name of the tier.

    Attributes:
        addressing: "slots": the tier is memory, and each slot contains one page. "records": the tier stores
            records of any size, found by key, with asynchronous access and a limit in bytes.
        durable: Whether pages survive a restart.
        lossy: Whether pages that are read back may differ from the pages that were put.
        below: The next slower tier, to which pages are spilled, or None.
        read_only: Whether the tier keeps only the pages that it had when it was opened, and accepts no
            others.
    """

    addressing: Literal["slots", "records"]
    durable: bool = False
    lossy: bool = False
    below: Tier | None = None
    read_only: bool = False

    @property
    def in_memory(self) -> bool:
        """Whether the tier is memory that is addressed by slot."""
        return self.addressing == "slots"


class LeaseState(Enum):
    """Result of ``Lease.wait``. READY and FAILED are final. PENDING means that the wait timed out."""

    PENDING = "pending"
    """Some covered pages have not arrived yet."""
    READY = "ready"
    """All covered pages have arrived."""
    FAILED = "failed"
    """The pages cannot be used: none is covered any more, or one was never written."""


class HintResult(Enum):
    """Result of ``TierStore.hint``, named as in vLLM's kv_hints."""

    APPLIED = "applied"
    """The eviction order was changed, or the earlier hint of the request was withdrawn."""
    DEFERRED = "deferred"
    """The ``will_need`` hint was queued for the prefetcher."""
    DUPLICATE = "duplicate"
    """The hint was ignored, because the request already had a hint with this or a higher revision."""
    REJECTED = "rejected"
    """The ``will_need`` hint was ignored, because no prefetcher is attached or its queue is full."""


class Failure(Enum):
    """Reason why a page of a transfer did not arrive."""

    IO_ERROR = "io_error"
    INTEGRITY = "integrity"
    NOT_FOUND = "not_found"
    NO_SPACE = "no_space"
    UNAVAILABLE = "unavailable"
    """The tier hangs or fails. The request was not sent to it; the store tries the tier again after a pause."""
    CLOSED = "closed"
    UNFIT = "unfit"
    """The tier encodes pages, and its codec cannot represent the values of this page."""


@dataclass(slots=True)
class Copy:
    """The copy of a page in one tier.

    While ``ready`` is False, a transfer is writing the slot, and the copy cannot be read.
    """

    slot: int
    nbytes: int
    rank: int
    ready: bool = False
    pins: int = 0
    queue: object | None = None
    """The eviction queue of the tier that contains the copy, or None if the copy cannot be evicted."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A request to copy pages from one tier to another, slot by slot.

    Plain data that may be sent to other processes.

    Attributes:
        parents: The key of the page before each of ``keys``. None for the first page of a sequence, or if
            unknown.
        nbytes: Total number of bytes reserved in the destination for all pages. 0 if the destination is memory.
    """

    id: int
    keys: tuple[PageKey, ...]
    src: Tier
    src_slots: tuple[int, ...]
    dst: Tier
    dst_slots: tuple[int, ...]
    nbytes: int
    parents: tuple[PageKey | None, ...]

    def part(self, positions: Sequence[int]) -> Transfer:
        """Return a transfer of only the pages at these positions, with the same id."""
        return Transfer(
            self.id,
            tuple(self.keys[i] for i in positions),
            self.src,
            tuple(self.src_slots[i] for i in positions),
            self.dst,
            tuple(self.dst_slots[i] for i in positions),
            self.nbytes // max(1, len(self.keys)) * len(positions),
            tuple(self.parents[i] for i in positions),
        )


@dataclass(frozen=True, slots=True)
class Erase:
    """A request to remove records from a tier.

    Erases and transfers take effect in the order in which they are submitted.
    """

    tier: Tier
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """The result of a transfer. Its slots are no longer written, except those of ``late`` pages.

    Attributes:
        ok: False if any page failed.
        num_ready: Number of pages that arrived.
        nbytes: Total size in bytes of the pages that arrived.
        seconds: The transfer's share of the time in which its tier was busy. The shares of concurrent
            transfers add up to that time.
        failures: The position of each page that failed, and the reason.
        sizes: The size in bytes of each page that arrived, in order; empty if all sizes are equal.
        late: Positions of pages that callers should stop waiting for, although their slots may still be
            written. From now on the transfer consists of these pages, in this order, and another ack reports
            their result.
    """

    transfer_id: int
    ok: bool
    num_ready: int
    nbytes: int
    seconds: float = 0.0
    failures: tuple[tuple[int, Failure], ...] = ()
    sizes: tuple[int, ...] = ()
    late: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest readable prefix of a list of keys, as returned by ``TierStore.match``.

    Attributes:
        num_pages: Number of pages in the prefix.
        tiers: The fastest tier that contains each page.
        exact: Whether no lossy codec has changed these pages or any page that they were computed from.
    """

    num_pages: int
    tiers: tuple[Tier, ...]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class PageChange:
    """A change that is reported to a callback of ``TierStore.watch``: a page entered or left a tier.

    Attributes:
        key: The key of the page.
        tier: The tier that the page entered or left.
        came: True if the page became readable in the tier, False if it is no longer readable there.
    """

    key: PageKey
    tier: Tier
    came: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic on the edge between two tiers, as returned by ``TierStore.traffic``.

    Attributes:
        in_flight: Number of pages that are being copied or are queued.
        arrived: Number of pages that have arrived since the store was opened.
    """

    in_flight: int
    arrived: int


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Result of ``TierStore.flush``, in pages.

    Unreachable pages are not counted if the lower tiers have no space for them.

    Attributes:
        durable: Pages that were in memory at the call and are on disk now.
        failed: Pages that could not be written, or for which the disk has no space because it already stores
            other pages of this flush. They stay in memory. The write is tried again, unless the tier was
            opened with ``nvme.read_only``.
        pending: Pages that were still in flight when the flush gave up after 10 s without progress.
        pending_erases: Evicted pages that a restart could bring back now. The store keeps trying to erase
            them.
    """

    durable: int = 0
    failed: int = 0
    pending: int = 0
    pending_erases: int = 0

    @property
    def complete(self) -> bool:
        """Whether every page and every erase is durable."""
        return not (self.failed or self.pending or self.pending_erases)


@dataclass(frozen=True, slots=True)
class Promoted:
    """Result of ``TierStore.promote``.

    Attributes:
        keys: Keys of the pages whose promotion was started by this call.
        covered: Length in pages of the longest prefix of the given keys whose pages are all in the tier or in
            flight to it. 0 if the hint is no longer active or a lease waits for pages from the lower tier.
        in_force: Whether the hint is still active: neither replaced, nor withdrawn, nor expired. If False, no
            promotion starts for the hint.
        in_flight: Number of pages that are being promoted now, to any tier, including those of this call.
        arriving: Number of the ``in_flight`` pages that are being promoted to the tier of this call.
    """

    keys: tuple[PageKey, ...]
    covered: int
    in_force: bool
    in_flight: int
    arriving: int


@dataclass(frozen=True, slots=True)
class Hint:
    """A scheduler's expectation of which pages will or will not be used. A hint never pins pages.

    A hint whose revision does not exceed the last revision of its ``request_id`` is a duplicate. A higher
    revision with ``keys=()`` withdraws the hint of the request.

    Attributes:
        request_id: The request that the hint belongs to.
        revision: Number that increases with each hint for the request.
        keys: The keys of the pages that the hint is about, in the order of the sequence.
        need: "will_need": a request will use the pages soon, so the prefetcher loads them. "wont_need": the
            pages are evicted before others. "retain": the pages are evicted after others.
        priority: Among retained pages, those with a lower priority are evicted first. Negative values count
            as 0.
        deadline_s: For ``will_need``: seconds until the request starts, or None if that is not known.
        ttl_s: Seconds after which a ``retain`` or ``will_need`` hint ends. If None, a ``retain`` hint ends
            with the next revision, and a ``will_need`` hint ends 60 s after its deadline, or after 600 s if
            it has no deadline.
    """

    request_id: str
    revision: int
    keys: tuple[PageKey, ...]
    need: Literal["will_need", "wont_need", "retain"] = "will_need"
    deadline_s: float | None = None
    priority: int = 0
    ttl_s: float | None = None

    def __post_init__(self) -> None:
        if self.need not in ("will_need", "wont_need", "retain"):
            raise ValueError(f"Hint.need must be 'will_need', 'wont_need' or 'retain', got {self.need!r}")
        if isinstance(self.keys, bytes | str):
            raise ValueError(f"Hint.keys must be a sequence of page keys, got {self.keys!r:.60}")
        # Copy the keys: the store counts references to them, and the caller may change its list later.
        object.__setattr__(self, "keys", tuple(self.keys))
        strange = [key for key in self.keys if not isinstance(key, bytes)]
        if strange:
            raise ValueError(
                f"Hint.keys must contain only page keys (see TierStore.keys), got {strange[0]!r:.60}"
            )
        if not isinstance(self.request_id, str):
            raise ValueError(f"Hint.request_id must be a string, got {self.request_id!r:.60}")
        for name in ("revision", "priority"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"Hint.{name} must be an integer, got {value!r:.60}")
        for name in ("deadline_s", "ttl_s"):
            value = getattr(self, name)
            if value is not None and not are_seconds(value):
                raise ValueError(f"Hint.{name} must be a number of seconds or None, got {value!r:.60}")


@runtime_checkable
class Event(Protocol):
    """A marker that completes once all work before it has finished.

    It is a CUDA event, or any object with these two methods.
    """

    def query(self) -> bool:
        """Return whether the event has completed. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until the event has completed."""
        ...


class Counters(Protocol):
    """A receiver of the counts that the directory reports."""

    def hit(self, tier: Tier, pages: int = 1) -> None:
        """Count pages found by ``acquire``, by the fastest tier that contained them."""
        ...

    def miss(self, reason: str, pages: int = 1) -> None:
        """Count pages that ``acquire`` could not provide, by reason."""
        ...

    def dropped(self, tier: Tier, reason: str, number: int) -> None:
        """Count ``number`` copies that were dropped from a tier for the same reason."""
        ...

    def moved(self, transfer: Transfer, ack: Ack, page_nbytes: int) -> None:
        """Count a finished transfer."""
        ...

    def prefetched(self, result: str, nbytes: int) -> None:
        """Count prefetched bytes by result: "useful", "late", "wasted" or "cancelled"."""
        ...

    def avoided(self, seconds: float) -> None:
        """Count the seconds that leases did not have to wait, because pages were prefetched."""
        ...
