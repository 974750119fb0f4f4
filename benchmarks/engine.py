"""``bench engine``: how fast the worker half of the vLLM connector moves blocks, compared with a contiguous copy.

The benchmark passes orders to a worker half and takes its reports, as an engine does: 1,024 blocks per step, in
transfers of 32. Tensors have vLLM's memory layouts. Blocks are in random order, in the engine and in host memory.

Measurements come in pairs: a contiguous copy, and then the blocks, in the same process. The time of the blocks is
elapsed time, from the first order to the last report. Each figure is a median over all pairs. The bytes of the blocks
are checked before and after the measurements.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from time import perf_counter, sleep, thread_time
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch
from rich.table import Table

from tierstore.adapters.vllm.config import Settings
from tierstore.adapters.vllm.kv_layout import KVLayout, kv_layout
from tierstore.adapters.vllm.messages import Orders
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.bench.link import Ceiling, device_of, settle
from tierstore.cli.bench import name_of
from tierstore.cli.output import print_json, progress, refusals, require_memory, wide_console
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import ConfigError
from tierstore.page import DTYPE_NBYTES
from tierstore.types import PageKey, Tier, Transfer, format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Layout = Literal["LBNHC", "LBHNC", "LKBHND", "BLHNC"]
"""Order of the dimensions of vLLM's tensors in memory, outermost first.

L is the layer, B the block, N the token, H the head, K the choice of key or value, and D the head dimension. C stands
for K and D together: the key of a token and head, followed by its value. In LKBHND, keys and values are in separate
planes.
"""

LAYOUTS: tuple[Layout, ...] = ("LBNHC", "LBHNC", "LKBHND", "BLHNC")


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a model's KV cache on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def block_nbytes(self) -> int:
        """Size of a block in bytes: K and V of its tokens in all layers."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return numbers * DTYPE_NBYTES[self.dtype]


def tensors_of(layout: Layout, shape: Shape, blocks: int, device: torch.device) -> list[torch.Tensor]:
    """Return one tensor per layer. All of them share one contiguous allocation in the order of ``layout``.

    The shape of a tensor is vLLM's: ``[B, H, N, C]``, or ``[K, B, H, N, D]`` if keys and values are in separate
    planes. The contents are undefined.
    """
    dtype = getattr(torch, shape.dtype)
    sizes = {
        "L": shape.num_layers,
        "B": blocks,
        "K": 2,
        "H": shape.num_kv_heads,
        "N": shape.block_size,
        "D": shape.head_dim,
        "C": 2 * shape.head_dim,
    }
    whole = torch.empty([sizes[letter] for letter in layout], dtype=dtype, device=device)
    view = "LKBHND" if "K" in layout else "LBHNC"
    return list(whole.permute([layout.index(letter) for letter in view]))


_STEP_BLOCKS = 1024
_COMPARED_NBYTES = 256 << 20
"""Number of bytes that are compared at a time."""
_PATIENCE_S = 600.0
_STEP_S = 0.001
"""Seconds that vLLM pauses after a step that computes nothing."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One row of the benchmark: copies in one direction with one layout. Rates are in GB/s (10^9 bytes/s).

    ``gbps`` is the median throughput of the blocks, and ``ceiling_gbps`` that of the contiguous copies. ``ratio`` is
    the median of the ratios of the pairs, not the ratio of the two medians. ``path`` names the copy route that moved
    most of the batches.
    """

    layout: Layout
    direction: Literal["h2d", "d2h"]
    piece_bytes: int
    """Size in bytes of each contiguous piece of a block in the engine's memory."""
    num_pieces: int
    """Number of pieces of all blocks together."""
    gbps: float
    ceiling_gbps: float
    ratio: float
    path: str
    worker_ms: float
    """CPU time in ms that the calls to the worker half take in the engine's thread, over all steps."""
    worker_share: float
    """The same CPU time, as a fraction of the elapsed time."""

    def plain(self) -> dict[str, object]:
        """Return the row as a mapping of plain values, for JSON."""
        return asdict(self)


def host_nbytes(device: str, shape: Shape, blocks: int) -> int:
    """Return how much host memory the measurement of one layout needs, in bytes.

    With ``device`` "cpu", this includes the engine's tensors and the copies for the checks.
    """
    total = blocks * shape.block_nbytes
    return 3 * total if device != "cpu" else 8 * total


def engine_rows(
    device: str, shape: Shape, blocks: int, pairs: int, ceiling: Ceiling, layouts: Sequence[Layout] = LAYOUTS
) -> list[EngineRow]:
    """Measure copies out of the engine's blocks and back into them, one layout at a time.

    Args:
        device: Device of the engine's tensors, such as "cuda:0".
        shape: Shape of the KV cache.
        blocks: Number of blocks, all of which are copied.
        pairs: Number of measured pairs per row.
        ceiling: The contiguous copies.
        layouts: The layouts to measure.

    Returns:
        Two rows per layout: device to host, then host to device.

    Raises:
        ConfigError: The device does not exist, or host memory cannot be page-locked.
        RuntimeError: A copy failed, or bytes differ after the copies.
    """
    found: list[EngineRow] = []
    for layout in layouts:
        rig = EngineRig(device, layout, shape, blocks)
        try:
            found += _measured(rig, layout, pairs, ceiling)
        finally:
            rig.close()
    return found


