"""The machine that ``bench prefetch`` simulates: three tiers of pages, an edge from disk and one into HBM, no bytes."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from prefetch import Compute
    from tierstore.types import PageKey


@dataclass(frozen=True, slots=True)
class Sizes:
    """Pages of each tier, seconds a page to read from NVMe and to load into HBM, slots to decode in, seconds a step.

    ``prefill``: of tokens, not of pages.
    """

    hbm: int
    host: int
    nvme: int
    read_s: float
    load_s: float
    prefill: Compute
    block_tokens: int
    decode_slots: int = 32
    step_s: float = 0.02


class _Lru:
    """Pages of a tier below HBM with the time from which each is there, least recently used first."""

    def __init__(self, pages: int) -> None:
        self.there: OrderedDict[PageKey, float] = OrderedDict()
        self._pages = pages

    def put(self, key: PageKey, at: float) -> None:
        self.there[key] = min(at, self.there.get(key, at))
        self.there.move_to_end(key)
        while len(self.there) > self._pages:
            self.there.popitem(last=False)


class Memory:
    """Where pages are. A page computed is in all tiers from then on: writing it down costs nothing here."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.hbm: OrderedDict[PageKey, float] = OrderedDict()
        self.host = _Lru(sizes.host)
        self.nvme = _Lru(sizes.nvme)
        self.pinned: Counter[PageKey] = Counter()
        self.kept: set[PageKey] = set()
        """Pages that only what is asked for now displaces, after all others."""
        self._victims: deque[PageKey] = deque()
        self.disk_free = 0.0
        self.link_free = 0.0

    def tier(self, key: PageKey) -> Tier | None:
        """The fastest tier that has the page, or will once a copy under way has ended."""
        if key in self.hbm:
            return Tier.HBM
        if key in self.host.there:
            return Tier.HOST
        return Tier.NVME if key in self.nvme.there else None

    def match(self, keys: Sequence[PageKey]) -> list[Tier]:
        """Tiers of the longest prefix that some tier has."""
        found: list[Tier] = []
        for key in keys:
            tier = self.tier(key)
            if tier is None:
                break
            found.append(tier)
        return found

    @property
    def free(self) -> int:
        """Slots of HBM without a page."""
        return self.sizes.hbm - len(self.hbm)

    def make_room(self, pages: int) -> None:
        """Drops the least recently used pages that nobody uses, those that are kept last."""
        missing = pages - self.free
        if missing <= 0:
            return
        idle = [key for key in self.hbm if key not in self.pinned]
        for key in sorted(idle, key=self.kept.__contains__)[:missing]:
            del self.hbm[key]

    def keep(self, keys: set[PageKey]) -> None:
        """These are kept from now on, and no others."""
        self.kept = keys
        self._victims = deque(key for key in self.hbm if key not in self.pinned and key not in keys)

    def room_ahead(self) -> bool:
        """Room for one page brought up ahead of need, since ``keep``: it displaces none that is kept or in use."""
        while self.free <= 0 and self._victims:
            key = self._victims.popleft()
            if key in self.hbm and key not in self.pinned:
                del self.hbm[key]
        return self.free > 0

    def pin(self, keys: Iterable[PageKey]) -> None:
        """They stay in HBM until ``unpin``."""
        self.pinned.update(keys)

    def unpin(self, keys: Iterable[PageKey]) -> None:
        """Ends one pin each."""
        for key in keys:
            self.pinned[key] -= 1
            if not self.pinned[key]:
                del self.pinned[key]

    def store(self, keys: Sequence[PageKey], at: float) -> None:
        """They were used or computed: in HBM, and below; tails are older than heads."""
        for key in reversed(keys):
            self.hbm[key] = min(at, self.hbm.get(key, at))
            self.hbm.move_to_end(key)
            self.host.put(key, at)
            self.nvme.put(key, at)
