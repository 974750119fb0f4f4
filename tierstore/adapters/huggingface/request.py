"""A request to the store: its prompts, its options, and the pages that it reads and writes.

``Terms`` contains the options that all sequences of a request share. ``PageGroups`` provides the store's pages as
tensors, one per KV group. ``unpadded`` removes the padding from prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from time import monotonic, sleep
from typing import Literal, get_args

import torch

from tierstore.adapters.huggingface.identity import State
from tierstore.errors import CapacityError
from tierstore.gpu.pool import GroupedPages
from tierstore.keys import Extra
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import (
    LeaseState,
    PageKey,
    Tier,
    require_flag,
    require_seconds,
    require_time,
    seconds_at_most,
)


class PageGroups:
    """The store's pages, as one tensor for each KV group.

    ``groups[g]`` is ``[num_slots, num_layers, 2, page_size, num_kv_heads, head_dim]`` for group ``g``.
    """

    def __init__(self, store: TierStore) -> None:
        """Use the pages of ``store``.

        Raises:
            ValueError: A group does not have separate K and V per head.
        """
        pages = store.pages
        self.groups = pages.groups if isinstance(pages, GroupedPages) else (pages,)
        if any(group.ndim != 6 or group.shape[2] != 2 for group in self.groups):
            raise ValueError(
                "every KV group of the store must have K and V per head (PageSpecs of kind 'mha'): open the store "
                "with page_specs of the model"
            )

    @property
    def page_size(self) -> int:
        """Return the number of tokens per page."""
        return int(self.groups[0].shape[3])

    @property
    def device(self) -> torch.device:
        """Return the device of the pages."""
        return self.groups[0].device

    @property
    def num_layers(self) -> int:
        """Return the number of layers in all groups together."""
        return sum(int(group.shape[1]) for group in self.groups)

    def reach(self, lease: Lease, timeout_s: float) -> LeaseState:
        """Wait until the pages of ``lease`` may be read. Return PENDING after ``timeout_s`` seconds.

        On a GPU, the host waits only for copies, and the pages may be read on the caller's current stream.
        That stream waits for pages that are still being written, for example by a request that has just
        sealed them.
        """
        if self.device.type != "cuda":
            return lease.wait(timeout_s)
        state = lease.wait(timeout_s, written=False)
        event = None if state is LeaseState.PENDING else lease.ready(0)
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)  # type: ignore[arg-type]
        return state

    def copy(self, src: int, dst: int) -> None:
        """Copy a page, with all its groups, to another slot."""
        for group in self.groups:
            group[dst].copy_(group[src])

    def copy_layer(self, group: int, index: int, src: int, dst: int) -> None:
        """Copy layer ``index`` of KV group ``group`` from slot ``src`` to slot ``dst``."""
        pages = self.groups[group]
        pages[dst, index].copy_(pages[src, index])


_POLL_S = 0.001
_ASK_AGAIN = 100
"""Number of polls after which pages that have not arrived in host memory are demoted again."""


class HostPages:
    """The pages of one request that stay in host memory and stream from there, because HBM has no room for them.

    They are leased until ``let_go``, so that copies that are queued ahead never read changed pages. Not thread-safe.
    """

    def __init__(self, store: TierStore) -> None:
        """Use the HOST tier of ``store``, which must have one."""
        self._store = store
        self._leases: list[Lease] = []
        self._slots: set[int] = set()
        arena = store.host_memory
        assert arena is not None
        self.num_slots = arena.num_slots
        """Number of pages that host memory can hold."""

    @staticmethod
    def of(store: TierStore) -> HostPages | None:
        """Return the pages of a new request, or None if pages of this store cannot be streamed.

        Pages stream from host memory only as they were computed, so they cannot if ``host.codec`` is not none.
        """
        arena = store.host_memory
        return None if arena is None or arena.held.encoded else HostPages(store)

    def __len__(self) -> int:
        """Return the number of different pages that are held."""
        return len(self._slots)

    def find(self, keys: Sequence[PageKey]) -> list[int]:
        """Hold the longest prefix of ``keys`` that is in host memory and exact. Return its host slots."""
        lease = self._store.acquire(keys, exact=True, keep_in=Tier.HOST)
        return self._hold(lease)

    def take(self, keys: Sequence[PageKey], timeout_s: float) -> list[int]:
        """Move pages that the caller has leased in HBM to host memory, and hold them there. Return their host slots.

        Their HBM slots are free once the caller has released its lease.

        Raises:
            CapacityError: Host memory had no space for them in time, or they are not exact. Nothing has changed.
        """
        lease = self._store.acquire(keys, exact=True, keep_in=Tier.HOST)
        if lease.missing and lease.missing_because != "inexact":
            until = monotonic() + timeout_s
            full = len(self._slots) + len(keys) > self.num_slots
            for polls in count():
                lease.release()
                if polls % _ASK_AGAIN == 0 and not full:
                    self._store.demote(keys, Tier.HOST, even_if_saved=True)
                self._store.poll()
                lease = self._store.acquire(keys, exact=True, keep_in=Tier.HOST)
                if full or not lease.missing or monotonic() >= until:
                    break
                sleep(_POLL_S)
        if lease.missing:
            why = lease.missing_because
            lease.release()
            if why == "inexact":
                raise CapacityError(
                    "HBM is full, and pages of this request that went through a lossy codec cannot be streamed "
                    "from host memory: raise hbm.capacity, or use exact=True"
                )
            raise CapacityError(
                f"HBM is full, and host memory ({self.num_slots} pages, of which this request holds "
                f"{len(self._slots)}) had no space for {len(keys)} more pages of this request within {timeout_s} s: "
                "raise host.capacity or hbm.capacity"
            )
        return self._hold(lease)

    def let_go(self) -> None:
        """Release all pages. Call it only after all copies that read them have completed. Idempotent.

        Raises:
            StoreClosed: The store is closed.
        """
        leases, self._leases = self._leases, []
        self._slots.clear()
        for lease in leases:
            lease.release()

    def _hold(self, lease: Lease) -> list[int]:
        slots = lease.slots
        if not slots:
            lease.release()
            return slots
        self._leases.append(lease)
        self._slots.update(slots)
        return slots


Storing = Literal["all", "memory-only", "read-only", "no-store"]
"""Whether a request reuses stored pages, and whether its own pages are stored.

    all          reuses pages; its pages may be stored in every tier
    memory-only  reuses pages; its pages are stored, but never written to disk
    read-only    reuses pages; its pages are not stored
    no-store     neither reuses nor stores pages
