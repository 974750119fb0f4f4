"""A store whose bytes are stored by other processes, one per rank.

Each rank stores its own shard of every page. All shards of a page have the same slot number. So all ranks
execute every transfer, and a page is in a tier only if all ranks have it there. This module combines the
sizes and acks of the ranks. It exchanges only plain data with them, which the caller sends and receives.

If shards are the same on several consecutive ranks (``replicas``), these ranks share one host memory, and
each page has an ``owner`` among them. Only the owner copies the page into host memory, and to and from its
disk. All ranks load the page into HBM. A page is therefore in host memory or on disk if all of its owners,
one in each group of ``replicas`` ranks, have it there.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
from heapq import merge
from itertools import repeat
from math import isqrt
from typing import TYPE_CHECKING

from tierstore.build import Parts, held_form, make_directory
from tierstore.errors import ConfigError
from tierstore.gpu.device import CpuDevice
from tierstore.gpu.events import NOT_YET, Arriving
from tierstore.metrics import Metrics, RankHealth
from tierstore.types import Ack, Erase, Failure, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from tierstore.codecs.host_format import HostFormat
    from tierstore.config import StoreConfig
    from tierstore.mover import SyncMark
    from tierstore.page import PageLayout
    from tierstore.types import PageKey

_log = logging.getLogger("tierstore.apart")

Record = tuple["PageKey", "PageKey | None", int]

_SAYS_NOTHING = frozenset({Failure.CLOSED, Failure.UNAVAILABLE})
"""Failures that say nothing about the page. If another rank reports any other failure, that one is used."""

_SPREAD = 3
"""Number of standard deviations of the owners' numbers of pages for which disk space is kept."""


def owner(key: PageKey, replicas: int) -> int:
    """Return which of ``replicas`` ranks owns a page: its index among them.

    The owner is the same in every process and after every restart. Keys consist of digests, so each rank owns about
    the same number of pages.
    """
    return int.from_bytes(key[:8], "little") % replicas


@dataclass(frozen=True)
class Opened:
    """The resources that one rank has opened.

    Attributes:
        num_slots: Number of the engine's HBM slots.
        host_slots: Number of slots in host memory.
        disk: The rank's NVMe tier, or None if it has none.
        health: State of the rank.
    """

    num_slots: int
    host_slots: int
    disk: Disk | None
    health: RankHealth = field(default_factory=RankHealth)


@dataclass(frozen=True)
class Disk:
    """A rank's NVMe tier at the time when it was opened.

    Attributes:
        record_nbytes: Largest size of one page's record, in bytes.
        budget_nbytes: Maximum total size of all records, in bytes.
        found: The key, the parent and the size in bytes of each record that was found.
    """

    record_nbytes: int
    budget_nbytes: int
    found: Sequence[Record]

    def records(self) -> Iterable[Record]:
        """Return the records that were found when the tier was opened."""
        return self.found


@dataclass(frozen=True)
class _Host:
    num_slots: int
    held: HostFormat


