"""The plain data that crosses rooms and processes: standard library only, only derived behaviour.

Words, and what others call them:

    page   = vLLM block = SGLang / FlashInfer page = Hugging Face block: ``page_size`` tokens of
             all layers, K and V
    slot   = vLLM block id = SGLang page index: a place for one page in a tier
    lease  = a reference held by someone who can be named (vLLM ref_cnt, SGLang lock_ref)
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

_MOST_SECONDS = 1e15
_LONGEST_WAIT_S = 1e9
"""Thirty years. Threads refuse to wait for ever in so many seconds."""


def require_flag(name: str, value: object) -> None:
    """TypeError for what is neither True nor False: a word like "no" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def are_seconds(value: Any) -> bool:
    """Whether a clock's time and this have a sum: whole numbers have no end, and a NaN is in no order."""
    known = isinstance(value, Real) and not isinstance(value, bool)
    return known and bool(value == inf or abs(value) <= _MOST_SECONDS)


def require_seconds(name: str, value: Any) -> None:
    """TypeError for what is no number, ValueError for one that is no duration. Infinity is one: without end."""
    _require_number(name, value, "a number of seconds, 0 or more")
    if not are_seconds(value) or value < 0:
        raise ValueError(f"{name} must be a number of seconds, 0 or more, got {value!r:.60}")


def require_finite(name: str, value: object) -> None:
    """``require_seconds`` of what is to be multiplied: without infinity."""
    require_seconds(name, value)
    if value == inf:
        raise ValueError(f"{name} must be a finite number of seconds, got inf")


def seconds_at_most(name: str, value: Any) -> float:
    """Return a finite number of seconds, 0 or more. TypeError for what is not a number, ValueError for others."""
    if type(value) is float and 0.0 <= value <= _LONGEST_WAIT_S:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, got {value!r:.60}")
    if not are_seconds(value) or value < 0 or value == inf:
        raise ValueError(f"{name} must be a finite number of seconds, 0 or more, got {value!r:.60}")
    return min(float(value), _LONGEST_WAIT_S)


def require_time(name: str, value: object) -> None:
    """As ``require_seconds``, of a time that may have passed already: below 0 is allowed."""
    _require_number(name, value, "a number of seconds")
    if not are_seconds(value):
        raise ValueError(f"{name} must be a number of seconds, got {value!r:.60}")


def seconds_to_wait(name: str, value: Any) -> float:
    """``require_seconds`` of what a thread may wait at most: infinity is thirty years then."""
    require_seconds(name, value)
    return min(float(value), _LONGEST_WAIT_S)


def whole(name: str, value: SupportsIndex, least: int = 0) -> int:
    """An integer of any kind, numpy's and torch's too, as Python's. TypeError for others, ValueError below ``least``.

    True is none, and neither is 1.0: they look like a place in a list and are none further down.
    """
    found = value if type(value) is int else _index(name, value)
    if found < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {found}")
    return found


def require_member(call: str, value: object, allowed: Sequence[Enum], *others: str) -> None:
    """ValueError for what is none of these: True, 1 and 1.0 equal a member that counts as 1, and have no name.

    ``call``: what was asked for, in the message. ``others``: what else is allowed, in words.
    """
    if not any(value is member for member in allowed):
        names = ", ".join([*(member.name for member in allowed), *others])
        advice = f"choose one of {names}" if allowed else names or "this store has no such tier"
        raise ValueError(f"cannot {call} {value!r:.60}; {advice}")


def slot_numbers(slots: Iterable[SupportsIndex]) -> list[int]:
    """Slots as Python's integers; TypeError unless each is one, of any kind. Whose they are is not looked at."""
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
    """Where a copy lives. Order = speed."""

    HBM = 0
    HOST = 1
    NVME = 2
    REMOTE = 3


@dataclass(frozen=True, slots=True)
class TierDescription:
    """What the store asks a tier, in place of its name.

    ``addressing``: "slots" is memory, page by page at fixed places; "records" are pages by key behind a queue, of any
    size, within a budget of bytes. ``durable``: pages survive a restart. ``lossy``: pages that come back may differ
    from those that went in. ``below``: the next slower tier, to which pages are spilled; None: there is none.
    """

    addressing: Literal["slots", "records"]
    durable: bool = False
    lossy: bool = False
    below: Tier | None = None

    @property
    def in_memory(self) -> bool:
        """Whether the tier is memory, addressed by slots."""
        return self.addressing == "slots"


