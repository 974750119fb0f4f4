"""``TierStore``: one directory and one mover in one process, behind one lock. No algorithm lives here."""

from __future__ import annotations

from threading import RLock
from time import monotonic
from typing import TYPE_CHECKING

from tierstore import metrics
from tierstore.build import Parts, assemble, loss_class, register_pages
from tierstore.config import StoreConfig
from tierstore.directory import invariants
from tierstore.errors import ConfigError
from tierstore.events import PendingEvents
from tierstore.keys import namespace, page_keys, require_key_list
from tierstore.lease import Holding, Lease, record_of, require_event
from tierstore.moving import Moving
from tierstore.page import PageLayout
from tierstore.portable import Portable
from tierstore.pump import Progress, Wakeup
from tierstore.saving import Saving
from tierstore.slots import EngineSlots, OwnSlots
from tierstore.types import Match, require_flag, require_time, seconds_at_most, seconds_to_wait, whole

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike
    from types import TracebackType

    import torch

    from tierstore.gpu.pool import EnginePages, GroupedPages
    from tierstore.keys import Extra, TokenIds
    from tierstore.nvme.archive.reading import Imported
    from tierstore.nvme.archive.records import Progress as Shown
    from tierstore.nvme.archive.writing import Exported
    from tierstore.page import PageSpec
    from tierstore.types import Event, FlushResult, Hint, HintResult, PageKey, Promoted, Tier


