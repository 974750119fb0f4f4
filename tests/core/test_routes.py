"""Tests of the choice of a copy route, which is made for each batch from measured rates."""

from __future__ import annotations

from math import inf
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tierstore.gpu import addresses
from tierstore.gpu.copy_routes import (
    Direction,
    DmaRoute,
    FastestRoute,
    Option,
    Route,
    Way,
    WholePages,
    measured,
)
from tierstore.gpu.driver import Driver
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.page import PageLayout, PageSpec

SPEC = PageSpec(num_layers=4, page_size=1, num_kv_heads=1, head_dim=256, dtype="uint8", model="m")
LAYERS = LayerGroups.of(PageLayout.of(SPEC), 4, 1)
STREAM = cast("torch.cuda.Stream", "the lane's")


def link(way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
    """Return how many seconds a copy takes on a simulated link.

    DMA takes 20 us plus, for each piece, the longer of 1 us and 1 ns per 50 bytes. The kernel takes 30 us plus 1 ns
    per 45 bytes up, or per 40 bytes down.
    """
    if way == "dma":
        return 20e-6 + pieces * max(1e-6, nbytes / 50e9)
    return 30e-6 + pieces * nbytes / (45e9 if direction == "up" else 40e9)


RATES = measured(["dma", "kernel"], link)


@pytest.mark.parametrize("way", ["dma", "kernel"])
@pytest.mark.parametrize("direction", ["up", "down"])
@given(
    nbytes=st.sampled_from([4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20]), pieces=st.integers(1, 4096)
)
def test_seconds_are_right_for_measured_and_larger_sizes(
    way: Way, direction: Direction, nbytes: int, pieces: int
) -> None:
    want = link(way, direction, nbytes, pieces)
    assert RATES.seconds(way, direction, nbytes, pieces) == pytest.approx(want, rel=1e-6)


@given(st.integers(1, 1 << 22), st.integers(1, 1000))
def test_more_and_larger_pieces_never_take_less(nbytes: int, pieces: int) -> None:
    seconds = RATES.seconds("dma", "up", nbytes, pieces)
    assert RATES.seconds("dma", "up", nbytes, pieces + 1) >= seconds
    assert RATES.seconds("dma", "up", nbytes + 1, pieces) >= seconds * (1 - 1e-9)


def test_a_clock_that_jumps_gives_no_negative_costs() -> None:
    odd = measured(["dma"], lambda way, direction, nbytes, pieces: 1e-3 if pieces == 8 else 5e-4)
    assert odd.seconds("dma", "down", 4096, 1) > 0
    assert odd.seconds("dma", "down", 4096, 9) > odd.seconds("dma", "down", 4096, 1)
    assert odd.seconds("kernel", "down", 4096, 1) == inf, "the kernel was not measured"


def test_rates_are_shown_in_gigabytes_a_second() -> None:
    shown = RATES.plain()
    assert set(shown) == {"dma up", "dma down", "kernel up", "kernel down"}
    assert shown["dma up"] == {4096: 4.1, 32768: 32.77, 131072: 50.0, 524288: 50.0}
    assert shown["kernel down"][4096] == 40.0


class Noted(WholePages):
    def __init__(self, name: str) -> None:
        self.name = name
        self.calls: list[str] = []

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> None:
        self.calls.append(f"load {len(slots)} on {stream}")

    def load_group(self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> None:
        self.calls.append(f"group {group} of {len(slots)}")

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> NDArray[np.int32]:
        self.calls.append(f"save {len(slots)}")
        return np.zeros(len(slots), dtype=np.int32)


def slots(number: int) -> NDArray[np.int64]:
    return np.arange(number, dtype=np.int64)


def test_each_batch_takes_the_fastest_route() -> None:
    dma, kernel = Noted("straight"), Noted("kernel")
    options = [Option(dma, "dma", 1, 4096), Option(kernel, "kernel", 1, 4096)]
    choice = FastestRoute(options, RATES)
    choice.load(slots(2), slots(2), STREAM)
    choice.load(slots(500), slots(500), STREAM)
    flags = choice.save(slots(500), slots(500), STREAM)
    assert flags is not None
    assert len(flags) == 500
    assert dma.calls == ["load 2 on the lane's"]
    assert kernel.calls == ["load 500 on the lane's", "save 500"]
    assert choice.batches == {"straight": 1, "kernel": 2}
    assert choice.name == "straight or kernel"
    assert choice.layers is None
    assert choice.loads_end_on is None


@pytest.mark.parametrize(
    ("piece_nbytes", "taken"),
    [(4 << 10, "kernel"), (32 << 10, "kernel"), (64 << 10, "dma"), (512 << 10, "dma")],
)
def test_a_kernel_must_be_faster_by_a_tenth(piece_nbytes: int, taken: str) -> None:
    routes = {"dma": Noted("dma"), "kernel": Noted("kernel")}
    ways: list[Way] = ["dma", "kernel"]
    choice = FastestRoute([Option(routes[way], way, 1, piece_nbytes) for way in ways], RATES)
    choice.load(slots(500), slots(500), STREAM)
    assert [name for name, route in routes.items() if route.calls] == [taken]


def test_route_choice_counts_pieces_and_extra_time() -> None:
    pieces, slab = Noted("straight"), Noted("slab")
    options = [Option(pieces, "dma", 64, 32 << 10), Option(slab, "dma", 1, 2 << 20, extra_s=50e-6)]
    choice = FastestRoute(options, RATES)
    choice.load(slots(1), slots(1), STREAM)
    choice.load(slots(32), slots(32), STREAM)
    assert (pieces.calls, slab.calls) == (["load 1 on the lane's"], ["load 32 on the lane's"])


@pytest.mark.parametrize(
    ("piece_nbytes", "pieces", "taken"), [(32 << 10, 64, "slab"), (512 << 10, 4, "straight")]
)
def test_layer_loads_take_the_fastest_route(piece_nbytes: int, pieces: int, taken: str) -> None:
    straight, slab, kernel = Noted("straight"), Noted("slab"), Noted("kernel")
    straight.layers = slab.layers = LAYERS
    straight.group_pieces, slab.group_pieces = pieces // 4, 1
    options = [
        Option(straight, "dma", pieces, piece_nbytes),
        Option(kernel, "kernel", pieces, piece_nbytes),
        Option(slab, "dma", 1, pieces * piece_nbytes, extra_s=50e-6),
    ]
    choice = FastestRoute(options, RATES)
    choice.load_group(1, slots(3), slots(3), STREAM)
    assert [route.name for route in (straight, slab, kernel) if route.calls] == [taken]
    assert choice.group_pieces == (straight if taken == "straight" else slab).group_pieces


class Side:
    """A fake stream that records which events it waits for."""

    def __init__(self) -> None:
        self.waits: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waits.append(event)


class Joint:
    def __init__(self) -> None:
        self.on: list[object] = []

    def record(self, stream: object) -> None:
        self.on.append(stream)


def test_many_pieces_avoid_the_driver_if_another_route_exists() -> None:
    pieces, slab = Noted("straight"), Noted("slab")
    pieces.pieces = 64
    options = [Option(pieces, "dma", 64, 256 << 10), Option(slab, "dma", 1, 16 << 20, extra_s=50e-6)]
    choice = FastestRoute(options, RATES)
    choice.save(slots(2), slots(2), STREAM)
    choice.save(slots(3), slots(3), STREAM)
    assert (pieces.calls, slab.calls) == (["save 2"], ["save 3"])
    alone = FastestRoute(options[:1], RATES)
    alone.save(slots(3), slots(3), STREAM)
    assert pieces.calls[1:] == ["save 3"]


def test_loads_end_on_one_stream_whichever_route_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Joint)
    side = Side()
    straight, slab = Noted("straight"), Noted("slab")
    straight.layers = LAYERS
    slab.loads_end_on = cast("torch.cuda.Stream", side)
    options = [Option(straight, "dma", 64, 32 << 10), Option(slab, "dma", 1, 2 << 20, extra_s=50e-6)]
    choice = FastestRoute(options, RATES, slab.loads_end_on)
    choice.load(slots(32), slots(32), STREAM)
    assert slab.calls
    assert not side.waits, "the load already ends on that stream"
    choice.load(slots(1), slots(1), STREAM)
    choice.load_group(2, slots(3), slots(3), STREAM)
    assert straight.calls == ["load 1 on the lane's", "group 2 of 3"]
    assert choice.layers is LAYERS
    [first, second] = side.waits
    assert isinstance(first, Joint)
    assert first is second
    assert first.on == [STREAM, STREAM], "the event must be recorded before each wait"


@pytest.mark.parametrize("number", [1, 2, 4])
def test_single_layer_group_pages_take_the_route_with_fewest_pieces(number: int) -> None:
    layout = PageLayout.of(SPEC)
    by_layers = LayerGroups.of(layout, number, 1)
    layers = [[torch.zeros(2, *SPEC.shape[1:], dtype=torch.uint8) for _ in range(SPEC.num_layers)]]
    pieces = addresses.tensor_segments(layers, layout, 128)
    assert pieces is not None
    groups = addresses.tensor_group_segments(layers, layout, by_layers, 128)
    straight = DmaRoute(pieces, cast("Driver", None), by_layers, groups)
    assert straight.layers == (None if number == 1 else by_layers)
    slab = WholePages()
    slab.name = "slab"  # type: ignore[attr-defined]
    choice = FastestRoute(
        [Option(straight, "dma", len(pieces), 512), Option(cast("Route", slab), "dma", 1, 2048)], RATES
    )
    assert (choice.layers is None, choice.pieces) == (number == 1, 1)
