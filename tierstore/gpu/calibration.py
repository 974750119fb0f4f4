"""Measures the ways of a card's link once a process, in a fraction of a second."""

from __future__ import annotations

import logging
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.gpu.copy_kernel import DOWN, UP, Pieces
from tierstore.gpu.geometry import Segments
from tierstore.gpu.rates import FEW, MANY_NBYTES, MOST, SIZES, Rates, measured

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.rates import Direction, Way

_log = logging.getLogger(__name__)

_RUNS = 3
_found: dict[int, Rates] = {}
_lock = Lock()


def rates_of(driver: Driver, device: torch.device) -> Rates:
    """The rates of the device's link, measured at the first call in the process: about 0.1 s, with other work on the
    link or the card as slow as that work makes it. Without cupy DMA is the only way."""
    with _lock:
        if device.index not in _found:
            start = perf_counter()
            _found[device.index] = _Bed(driver, device).rates()
            _log.info("the link of %s was measured in %.3f s", device, perf_counter() - start)
        return _found[device.index]


class _Bed:
    """A block at each end of the link, and what moves pieces of it."""

    def __init__(self, driver: Driver, device: torch.device) -> None:
        nbytes = max(MANY_NBYTES, max(SIZES) * FEW)
        self._host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self._there = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._driver = driver
        self._device = device
        self._stream = driver.stream(device.index)
        self._movers: dict[tuple[int, Direction], Pieces] = {}

    def rates(self) -> Rates:
        """Everything measured."""
        try:
            self._mover(SIZES[0], "up")
        except ImportError:
            return measured(["dma"], self.seconds)
        return measured(["dma", "kernel"], self.seconds)

    def seconds(self, way: Way, direction: Direction, nbytes: int, pieces: int) -> float:
        """The shortest of a few runs, by the clock on the wall, submission included."""
        slots = np.random.default_rng(0).permutation(min(MOST, len(self._host) // nbytes)).astype(np.int64)
        slots = slots[:pieces]
        host = self._host.data_ptr() + slots[::-1] * nbytes
        runs = []
        for _ in range(_RUNS + 1):
            start = perf_counter()
            if way == "kernel":
                mover = self._mover(nbytes, direction)
                (mover.scatter if direction == "up" else mover.gather)(slots, host, self._stream)
            else:
                self._dma(direction, slots * nbytes + self._there.data_ptr(), host, nbytes)
            self._stream.synchronize()
            runs.append(perf_counter() - start)
        return min(runs[1:])

    def _dma(
        self, direction: Direction, there: NDArray[np.int64], host: NDArray[np.int64], nbytes: int
    ) -> None:
        lengths = np.full(len(there), nbytes, dtype=np.int64)
        if direction == "up":
            self._driver.copy(there, np.ascontiguousarray(host), lengths, self._stream)
        else:
            self._driver.copy(np.ascontiguousarray(host), there, lengths, self._stream)

    def _mover(self, nbytes: int, direction: Direction) -> Pieces:
        if (nbytes, direction) not in self._movers:
            columns = (self._there.data_ptr(), nbytes, 0, nbytes)
            block = Segments(*(np.array([column], dtype=np.int64) for column in columns))
            grid = UP if direction == "up" else DOWN
            self._movers[nbytes, direction] = Pieces(block, self._device, grid)
        return self._movers[nbytes, direction]
