"""What the simulated prefetcher does ahead of need: the planner's reads and loads, as far as the edges are free."""

from __future__ import annotations

from collections import deque
from math import inf
from typing import TYPE_CHECKING

from prefetch.planner import plan
from prefetch.terms import Machine
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from prefetch.terms import Want
    from tierstore.bench.prefetch_machine import Memory
    from tierstore.types import PageKey

_PLAN_PAGES = 1024


class Ahead:
    """Copies that nobody waits for, in the order of the last plan, and what they were good for."""

    def __init__(self, memory: Memory) -> None:
        self.brought = 0
        self.useful = 0
        self.late = 0
        """Pages that were used before they were there."""
        self._memory = memory
        self._reads: deque[PageKey] = deque()
        self._loads: deque[PageKey] = deque()
        self._unused: set[PageKey] = set()

    def plan(self, wants: Sequence[Want], now: float) -> None:
        """From now on copies are made for these; what loads of them need is kept in HBM, and nothing else."""
        memory, sizes = self._memory, self._memory.sizes
        machine = Machine(
            read_s=sizes.read_s,
            load_s=sizes.load_s,
            hbm_pages=sizes.hbm - len(memory.pinned),
            host_pages=sizes.host // 4,
            compute=None,
        )
        found = plan(wants, machine, now, most_pages=_PLAN_PAGES)
        memory.keep({key for want in wants for key in want.keys[: found.outcomes[want.request_id].load]})
        self._reads = deque(key for p in found.promotions if p.src == Tier.NVME for key in p.keys)
        self._loads = deque(key for p in found.promotions if p.src == Tier.HOST for key in p.keys)

    def copy(self, now: float, until: float) -> None:
        """Starts the copies that may start before ``until``."""
        self._read(now, until)
        self._load(now, until)

    def used(self, keys: Sequence[PageKey], at: float) -> None:
        """A request takes these pages."""
        for key in keys:
            if key in self._unused:
                self._unused.remove(key)
                self.useful += 1
                self.late += self._memory.hbm.get(key, inf) > at

    def _read(self, now: float, until: float) -> None:
        memory = self._memory
        while self._reads and max(memory.disk_free, now) < until:
            key = self._reads.popleft()
            if memory.tier(key) == Tier.NVME:
                memory.disk_free = max(memory.disk_free, now) + memory.sizes.read_s
                memory.host.put(key, memory.disk_free)
                self._bring(key)

    def _load(self, now: float, until: float) -> None:
        memory = self._memory
        while self._loads:
            key = self._loads[0]
            there = memory.host.there.get(key)
            if there is None and memory.tier(key) == Tier.NVME and self._reads:
                return
            start = max(memory.link_free, now, there or 0.0)
            if there is not None and start >= until:
                return
            if not memory.room_ahead():
                return
            self._loads.popleft()
            if memory.tier(key) == Tier.HOST:
                memory.link_free = start + memory.sizes.load_s
                memory.hbm[key] = memory.link_free
                self._bring(key)

    def _bring(self, key: PageKey) -> None:
        if key not in self._unused:
            self._unused.add(key)
            self.brought += 1