"""


_SPACE_S = 10.0
"""Default time limit for free slots, and lowest default time limit for loading stored pages, in seconds.

The limit for stored pages is higher if computing them takes longer.
"""
_ROOM_S = 1.0
"""Lowest default time limit, in seconds, for space in HBM while pages are being saved.

The limit is higher if computing the stored pages takes longer.
"""
_MOST_S = 60.0
"""Highest default of both limits, in seconds."""


def _between(least_s: float, computing_s: float | None) -> float:
    return least_s if computing_s is None else min(max(computing_s, least_s), _MOST_S)


def _unknown(num_tokens: int) -> float | None:
    return None


@dataclass(frozen=True, slots=True)
class Terms:
    """Options shared by all sequences of a request."""

    store: TierStore
    pages: PageGroups
    num_models: int
    """Number of models that write to the pages: one, or two with a draft model."""
    weights: tuple[State, ...]
    """State of each model's weights when the request began. All of the request's pages belong to these weights."""
    window: int | None
    """Largest window of all layers of all models, in tokens. None if a layer has full attention."""
    root: bytes
    """Root of the request's pages in the prefix index (``root_of``)."""
    salt: bytes = b""
    extra: tuple[Extra, ...] = ()
    deadline_s: float | None = None
    timeout_s: float | None = None
    """Maximum time in seconds to wait for stored pages, and for free slots.

    None means a limit for stored pages that depends on the time to compute them (``arrival_s``), and 10 s for
    everything else.
    """
    wait_for_room_s: float | None = None
    """Maximum time in seconds to wait for space for stored pages while HBM pages are being saved.

    None means a limit that depends on the time to compute the stored pages. See ``room_s``.
    """
    compute_s: Callable[[int], float | None] = _unknown
    """Returns the time, in seconds, to compute the first n tokens of a prompt, or None if it is unknown."""
    storing: Storing = "all"
    exact: bool = False
    """Whether to recompute pages that went through a lossy codec or were computed from such pages."""
    host: HostPages | None = None
    """The pages that stream from host memory. None if the request must fit into HBM."""

    def __post_init__(self) -> None:
        check_storing(self.storing)
        require_flag("exact", self.exact)
        if self.timeout_s is not None:
            require_seconds("timeout_s", self.timeout_s)
        if self.wait_for_room_s is not None:
            seconds_at_most("wait_for_room_s", self.wait_for_room_s)
        if self.deadline_s is not None:
            require_time("deadline_s", self.deadline_s)

    @property
    def space_s(self) -> float:
        """Return the maximum time, in seconds, to wait for free slots, and for other writers of a page.

        After that time, the request fails.
        """
        return _SPACE_S if self.timeout_s is None else self.timeout_s

    def arrival_s(self, num_tokens: int) -> float:
        """Return the maximum time, in seconds, to wait until this many stored tokens are loaded.

        Unless ``timeout_s`` is set, it is the time to compute the tokens. A request that waits this long and
        then computes them takes at most twice as long as one that computes them at once. The time is at least
        10 s, so that a short load peak does not cost a hit, and at most 60 s.
        """
        if self.timeout_s is not None:
            return self.timeout_s
        return _between(_SPACE_S, self.compute_s(num_tokens))

    def room_s(self, num_tokens: int) -> float:
        """Return the maximum time, in seconds, to wait for space in HBM for this many stored tokens.

        Unless ``wait_for_room_s`` is set, it is the time to compute the tokens, but at least 1 s and at most
        60 s. It never exceeds ``timeout_s``.
        """
        most = _MOST_S if self.timeout_s is None else self.timeout_s
        if self.wait_for_room_s is not None:
            return min(self.wait_for_room_s, most)
        return min(_between(_ROOM_S, self.compute_s(num_tokens)), most)

    @property
    def hbm_slots(self) -> int:
        """Return the number of pages that HBM can hold."""
        return len(self.pages.groups[0])

    @property
    def looks_up(self) -> bool:
        """Return whether pages of earlier requests may be reused."""
        return self.storing != "no-store"

    @property
    def keeps(self) -> bool:
        """Return whether later requests can reuse pages of this one."""
        return self.storing in ("all", "memory-only")

    @property
    def by_layers(self) -> bool:
        """Return whether to compute the first layers while later layers of the stored prefix are in flight.

        If so, pages that cannot be loaded are computed from their tokens alone. The result is False if an extra
        has a position, because tokens may then stand for other data. It is also False with a draft model, a
        window or a deadline, because it must then be known in advance which pages can be loaded.
        """
        return (
            self.num_models == 1
            and self.window is None
            and self.deadline_s is None
            and self.plain_tokens is None
        )

    @property
    def plain_tokens(self) -> int | None:
        """Return the number of tokens before the first extra with a position, or None if no extra has one.

        After that position, equal tokens may have different K/V.
        """
        return min((item[0] for item in self.extra if isinstance(item, tuple)), default=None)


