"""A directory whose movers are in other processes, one a rank: what they have opened, one answer out of all of theirs.

Every rank holds its own shard of each page in slots of the same numbers, so one transfer serves all of them, and a page
exists where all ranks have it. Only plain data crosses; how it travels is the caller's.
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
"""Of the page: what another rank found counts more."""


@dataclass(frozen=True)
class Opened:
    """What one rank has opened: slots of the engine's and of host memory, and the disk, None: there is none."""

    num_slots: int
    host_slots: int
    disk: Disk | None
    health: RankHealth = field(default_factory=RankHealth)


@dataclass(frozen=True)
class Disk:
    """A rank's NVMe tier: its sizes, and key, parent and bytes of what was there at open."""

    record_nbytes: int
    budget_nbytes: int
    found: Sequence[Record]

    def records(self) -> Iterable[Record]:
        """What is there."""
        return self.found


@dataclass(frozen=True)
class _Host:
    num_slots: int
    held: HostFormat


class Ranks:
    """A ``Mover`` of many: what it is given waits in ``take`` for whoever carries it to all ranks, their acks come by
    ``deliver``. One thread at a time, as for any mover.
    """

    def __init__(self, num_ranks: int) -> None:
        self.records: Collection[Tier] = ()
        """The tiers that keep records: one that only some ranks have written is erased on all."""
        self._num_ranks = num_ranks
        self._outbox: list[Transfer | Erase] = []
        self._merging: dict[int, _Merging] = {}
        self._acks: deque[Ack] = deque()
        self._health: dict[int, RankHealth] = {}
        self._failed = [0] * num_ranks

    def hear(self, rank: int, health: RankHealth) -> None:
        """Take in a rank's health; a warning names what is wrong now and was not before."""
        before = self._health.get(rank)
        self._health = {**self._health, rank: health}  # a scrape may be looking at the other one
        for trouble in health.troubles:
            if before is None or trouble not in before.troubles:
                _log.warning("rank %d: %s", rank, trouble)

    def health(self) -> dict[int, RankHealth]:
        """Return every rank's health as it was heard last, with what is known here of its transfers. Any thread."""
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
        """Queues it for all ranks."""
        if isinstance(command, Transfer):
            self._merging[command.id] = _Merging.of(command, self._num_ranks)
        self._outbox.append(command)

    def take(self) -> list[Transfer | Erase]:
        """What all ranks are to do next, in this order; each command once."""
        commands, self._outbox = self._outbox, []
        return commands

    def deliver(self, rank: int, acks: Iterable[Ack]) -> None:
        """What a rank has done. A record that some ranks have and others not is removed from all."""
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
        """Never: acks are delivered."""
        return False

    @property
    def waiting(self) -> bool:
        """Whether something waits to be carried to the ranks, or for their answer."""
        return bool(self._outbox or self._merging)

    def arriving(self, slots: Iterable[int], layer: int) -> Arriving:
        """Nothing is known of it until it ends."""
        return NOT_YET

    def poll(self) -> list[Ack]:
        """Transfers that have ended on all ranks since the last call."""
        acks = list(self._acks)
        self._acks.clear()
        return acks

    def begin_sync(self) -> SyncMark | None:
        """None: records are written, and waited for, in the ranks' processes."""
        return None

    def give_up_waiting(self) -> None:
        """Nothing: nobody waits here."""

    @property
    def pending_erases(self) -> int:
        """0: what the ranks have still to erase is not known here."""
        return 0

    @property
    def progress(self) -> object:
        """None: what the ranks write between two acks is not known here."""
        return None

    def close(self, timeout_s: float) -> bool:
        """True: nothing runs here."""
        return True


def merged_disk(disks: Sequence[Disk]) -> tuple[Disk, tuple[PageKey, ...]]:
    """What all ranks' disks hold, at the size of the largest; and the keys that only some have, to be erased."""
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
    """The parts of a store that decides here what ``ranks`` do, for an engine that owns HBM. It opens nothing.

    ConfigError unless all ranks have opened the same.
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
    """One transfer on its way through all ranks. Places are positions in it as it was submitted."""

    transfer: Transfer
    current: list[int]
    """Places that are not settled: what the directory's transfer consists of now."""
    open_by_rank: list[list[int]]
    outcomes: list[dict[int, Failure | int]]
    """Of each rank by place: why the page failed, or its bytes."""
    told: set[int] = field(default_factory=set)
    late: bool = False
    """Whether the places left were told to be late."""
    seconds: float = 0.0
    halves: tuple[PageKey, ...] = ()
    """Of the last answer: pages that have arrived on some ranks and not on all."""

    @classmethod
    def of(cls, transfer: Transfer, ranks: int) -> _Merging:
        places = list(range(len(transfer.keys)))
        return cls(transfer, places, [list(places) for _ in range(ranks)], [{} for _ in range(ranks)])

    def waits_for(self, rank: int) -> bool:
        """Whether the rank has still to say what became of some of the pages."""
        return rank not in self.told or bool(self.open_by_rank[rank])

    def take(self, rank: int, ack: Ack) -> int:
        """Takes in what a rank says; returns how many pages it did not move."""
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
        """The ack of all ranks, None: not yet. Pages that a rank tells late are late, once all ranks have answered."""
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
