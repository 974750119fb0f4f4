"""Transfers in flight: moves are collected into batches, numbered, and remembered until their ack. Metadata only.

Commands leave in the order in which they were decided; an erase that made room leaves before the write that uses it.
What an ack changes is applied by ``directory``.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, NamedTuple

from tierstore.types import Ack, Erase, PageKey, Tier, Traffic, Transfer

if TYPE_CHECKING:
    from tierstore.directory.residency import Residency

BATCH_PAGES = 32
"""Pages of one transfer, and of one hold of the store's lock, at most: a hold is to take no longer than 1 ms."""

_SMOOTHING = 0.2
"""Weight of the newest transfer in the average rate of an edge."""


class Move(NamedTuple):
    """One page along one edge, its slots already reserved."""

    key: PageKey
    src_slot: int
    dst_slot: int
    nbytes: int
    parent: PageKey | None


Edge = tuple[Tier, Tier]


class Transfers:
    """The transfers between reserve and ack, and the commands not yet handed to the mover."""

    def __init__(self, residency: Residency, page_nbytes: int) -> None:
        self.open: dict[int, Transfer] = {}
        self.outbox: deque[Transfer | Erase] = deque()
        self.pages: Counter[Edge] = Counter()
        """Pages in flight on each edge."""
        self.rates: dict[Edge, float] = {}
        """Bytes a second of each edge, averaged over its transfers, of each in its share of the time in which any was
        worked on (``Ack.seconds``); absent until the first one ends."""
        self.arrived: Counter[Edge] = Counter()
        """Pages that have crossed each edge since open."""
        self.moved_at: dict[Edge, float] = {}
        """When the edge last made progress or began to carry something."""
        self._residency = residency
        self.page_nbytes = page_nbytes
        self._moves: dict[Edge, list[Move]] = defaultdict(list)
        self._next_id = 0

    def add(self, src: Tier, dst: Tier, *moves: Move) -> None:
        """Add reserved moves to the current batch of their edge."""
        self._moves[src, dst].extend(moves)

    def emit(self, now: float) -> None:
        """Turn the collected moves into transfers and queue them for the mover, after erases decided before them."""
        self.emit_erases()
        for edge, moves in self._moves.items():
            if moves and not self.pages[edge]:
                self.moved_at[edge] = now
            for start in range(0, len(moves), BATCH_PAGES):
                self._queue(edge, moves[start : start + BATCH_PAGES])
        self._moves.clear()

    def emit_erases(self) -> None:
        """Queue an erase for every record that residency released."""
        by_tier: dict[Tier, list[PageKey]] = defaultdict(list)
        erased = self._residency.erased
        while erased:
            tier, key = erased.popleft()
            by_tier[tier].append(key)
        self.outbox.extend(Erase(tier, tuple(keys)) for tier, keys in by_tier.items())

    def settle(self, ack: Ack, now: float) -> Transfer:
        """Forget a transfer that has ended, and learn the edge's rate. Late pages stay, as the whole transfer."""
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
        """Return the pages reserved on the edge and not settled, including the batch being collected."""
        return self.pages[src, dst] + len(self._moves.get((src, dst), ()))

    def traffic(self) -> dict[Edge, Traffic]:
        """Return what each edge carries that has carried a page."""
        edges = {*self.pages, *self.arrived, *self._moves}
        return {edge: Traffic(self.carrying(*edge), self.arrived[edge]) for edge in edges}

    def seconds_for(self, edge: Edge, pages: int) -> float:
        """Return the expected time until ``pages`` more have crossed the edge; 0 while no rate is known."""
        rate = self.rates.get(edge)
        if rate is None:
            return 0.0
        return (self.carrying(*edge) + pages) * self.page_nbytes / rate

    def page_seconds(self, edge: Edge) -> float:
        """Return the seconds a page takes along the edge at the measured rate; 0 while none is known."""
        rate = self.rates.get(edge)
        return 0.0 if rate is None else self.page_nbytes / rate

    def stalled(self, edge: Edge, now: float, limit_s: float) -> bool:
        """Return whether the edge carries pages and has made no progress for ``limit_s``."""
        return self.pages[edge] > 0 and now - self.moved_at[edge] > limit_s

    def quiet(self, tier: Tier, now: float, limit_s: float) -> bool:
        """Return whether nothing moves into or out of the tier, except on edges stalled for ``limit_s``."""
        return not any(
            tier in edge and self.carrying(*edge) and not self.stalled(edge, now, limit_s)
            for edge in {*self.pages, *self._moves}
        )

    def take(self) -> list[Transfer | Erase]:
        """Return the queued commands for the mover, in order."""
        commands = list(self.outbox)
        self.outbox.clear()
        return commands

    def idle(self) -> bool:
        """Whether nothing is in flight or waiting to be handed over."""
        return not self.open and not self.outbox

    def _queue(self, edge: Edge, moves: list[Move]) -> None:
        keys, src_slots, dst_slots, sizes, parents = zip(*moves, strict=True)
        src, dst = edge
        transfer = Transfer(self._next_id, keys, src, src_slots, dst, dst_slots, sum(sizes), parents)
        self._next_id += 1
        self.open[transfer.id] = transfer
        self.pages[edge] += len(moves)
        self.outbox.append(transfer)
