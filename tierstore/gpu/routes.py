"""How pages get between device memory and page-locked slots: what a route is, and the one that goes piece by piece.

Straight is right for few and large pieces; the others are in ``kernels``, ``slabs`` and ``coded``. Everything is
queued; nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from tierstore.gpu.copy_kernel import DOWN, UP, Pieces

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from tierstore.gpu.driver import Driver
    from tierstore.gpu.geometry import LayerGroups, Segments


class Route(Protocol):
    """Queues copies of pages. ``slots``: in device memory; ``host``: addresses of the pages' slots in memory.

    What is given back is an entry a page, not 0 once the copies have ended where the page did not arrive as its form is
    wrong; None: none can fail so. ``pieces``: copies that the driver is asked for, for each page. ``layers``: how
    ``load_group`` cuts pages, ``group_pieces`` pieces at most for each; None: loads go whole. ``loads_end_on``: the
    stream of a load's last work; None: the one that it is given. ``streams``: those that it uses besides.
    """

    name: str
    pieces: int
    layers: LayerGroups | None
    group_pieces: int
    loads_end_on: torch.cuda.Stream | None
    streams: Sequence[torch.cuda.Stream]

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Host to device."""
        ...

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """One group of ``layers``, host to device."""
        ...

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32] | None:
        """Device to host."""
        ...


class WholePages:
    """What routes have in common that load pages whole, on the stream they are given."""

    pieces = 1
    layers: LayerGroups | None = None
    group_pieces = 1
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """Never called where ``layers`` is None."""
        raise NotImplementedError


class Straight:
    """One copy a piece. ``groups``: the pieces of each of ``layers``, as ``segments`` has them of all; pages go whole
    where there is one."""

    name = "straight"
    loads_end_on: torch.cuda.Stream | None = None
    streams: Sequence[torch.cuda.Stream] = ()

    def __init__(
        self,
        segments: Segments,
        driver: Driver,
        layers: LayerGroups | None = None,
        groups: Sequence[Segments] = (),
    ) -> None:
        self.layers = layers if len(groups) > 1 else None
        self.pieces = len(segments)
        self.group_pieces = max((len(group) for group in groups), default=self.pieces)
        self._segments = segments
        self._groups = groups
        self._driver = driver

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> None:
        """One group of ``layers``, host to device."""
        there, here, nbytes = _pieces(self._groups[group], slots, host)
        self._driver.copy(there, here, nbytes, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        there, here, nbytes = _pieces(self._segments, slots, host)
        self._driver.copy(here, there, nbytes, stream)


def _pieces(
    segments: Segments, slots: NDArray[np.int64], host: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    there = segments.addresses(slots).ravel()
    here = (host[:, None] + segments.offset).ravel()
    return there, here, np.tile(segments.nbytes, len(slots))


class Kernel(WholePages):
    """A route (see ``routes.Route``) straight between slots and mapped host memory."""

    name = "kernel"
    pieces = 0

    def __init__(self, segments: Segments, device: torch.device) -> None:
        """ImportError without cupy. ``segments``: such as ``suits``."""
        self._up, self._down = (Pieces(segments, device, grid) for grid in (UP, DOWN))

    @staticmethod
    def suits(segments: Segments | None) -> bool:
        """Whether pages of this form can go this way at a good speed."""
        return Pieces.suits(segments)

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Host to device."""
        self._up.scatter(slots, host, stream)

    def save(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream) -> None:
        """Device to host."""
        self._down.gather(slots, host, stream)
