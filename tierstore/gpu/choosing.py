"""A route that takes another one for each batch: the one that is expected to end first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tierstore.gpu.geometry import LayerGroups
    from tierstore.gpu.rates import Direction, Rates, Way
    from tierstore.gpu.routes import Route

KERNEL_HANDICAP = 1.1
"""A kernel has to be so much faster than DMA: it takes multiprocessors and bandwidth from compute."""


MOST_PIECES = 128
"""The driver is asked for more only where there is no other way: it takes a microsecond of the caller for each."""

_A_TRANSFER = 32
"""Pages."""


@dataclass(frozen=True, slots=True)
class Option:
    """A route, and what its batches are made of: ``pieces`` of ``piece_nbytes`` a page, by ``way``."""

    route: Route
    way: Way
    pieces: int
    piece_nbytes: int
    extra_s: float = 0.0
    """For each batch, on top."""

    def seconds(self, rates: Rates, direction: Direction, pages: int) -> float:
        """What a batch is expected to take."""
        handicap = KERNEL_HANDICAP if self.way == "kernel" else 1.0
        crossing = rates.seconds(self.way, direction, self.piece_nbytes, pages * self.pieces)
        return handicap * crossing + self.extra_s


class Choice:
    """Several routes as one. Loads by layers go by the one of those with layers that is expected to take least."""

    def __init__(
        self, options: Sequence[Option], rates: Rates, side: torch.cuda.Stream | None = None
    ) -> None:
        """``side``: where loads of one of the routes end; those of the others are made to end there too."""
        self.batches: dict[str, int] = {option.route.name: 0 for option in options}
        """Batches so far, by route."""
        self._options = options
        self._rates = rates
        layered = [option for option in options if option.route.layers is not None]
        by_time = sorted(layered, key=lambda option: option.seconds(rates, "up", _A_TRANSFER))
        self._layered = by_time[0].route if by_time else None
        self.layers: LayerGroups | None = None if self._layered is None else self._layered.layers
        self.pieces = min(option.route.pieces for option in options)
        self.group_pieces = 1 if self._layered is None else self._layered.group_pieces
        self.loads_end_on = side
        self.name = " or ".join(option.route.name for option in options)
        self.streams: Sequence[torch.cuda.Stream] = [s for o in options for s in o.route.streams]
        self._joint = None if side is None else torch.cuda.Event()  # type: ignore[no-untyped-call]

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Host to device."""
        route = self._pick("up", len(slots))
        flags = route.load(slots, host, stream)
        self._join(route, stream)
        return flags

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """One group of ``layers``, host to device."""
        assert self._layered is not None
        flags = self._layered.load_group(group, slots, host, stream)
        self._join(self._layered, stream)
        return flags

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Device to host."""
        return self._pick("down", len(slots)).save(slots, host, stream)

    def _pick(self, direction: Direction, pages: int) -> Route:
        quick = [o for o in self._options if pages * o.route.pieces <= MOST_PIECES]
        best = min(quick or self._options, key=lambda o: o.seconds(self._rates, direction, pages))
        self.batches[best.route.name] += 1
        return best.route

    def _join(self, route: Route, stream: torch.cuda.Stream) -> None:
        if self._joint is not None and self.loads_end_on is not None and route.loads_end_on is None:
            self._joint.record(stream)
            self.loads_end_on.wait_event(self._joint)
