"""A directory whose movers are other processes, one per rank: it combines what they opened and what they answer.

Each rank holds its own shard of every page in slots with the same numbers, so one transfer serves all ranks, and a page
exists where all ranks have it. Only plain data crosses processes; transporting it is the caller's business.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace
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
"""Failures of one rank's part of a page. What another rank found has precedence."""


@dataclass(frozen=True)
class Opened:
    """What one rank has opened: the engine's slots, slots of host memory, and the disk, or None without one."""

    num_slots: int
    host_slots: int
    disk: Disk | None
    health: RankHealth = field(default_factory=RankHealth)


@dataclass(frozen=True)
class Disk:
    """A rank's NVMe tier: its sizes, and key, parent and bytes of each record found at opening."""

    record_nbytes: int
    budget_nbytes: int
    found: Sequence[Record]

    def records(self) -> Iterable[Record]:
        """Return the records found at opening."""
        return self.found


@dataclass(frozen=True)
class _Host:
    num_slots: int
    held: HostFormat


class Ranks:
    """A ``Mover`` for many ranks. Not thread-safe, like any mover.

    Commands wait in ``take`` until the caller carries them to all ranks; ``deliver`` brings the acks back.
    """

    def __init__(self, num_ranks: int) -> None:
        self.records: Collection[Tier] = ()
        """The tiers that keep records. A record that only some ranks have written is erased on all."""
        self._num_ranks = num_ranks
        self._outbox: list[Transfer | Erase] = []
        self._merging: dict[int, _Merging] = {}
        self._acks: deque[Ack] = deque()
        self._health: dict[int, RankHealth] = {}
        self._failed = [0] * num_ranks

    def hear(self, rank: int, health: RankHealth) -> None:
        """Update a rank's health. Warns about problems that are new."""
        before = self._health.get(rank)
        self._health = {
            **self._health,
            rank: health,
        }  # a scrape may be reading the old mapping
        for trouble in health.troubles:
            if before is None or trouble not in before.troubles:
                _log.warning("rank %d: %s", rank, trouble)

    def health(self) -> dict[int, RankHealth]:
        """Return every rank's last reported health, with what is known here about its transfers. Thread-safe."""
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
            self._merging[command.id] = _Merging.of(command, self._num_ranks)
        self._outbox.append(command)

    def take(self) -> list[Transfer | Erase]:
        """Return the commands for all ranks, in order. Each is returned once."""
        commands, self._outbox = self._outbox, []
        return commands

    def deliver(self, rank: int, acks: Iterable[Ack]) -> None:
        """Process a rank's acks. A record that only some ranks have is removed from all."""
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
        """Always False, because acks are delivered."""
        return False

    @property
    def waiting(self) -> bool:
        """Whether commands wait to be carried to the ranks, or for their answer."""
        return bool(self._outbox or self._merging)

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Return that nothing is known until the transfer ends."""
        return NOT_YET

    def poll(self) -> list[Ack]:
        """Return the transfers that have ended on all ranks since the last call."""
        acks = list(self._acks)
        self._acks.clear()
        return acks

    def begin_sync(self) -> SyncMark | None:
        """Return None: records are written, and waited for, in the ranks' processes."""
        return None

    def give_up_waiting(self) -> None:
        """Do nothing: nobody waits here."""

    @property
    def pending_erases(self) -> int:
        """Always 0: this process does not know what the ranks must still erase."""
        return 0

    @property
    def progress(self) -> object:
        """Always None: this process does not know what the ranks write between two acks."""
        return None

    def close(self, timeout_s: float) -> bool:
        """Return True: nothing runs here."""
        return True


