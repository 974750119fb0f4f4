"""Pages out of payloads that stay where they are: the decoding kernels read mapped host memory, no DMA and no slab.

One launch for hundreds of pages, or layers of them, where DMA takes four pieces a page. A few programs share the tiles,
so that most multiprocessors stay free while the link is full (see ``kernels``). Everything is queued; nothing waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from tierstore.codecs.places import Places
from tierstore.gpu.quant.coder import FP8, WORDS, blocks, power, runs_of, strides_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tierstore.codecs.kinds import Lossy
    from tierstore.gpu.coded import Card, Saves
    from tierstore.gpu.geometry import LayerGroups, Lot
    from tierstore.gpu.quant.coder import Constants, Run
    from tierstore.layout import PageLayout


class Grid(NamedTuple):
    """``programs`` of ``warps`` each read ``nbytes`` of codes at a time; a tile has ``tile_nbytes`` at most. While some
    become numbers, those of ``stages`` less two turns are on their way; 1: nothing is."""

    programs: int
    warps: int
    nbytes: int
    tile_nbytes: int
    stages: int


UP = Grid(24, 4, 8192, 65536, 3)
"""At least 192 KiB on their way. By calculation: 128 KiB fill the link, as the copy kernel does, and each tile begins
anew."""

_ROW_NBYTES = 128
"""A row of codes that all share one scale. Of those with a scale for each channel a tile is eight times as wide."""


@dataclass(frozen=True, slots=True)
class _Launch:
    kernel: Any
    words: torch.Tensor
    deltas: torch.Tensor
    layers: int
    constants: Constants


class Fetcher:
    """Decodes payloads in host memory into pages of ``lots``; see ``Coder``, whose pages these are to the byte."""

    def __init__(
        self, codec: Lossy, layout: PageLayout, lots: tuple[Lot, ...], kernel: Any, grid: Grid
    ) -> None:
        """``layout``: such as ``suits``. ``kernel``: ``mapped_kernel.fetch``."""
        self._grid = grid
        self._launches: list[_Launch] = []
        for run in runs_of(Places.of(layout, codec)):
            lot = lots[layout.offsets.index(run.plane.offset)]
            words = lot.words(WORDS[run.plane.dtype], run.plane.index)
            known = strides_of(lot) | run.constants(0)
            known |= _tiles(known, grid)
            deltas = torch.tensor(lot.deltas, dtype=torch.int64, device=words.device)
            constants = {name: known[name] for name in kernel.arg_names if name in known}
            self._launches.append(_Launch(kernel, words, deltas, run.plane.layers, constants))

    @staticmethod
    def suits(codec: Lossy, layout: PageLayout) -> bool:
        """Whether all of a page is encoded, and all its scales are for whole rows of codes or for columns of a tile."""
        places = Places.of(layout, codec)
        return not any(places.gaps()) and all(map(_suits, runs_of(places)))

    @staticmethod
    def smallest_tile(codec: Lossy, layout: PageLayout, grid: Grid) -> int:
        """Bytes of codes that a program reads before its next reads must wait for what they depend on."""
        codes = (int(run.constants(0)["LAYER_CODES"]) for run in runs_of(Places.of(layout, codec)))
        return min(grid.tile_nbytes, min(codes, default=0))

    def queue(self, table: torch.Tensor, flags: torch.Tensor, layers: tuple[int, int] | None = None) -> None:
        """On torch's current stream, which reads ``table`` and writes ``flags`` until it has got past this.

        ``table``: int64 ``[2, pages]``, slots and addresses of payloads, which are multiples of 16; ``flags``: int32
        zeros ``[pages]``, see ``Coder.decode``. ``layers``: first and end; None: all.
        """
        pages = len(flags)
        for launch in self._launches:
            first, end = layers or (0, launch.layers)
            arguments = (launch.words, launch.deltas, table, flags, pages, first, end - first)
            launch.kernel[(self._grid.programs,)](*arguments, **self._options(launch))

    def compile(self, table: torch.Tensor, flags: torch.Tensor) -> None:
        """Makes the machine code for tables and flags as these; see ``Coder.compile``."""
        for launch in self._launches:
            arguments = (launch.words, launch.deltas, table, flags, len(flags), 0, launch.layers)
            launch.kernel.warmup(*arguments, grid=(self._grid.programs,), **self._options(launch))

    def _options(self, launch: _Launch) -> dict[str, Any]:
        return {**launch.constants, "num_warps": self._grid.warps, "enable_fp_fusion": False}


class Mapped:
    """A route (see ``routes.Route``) from host memory by a ``Fetcher``, and to it by ``saves``.

    Loads begin and end on the stream that they are given. ``layers``: of pages of one KV group; None: whole pages only.
    """

    pieces = 1
    group_pieces = 0
    loads_end_on: torch.cuda.Stream | None = None

    def __init__(
        self,
        name: str,
        fetcher: Fetcher,
        saves: Saves,
        card: Card,
        layers: LayerGroups | None = None,
    ) -> None:
        self.name = name
        self.layers = layers
        self.streams: Sequence[torch.cuda.Stream] = (saves.side,)
        self._fetcher = fetcher
        self._saves = saves
        self._card = card

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Host to device. A page's entry becomes 1 if it came from no payload. Keep it until the copies have ended:
        the kernel reads the memory that it is in."""
        return self._load(None, slots, host, stream)

    def load_group(
        self, group: int, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """One group of ``layers``, as ``load``."""
        assert self.layers is not None
        [part] = self.layers.parts[group]
        return self._load((part.first, part.end), slots, host, stream)

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Device to host. A page's entry becomes 1 if the codec cannot state it."""
        return self._saves.save(slots, host, stream)

    def _load(
        self,
        layers: tuple[int, int] | None,
        slots: NDArray[np.int64],
        host: NDArray[np.int64],
        stream: torch.cuda.Stream,
    ) -> NDArray[np.int32]:
        with self._card.using(stream):
            table, flags = table_of(self._card, len(slots))
            filled = table.numpy()
            filled[: len(slots)], filled[len(slots) :] = slots, host
            self._fetcher.queue(table, flags, layers)
        found: NDArray[np.int32] = flags.numpy()
        return found


def table_of(card: Card, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table and flags in one piece of memory, so that whoever keeps the flags keeps both."""
    # Not uploaded: two calls more, each of which may hand Python's lock to another thread.
    memory = card.flags(5 * pages)
    return memory[: 4 * pages].view(torch.int64), memory[4 * pages :]


def _suits(run: Run) -> bool:
    """Of 4 bits, a byte's two numbers must have scales that lie a fixed distance apart for all of a tile."""
    known = run.constants(0)
    if known["RULE"] == FP8:
        return True
    members, channels, length = int(known["MEMBERS"]), int(known["CHANNELS"]), int(known["LENGTH"])
    if not channels:
        return length % members == 0
    half = int(known["LAYER_CODES"]) // channels
    return known["BITS"] == 8 or members >= length or half % members == 0


def _tiles(known: Constants, grid: Grid) -> Constants:
    """How the codes of a layer's plane are cut; see the kernel."""
    channels, codes = int(known["CHANNELS"]), int(known["LAYER_CODES"])
    shared = known["RULE"] == FP8
    width = channels or (_ROW_NBYTES if shared else int(known["MEMBERS"]))
    columns = min(power(width), 8 * _ROW_NBYTES if channels else grid.nbytes)
    height = blocks(codes, width)
    most = min(int(known["MEMBERS"]), height) if channels else max(1, grid.tile_nbytes // width)
    tile = min(most, height)
    rows = min(power(tile), max(1, grid.nbytes // columns))
    return {
        "WIDTH": width,
        "COLUMNS": columns,
        "ROWS": rows,
        "TILE_ROWS": tile,
        "DOWN": blocks(height, tile),
        "ACROSS": blocks(width, columns),
        "RAGGED": bool(tile % rows or width % columns),
        "ALONG": 0 if channels else 1,
        "STAGES": grid.stages,
    }
