"""How pages get to and from host memory that holds them encoded: coded on the card, and only payloads cross the link.

Kernels make payloads in a slab in HBM, or pages from one, on a stream of their own while the link carries the slab
before or after. Everything is queued; nothing waits.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from tierstore.gpu.quant.coder import Call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tierstore.gpu.geometry import LayerGroups
    from tierstore.gpu.quant.coder import Coder
    from tierstore.gpu.routes import Route

UP_NBYTES = 192 << 20
"""Bytes of the pages whose payloads a slab of loads holds; and its own at most. What the engine launches at once goes
through one slab, three quarters of the layers of 32 large pages too: a round of its own costs the caller a call of the
driver and a launch."""

DOWN_NBYTES = 64 << 20
"""The same of saves, for which nobody waits."""

_SLABS = 2


class Card(Protocol):
    """What is asked of torch besides streams and kernels."""

    def event(self) -> Any:
        """A new event: ``torch.cuda.Event``, or what has its ``record`` and can be waited for by the streams."""
        ...

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Device memory, uint8."""
        ...

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """The same on the device, once the stream in use gets there."""
        ...

    def flags(self, pages: int) -> torch.Tensor:
        """int32 zeros that kernels can write and the host can read."""
        ...

    def using(self, stream: torch.cuda.Stream) -> AbstractContextManager[object]:
        """Kernels, and ``uploaded``, are queued on this stream."""
        ...


class TorchCard:
    """``Card`` for a device of torch's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def event(self) -> Any:
        """See ``Card``."""
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def zeros(self, nbytes: int) -> torch.Tensor:
        """See ``Card``."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def uploaded(self, slots: NDArray[np.int64]) -> torch.Tensor:
        """See ``Card``."""
        # Pinned by torch, which gives the memory to nobody else before this stream has read it.
        return torch.from_numpy(slots).pin_memory().to(self._device, non_blocking=True)

    def flags(self, pages: int) -> torch.Tensor:
        """In page-locked memory, where a kernel writes them itself: hardly ever, and nothing has to be copied."""
        return torch.zeros(pages, dtype=torch.int32, pin_memory=True)

    @contextmanager
    def using(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """See ``Card``."""
        with torch.cuda.stream(stream), torch.inference_mode():
            yield


class PayloadSlabs:
    """The slabs of one direction, used in turn: rows of ``stride`` bytes, first those of the one, then of the other."""

    def __init__(self, page_nbytes: int, stride: int, slab_nbytes: int, card: Card) -> None:
        """``slab_nbytes``: see ``UP_NBYTES``."""
        self.stride = stride
        self.pages = max(1, slab_nbytes // max(page_nbytes, stride))
        # Zeros: what follows a payload in its row crosses the link, and nobody's bytes are to be in it.
        self.memory = card.zeros(_SLABS * self.pages * stride)
        self._free = [card.event() for _ in range(_SLABS)]
        self.ready = card.event()
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Of one of them."""
        return self.pages * self.stride

    def turn(self) -> tuple[int, torch.Tensor, Any]:
        """The next slab: its first row, its bytes, and the event of its last use (none yet: no wait)."""
        at = self._next
        self._next = (at + 1) % _SLABS
        nbytes = self.pages * self.stride
        return at * self.pages, self.memory[at * nbytes : (at + 1) * nbytes], self._free[at]


@dataclass(frozen=True, slots=True)
class LayerCoder:
    """Some layers of pages. ``coder``: decodes rows of ``stride`` bytes, which hold of payloads what these layers need;
    ``carry``: routes from host memory to the rows of each slab, ``pieces`` a page."""

    coder: Coder
    stride: int
    carry: Sequence[Route]
    pieces: int


class Saves:
    """Pages into payloads, and these to host memory. ``side``: the stream of the kernels."""

    def __init__(
        self, coder: Coder, down: tuple[PayloadSlabs, Route], side: torch.cuda.Stream, card: Card
    ) -> None:
        """``down``: see ``Coded``."""
        self._coder = coder
        self._slabs, self._carry = down
        self.side = side
        self._card = card

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """See ``Coded``."""
        slabs, side = self._slabs, self.side
        with self._card.using(side):
            index, flags = self._card.uploaded(slots), self._card.flags(len(slots))
            for first in range(0, len(slots), slabs.pages):
                row, payloads, free = slabs.turn()
                at = host[first : first + slabs.pages]
                side.wait_event(free)
                self._coder.encode(Call(index, payloads, flags, first, len(at)))
                slabs.ready.record(side)
                stream.wait_event(slabs.ready)
                self._carry.save(row + np.arange(len(at), dtype=np.int64), at, stream)
                free.record(stream)
        return flags.numpy()


class Coded:
    """Pages to and from slots that hold payloads.

    ``up``, ``down``: the slabs of each direction, and routes between their rows and host memory. ``side``: streams for
    the kernels of loads and of saves. A load ends on the first of them, a save where it began. ``layers`` and
    ``groups``: loads by layers; None: whole pages only.
    """

    pieces = 1

    def __init__(
        self,
        name: str,
        coder: Coder,
        up: tuple[PayloadSlabs, Route],
        down: tuple[PayloadSlabs, Route],
        side: tuple[torch.cuda.Stream, torch.cuda.Stream],
        card: Card,
        layers: LayerGroups | None = None,
        groups: Sequence[LayerCoder] = (),
    ) -> None:
        self.name = name
        self._card = card
        self.layers = layers
        self.group_pieces = max((group.pieces for group in groups), default=1)
        self._groups = groups
        self._coder = coder
        self._up, self._carry_up = up
        self._saves = Saves(coder, down, side[1], card)
        self.streams: Sequence[torch.cuda.Stream] = side
        self.loads_end_on: torch.cuda.Stream | None = side[0]
        self._decodes_on = side[0]

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Host to device; ends on the first of ``side``. A page's entry becomes 1 if it came from no payload."""

        def carry(row: int, at: NDArray[np.int64]) -> None:
            self._carry_up.load(row + np.arange(len(at), dtype=np.int64), at, stream)

        return self._bring(self._coder, self._up.pages, carry, slots, host, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """One group of ``layers``, as ``load``."""
        some = self._groups[group]

        def carry(row: int, at: NDArray[np.int64]) -> None:
            some.carry[row // self._up.pages].load(np.arange(len(at), dtype=np.int64), at, stream)

        return self._bring(some.coder, self._up.nbytes // some.stride, carry, slots, host, stream)

    def _bring(
        self,
        coder: Coder,
        together: int,
        carry: Callable[[int, NDArray[np.int64]], None],
        slots: NDArray[np.int64],
        host: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> NDArray[np.int32]:
        """``together``: pages that a slab has room for; ``carry``: brings some there, on ``stream``."""
        slabs, side = self._up, self._decodes_on
        with self._card.using(side):
            index, flags = self._card.uploaded(slots), self._card.flags(len(slots))
            for first in range(0, len(slots), together):
                row, payloads, free = slabs.turn()
                at = host[first : first + together]
                stream.wait_event(free)
                carry(row, at)
                slabs.ready.record(stream)
                side.wait_event(slabs.ready)
                coder.decode(Call(index, payloads, flags, first, len(at)))
                free.record(side)
        return flags.numpy()

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Device to host. A page's entry becomes 1 if the codec cannot state it."""
        return self._saves.save(slots, host, stream)