class TierStore:
    """KV pages in tiers. Every method may be called from any thread; none waits while it holds the lock.

    A miss is a value, never an exception. After ``close`` every call raises StoreClosed.
    """

    def __init__(self, config: StoreConfig, parts: Parts, wakeup: Wakeup, *, pump: bool) -> None:
        """Takes over opened parts; use ``open``."""
        self.metrics = parts.metrics
        self._config = config
        self._parts = parts
        self._directory = parts.directory
        self._mover = parts.mover
        self._namespace = namespace(parts.layout.specs, loss_class=loss_class(config))
        self._wake = wakeup.bump
        self._pending = PendingEvents(self._directory)
        self._progress = Progress(self._directory, self._mover, self._pending, wakeup, parts.metrics)
        layers = max(spec.num_layers for spec in parts.layout.specs)
        self._holding = Holding(
            self._directory,
            self._pending,
            self._progress,
            parts.metrics,
            parts.mover,
            layers,
            parts.device,
        )
        shared = (self._directory, self._pending, self._progress)
        self._slots = (
            EngineSlots(*shared) if parts.pool is None else OwnSlots(*shared, parts.layout.page_nbytes)
        )
        self._moving = Moving(self._directory, self._progress, parts.metrics)
        self._saving = Saving(parts, self._progress)
        self._portable = Portable(config, parts, self._progress, self._pending, self._slots, self.acquire)
        self._lock = self._progress.lock
        self._closing = RLock()  # a signal's handler may close in the middle of a close
        if pump:
            self._progress.start_pump()

    @classmethod
    def open(
        cls, config: StoreConfig, spec: PageSpec | Sequence[PageSpec], *, pump: bool = True
    ) -> TierStore:
        """A store over the tiers of ``config`` for pages of ``spec`` (a sequence: KV groups that share each page).

        ``pump=False``: nothing happens between calls; the host calls ``poll`` each step. ConfigError changes nothing,
        nor does TypeError for a ``pump`` that is not True or False.
        """
        if not isinstance(config, StoreConfig):
            raise ConfigError(f"config is a {type(config).__name__}; allowed: what load_config gives")
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
        except RuntimeError as error:  # no thread, or no memory, is to be had
            raise ConfigError(
                f"the store cannot be opened: {error}; allowed: what this machine has"
            ) from error

    # -- pages and keys -----------------------------------------------------------------------------------------

    def keys(self, token_ids: TokenIds, salt: bytes = b"", extra: Sequence[Extra] = ()) -> list[PageKey]:
        """Keys of the full pages of a sequence; equal in every process for equal input. Changes nothing."""
        self._progress.require_open()
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
        """HBM pages by slot, ``[num_slots, num_layers, 2, page_size, num_kv_heads, head_dim]``, in place.

        With KV groups ``pages[slot]`` is a tuple of tensors. ConfigError where an engine owns HBM.
        """
        self._progress.require_open()
        if self._parts.pool is None:
            raise ConfigError("pages: HBM belongs to the engine; allowed with hbm.owner: store")
        return self._parts.pool.pages

    def allocate(self, n: int, timeout_s: float = 1.0) -> list[int]:
        """``n`` HBM slots owned by the caller, contents undefined.

        Takes free slots, then pages that are readable below, then saves victims below and waits up to ``timeout_s``.
        CapacityError, nothing taken, if ``n`` exceeds HBM or the time ran out. As in every call, TypeError for what is
        no number, ValueError for a negative one or a NaN.
        """
        self._progress.require_open()
        self._holding.take_back()
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
        """Seals filled pages: they belong to the store and are matchable on return; the slot of each key now.

        ``keys[i]`` is the parent of ``keys[i + 1]``. Where a key was readable in HBM already, its slot is returned and
        yours is freed after ``after``. ``after``: the event that ends the writing; on CUDA None means what was launched
        so far on the caller's current stream. ``lease``: keeps the pages pinned until its release; an exact one holds
        no others: the put ends before a key of which memory has a copy in use that is not exact, fewer slots come back,
        and the rest stays yours. A copy in HBM that another caller is still writing: under a lease it stays, and the
        lease's ``wait`` and ``ready`` tell when it is written; without one it gives way, and your slot is returned.
        ValueError on unequal lengths or what is no key; LeaseError on a slot that is not yours; nothing changed then.
        Engine-owned HBM: the pages are copied out, your slots are returned, and ``poll`` tells when they are free.
        ``memory_only``: pages that no tier holds yet are never written to NVMe; where memory is needed they are
        dropped. A page that is held already stays as it is. A put without it, of the page or of one after it, ends it.
        ``parent``: the page before ``keys[0]``; None: the last one of the lease, if any, or the first of a sequence.
        ``parents``: the page before each key, where they are no chain; ConfigError unless an engine owns HBM.
        """
        self._progress.advance()
        require_flag("memory_only", memory_only)
        require_event(after)
        record = None if lease is None else record_of(lease, self._holding)
        after = self._parts.device.last_use(after)
        return self._slots.put(
            keys, slots, after, record, memory_only=memory_only, parent=parent, parents=parents
        )

    def withdraw(self, slots: Sequence[int]) -> list[int]:
        """Engine-owned HBM: takes back slots that were put; those whose copies have not begun are free at once, their
        pages are given up, and ``poll`` does not tell of them. Which of ``slots`` a copy still reads, or is to read
        once its ``after`` has happened: they are free when ``poll`` says so. ConfigError where HBM is the store's.
        """
        self._progress.advance()
        return self._slots.withdraw(slots)

    def free(self, slots: Sequence[int], after: Event | None = None) -> None:
        """Gives back owned slots; they are reused once ``after``, as in ``put``, has happened.

        LeaseError if one is not owned.
        """
        self._progress.advance()
        require_event(after)
        self._slots.free(slots, self._parts.device.last_use(after))

    # -- finding and holding ------------------------------------------------------------------------------------

    def match(self, keys: Sequence[PageKey], *, exact: bool = False) -> Match:
        """The longest readable prefix. Changes nothing, promises nothing, is no use for the policy.

        ``exact``: it ends before the first page that may differ from what was put, as ``acquire`` would.
        """
        self._progress.advance()
        require_flag("exact", exact)
        require_key_list(keys)
        with self._lock:
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
        """Pins the longest prefix that is readable and for which HBM has room now; starts to bring in what is below.

        Never blocks unless asked to, never raises for misses or lack of room. ``wait_for_room_s``: where HBM is full of
        pages that are being saved, block up to so many seconds until they have left enough room. Returns earlier with
        what it has once nothing under way can make room (all else is held by leases or owned by callers), and never
        later than ``deadline_s``. Calls that wait are served in the order in which they came. Without effect where an
        engine owns HBM. ``deadline_s``: pages that would come later are missing,
        and a page that is not there by then ends the lease before it; below 0 it has passed. ``into``: the engine's
        slots to load into, where an engine owns HBM. ``exact``: the lease ends before the first page of which only
        copies are left that went through a lossy codec, or that was computed over such. ValueError on unequal lengths;
        TypeError unless ``exact`` is True or False. ``wait_for_room_s`` must be finite and not negative.
        """
        self._progress.advance()
        require_flag("exact", exact)
        room_s = seconds_at_most("wait_for_room_s", wait_for_room_s)
        if deadline_s is not None:
            require_time("deadline_s", deadline_s)
        require_key_list(keys)
        self._holding.take_back()
        slots = self._slots.checked_into(keys, into)
        return self._holding.acquire(keys, deadline_s, slots, exact=exact, wait_for_room_s=room_s)

    # -- asking for moves ---------------------------------------------------------------------------------------

    def hint(self, hint: Hint) -> HintResult:
        """What a scheduler expects. wont_need and retain change the victim order at once; will_need waits for an
        attached prefetcher. Never pins. TypeError for what is no Hint."""
        return self._moving.hint(hint)

    def take_hints(self, timeout_s: float = 0.0) -> list[Hint]:
        """The waiting hints, for a prefetcher, of each request the newest; the first call attaches it.

        Waits up to ``timeout_s`` for one; a store that is opened with ``pump=False`` is advanced meanwhile.
        """
        return self._moving.take_hints(timeout_s)

    def reject_hints(self) -> None:
        """The prefetcher that took hints takes none any more: a will_need in force ends, and a new one is rejected.

        Copies under way go on by themselves. The next ``take_hints`` attaches one again.
        """
        self._moving.reject_hints()

    def staying(self) -> list[PageKey]:
        """Pages in HBM that no promotion may displace: those under a lease, and those that a retain hint keeps.

        A snapshot, each page once, in no order; what is still on its way counts. Changes nothing.
        """
        return self._moving.staying()

    def promote(self, hint: Hint, keys: Sequence[PageKey], tier: Tier, over: Sequence[Hint] = ()) -> Promoted:
        """Starts to bring up to 32 pages to ``tier`` from the tier below it, ahead of need, for a will_need ``hint``.

        What cannot start at once does not start: first to last, up to a page that is not readable right below or finds
        no room. Room is a free slot or that of a page that is saved and that no hint keeps; ``over``: hints whose pages
        make way, those of the last first. What was brought is kept before others, not pinned, until the hint ends.
        Nothing starts while a lease waits for pages from the tier below, or once the hint is not in force: after the
        call that withdrew or replaced it has returned, no copy starts for it. ValueError if pages cannot be promoted
        to ``tier``, or for more than 32.
        """
        return self._moving.promote(hint, keys, tier, over)

    def demote(self, keys: Sequence[PageKey], tier: Tier) -> int:
        """Sends pages down to ``tier`` in the background and lets upper copies go once unpinned; pages accepted.

        Missing keys are skipped. A memory-only page is accepted and goes to HOST at most; without HOST it stays where
        it is. ValueError if the tier is not below HBM or not configured.
        """
        return self._moving.demote(keys, tier)

    def evict(self, keys: Sequence[PageKey], tier: Tier | None = None) -> int:
        """Drops copies without saving them, in one tier or in all; pages that had one.

        They are unmatchable at once; leased ones go when released; records are gone from disk after ``flush``.
        ValueError for what is no tier; one that is not configured holds nothing.
        """
        return self._moving.evict(keys, tier)

    def flush(self) -> FlushResult:
        """Returns when every page put before the call that some tier has then, and every erase before it, is durable or
        counted as failed. An engine's pages too that are still being copied out of its slots.

        Gives up when nothing has moved for 10 s: no page of this call, and no write to the disk that began has ended.
        Then ``stats()["nvme"]["state"]`` is not "ok" until the write that hangs ends. The result says how many pages
        are durable, failed and pending, and how many evicted pages a restart could still bring back.
        """
        self._progress.require_open()
        return self._saving.flush()

    def flush_evictions(self) -> int:
        """Returns when every ``evict`` before the call is durable: no restart brings its pages back. Writes no page.

        How many evicted pages a restart now could bring back: 0, unless the disk refuses or hangs. Gives up as
        ``flush`` does.
        """
        self._progress.require_open()
        return self._saving.flush_evictions()

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is in flight, queued or waiting for an event; False if the time ran out."""
        self._progress.require_open()
        self._holding.take_back()
        return self._saving.wait_idle(monotonic() + seconds_to_wait("timeout_s", timeout_s))

    # -- progress and reports -----------------------------------------------------------------------------------

    async def export_pages(
        self, keys: Sequence[PageKey], path: str | PathLike[str], progress: Shown | None = None
    ) -> Exported:
        """Writes the pages to one portable file, whole or not at all: ``Portable.export_pages``."""
        return await self._portable.export_pages(keys, path, progress)

    async def import_pages(self, path: str | PathLike[str], progress: Shown | None = None) -> Imported:
        """Puts the pages of such a file that are whole and in reach: ``Portable.import_pages``."""
        return await self._portable.import_pages(path, progress)

    def poll(self) -> list[int]:
        """Advances everything by what has finished. Engine-owned HBM: slots no copy uses any more."""
        self._progress.advance()
        with self._lock:
            self._progress.step()
            return self._directory.take_reusable()

    def register(self, *pages: EnginePages) -> None:
        """The engine's tensors, one EnginePages a KV group. ConfigError unless an engine owns HBM and they fit."""
        self._progress.advance()
        register_pages(self._config, self._parts, pages, self._wake)

    def check(self) -> None:
        """AssertionError naming the first invariant that does not hold. O(pages); any time, in production too."""
        self._progress.advance()
        with self._lock:
            invariants.check(self._directory, self._pending)

    def explain(self, keys: Sequence[PageKey]) -> list[dict[str, object]]:
        """For each key: where its copies are and in what state, its parent, and why it went if it went lately."""
        self._progress.advance()
        require_key_list(keys)
        with self._lock:
            return [metrics.explain_page(self._directory, key) for key in keys]

    def stats(self) -> dict[str, object]:
        """A snapshot: effective configuration, sizes, occupancy, counters, rates."""
        self._progress.advance()
        with self._lock:
            return metrics.stats(self._config, self._parts)

    def close(self, timeout_s: float = 30) -> None:
        """Saves what only HBM and HOST hold, waits for copies, fails the rest, releases the directory. Idempotent.

        Nothing is promoted from its start on: an attached prefetcher ends by itself, and may be closed before or after.
        Does nothing in a forked child: the store is its parent's.
        """
        timeout_s = seconds_to_wait("timeout_s", timeout_s)
        if self._progress.inherited:
            return
        with self._closing:
            if not self._progress.closed:
                self._saving.close(timeout_s)

    def __enter__(self) -> TierStore:
        self._progress.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