class EngineRig:
    """An engine's tensors with ``blocks`` blocks, and a worker half with as many slots in host memory."""

    def __init__(self, device: str, layout: Layout, shape: Shape, blocks: int) -> None:
        self.device = device_of(device)
        self.block_nbytes, self.blocks = shape.block_nbytes, blocks
        tensors = tensors_of(layout, shape, blocks, self.device)
        self.kv_layout: KVLayout = kv_layout(
            tensors, num_blocks=blocks, block_size=shape.block_size, identity="tierstore-bench", shard=0
        )
        self.pages = [tensor[:, 0] for tensor in self.kv_layout.pages.tensors]
        """The blocks of each layer, ``[blocks, pieces, elements]``."""
        host = {"capacity": blocks * shape.block_nbytes, "pin": "never" if device == "cpu" else "always"}
        config = Settings.of({"config": {"host": host}}).of_rank(1, None, device)
        self.half = WorkerHalf.open(config, self.kv_layout, 0)
        self._wait_pinned()
        self._number = 0

    @property
    def pieces(self) -> tuple[int, int]:
        """Number of contiguous pieces that a block consists of, and the size of a piece in bytes."""
        nbytes = self.pages[0].element_size()
        runs: list[tuple[int, int]] = []
        for layer in self.pages:
            _, pieces, elements = layer.shape
            starts = [layer.data_ptr() + i * layer.stride(1) * nbytes for i in range(pieces)]
            runs += [(start, start + elements * nbytes) for start in starts]
        number = 1 + sum(end != start for (_, end), (start, _) in pairwise(runs))
        return number, self.block_nbytes // number

    def orders(self, dst: Tier, host: NDArray[np.int64], there: NDArray[np.int64]) -> list[Orders]:
        """Return, for each step, the orders that copy between host slots ``host`` and blocks ``there``.

        Slots and blocks are paired by position. ``dst`` is the tier that the pages are copied to.
        """
        transfers = []
        for start in range(0, len(host), BATCH_PAGES):
            part = slice(start, start + BATCH_PAGES)
            here, away = tuple(host[part].tolist()), tuple(there[part].tolist())
            keys = tuple(PageKey(bytes(36)) for _ in here)
            self._number += 1
            slots = (
                (Tier.HOST, here, Tier.HBM, away) if dst == Tier.HBM else (Tier.HBM, away, Tier.HOST, here)
            )
            transfers.append(Transfer(self._number, keys, *slots, 0, (None,) * len(here)))
        a_step = _STEP_BLOCKS // BATCH_PAGES
        steps = [tuple(transfers[i : i + a_step]) for i in range(0, len(transfers), a_step)]
        return [Orders(before=step) if dst == Tier.HBM else Orders(after=step) for step in steps]

    def run(self, orders: Sequence[Orders]) -> tuple[float, float]:
        """Execute orders until all their transfers have been reported.

        Returns:
            The elapsed time, and the CPU time of the calls to the worker half, both in seconds.

        Raises:
            RuntimeError: A copy failed.
        """
        settle(self.device)
        left = sum(len(step.before) + len(step.after) for step in orders)
        start, busy = perf_counter(), 0.0
        queue = list(reversed(orders))
        while left:
            began = thread_time()
            left -= self._step(queue.pop() if queue else Orders())
            busy += thread_time() - began
            if not queue:
                sleep(_STEP_S)
        return perf_counter() - start, busy

    def batches(self) -> dict[str, int]:
        """Return how many batches each copy route has moved so far. Empty if there is only one route."""
        hbm = self.half.stats()["hbm"]
        assert isinstance(hbm, dict)
        return dict(hbm.get("batches", {}))

    def path(self, before: dict[str, int]) -> str:
        """Return the copy route that has moved the most batches since ``batches`` returned ``before``."""
        hbm = self.half.stats()["hbm"]
        assert isinstance(hbm, dict)
        since = {name: number - before.get(name, 0) for name, number in self.batches().items()}
        most = max(since, key=lambda name: since[name], default="")
        return most if most and since[most] else str(hbm["copies"])

    def close(self) -> None:
        """Close the worker half, which unlocks and frees its host memory."""
        self.half.close(_PATIENCE_S)

    def _step(self, orders: Orders) -> int:
        """Run one step that computes nothing. Return the number of transfers that were reported."""
        self.half.begin(orders)
        self.half.go()
        self.half.end()
        report = self.half.report()
        acks = () if report is None else report.acks[0]
        if any(not ack.ok for ack in acks):
            raise RuntimeError("the worker half reported a failed copy")
        return len(acks)

    def _wait_pinned(self) -> None:
        deadline = perf_counter() + _PATIENCE_S
        while perf_counter() < deadline:
            host = self.half.stats()["host"]
            assert isinstance(host, dict)
            if host["refused"]:
                raise ConfigError(f"host memory cannot be page-locked: {host['refused']}")
            if not host["pinning"]:
                return
            sleep(0.01)
        raise ConfigError(f"host memory was not page-locked within {_PATIENCE_S:.0f} s; use fewer --blocks")


