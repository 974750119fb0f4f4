"""Test the page stream on fake streams, whose work runs in any order that their events allow.

Also tests that planted bugs are noticed, and the stream whose work runs on a thread."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from threading import Event as Flag
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.core.test_encoded_routes import Event, Stream
from tests.support import lanes, planting
from tests.support.planting import Bug
from tierstore.gpu.attention import page_stream
from tierstore.gpu.attention.page_stream import (
    CallingThread,
    CopiedRows,
    DecodedRows,
    PageStream,
    ThreadCard,
    ThreadEvent,
    ThreadStream,
)
from tierstore.gpu.slabs import Ring
from tierstore.host.arena import HostArena
from tierstore.page import PageLayout, PageSpec

LAYERS = 3
SLOTS = 12
SPEC = PageSpec(
    kind="mla", num_layers=LAYERS, page_size=1, num_kv_heads=1, head_dim=8, dtype="uint8", model="m"
)
"""One layer of a page has 8 bytes, which the tests use as one integer."""
WALKS = 30

Slots = NDArray[np.int64]


class Card:
    event = Event

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8)


class Rig:
    """A page stream whose copies and whose attention are work of two fake streams. It is also the filler."""

    def __init__(self, module: ModuleType, chance: random.Random, rows: int = 2, slabs: int = 4) -> None:
        self.chance = chance
        self.copies, self.compute = Stream(), Stream()
        stream: Any = self.copies
        card: Any = Card()
        self.ring = Ring(rows * SPEC.layer_nbytes, stream, card, slabs)
        self.host = np.zeros((SLOTS, LAYERS), dtype=np.int64)
        self.changed = 0
        self.change()
        self.fills: list[tuple[int, tuple[int, ...]]] = []
        """The layer and the host slots of each fill."""
        self.stream: PageStream = module.PageStream(
            self.ring, self, SPEC, lambda: self.compute, lambda _: None
        )
        self.seen = 0

    def change(self) -> None:
        """Write new pages to all host slots."""
        self.changed += 1
        number = np.arange(SLOTS * LAYERS).reshape(SLOTS, LAYERS)
        self.host[:] = self.changed * 1000 + number

    def fill(self, slab: Any, layer: int, slots: Slots) -> None:
        self.fills.append((layer, tuple(slots.tolist())))
        rows = slab.rows.numpy().view(np.int64)
        self.copies.queue(lambda: rows.fill(-1))
        changed = self.changed

        def copy(row: int) -> None:
            assert self.changed == changed, "a copy reads pages that have been released"
            rows[row] = self.host[int(slots[row]), layer]

        for row in self.chance.sample(range(len(slots)), len(slots)):
            self.copies.queue(partial(copy, row))

    def refused(self) -> set[int]:
        return set()

    def attend(self, layer: int, chunks: list[Slots]) -> None:
        """Queue attention that reads all chunks of a layer, each row in a piece of work of its own."""
        found = []
        for index, pages in self.stream.layer(layer):
            found.append(index)
            rows = pages.numpy().reshape(len(pages), -1).view(np.int64)[:, 0]
            for row, slot in enumerate(chunks[index].tolist()):
                want = int(self.host[slot, layer])
                self.compute.queue(partial(self._read, rows, row, want))
        assert found == list(range(len(chunks)))

    def _read(self, rows: NDArray[np.int64], row: int, want: int) -> None:
        assert rows[row] == want, "attention read another page, another layer, or a page that had not arrived"
        self.seen += 1

    def run(self, most: int = 1 << 30) -> None:
        """Run queued work piece by piece. Each piece comes from a random stream that does not have to wait."""
        streams = [self.copies, self.compute]
        while most and (waiting := [stream for stream in streams if stream.work]):
            self.chance.shuffle(waiting)
            ran = next((stream for stream in waiting if stream.work[0]()), None)
            assert ran is not None, "deadlock: every stream waits for another"
            ran.work.popleft()
            most -= 1


def walk(module: ModuleType, seed: int) -> None:
    """Plan, attend, release and change pages in random order, and assert that attention reads the right pages."""
    chance = random.Random(seed)
    rig = Rig(module, chance, rows=chance.choice([1, 2, 3]), slabs=chance.choice([2, 4, 7]))
    slots = np.array(chance.sample(range(SLOTS), chance.randint(0, SLOTS)), dtype=np.int64)
    wanted = 0
    for _ in range(12):
        act = chance.choice(["as before", "grown", "other", "changed"])
        if act == "grown":
            left = [slot for slot in range(SLOTS) if slot not in slots]
            slots = np.array([*slots.tolist(), *left[: chance.randint(0, 3)]], dtype=np.int64)
        elif act == "other":
            slots = np.array(chance.sample(range(SLOTS), chance.randint(0, SLOTS)), dtype=np.int64)
        elif act == "changed":
            event: Any = rig.stream.release()
            while event.happened < event.recorded:
                rig.run(1)
            rig.change()
        rows = rig.stream.rows
        chunks = [slots[first : first + rows] for first in range(0, len(slots), rows)]
        order = chance.sample(range(LAYERS), chance.randint(1, LAYERS))
        rig.stream.follow(chunks, order)
        layers = order if chance.random() < 0.7 else chance.choices(order, k=2)
        for layer in layers:
            rig.attend(layer, chunks)
            wanted += len(slots)
            rig.run(chance.choice([0, 1, 5, 50]))
    rig.run()
    assert rig.seen == wanted


def require_walks(module: ModuleType) -> None:
    for seed in lanes.seeds(WALKS, 10 * WALKS):
        walk(module, seed)


def chunks_of(*slots: tuple[int, ...]) -> list[Slots]:
    return [np.array(each, dtype=np.int64) for each in slots]


def require_ahead(module: ModuleType) -> None:
    """Assert which copies are queued before, during and after the attention of a layer."""
    rig = Rig(module, random.Random(0), rows=2, slabs=3)
    chunks = chunks_of((1, 2), (3,))
    rig.stream.follow(chunks, range(LAYERS))
    assert rig.fills == [(0, (1, 2)), (0, (3,)), (1, (1, 2))], (
        "the whole ring is filled before attention starts"
    )
    rig.attend(0, chunks)
    assert rig.fills[3:] == [(1, (3,)), (2, (1, 2))], "each slab that attention has read is filled again"
    rig.attend(1, chunks)
    rig.attend(2, chunks)
    assert rig.fills[5:] == [(2, (3,)), (0, (1, 2)), (0, (3,)), (1, (1, 2))], (
        "the next step comes after this one"
    )
    rig.stream.follow([array.copy() for array in chunks], range(LAYERS))
    rig.attend(0, chunks)
    rig.attend(1, chunks)
    assert rig.fills[9:] == [(1, (3,)), (2, (1, 2)), (2, (3,)), (0, (1, 2))], "no page is copied again"
    assert rig.stream.restarts == 0
    rig.run()
    assert rig.seen == 15


def test_attention_reads_the_right_pages_in_any_order_of_work() -> None:
    require_walks(page_stream)


def test_copies_are_queued_as_far_ahead_as_the_ring_allows_across_layers_and_steps() -> None:
    require_ahead(page_stream)


def test_copies_ahead_are_kept_as_far_as_the_next_plan_agrees() -> None:
    rig = Rig(page_stream, random.Random(0), rows=2, slabs=3)
    rig.stream.follow(chunks_of((1, 2), (3,)), range(LAYERS))
    rig.stream.follow(chunks_of((1, 2), (3, 4)), range(LAYERS))
    assert rig.fills[3:] == [(0, (3, 4)), (1, (1, 2))]
    assert rig.stream.restarts == 1
    rig.attend(0, chunks_of((1, 2), (3, 4)))
    assert rig.fills[5:] == [(1, (3, 4)), (2, (1, 2))]
    assert rig.stream.restarts == 1, "the first chunk was not the one that was kept"
    rig.run()


def test_nothing_is_kept_after_a_release_because_pages_may_have_changed() -> None:
    rig = Rig(page_stream, random.Random(0))
    chunks = chunks_of((1, 2))
    rig.stream.follow(chunks, [0])
    event: Any = rig.stream.release()
    assert event.happened < event.recorded, "copies are still queued"
    rig.run()
    assert event.happened == event.recorded
    rig.change()
    rig.stream.follow(chunks, [0])
    rig.attend(0, chunks)
    rig.run()


def test_a_layer_that_was_not_planned_is_refused() -> None:
    rig = Rig(page_stream, random.Random(0))
    rig.stream.follow(chunks_of((1, 2)), [0, 2])
    with pytest.raises(ValueError, match=r"layer must be one of \(0, 2\), which were planned, got 1"):
        rig.attend(1, [])


BUGS = [
    Bug("attention does not wait for copies", "            current.wait_event(slab.full)\n", ""),
    Bug(
        "a slab is filled while attention reads it",
        "            self._ring.stream.wait_event(slab.free)\n",
        "",
    ),
    Bug(
        "attention is not followed by an event",
        "                slab.free.record(current)\n",
        "                pass\n",
    ),
    Bug("copies are not followed by an event", "            slab.full.record(self._ring.stream)\n", ""),
    Bug("other pages are kept", "np.array_equal(filled.slots, slots)", "True"),
    Bug("another layer is kept", "same and filled.layer == layer", "same"),
    Bug(
        "pages are kept after a release",
        "        self._discard(0)\n        self.chunks",
        "        self.chunks",
    ),
    Bug(
        "the event of a release does not follow the copies",
        "event.record(self._ring.stream)  # type: ignore[attr-defined]",
        "event.record(self._current())",
    ),
    Bug(
        "a layer out of order starts with the first layer",
        "self._layers.index(layer) * len(self.chunks) + index",
        "index",
    ),
]

AHEAD_BUGS = [
    Bug("a plan copies kept chunks again", "        self._next = kept\n", "        self._next = 0\n"),
    Bug(
        "nothing is copied ahead", "self._idle and (position", "self._idle and not self._ahead and (position"
    ),
    Bug(
        "nothing is kept from plan to plan",
        "        self._discard(kept)\n",
        "        kept = self._discard(0) or 0\n",
    ),
]


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    planted = planting.load(page_stream, bug)
    with pytest.raises((AssertionError, IndexError)):
        require_walks(planted)


@pytest.mark.deep
@pytest.mark.parametrize("bug", AHEAD_BUGS, ids=[bug.name for bug in AHEAD_BUGS])
def test_a_planted_bug_that_makes_the_link_idle_is_noticed(bug: Bug) -> None:
    planted = planting.load(page_stream, bug)
    with pytest.raises(AssertionError):
        require_ahead(planted)


def test_work_on_a_thread_runs_in_order_and_after_the_events_that_it_waits_for() -> None:
    stream, gate, here = ThreadStream(), ThreadEvent(), CallingThread()
    ran: list[str] = []
    gate.record(here)
    stream.wait_event(gate)
    held = Flag()
    stream.queue(held.wait)  # type: ignore[arg-type]
    stream.queue(lambda: ran.append("first"))
    event = ThreadEvent()
    event.record(stream)
    stream.queue(lambda: ran.append("second"))
    assert not event.query()
    held.set()
    here.wait_event(event)
    assert ran[0] == "first"
    assert event.query()
    stream.synchronize()
    assert ran == ["first", "second"]


def test_a_wait_refers_to_the_record_before_it() -> None:
    stream, event, held = ThreadStream(), ThreadEvent(), Flag()
    wait = event.waiter()
    stream.queue(held.wait)  # type: ignore[arg-type]
    event.record(stream)
    wait()
    assert not event.query()
    held.set()
    event.synchronize()


def test_failed_copy_on_a_thread_is_reported_to_those_that_wait_for_it() -> None:
    stream, event = ThreadStream(), ThreadEvent()

    def fail() -> None:
        raise OSError("the memory is gone")

    stream.queue(fail)
    event.record(stream)
    with pytest.raises(RuntimeError, match="a copy of pages to the device failed"):
        event.synchronize()


def test_closed_stream_has_no_copies_in_flight() -> None:
    arena = HostArena(PageLayout.of(SPEC), SLOTS)
    stream = PageStream.open(arena, "cpu", ring_nbytes=64)
    for slot in range(SLOTS):
        arena.view(slot)[:] = slot
    stream.follow(chunks_of((3, 1)), range(LAYERS))
    [(index, pages)] = stream.layer(0)
    assert index == 0
    assert pages[:2].flatten().tolist() == [3] * 8 + [1] * 8
    stream.close()
    stream.close()
    assert not stream.chunks


def test_refused_pages_are_collected_while_nobody_checks() -> None:
    spec = PageSpec(num_layers=LAYERS, page_size=4, num_kv_heads=1, head_dim=16, dtype="bfloat16", model="m")
    arena = HostArena(PageLayout.of(spec), SLOTS, codec="int8")
    stream: Any = ThreadStream()
    ring = Ring(2 * spec.layer_nbytes, stream, ThreadCard(), 2)
    rows = np.zeros(2, dtype=np.int64)

    class Coder:
        """Refuses the page in slot 5."""

        def fetch(self, table: torch.Tensor, flags: torch.Tensor, layers: tuple[int, int]) -> None:
            assert layers == (2, 3)
            rows[:] = table[:2]
            flags.copy_(table[2:] == int(arena.addresses(np.array([5]))[0]))

    coder: Any = Coder()
    filler = DecodedRows(arena, ring, coder, 2)
    for step in range(50):
        filler.fill(ring.slabs[1], 2, np.array([3, 5 if step == 1 else 4]))
        assert rows.tolist() == [2, 3]
        stream.synchronize()
    assert len(filler._queued) == 1, "memory grows with every fill"
    assert filler.refused() == {5}
    assert filler.refused() == set()


def test_pages_that_are_refused_during_a_check_are_reported_by_the_next() -> None:
    arena = HostArena(
        PageLayout.of(
            PageSpec(num_layers=1, page_size=4, num_kv_heads=1, head_dim=16, dtype="bfloat16", model="m")
        ),
        SLOTS,
        codec="int8",
    )
    filler: Any = PageStream.open(arena, "cpu")._filler

    class Meanwhile(deque[int]):
        """The thread refuses another page as soon as its length was asked for."""

        def __len__(self) -> int:
            found = super().__len__()
            if 2 not in self:
                self.append(2)
            return found

    filler._refused = Meanwhile([1])
    assert filler.refused() == {1}
    assert 2 in filler.refused()


TWO_GROUPS = PageLayout.of(
    [
        PageSpec(
            kind="mla", num_layers=layers, page_size=1, num_kv_heads=1, head_dim=dim, dtype="uint8", model="m"
        )
        for layers, dim in ((2, 8), (3, 4))
    ]
)


def test_layers_of_the_second_kv_group_are_read_where_they_are() -> None:
    arena = HostArena(TWO_GROUPS, SLOTS)
    for slot in range(SLOTS):
        arena.view(slot)[:] = 99
        for layer in range(3):
            start = TWO_GROUPS.offsets[1] + 4 * layer
            arena.view(slot)[start : start + 4] = 10 * slot + layer
    stream = PageStream.open(arena, "cpu", group=1, ring_nbytes=64)
    stream.follow(chunks_of((3, 7)), range(3))
    read = 0
    for layer in range(3):
        for _, pages in stream.layer(layer):  # after the loop, the slab may be filled again
            assert pages[:2].flatten().tolist() == [30 + layer] * 4 + [70 + layer] * 4
            read += 1
    stream.close()
    assert read == 3


def test_copies_on_a_gpu_start_at_the_layer_of_the_kv_group() -> None:
    arena = HostArena(TWO_GROUPS, SLOTS)
    stream: Any = ThreadStream()
    ring = Ring(3 * 4, stream, ThreadCard(), 2)
    loaded: list[tuple[int, list[int], list[int]]] = []

    class Carrier:
        def __init__(self, slab: int) -> None:
            self.slab = slab

        def load(self, rows: Slots, host: Slots, on: object) -> None:
            assert on is stream
            loaded.append((self.slab, rows.tolist(), (host - arena.memory.ctypes.data).tolist()))

    carriers: Any = [Carrier(0), Carrier(1)]
    filler = CopiedRows(arena, ring, TWO_GROUPS.specs[1], TWO_GROUPS.offsets[1], carriers)
    filler.fill(ring.slabs[1], 2, np.array([5, 1]))
    slot, start = TWO_GROUPS.slot_nbytes, TWO_GROUPS.offsets[1] + 2 * 4
    assert loaded == [(1, [0, 1], [5 * slot + start, slot + start])]


@pytest.mark.parametrize(
    ("slots", "what"),
    [
        ((1, 4), "got slot 4, but only 4 slots are pinned so far"),
        ((0, -1), "host slots must be 0 or more, got -1"),
    ],
)
def test_slots_that_are_not_pinned_are_refused_and_the_plan_before_goes_on(
    slots: tuple[int, ...], what: str
) -> None:
    class Pinned:
        pinned_slots = 4

    host: Any = Pinned()
    rig = Rig(page_stream, random.Random(0))
    rig.stream._usable = partial(page_stream._require_pinned, host)
    before = chunks_of((3, 0))
    rig.stream.follow(before, range(LAYERS))
    with pytest.raises(ValueError, match=what):
        rig.stream.follow(chunks_of((2,), slots), range(LAYERS))
    assert rig.stream.chunks is before
    rig.attend(0, before)
    rig.run()


def test_a_ring_has_at_least_four_slabs_if_they_hold_a_page_each() -> None:
    arena, page = HostArena(PageLayout.of(SPEC), SLOTS), SPEC.layer_nbytes
    found = {}
    for ring, slab in ((16, 16), (40, 3), (2, 5), (0, 1)):
        stream = PageStream.open(arena, "cpu", ring_nbytes=ring * page, slab_nbytes=slab * page)
        found[ring, slab] = (stream.rows, stream.nbytes // (stream.rows * page))
    assert found == {(16, 16): (4, 4), (40, 3): (3, 13), (2, 5): (1, 2), (0, 1): (1, 2)}
