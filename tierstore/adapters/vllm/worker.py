"""The worker half of the connector: owns the tiers' data and executes orders from the scheduler half.

The worker's thread calls ``begin``, ``go``, ``end`` and ``report`` once per step. This half makes no
decisions. ``CommandQueue`` passes commands to the mover, some of them only after an engine event, and keeps
track of the commands in progress.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from threading import Condition
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.messages import Catalogue, Hello, Orders, Report
from tierstore.build import assemble, health
from tierstore.gpu.device import Between
from tierstore.mover import LocalMover
from tierstore.nvme import disk_probe
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.ranks import owner
from tierstore.threads import Worker
from tierstore.types import Erase, PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set
    from pathlib import Path

    from tierstore.adapters.vllm.kv_layout import KVLayout
    from tierstore.build import Parts
    from tierstore.config import StoreConfig
    from tierstore.directory.residency import Residency
    from tierstore.host.shared_memory import SharedMemory
    from tierstore.metrics import RankHealth
    from tierstore.mover import Mover
    from tierstore.ranks import Record
    from tierstore.types import Ack, Event

    Commands = Sequence[Transfer | Erase]

_queue_log = logging.getLogger("tierstore.adapters.vllm.feed")

_POLL_S = 0.001
_SAVE_POLL_S = 0.005
"""Interval, in seconds, at which the thread checks whether a forward pass has ended, to copy its blocks out of HBM.

No request waits for these copies. Each check takes the GIL from the engine while the engine launches kernels.
"""


class CommandQueue:
    """The commands for one mover, and their acks. Thread-safe.

    The queue has a thread that starts commands whose event has occurred. The thread does not depend on the engine's
    steps, which may take a long time. The thread is created when first needed, and sleeps while no command waits for
    an event. It has nothing else to do: the engine's steps collect completed copies, and the mover keeps the link busy
    by itself.
    """

    def __init__(self, mover: Mover, wakeup: Wakeup) -> None:
        self._mover = mover
        self._wakeup = wakeup
        self._open: dict[int, Transfer] = {}
        self._queue: deque[tuple[Event, Transfer]] = deque()
        self._acks: list[Ack] = []
        self._turn = Condition()
        self._thread: Worker | None = None
        self._pause: float | None = None
        """Maximum time, in seconds, that the thread sleeps. None if it sleeps until it is notified."""
        self._closing = False
        self.faults = 0
        """Number of unexpected errors in the thread. Each error was logged."""

    def submit(self, command: Transfer | Erase, after: Event | None = None) -> None:
        """Start a command now, or after the event ``after``. Never blocks.

        Commands that wait for events start in the order in which they were submitted.
        """
        with self._turn:
            if isinstance(command, Erase):
                self._mover.submit(command)
                return
            self._open[command.id] = command
            if after is None or (not self._queue and after.query()):
                self._mover.submit(command)
            else:
                self._queue.append((after, command))
            if self._queue:
                self._watch()

    def advance(self) -> None:
        """Start the commands that may start now, and process the acks of completed ones."""
        with self._turn:
            self._advance()

    def take(self) -> list[Ack]:
        """Return the acks since the last call."""
        with self._turn:
            self._advance()
            acks, self._acks = self._acks, []
            return acks

    @property
    def busy(self) -> bool:
        """Return whether a command is in progress."""
        return bool(self._open)

    @property
    def at_engine(self) -> bool:
        """Return whether a copy to or from the engine's blocks is in progress."""
        with self._turn:
            return any(Tier.HBM in (t.src, t.dst) for t in self._open.values())

    def reads(self, slots: Set[int]) -> bool:
        """Return whether a copy that reads one of these blocks is in progress."""
        with self._turn:
            return any(t.src == Tier.HBM and not slots.isdisjoint(t.src_slots) for t in self._open.values())

    def pause(self, at_most_s: float) -> float:
        """Return how many seconds the caller may sleep before it calls ``advance``, at most ``at_most_s``.

        The time is 1 ms if a command waits for an event or the device must be polled, because the caller is not woken
        when the event occurs or the device finishes.
        """
        return _POLL_S if self._queue or self._mover.polled else at_most_s

    def check(self) -> None:
        """Raise AssertionError unless every waiting command counts as in progress."""
        with self._turn:
            strange = [t.id for _, t in self._queue if t.id not in self._open]
        if strange:
            raise AssertionError(f"transfers {strange} are queued but not open")

    def close(self, timeout_s: float) -> bool:
        """Discard waiting commands, and close the mover.

        Args:
            timeout_s: Maximum time in seconds to wait for the queue's thread, and the same time again for the mover.

        Returns:
            Whether the mover's threads exited in time.
        """
        with self._turn:
            self._closing = True
            self._queue.clear()
            self._turn.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._mover.close(timeout_s)

    # -- inside -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        while self._queue and self._queue[0][0].query():
            self._mover.submit(self._queue.popleft()[1])
        ended = self._mover.poll()
        for ack in ended:
            if not ack.late:
                self._open.pop(ack.transfer_id, None)
        self._acks += ended
        if ended:
            self._wakeup.bump()

    def _watch(self) -> None:
        """Make sure that the thread checks the first waiting command soon enough."""
        if self._thread is None and not self._closing:
            self._thread = Worker(self._run, name="tierstore-vllm-feed")
            self._thread.start()
        elif self._pause is None or self._pause > self._due_s():
            self._turn.notify_all()  # otherwise it wakes by itself; waking it would take the GIL from the engine

    def _due_s(self) -> float:
        """Return the interval, in seconds, at which the events of the waiting commands must be checked."""
        return _POLL_S if any(t.dst == Tier.HBM for _, t in self._queue) else _SAVE_POLL_S

    def _run(self) -> None:
        with self._turn:
            while not self._closing:
                try:
                    self._advance()
                except Exception:  # noqa: BLE001 - top level of a thread: log and continue
                    self.faults += 1
                    _queue_log.exception("commands could not be passed to the mover")
                self._pause = self._due_s() if self._queue else None
                self._turn.wait(self._pause)


