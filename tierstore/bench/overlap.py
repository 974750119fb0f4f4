"""Compute while pages are copied: how much of the copies is hidden, and how much they slow computing down.

A lease is restored from HOST layer group by layer group, and each layer is computed as soon as its bytes arrive:
how much of the shorter of both is hidden? A kernel that only reads memory, and one that writes as much as it reads,
run next to copies: how much slower do they get?

Bytes that cross the link are also read from or written to HBM, so a kernel loses at least the link's share of
HBM's bandwidth. A contiguous copy next to the kernel shows the loss of the device itself; the rest is ours.
Ratios are of adjacent runs, and the bytes are checked.
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
"""Heads times layers of an 8B model: 32 layers of 8 heads of 128, 128 KiB per token."""


def pages_of(num_layers: int, page_size: int) -> PageSpec:
    """Return pages of 128 KiB per token. ConfigError unless ``num_layers`` divides that."""
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
    """Medians of the rounds. ``overlap`` is the saved share of the shorter one, (compute + copy - both) / the shorter.

    ``wanted`` is the intended compute time as a multiple of the copy time. ``ideal`` is 1 - 1 / groups, as
    computing begins with the first group. ``beside_ms`` is the same compute next to contiguous copies; the
    extra time is the loss of the device. ``reachable`` is the overlap of copies without losses, with compute
    of that length.
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
    """Rate of the copies alone."""
    first_layer_ms: float
    """Time from the call of ``acquire`` until the first layer could be used, with an idle GPU."""

    def plain(self) -> dict[str, object]:
        """Return the row for JSON."""
        return {"what": "overlap", **asdict(self)}


class _Compute:
    """Matrix multiplications layer by layer, and a sum over the layer of all pages that shows whether its bytes
    arrived.
    """

    def __init__(self, pages: torch.Tensor, size: int) -> None:
        self._words = pages.view(torch.int64)
        self._matrix = torch.randn(size, size, device=pages.device).to(torch.bfloat16)
        self._product = torch.empty_like(self._matrix)
        self._sums = torch.zeros(pages.shape[1], dtype=torch.int64, device=pages.device)
        self.expected = self._sum_all()
        self.products = 1

    def layer(self, layer: int) -> None:
        """Queue one layer's work on the current stream."""
        self._sums[layer] = self._words[:, layer].sum()
        for _ in range(self.products):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def require_right(self) -> None:
        """Raise RuntimeError unless every layer had arrived when it was summed."""
        if not torch.equal(self._sums, self.expected):
            raise RuntimeError("a layer was computed before its bytes were there")
        self._sums.zero_()

    def _sum_all(self) -> torch.Tensor:
        return torch.stack([self._words[:, layer].sum() for layer in range(self._words.shape[1])])


class Restore:
    """A store with all pages in HOST, which can be restored repeatedly."""

    def __init__(self, store: TierStore, keys: list[PageKey], matrix: int) -> None:
        self._store = store
        self._keys = keys
        pages = store.pages
        assert not isinstance(pages, GroupedPages)
        self._pages = pages
        self._layers = pages.shape[1]
        self.nbytes = pages.nbytes
        """Bytes of all pages."""
        self.compute = _Compute(pages, matrix)

    def alone(self) -> float:
        """Return the seconds of computing with the pages in HBM."""
        settle(self._pages.device)
        start = perf_counter()
        for layer in range(self._layers):
            self.compute.layer(layer)
        settle(self._pages.device)
        return perf_counter() - start

    def fill_up(self, wanted: float) -> None:
        """Choose the number of multiplications so that computing takes about ``wanted`` times as long as copying."""
        for _ in range(_TRIES):
            self.both()  # an idle GPU computes faster for a while
            _, copying = self.copied()
            self.compute.products = max(1, round(self.compute.products * wanted * copying / self.alone()))

    def beside(self, block: Ceiling) -> float:
        """Return the seconds of computing next to contiguous copies of about the same length."""
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
        """Return the seconds until the first layer and until all layers arrived, with nothing computed."""
        with self._empty() as start, self._store.acquire(self._keys) as lease:
            self._wait(lease, 0)
            first = perf_counter() - start
            self._wait(lease, self._layers - 1)
            whole = perf_counter() - start
            self._require_all(lease)
        return first, whole

    def both(self) -> float:
        """Return the seconds of computing each layer once it arrived."""
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
        """Empty HBM and yield the time."""
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
            raise RuntimeError(f"only {lease.num_pages} pages came back: {lease.missing_because}")


