"""The half in a worker: it holds the tiers' bytes and carries out the orders of the scheduler's half.

Calls come from the worker's thread, once per step: ``begin``, ``go``, ``end``, ``report``. This half decides
nothing. ``CommandQueue`` passes commands to the mover, some only after an event of the engine, and keeps
account of those that have not ended.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from threading import Condition, Thread
from time import monotonic
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.messages import Catalogue, Hello, Orders, Report
from tierstore.build import assemble, health
from tierstore.gpu.device import Between
from tierstore.mover import LocalMover
from tierstore.nvme import disk_probe
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.types import Erase, PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence, Set
    from pathlib import Path

    from tierstore.adapters.vllm.kv_layout import KVLayout
    from tierstore.build import Parts
    from tierstore.config import StoreConfig
    from tierstore.directory.residency import Residency
    from tierstore.metrics import RankHealth
    from tierstore.mover import Mover
    from tierstore.ranks import Record
    from tierstore.types import Ack, Event

    Commands = Sequence[Transfer | Erase]

_queue_log = logging.getLogger("tierstore.adapters.vllm.feed")

_POLL_S = 0.001


class CommandQueue:
    """The commands of one mover and their acks. Thread-safe.

    If the device reports the end of a copy only when polled, a thread polls while a copy is in flight,
    because steps of the engine may take long. Otherwise there is no thread.
    """

    def __init__(self, mover: Mover, wakeup: Wakeup) -> None:
        self._mover = mover
        self._wakeup = wakeup
        self._open: dict[int, Transfer] = {}
        self._queue: deque[tuple[Event, Transfer]] = deque()
        self._acks: list[Ack] = []
        self._turn = Condition()
        self._thread: Thread | None = None
        self._closing = False
        self.faults = 0
        """Number of unexpected errors of the thread. Each was logged."""

    def submit(self, command: Transfer | Erase, after: Event | None = None) -> None:
        """Start a command once ``after`` has happened. Waiting commands start in order. Never blocks."""
        with self._turn:
            if isinstance(command, Erase):
                self._mover.submit(command)
                return
            self._open[command.id] = command
            if after is None or (not self._queue and after.query()):
                self._mover.submit(command)
            else:
                self._queue.append((after, command))
            if self._queue or self._mover.polled:
                self._watch()

    def advance(self) -> None:
        """Start the commands that may start now, and process the acks of those that have ended."""
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
        """Whether a command has not ended."""
        return bool(self._open)

    @property
    def at_engine(self) -> bool:
        """Return whether a copy out of or into the engine's blocks has not ended."""
        with self._turn:
            return any(Tier.HBM in (t.src, t.dst) for t in self._open.values())

    def reads(self, slots: Set[int]) -> bool:
        """Return whether a copy out of one of these blocks has not ended."""
        with self._turn:
            return any(t.src == Tier.HBM and not slots.isdisjoint(t.src_slots) for t in self._open.values())

    def pause(self, at_most_s: float) -> float:
        """Return the seconds until ``advance`` must be called for events that do not wake the thread."""
        return _POLL_S if self._queue or self._mover.polled else at_most_s

    def check(self) -> None:
        """Raise AssertionError unless every waiting command counts as not ended."""
        with self._turn:
            strange = [t.id for _, t in self._queue if t.id not in self._open]
        if strange:
            raise AssertionError(f"transfers {strange} wait to be started and are not open")

    def close(self, timeout_s: float) -> bool:
        """Start no more commands, and close the mover. Returns whether all threads ended in time."""
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
        if self._thread is None and not self._closing:
            self._thread = Thread(target=self._run, name="tierstore-vllm-feed", daemon=True)
            self._thread.start()
        self._turn.notify_all()

    def _run(self) -> None:
        with self._turn:
            while not self._closing:
                try:
                    self._advance()
                except Exception:  # noqa: BLE001 - a thread's top: log it, go on
                    self.faults += 1
                    _queue_log.exception("commands could not be handed on")
                self._turn.wait(_POLL_S if self._queue or self._mover.polled else None)


_log = logging.getLogger("tierstore.adapters.vllm.working")

_LOOK_S = 0.05
_IDLE_S = 0.002
"""Longest wait for the end of a copy or a read in a step that computes nothing.

Without the wait, its loop would take the processor, and within one process Python's lock, from the threads that copy
and read.
"""
_FENCE_WARN_S = 10.0
_CLOSE_S = 30.0
_REST_S = 30.0


