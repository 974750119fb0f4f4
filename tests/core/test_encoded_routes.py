"""Tests of slabs between the link and the coding kernels. Streams run in any order that their events allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support import planting
from tests.support.planting import Bug
from tierstore.gpu import slabs

STRIDE = 16
SLOTS, SLAB_PAGES = 24, 3
RUNS = 30


class Stream:
    """A fake stream. ``Machine.run`` runs the stream's work piece by piece. A piece returns False if it has to wait."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.work: deque[Callable[[], bool]] = deque()

    def queue(self, act: Callable[[], None]) -> None:
        def run() -> bool:
            act()
            return True

        self.work.append(run)

    def wait_event(self, event: Event) -> None:
        number = event.recorded
        self.work.append(lambda: event.happened >= number)


class Event:
    def __init__(self) -> None:
        self.recorded = self.happened = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded
        stream.queue(lambda: setattr(self, "happened", number))


class Machine:
    """A fake GPU, whose codec inverts each byte, and its link. Host memory and slots are rows of ``STRIDE`` bytes.

    It also serves as the route's ``Card`` and coder.
    """

    def __init__(self, module: ModuleType, patch: pytest.MonkeyPatch, seed: int) -> None:
        self.chance = random.Random(seed)
        self.current: Stream | None = None
        numbers = np.random.default_rng(seed)
        self.slots, self.host = numbers.integers(0, 256, (2, SLOTS, STRIDE), dtype=np.uint8)
        self.up, self.down, *side = self.streams = [Stream() for _ in range(4)]
        rings = [module.Ring(SLAB_PAGES * STRIDE, stream, self) for stream in side]
        ends = [module.SlabCopies(ring, self, STRIDE, Link.of(self, ring)) for ring in rings]
        self.batch = module.Batch
        self.route = module.SlabRoute("turned over", *ends)

    def load(self, slots: list[int], host: list[int]) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self.route.load(np.array(slots), np.array(host), self.up)
        return found

    def save(self, slots: list[int], host: list[int]) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self.route.save(np.array(slots), np.array(host), self.down)
        return found

    def begin(self, slots: NDArray[np.int64], card: Any) -> Any:
        return self.batch(slots, card.uploaded(slots), card.flags(len(slots)))

    def encode(self, share: Any) -> None:
        self._code(share, back=False)

    def decode(self, share: Any) -> None:
        self._code(share, back=True)

    def run(self) -> None:
        """Run all queued work piece by piece. Each piece comes from a random stream that does not have to wait."""
        while waiting := [stream for stream in self.streams if stream.work]:
            self.chance.shuffle(waiting)
            ran = next((stream for stream in waiting if stream.work[0]()), None)
            assert ran is not None, "deadlock: every stream waits for another"
            ran.work.popleft()

    def _code(self, share: Any, *, back: bool) -> None:
        assert self.current is share.stream
        its = slice(share.first, share.first + share.pages)
        slots, flags = share.batch.on_device.numpy()[its], share.batch.flags.numpy()[its]
        rows = share.rows.numpy().reshape(-1, STRIDE)

        def act() -> None:
            if back:
                self.slots[slots] = ~rows[: len(slots)]
            else:
                rows[: len(slots)] = ~self.slots[slots]
            np.copyto(flags, slots % 7 == 0)

        self.current.queue(act)

    event = Event

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(slots)

    def flags(self, pages: int) -> torch.Tensor:
        return torch.zeros(pages, dtype=torch.int32)

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        self.current = stream
        yield
        self.current = None