def _measured(rig: EngineRig, layout: Layout, pairs: int, ceiling: Ceiling) -> list[EngineRow]:
    chance = np.random.default_rng(0)
    host, source, target = (chance.permutation(rig.blocks) for _ in range(3))
    down, up = rig.orders(Tier.HOST, host, source), rig.orders(Tier.HBM, host, target)
    _fill(rig)
    before = [layer.clone() for layer in rig.pages]
    rig.run(down)
    _empty(rig)
    rig.run(up)
    _require_right(rig, before, source, target)
    _fill(rig)
    for old, layer in zip(before, rig.pages, strict=True):
        old.copy_(layer)
    rows = [_row(rig, layout, "d2h", down, pairs, ceiling)]
    _empty(rig)
    rows.append(_row(rig, layout, "h2d", up, pairs, ceiling))
    _require_right(rig, before, source, target)
    return rows


def _row(
    rig: EngineRig,
    layout: Layout,
    direction: Literal["h2d", "d2h"],
    orders: Sequence[Orders],
    pairs: int,
    ceiling: Ceiling,
) -> EngineRow:
    nbytes = rig.blocks * rig.block_nbytes
    batches = rig.batches()
    rates, ceilings, busy, shares = [], [], [], []
    for _ in range(pairs):
        ceilings.append(ceiling.gbps(direction))
        seconds, cpu = rig.run(orders)
        rates.append(nbytes / seconds / 1e9)
        busy.append(cpu * 1e3)
        shares.append(cpu / seconds)
    pieces, piece_nbytes = rig.pieces
    return EngineRow(
        layout,
        direction,
        piece_nbytes,
        rig.blocks * pieces,
        median(rates),
        median(ceilings),
        median(rate / most for rate, most in zip(rates, ceilings, strict=True)),
        rig.path(batches),
        median(busy),
        median(shares),
    )


def _fill(rig: EngineRig) -> None:
    """Fill the blocks with small random integers, which cannot be NaN: NaN is not equal to itself."""
    for layer in rig.pages:
        layer.copy_(torch.randint(-100, 100, layer.shape, dtype=torch.int8, device=rig.device))


def _empty(rig: EngineRig) -> None:
    for layer in rig.pages:
        layer.zero_()


def _require_right(
    rig: EngineRig, before: Sequence[torch.Tensor], source: NDArray[np.int64], target: NDArray[np.int64]
) -> None:
    """Raise RuntimeError unless blocks ``target`` now have the contents that blocks ``source`` had in ``before``."""
    settle(rig.device)
    old, new = (torch.from_numpy(side).to(rig.device) for side in (source, target))
    step = max(1, _COMPARED_NBYTES * len(rig.pages) // rig.block_nbytes)
    for start in range(0, rig.blocks, step):
        part = slice(start, start + step)
        for layer, was in zip(rig.pages, before, strict=True):
            if not torch.equal(layer[new[part]], was[old[part]]):
                raise RuntimeError(
                    "bytes differ after copies out of the engine's blocks and back, so the figures are invalid"
                )


def run(
    *,
    device: str,
    blocks: int,
    layouts: str,
    layers: int,
    heads: int,
    dim: int,
    block_size: int,
    pairs: int,
    as_json: bool,
) -> None:
    """Run the command with the options of ``tierstore bench engine``."""
    found: list[EngineRow] = []
    with refusals(as_json):
        shape = Shape(layers, heads, dim, block_size)
        wanted = _layouts_of(layouts) if layouts else LAYOUTS
        device_of(device)
        require_memory({"--blocks": blocks * shape.block_nbytes}, host_nbytes(device, shape, blocks))
        ceiling = Ceiling(device, blocks * shape.block_nbytes)
        for layout in wanted:
            progress.print(f"layout {layout}")
            found += engine_rows(device, shape, blocks, pairs, ceiling, [layout])
    name = name_of(device)
    header = ("layout", "way", "piece", "pieces", "GB/s", "ceiling", "ratio", "worker ms", "share", "path")
    table = Table(*header, box=None, title=name)
    for row in found:
        rates = (f"{row.gbps:.2f}", f"{row.ceiling_gbps:.2f}", f"{row.ratio:.3f}")
        worker = (f"{row.worker_ms:.1f}", f"{row.worker_share:.3f}")
        sizes = (format_size(row.piece_bytes), str(row.num_pieces))
        table.add_row(row.layout, row.direction, *sizes, *rates, *worker, row.path)
    wide_console().print(table)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def _layouts_of(text: str) -> list[Layout]:
    """Parse a comma-separated list of layouts. Raises ConfigError for an unknown name."""
    names = text.split(",")
    for name in names:
        if name not in LAYOUTS:
            raise ConfigError(f"each of --layouts must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return cast("list[Layout]", names)