class WorkerHalf:
    """The opened tiers of one rank, and its tensors of the engine."""

    def __init__(self, parts: Parts, kv_layout: KVLayout, rank: int, wakeup: Wakeup) -> None:
        """Take over opened parts, whose threads call ``wakeup``. Use ``open``."""
        # No TierStore, whose directory would take decisions that belong to the scheduler's half. This half
        # assembles the tiers itself and drives the mover. From the directory it takes only the records that
        # the disk held at open.
        assert parts.arena is not None
        self._wakeup = wakeup
        pool = parts.device.register(parts.layout, (kv_layout.pages,))
        # A request waits for all of its pages, so no load is split by layers.
        copies = parts.device.open_copies(Between(pool, parts.arena, wakeup.bump, most_groups=1))
        assert isinstance(parts.mover, LocalMover)
        parts.mover.attach(copies)
        self._rank = rank
        self._shard = kv_layout.spec.shard.to_bytes(2, "big")
        self._last_use: Callable[[Event | None], Event | None] = parts.device.last_use
        self._arena, self._nvme, self._stats = parts.arena, parts.nvme, parts.device.stats
        self._commands = CommandQueue(parts.mover, wakeup)
        self._opened = health(parts.device, parts.arena, parts.nvme)  # device and route stay as they are
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
        )

    @classmethod
    def open(cls, config: StoreConfig, kv_layout: KVLayout, rank: int) -> WorkerHalf:
        """Open the tiers. ConfigError as for ``TierStore.open``, with nothing changed."""
        wakeup = Wakeup()
        half = cls(assemble(config, PageLayout.of(kv_layout.spec), wakeup.bump), kv_layout, rank, wakeup)
        if config.nvme is not None and not config.nvme.read_only:  # the measurement writes to the disk
            half.hello = replace(
                half.hello, read_rate=_read_rate(config.nvme.path, kv_layout.spec.page_nbytes)
            )
        return half

    # -- a step -------------------------------------------------------------------------------------------------

    def begin(self, orders: Orders) -> None:
        """End copies out of the blocks that the step overwrites, before it may write KV.

        Waits for these copies, which are in flight and short.
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
        """Queue copies of the blocks that the launched forward pass writes. They start when it has ended."""
        self.go()
        self._launched = self._last_use(None) if self._later else None
        commands, self._later = self._later, []
        self._submit(commands)

    def report(self) -> Report | None:
        """Return the acks since the last report, and the rank's health if it has changed. None if neither.

        In a step that computes nothing, first waits a moment for a command to end.
        """
        deadline = monotonic() + (self.idle_s if self._idle else 0.0)
        while True:
            seen = self._wakeup.count
            acks = self._commands.take()
            if acks or not self._commands.busy or monotonic() >= deadline:
                return self._said(tuple(acks))
            self._wakeup.wait(seen, deadline, self._commands.pause(self.idle_s))

    def empty_report(self) -> Report:
        """Return a report without acks."""
        return Report({self._rank: ()})

    def rest(self) -> bool:
        """Wait up to 30 s until all copies out of and into the engine's tensors have ended. Returns whether they have.

        If they have, the memory of the tensors may be freed.
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

    # -- life ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless every ordered command is in flight or was reported."""
        self._commands.check()

    def health(self) -> RankHealth:
        """Return the memory, routes and disk that this rank has now, compared with its configuration."""
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
        """Return the figures of host memory, disk and copies, as in ``TierStore.stats``."""
        return {
            "hbm": self._stats(),
            "host": self._arena.stats(),
            "nvme": None if self._nvme is None else self._nvme.stats(),
        }

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """End copies and close the tiers. Completes disk writes in flight; host memory's pages are lost."""
        if not self._commands.close(timeout_s):
            _log.warning("a copy or I/O thread did not end within %s s and was left behind", timeout_s)
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
        """Submit commands in order. Those that use the engine's blocks wait for kernels launched before."""
        for command in commands:
            own = self._own(command)
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
                _log.warning("copies out of reused blocks have not ended in %.0f s", warned - start)

    def _own(self, command: Transfer | Erase) -> Transfer | Erase:
        """Return the same command for this rank's shard of the pages."""
        if self._shard == b"\0\0":
            return command
        keys = tuple(PageKey(key[:-2] + self._shard) for key in command.keys)
        if isinstance(command, Erase):
            return replace(command, keys=keys)
        parents = tuple(None if key is None else PageKey(key[:-2] + self._shard) for key in command.parents)
        return replace(command, keys=keys, parents=parents)


def _read_rate(directory: Path, page_nbytes: int) -> float | None:
    """Measure the disk in some tenths of a second and return its read rate in bytes/s; None if it refuses."""
    try:
        rates = disk_probe.ask(directory, page_nbytes)
    except OSError:
        return None
    return rates.reads[rates.readers]


def _records(residency: Residency, tier: Tier) -> Iterator[Record]:
    """Yield the records of the tier, under the keys that all ranks share."""
    for key, copy in residency.tables[tier].copies.items():
        parent = residency.lineage.parent(key)
        yield _shared(key), None if parent is None else _shared(parent), copy.nbytes


def _shared(key: PageKey) -> PageKey:
    return PageKey(key[:-2] + b"\0\0")


def _reads(command: Transfer | Erase, slots: frozenset[int]) -> bool:
    return (
        isinstance(command, Transfer) and command.src == Tier.HBM and not slots.isdisjoint(command.src_slots)
    )