def host_nbytes(device: str, nbytes: int) -> int:
    """Return the memory that ``overlap_rows`` takes if the device is the CPU, with the contiguous block."""
    block = min(_BLOCK_NBYTES, nbytes)
    return 2 * nbytes + 4 * block if device == "cpu" else nbytes + 2 * block


def overlap_rows(
    device: str, spec: PageSpec, nbytes: int, rounds: int, matrix: int, wanted: Sequence[float]
) -> list[OverlapRow]:
    """Restore pages of ``nbytes`` in all. One row per compute time, a multiple of the copy time.

    ConfigError as from ``open``.
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
    """Put random pages, and save them to HOST."""
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
    """``kernel`` is "read" or "copy".

    ``slowdown`` is the median of the pairs, 0.03 for 3 %; ``share`` is the copies' part of the bytes that HBM moves;
    ``alone_tbps`` counts what the kernel reads and writes.
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
        """Return the row for JSON."""
        return {"what": "beside", **asdict(self)}


class Load(Protocol):
    """Copies that run in the background. ``prepare`` is called before ``start``."""

    name: str
    piece_nbytes: int
    nbytes: int
    twice: bool
    """Whether with both directions at once each one moves ``nbytes``, instead of both together."""

    def prepare(self, direction: Direction) -> None:
        """Do what is not to be measured."""
        ...

    def start(self, direction: Direction) -> None:
        """Queue the copies."""
        ...

    def finish(self) -> None:
        """Wait until they ended."""
        ...


class Reading:
    """A sum over ``nbytes`` of the device, repeated."""

    name = "read"

    def __init__(self, device: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._device = device_of(device)
        self._memory = torch.zeros(nbytes // 8, dtype=torch.int64, device=self._device)
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def seconds(self, times: int) -> float:
        """Return the median seconds of one."""
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
        )  # torch's copy_ would be the driver's, by whatever engine it chooses


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
        """Do nothing."""

    def start(self, direction: Direction) -> None:
        """Queue the copies."""
        for _ in range(self._times):
            self._ceiling.queue(direction)

    def finish(self) -> None:
        """Wait until they ended."""
        settle(self._ceiling.device)


class Pages:
    """Scattered pages by one of the routes."""

    twice = False

    def __init__(self, device: str, piece_nbytes: int, nbytes: int, path: Path) -> None:
        self.piece_nbytes = piece_nbytes
        self.rig = Rig(device, piece_nbytes, nbytes, path)
        self.name = self.rig.path
        self.nbytes = self.rig.num_pages * self.rig.page_nbytes
        self._left = 0
        self._transfers: dict[Direction, Sequence[Transfer]] = {}

    def prepare(self, direction: Direction) -> None:
        """Do what is not to be measured."""
        chance = np.random.default_rng(0)
        host, there = (chance.permutation(self.rig.num_pages) for _ in "ht")
        split = {"h2d": len(host), "d2h": 0, "both": len(host) // 2}[direction]
        up = self.rig.transfers(Tier.HBM, host[:split], there[:split])
        down = self.rig.transfers(Tier.HOST, host[split:], there[split:])
        self._transfers[direction] = [x for x in chain(*zip_longest(up, down)) if x is not None]

    def start(self, direction: Direction) -> None:
        """Queue the copies."""
        transfers = self._transfers[direction]
        self._left = len(transfers)
        for transfer in transfers:
            self.rig.copies.submit(transfer)

    def finish(self) -> None:
        """Wait until they ended. RuntimeError if one failed."""
        while self._left:
            for ack in self.rig.copies.poll():
                if not ack.ok:
                    raise RuntimeError("a copy failed")
                self._left -= 1
            sleep(_POLL_S)


def beside_row(reading: Reading, load: Load, direction: Direction, times: int, pairs: int) -> BesideRow:
    """Measure one figure. The copies must outlast ``times`` runs of the kernel in ``reading``."""
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
