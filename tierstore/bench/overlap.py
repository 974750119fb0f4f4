"""Two benchmarks of computing while pages are being copied.

The first measures how much of the shorter activity, copying or computing, is hidden behind the longer one. It
loads a lease's pages from host memory, one layer group after another. Each layer is computed as soon as its
bytes have arrived.

The second measures how much a kernel slows down while pages are copied. One kernel only reads memory, another
writes as much as it reads. The copies also read from or write to HBM, so a kernel loses at least the share of HBM
bandwidth that the copies use. A contiguous copy alongside the kernel shows the slowdown that the device causes; the
store causes the rest.

Ratios compare adjacent runs. The copied bytes are checked.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, pairwise, zip_longest
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from tierstore.bench import measurement
from tierstore.bench.link import Ceiling, Rig, device_of, settle
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.gpu.pool import GroupedPages
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tierstore.bench.link import Direction, Path
    from tierstore.lease import Lease
    from tierstore.types import Transfer

_PATIENCE_S = 600.0
_BLOCK_NBYTES = 1 << 30
_TRIES = 3

_HEADS_AND_LAYERS = 256
"""Number of KV heads times number of layers in an 8B model: 8 heads with 128 elements each, in 32 layers."""


def pages_of(num_layers: int, page_size: int) -> PageSpec:
    """Return the specification of pages with ``num_layers`` layers and 128 KiB per token, as in an 8B model.

    Raises:
        ConfigError: ``num_layers`` does not divide 256.
    """
    if _HEADS_AND_LAYERS % num_layers:
        raise ConfigError(f"--layers must be a power of two up to {_HEADS_AND_LAYERS}, got {num_layers}")
    return PageSpec(
        num_layers=num_layers,
        page_size=page_size,
        num_kv_heads=_HEADS_AND_LAYERS // num_layers,
        head_dim=128,
        dtype="bfloat16",
        model="tierstore-bench",
    )


@dataclass(frozen=True, slots=True)
class OverlapRow:
    """One row of the overlap benchmark. Times and ratios are medians over the rounds.

    ``wanted`` is the intended compute time as a multiple of the copy time. ``compute_ms`` and ``copy_ms`` are the
    times of computing alone and of copying alone, and ``both_ms`` is the time of both at once.

    ``overlap`` is the share of the shorter activity that is hidden: (compute + copy - both) / min(compute, copy).
    ``ideal`` is 1 - 1 / groups, because computing cannot start before the first layer group has arrived.

    ``beside_ms`` is the time of the same computation alongside contiguous copies. The difference between
    ``beside_ms`` and ``compute_ms`` is caused by the device, not by the store. ``reachable`` is the overlap that the
    store would reach if it caused no further loss.
    """

    wanted: float
    groups: int
    num_pages: int
    page_bytes: int
    compute_ms: float
    copy_ms: float
    both_ms: float
    beside_ms: float
    overlap: float
    ideal: float
    reachable: float
    gbps: float
    """Rate of the copies alone, in GB/s."""
    first_layer_ms: float
    """Time in milliseconds from the call to ``acquire`` until the first layer can be used, on an idle device."""

    def plain(self) -> dict[str, object]:
        """Return the row as JSON-serializable data."""
        return {"what": "overlap", **asdict(self)}


class _Compute:
    """The computation: for each layer, matrix multiplications and a sum over that layer of all pages.

    The sum shows whether the layer's bytes had arrived. ``products`` is the number of multiplications per layer.
    """

    def __init__(self, pages: torch.Tensor, size: int) -> None:
        self._words = pages.view(torch.int64)
        self._matrix = torch.randn(size, size, device=pages.device).to(torch.bfloat16)
        self._product = torch.empty_like(self._matrix)
        self._sums = torch.zeros(pages.shape[1], dtype=torch.int64, device=pages.device)
        self.expected = self._sum_all()
        self.products = 1

    def layer(self, layer: int) -> None:
        """Queue the sum and the multiplications for one layer on the current stream."""
        self._sums[layer] = self._words[:, layer].sum()
        for _ in range(self.products):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def require_right(self) -> None:
        """Reset the sums. Raise RuntimeError if a sum is wrong, which means that a layer was used before it arrived."""
        if not torch.equal(self._sums, self.expected):
            raise RuntimeError("a layer was computed before its bytes had arrived")
        self._sums.zero_()

    def _sum_all(self) -> torch.Tensor:
        return torch.stack([self._words[:, layer].sum() for layer in range(self._words.shape[1])])


class Restore:
    """A store with all its pages in host memory, and the runs that load them into HBM.

    ``matrix`` is the number of rows and columns of the multiplied matrices.
    """

    def __init__(self, store: TierStore, keys: list[PageKey], matrix: int) -> None:
        self._store = store
        self._keys = keys
        pages = store.pages
        assert not isinstance(pages, GroupedPages)
        self._pages = pages
        self._layers = pages.shape[1]
        self.nbytes = pages.nbytes
        """Size of all pages in bytes."""
        self.compute = _Compute(pages, matrix)

    def alone(self) -> float:
        """Return how long computing takes, in seconds, if all pages are in HBM and no copies run."""
        settle(self._pages.device)
        start = perf_counter()
        for layer in range(self._layers):
            self.compute.layer(layer)
        settle(self._pages.device)
        return perf_counter() - start

    def fill_up(self, wanted: float) -> None:
        """Set the number of multiplications so that computing takes about ``wanted`` times as long as copying."""
        for _ in range(_TRIES):
            self.both()  # warms up the GPU, which computes faster for a while after a pause
            _, copying = self.copied()
            self.compute.products = max(1, round(self.compute.products * wanted * copying / self.alone()))

    def beside(self, block: Ceiling) -> float:
        """Return how many seconds computing takes during contiguous copies of 1.2 times the size of the pages."""
        settle(self._pages.device)
        start = perf_counter()
        for _ in range(max(1, round(1.2 * self.nbytes / block.nbytes))):
            block.queue("h2d")
        for layer in range(self._layers):
            self.compute.layer(layer)
        if self._pages.is_cuda:
            torch.cuda.current_stream(self._pages.device).synchronize()
        seconds = perf_counter() - start
        settle(self._pages.device)
        return seconds

    def copied(self) -> tuple[float, float]:
        """Copy all pages to HBM without computing.

        Return two times in seconds: until the first layer has arrived, and until all layers have arrived.
        """
        with self._empty() as start, self._store.acquire(self._keys) as lease:
            self._wait(lease, 0)
            first = perf_counter() - start
            self._wait(lease, self._layers - 1)
            whole = perf_counter() - start
            self._require_all(lease)
        return first, whole

    def both(self) -> float:
        """Copy all pages to HBM, and compute each layer as soon as it has arrived. Return the time in seconds.

        Raises:
            RuntimeError: A page was not restored, or a layer was computed before its bytes had arrived.
        """
        with self._empty() as start, self._store.acquire(self._keys) as lease:
            for layer in range(self._layers):
                event = lease.ready(layer, _PATIENCE_S)
                if isinstance(event, torch.cuda.Event):
                    torch.cuda.current_stream(self._pages.device).wait_event(event)
                elif event is not None:
                    event.synchronize()
                self.compute.layer(layer)
            settle(self._pages.device)
            seconds = perf_counter() - start
            self._require_all(lease)
        self.compute.require_right()
        return seconds

    @contextmanager
    def _empty(self) -> Iterator[float]:
        """Evict all pages from HBM and overwrite their memory with zeros. Then yield the start time in seconds."""
        self._store.evict(self._keys, Tier.HBM)
        self._store.drain(_PATIENCE_S)
        self._pages.zero_()
        settle(self._pages.device)
        yield perf_counter()

    def _wait(self, lease: Lease, layer: int) -> None:
        event = lease.ready(layer, _PATIENCE_S)
        if event is not None:
            event.synchronize()

    def _require_all(self, lease: Lease) -> None:
        if lease.wait(_PATIENCE_S) is not LeaseState.READY or lease.num_pages < len(self._keys):
            raise RuntimeError(f"only {lease.num_pages} pages were loaded into HBM: {lease.missing_because}")


def host_nbytes(device: str, nbytes: int) -> int:
    """Return how much host memory ``overlap_rows`` takes in bytes, including its contiguous copies.

    ``nbytes`` is the total size of the pages.
    """
    block = min(_BLOCK_NBYTES, nbytes)
    return 2 * nbytes + 4 * block if device == "cpu" else nbytes + 2 * block


def overlap_rows(
    device: str, spec: PageSpec, nbytes: int, rounds: int, matrix: int, wanted: Sequence[float]
) -> list[OverlapRow]:
    """Measure the overlap, and return one row per compute time in ``wanted``.

    Args:
        device: The device, such as ``cuda:0``.
        spec: The specification of the pages.
        nbytes: Total size of the pages in bytes.
        rounds: Number of rounds per row.
        matrix: Number of rows and columns of the multiplied matrices.
        wanted: Compute times as multiples of the copy time.

    Raises:
        ConfigError: The store cannot be opened.
    """
    device_of(device)
    pages = max(1, nbytes // spec.page_nbytes)
    capacity = pages * spec.page_nbytes
    pin: Literal["never", "always"] = "never" if device == "cpu" else "always"
    config = load_config(
        {"hbm": {"capacity": capacity, "device": device}, "host": {"capacity": capacity, "pin": pin}}
    )
    with TierStore.open(config, spec) as store:
        keys = _filled(store, pages, spec)
        restore = Restore(store, keys, matrix)
        block = Ceiling(device, min(_BLOCK_NBYTES, capacity))
        groups = _groups(store)
        with measurement.at_rest():
            return [_row(restore, block, share, groups, pages, rounds) for share in wanted]


def _row(restore: Restore, block: Ceiling, wanted: float, groups: int, pages: int, rounds: int) -> OverlapRow:
    restore.fill_up(wanted)
    found = [
        (restore.alone(), *restore.copied(), restore.both(), restore.beside(block)) for _ in range(rounds)
    ]
    compute, first, copy, both, beside = (median(column) for column in zip(*found, strict=True))
    return OverlapRow(
        wanted=wanted,
        groups=groups,
        num_pages=pages,
        page_bytes=restore.nbytes // pages,
        compute_ms=compute * 1e3,
        copy_ms=copy * 1e3,
        both_ms=both * 1e3,
        beside_ms=beside * 1e3,
        overlap=median((c + t - b) / min(c, t) for c, _, t, b, _ in found),
        ideal=1 - 1 / groups,
        reachable=median(
            (c + t - max(t / groups + s, t + s / groups)) / min(c, t) for c, _, t, _, s in found
        ),
        gbps=restore.nbytes / copy / 1e9,
        first_layer_ms=first * 1e3,
    )


def _filled(store: TierStore, number: int, spec: PageSpec) -> list[PageKey]:
    """Put random pages into the store, wait until they are also in host memory, and return their keys."""
    slots = store.allocate(number)
    pages = store.pages
    assert not isinstance(pages, GroupedPages)
    pages.view(torch.int64).random_()
    keys = store.keys(range(number * spec.page_size))
    store.put(keys, slots)
    store.drain(_PATIENCE_S)
    return keys


def _groups(store: TierStore) -> int:
    hbm = store.stats()["hbm"]
    assert isinstance(hbm, dict)
    return int(hbm["layer_groups"])


_WARM = 2
_POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class BesideRow:
    """Slowdown of a kernel that runs alongside copies.

    ``kernel`` is "read" or "copy", and ``way`` names the method that copies the pages. ``slowdown`` is the median
    over the pairs; 0.03 means that the kernel takes 3 % longer. ``share`` is the copies' share of all bytes moved in
    HBM. ``alone_tbps`` is the rate of the kernel without copies in TB/s, counting the bytes that the kernel reads
    and writes. ``gbps`` is the rate of the copies in GB/s.
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
        """Return the row as JSON-serializable data."""
        return {"what": "beside", **asdict(self)}


