"""Test on a GPU that a layer is correct once its event has completed, while later layers are still being copied."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.gpu.card import delay, stall_copies
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, chain, page_tensor, tiers
from tierstore.lease import Lease
from tierstore.page import PageSpec
from tierstore.types import LeaseState, PageKey, Tier

pytestmark = pytest.mark.gpu

SPEC = PageSpec(num_layers=8, page_size=256, num_kv_heads=8, head_dim=64, dtype="bfloat16", model="layers")
"""Pages of 4 MiB. The lane's thread launches the copies of a large lease in eight groups of layers."""

PAGES = 24
NAMES = 6
ROUNDS = 1000


class Content:
    """The content of all pages, on the GPU. ``pages`` is int16 ``[NAMES, PAGES, layers, elements per layer]``."""

    def __init__(self) -> None:
        chance = torch.Generator("cuda:0").manual_seed(3)
        shape = (NAMES, PAGES, SPEC.num_layers, SPEC.layer_nbytes // 2)
        self.pages = torch.randint(
            -(2**15), 2**15, shape, generator=chance, device="cuda:0", dtype=torch.int16
        )
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda:0")
        self.keys = [chain(PAGES, str(name)) for name in range(NAMES)]
        self.layers_read = 0

    def words(self, bench: Bench) -> torch.Tensor:
        """Return a view of all slots as int16 ``[slots, layers, elements per layer]``."""
        pages = page_tensor(bench.store).view(torch.int16)
        return pages.view(len(pages), SPEC.num_layers, -1)

    def write(self, bench: Bench, name: int) -> None:
        slots = bench.store.allocate(PAGES, timeout_s=PATIENCE_S)
        self.words(bench)[slots] = self.pages[name]
        bench.store.put(self.keys[name], slots)

    def read(self, bench: Bench, lease: Lease, name: int, layer: int) -> None:
        """Queue a comparison of one layer on the current stream, to run once the layer's event has completed."""
        event = lease.ready(layer, PATIENCE_S)
        if isinstance(event, torch.cuda.Event):
            torch.cuda.current_stream().wait_event(event)
        elif event is not None:
            event.synchronize()
        number = lease.num_pages
        found = self.words(bench)[lease.slots, layer]
        self.wrong += (found != self.pages[name, :number, layer]).sum()
        self.layers_read += number > 0


@pytest.fixture
def bench() -> Iterator[Bench]:
    # HBM has space for two leases, so slots are reused while late reads of them are queued.
    config = tiers(2 * PAGES, NAMES * PAGES, page_nbytes=SPEC.page_nbytes)
    bench = open_bench(config, SPEC, pump=True)
    yield bench
    torch.cuda.synchronize()
    bench.store.check()
    bench.close()


def groups_of(bench: Bench) -> int:
    hbm = bench.store.stats()["hbm"]
    assert isinstance(hbm, dict)
    return int(hbm["layer_groups"])


def test_layers_are_right_once_their_events_complete_in_every_round(bench: Bench) -> None:
    # F001, F004, F005, F022
    assert groups_of(bench) == 8
    chance, content = random.Random(5), Content()
    low, high = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    for name in range(NAMES):
        content.write(bench, name)
        bench.store.demote(content.keys[name], Tier.HOST)
        assert bench.store.drain(PATIENCE_S)
    for _ in range(ROUNDS):
        name, dice = chance.randrange(NAMES), chance.random()
        if dice < 0.1:
            stall_copies(bench, chance.choice([Tier.HBM, Tier.HOST]), chance.choice([0.1, 1.0]))
        elif dice < 0.3:
            bench.store.evict(content.keys[name], Tier.HBM)
        stream = chance.choice([low, high])
        with torch.cuda.stream(stream), bench.store.acquire(content.keys[name]) as lease:
            if chance.random() < 0.3:
                delay(chance.choice([0.1, 0.5]))
            for layer in range(SPEC.num_layers):
                content.read(bench, lease, name, layer)
        if chance.random() < 0.5:
            bench.store.evict(content.keys[name], Tier.HBM)
    torch.cuda.synchronize()
    assert content.layers_read > 2 * ROUNDS
    assert int(content.wrong) == 0, f"{int(content.wrong)} wrong numbers in {content.layers_read} layers"


def test_a_layer_can_be_used_while_the_lease_is_still_pending(bench: Bench) -> None:
    content = Content()
    content.write(bench, 0)
    bench.store.demote(content.keys[0], Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    early = 0
    for _ in range(20):
        bench.store.evict(content.keys[0], Tier.HBM)
        page_tensor(bench.store).zero_()
        torch.cuda.synchronize()
        with bench.store.acquire(content.keys[0]) as lease:
            assert lease.num_pages == PAGES
            event = lease.ready(0, PATIENCE_S)
            if event is not None:
                event.synchronize()
            last = content.words(bench)[lease.slots, SPEC.num_layers - 1]
            early += not torch.equal(last, content.pages[0, :, SPEC.num_layers - 1])
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            for layer in range(SPEC.num_layers):
                content.read(bench, lease, 0, layer)
    torch.cuda.synchronize()
    assert int(content.wrong) == 0
    assert early > 0, "the last layer was always there with the first: nothing overlaps"


def test_resident_and_arriving_pages_are_read_together(bench: Bench) -> None:
    content = Content()
    content.write(bench, 1)
    bench.store.demote(content.keys[1], Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    some: list[PageKey] = content.keys[1][: PAGES // 2]
    with bench.store.acquire(some) as first:
        assert first.wait(PATIENCE_S) is LeaseState.READY
        with bench.store.acquire(content.keys[1]) as lease:
            for layer in reversed(range(SPEC.num_layers)):
                content.read(bench, lease, 1, layer)
            torch.cuda.synchronize()
    assert int(content.wrong) == 0