def merged_disk(disks: Sequence[Disk]) -> tuple[Disk, tuple[PageKey, ...]]:
    """Return the records that every rank's disk holds, and the keys of all others, which must be erased.

    The record size of the result is the largest of any rank, its budget the smallest.
    """
    by_rank = [{key: (parent, nbytes) for key, parent, nbytes in disk.found} for disk in disks]
    first, *others = by_rank
    found = [
        (key, parent, max(nbytes, *(other[key][1] for other in others)) if others else nbytes)
        for key, (parent, nbytes) in first.items()
        if all(key in other for other in others)
    ]
    whole = {key for key, _, _ in found}
    halves = tuple(dict.fromkeys(key for records in by_rank for key in records if key not in whole))
    sizes = [disk.record_nbytes for disk in disks], [disk.budget_nbytes for disk in disks]
    return Disk(max(sizes[0]), min(sizes[1]), found), halves


def assemble_apart(config: StoreConfig, layout: PageLayout, opened: Sequence[Opened], ranks: Ranks) -> Parts:
    """Build a store that decides here what ``ranks`` do, for an engine that owns HBM. Opens nothing.

    Raises:
        ConfigError: The ranks have opened different sizes.
    """
    sizes = {(rank.num_slots, rank.host_slots, rank.disk is None) for rank in opened}
    if len(sizes) != 1:
        raise ConfigError(
            f"every rank must open the same number of slots, got {sorted(sizes)} (HBM slots, host slots, no disk); "
            "give all ranks the same configuration"
        )
    ((num_slots, host_slots, _),) = sizes
    disks = [rank.disk for rank in opened if rank.disk is not None]
    disk, halves = merged_disk(disks) if disks else (None, ())
    metrics = Metrics()
    held = held_form(config, layout)
    host = _Host(host_slots, held)
    directory = make_directory(config, layout, None, host, disk, metrics)
    directory.outgoing.num_slots = num_slots
    ranks.records = directory.hierarchy.records
    for rank, found in enumerate(opened):
        ranks.hear(rank, found.health)
    metrics.watch_ranks(ranks.health, apart=True)
    metrics.watch_pinned(lambda: sum(found.pinned_nbytes for found in ranks.health().values()))
    disk_tier = directory.hierarchy.first_records
    if halves and disk_tier is not None:
        ranks.submit(Erase(disk_tier, halves))
    return Parts(layout, held, CpuDevice(), None, None, None, directory, ranks, metrics, ranks.health)


@dataclass(slots=True)
class _Merging:
    """One transfer on its way through all ranks. Places are positions in the transfer as submitted."""

    transfer: Transfer
    current: list[int]
    """Places that are not settled: what the directory's transfer consists of now."""
    open_by_rank: list[list[int]]
    outcomes: list[dict[int, Failure | int]]
    """Result by place, for each rank: the reason why the page failed, or its bytes."""
    told: set[int] = field(default_factory=set)
    late: bool = False
    """Whether the remaining places were reported as late."""
    seconds: float = 0.0
    halves: tuple[PageKey, ...] = ()
    """Pages of the last answer that have arrived on some ranks and not on all."""

    @classmethod
    def of(cls, transfer: Transfer, ranks: int) -> _Merging:
        places = list(range(len(transfer.keys)))
        return cls(transfer, places, [list(places) for _ in range(ranks)], [{} for _ in range(ranks)])

    def waits_for(self, rank: int) -> bool:
        """Return whether the rank has not reported the result of every page."""
        return rank not in self.told or bool(self.open_by_rank[rank])

    def take(self, rank: int, ack: Ack) -> int:
        """Process a rank's ack. Returns how many pages it failed to move."""
        places, late = self.open_by_rank[rank], set(ack.late)
        failures = dict(ack.failures)
        if not ack.ok and not failures:
            failures = dict.fromkeys(range(len(places)), Failure.IO_ERROR)
        share = ack.nbytes // ack.num_ready if ack.num_ready else 0
        sizes = iter(ack.sizes)
        for i, place in enumerate(places):
            if i not in late:
                self.outcomes[rank][place] = failures[i] if i in failures else next(sizes, share)
        self.open_by_rank[rank] = [places[i] for i in ack.late]
        self.told.add(rank)
        self.seconds = max(self.seconds, ack.seconds)
        return len(failures)

    def answer(self) -> Ack | None:
        """Return the ack for all ranks, or None if it is not due.

        Pages late on one rank are late once all have answered.
        """
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
                if len(reasons) < len(found):
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
