"""How much slower a kernel that is bound by memory is while pages stream to or from host memory.

What the link moves is read from or written to HBM too: the least that must be lost is its share of HBM's bandwidth.
A contiguous copy beside the kernel shows what the card itself loses; the rest is ours. Two kernels, as a card may lose
more where writes come among reads only: one that only reads, and one that writes as much as it reads.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import chain, pairwise, zip_longest
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from tierstore.bench.link import Ceiling, Rig, device_of, settle
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.bench.link import Direction, Path
    from tierstore.types import Transfer

_WARM = 2
_POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class BesideRow:
    """``kernel``: "read" or "copy". ``slowdown``: median of the pairs, 0.03 for 3 %; ``share``: what copies take of the
    bytes that HBM moves then; ``alone_tbps``: of the kernel, what it reads and writes.
    """

    kernel: str
    way: str
    direction: Direction
    piece_bytes: int
    slowdown: float
    share: float
    alone_tbps: float
    gbps: float

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {"what": "beside", **asdict(self)}


class Load(Protocol):
    """Copies that go on by themselves. ``prepare`` comes before ``start``."""

    name: str
    piece_nbytes: int
    nbytes: int
    twice: bool
    """Whether both at once are ``nbytes`` each way, not together."""

    def prepare(self, direction: Direction) -> None:
        """Does what is not to be measured."""
        ...

    def start(self, direction: Direction) -> None:
        """Queues them."""
        ...

    def finish(self) -> None:
        """Waits until they have ended."""
        ...


class Reading:
    """A sum over ``nbytes`` of the device, again and again."""

    name = "read"

    def __init__(self, device: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device_of(device)
        self._memory = torch.zeros(nbytes // 8, dtype=torch.int64, device=self._device)
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def seconds(self, times: int) -> float:
        """Of one, the median."""
        if self._stream is None:
            return median(self._timed() for _ in range(times))
        with torch.cuda.stream(self._stream):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]  # type: ignore[no-untyped-call]
            marks[0].record()
            for mark in marks[1:]:
                self._once()
                mark.record()
            marks[-1].synchronize()
        lengths: list[float] = [a.elapsed_time(b) for a, b in pairwise(marks)]
        return median(lengths[_WARM:]) / 1e3

    def _timed(self) -> float:
        start = perf_counter()
        self._once()
        return perf_counter() - start

    def _once(self) -> None:
        self._memory.sum()


class Copying(Reading):
    """Reads one half of ``nbytes`` and writes the other."""

    name = "copy"

    def __init__(self, device: str, nbytes: int) -> None:
        super().__init__(device, nbytes)
        half = len(self._memory) // 2
        self._from, self._to = self._memory[:half], self._memory[half : 2 * half]

    def _once(self) -> None:
        torch.bitwise_not(
            self._from, out=self._to
        )  # torch's copy_ would be the driver's, by whatever it takes


class Contiguous:
    """Copies of one block."""

    name = "contiguous"
    twice = True

    def __init__(self, ceiling: Ceiling, times: int) -> None:
        self.piece_nbytes = ceiling.nbytes
        self.nbytes = ceiling.nbytes * times
        self._ceiling = ceiling
        self._times = times

    def prepare(self, direction: Direction) -> None:
        """Nothing to do."""

    def start(self, direction: Direction) -> None:
        """Queues them."""
        for _ in range(self._times):
            self._ceiling.queue(direction)

    def finish(self) -> None:
        """Waits until they have ended."""
        settle(self._ceiling.device)


class Pages:
    """Scattered pages by one of the ways they can take."""

    twice = False

    def __init__(self, device: str, piece_nbytes: int, nbytes: int, path: Path) -> None:
        self.piece_nbytes = piece_nbytes
        self.rig = Rig(device, piece_nbytes, nbytes, path)
        self.name = self.rig.path
        self.nbytes = self.rig.num_pages * self.rig.page_nbytes
        self._left = 0
        self._transfers: dict[Direction, Sequence[Transfer]] = {}

    def prepare(self, direction: Direction) -> None:
        """Does what is not to be measured."""
        chance = np.random.default_rng(0)
        host, there = (chance.permutation(self.rig.num_pages) for _ in "ht")
        split = {"h2d": len(host), "d2h": 0, "both": len(host) // 2}[direction]
        up = self.rig.transfers(Tier.HBM, host[:split], there[:split])
        down = self.rig.transfers(Tier.HOST, host[split:], there[split:])
        self._transfers[direction] = [x for x in chain(*zip_longest(up, down)) if x is not None]

    def start(self, direction: Direction) -> None:
        """Queues them."""
        transfers = self._transfers[direction]
        self._left = len(transfers)
        for transfer in transfers:
            self.rig.copies.submit(transfer)

    def finish(self) -> None:
        """Waits until they have ended. RuntimeError if one failed."""
        while self._left:
            for ack in self.rig.copies.poll():
                if not ack.ok:
                    raise RuntimeError("a copy failed")
                self._left -= 1
            sleep(_POLL_S)


def beside_row(reading: Reading, load: Load, direction: Direction, times: int, pairs: int) -> BesideRow:
    """One figure. The copies must outlast ``times`` readings. ``reading``: or copying."""
    load.prepare(direction)
    found = []
    for _ in range(pairs + 1):
        alone = reading.seconds(times)
        start = perf_counter()
        load.start(direction)
        loaded = reading.seconds(times)
        load.finish()
        moved = load.nbytes * (2 if direction == "both" and load.twice else 1)
        found.append((alone, loaded, moved / (perf_counter() - start)))
    del found[0]
    alone, loaded, rate = (median(column) for column in zip(*found, strict=True))
    bandwidth = reading.nbytes / alone
    return BesideRow(
        reading.name,
        load.name,
        direction,
        load.piece_nbytes,
        median(b / a - 1 for a, b, _ in found),
        rate / (rate + reading.nbytes / loaded),
        bandwidth / 1e12,
        rate / 1e9,
    )
