"""Tests of slabs between the link and an engine's layers. Streams run in any order that their events allow."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.core.test_encoded_routes import RING_BUGS, Event, Stream
from tests.support import planting
from tests.support.planting import Bug
from tierstore.gpu import addresses, copy_routes
from tierstore.gpu.addresses import Segments
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.page import PageLayout, PageSpec

LAYOUT = PageLayout.of(
    [
        PageSpec(num_layers=n, page_size=2, num_kv_heads=1, head_dim=300, dtype="uint8", model="m")
        for n in (5, 3)
    ]
)
SLOTS = 24
RUNS = 30

Numbers = NDArray[np.int64]


class Mover:
    """A fake of the copy kernel, which moves pieces between addresses when its stream runs."""

    def __init__(self, found: Segments | None) -> None:
        assert found is not None
        self._segments = found

    def scatter(self, slots: Numbers, pages: Numbers, stream: Any) -> None:
        near, far = self._places(slots, pages)
        copy(near, far, np.tile(self._segments.nbytes, len(slots)), stream)

    def gather(self, slots: Numbers, pages: Numbers, stream: Any) -> None:
        near, far = self._places(slots, pages)
        copy(far, near, np.tile(self._segments.nbytes, len(slots)), stream)

    def _places(self, slots: Numbers, pages: Numbers) -> tuple[Numbers, Numbers]:
        return self._segments.addresses(slots).ravel(), (pages[:, None] + self._segments.offset).ravel()


class Driver:
    def copy(self, dst: Numbers, src: Numbers, nbytes: Numbers, stream: Any) -> None:
        copy(dst, src, nbytes, stream)


def copy(dst: Numbers, src: Numbers, nbytes: Numbers, stream: Stream) -> None:
    moves = list(zip(dst.tolist(), src.tolist(), nbytes.tolist(), strict=True))

    def act() -> None:
        for move in moves:
            ctypes.memmove(*move)

    stream.queue(act)


class Card:
    event = Event

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)

    def using(self, stream: Any) -> nullcontext[None]:
        return nullcontext()


class Machine:
    """Stands in for host memory and for an engine whose layers store planes before slots. Both are ordinary memory."""

    def __init__(self, module: ModuleType, seed: int) -> None:
        self.chance = np.random.default_rng(seed)
        self.whole = [
            torch.from_numpy(self.chance.integers(0, 256, (SLOTS, *spec.shape), dtype=np.uint8))
            .permute(1, 2, 0, 3, 4, 5)
            .contiguous()
            for spec in LAYOUT.specs
        ]
        layers = [[layer.transpose(0, 1) for layer in whole] for whole in self.whole]
        self.host = self.chance.integers(0, 256, (SLOTS, LAYOUT.slot_nbytes), dtype=np.uint8)
        self.layers = LayerGroups.of(LAYOUT, 3, 1)
        self.up, self.down, *side = self.streams = [Stream() for _ in range(4)]
        self.rings = [module.Ring(3 * LAYOUT.slot_nbytes, stream, Card()) for stream in side]
        driver: Any = Driver()
        groups = [
            [
                module.part_copies(
                    self.rings[0], Mover(addresses.tensor_segments(layers, LAYOUT, 99, (part,))), part, driver
                )
                for part in parts
            ]
            for parts in self.layers.parts
        ]
        mover = Mover(addresses.tensor_segments(layers, LAYOUT, 99))
        coder = module.ByPieces(mover, mover, LAYOUT.slot_nbytes)
        whole = [(0, 0, LAYOUT.blob_nbytes)]
        ends = [module.dma_copies(ring, coder, LAYOUT.slot_nbytes, whole, driver) for ring in self.rings]
        self.route = module.SlabRoute("slab", *ends, self.layers, groups)

    def engine(self) -> list[NDArray[np.uint8]]:
        """Return a copy of the engine's pages, as one array ``[slots, bytes]`` per KV group."""
        return [x.permute(2, 0, 1, 3, 4, 5).reshape(SLOTS, -1).numpy().copy() for x in self.whole]

    def below(self) -> list[NDArray[np.uint8]]:
        """Return a copy of the pages in host memory, in the form that ``engine`` returns: one array per KV group."""
        places = zip(LAYOUT.offsets, LAYOUT.specs, strict=True)
        return [self.host[:, at : at + spec.page_nbytes].copy() for at, spec in places]

    def at(self, places: Numbers) -> Numbers:
        return self.host.ctypes.data + places * LAYOUT.slot_nbytes

    def run(self) -> None:
        """Run all queued work piece by piece. Each piece comes from a random stream that does not have to wait."""
        while waiting := [stream for stream in self.streams if stream.work]:
            self.chance.shuffle(waiting)
            ran = next((stream for stream in waiting if stream.work[0]()), None)
            assert ran is not None, "deadlock: every stream waits for another"
            ran.work.popleft()


