"""Transfers in flight: moves are collected into numbered batches, which are tracked until their acks.

This module handles only metadata. Commands are sent in the order in which they were decided on, so an erase
that frees space precedes the write that uses the space. ``directory`` applies the results.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from tierstore.types import Ack, Erase, PageKey, Tier, Traffic, Transfer

if TYPE_CHECKING:
    from tierstore.directory.residency import Residency

BATCH_PAGES = 32
"""Maximum number of pages per transfer, and of pages that are processed without releasing the store's lock.

With this value, the lock is held for less than about 1 ms at a time.
"""

_SMOOTHING = 0.2
"""Weight of the latest transfer in the moving average of an edge's throughput."""


class Move(NamedTuple):
    """A page to copy along an edge. Its slots are already reserved.

    ``nbytes`` is the number of bytes reserved in the destination, or 0 if the destination is memory.
    """

    key: PageKey
    src_slot: int
    dst_slot: int
    nbytes: int
    parent: PageKey | None


Edge = tuple[Tier, Tier]


class Transfers:
    """The transfers that are not acked yet, and the commands that have not been passed to the mover yet."""

    def __init__(self, residency: Residency, page_nbytes: int) -> None:
        self.open: dict[int, Transfer] = {}
        self.outbox: deque[Transfer | Erase] = deque()
        self.pages: Counter[Edge] = Counter()
        """Number of pages in flight on each edge."""
        self.rates: dict[Edge, float] = {}
        """Moving average of the throughput of each edge, in bytes/s.

        An edge has no entry until its first transfer has finished. Concurrent transfers share the elapsed
        time (``Ack.seconds``), so that no time is counted twice.
        """
        self.arrived: Counter[Edge] = Counter()
        """Number of pages that have arrived on each edge since the store was opened."""
        self.moved_at: dict[Edge, float] = {}
        """Monotonic time at which each edge last made progress, or last got a page while it was idle."""
        self._residency = residency
        self.page_nbytes = page_nbytes
        self._moves: dict[Edge, list[Move]] = defaultdict(list)
        self._next_id = 0

    def add(self, src: Tier, dst: Tier, *moves: Move) -> None:
        """Add moves to the current batch of their edge. Their slots must be reserved already."""
        self._moves[src, dst].extend(moves)

    def emit(self, now: float) -> None:
        """Turn the collected moves into transfers and queue them for the mover, after pending erases."""
        self.emit_erases()
        for edge, moves in self._moves.items():
            if moves and not self.pages[edge]:
                self.moved_at[edge] = now
            for start in range(0, len(moves), BATCH_PAGES):
                self._queue(edge, moves[start : start + BATCH_PAGES])
        self._moves.clear()

    def emit_erases(self) -> None:
        """Queue an erase of every record that residency no longer needs."""
        by_tier: dict[Tier, list[PageKey]] = defaultdict(list)
        erased = self._residency.erased
        while erased:
            tier, key = erased.popleft()
            by_tier[tier].append(key)
        self.outbox.extend(Erase(tier, tuple(keys)) for tier, keys in by_tier.items())

    def settle(self, ack: Ack, now: float) -> Transfer:
        """Remove an acked transfer from ``open``, and update the edge's throughput.

        If the ack reports late pages, a transfer of these pages remains, with the same id.

        Returns:
            The transfer, with all its pages.
        """
        transfer = self.open.pop(ack.transfer_id)
        edge = (transfer.src, transfer.dst)
        self.pages[edge] -= len(transfer.keys) - len(ack.late)
        if ack.late:
            self.open[transfer.id] = transfer.part(ack.late)
        self.moved_at[edge] = now
        self.arrived[edge] += ack.num_ready
        if ack.num_ready and ack.seconds > 0:
            rate = ack.num_ready * self.page_nbytes / ack.seconds
            self.rates[edge] = self.rates.get(edge, rate) * (1 - _SMOOTHING) + rate * _SMOOTHING
        return transfer

    def carrying(self, src: Tier, dst: Tier) -> int:
        """Return the number of pages on the edge that are not acked yet, including the current batch."""
        return self.pages[src, dst] + len(self._moves.get((src, dst), ()))

    def traffic(self) -> dict[Edge, Traffic]:
        """Return the traffic of every edge over which at least one page has been sent."""
        edges = {*self.pages, *self.arrived, *self._moves}
        return {edge: Traffic(self.carrying(*edge), self.arrived[edge]) for edge in edges}

    def seconds_for(self, edge: Edge, pages: int) -> float:
        """Return the expected number of seconds until ``pages`` more pages have arrived.

        The result is 0 if the throughput is unknown.
        """
        rate = self.rates.get(edge)
        if rate is None:
            return 0.0
        return (self.carrying(*edge) + pages) * self.page_nbytes / rate

    def page_seconds(self, edge: Edge) -> float:
        """Return the number of seconds per page at the measured throughput, 0 if that is unknown."""
        rate = self.rates.get(edge)
        return 0.0 if rate is None else self.page_nbytes / rate

    def stalled(self, edge: Edge, now: float, limit_s: float) -> bool:
        """Return whether the edge has pages in flight and has made no progress for ``limit_s`` seconds."""
        return self.pages[edge] > 0 and now - self.moved_at[edge] > limit_s

    def quiet(self, tier: Tier, now: float, limit_s: float) -> bool:
        """Return whether nothing is being copied into or out of the tier.

        Edges that have made no progress for ``limit_s`` seconds are ignored.
        """
        return not any(
            tier in edge and self.carrying(*edge) and not self.stalled(edge, now, limit_s)
            for edge in {*self.pages, *self._moves}
        )

    def take(self) -> list[Transfer | Erase]:
        """Return the queued commands for the mover, in order, and clear the queue."""
        commands = list(self.outbox)
        self.outbox.clear()
        return commands

    def idle(self) -> bool:
        """Return whether no transfer is in flight and no command is queued."""
        return not self.open and not self.outbox

    def _queue(self, edge: Edge, moves: list[Move]) -> None:
        keys, src_slots, dst_slots, sizes, parents = zip(*moves, strict=True)
        src, dst = edge
        transfer = Transfer(self._next_id, keys, src, src_slots, dst, dst_slots, sum(sizes), parents)
        self._next_id += 1
        self.open[transfer.id] = transfer
        self.pages[edge] += len(moves)
        self.outbox.append(transfer)