class Load(Protocol):
    """Copies that run in the background. Call ``prepare`` first, then ``start`` and ``finish``, repeatedly.

    ``name`` describes the copies, ``piece_nbytes`` is the size of a contiguous piece, and ``nbytes`` is the number
    of bytes copied per ``start``.
    """

    name: str
    piece_nbytes: int
    nbytes: int
    twice: bool
    """Whether copies in both directions move ``nbytes`` bytes in each direction.

    If False, they move ``nbytes`` in total.
    """

    def prepare(self, direction: Direction) -> None:
        """Do the work that must not be measured."""
        ...

    def start(self, direction: Direction) -> None:
        """Queue the copies without waiting."""
        ...

    def finish(self) -> None:
        """Wait until the copies have finished."""
        ...


class Reading:
    """A kernel that reads ``nbytes`` bytes of device memory: it computes their sum."""

    name = "read"

    def __init__(self, device: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device_of(device)
        self._memory = torch.zeros(nbytes // 8, dtype=torch.int64, device=self._device)
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def seconds(self, times: int) -> float:
        """Run the kernel ``times`` times and return the median time of a run, in seconds.

        On a GPU, the first two runs are not counted.
        """
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
    """A kernel that reads one half of ``nbytes`` bytes of device memory and writes the other half."""

    name = "copy"

    def __init__(self, device: str, nbytes: int) -> None:
        super().__init__(device, nbytes)
        half = len(self._memory) // 2
        self._from, self._to = self._memory[:half], self._memory[half : 2 * half]

    def _once(self) -> None:
        torch.bitwise_not(
            self._from, out=self._to
        )  # not copy_(), which the driver may run on a copy engine instead of a kernel


class Contiguous:
    """Background copies of one contiguous block, repeated ``times`` times per ``start``."""

    name = "contiguous"
    twice = True

    def __init__(self, ceiling: Ceiling, times: int) -> None:
        self.piece_nbytes = ceiling.nbytes
        self.nbytes = ceiling.nbytes * times
        self._ceiling = ceiling
        self._times = times

    def prepare(self, direction: Direction) -> None:
        """Do nothing."""

    def start(self, direction: Direction) -> None:
        """Queue the copies without waiting."""
        for _ in range(self._times):
            self._ceiling.queue(direction)

    def finish(self) -> None:
        """Wait until the copies have finished."""
        settle(self._ceiling.device)


class Pages:
    """Background copies of scattered pages, as in a store. ``path`` says how the pages are copied."""

    twice = False

    def __init__(self, device: str, piece_nbytes: int, nbytes: int, path: Path) -> None:
        self.piece_nbytes = piece_nbytes
        self.rig = Rig(device, piece_nbytes, nbytes, path)
        self.name = self.rig.path
        self.nbytes = self.rig.num_pages * self.rig.page_nbytes
        self._left = 0
        self._transfers: dict[Direction, Sequence[Transfer]] = {}

    def prepare(self, direction: Direction) -> None:
        """Create the transfers: random pairs of slots. With "both", half of the pages go in each direction."""
        chance = np.random.default_rng(0)
        host, there = (chance.permutation(self.rig.num_pages) for _ in "ht")
        split = {"h2d": len(host), "d2h": 0, "both": len(host) // 2}[direction]
        up = self.rig.transfers(Tier.HBM, host[:split], there[:split])
        down = self.rig.transfers(Tier.HOST, host[split:], there[split:])
        self._transfers[direction] = [x for x in chain(*zip_longest(up, down)) if x is not None]

    def start(self, direction: Direction) -> None:
        """Submit the transfers to the copy engine without waiting. Call ``prepare`` first."""
        transfers = self._transfers[direction]
        self._left = len(transfers)
        for transfer in transfers:
            self.rig.copies.submit(transfer)

    def finish(self) -> None:
        """Wait until the copies have finished. Raises RuntimeError if a copy failed."""
        while self._left:
            for ack in self.rig.copies.poll():
                if not ack.ok:
                    raise RuntimeError("the copy engine could not copy a page")
                self._left -= 1
            sleep(_POLL_S)


def beside_row(reading: Reading, load: Load, direction: Direction, times: int, pairs: int) -> BesideRow:
    """Measure how much a kernel slows down while copies run in the background.

    Args:
        reading: The kernel.
        load: The copies. They must take longer than ``times`` runs of the kernel.
        direction: The direction of the copies.
        times: Number of runs of the kernel per measurement.
        pairs: Number of pairs of measurements, each without and with the copies. One additional pair comes first and
            is not counted.
    """
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
