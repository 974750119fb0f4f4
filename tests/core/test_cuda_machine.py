"""Tests, with random sequences of transfers, copies and queries, that acks and layer states are never early."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.manual_link import PATIENCE_S, SLOTS, SPEC, ManualStream, Rig
from tests.support import lanes
from tests.support.planting import SEARCH, Bug, load
from tierstore.gpu import copy_queue, cuda_copy_engine
from tierstore.gpu.copy_queue import Pace
from tierstore.gpu.events import Event
from tierstore.types import Tier

PAGE = SPEC.page_nbytes
PACE = Pace(whole=PAGE, together=3 * PAGE, ahead=4 * PAGE, behind=0, at_once=2)

Step = tuple[str, int, int]
"""A step: its name and two numbers.

"up" and "down": the number of pages, and the index of the first idle slot. "run": the stream, and the number of
queued operations to run. "ask": the layer, and 0. "poll": 0 and 0.
"""

steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["up", "down"]), st.integers(1, 3), st.integers(0, SLOTS - 1)),
        st.tuples(st.just("run"), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(st.just("poll"), st.just(0), st.just(0)),
        st.tuples(st.just("ask"), st.integers(0, SPEC.num_layers - 1), st.just(0)),
    ),
    max_size=40,
)


class World:
    """The engine under test, and the expected content of each slot."""

    def __init__(self, layers: int | None) -> None:
        self.rig = Rig(layers=layers, pace=PACE)
        # Only the script drives the engine. The lane's thread never launches.
        self.rig.engine._wake_thread = lambda dst: None  # type: ignore[method-assign]
        self.there = {slot: 10 + slot for slot in range(SLOTS)}
        self.here = {slot: 20 + slot for slot in range(SLOTS)}
        self.moving: dict[int, tuple[Tier, list[tuple[int, int]]]] = {}
        self.lent: list[tuple[Event, int, list[tuple[int, int]], int]] = []
        self.order: dict[Tier, list[int]] = {Tier.HBM: [], Tier.HOST: []}
        self.number = 0

    def do(self, step: Step) -> None:
        name, first, second = step
        if name in ("up", "down"):
            self.move(Tier.HBM if name == "up" else Tier.HOST, first, second)
        elif name == "run":
            stream: ManualStream = (self.rig.up, self.rig.down)[first]
            for _ in range(min(second, len(stream.work))):
                stream.work.popleft()()
        elif name == "poll":
            self.poll()
        else:
            self.ask(first)
        self.look()

    def move(self, dst: Tier, pages: int, start: int) -> None:
        busy = [pair for _, pairs in self.moving.values() for pair in pairs]
        there = [s for s in range(SLOTS) if s not in {a for a, _ in busy}]
        here = [s for s in range(SLOTS) if s not in {b for _, b in busy}]
        pairs = list(zip(there[start:], reversed(here), strict=False))[:pages]
        if not pairs:
            return
        self.number += 1
        self.moving[self.number] = (dst, pairs)
        self.order[dst].append(self.number)
        self.rig.move(self.number, dst, *pairs)

    def poll(self) -> None:
        for ack in self.rig.engine.poll():
            dst, pairs = self.moving.pop(ack.transfer_id)
            assert ack.ok
            assert ack.num_ready == len(pairs)
            assert self.order[dst].pop(0) == ack.transfer_id, (
                "transfers of one direction must be acknowledged in order"
            )
            for there, here in pairs:
                if dst == Tier.HBM:
                    self.there[there] = self.here[here]
                    assert set(self.rig.pool.view(there)) == {self.here[here]}, "acknowledged too early"
                else:
                    self.here[here] = self.there[there]
                    assert set(self.rig.arena.view(here)) == {self.there[there]}, "acknowledged too early"

    def ask(self, layer: int) -> None:
        loads = {number: pairs for number, (dst, pairs) in self.moving.items() if dst == Tier.HBM}
        pairs = [pair for pairs in loads.values() for pair in pairs]
        if not pairs:
            return
        found = self.rig.engine.arriving([there for there, _ in pairs], layer)
        if found.submitted and found.event is None:
            self.require(layer, pairs)
        elif found.event is not None:
            # Checked until the pages are acknowledged. Then their slots may contain other pages.
            self.lent.append((found.event, layer, pairs, max(loads)))

    def look(self) -> None:
        """Assert that each event completes after its copies have run and before their transfers are acknowledged."""
        for event, layer, pairs, number in self.lent:
            if event.query():
                if number in self.moving:
                    self.require(layer, pairs)
            else:
                assert number in self.moving, "an event that had completed is pending again"

    def require(self, layer: int, pairs: list[tuple[int, int]]) -> None:
        for there, here in pairs:
            row = self.rig.pool.view(there).reshape(SPEC.num_layers, -1)[layer]
            assert set(row) == {self.here[here]}, "a layer is reported as arrived before its bytes are there"

    def finish(self) -> None:
        for _ in range(200):
            if not self.moving:
                break
            self.rig.up.run()
            self.rig.down.run()
            self.poll()
            self.look()
        assert not self.moving, "a transfer never ends"
        assert not self.rig.engine.polled
        assert self.rig.engine.close(PATIENCE_S)


def run(layers: int | None, script: list[Step]) -> None:
    world = World(layers)
    try:
        for step in script:
            world.do(step)
        world.finish()
    finally:
        world.rig.engine.close(0.0)
        world.rig.up.run()
        world.rig.down.run()
        assert world.rig.engine.close(PATIENCE_S)


@pytest.fixture(autouse=True, scope="module")
def no_clock() -> Iterator[None]:
    """Make every transfer count as recently added, however long ago it was added."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy_queue, "_JUST_NOW_S", inf)
        yield


@given(st.sampled_from([None, 2, 4]), steps)
@settings(max_examples=lanes.examples(100, 1000))
def test_any_order_of_events_gives_correct_results(layers: int | None, script: list[Step]) -> None:
    run(layers, script)


BUGS = [
    Bug(
        "a transfer is acknowledged after its first group",
        "len(job.flights) == self._groups)",
        "job.flights)",
    ),
    Bug(
        "a layer counts as arrived once it is launched",
        "if not flight.landed and (last is None",
        "if False and (last is None",
    ),
    Bug(
        "the first event is returned instead of the last",
        "flight.number > last.number",
        "flight.number < last.number",
    ),
    Bug(
        "a launch of all layers counts as one group",
        "[flight] * (self._groups if flight.group is None else 1)",
        "[flight]",
    ),
    Bug(
        "an event that a caller holds is used again",
        "if not flight.broken and not flight.lent:",
        "if not flight.broken:",
    ),
    Bug("bytes of finished copies stay counted", "self.nbytes -= flight.nbytes", "pass"),
    Bug("the event of another layer is returned", "else self._layers.holding(layer)", "else 0"),
    Bug("a layer that is not launched counts as submitted", "len(job.flights) <= group:", "False:"),
    Bug(
        "other transfers of the slots are ignored",
        "            left -= job.into\n",
        "            left.clear()\n",
    ),
    Bug(
        "the event before a copy is taken for the one after it",
        "return has_happened(flight.ended)",
        "return has_happened(flight.begun)",
    ),
]


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = load(copy_queue, bug)
    monkeypatch.setattr(planted, "_JUST_NOW_S", inf)
    monkeypatch.setattr(cuda_copy_engine, "Lane", planted.Lane)

    @given(st.sampled_from([None, 2, 4]), steps)
    @settings(SEARCH, stateful_step_count=1)
    def hunt(layers: int | None, script: list[Step]) -> None:
        run(layers, script)

    with pytest.raises((AssertionError, IndexError)):
        hunt()
