"""The data types that cross packages and processes. Standard library only.

Words, and what others call them:

    page   = vLLM block = SGLang / FlashInfer page = Hugging Face block: ``page_size`` tokens of all layers, K and V
    slot   = vLLM block id = SGLang page index: a place for one page in a tier
    lease  = a reference held by a named owner (vLLM ref_cnt, SGLang lock_ref)
    key    = the identity of a page: a digest of its namespace and the whole token prefix up to its end
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
"""Largest number of threads that read an NVMe tier."""

_MOST_SECONDS = 1e15
_LONGEST_WAIT_S = 1e9
"""Thirty years. Threads refuse to wait for longer."""


def require_flag(name: str, value: object) -> None:
    """Raise TypeError unless ``value`` is True or False. A word like "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def are_seconds(value: Any) -> bool:
    """Return whether ``value`` can be added to a clock's time. Excludes NaN and integers beyond the range of floats."""
    known = isinstance(value, Real) and not isinstance(value, bool)
    return known and bool(value == inf or abs(value) <= _MOST_SECONDS)


def require_seconds(name: str, value: Any) -> None:
    """Check that ``value`` is a number of seconds, 0 or more; infinity is allowed.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative or NaN.
    """
    _require_number(name, value, "a number of seconds, 0 or more")
    if not are_seconds(value) or value < 0:
        raise ValueError(f"{name} must be a number of seconds, 0 or more, got {value!r:.60}")


def require_finite(name: str, value: object) -> None:
    """Check like ``require_seconds``, but reject infinity, for values that are multiplied."""
    require_seconds(name, value)
    if value == inf:
        raise ValueError(f"{name} must be a finite number of seconds, got inf")


def seconds_at_most(name: str, value: Any) -> float:
    """Return a finite number of seconds, 0 or more, as a float.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative, infinite or NaN.
    """
    if type(value) is float and 0.0 <= value <= _LONGEST_WAIT_S:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r:.60}")
    if not are_seconds(value) or value < 0 or value == inf:
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value!r:.60}")
    return min(float(value), _LONGEST_WAIT_S)


def require_time(name: str, value: object) -> None:
    """Check like ``require_seconds``, but allow a time in the past, below 0."""
    _require_number(name, value, "a number of seconds")
    if not are_seconds(value):
        raise ValueError(f"{name} must be a number of seconds, got {value!r:.60}")


def seconds_to_wait(name: str, value: Any) -> float:
    """Return ``value`` as a timeout for a thread: like ``require_seconds``, with infinity as thirty years."""
    require_seconds(name, value)
    return min(float(value), _LONGEST_WAIT_S)


def whole(name: str, value: SupportsIndex, least: int = 0) -> int:
    """Return an integer of any type, including numpy's and torch's, as a Python int.

    Booleans and floats are rejected: they look like an index and are none further down.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is below ``least``.
    """
    found = value if type(value) is int else _index(name, value)
    if found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {found}")
    return found


def require_member(call: str, value: object, allowed: Sequence[Enum], *others: str) -> None:
    """Check that ``value`` is one of these members. True, 1 and 1.0 equal a member but are rejected.

    Args:
        call: What was requested, for the message.
        value: The value to check.
        allowed: The members to choose from.
        others: Further choices, in words.

    Raises:
        ValueError: It is not.
    """
    if not any(value is member for member in allowed):
        names = ", ".join([*(member.name for member in allowed), *others])
        advice = f"choose one of {names}" if allowed else names or "this store has no such tier"
        raise ValueError(f"cannot {call} {value!r:.60}; {advice}")


def slot_numbers(slots: Iterable[SupportsIndex]) -> list[int]:
    """Return slots as Python ints. TypeError unless each is an integer; ownership is not checked."""
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
"""digest (32 bytes) | group (u16, big endian) | shard (u16, big endian)."""


class Tier(IntEnum):
    """Where a copy of a page is. The order is the speed."""

    HBM = 0
    HOST = 1
    NVME = 2
    REMOTE = 3


@dataclass(frozen=True, slots=True)
class TierDescription:
    """What the store needs to know about a tier, instead of its name.

    Attributes:
        addressing: "slots" is memory, with one page per fixed place. "records" are pages by key behind a queue, of any
            size, within a budget of bytes.
        durable: Pages survive a restart.
        lossy: Pages may come back different from what was put.
        below: The next slower tier, to which pages are spilled, or None.
        read_only: The tier keeps the pages that it had when it was opened, and takes no others.
    """

    addressing: Literal["slots", "records"]
    durable: bool = False
    lossy: bool = False
    below: Tier | None = None
    read_only: bool = False

    @property
    def in_memory(self) -> bool:
        """Whether the tier is memory, addressed by slots."""
        return self.addressing == "slots"


class LeaseState(Enum):
    """Result of ``Lease.wait``. PENDING: it timed out and nothing changed. READY and FAILED are final."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class HintResult(Enum):
    """Result of ``TierStore.hint``, in the words of vLLM's kv_hints."""

    APPLIED = "applied"
    DEFERRED = "deferred"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"


class Failure(Enum):
    """Why a page of a transfer did not arrive."""

    IO_ERROR = "io_error"
    INTEGRITY = "integrity"
    NOT_FOUND = "not_found"
    NO_SPACE = "no_space"
    UNAVAILABLE = "unavailable"
    """The tier hangs or fails and was not asked; it is tried again after a pause."""
    CLOSED = "closed"
    UNFIT = "unfit"
    """The tier keeps pages encoded, and its codec cannot represent the numbers of this page."""