class Link:
    """A route between a slab's rows and host memory."""

    pieces = 1

    def __init__(self, machine: Machine, rows: NDArray[np.uint8]) -> None:
        self._machine, self._rows = machine, rows

    @classmethod
    def of(cls, machine: Machine, ring: Any) -> list[Link]:
        """Return one route per slab of the ring."""
        memory = ring.memory.numpy().reshape(-1, SLAB_PAGES, STRIDE)
        return [cls(machine, slab) for slab in memory]

    def load(self, rows: NDArray[np.int64], host: NDArray[np.int64], stream: Stream) -> None:
        slab = self._rows
        stream.queue(lambda: slab.__setitem__(rows, self._machine.host[host]))

    def save(self, rows: NDArray[np.int64], host: NDArray[np.int64], stream: Stream) -> None:
        slab = self._rows
        stream.queue(lambda: self._machine.host.__setitem__(host, slab[rows]))


def require_right(module: ModuleType, seed: int) -> None:
    """Queue loads and saves of many sizes, run them, and assert that all pages and error flags are correct."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(module, patch, seed)
        slots, host = (machine.chance.sample(range(SLOTS), SLOTS) for _ in "sh")
        want_slots, want_host = machine.slots.copy(), machine.host.copy()
        told = []
        while slots:
            number = min(len(slots), machine.chance.choice([1, 2, 4, 7, 11]))
            some, places = slots[:number], host[:number]
            del slots[:number], host[:number]
            if machine.chance.random() < 0.5:
                want_slots[some] = ~machine.host[places]
                told.append((machine.load(some, places), some))
            else:
                want_host[places] = ~machine.slots[some]
                told.append((machine.save(some, places), some))
        machine.run()
        np.testing.assert_array_equal(machine.slots, want_slots)
        np.testing.assert_array_equal(machine.host, want_host)
        for flags, of in told:
            assert flags.tolist() == [slot % 7 == 0 for slot in of]


def require_all_right(module: ModuleType) -> None:
    for seed in range(RUNS):
        require_right(module, seed)


def require_two_in_turn(module: ModuleType) -> None:
    """Assert that two slabs of three pages are encoded while the link is idle, and that the other pages wait."""
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine(module, patch, 0)
        machine.save(list(range(12)), list(range(12)))
        encodes = machine.streams[3]
        while encodes.work and encodes.work[0]():
            encodes.work.popleft()
        rows = machine.route.saves.ring.memory.numpy().reshape(-1, STRIDE)
        np.testing.assert_array_equal(rows, ~machine.slots[:6])
        assert encodes.work
        machine.run()
        np.testing.assert_array_equal(machine.host[:12], ~machine.slots[:12])


RING_BUGS = [
    Bug("a load fills a slab that is not empty yet", "                stream.wait_event(slab.free)\n", ""),
    Bug("a load is decoded before it has arrived", "                kernels.wait_event(slab.full)\n", ""),
    Bug("no event is recorded after a slab is emptied", "                slab.free.record(kernels)\n", ""),
    Bug(
        "a save fills a slab that is still being copied",
        "                kernels.wait_event(slab.free)\n",
        "",
    ),
    Bug("a save is copied before it is encoded", "                stream.wait_event(slab.full)\n", ""),
    Bug("no event is recorded after a save is copied", "                slab.free.record(stream)\n", ""),
    Bug("only one slab is used", "(at + 1) % len(self.slabs)\n        return", "at\n        return"),
]
"""Bugs in the ring of slabs, which every route has. The tests of each kind of route must detect them."""

BUGS = [
    *RING_BUGS,
    Bug(
        "rows are always taken from the first slab",
        "self._carriers[slab.number].save",
        "self._carriers[0].save",
    ),
    Bug(
        "every slab is decoded as the first pages of the batch",
        "decode(Share(batch, slab.rows, first",
        "decode(Share(batch, slab.rows, 0",
    ),
]


def test_pages_are_correct_in_any_stream_order() -> None:
    require_all_right(slabs)


def test_the_next_slab_is_filled_while_one_crosses_the_link() -> None:
    require_two_in_turn(slabs)


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    planted = planting.load(slabs, bug)
    require = require_two_in_turn if bug.name == "only one slab is used" else require_all_right
    with pytest.raises(AssertionError):
        require(planted)
