"""``TierStore``, the store of one process: a directory and a mover behind one lock.

The module has the bodies of its calls, for pages of the store's own HBM and of an engine's. ``directory``
makes the decisions. Each call does a bounded amount of work per hold of the lock.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from threading import RLock
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING

from tierstore import metrics
from tierstore.archive.export import Exported, write_archive
from tierstore.archive.file_format import Description
from tierstore.archive.intake import Imported, read_archive
from tierstore.build import Parts, assemble, loss_class, register_pages
from tierstore.config import StoreConfig
from tierstore.directory import invariants
from tierstore.directory.leases import last_key
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.directory.writeback import Ticket
from tierstore.errors import CapacityError, ConfigError, StoreClosed
from tierstore.keys import namespace, page_keys, require_key_list, require_keys_and_slots
from tierstore.lease import Lease, LeaseHost, record_of, require_event
from tierstore.live_archive import LiveSink, LiveSource
from tierstore.page import PageLayout
from tierstore.pump import Pump, Wakeup
from tierstore.types import (
    FlushResult,
    Hint,
    Match,
    Tier,
    require_flag,
    require_member,
    require_time,
    seconds_at_most,
    seconds_to_wait,
    slot_numbers,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike
    from types import TracebackType

    import torch

    from tierstore.archive.source_sink import Progress as Shown
    from tierstore.directory.leases import LeaseRecord
    from tierstore.gpu.engine_pages import EnginePages
    from tierstore.gpu.pool import GroupedPages
    from tierstore.keys import Extra, TokenIds
    from tierstore.mover import SyncMark
    from tierstore.page import PageSpec
    from tierstore.types import Event, HintResult, PageChange, PageKey, Promoted, TierDescription, Traffic
    from tierstore.watch import Watch


class OwnSlots:
    """Slots of the store's own HBM pool."""

    def __init__(self, pump: Pump, page_nbytes: int) -> None:
        self._pump = pump
        self._directory = pump.directory
        self._page_nbytes = page_nbytes

    def allocate(self, n: int, timeout_s: float) -> list[int]:
        """See ``TierStore.allocate``."""
        self._require_fits(n)
        deadline = monotonic() + timeout_s
        for _ in self._pump.until(deadline):
            slots = self._try_allocate(n)
            if len(slots) == n:
                return slots
        with self._pump.lock, self._pump.guard:
            occupied = metrics.occupancy(self._directory, Tier.HBM)
        raise CapacityError(f"timed out after {timeout_s} s waiting for {n} free HBM pages ({occupied})")

    def put(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        after: Event | None,
        lease: LeaseRecord | None,
        *,
        memory_only: bool,
        parent: PageKey | None = None,
        parents: Sequence[PageKey | None] | None = None,
    ) -> list[int]:
        """See ``TierStore.put``.

        Works in chunks, one per hold of the lock. Under an exact lease it may end early.
        """
        slots = slot_numbers(slots)
        require_keys_and_slots(keys, slots, (parent,))
        if parents is not None:
            raise ConfigError("put(parents=...) needs hbm.owner: engine, but the store owns HBM here")
        with self._pump.lock, self._pump.guard:
            self._directory.owned.require(slots)
        kept: list[int] = []
        for i in range(0, len(keys), BATCH_PAGES):
            parent = keys[i - 1] if i else parent
            chunk = slice(i, i + BATCH_PAGES)
            with self._pump.lock, self._pump.guard:
                kept += self._pump.events.seal(
                    keys[chunk], slots[chunk], parent, lease, after, memory_only=memory_only
                )
                self._pump.step()
            if len(kept) < min(i + BATCH_PAGES, len(keys)):
                break
        self._pump.notify()
        return kept

    def free(self, slots: Sequence[int], after: Event | None) -> None:
        """See ``TierStore.free``."""
        numbers = tuple(slot_numbers(slots))
        with self._pump.lock, self._pump.guard:
            self._pump.events.free(numbers, after)
        self._pump.notify()

    def withdraw(self, slots: Sequence[int]) -> list[int]:
        """Raise ConfigError, because the slots are the store's own."""
        raise ConfigError("withdraw needs hbm.owner: engine, but the store owns HBM here")

    def checked_into(self, keys: Sequence[PageKey], into: Sequence[int] | None) -> None:
        """Raise ConfigError if the caller names slots: the store chooses the slots of a lease."""
        if into is not None:
            raise ConfigError("acquire(into=...) needs hbm.owner: engine, but the store owns HBM here")

    def _try_allocate(self, n: int) -> list[int]:
        """Return ``n`` slots or none.

        If a try fails but frees space, try again at once, a limited number of times.
        """
        for _ in range(2 + n // BATCH_PAGES):
            slots, made_room = self._take(n)
            if slots or not made_room:
                return slots
        return []

    def _take(self, n: int) -> tuple[list[int], bool]:
        """Take ``n`` slots in chunks. If fewer are available, give all of them back.

        Returns:
            The slots, or an empty list; and in the latter case, whether the call has made more space.
        """
        slots: list[int] = []
        made_room = False
        while len(slots) < n:
            with self._pump.lock, self._pump.guard:
                taken = self._directory.owned.allocate(
                    min(n - len(slots), BATCH_PAGES), reserve=n - len(slots)
                )
                if taken is None:
                    self._directory.owned.retire(slots)
                    self._directory.owned.free(slots)
                    made_room = self._directory.want_slots(n, monotonic())
                self._pump.submit()
            if taken is None:
                return [], made_room
            slots += taken
        return slots, False

    def _require_fits(self, n: int) -> None:
        slots = self._directory.residency.tables[Tier.HBM].num_slots
        nbytes = self._page_nbytes
        if slots is not None and n > slots:
            raise CapacityError(
                f"{n} pages ({n * nbytes} bytes) exceed HBM, which holds {slots} pages ({slots * nbytes} bytes)"
            )


class EngineSlots:
    """Slots of an engine's tensors.

    The store copies pages out of them and into them, but owns none of them.
    """

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._directory = pump.directory

    def allocate(self, n: int, timeout_s: float) -> list[int]:
        """Raise ConfigError, because an engine allocates its slots itself."""
        raise _not_ours("allocate")

    def put(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        after: Event | None,
        lease: LeaseRecord | None,
        *,
        memory_only: bool,
        parent: PageKey | None = None,
        parents: Sequence[PageKey | None] | None = None,
    ) -> list[int]:
        """See ``TierStore.put``. The pages are copied out, and the engine keeps the slots."""
        with self._pump.lock, self._pump.guard:
            parent = last_key(lease) if parent is None else parent
            doubted = lease is not None and lease.inexact
        slots = slot_numbers(slots)
        before = _before(keys, parent) if parents is None else tuple(parents)
        require_keys_and_slots(keys, slots, before)
        self._require_registered()
        if len(before) != len(keys):
            raise ValueError(
                f"parents must name one page per key, got {len(before)} parents for {len(keys)} keys"
            )
        with self._pump.lock, self._pump.guard:
            self._pump.events.copy_out(
                tuple(keys), tuple(slots), after, memory_only=memory_only, parents=before, doubted=doubted
            )
            self._pump.submit()
        self._pump.notify()
        return slots

    def withdraw(self, slots: Sequence[int]) -> list[int]:
        """See ``TierStore.withdraw``."""
        numbers = slot_numbers(slots)
        with self._pump.lock, self._pump.guard:
            reading = self._directory.outgoing.withdraw(numbers)
            self._pump.step()
        return reading

    def free(self, slots: Sequence[int], after: Event | None) -> None:
        """Raise ConfigError, because an engine frees its slots itself."""
        raise _not_ours("free")

    def checked_into(self, keys: Sequence[PageKey], into: Sequence[int] | None) -> list[int]:
        """Return the slots that the engine chose for a lease.

        ValueError unless ``into`` has one slot per key.
        """
        if into is None or len(into) != len(keys):
            raise ValueError(
                f"into must name one slot per key when an engine owns HBM, got {into!r:.60} for {len(keys)} keys"
            )
        numbers = slot_numbers(into)
        self._require_registered()
        return numbers

    def _require_registered(self) -> None:
        if not self._directory.outgoing.num_slots:
            raise ConfigError("the engine's pages are not registered; call register(EnginePages(...)) first")


def _before(keys: Sequence[PageKey], parent: PageKey | None) -> tuple[PageKey | None, ...]:
    """Return the page before each page of a chain."""
    return (parent, *keys[:-1]) if keys else ()


def _not_ours(verb: str) -> ConfigError:
    return ConfigError(f"{verb} needs hbm.owner: store, but the engine owns HBM here")


_LOOKED_UP = 1024
"""Number of keys to look up in one hold of the lock."""


def _require_hints(*hints: object) -> None:
    strange = next((hint for hint in hints if not isinstance(hint, Hint)), None)
    if strange is not None:
        raise TypeError(f"a hint must be a Hint, got {strange!r:.60}")


def _chunks(keys: Sequence[PageKey]) -> list[Sequence[PageKey]]:
    """Split keys into pieces that are short enough for one hold of the lock."""
    return [keys[i : i + BATCH_PAGES] for i in range(0, len(keys), BATCH_PAGES)]


_log = logging.getLogger("tierstore.saving")

_FLUSH_STALL_S = 10.0


class Flush:
    """One flush: the pages it sends to disk, and the wait until they and all erases before it are durable.

    The wait gives up for good after 10 s without progress. A settled page of the flush, a write or an erase
    of any page on disk, and a single write within a batch count as progress.
    """

    def __init__(self, pump: Pump, ticket: Ticket) -> None:
        """Prepare to wait for the pages of ``ticket``. With an empty ticket, only erases are awaited."""
        self.ticket = ticket
        """Counts the pages of this flush that are not settled."""
        self.over = False
        """Whether the flush gave up."""
        self._pump = pump
        self._last, self._since = self._moved(), monotonic()

    @classmethod
    def of_unsaved(cls, pump: Pump) -> Flush:
        """Start to write every readable page that is not on disk, even those that admission would skip."""
        with pump.lock, pump.guard:
            pump.directory.admission.insist_on_all()
        try:
            return cls(pump, _send_down(pump))
        finally:
            with pump.lock, pump.guard:
                pump.directory.admission.insisted()

    def result(self) -> FlushResult:
        """Wait until every page is durable or failed and every earlier erase is durable, or give up."""
        self._until(lambda: self.ticket.open == 0)
        erases, synced = self._until_durable()
        arrived = self.ticket.arrived if synced else 0
        pending = self.ticket.open + self.ticket.arrived - arrived
        return FlushResult(self.ticket.found + arrived, self.ticket.failed, pending, erases)

    def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds. Returns at once after giving up."""
        for _ in self._pump.until(None):
            if holds() or self.over:
                return
            moved = self._moved()
            if moved != self._last:
                self._last, self._since = moved, monotonic()
            elif monotonic() - self._since > _FLUSH_STALL_S:
                self.over = True

    def _until_durable(self) -> tuple[int, bool]:
        """Wait until all writes and erases are durable.

        Returns:
            The number of erases that are not durable, and whether all writes are.
        """
        with self._pump.lock, self._pump.guard:
            dying = self._pump.directory.dying()

        def ended() -> bool:
            with self._pump.lock, self._pump.guard:
                dying.intersection_update(self._pump.directory.dying())
            return not dying

        self._until(ended)
        mark: SyncMark | None = self._pump.mover.begin_sync()
        if mark is None:
            return 0, True
        self._until(mark.done.is_set)
        if self.over:
            self._pump.mover.give_up_waiting()
        return (0 if mark.ok else self._pump.mover.pending_erases) + len(dying), mark.synced

    def _moved(self) -> tuple[object, ...]:
        return self.ticket.open, self.ticket.moves, self._pump.mover.progress


def _send_down(pump: Pump) -> Ticket:
    lifting = True
    while lifting:
        with pump.lock, pump.guard:
            pump.step()
            lifting = pump.directory.residency.memory_only.lifting
    with pump.lock, pump.guard:
        keys, ticket = pump.directory.begin_flush()
    keys = list(dict.fromkeys(keys))
    for start in range(0, len(keys), BATCH_PAGES):
        with pump.lock, pump.guard:
            pump.directory.save(keys[start : start + BATCH_PAGES], ticket)
            pump.step()
    return ticket


class TierStore:
    """A tiered KV cache. All methods are thread-safe, and none waits while it holds the store's lock.

    A cache miss is a value, never an exception. After ``close`` every call raises StoreClosed.
    """

    def __init__(self, config: StoreConfig, parts: Parts, wakeup: Wakeup, *, pump: bool) -> None:
        """Take over opened parts. Callers use ``open``."""
        self.metrics = parts.metrics
        self._config = config
        self._parts = parts
        self._directory = parts.directory
        self._namespace = namespace(parts.layout.specs, loss_class=loss_class(config))
        self._wake = wakeup.bump
        self._pump = Pump(parts, wakeup)
        layout = parts.layout
        self._leases = LeaseHost(self._pump, parts.device, max(spec.num_layers for spec in layout.specs))
        self._slots = (
            EngineSlots(self._pump) if parts.pool is None else OwnSlots(self._pump, layout.page_nbytes)
        )
        self._lock, self._guard = self._pump.lock, self._pump.guard
        self._closing = RLock()  # a signal handler may call ``close`` in the middle of ``close``
        if pump:
            self._pump.start()

    @classmethod
    def open(
        cls, config: StoreConfig, spec: PageSpec | Sequence[PageSpec], *, pump: bool = True
    ) -> TierStore:
        """Open a store over the tiers of ``config``.

        Args:
            config: The configuration, from ``load_config``.
            spec: The geometry of the pages, or a sequence with that of each KV group if several share each
                page.
            pump: Whether a thread of the store makes progress between calls. With False nothing happens
                between calls, and the caller must call ``poll`` in each step. ``match``, ``keys``,
                ``explain`` and ``stats`` only look; all other calls process finished work.

        Raises:
            ConfigError: The configuration does not fit the pages or this machine. Nothing was changed.
            TypeError: ``pump`` is not True or False. Nothing was changed.
        """
        if not isinstance(config, StoreConfig):
            raise ConfigError(f"config must be what load_config returns, got a {type(config).__name__}")
        require_flag("pump", pump)
        wakeup = Wakeup()
        try:
            layout = PageLayout.of(spec)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            parts = assemble(config, layout, wakeup.bump)
            try:
                return cls(config, parts, wakeup, pump=pump)
            except BaseException:
                parts.close()
                raise
        except RuntimeError as error:  # the system gives no thread or no memory
            raise ConfigError(
                f"the store cannot be opened, because the machine lacks a thread or memory: {error}"
            ) from error

    # -- pages and keys -----------------------------------------------------------------------------------------

    def keys(self, token_ids: TokenIds, salt: bytes = b"", extra: Sequence[Extra] = ()) -> list[PageKey]:
        """Return the keys of the full pages of a sequence. Changes nothing.

        Equal input gives equal keys in every process.

        Args:
            token_ids: The tokens of the sequence, from its start.
            salt: Separates the keys of tenants.
            extra: Everything else that K/V depend on, such as adapters and images.
        """
        self._pump.require_open()
        layout = self._parts.layout
        return page_keys(
            token_ids,
            page_size=layout.page_size,
            namespace=self._namespace,
            group=layout.specs[0].group,
            shard=layout.shard,
            salt=salt,
            extra=extra,
        )

    @property
    def pages(self) -> torch.Tensor | GroupedPages:
        """Return the HBM pages in place, ``[num_slots, num_layers, 2, page_size, num_kv_heads, head_dim]``.

        With several KV groups ``pages[slot]`` is a tuple of tensors. ConfigError if an engine owns HBM.
        """
        self._pump.require_open()
        if self._parts.pool is None:
            raise ConfigError("pages needs hbm.owner: store, but the engine owns HBM here")
        return self._parts.pool.pages

    def allocate(self, n: int, timeout_s: float = 1.0) -> list[int]:
        """Return ``n`` HBM slots, owned by the caller, with undefined contents.

        The call takes free slots first, then slots of pages that are readable in a lower tier. If these are
        too few, it saves victims to lower tiers and waits up to ``timeout_s``.

        Raises:
            CapacityError: ``n`` exceeds HBM, or the call timed out. Nothing was taken.
            TypeError: An argument is not a number, in this and every other call.
            ValueError: An argument is negative or NaN, in this and every other call.
        """
        self._pump.require_open()
        self._leases.take_back()
        return self._slots.allocate(whole("n", n), seconds_to_wait("timeout_s", timeout_s))

    def put(
        self,
        keys: Sequence[PageKey],
        slots: Sequence[int],
        after: Event | None = None,
        lease: Lease | None = None,
        *,
        memory_only: bool = False,
        parent: PageKey | None = None,
        parents: Sequence[PageKey | None] | None = None,
    ) -> list[int]:
        """Seal filled pages. On return they belong to the store and can be matched.

        If a key is already readable in HBM, its present slot is returned, and yours is freed after ``after``.
        Another caller may still be writing that copy. With ``lease`` the copy stays, and ``wait`` and
        ``ready`` of the lease tell when it is written; without ``lease`` your slot replaces it and is
        returned. With engine-owned HBM the pages are copied out, your slots are returned, and ``poll``
        reports when they are free.

        Args:
            keys: The keys; ``keys[i]`` is the parent of ``keys[i + 1]``.
            slots: The slot of each page.
            after: The event that ends the writing. None on CUDA means everything launched so far on the caller's
                current stream.
            lease: A lease that keeps the pages pinned until its release. An exact lease holds only exact
                pages: the put ends before the first key that has an inexact copy in use in memory. Fewer
                slots are then returned, and the remaining ones stay yours.
            memory_only: Never write pages that no tier holds yet to NVMe, but drop them if memory is needed.
                A page that some tier already holds stays as it is. The restriction ends when the page, or a
                page after it, is put without ``memory_only``.
            parent: The page before ``keys[0]``. None: the last page of the lease, if any, or the start of a sequence.
            parents: The page before each key, if the keys are not a chain. For engine-owned HBM only.

        Returns:
            The present slot of each key.

        Raises:
            ValueError: The lengths differ, or a key is not a page key. Nothing was changed.
            LeaseError: A slot is not yours. Nothing was changed.
            ConfigError: ``parents`` is given, but the store owns HBM. Nothing was changed.
        """
        self._pump.advance()
        require_flag("memory_only", memory_only)
        require_event(after)
        record = None if lease is None else record_of(lease, self._leases)
        after = self._parts.device.last_use(after)
        return self._slots.put(
            keys, slots, after, record, memory_only=memory_only, parent=parent, parents=parents
        )

    def withdraw(self, slots: Sequence[int]) -> list[int]:
        """Take back engine slots that were put.

        Slots whose copy has not begun are free at once. The store gives up their pages, and ``poll`` does not
        report these slots.

        Returns:
            Those of ``slots`` that a copy still reads, or will read once its ``after`` has happened. They are free when
                ``poll`` reports them.

        Raises:
            ConfigError: The store owns HBM.
        """
        self._pump.advance()
        return self._slots.withdraw(slots)

    def free(self, slots: Sequence[int], after: Event | None = None) -> None:
        """Give back owned slots. They are reused once ``after``, as in ``put``, has happened.

        Raises:
            LeaseError: A slot is not owned by the caller.
        """
        self._pump.advance()
        require_event(after)
        self._slots.free(slots, self._parts.device.last_use(after))

    # -- finding and holding ------------------------------------------------------------------------------------

    @property
    def tiers(self) -> Mapping[Tier, TierDescription]:
        """Return the description of every tier of the store, fastest first.

        HBM is left out if an engine owns it.

        A description tells whether pages in the tier are in memory, survive a restart, and may differ from
        what was put.
        """
        return MappingProxyType(self._directory.hierarchy.tiers)

    def match(self, keys: Sequence[PageKey], *, exact: bool = False) -> Match:
        """Return the longest readable prefix. Changes nothing, pins nothing, and does not count as a use.

        Args:
            keys: The keys of a sequence.
            exact: End before the first page that may differ from what was put, as ``acquire`` would.
        """
        self._pump.require_open()
        require_flag("exact", exact)
        require_key_list(keys)
        with self._lock, self._guard:
            residency = self._directory.residency
            tiers = residency.match(keys)
            num_exact = residency.exactness.prefix(keys[: len(tiers)])
        if exact:
            del tiers[num_exact:]
        return Match(len(tiers), tuple(tiers), num_exact >= len(tiers))

    def acquire(
        self,
        keys: Sequence[PageKey],
        deadline_s: float | None = None,
        into: Sequence[int] | None = None,
        *,
        exact: bool = False,
        wait_for_room_s: float = 0.0,
    ) -> Lease:
        """Pin the longest prefix that is readable and for which HBM has space now, and start to load it.

        The call never raises for misses or lack of space, and never blocks unless ``wait_for_room_s`` is
        given.

        Args:
            keys: The keys of a sequence.
            deadline_s: Seconds until the pages are needed; below 0, the deadline has passed. Pages that would arrive
                later are missing, and a page that has not arrived by then ends the lease before it.
            into: The engine's slots to load into, if an engine owns HBM.
            exact: End the lease before the first page that has only lossy copies left, or that was computed
                over such a page.
            wait_for_room_s: If HBM is full of pages that are being saved, block up to this long until enough
                space is free. The call returns earlier once no copy in flight can free space (all other pages
                are leased or owned by callers), and never later than ``deadline_s``. Waiting calls are served
                in order. No effect with engine-owned HBM.

        Returns:
            A lease over the prefix. ``wait`` for it before reading, and ``release`` it.

        Raises:
            ValueError: ``into`` does not name one slot per key, or ``wait_for_room_s`` is negative or infinite.
            TypeError: ``exact`` is not True or False.
        """
        self._pump.advance()
        require_flag("exact", exact)
        room_s = seconds_at_most("wait_for_room_s", wait_for_room_s)
        if deadline_s is not None:
            require_time("deadline_s", deadline_s)
        require_key_list(keys)
        self._leases.take_back()
        slots = self._slots.checked_into(keys, into)
        return self._leases.acquire(keys, deadline_s, slots, exact=exact, wait_for_room_s=room_s)

    # -- asking for moves ---------------------------------------------------------------------------------------

    def hint(self, hint: Hint) -> HintResult:
        """Tell the store what a scheduler expects. Never pins.

        ``wont_need`` and ``retain`` change the eviction order at once; ``will_need`` waits for an attached prefetcher.

        Raises:
            TypeError: ``hint`` is not a Hint.
        """
        self._pump.advance()
        _require_hints(hint)
        with self._lock, self._guard:
            result = self._directory.hints.apply(hint, monotonic())
        while self._directory.hints.pending:
            with self._lock, self._guard:
                self._directory.hints.advance(BATCH_PAGES)
        self._pump.notify()
        self._pump.hinted.bump()
        self.metrics.hinted(result.value)
        return result

    def take_hints(self, timeout_s: float = 0.0) -> list[Hint]:
        """Return the waiting hints, the latest of each request. The first call attaches a prefetcher.

        The call waits up to ``timeout_s`` for a hint. Meanwhile a store opened with ``pump=False`` makes
        progress.
        """
        self._pump.require_open()
        deadline = monotonic() + seconds_to_wait("timeout_s", timeout_s)
        found: list[Hint] = []
        for _ in self._pump.until(deadline, self._pump.hinted):
            with self._lock, self._guard:
                found = self._directory.hints.take()
            if found:
                break
        return found

    def reject_hints(self) -> None:
        """Detach the prefetcher: ``will_need`` hints in force end, and new ones are rejected.

        Copies in flight continue. The next ``take_hints`` attaches a prefetcher again.
        """
        self._pump.advance()
        with self._lock, self._guard:
            self._directory.hints.detach()
        self._pump.notify()

    def staying(self) -> list[PageKey]:
        """Return pages in HBM that no promotion may displace: leased ones, and those that a retain hint keeps.

        The list is a snapshot without duplicates, in no particular order, and includes pages in flight to
        HBM.
        """
        self._pump.advance()
        with self._lock, self._guard:
            named = metrics.held_or_retained(self._directory)
        found: list[PageKey] = []
        for start in range(0, len(named), _LOOKED_UP):
            with self._lock, self._guard:
                found += metrics.of_hbm(self._directory, named[start : start + _LOOKED_UP])
        return found

    def promote(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint] = ()) -> Promoted:
        """Start to copy up to 32 pages to ``tier`` from the tier below it, for a ``will_need`` hint.

        The call starts the longest prefix of ``keys`` that can start now. It stops at the first page that is
        not readable in the next lower tier, or for which there is no space: neither a free slot nor the slot
        of a saved page that no hint keeps. Until the hint ends, promoted pages are evicted after other pages,
        but they are not pinned. Nothing starts while a lease waits for pages from the tier below, or if the
        hint is no longer in force. Once a call that withdraws or replaces the hint has returned, no copy
        starts for the hint.

        Args:
            hint: The hint, as ``take_hints`` returned it.
            keys: The pages, in order.
            tier: The tier to copy them to.
            over: Hints whose pages may be displaced, those of the last one first.

        Raises:
            ValueError: Pages cannot be promoted to ``tier``, or there are more than 32.
        """
        self._pump.advance()
        _require_hints(hint, *over)
        require_key_list(keys)
        tables = self._directory.residency.tables
        above = [t for t in tables if self._directory.promotions.sources(t)]
        require_member("promote to", tier, above)
        if len(keys) > BATCH_PAGES:
            raise ValueError(f"promote takes at most {BATCH_PAGES} pages, got {len(keys)} pages")
        with self._lock, self._guard:
            found = self._directory.promote(hint, keys, tier, over, monotonic())
            self._pump.submit()
        return found

    def demote(self, keys: Sequence[PageKey], tier: Tier) -> int:
        """Send pages down to ``tier`` in the background, and drop upper copies once unpinned.

        Missing keys are skipped. A memory-only page goes to HOST at most; without HOST it stays where it is.

        Returns:
            The number of pages accepted.

        Raises:
            ValueError: The tier is not below HBM, or not configured.
        """
        self._pump.advance()
        require_key_list(keys)
        below = [t for t in self._directory.residency.tables if t > Tier.HBM]
        require_member("demote to", tier, below, *([] if below else ["this store has no tier below HBM"]))
        accepted = 0
        for chunk in _chunks(keys):
            with self._lock, self._guard:
                accepted += self._directory.demote(chunk, tier)
                self._pump.step()
        return accepted

    def evict(self, keys: Sequence[PageKey], tier: Tier | None = None) -> int:
        """Drop copies without saving them, in one tier or in all.

        The pages cannot be matched from now on. Leased ones are dropped when released; records are gone from disk after
        ``flush``. A tier that is not configured holds nothing.

        Returns:
            The number of pages that had a copy.

        Raises:
            ValueError: ``tier`` is not a tier.
        """
        self._pump.advance()
        require_key_list(keys)
        if tier is not None:
            require_member("evict from", tier, list(Tier), "or None for all")
        return self._evict(keys, [t for t in self._directory.residency.tables if tier is None or t == tier])

    def clear(self) -> int:
        """Forget every page in every tier, and return the number of pages that some tier had.

        Once the call has returned, no page put before it can be matched. Records on disk are gone, as with
        ``evict``, once ``flush`` or ``flush_evictions`` has returned. A page put during the call may be
        forgotten too. A page put after it is kept as usual.

        A lease keeps the pages that it covers, and their bytes, until its release, but no other caller finds
        them. If the store owns HBM, a lease ends before its first page that is still in flight. Slots whose
        ``after`` has not happened stay in use until then. If an engine owns HBM, pages that were put and have
        not reached a tier are given up: ``poll`` reports their slots once ``after`` has happened and no copy
        reads them. A load that has begun still fills the engine's slot. Hints stay in force, because the
        pages that they name may be put again.

        The call holds the lock for one batch of pages at a time.

        Raises:
            StoreClosed: After ``close``.
        """
        self._pump.advance()
        with self._lock, self._guard:
            keys = self._directory.begin_clear()
        return self._evict(list(dict.fromkeys(keys)), list(self._directory.residency.tables))

    def _evict(self, keys: Sequence[PageKey], tiers: Sequence[Tier]) -> int:
        """Drop the copies of these pages in ``tiers``, last pages first, one batch per hold of the lock."""
        dropped = 0
        for chunk in reversed(_chunks(keys)):
            with self._lock, self._guard:
                dropped += self._directory.evict(chunk, tiers)
                self._pump.step()
        self._pump.notify()
        return dropped

    def flush(self) -> FlushResult:
        """Wait until every page put before the call, and every erase before it, is durable or counted as failed.

        This includes an engine's pages that are still being copied out of its slots. The call gives up after
        10 s without progress, that is, if no page of this call has settled and the disk has completed no
        write. Then ``stats()["nvme"]["state"]`` is not "ok" until the hanging write ends.

        Returns:
            The number of durable, failed and pending pages, and of evicted pages that a restart could still
            bring back.
        """
        self._pump.require_open()
        return Flush.of_unsaved(self._pump).result()

    def flush_evictions(self) -> int:
        """Wait until every ``evict`` before the call is durable, so that no restart brings its pages back.

        The call writes no page. It gives up like ``flush``.

        Returns:
            The number of evicted pages that a restart now could bring back. 0 unless the disk fails or hangs.
        """
        self._pump.require_open()
        return Flush(self._pump, Ticket()).result().pending_erases

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight, queued or waiting for an event.

        Return False if the wait timed out.
        """
        self._pump.require_open()
        self._leases.take_back()
        return self._pump.wait_idle(monotonic() + seconds_to_wait("timeout_s", timeout_s))

    # -- progress and reports -----------------------------------------------------------------------------------

    async def export_pages(
        self, keys: Sequence[PageKey], path: str | PathLike[str], progress: Shown | None = None
    ) -> Exported:
        """Write those pages of ``keys`` that some tier has to one portable file (docs/archive.md).

        Pages on NVMe are written in their stored form, encoded or not. The call affects the store only as
        ``acquire`` does. If it is cancelled or fails, it leaves no new file, and an existing file at ``path``
        is unchanged. Memory-only pages are never written to a file. If an engine owns HBM, only pages on disk
        are exported: call ``flush`` first.

        Args:
            keys: The pages.
            path: The file to write.
            progress: Called with the number of pages done and the total.

        Raises:
            ArchiveError: No page is available, or another process is writing this file.
            OSError: The file cannot be written, for example because the disk is full.
        """
        self._pump.require_open()
        require_key_list(keys)
        source = LiveSource(self._pump, self._description(), self._parts.pool, self._parts.nvme, self.acquire)
        return await write_archive(Path(path), keys, source, progress)

    async def import_pages(self, path: str | PathLike[str], progress: Shown | None = None) -> Imported:
        """Import those pages of an archive that are intact, fit, and have their parents in the store.

        They go to the lowest tier; ``flush`` makes them durable. Pages that the store already has are not
        changed. If the call is cancelled, the pages imported so far stay in the store.

        Raises:
            ConfigError: An engine owns HBM.
            ArchiveError: The file is damaged outside its pages, or its pages do not suit this store. Nothing was
                changed.
        """
        self._pump.require_open()
        if self._parts.pool is None:
            raise ConfigError(
                "import_pages needs hbm.owner: store, but the engine owns HBM here; "
                "close the store and use `tierstore import`"
            )
        sink = LiveSink(self._pump, self._description(), self._parts.pool, self._slots)
        return await read_archive(Path(path), sink, progress)

    def _description(self) -> Description:
        return Description(self._parts.layout, loss_class(self._config))

    def poll(self) -> list[int]:
        """Process finished work, and call the callbacks of ``watch``.

        Returns:
            Engine-owned slots that no copy uses any more.
        """
        self._pump.advance()
        with self._lock, self._guard:
            self._pump.step()
        self._pump.watches.tell()
        with self._lock, self._guard:
            return self._directory.take_reusable()

    def watch(self, callback: Callable[[PageChange], object]) -> Watch:
        """Call ``callback`` for every page that enters or leaves a tier from now on.

        All tiers are watched, except HBM that an engine owns. A page enters a tier when its copy there
        becomes readable, and leaves the tier when the copy no longer is. A page that moves down enters the
        lower tier before it leaves the upper one. Pages that tiers already hold are not reported: begin to
        watch first, then call ``match``.

        Changes are reported one by one and in order, by one thread at a time and never under the store's
        lock, so the callback may call the store. It is called by the store's thread, and by ``poll`` before
        that returns. A store opened with ``pump=False`` has no such thread: ``poll`` reports everything that
        happened since the last ``poll``. If the callback raises, ``poll`` raises the same exception, and no
        slot is lost; on the store's thread the exception is counted (``tierstore_faults_total``) and logged.
        In both cases the change counts as reported, and the next one follows. Up to 1,048,576 changes may
        wait to be reported. Further ones are only counted, in ``lost`` of the result. The watch ends with
        ``end`` of the result, or when the store is closed.

        Raises:
            TypeError: ``callback`` cannot be called.
            StoreClosed: After ``close``.
        """
        self._pump.require_open()
        if not callable(callback):
            raise TypeError(f"callback must be callable, got {callback!r:.60}")
        with self._lock, self._guard:
            return self._pump.watches.add(callback)

    def register(self, *pages: EnginePages) -> None:
        """Register the engine's tensors, one EnginePages per KV group.

        Raises:
            ConfigError: The store owns HBM, or the tensors do not fit.
        """
        self._pump.advance()
        register_pages(self._config, self._parts, pages, self._wake)

    def check(self) -> None:
        """Check every invariant of the store. O(pages), and usable in production.

        Raises:
            AssertionError: An invariant does not hold; the message names it.
        """
        self._pump.advance()
        with self._lock, self._guard:
            invariants.check(self._directory, self._pump.events)

    def explain(self, keys: Sequence[PageKey]) -> list[dict[str, object]]:
        """Return for each key the states of its copies by tier, its parent, and why it was last evicted."""
        self._pump.require_open()
        require_key_list(keys)
        with self._lock, self._guard:
            return [metrics.explain_page(self._directory, key) for key in keys]

    def stats(self) -> dict[str, object]:
        """Return a snapshot of the effective configuration, sizes, occupancy, counters and rates."""
        self._pump.require_open()
        with self._lock, self._guard:
            return metrics.stats(self._config, self._parts)

    def rates(self) -> dict[tuple[Tier, Tier], float]:
        """Return the measured throughput of each edge, in bytes per second, by source and destination.

        It is a moving average over the edge's transfers, as in ``stats()["bytes_per_s"]``. Edges without a
        finished transfer are left out. Like ``stats`` the call only looks.

        Raises:
            StoreClosed: After ``close``.
        """
        self._pump.require_open()
        with self._lock, self._guard:
            return dict(self._directory.transfers.rates)

    def traffic(self) -> dict[tuple[Tier, Tier], Traffic]:
        """Return the numbers of pages in flight and arrived for each edge, by source and destination.

        Edges that have carried no page yet are left out. Like ``stats`` the call only looks.

        Raises:
            StoreClosed: After ``close``.
        """
        self._pump.require_open()
        with self._lock, self._guard:
            return self._directory.transfers.traffic()

    def arriving(self, keys: Sequence[PageKey], tier: Tier) -> int:
        """Return how many of these pages are in flight to ``tier`` and cannot be read there yet.

        The result is 0 for a tier that is not configured. Like ``match`` the call only looks.

        Raises:
            ValueError: ``tier`` is not a tier.
            StoreClosed: After ``close``.
        """
        self._pump.require_open()
        require_key_list(keys)
        require_member("look for pages on their way to", tier, list(Tier))
        with self._lock, self._guard:
            return self._directory.residency.arriving(keys, tier)

    def idle(self) -> bool:
        """Return whether no page moves and none will move without another call.

        Like ``stats`` the call only looks.

        That is: no copy is in flight or queued, no action waits for an event, and no page waits for a timed
        spill.

        Raises:
            StoreClosed: After ``close``.
        """
        self._pump.require_open()
        with self._lock, self._guard:
            return self._pump.settled and self._directory.writeback.next_spill is None

    def close(self, timeout_s: float = 30) -> None:
        """Save pages that only HBM or HOST hold, wait for copies, fail the rest, and release the directory.

        A second call has no effect. No page is promoted once the call has begun. An attached prefetcher ends
        by itself; it may be closed before or after the store. In a forked child the call does nothing,
        because the store belongs to the parent.
        """
        timeout_s = seconds_to_wait("timeout_s", timeout_s)
        if self._pump.inherited:
            return
        with self._closing:
            if not self._pump.closed:
                self._close(timeout_s)

    def _close(self, timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        # An interrupted store saves nothing, because its pages in memory may be wrong.
        with suppress(StoreClosed):
            with self._pump.lock, self._pump.guard:
                self._directory.hints.close()
            Flush.of_unsaved(self._pump)
            self._pump.wait_idle(deadline)
        self._pump.stop(max(0.0, deadline - monotonic()))
        if not self._pump.mover.close(max(0.0, deadline - monotonic())):
            _log.warning("a copy or I/O thread did not end within %s s and was left behind", timeout_s)
        elif self._parts.arena is not None:
            self._parts.arena.close()

    def __enter__(self) -> TierStore:
        self._pump.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