@dataclass(slots=True)
class Copy:
    """One tier's copy of a page. While ``ready`` is False a transfer is writing the slot, and it is not readable."""

    slot: int
    nbytes: int
    rank: int
    ready: bool = False
    pins: int = 0
    queue: object | None = None
    """The tier's eviction queue in which it waits; None if it may not leave."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages to copy from one tier to another, slot by slot. Plain data: it may cross processes.

    Attributes:
        parents: Key of the page before each of ``keys``; None for the first page of a sequence, or if unknown.
        nbytes: Bytes that the destination was asked to reserve.
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
        """Return a transfer with the pages at these positions only, under the same id."""
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
    """Records to remove from a tier that keeps pages by key. Ordered with the transfers around it."""

    tier: Tier
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """The end of a transfer: nothing writes its slots any more.

    Attributes:
        nbytes: Bytes of the pages that arrived.
        seconds: Its share of the time in which its tier was busy. Shares of concurrent transfers add up to that time.
        failures: Position and reason of each page that failed.
        sizes: Bytes of each page that arrived, in the transfer's order; empty if all are equal.
        late: Positions of pages whose slots may still be written, but that nobody should wait for. They form the
            transfer from now on, in this order, and get an ack of their own.
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
    """The longest readable prefix. ``tiers[i]``: fastest tier of page i. ``exact``: no copy is lossy."""

    num_pages: int
    tiers: tuple[Tier, ...]
    exact: bool = True


@dataclass(frozen=True, slots=True)
class PageChange:
    """What a callback of ``TierStore.watch`` is told: a page came to a tier, or left it.

    Attributes:
        key: The page.
        tier: The tier.
        came: True if the page can be read in the tier now, False if it was readable there and is not any more.
    """

    key: PageKey
    tier: Tier
    came: bool


@dataclass(frozen=True, slots=True)
class Traffic:
    """What an edge between two tiers carries, as ``TierStore.traffic`` tells it.

    Attributes:
        in_flight: Pages on their way now, those included that wait for their turn.
        arrived: Pages that have crossed the edge since the store was opened.
    """

    in_flight: int
    arrived: int


@dataclass(frozen=True, slots=True)
class FlushResult:
    """Result of ``TierStore.flush``, in pages.

    A page that no request can reach and for which the lower tiers have no free space is not counted.

    Attributes:
        durable: Pages in memory at the call that are on disk now.
        failed: Pages that could not be written. They stay in memory and are tried again, unless the tier was opened
            with ``nvme.read_only``.
        pending: Pages still in flight when the disk had made no progress for 10 s.
        pending_erases: Evicted pages that a restart now could bring back. The store keeps trying to erase them.
    """

    durable: int = 0
    failed: int = 0
    pending: int = 0
    pending_erases: int = 0

    @property
    def complete(self) -> bool:
        """Whether nothing failed and nothing is pending."""
        return not (self.failed or self.pending or self.pending_erases)


@dataclass(frozen=True, slots=True)
class Promoted:
    """Result of ``TierStore.promote``.

    Attributes:
        keys: Pages whose promotion started with this call.
        covered: Number of the given pages, from the first on, that are in the tier or in flight to it.
        in_force: Whether the hint is still the latest of its request. If not, nothing more starts for it.
        in_flight: Number of pages that promotions are moving now, including these.
        arriving: Those of ``in_flight`` that move to this tier.
    """

    keys: tuple[PageKey, ...]
    covered: int
    in_force: bool
    in_flight: int
    arriving: int


@dataclass(frozen=True, slots=True)
class Hint:
    """What a scheduler knows about the near future. A hint never pins memory.

    A revision that is not above the last one seen of ``request_id`` is a duplicate. ``keys=()`` with a higher revision
    cancels.

    Attributes:
        priority: Retained pages of lower priority are evicted first; below 0 counts as 0.
        deadline_s: Seconds until a ``will_need`` request starts.
        ttl_s: Seconds after which a ``retain`` or ``will_need`` ends. None: a ``retain`` ends with the next revision, a
            ``will_need`` 60 s after its deadline, or after 600 s without one.
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
        # A caller may change its list later, and the table counts the keys that each request named.
        object.__setattr__(self, "keys", tuple(self.keys))
        strange = [key for key in self.keys if not isinstance(key, bytes)]
        if strange:
            raise ValueError(f"Hint.keys must hold page keys as keys() returns them, got {strange[0]!r:.60}")
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
    """Something that will happen: a CUDA event, or any object with these two methods."""

    def query(self) -> bool:
        """Return whether it has happened. Never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until it has happened."""
        ...


class Counters(Protocol):
    """Counters of the decisions about pages."""

    def hit(self, tier: Tier, pages: int = 1) -> None:
        """Count pages that an acquire found, by the fastest tier that held them."""
        ...

    def miss(self, reason: str, pages: int = 1) -> None:
        """Count pages that an acquire could not serve, by reason."""
        ...

    def dropped(self, tier: Tier, reason: str, number: int) -> None:
        """Count copies that left a tier."""
        ...

    def moved(self, transfer: Transfer, ack: Ack, page_nbytes: int) -> None:
        """Count a transfer that ended."""
        ...

    def prefetched(self, result: str, nbytes: int) -> None:
        """Count bytes that were prefetched, by what became of them."""
        ...

    def avoided(self, seconds: float) -> None:
        """Count load time that was over before a lease took the page."""
        ...
