"""``TierStore``, the public API of the library: one store per process.

A store combines a directory, which decides where pages go, with a mover, which copies their bytes. One lock
protects both. This module implements the public calls, for HBM that the store owns and for HBM that an
inference engine owns. A call that moves many pages releases the lock after each batch of them.
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
    exact_size,
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
    from tierstore.host.arena import HostArena
    from tierstore.keys import Extra, TokenIds
    from tierstore.mover import SyncMark
    from tierstore.page import PageSpec
    from tierstore.types import Event, HintResult, PageChange, PageKey, Promoted, TierDescription, Traffic
    from tierstore.watch import Watch


class OwnSlots:
    """HBM slots in memory that the store itself allocated (``hbm.owner: store``)."""

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

        Pages are put in chunks, and the lock is released between chunks. With an exact lease, fewer slots
        than keys may be returned.
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
        """Raise ConfigError, because the store owns HBM and has no engine slots to give back."""
        raise ConfigError("withdraw needs hbm.owner: engine, but the store owns HBM here")

    def checked_into(self, keys: Sequence[PageKey], into: Sequence[int] | None) -> None:
        """Raise ConfigError if ``into`` is given, because the store chooses the slots of a lease itself."""
        if into is not None:
            raise ConfigError("acquire(into=...) needs hbm.owner: engine, but the store owns HBM here")

    def _try_allocate(self, n: int) -> list[int]:
        """Return ``n`` slots, or an empty list if fewer are available.

        A failed attempt evicts pages. If that freed any slots, try again at once, a limited number of times.
        """
        for _ in range(2 + n // BATCH_PAGES):
            slots, made_room = self._take(n)
            if slots or not made_room:
                return slots
        return []

    def _take(self, n: int) -> tuple[list[int], bool]:
        """Take ``n`` slots in chunks. If fewer are available, give back those taken and try to free more.

        Returns:
            ``(slots, made_room)``: the ``n`` slots and False, or, if fewer were available, an empty list and
            whether more slots are available now than before the attempt to free some.
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
                f"cannot allocate {n} pages of {exact_size(nbytes)}: HBM has only {slots} slots; allocate fewer pages "
                "at a time, or raise hbm.capacity"
            )


class EngineSlots:
    """HBM slots in an engine's own KV cache (``hbm.owner: engine``).

    The store copies pages out of these slots and into them, but the engine allocates and frees them.
    """

    def __init__(self, pump: Pump) -> None:
        self._pump = pump
        self._directory = pump.directory

    def allocate(self, n: int, timeout_s: float) -> list[int]:
        """Raise ConfigError, because the engine allocates its slots itself."""
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
        """See ``TierStore.put``. The pages are copied out of their slots; the engine still owns the slots."""
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
        """Raise ConfigError, because the engine frees its slots itself."""
        raise _not_ours("free")

    def checked_into(self, keys: Sequence[PageKey], into: Sequence[int] | None) -> list[int]:
        """Return the slots to load a lease's pages into, as Python ints.

        Raises:
            ValueError: ``into`` does not name one slot per key.
            ConfigError: The engine has not registered its tensors.
        """
        if into is None or len(into) != len(keys):
            raise ValueError(
                "into must name one slot per key when an engine owns HBM, got "
                f"{'None' if into is None else f'{len(into)} slots'} for {len(keys)} keys"
            )
        numbers = slot_numbers(into)
        self._require_registered()
        return numbers

    def _require_registered(self) -> None:
        if not self._directory.outgoing.num_slots:
            raise ConfigError("the engine's pages are not registered; call register(EnginePages(...)) first")


def _before(keys: Sequence[PageKey], parent: PageKey | None) -> tuple[PageKey | None, ...]:
    """Return the parent of each key. The keys must be consecutive pages of a sequence, right after ``parent``."""
    return (parent, *keys[:-1]) if keys else ()


def _not_ours(verb: str) -> ConfigError:
    return ConfigError(f"{verb} needs hbm.owner: store, but the engine owns HBM here")


_LOOKED_UP = 1024
"""Number of keys that ``TierStore.staying`` looks up before it releases the lock."""


def _require_hints(*hints: object) -> None:
    strange = next((hint for hint in hints if not isinstance(hint, Hint)), None)
    if strange is not None:
        raise TypeError(f"a hint must be a Hint, got {strange!r:.60}")


