"""How fast the worker's half of the vLLM connector moves blocks, beside one contiguous copy: ``bench engine``.

Orders go in and reports come out as in an engine: 1,024 blocks a step, 32 a transfer. The tensors lie as vLLM lays
them out; blocks lie at random on both sides. Every figure is the median of pairs: a contiguous copy of the same
process and the blocks after it, by the clock on the wall, from the first order to the last report; the bytes are
compared before and after.
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
from tierstore.config import format_size
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.errors import ConfigError
from tierstore.page import DTYPE_NBYTES
from tierstore.types import PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

Layout = Literal["LBNHC", "LBHNC", "LKBHND", "BLHNC"]
"""Physical order of vLLM's tensors, outermost first: L layer, B block, N token, H head, K key or value, D head
dimension, C the last two of a token beside each other. LKBHND: keys and values in planes apart."""

LAYOUTS: tuple[Layout, ...] = ("LBNHC", "LBHNC", "LKBHND", "BLHNC")


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's KV cache on one rank."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: str = "bfloat16"

    @property
    def block_nbytes(self) -> int:
        """K and V of all layers."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return numbers * DTYPE_NBYTES[self.dtype]


def tensors_of(layout: Layout, shape: Shape, blocks: int, device: torch.device) -> list[torch.Tensor]:
    """A tensor a layer, in one piece of memory: vLLM's view ``[B, H, N, C]`` of the physical order, or
    ``[K, B, H, N, D]`` where the planes are apart."""
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
"""Of a piece of what is compared."""
_PATIENCE_S = 600.0
_STEP_S = 0.001
"""vLLM's own pause after a step that had nothing to compute."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One figure. Rates in 10^9 bytes a second; ``ratio``: of the pairs, not of the medians."""

    layout: Layout
    direction: Literal["h2d", "d2h"]
    piece_bytes: int
    """Of a block, as far as its bytes are neighbours in the engine's memory."""
    num_pieces: int
    gbps: float
    ceiling_gbps: float
    ratio: float
    path: str
    worker_ms: float
    """CPU time of the worker's own thread, all calls of all steps together."""
    worker_share: float
    """As a part of what the copies take."""

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def host_nbytes(device: str, shape: Shape, blocks: int) -> int:
    """Memory that a layout's rows and their ceiling take, where the device is the CPU for both ends and the checks."""
    total = blocks * shape.block_nbytes
    return 3 * total if device != "cpu" else 8 * total


def engine_rows(
    device: str, shape: Shape, blocks: int, pairs: int, ceiling: Ceiling, layouts: Sequence[Layout] = LAYOUTS
) -> list[EngineRow]:
    """Out of the engine's blocks and back, layout by layout.

    ConfigError for a device that is not there, or memory that cannot be page-locked; RuntimeError if bytes differ.
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
    """An engine's tensors of ``blocks`` blocks, and a worker's half with as many slots of host memory."""

    def __init__(self, device: str, layout: Layout, shape: Shape, blocks: int) -> None:
        self.device = device_of(device)
        self.block_nbytes, self.blocks = shape.block_nbytes, blocks
        tensors = tensors_of(layout, shape, blocks, self.device)
        self.kv_layout: KVLayout = kv_layout(
            tensors, num_blocks=blocks, block_size=shape.block_size, identity="tierstore-bench", shard=0
        )
        self.pages = [tensor[:, 0] for tensor in self.kv_layout.pages.tensors]
        """A layer's blocks: ``[blocks, pieces, elements]``."""
        host = {"capacity": blocks * shape.block_nbytes, "pin": "never" if device == "cpu" else "always"}
        config = Settings.of({"config": {"host": host}}).of_rank(1, None, device)
        self.half = WorkerHalf.open(config, self.kv_layout, 0)
        self._wait_pinned()
        self._number = 0

    @property
    def pieces(self) -> tuple[int, int]:
        """How many a block consists of, and the bytes of one."""
        nbytes = self.pages[0].element_size()
        runs: list[tuple[int, int]] = []
        for layer in self.pages:
            _, pieces, elements = layer.shape
            starts = [layer.data_ptr() + i * layer.stride(1) * nbytes for i in range(pieces)]
            runs += [(start, start + elements * nbytes) for start in starts]
        number = 1 + sum(end != start for (_, end), (start, _) in pairwise(runs))
        return number, self.block_nbytes // number

    def orders(self, dst: Tier, host: NDArray[np.int64], there: NDArray[np.int64]) -> list[Orders]:
        """What the scheduler's half would say, step by step, to move these pairs of slots."""
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
        """Seconds until all has been reported, and the CPU time of the calls. RuntimeError if a copy failed."""
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
        """How many went by each route so far, where there are several."""
        hbm = self.half.stats()["hbm"]
        assert isinstance(hbm, dict)
        return dict(hbm.get("batches", {}))

    def path(self, before: dict[str, int]) -> str:
        """By which route most has gone since ``before``."""
        hbm = self.half.stats()["hbm"]
        assert isinstance(hbm, dict)
        since = {name: number - before.get(name, 0) for name, number in self.batches().items()}
        most = max(since, key=lambda name: since[name], default="")
        return most if most and since[most] else str(hbm["copies"])

    def close(self) -> None:
        """Unlocks the memory."""
        self.half.close(_PATIENCE_S)

    def _step(self, orders: Orders) -> int:
        """One step of an engine that computes nothing; transfers that were reported."""
        self.half.begin(orders)
        self.half.go()
        self.half.end()
        report = self.half.report()
        acks = () if report is None else report.acks[0]
        if any(not ack.ok for ack in acks):
            raise RuntimeError("a copy failed")
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
        raise ConfigError(f"host memory was not page-locked in {_PATIENCE_S:.0f} s")


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
    """Random bytes, without numbers that compare with nothing."""
    for layer in rig.pages:
        layer.copy_(torch.randint(-100, 100, layer.shape, dtype=torch.int8, device=rig.device))


def _empty(rig: EngineRig) -> None:
    for layer in rig.pages:
        layer.zero_()


def _require_right(
    rig: EngineRig, before: Sequence[torch.Tensor], source: NDArray[np.int64], target: NDArray[np.int64]
) -> None:
    """What was in the blocks ``source`` is in the blocks ``target``."""
    settle(rig.device)
    old, new = (torch.from_numpy(side).to(rig.device) for side in (source, target))
    step = max(1, _COMPARED_NBYTES * len(rig.pages) // rig.block_nbytes)
    for start in range(0, rig.blocks, step):
        part = slice(start, start + step)
        for layer, was in zip(rig.pages, before, strict=True):
            if not torch.equal(layer[new[part]], was[old[part]]):
                raise RuntimeError("bytes differ after copies out of an engine's blocks and back")


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
    """ConfigError for a name that is none."""
    names = text.split(",")
    for name in names:
        if name not in LAYOUTS:
            raise ConfigError(f"--layouts must be some of {', '.join(LAYOUTS)}, got {name!r}")
    return cast("list[Layout]", names)