def require_right(module: ModuleType, seed: int) -> None:
    """Run loads, whole or by layer group, and saves of many sizes, and assert that all pages are correct."""
    machine = Machine(module, seed)
    slots, host = machine.chance.permutation(SLOTS), machine.chance.permutation(SLOTS)
    engine, below = machine.engine(), machine.below()
    want_engine, want_below = machine.engine(), machine.below()
    while len(slots):
        number = int(machine.chance.choice([1, 2, 4, 7, 11]))
        some, places = slots[:number], host[:number]
        slots, host = slots[number:], host[number:]
        dice = machine.chance.random()
        if dice < 0.6:
            for want, pages in zip(want_engine, below, strict=True):
                want[some] = pages[places]
        else:
            for want, pages in zip(want_below, engine, strict=True):
                want[places] = pages[some]
        if dice < 0.3:
            machine.route.load(some, machine.at(places), machine.up)
        elif dice < 0.6:
            for group in range(len(machine.layers)):
                machine.route.load_group(group, some, machine.at(places), machine.up)
        else:
            machine.route.save(some, machine.at(places), machine.down)
    machine.run()
    for found, want in zip(machine.engine() + machine.below(), want_engine + want_below, strict=True):
        np.testing.assert_array_equal(found, want)


def require_all_right(module: ModuleType) -> None:
    for seed in range(RUNS):
        require_right(module, seed)


def require_two_in_turn(module: ModuleType) -> None:
    """Assert that two slabs are filled over the link before any is emptied, and that the next pages wait for one."""
    machine = Machine(module, 0)
    machine.route.load(np.arange(12), machine.at(np.arange(12)), machine.up)
    below = machine.below()
    while machine.up.work and machine.up.work[0]():
        machine.up.work.popleft()
    crossed = machine.rings[0].memory.numpy().reshape(6, -1)
    np.testing.assert_array_equal(crossed[:, : LAYOUT.specs[0].page_nbytes], below[0][:6])
    assert machine.up.work
    machine.run()
    np.testing.assert_array_equal(machine.engine()[0][:12], below[0][:12])


def test_layer_group_is_ready_when_the_load_stream_reaches_it() -> None:
    machine = Machine(copy_routes, 1)
    before, below = machine.engine(), machine.below()
    slots = np.arange(5)
    machine.route.load_group(1, slots, machine.at(slots), machine.up)
    machine.run()
    for spec, found in enumerate(machine.engine()):
        [part] = [part for part in machine.layers.parts[1] if part.spec == spec]
        layer_nbytes = LAYOUT.specs[spec].layer_nbytes
        its = slice(part.first * layer_nbytes, part.end * layer_nbytes)
        want = before[spec].copy()
        want[:5, its] = below[spec][:5, its]
        np.testing.assert_array_equal(found, want)


BUGS = [
    *RING_BUGS,
    Bug(
        "parts are read from the start of the page",
        "[(0, part.offset, part.nbytes)]",
        "[(0, 0, part.nbytes)]",
    ),
    Bug(
        "parts are written to the start of the page",
        "rows.data_ptr() - self._offset",
        "rows.data_ptr()",
    ),
    Bug(
        "the padding of parts is ignored",
        "ByPieces(mover, None, stride, offset=part.offset)",
        "ByPieces(mover, None, part.nbytes, offset=part.offset)",
    ),
    Bug(
        "only the first KV group is copied",
        "for part in self._groups[group]:",
        "for part in self._groups[group][:1]:",
    ),
]


def test_pages_are_correct_in_any_stream_order() -> None:
    require_all_right(copy_routes)


def test_the_next_slab_is_filled_while_one_is_spread() -> None:
    require_two_in_turn(copy_routes)


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    planted = planting.load(copy_routes, bug)
    require = require_two_in_turn if bug.name == "only one slab is used" else require_all_right
    with pytest.raises(AssertionError):
        require(planted)