def _chunks(keys: Sequence[PageKey]) -> list[Sequence[PageKey]]:
    """Split keys into batches. A batch is small enough to be processed without releasing the lock."""
    return [keys[i : i + BATCH_PAGES] for i in range(0, len(keys), BATCH_PAGES)]


_log = logging.getLogger("tierstore.saving")

_FLUSH_STALL_S = 10.0


class Flush:
    """A running flush: counts the pages that it writes to disk, and waits until they are durable.

    It also waits for all erases that were requested before it. After 10 s without progress it gives up for
    good. Progress means that a page of the flush was written or failed, or that the disk completed any write
    or erase; a batch of writes makes progress with each single write.
    """

    def __init__(self, pump: Pump, ticket: Ticket) -> None:
        """Prepare to wait for the pages of ``ticket``, or only for erases if the ticket is empty."""
        self.ticket = ticket
        """The counts of this flush's pages."""
        self.over = False
        """Whether the flush has given up."""
        self._pump = pump
        self._last, self._since = self._moved(), monotonic()

    @classmethod
    def of_unsaved(cls, pump: Pump) -> Flush:
        """Start a flush of all readable pages that are not on disk, even those that admission would skip."""
        with pump.lock, pump.guard:
            pump.directory.admission.insist_on_all()
        try:
            return cls(pump, _send_down(pump))
        finally:
            with pump.lock, pump.guard:
                pump.directory.admission.insisted()

    def result(self) -> FlushResult:
        """Wait until no page is pending and all prior erases are durable, or the flush gives up. Return the counts."""
        self._until(lambda: self.ticket.open == 0)
        erases, synced = self._until_durable()
        arrived = self.ticket.arrived if synced else 0
        pending = self.ticket.open + self.ticket.arrived - arrived
        return FlushResult(self.ticket.found + arrived, self.ticket.failed, pending, erases)

    def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds`` returns True. Return early if the flush gives up."""
        for _ in self._pump.until(None):
            if holds() or self.over:
                return
            moved = self._moved()
            if moved != self._last:
                self._last, self._since = moved, monotonic()
            elif monotonic() - self._since > _FLUSH_STALL_S:
                self.over = True

    def _until_durable(self) -> tuple[int, bool]:
        """Wait until all writes and erases are durable, or give up.

        Returns:
            The number of erases that are not durable, and whether all writes are durable.
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
    """A tiered KV cache: pages in HBM, host memory and NVMe, found by key.

    All methods are thread-safe, and no method blocks while it holds the store's lock. A cache miss is
    reported in the result and never raises an exception. In every method, a number of the wrong type raises
    TypeError, and a number out of range raises ValueError. After ``close``, every method except ``close``
    raises StoreClosed.
    """

    def __init__(self, config: StoreConfig, parts: Parts, wakeup: Wakeup, *, pump: bool) -> None:
        """Create a store from parts that are already open, and take ownership of them.

        For internal use: call ``TierStore.open`` instead.
        """
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
        self._closing = RLock()  # a signal handler may call ``close`` while ``close`` is running
        self._ended = False  # whether a ``close`` ran to its end; if not, the next call continues it
        if pump:
            self._pump.start()

    @classmethod
    def open(
        cls, config: StoreConfig, spec: PageSpec | Sequence[PageSpec], *, pump: bool = True, name: str = ""
    ) -> TierStore:
        """Open a store with the tiers that ``config`` names.

        Args:
            config: The configuration, as returned by ``load_config``.
            spec: The geometry of a page. If each page contains several KV groups, a sequence of PageSpecs,
                one per group.
            pump: Whether the store runs a thread that processes finished copies and starts new ones. With
                False, this happens only during calls, so the caller must call ``poll`` in each engine step.
                Methods that are documented as read-only do neither.
            name: Display name of the model, shown by `tierstore inspect`. It is not part of any key.

        Raises:
            ConfigError: ``config`` or ``spec`` is invalid, or they do not suit each other or this machine.
                Nothing was changed.
            TypeError: ``pump`` is not True or False, or ``name`` is not a string. Nothing was changed.
        """
        if not isinstance(config, StoreConfig):
            raise ConfigError(
                f"config must be a StoreConfig, got {type(config).__name__}; load_config returns a StoreConfig"
            )
        require_flag("pump", pump)
        if not isinstance(name, str):
            raise TypeError(f"name must be a string, got {name!r:.60}")
        wakeup = Wakeup()
        try:
            layout = PageLayout.of(spec)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        try:
            parts = assemble(config, layout, wakeup.bump, name=name)
            try:
                return cls(config, parts, wakeup, pump=pump)
            except BaseException:
                parts.close()
                raise
        except RuntimeError as error:  # the system cannot provide a thread or memory
            raise ConfigError(
                f"the store cannot be opened, because a thread could not be started or memory ran out: {error}"
            ) from error

    # -- pages and keys -----------------------------------------------------------------------------------------

    def keys(self, token_ids: TokenIds, salt: bytes = b"", extra: Sequence[Extra] = ()) -> list[PageKey]:
        """Return the keys of the full pages of a sequence, in order. Read-only.

        A partial last page has no key. Equal arguments give equal keys in every process, provided that the
        stores have equal PageSpecs and the same loss class (see the glossary).

        Args:
            token_ids: The tokens of the sequence, from its start: a sequence of integers, or a 1-D integer
                array or tensor in host memory.
            salt: Bytes that identify a tenant. Different salts give different keys.
            extra: Further values that K and V depend on, such as the names of adapters and digests of images.
                A str, bytes or int applies to the whole sequence. A pair ``(token_offset, bytes)`` applies
                from the page that contains the offset.
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
        """The HBM pages as a tensor view, ``[num_slots, num_layers, planes, page_size, num_kv_heads, head_dim]``.

        All dimensions after the first are those of ``PageSpec.shape``; ``planes`` is 2 (K and V) for "mha".
        With several KV groups, ``pages[slot]`` is a tuple of tensors, one per group.

        Raises:
            ConfigError: An engine owns HBM.
        """
        self._pump.require_open()
        if self._parts.pool is None:
            raise ConfigError("TierStore.pages needs hbm.owner: store, but the engine owns HBM here")
        return self._parts.pool.pages

    def allocate(self, n: int, timeout_s: float = 1.0) -> list[int]:
        """Return ``n`` HBM slots with undefined contents.

        The caller owns the slots until it passes them to ``put`` or ``free``.

        Free slots are taken first. Then pages that are also readable in a lower tier are evicted from HBM. If
        that is not enough, the store copies further pages to lower tiers, and waits up to ``timeout_s``
        seconds for their slots.

        Raises:
            CapacityError: ``n`` exceeds the number of slots in HBM, or the call timed out. No slot was taken.
            TypeError: ``n`` is not an integer, or ``timeout_s`` is not a number.
            ValueError: An argument is negative, or ``timeout_s`` is NaN.
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
        """Hand filled pages over to the store.

        If the store owns HBM, it takes over the slots, and the pages can be matched as soon as the call
        returns. If a key is already readable in HBM, the existing slot is returned, and the caller's slot is
        freed once ``after`` has completed. If another caller is still writing the existing copy, the result
        depends on ``lease``. With a lease, the existing copy is kept, and the lease's ``wait`` and ``ready``
        wait until it is written. Without a lease, the caller's slot replaces it and is returned.

        If an engine owns HBM, the pages are copied out of the slots once ``after`` has completed. They can be
        matched when they have arrived in a lower tier. The given slots are returned, and ``poll`` reports
        when the engine may reuse them.

        Args:
            keys: The keys; ``keys[i]`` is the parent of ``keys[i + 1]``, unless ``parents`` is given.
            slots: The slot of each page.
            after: An event that completes once the slots are written. None stands for the work launched so
                far on the caller's current CUDA stream; without CUDA, the slots must be written already.
            lease: A lease that keeps the pages pinned until it is released. An exact lease covers only exact
                pages. If a key has an inexact copy in memory that cannot be dropped, the put stops before
                this key: fewer slots are returned, and the caller still owns the remaining ones.
            memory_only: Never write these pages to NVMe; drop them if memory is needed. Pages that some tier
                already has are not affected. The restriction ends when the page, or a page that follows it in
                a sequence, is put without ``memory_only``.
            parent: The page before ``keys[0]``. None: the last page of ``lease``, or the start of a sequence
                if there is no lease.
            parents: The page before each key, if the keys are not a chain. Allowed only if an engine owns HBM.

        Returns:
            The slot of each key.

        Raises:
            ValueError: The lengths differ, or a key is not a page key. Nothing was changed.
            LeaseError: A slot is not owned by the caller, or ``lease`` was released or belongs to another
                store. Nothing was changed.
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
        """Take back engine slots that were passed to ``put``.

        If a page is only waiting for space in a lower tier, the store gives it up. Its slot is free at once,
        and ``poll`` does not report it.

        Returns:
            The slots that are not free yet: a copy is reading them, or will read them once their ``after``
                has completed. They are free when ``poll`` reports them.

        Raises:
            ConfigError: The store owns HBM.
        """
        self._pump.advance()
        return self._slots.withdraw(slots)

    def free(self, slots: Sequence[int], after: Event | None = None) -> None:
        """Give slots from ``allocate`` back to the store.

        They may be allocated again once ``after`` has completed. None has the same meaning as in ``put``.

        Raises:
            LeaseError: A slot is not owned by the caller.
            ConfigError: An engine owns HBM.
        """
        self._pump.advance()
        require_event(after)
        self._slots.free(slots, self._parts.device.last_use(after))

    # -- lookup and leases --------------------------------------------------------------------------------------

    @property
    def tiers(self) -> Mapping[Tier, TierDescription]:
        """The tiers of the store with their descriptions, fastest first. HBM is left out if an engine owns it.

        A description says whether the tier is memory, whether its pages survive a restart, and whether they
        may differ from the pages that were put.
        """
        return MappingProxyType(self._directory.hierarchy.tiers)

    def match(self, keys: Sequence[PageKey], *, exact: bool = False) -> Match:
        """Return the longest readable prefix of ``keys``.

        The call is read-only: it pins nothing and does not change the order of eviction.

        Args:
            keys: The keys of a sequence.
            exact: Stop before the first page that is not exact (see the glossary).
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

    def has_prefix(self, key: PageKey) -> bool:
        """Return whether the page and all pages before it in its sequence are stored, or are being stored.

        Read-only. Takes the same time for a sequence of any length, unlike ``match``. Only pages whose parents were
        passed to ``put`` count as pages before it. The result may be False for a short time after pages were lost
        or put again, even if all pages are stored.

        Raises:
            StoreClosed: The store is closed.
        """
        self._pump.require_open()
        require_key_list([key])
        with self._lock, self._guard:
            return self._directory.residency.has_prefix(key)

    def locate(self, keys: Sequence[PageKey]) -> list[Tier | None]:
        """Return the fastest tier in which each page is readable, or None for a missing page. Read-only.

        Unlike ``match``, the call does not stop at a missing page.

        Args:
            keys: Any keys. They need not belong to one sequence.

        Raises:
            StoreClosed: The store is closed.
        """
        self._pump.require_open()
        require_key_list(keys)
        with self._lock, self._guard:
            return self._directory.residency.locate(keys)

    def acquire(
        self,
        keys: Sequence[PageKey],
        deadline_s: float | None = None,
        into: Sequence[int] | None = None,
        *,
        exact: bool = False,
        wait_for_room_s: float = 0.0,
        keep_in: Tier = Tier.HBM,
    ) -> Lease:
        """Pin the longest prefix of ``keys`` that is readable and fits into HBM now, and start to load it.

        Pages that are not in HBM yet are copied there in the background. Misses and lack of space never raise
        an exception. The call blocks only if ``wait_for_room_s`` is given.

        Args:
            keys: The keys of a sequence.
            deadline_s: Seconds until the pages are needed; negative if that time has passed. Pages that are
                expected later count as missing, and a page that has not arrived by then truncates the lease.
            into: The slots to load into, one per key, if an engine owns HBM.
            exact: Stop before the first page that is not exact (see the glossary).
            wait_for_room_s: Longest time to block, in seconds, while HBM is full of pages that are being
                written to a lower tier. The call returns earlier once enough space is free, or once no copy
                in flight can free any because all other pages are leased or owned by callers. It never blocks
                beyond ``deadline_s``. Waiting calls are served in order of arrival. No effect if an engine
                owns HBM.
            keep_in: HBM, or HOST to pin pages where they are in host memory, for attention that streams them
                from there (``tierstore.gpu.attention.streamed``). The lease then covers the longest prefix
                that is readable in HOST now, its ``slots`` are slots of ``host_memory``, nothing is loaded, and
                no hits or misses are counted. ``demote(even_if_saved=True)`` moves pages from HBM to HOST.

        Returns:
            A lease on the prefix. Call its ``wait`` before reading, and ``release`` afterwards.

        Raises:
            ValueError: An engine owns HBM and ``into`` does not name one slot per key, ``wait_for_room_s``
                is negative or infinite, ``keep_in`` is neither HBM nor a HOST tier of this store, or
                ``deadline_s`` is given with HOST.
            TypeError: ``exact`` is not True or False.
            ConfigError: ``into`` is given, but the store owns HBM; or an engine owns HBM and has not
                registered its tensors, or ``keep_in`` is HOST.
            LeaseError: A slot in ``into`` does not exist, is given twice, or is still being copied.
        """
        self._pump.advance()
        require_flag("exact", exact)
        room_s = seconds_at_most("wait_for_room_s", wait_for_room_s)
        if deadline_s is not None:
            require_time("deadline_s", deadline_s)
        require_key_list(keys)
        self._leases.take_back()
        if keep_in is not Tier.HBM:
            self._require_kept(keep_in, deadline_s)
        slots = self._slots.checked_into(keys, into)
        return self._leases.acquire(
            keys, deadline_s, slots, exact=exact, wait_for_room_s=room_s, tier=keep_in
        )

    @property
    def host_memory(self) -> HostArena | None:
        """The memory of the HOST tier, or None without one.

        Read a slot only while a lease with ``keep_in=Tier.HOST`` covers it, and never write to it.
        """
        self._pump.require_open()
        return self._parts.arena

    def _require_kept(self, tier: Tier, deadline_s: float | None) -> None:
        """Raise an exception unless pages can be pinned in ``tier`` with this deadline."""
        in_memory = [Tier.HBM, *(t for t in self._directory.residency.tables if t is Tier.HOST)]
        require_member("keep pages in", tier, in_memory)
        if self._parts.pool is None:
            raise ConfigError("acquire(keep_in=HOST) needs hbm.owner: store, but the engine owns HBM here")
        if deadline_s is not None:
            raise ValueError(
                "deadline_s has no effect with keep_in=HOST: pages are never loaded for such a lease"
            )

    # -- hints and moves -----------------------------------------------------------------------------------------

    def hint(self, hint: Hint) -> HintResult:
        """Tell the store which pages a scheduler expects to use or not to use. A hint never pins pages.

        ``wont_need`` and ``retain`` change the eviction order at once. ``will_need`` is queued for the attached
        prefetcher, or rejected if none is attached.

        Returns:
            Whether the hint was applied, queued or ignored; see HintResult.

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
        """Return the hints queued for a prefetcher, oldest first, and clear the queue.

        The queue contains only the latest hint of each request. The first call attaches a prefetcher: from
        then on, ``will_need`` hints are accepted.

        If no hint is queued, the call waits up to ``timeout_s`` seconds for one. A store opened with
        ``pump=False`` processes finished copies and starts new ones during the wait.
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
        """Detach the prefetcher: active ``will_need`` hints end, and new ones are rejected.

        Copies in flight continue. The next ``take_hints`` attaches a prefetcher again.
        """
        self._pump.advance()
        with self._lock, self._guard:
            self._directory.hints.detach()
        self._pump.notify()

    def staying(self) -> list[PageKey]:
        """Return the pages in HBM that no promotion may displace, because they are leased or retained.

        The list is a snapshot without duplicates, in no particular order. It includes pages that are still in
        flight to HBM.
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
        """Start copying up to 32 pages for a ``will_need`` hint into ``tier`` from the next lower tier.

        Promotions start for the longest prefix of ``keys`` that can start now. The prefix ends at the first
        page that is not readable in the next lower tier or for which no slot is available. A slot is
        available if it is free, or if its page is saved in a lower tier and no hint keeps it. Until the hint
        ends, promoted pages are evicted after other pages, but they are not pinned. Nothing starts while a
        lease waits for pages from the lower tier, or if the hint is no longer active. Once a call that
        withdraws or replaces the hint has returned, no further copy starts for this hint.

        Args:
            hint: The hint, as returned by ``take_hints``.
            keys: The keys of the pages to copy, in the order of the sequence.
            tier: The destination.
            over: Hints whose promoted pages may lose their slots to this hint. Pages of the last hint are
                displaced first.

        Raises:
            ValueError: Pages cannot be promoted to ``tier``, or there are more than 32 keys.
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

    def demote(self, keys: Sequence[PageKey], tier: Tier, *, even_if_saved: bool = False) -> int:
        """Move pages down to ``tier`` in the background.

        Once a page has arrived, its copies in higher tiers are dropped as soon as they are unpinned. Keys
        that no tier has are skipped. A memory-only page is moved no lower than HOST, or stays where it is if
        there is no HOST tier.

        Args:
            keys: The pages.
            tier: The destination.
            even_if_saved: Whether pages must get a copy in ``tier`` itself. If not, a page that is already in
                a lower tier is only dropped from the tiers above. A page that is being copied to a lower tier at
                the moment may have no copy in ``tier`` afterwards; call again in this case.

        Returns:
            The number of pages that some tier has, and that will be moved unless a copy fails.

        Raises:
            ValueError: The tier is not below HBM, or is not configured.
            TypeError: ``even_if_saved`` is not True or False.
        """
        self._pump.advance()
        require_key_list(keys)
        require_flag("even_if_saved", even_if_saved)
        below = [t for t in self._directory.residency.tables if t > Tier.HBM]
        require_member("demote to", tier, below, *([] if below else ["this store has no tier below HBM"]))
        accepted = 0
        for chunk in _chunks(keys):
            with self._lock, self._guard:
                accepted += self._directory.demote(chunk, tier, even_if_saved=even_if_saved)
                self._pump.step()
        return accepted

    def evict(self, keys: Sequence[PageKey], tier: Tier | None = None) -> int:
        """Drop the copies of these pages without saving them, in one tier or in all tiers.

        The dropped copies can no longer be matched. The slots of leased copies are freed when the lease is
        released. Records are removed from disk by the time ``flush`` or ``flush_evictions`` returns. Evicting
        from a tier that is not configured has no effect.

        Returns:
            The number of pages that lost at least one copy.

        Raises:
            ValueError: ``tier`` is not a Tier.
        """
        self._pump.advance()
        require_key_list(keys)
        if tier is not None:
            require_member("evict from", tier, list(Tier), "or None for all")
        return self._evict(keys, [t for t in self._directory.residency.tables if tier is None or t == tier])

    def clear(self) -> int:
        """Evict every page from every tier, and return the number of pages that were in some tier.

        Once the call has returned, no page that was put before it can be matched. As with ``evict``, records
        are removed from disk by the time ``flush`` or ``flush_evictions`` returns. A page that is put during
        the call may be evicted too.

        A lease keeps its pages, and their contents, until it is released, but no other caller can find them.
        If the store owns HBM, a lease is truncated before its first page that is still in flight. Slots whose
        ``after`` has not completed remain in use until then. If an engine owns HBM, the store gives up pages
        that were put and have not reached a tier yet: ``poll`` reports their slots once ``after`` has
        completed and no copy reads them. A load that has started still fills the engine's slot. Hints remain
        active, because the pages that they name may be put again.

        The store's lock is released after each batch of pages.

        Raises:
            StoreClosed: The store is closed.
        """
        self._pump.advance()
        with self._lock, self._guard:
            keys = self._directory.begin_clear()
        return self._evict(list(dict.fromkeys(keys)), list(self._directory.residency.tables))

    def _evict(self, keys: Sequence[PageKey], tiers: Sequence[Tier]) -> int:
        """Drop the copies of these pages in ``tiers``, last pages first, in batches."""
        dropped = 0
        for chunk in reversed(_chunks(keys)):
            with self._lock, self._guard:
                dropped += self._directory.evict(chunk, tiers)
                self._pump.step()
        self._pump.notify()
        return dropped

    def flush(self) -> FlushResult:
        """Write all pages that were put before the call to disk, and wait until they are durable.

        The call also waits until earlier evictions are durable. Pages that are still being copied out of an
        engine's slots are included. The call gives up after 10 s without progress, that is, if in this time
        no page of the flush was written or failed and the disk completed no write or erase.
        ``stats()["nvme"]["state"]`` then differs from "ok" until the stuck write completes.

        Returns:
            The number of durable, failed and pending pages, and the number of evicted pages that a restart
                could bring back.
        """
        self._pump.require_open()
        return Flush.of_unsaved(self._pump).result()

    def flush_evictions(self) -> int:
        """Wait until every ``evict`` before the call is durable, so that no restart brings its pages back.

        The call writes no pages. It gives up under the same conditions as ``flush``.

        Returns:
            The number of evicted pages that a restart could bring back now. 0 unless the disk fails or hangs.
        """
        self._pump.require_open()
        return Flush(self._pump, Ticket()).result().pending_erases

    def drain(self, timeout_s: float) -> bool:
        """Wait until no copy is in flight or queued, and no action waits for an event.

        Leases that were garbage-collected without ``release`` are released first.

        Args:
            timeout_s: Longest time to wait, in seconds.

        Returns:
            False if the wait timed out.
        """
        self._pump.require_open()
        self._leases.take_back()
        return self._pump.wait_idle(monotonic() + seconds_to_wait("timeout_s", timeout_s))

    # -- progress and reports -----------------------------------------------------------------------------------

    async def export_pages(
        self, keys: Sequence[PageKey], path: str | PathLike[str], progress: Shown | None = None
    ) -> Exported:
        """Write pages to one portable file (docs/archive.md).

        Keys that no tier has are skipped. Pages on NVMe are exported in their stored form, encoded or not;
        other pages are loaded into HBM, as ``acquire`` does. Memory-only pages are never exported. If an
        engine owns HBM, only pages on disk are exported, so call ``flush`` first. If the call fails or is
        cancelled, it leaves no new file, and an existing file at ``path`` is not changed.

        Args:
            keys: The keys of the pages to export.
            path: The file to write.
            progress: Called with the number of pages processed so far and the total.

        Returns:
            The path, the number of exported pages and their sizes, and the skipped pages, each with a reason.

        Raises:
            ArchiveError: No page is available, or another process is writing this file.
            OSError: The file cannot be written, for example because the disk is full.
        """
        self._pump.require_open()
        require_key_list(keys)
        source = LiveSource(self._pump, self._description(), self._parts.pool, self._parts.nvme, self.acquire)
        return await write_archive(Path(path), keys, source, progress)

    async def import_pages(self, path: str | PathLike[str], progress: Shown | None = None) -> Imported:
        """Import the pages of an archive into the store.

        A page is skipped if it is damaged, if its parent is neither in the store nor imported before it, or
        if the store is full. Pages that the store already has are not changed. Imported pages are copied to
        the lowest tier; call ``flush`` to make them durable. If the call is cancelled, the pages imported so
        far stay in the store.

        Args:
            path: The archive.
            progress: Called with the number of pages processed so far and the total.

        Returns:
            The number of imported pages and of pages that the store already had, and the skipped pages.

        Raises:
            ConfigError: An engine owns HBM.
            ArchiveError: The file is damaged outside its pages, its pages have a different model, page size or
                loss class, or this store uses a lossy codec. Nothing was changed.
            OSError: The file cannot be read.
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
        """Process finished copies, start new ones, and call the callbacks of ``watch``.

        Returns:
            Engine slots that the store no longer reads or writes, each reported once. Empty if the store owns
                HBM.
        """
        self._pump.advance()
        with self._lock, self._guard:
            self._pump.step()
        self._pump.watches.tell()
        with self._lock, self._guard:
            return self._directory.take_reusable()

    def watch(self, callback: Callable[[PageChange], object]) -> Watch:
        """From now on, call ``callback`` for every page that enters or leaves a tier.

        All tiers are watched, except HBM that an engine owns. A page enters a tier when its copy there
        becomes readable, and leaves the tier when that copy is no longer readable. A page that is moved down
        enters the lower tier before it leaves the upper one. Pages that are already in a tier are not
        reported. To find all pages, start the watch first and then call ``match``.

        Changes are reported one at a time and in order. The store's lock is not held during a callback, so
        the callback may call the store. Callbacks run on the store's thread, and in ``poll``. A store opened
        with ``pump=False`` has no thread, so ``poll`` reports everything that has changed since the last
        ``poll``. If a callback raises an exception in ``poll``, ``poll`` raises it as well, and no slot is
        lost. On the store's thread, the exception is counted (``tierstore_faults_total``) and logged. In both
        cases the change counts as reported, and the next one follows. Up to 1,048,576 changes are queued;
        further changes are only counted, in the ``lost`` attribute of the Watch.

        Returns:
            A Watch. It ends when its ``end`` method is called or the store is closed.

        Raises:
            TypeError: ``callback`` is not callable.
            StoreClosed: The store is closed.
        """
        self._pump.require_open()
        if not callable(callback):
            raise TypeError(f"callback must be callable, got {callback!r:.60}")
        with self._lock, self._guard:
            return self._pump.watches.add(callback)

    def register(self, *pages: EnginePages) -> None:
        """Register an engine's KV cache tensors, one EnginePages per KV group.

        Raises:
            ConfigError: The store owns HBM, tensors are registered already, or shapes, dtypes or layouts do
                not match the PageSpecs.
        """
        self._pump.advance()
        register_pages(self._config, self._parts, pages, self._wake)

    def check(self) -> None:
        """Check every invariant of the store. Safe to call in production.

        The check takes time proportional to the number of pages and holds the store's lock meanwhile.

        Raises:
            AssertionError: An invariant does not hold. The message names it.
        """
        self._pump.advance()
        with self._lock, self._guard:
            invariants.check(self._directory, self._pump.events)

    def explain(self, keys: Sequence[PageKey]) -> list[dict[str, object]]:
        """Return, for each key, the state of its copies, its parent, and why it was last evicted. Read-only."""
        self._pump.require_open()
        require_key_list(keys)
        with self._lock, self._guard:
            return [metrics.explain_page(self._directory, key) for key in keys]

    def stats(self) -> dict[str, object]:
        """Return a snapshot of the effective configuration, sizes, occupancy, counters and rates. Read-only."""
        self._pump.require_open()
        with self._lock, self._guard:
            return metrics.stats(self._config, self._parts)

    def rates(self) -> dict[tuple[Tier, Tier], float]:
        """Return the measured throughput of each edge (source, destination), in bytes/s. Read-only.

        The throughput is a moving average over the transfers of an edge, as in ``stats()["bytes_per_s"]``.
        Edges without a finished transfer are left out.

        Raises:
            StoreClosed: The store is closed.
        """
        self._pump.require_open()
        with self._lock, self._guard:
            return dict(self._directory.transfers.rates)

    def traffic(self) -> dict[tuple[Tier, Tier], Traffic]:
        """Return how many pages are in flight on each edge (source, destination), and how many have arrived.

        Read-only.

        Edges without any transfer so far are left out.

        Raises:
            StoreClosed: The store is closed.
        """
        self._pump.require_open()
        with self._lock, self._guard:
            return self._directory.transfers.traffic()

    def arriving(self, keys: Sequence[PageKey], tier: Tier) -> int:
        """Return how many of these pages are in flight to ``tier`` and not readable there yet. Read-only.

        The result is 0 for a tier that is not configured.

        Raises:
            ValueError: ``tier`` is not a Tier.
            StoreClosed: The store is closed.
        """
        self._pump.require_open()
        require_key_list(keys)
        require_member("look for pages on their way to", tier, list(Tier))
        with self._lock, self._guard:
            return self._directory.residency.arriving(keys, tier)

    def idle(self) -> bool:
        """Return whether no page is being copied, and no copy will start without another call. Read-only.

        That is: no copy is in flight or queued, no action waits for an event, and no page waits for the next
        timed write to disk (``nvme.flush``).

        Raises:
            StoreClosed: The store is closed.
        """
        self._pump.require_open()
        with self._lock, self._guard:
            return self._pump.settled and self._directory.writeback.next_spill is None

    def close(self, timeout_s: float = 30) -> None:
        """Save pages that exist only in HBM or HOST, finish copies in flight, and close all tiers.

        Copies that have not finished after ``timeout_s`` seconds fail. A second call has no effect, unless a
        signal handler interrupted the first; the second call then closes the parts that are still open. No
        page is promoted once the call has started. An attached prefetcher stops by itself and may be closed
        before or after the store. In a forked child the call does nothing, because the store belongs to the
        parent process.
        """
        timeout_s = seconds_to_wait("timeout_s", timeout_s)
        if self._pump.inherited:
            return
        with self._closing:
            if not self._ended:
                self._close(timeout_s)
                self._ended = True

    def _close(self, timeout_s: float) -> None:
        deadline = monotonic() + timeout_s
        # A store that was interrupted in the middle of a change raises StoreClosed here. It writes nothing,
        # because its pages in memory may be wrong.
        with suppress(StoreClosed):
            with self._pump.lock, self._pump.guard:
                self._directory.hints.close()
            Flush.of_unsaved(self._pump)
            self._pump.wait_idle(deadline)
        self._pump.stop(max(0.0, deadline - monotonic()))
        if not self._pump.mover.close(max(0.0, deadline - monotonic())):
            _log.warning("a copy or I/O thread did not finish within %s s and was abandoned", timeout_s)
        elif self._parts.arena is not None:
            self._parts.arena.close()

    def __enter__(self) -> TierStore:
        self._pump.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
