"""How fast pages move between HBM and page-locked host memory, beside one contiguous copy of the same process.

Pages lie at random on both sides. Every figure is the median of pairs: a contiguous copy and the scattered one after
it, by the clock on the wall, from the first call to the last byte; then the bytes are compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from tierstore.errors import ConfigError
from tierstore.gpu.copy_engine import CpuCopyEngine
from tierstore.gpu.cuda_copies import CudaCopyEngine
from tierstore.gpu.cuda_pool import CudaPool
from tierstore.gpu.device import pinner, require_device
from tierstore.gpu.driver import Driver
from tierstore.gpu.kernels import Kernel
from tierstore.gpu.pool import CpuPool, GroupedPages
from tierstore.gpu.routes import Straight
from tierstore.host.arena import HostArena
from tierstore.host.pinning import CHUNK_NBYTES
from tierstore.layout import PageLayout
from tierstore.types import PageKey, PageSpec, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.gpu.copy_engine import CopyEngine
    from tierstore.gpu.pool import OwnPool
    from tierstore.gpu.routes import Route

Direction = Literal["h2d", "d2h", "both"]
Path = Literal["straight", "kernel"]

_PIECES = 4096
"""Pieces of one transfer."""

_ALIGNMENT = 4096
_PIN_PATIENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class CopyRow:
    """One figure. Rates in 10^9 bytes a second; ``ratio``: of the pairs, not of the medians."""

    direction: Direction
    piece_bytes: int
    num_pieces: int
    gbps: float
    ceiling_gbps: float
    ratio: float
    path: str
    submit_ms: float
    """Until the last call returned; the copies go on."""

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Ceiling:
    """Contiguous copies of ``nbytes`` between page-locked memory and the device, one way or both at once."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        on_card = device.type == "cuda"
        self._device = device
        self._nbytes = nbytes
        self._host = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=on_card) for _ in range(2)]
        self._there = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        for host in self._host:
            host.fill_(1)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if on_card else []  # type: ignore[no-untyped-call]

    def gbps(self, direction: Direction) -> float:
        """One run."""
        _settle(self._device)
        start = perf_counter()
        if direction != "d2h":
            self._copy(0, self._there[0], self._host[0])
        if direction != "h2d":
            self._copy(1, self._host[1], self._there[1])
        _settle(self._device)
        moved = self._nbytes * (2 if direction == "both" else 1)
        return moved / (perf_counter() - start) / 1e9

    def _copy(self, lane: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        if not self._streams:
            dst.copy_(src)
            return
        with torch.cuda.stream(self._streams[lane]):
            dst.copy_(src, non_blocking=True)


class Rig:
    """A pool and an arena of ``num_pages`` pages of ``piece_nbytes`` each, and a copy engine between them."""

    def __init__(self, device: torch.device, piece_nbytes: int, num_pages: int, path: Path) -> None:
        spec = PageSpec(
            kind="mla",
            num_layers=1,
            page_size=1,
            num_kv_heads=1,
            head_dim=piece_nbytes,
            dtype="uint8",
            model="tierstore-bench",
        )
        layout = PageLayout.of(spec)
        self.device, self.piece_nbytes, self.num_pages = device, piece_nbytes, num_pages
        self.arena = HostArena(layout, num_pages, None if device.type == "cpu" else pinner(str(device)))
        self.pool: OwnPool
        self.copies: CopyEngine
        if device.type == "cpu":
            self.pool, self.path = CpuPool(layout, num_pages), "threads"
            self.copies = CpuCopyEngine(self.pool, self.arena, piece_nbytes, lambda: None)
        else:
            if not self.arena.wait_pinned(num_pages, _PIN_PATIENCE_S):
                raise ConfigError(f"{self.arena.nbytes} bytes cannot be page-locked: {self.arena.refused}")
            self.pool = CudaPool(layout, num_pages, device)
            self.copies, self.path = self._engine(self.pool, path)
        pages = self.pool.pages
        assert not isinstance(pages, GroupedPages)
        self.rows = pages.view(num_pages, piece_nbytes)
        self.host_rows = torch.from_numpy(self.arena.memory).view(num_pages, piece_nbytes)
        self._number = 0

    def transfers(
        self, dst: Tier, host: Sequence[int] | np.ndarray, there: Sequence[int] | np.ndarray
    ) -> list[Transfer]:
        """The copies between these slots, pair by pair."""
        found = []
        for start in range(0, len(host), _PIECES):
            here, away = (tuple(int(x) for x in side[start : start + _PIECES]) for side in (host, there))
            keys, parents = (PageKey(b""),) * len(here), (None,) * len(here)
            self._number += 1
            slots = (
                (Tier.HOST, here, Tier.HBM, away) if dst == Tier.HBM else (Tier.HBM, away, Tier.HOST, here)
            )
            found.append(Transfer(self._number, keys, *slots, 0, parents))
        return found

    def run(self, transfers: Sequence[Transfer]) -> tuple[float, float]:
        """Seconds until all have ended, and until all were submitted."""
        _settle(self.device)
        start = perf_counter()
        for transfer in transfers:
            self.copies.submit(transfer)
        submitted = perf_counter() - start
        left = len(transfers)
        while left:
            for ack in self.copies.poll():
                if not ack.ok:
                    raise RuntimeError("a copy failed")
                left -= 1
        return perf_counter() - start, submitted

    def close(self) -> None:
        """Unlocks the memory."""
        self.copies.close(_PIN_PATIENCE_S)
        del self.host_rows
        self.arena.close()

    def _engine(self, pool: CudaPool, path: Path) -> tuple[CopyEngine, str]:
        driver = Driver(self.device.index)
        route: Route = Straight(pool.segments, driver)
        name = f"straight, {driver.call}"
        if path == "kernel":
            route, name = Kernel(pool.segments, self.device), "kernel"
        streams = (driver.stream(self.device.index), driver.stream(self.device.index))
        threads = CpuCopyEngine(pool, self.arena, self.piece_nbytes, lambda: None)
        return CudaCopyEngine(route, self.arena, self.piece_nbytes, streams, threads), name


def copy_rows(
    device: str, piece_nbytes: int, batch_nbytes: int, pairs: int, path: Path, ceiling: Ceiling
) -> list[CopyRow]:
    """H2D, D2H and both at once, pages at random. ConfigError for a size that is no multiple of 4096."""
    if piece_nbytes % _ALIGNMENT:
        raise ConfigError(f"pieces of {piece_nbytes} bytes; allowed: a multiple of {_ALIGNMENT}")
    number = max(2, batch_nbytes // piece_nbytes)
    rig = Rig(_device(device), piece_nbytes, number, path)
    try:
        return [_measured(rig, direction, pairs, ceiling) for direction in _DIRECTIONS]
    finally:
        rig.close()


def open_ceiling(device: str, nbytes: int) -> Ceiling:
    """The contiguous copies of a device. ConfigError where it is not there."""
    return Ceiling(_device(device), nbytes)


_DIRECTIONS: tuple[Direction, ...] = ("h2d", "d2h", "both")


def _measured(rig: Rig, direction: Direction, pairs: int, ceiling: Ceiling) -> CopyRow:
    chance = np.random.default_rng(0)
    host, there = chance.permutation(rig.num_pages), chance.permutation(rig.num_pages)
    half = rig.num_pages // 2
    split = {"h2d": rig.num_pages, "d2h": 0, "both": half}[direction]
    _fill(rig)
    wanted = rig.rows.clone()
    up = rig.transfers(Tier.HBM, host[:split], there[:split])
    down = rig.transfers(Tier.HOST, host[split:], there[split:])
    mixed = [t for two in zip(up, down, strict=False) for t in two] if up and down else up + down
    rig.run(mixed)
    _require_right(rig, wanted, host, there, split)
    rates, ceilings, submits = [], [], []
    for _ in range(pairs):
        ceilings.append(ceiling.gbps(direction))
        seconds, submitted = rig.run(mixed)
        rates.append(rig.piece_nbytes * rig.num_pages / seconds / 1e9)
        submits.append(submitted * 1e3)
    _require_right(rig, wanted, host, there, split)
    ratios = [rate / most for rate, most in zip(rates, ceilings, strict=True)]
    return CopyRow(
        direction,
        rig.piece_nbytes,
        rig.num_pages,
        median(rates),
        median(ceilings),
        median(ratios),
        rig.path,
        median(submits),
    )


def _fill(rig: Rig) -> None:
    """Random bytes on both sides, other ones on each."""
    rig.rows.view(torch.int64).random_()
    for part in _parts(rig):
        rig.host_rows[part].copy_(rig.rows[part])
    rig.rows.view(torch.int64).random_()


def _require_right(rig: Rig, before: torch.Tensor, host: np.ndarray, there: np.ndarray, split: int) -> None:
    """Pages loaded are those of the host; pages saved are those of the device before. RuntimeError if not."""
    here = torch.cat([rig.host_rows[part].to(rig.device) for part in _parts(rig)])
    at, of = (torch.from_numpy(side).to(rig.device) for side in (there, host))
    for start in range(0, rig.num_pages, max(1, (256 << 20) // rig.piece_nbytes)):
        part = slice(start, start + max(1, (256 << 20) // rig.piece_nbytes))
        same = torch.equal(rig.rows[at[part]], here[of[part]])
        saved = part.start >= split
        if not same or (saved and not torch.equal(before[at[part]], here[of[part]])):
            raise RuntimeError(f"bytes differ after copies of {rig.piece_nbytes} bytes")


def _parts(rig: Rig) -> list[slice]:
    """Pages that were page-locked together: no copy may span two such parts."""
    step = max(1, CHUNK_NBYTES // rig.piece_nbytes)
    return [slice(start, start + step) for start in range(0, rig.num_pages, step)]


def _device(name: str) -> torch.device:
    require_device(name)
    device = torch.device(name)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