class LeaseState(Enum):
    """What ``Lease.wait`` found. PENDING: the time ran out and nothing changed; the others are final."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class HintResult(Enum):
    """What ``TierStore.hint`` did with a hint (the words of vLLM's kv_hints)."""

    APPLIED = "applied"
    DEFERRED = "deferred"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"


class Failure(Enum):
    """Why one page of a transfer did not arrive."""

    IO_ERROR = "io_error"
    INTEGRITY = "integrity"
    NOT_FOUND = "not_found"
    NO_SPACE = "no_space"
    UNAVAILABLE = "unavailable"
    """The tier did not try: it hangs or fails, and is left alone for a while."""
    CLOSED = "closed"
    UNFIT = "unfit"
    """The tier keeps pages encoded, and this one holds numbers that its codec cannot state."""


@dataclass(slots=True)
class Copy:
    """One tier's copy of a page. ``ready`` False: a transfer is writing the slot; it is not readable."""

    slot: int
    nbytes: int
    rank: int
    ready: bool = False
    pins: int = 0
    queue: object | None = None
    """Of its tier's, the one it waits in to leave; None: it may not leave."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Pages to copy along one edge, slot by slot. Plain data: it may cross a process.

    ``parents[i]`` is the key of the page before ``keys[i]`` (None: the first of its sequence, or unknown).
    ``nbytes`` is what the destination was asked to set aside.
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
        """Return the same transfer with the pages at these positions alone, under the same id."""
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
    """Records to remove from a tier that keeps bytes by key. Ordered with the transfers around it."""

    tier: Tier
    keys: tuple[PageKey, ...]


@dataclass(frozen=True, slots=True)
class Ack:
    """What became of a transfer: nothing writes its slots now. ``nbytes``: bytes of the pages that arrived.
    ``seconds``: its share of the time in which its room worked on transfers: of several at once they add up to no more.

    ``sizes``: of each page that arrived, in the transfer's order; empty where all have the same. ``late``: positions of
    pages whose slots may still be written, and for which nobody is to wait: they are the transfer from here on, in this
    order, and an ack of their own follows.
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
    """The longest readable prefix: ``tiers[i]`` is the fastest tier of page i; ``exact``: no lossy copy."""

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
class FlushResult:
    """What ``TierStore.flush`` found when it returned, in pages.

    ``durable``: pages in memory at the call that are on disk. ``failed``: pages that could not be written; they stay in
    memory and are tried again. ``pending``: pages still on their way when the disk had made no progress for 10 s.
    ``pending_erases``: evicted pages that a restart now could bring back; the store goes on trying to erase them.
    A page that no request can reach and for which the tiers below have no free room counts in none of them.
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
    """What ``TierStore.promote`` did. ``keys``: pages that are on their way up now and were not before.

    ``covered``: how many of the pages it was given, first to last, are in the tier or on their way there now.
    ``in_force``: whether the hint still was what its request said last; if not, nothing starts for it any more.
    ``in_flight``: pages that promotions are bringing now, these included; ``arriving``: those of them to this tier.
    """

    keys: tuple[PageKey, ...]
    covered: int
    in_force: bool
    in_flight: int
    arriving: int


@dataclass(frozen=True, slots=True)
class Hint:
    """What a scheduler knows about the near future. A hint never pins memory.

    A revision not above the last seen of ``request_id`` is a duplicate; ``keys=()`` with a higher one cancels.
    ``priority``: of retained pages those of the lowest leave first; below 0 counts as 0. ``deadline_s``: a
    ``will_need`` starts in so many seconds. ``ttl_s``: a ``retain`` ends after so many (None: with the next revision),
    and so does a ``will_need`` (None: 60 after its deadline, 600 without one).
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
        # A caller may go on to change its list, and the table counts what each request named.
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
    """Something that will have happened: a CUDA event, or any object with its two methods."""

    def query(self) -> bool:
        """Whether it has happened; never blocks."""
        ...

    def synchronize(self) -> None:
        """Blocks until it has happened."""
        ...


class Counters(Protocol):
    """What the decisions about pages are counted in."""

    def hit(self, tier: Tier, pages: int = 1) -> None:
        """Pages that an acquire found, in the fastest tier that held them."""
        ...

    def miss(self, reason: str, pages: int = 1) -> None:
        """Pages that an acquire could not serve."""
        ...

    def dropped(self, tier: Tier, reason: str, number: int) -> None:
        """Copies that left a tier."""
        ...

    def moved(self, transfer: Transfer, ack: Ack, page_nbytes: int) -> None:
        """A transfer ended."""
        ...

    def prefetched(self, result: str, nbytes: int) -> None:
        """Bytes brought up ahead of need, by what became of them."""
        ...

    def avoided(self, seconds: float) -> None:
        """Load time that had already happened when a lease took in a page."""
        ...