def root_of(store: TierStore, page_size: int, salt: bytes, extra: Iterable[Extra]) -> bytes:
    """Return the root of a request's pages in the prefix index.

    Two requests have the same root only if equal tokens have equal keys in both. Extras with a position are
    ignored. The root is the key of one page of fixed tokens, so it depends on the same things as other keys,
    except the tokens.
    """
    shared = [item for item in extra if not isinstance(item, tuple)]
    return store.keys([0] * page_size, salt=salt, extra=shared)[0]


def check_storing(storing: str) -> None:
    """Raise ValueError unless ``storing`` is a ``Storing``."""
    if storing not in get_args(Storing):
        raise ValueError(f"storing must be one of {', '.join(get_args(Storing))}, got {storing!r}")


def unpadded(
    input_ids: torch.Tensor | Sequence[int], attention_mask: torch.Tensor | None
) -> tuple[list[list[int]], int]:
    """Return the tokens of each row without padding, and the width of the batch.

    Raises:
        ValueError: The batch or a row is empty, the shape is wrong, or the mask hides anything except columns
            on the left.
    """
    ids = torch.as_tensor(input_ids)
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or not ids.numel():
        raise ValueError(
            f"input_ids must be non-empty and of shape [T] or [B, T], got shape {tuple(ids.shape)}"
        )
    if attention_mask is None:
        return ids.long().tolist(), ids.shape[1]
    mask = torch.as_tensor(attention_mask)
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have the same shape as input_ids, got {tuple(mask.shape)} and {tuple(ids.shape)}"
        )
    seen = mask != 0
    if bool((seen[:, :-1] & ~seen[:, 1:]).any()) or not bool(seen[:, -1].all()):
        raise ValueError("attention_mask must hide only padding on the left of each row: pad on the left")
    rows = zip(ids.long().tolist(), seen.sum(-1).tolist(), strict=True)
    return [row[len(row) - count :] for row, count in rows], ids.shape[1]