class Ranks:
    """A mover that passes commands to several ranks and combines their acks. Not thread-safe.

    Commands are queued until the caller fetches them with ``take`` and sends them to all ranks. The caller
    passes the acks of the ranks to ``deliver``.
    """

    def __init__(self, num_ranks: int, replicas: int = 1) -> None:
        """Create a mover for ``num_ranks`` ranks, of which ``replicas`` consecutive ones have equal shards."""
        self.records: Collection[Tier] = ()
        """The record tiers. If only some ranks have written a page's record, all ranks erase it."""
        self._num_ranks = num_ranks
        self.replicas = replicas
        """Number of consecutive ranks that have the same shards, and store each page once."""
        self._outbox: list[Transfer | Erase] = []
        self._merging: dict[int, _Merging] = {}
        self._acks: deque[Ack] = deque()
        self._health: dict[int, RankHealth] = {}
        self._failed = [0] * num_ranks

    def hear(self, rank: int, health: RankHealth) -> None:
        """Update a rank's health, and log a warning about each new problem."""
        before = self._health.get(rank)
        self._health = {
            **self._health,
            rank: health,
        }  # a new mapping, because another thread may be reading the old one
        for trouble in health.troubles:
            if before is None or trouble not in before.troubles:
                _log.warning("rank %d: %s", rank, trouble)

    def health(self) -> dict[int, RankHealth]:
        """Return the last reported health of each rank, with current counts of failed pages and transfers.

        Thread-safe.
        """
        merging = list(self._merging.values())
        return {
            rank: replace(
                found,
                failed_pages=self._failed[rank],
                open_transfers=sum(m.waits_for(rank) for m in merging),
            )
            for rank, found in self._health.items()
        }

    def submit(self, command: Transfer | Erase) -> None:
        """Queue a command for all ranks."""
        if isinstance(command, Transfer):
            self._merging[command.id] = _Merging.of(command, self._num_ranks, self.replicas)
        self._outbox.append(command)

    def take(self) -> list[Transfer | Erase]:
        """Return the queued commands for all ranks, in order, and clear the queue."""
        commands, self._outbox = self._outbox, []
        return commands

    def deliver(self, rank: int, acks: Iterable[Ack]) -> None:
        """Process a rank's acks, and queue the acks of transfers that all ranks have finished.

        If only some ranks have written a page's record, an erase for all ranks is queued.
        """
        for ack in acks:
            merging = self._merging[ack.transfer_id]
            self._failed[rank] += merging.take(rank, ack)
            merged = merging.answer()
            if merged is None:
                continue
            self._acks.append(merged)
            if not merging.late:
                del self._merging[ack.transfer_id]
            if merging.halves and merging.transfer.dst in self.records:
                self._outbox.append(Erase(merging.transfer.dst, merging.halves))

    @property
    def polled(self) -> bool:
        """Always False, because the caller delivers acks."""
        return False

    @property
    def waiting(self) -> bool:
        """Whether commands are queued or not yet acked by all ranks."""
        return bool(self._outbox or self._merging)

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return NOT_YET, because the progress of a single layer is not known here."""
        return NOT_YET

    def poll(self) -> list[Ack]:
        """Return the acks of transfers that have finished on all ranks since the last call."""
        acks = list(self._acks)
        self._acks.clear()
        return acks

    def begin_sync(self) -> SyncMark | None:
        """Return None, because each rank waits for its own records."""
        return None

    def give_up_waiting(self) -> None:
        """Do nothing, because this process does not wait for disks."""

    @property
    def pending_erases(self) -> int:
        """Always 0, because this process does not know which erases the ranks have not finished."""
        return 0

    @property
    def progress(self) -> object:
        """Always None, because this process does not see the progress of the ranks between two acks."""
        return None

    def close(self, timeout_s: float) -> bool:
        """Return True, because this mover has no threads."""
        return True


def merged_disk(disks: Sequence[Disk], replicas: int = 1) -> tuple[Disk, tuple[PageKey, ...]]:
    """Combine the NVMe tiers of all ranks into one.

    Returns:
        A Disk with the records that every rank has, the largest record size and the smallest budget; and the keys of
            the records that only some ranks have, which must be erased. In each group of
            ``replicas`` consecutive ranks, it is enough that the owner of a record has it.
    """
    groups = [disks[start : start + replicas] for start in range(0, len(disks), replicas)]
    by_rank = [{key: (parent, nbytes) for key, parent, nbytes in _owned(group)} for group in groups]
    first, *others = by_rank
    found = [
        (key, parent, max(nbytes, *(other[key][1] for other in others)) if others else nbytes)
        for key, (parent, nbytes) in first.items()
        if all(key in other for other in others)
    ]
    whole = {key for key, _, _ in found}
    halves = tuple(dict.fromkeys(key for records in by_rank for key in records if key not in whole))
    record_nbytes = max(disk.record_nbytes for disk in disks)
    budget_nbytes = _budget(record_nbytes, min(disk.budget_nbytes for disk in disks), replicas)
    if replicas > 1:
        budget_nbytes = max(budget_nbytes, sum(nbytes for _, _, nbytes in found))
    return Disk(record_nbytes, budget_nbytes, found), halves


def _owned(disks: Sequence[Disk]) -> Iterable[Record]:
    """Return the records of ranks with equal shards, without those that a rank does not own, oldest first.

    Only the order on each rank is known. Records at the same relative position count as equally old.
    """
    if len(disks) == 1:
        return disks[0].found
    placed = [
        [
            (place / len(disk.found), record)
            for place, record in enumerate(disk.found)
            if owner(record[0], len(disks)) == index
        ]
        for index, disk in enumerate(disks)
    ]
    return (record for _, record in merge(*placed, key=lambda each: each[0]))


def _budget(record_nbytes: int, budget_nbytes: int, replicas: int) -> int:
    """Return the total size of the records of ``replicas`` ranks, of which each can store ``budget_nbytes``.

    Pages are not distributed exactly evenly, so the total is small enough that each owner very likely has room for its
    pages. A rank without room refuses to write pages, which then stay in host memory for longer, or are lost.
    """
    if replicas == 1:
        return budget_nbytes
    pages = budget_nbytes // record_nbytes
    return replicas * max(pages - _SPREAD * isqrt(pages), (pages + 1) // 2) * record_nbytes


def assemble_apart(config: StoreConfig, layout: PageLayout, opened: Sequence[Opened], ranks: Ranks) -> Parts:
    """Build a store whose HBM is owned by an engine, and whose transfers run in other processes. Opens nothing.

    Args:
        config: The configuration.
        layout: The layout of the pages.
        opened: The resources that each rank has opened, in rank order.
        ranks: The mover that passes commands to the ranks.

    Raises:
        ConfigError: The ranks have different numbers of slots, or only some of them have an NVMe tier.
    """
    sizes = {(rank.num_slots, rank.host_slots, rank.disk is None) for rank in opened}
    if len(sizes) != 1:
        named = "; ".join(
            f"{hbm} HBM slots and {host} host slots {'without' if no_disk else 'with'} an NVMe tier"
            for hbm, host, no_disk in sorted(sizes)
        )
        raise ConfigError(
            f"every rank must open the same tiers with the same number of slots, got {named}; give all ranks the same "
            "configuration"
        )
    ((num_slots, host_slots, _),) = sizes
    disks = [rank.disk for rank in opened if rank.disk is not None]
    disk, halves = merged_disk(disks, ranks.replicas) if disks else (None, ())
    metrics = Metrics()
    held = held_form(config, layout)
    host = _Host(host_slots, held)
    directory = make_directory(config, layout, None, host, disk, metrics)
    directory.outgoing.num_slots = num_slots
    ranks.records = directory.hierarchy.records
    for rank, found in enumerate(opened):
        ranks.hear(rank, found.health)
    metrics.watch_ranks(ranks.health, apart=True)
    metrics.watch_pinned(
        lambda: sum(found.pinned_nbytes for found in ranks.health().values()) // ranks.replicas
    )
    disk_tier = directory.hierarchy.first_records
    if halves and disk_tier is not None:
        ranks.submit(Erase(disk_tier, halves))
    return Parts(layout, held, CpuDevice(), None, None, None, directory, ranks, metrics, ranks.health)


@dataclass(slots=True)
class _Merging:
    """A transfer, and the results that each rank has reported so far.

    A place is an index into ``transfer.keys``.
    """

    transfer: Transfer
    current: list[int]
    """Places without a final result. Positions in an ack for the directory are indices into this list."""
    open_by_rank: list[list[int]]
    outcomes: list[dict[int, Failure | int]]
    """For each rank, its results by place: the reason for a failure, or the size of the page in bytes.

    The size is 0 if the rank does not own the page and has nothing to do.
    """
    copies: int
    """Number of ranks that copy each page."""
    told: set[int] = field(default_factory=set)
    late: bool = False
    """Whether the remaining places have been reported as late."""
    complete: int = 0
    """Number of ranks that have nothing to do, or whose only ack reports that all their pages were copied."""
    seconds: float = 0.0
    halves: tuple[PageKey, ...] = ()
    """Keys of the pages that, according to the last answer, arrived on some ranks but not on all."""

    @classmethod
    def of(cls, transfer: Transfer, ranks: int, replicas: int) -> _Merging:
        places = list(range(len(transfer.keys)))
        if replicas == 1 or transfer.dst == Tier.HBM:
            return cls(
                transfer, places, [list(places) for _ in range(ranks)], [{} for _ in range(ranks)], ranks
            )
        owners = [owner(key, replicas) for key in transfer.keys]
        mine = [[i for i in places if owners[i] == rank % replicas] for rank in range(ranks)]
        others: list[dict[int, Failure | int]] = [
            {i: 0 for i in places if owners[i] != rank % replicas} for rank in range(ranks)
        ]
        told = {rank for rank in range(ranks) if not mine[rank]}
        return cls(transfer, places, mine, others, ranks // replicas, told, complete=len(told))

    def waits_for(self, rank: int) -> bool:
        """Return whether the rank still has to report a result for some page."""
        return rank not in self.told or bool(self.open_by_rank[rank])

    def take(self, rank: int, ack: Ack) -> int:
        """Process a rank's ack. Return the number of pages that the rank failed to copy."""
        places, late = self.open_by_rank[rank], set(ack.late)
        failures = dict(ack.failures)
        if not ack.ok and not failures:
            failures = dict.fromkeys(range(len(places)), Failure.IO_ERROR)
        share = ack.nbytes // ack.num_ready if ack.num_ready else 0
        if rank not in self.told and not (failures or late) and len(ack.sizes) in (0, len(places)):
            self.outcomes[rank].update(zip(places, ack.sizes or repeat(share, len(places)), strict=True))
            self.open_by_rank[rank] = []
            self.told.add(rank)
            self.complete += 1
            self.seconds = max(self.seconds, ack.seconds)
            return 0
        sizes = iter(ack.sizes)
        for i, place in enumerate(places):
            if i not in late:
                self.outcomes[rank][place] = failures[i] if i in failures else next(sizes, share)
        self.open_by_rank[rank] = [places[i] for i in ack.late]
        self.told.add(rank)
        self.seconds = max(self.seconds, ack.seconds)
        return len(failures)

    def answer(self) -> Ack | None:
        """Return the ack to report to the directory, or None if it is not due.

        An ack is due once every rank has reported. It reports a page as late if the page is late on any rank.
        If there are late pages, a second ack is due once every rank has reported their results.
        """
        if self.complete == len(self.outcomes):
            return self._all_copied()
        late = [i for i, place in enumerate(self.current) if any(place not in o for o in self.outcomes)]
        if len(self.told) < len(self.outcomes) or (self.late and late):
            return None
        failures: list[tuple[int, Failure]] = []
        sizes: list[int] = []
        halves: list[PageKey] = []
        for i, place in enumerate(self.current):
            if i in late:
                continue
            found = [outcome[place] for outcome in self.outcomes]
            reasons = [x for x in found if isinstance(x, Failure)]
            if reasons:
                failures.append((i, min(reasons, key=_SAYS_NOTHING.__contains__)))
                if len(reasons) < self.copies:
                    halves.append(self.transfer.keys[place])
            else:
                sizes.append(max(x for x in found if not isinstance(x, Failure)))
        self.current = [self.current[i] for i in late]
        self.late = bool(late)
        self.halves = tuple(halves)
        return Ack(
            transfer_id=self.transfer.id,
            ok=not failures,
            num_ready=len(sizes),
            nbytes=sum(sizes),
            seconds=self.seconds,
            failures=tuple(failures),
            sizes=tuple(sizes),
            late=tuple(late),
        )

    def _all_copied(self) -> Ack:
        """Return the ack for the usual case, in which every rank has copied every page.

        The size of a page is its largest size on any rank.
        """
        by_rank = [map(outcome.__getitem__, self.current) for outcome in self.outcomes]
        found = by_rank[0] if len(by_rank) == 1 else map(max, *by_rank)
        sizes = tuple(size for size in found if not isinstance(size, Failure))
        self.current = []
        return Ack(self.transfer.id, True, len(sizes), sum(sizes), self.seconds, (), sizes)
