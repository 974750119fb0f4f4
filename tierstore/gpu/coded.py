"""How pages get to and from host memory that holds them encoded: coded on the card, and only payloads cross the link.

Kernels make payloads in a slab in HBM, or pages from one, on a stream of their own while the link carries the slab
before or after. Everything is queued; nothing waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.gpu.coding import Call
from tierstore.gpu.routes import WholePages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tierstore.gpu.coding import Coder
    from tierstore.gpu.routes import Route

SLAB_NBYTES = 64 << 20
"""Bytes of the pages whose payloads a slab holds, about what is launched at once; and its own at most."""

_SLABS = 2


class PayloadSlabs:
    """The slabs of one direction, used in turn: rows of ``stride`` bytes, first those of the one, then of the other."""

    def __init__(self, page_nbytes: int, stride: int, device: torch.device) -> None:
        self.stride = stride
        self.pages = max(1, SLAB_NBYTES // max(page_nbytes, stride))
        # Zeros: what follows a payload in its row crosses the link, and nobody's bytes are to be in it.
        self.memory = torch.zeros(_SLABS * self.pages * stride, dtype=torch.uint8, device=device)
        self._free = [torch.cuda.Event() for _ in range(_SLABS)]  # type: ignore[no-untyped-call]
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._next = 0

    def turn(self) -> tuple[int, torch.Tensor, torch.cuda.Event]:
        """The next slab: its first row, its bytes, and the event of its last use (none yet: no wait)."""
        at = self._next
        self._next = (at + 1) % _SLABS
        nbytes = self.pages * self.stride
        return at * self.pages, self.memory[at * nbytes : (at + 1) * nbytes], self._free[at]


class Coded(WholePages):
    """Whole pages to and from slots that hold payloads.

    ``up``, ``down``: the slabs of each direction, and routes between their rows and host memory. ``side``: streams for
    the kernels of loads and of saves. A load ends on the first of them, a save where it began.
    """

    def __init__(
        self,
        name: str,
        coder: Coder,
        up: tuple[PayloadSlabs, Route],
        down: tuple[PayloadSlabs, Route],
        side: tuple[torch.cuda.Stream, torch.cuda.Stream],
    ) -> None:
        self.name = name
        self._coder = coder
        self._up, self._carry_up = up
        self._down, self._carry_down = down
        self.streams = side
        self.loads_end_on = self._decodes_on = side[0]
        self._encodes_on = side[1]

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Host to device; ends on the first of ``side``. A page's entry becomes 1 if it came from no payload."""
        slabs, side = self._up, self._decodes_on
        with torch.cuda.stream(side), torch.inference_mode():
            index, flags = _uploaded(slots, side.device), _flags(len(slots))
            for first in range(0, len(slots), slabs.pages):
                row, payloads, free = slabs.turn()
                at = host[first : first + slabs.pages]
                stream.wait_event(free)
                self._carry_up.load(row + np.arange(len(at), dtype=np.int64), at, stream)
                slabs.ready.record(stream)
                side.wait_event(slabs.ready)
                self._coder.decode(Call(index, payloads, flags, first, len(at)))
                free.record(side)
        return flags.numpy()

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Device to host. A page's entry becomes 1 if the codec cannot state it."""
        slabs, side = self._down, self._encodes_on
        with torch.cuda.stream(side), torch.inference_mode():
            index, flags = _uploaded(slots, side.device), _flags(len(slots))
            for first in range(0, len(slots), slabs.pages):
                row, payloads, free = slabs.turn()
                at = host[first : first + slabs.pages]
                side.wait_event(free)
                self._coder.encode(Call(index, payloads, flags, first, len(at)))
                slabs.ready.record(side)
                stream.wait_event(slabs.ready)
                self._carry_down.save(row + np.arange(len(at), dtype=np.int64), at, stream)
                free.record(stream)
        return flags.numpy()


def _uploaded(slots: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    # Pinned by torch, which gives the memory to nobody else before this stream has read it.
    return torch.from_numpy(slots).pin_memory().to(device, non_blocking=True)


def _flags(pages: int) -> torch.Tensor:
    """In page-locked memory, where a kernel writes them itself: hardly ever, and nothing has to be copied."""
    return torch.zeros(pages, dtype=torch.int32, pin_memory=True)