_log = logging.getLogger("tierstore.adapters.vllm.working")

_LOOK_S = 0.05
_IDLE_S = 0.002
"""Maximum time in seconds to wait for a copy or a read in a step that computes nothing.

Without the wait, the engine's loop would take the CPU, and within one process the GIL, from the threads that
copy and read.
"""
_FENCE_WARN_S = 10.0
_CLOSE_S = 30.0
_REST_S = 30.0


class WorkerHalf:
    """The opened tiers of one rank, and the engine's tensors on that rank."""

    def __init__(
        self, parts: Parts, kv_layout: KVLayout, rank: int, wakeup: Wakeup, replicas: int = 1
    ) -> None:
        """Take ownership of opened parts, whose threads bump ``wakeup``. Use ``open`` to create an instance.

        ``replicas`` consecutive ranks share one host memory and store each page once.
        """
        # A worker has no TierStore, because a store's directory makes decisions that belong to the scheduler
        # half. Instead, this half assembles the tiers and drives the mover itself. It only uses the directory to
        # get the records that were on disk when it was opened.
        assert parts.arena is not None
        self._wakeup = wakeup
        pool = parts.device.register(parts.layout, (kv_layout.pages,))
        # A request waits for all of its pages, so loads are not split into layer groups.
        copies = parts.device.open_copies(Between(pool, parts.arena, wakeup.bump, most_groups=1))
        assert isinstance(parts.mover, LocalMover)
        parts.mover.attach(copies)
        self.held_nbytes = parts.held.view_nbytes
        """Size of a page in host memory, in bytes. Reading a page from disk reads the same number of bytes."""
        self._rank = rank
        self._replicas = replicas
        self._shard = kv_layout.spec.shard.to_bytes(2, "big")
        self._last_use: Callable[[Event | None], Event | None] = parts.device.last_use
        self._arena, self._nvme, self._stats = parts.arena, parts.nvme, parts.device.stats
        self._commands = CommandQueue(parts.mover, wakeup)
        self._opened = health(parts.device, parts.arena, parts.nvme)  # device and route do not change
        self._stalled_steps = 0
        self._reported = self.health()
        self._later: list[Transfer | Erase] = []
        self._now: list[Transfer | Erase] = []
        self._launched: Event | None = None
        self._idle = False
        self.idle_s, self.rest_s = _IDLE_S, _REST_S
        catalogue = None
        if parts.nvme is not None:
            found = _records(parts.directory.residency, parts.nvme.tier)
            catalogue = Catalogue.of(parts.nvme.record_nbytes, parts.nvme.budget_nbytes, found)
        self.hello = Hello(
            rank,
            replace(kv_layout.spec, shard=0),
            pool.num_slots,
            parts.arena.num_slots,
            catalogue,
            health=self._reported,
            replicas=replicas,
        )

    @classmethod
    def open(
        cls,
        config: StoreConfig,
        kv_layout: KVLayout,
        rank: int,
        replicas: int = 1,
        shared: SharedMemory | None = None,
    ) -> WorkerHalf:
        """Open the tiers of this rank.

        Args:
            config: The configuration of this rank.
            kv_layout: The layout of pages in the engine's tensors.
            rank: The number of this rank.
            replicas: Number of consecutive ranks that share host memory and store each page once.
            shared: This memory. None if ``replicas`` is 1.

        Raises:
            ConfigError: See ``TierStore.open``. No tier stays open.
        """
        wakeup = Wakeup()
        parts = assemble(config, PageLayout.of(kv_layout.spec), wakeup.bump, shared=shared)
        half = cls(parts, kv_layout, rank, wakeup, replicas)
        if config.nvme is not None and not config.nvme.read_only:  # the measurement writes to the disk
            rate = _read_rate(config.nvme.path, kv_layout.spec.page_nbytes, half.held_nbytes)
            half.hello = replace(half.hello, read_rate=rate)
        return half

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """Accept the orders for a step, and wait for copies that read blocks which the step overwrites.

        Call this before the step writes KV. The wait is short, but it has no timeout.
        """
        self._now = [*self._later, *orders.before]
        self._launched = self._last_use(None) if self._now else None
        self._later = list(orders.after)
        self._idle = orders.idle
        if orders.fence:
            fenced = frozenset(orders.fence)
            urgent = [c for c in self._now if _reads(c, fenced)]
            self._now = [c for c in self._now if not _reads(c, fenced)]
            self._submit(urgent)
            self._wait_for(fenced)

    def go(self) -> None:
        """Start the step's loads, and the transfers below HBM."""
        commands, self._now = self._now, []
        self._submit(commands)

    def end(self) -> None:
        """Queue copies of the blocks that the launched forward pass writes. They start when the pass has completed."""
        self.go()
        self._launched = self._last_use(None) if self._later else None
        commands, self._later = self._later, []
        self._submit(commands)

    def report(self) -> Report | None:
        """Return the acks received since the last report, and the rank's health if it has changed.

        The result is None if there are no acks and the health has not changed. In a step that computes nothing, first
        wait up to ``idle_s`` seconds for a command to complete.
        """
        deadline = monotonic() + (self.idle_s if self._idle else 0.0)
        while True:
            seen = self._wakeup.count
            acks = self._commands.take()
            if acks or not self._commands.busy or monotonic() >= deadline:
                return self._said(tuple(acks))
            self._wakeup.wait(seen, deadline, self._commands.pause(self.idle_s))

    def empty_report(self) -> Report:
        """Return this rank's report, without acks."""
        return Report({self._rank: ()})

    def rest(self) -> bool:
        """Wait up to 30 s for all copies to and from the engine's tensors. Return whether they are complete.

        If they are, the memory of the tensors may be freed.
        """
        self.end()
        deadline = monotonic() + self.rest_s
        while True:
            seen = self._wakeup.count
            self._commands.advance()
            if not self._commands.at_engine:
                return True
            if monotonic() >= deadline:
                return False
            self._wakeup.wait(seen, deadline, self._commands.pause(_LOOK_S))

    # -- state, close -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless every command from the scheduler is in progress or has been reported."""
        self._commands.check()

    def health(self) -> RankHealth:
        """Return this rank's memory, routes and disk as they are now, compared with its configuration."""
        return replace(
            self._opened,
            pin_nbytes=self._arena.pin_nbytes,
            pinned_nbytes=self._arena.pinned_nbytes(),
            pinning=self._arena.pinning,
            refused=self._arena.refused,
            disk=None if self._nvme is None else self._nvme.state,
            faults=self._commands.faults,
            stalled_steps=self._stalled_steps,
        )

    def stats(self) -> dict[str, object]:
        """Return statistics on host memory, disk and copies, as in ``TierStore.stats``."""
        return {
            "hbm": self._stats(),
            "host": self._arena.stats(),
            "nvme": None if self._nvme is None else self._nvme.stats(),
        }

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Finish copies and close the tiers.

        Disk writes in flight are completed. Pages in host memory are lost.
        """
        if not self._commands.close(timeout_s):
            _log.warning("a copy or I/O thread did not finish within %s s and was abandoned", timeout_s)
        else:
            self._arena.close()

    # -- inside -------------------------------------------------------------------------------------------------

    def _said(self, acks: tuple[Ack, ...]) -> Report | None:
        found = self.health()
        if found == self._reported:
            return Report({self._rank: acks}) if acks else None
        self._reported = found
        return Report({self._rank: acks}, health={self._rank: found})

    def _submit(self, commands: Commands) -> None:
        """Submit commands in order.

        Commands that access the engine's blocks wait for kernels launched earlier.
        """
        for command in commands:
            own = self._own(command)
            if own is None:
                continue
            of_engine = isinstance(own, Transfer) and Tier.HBM in (own.src, own.dst)
            self._commands.submit(own, self._launched if of_engine else None)

    def _wait_for(self, slots: frozenset[int]) -> None:
        start = warned = monotonic()
        while self._commands.reads(slots):
            seen = self._wakeup.count
            self._commands.advance()
            if not self._commands.reads(slots):
                return
            self._wakeup.wait(seen, None, self._commands.pause(_LOOK_S))
            if monotonic() - warned > _FENCE_WARN_S:
                self._stalled_steps += warned == start
                warned = monotonic()
                _log.warning(
                    "the engine has waited %.0f s for copies out of blocks that its step overwrites",
                    warned - start,
                )

    def _own(self, command: Transfer | Erase) -> Transfer | Erase | None:
        """Return this rank's part of a command, with the keys of its shard of the pages. None if it has no part."""
        part = self._owned(command)
        if part is None or self._shard == b"\0\0":
            return part
        command = part
        keys = tuple(PageKey(key[:-2] + self._shard) for key in command.keys)
        if isinstance(command, Erase):
            return replace(command, keys=keys)
        parents = tuple(None if key is None else PageKey(key[:-2] + self._shard) for key in command.parents)
        return replace(command, keys=keys, parents=parents)

    def _owned(self, command: Transfer | Erase) -> Transfer | Erase | None:
        """Return the part of a command for pages that this rank owns, or None if it owns none of them.

        Every rank loads all pages into its HBM.
        """
        if self._replicas == 1 or (isinstance(command, Transfer) and command.dst == Tier.HBM):
            return command
        index = self._rank % self._replicas
        mine = [i for i, key in enumerate(command.keys) if owner(key, self._replicas) == index]
        if len(mine) in (0, len(command.keys)):
            return command if mine else None
        if isinstance(command, Erase):
            return replace(command, keys=tuple(command.keys[i] for i in mine))
        return command.part(mine)


def _read_rate(directory: Path, page_nbytes: int, held_nbytes: int) -> float | None:
    """Measure for a few tenths of a second how fast the disk reads pages, in bytes/s. Return None if that fails.

    Args:
        directory: Where to measure.
        page_nbytes: Size of a page in HBM, in bytes. The result counts these bytes, like ``TierStore.rates``.
        held_nbytes: Number of bytes that are read for a page.
    """
    try:
        rates = disk_probe.ask(directory, held_nbytes)
    except OSError:
        return None
    return rates.reads[rates.readers] * page_nbytes / held_nbytes


def _records(residency: Residency, tier: Tier) -> Iterator[Record]:
    """Yield the tier's records, with the keys that all ranks share."""
    for key, copy in residency.tables[tier].copies.items():
        parent = residency.lineage.parent(key)
        yield _shared(key), None if parent is None else _shared(parent), copy.nbytes


def _shared(key: PageKey) -> PageKey:
    return PageKey(key[:-2] + b"\0\0")


def _reads(command: Transfer | Erase, slots: frozenset[int]) -> bool:
    return (
        isinstance(command, Transfer) and command.src == Tier.HBM and not slots.isdisjoint(command.src_slots)
    )
