"""Routes to host memory that holds pages encoded: the card encodes and decodes, and only payloads cross the link.

``EncodedSlabRoute`` carries payloads through slabs in HBM: kernels encode or decode one slab, on a stream of their own,
while the link carries another. ``EncodedMappedRoute`` has a kernel read payloads straight from mapped host memory: one
launch for hundreds of pages, or layers of them, where DMA takes four pieces a page. ``encoded_route`` builds the route
for a pool, where the card can code. Everything is queued; nothing waits.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from tierstore.codecs import LOSSY
from tierstore.codecs.lossy import PayloadLayout
from tierstore.gpu import addresses
from tierstore.gpu.addresses import Segments
from tierstore.gpu.copy_routes import SIZES, DmaRoute, FastestRoute, KernelRoute, Option, rates_of
from tierstore.gpu.engine_pages import EnginePool
from tierstore.gpu.layer_groups import Cut, LayerGroups
from tierstore.gpu.pool import CudaPool
from tierstore.gpu.quant.coder import FP8, WORDS, Call, Coder, blocks, power, runs_of, strides_of
from tierstore.page import PageLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from tierstore.codecs.host_format import HostFormat
    from tierstore.codecs.lossy import Lossy
    from tierstore.gpu.addresses import GroupStrides
    from tierstore.gpu.copy_routes import Route
    from tierstore.gpu.driver import Driver
    from tierstore.gpu.pool import OwnPool
    from tierstore.gpu.quant.coder import Constants, Run

_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """Layers ``[first, end)``. ``layout``: of a page that has these only; ``stride``: between such payloads in a slab.

    ``pieces``: of each its place in such a payload, its place in the whole one, and its length.
    """

    first: int
    end: int
    layout: PageLayout
    stride: int
    pieces: tuple[tuple[int, int, int], ...]

    def rows(self, address: int) -> Segments:
        """The pieces of the rows of a slab at ``address``."""
        columns = [(address + here, self.stride, there, nbytes) for here, there, nbytes in self.pieces]
        return Segments(*np.ascontiguousarray(np.array(columns, dtype=np.int64).T))


def parts_of(held: HostFormat, layers: LayerGroups) -> list[EncodedPart]:
    """Of each group; nothing for pages of several KV groups, and for bytes that are kept as they are."""
    codec, layout = LOSSY[held.codec], held.layout
    whole = PayloadLayout.of(layout, codec)
    if len(layers) == 1 or len(layout.specs) > 1 or whole.kept_nbytes != _scales_nbytes(whole):
        return []
    found = []
    for [part] in layers.parts:
        some = PageLayout.of(replace(layout.specs[0], num_layers=part.end - part.first))
        places = PayloadLayout.of(some, codec)
        if places.kept_nbytes != _scales_nbytes(places):
            return []
        pieces = zip(_parts(places), _parts(whole), strict=True)
        cut = tuple(
            (at, there + part.first * (nbytes // (part.end - part.first)), nbytes)
            for (at, nbytes), (there, _) in pieces
        )
        stride = -(-places.fixed_nbytes // _ALIGNMENT) * _ALIGNMENT
        found.append(EncodedPart(part.first, part.end, some, stride, cut))
    return found


def _scales_nbytes(places: PayloadLayout) -> int:
    return sum(plane.scale_nbytes + plane.floor_nbytes for plane in places.planes)


def _parts(places: PayloadLayout) -> Iterator[tuple[int, int]]:
    """Where scales, smallest numbers and codes of each plane begin, and their lengths; no empty ones."""
    at = 0
    for plane in places.planes:
        for nbytes in (plane.scale_nbytes, plane.floor_nbytes):
            if nbytes:
                yield at, nbytes
            at += nbytes
    at = places.kept_nbytes
    for plane in places.planes:
        yield at, plane.code_nbytes
        at += plane.code_nbytes


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
        """``down``: see ``EncodedSlabRoute``."""
        self._coder = coder
        self._slabs, self._carry = down
        self.side = side
        self._card = card

    def save(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """See ``EncodedSlabRoute``."""
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


class EncodedSlabRoute:
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


class Grid(NamedTuple):
    """``programs`` of ``warps`` each read ``nbytes`` of codes at a time; a tile has ``tile_nbytes`` at most. While some
    become numbers, those of ``stages`` less two turns are on their way; 1: nothing is."""

    programs: int
    warps: int
    nbytes: int
    tile_nbytes: int
    stages: int


FETCH_GRID = Grid(24, 4, 8192, 65536, 3)
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
        self, codec: Lossy, layout: PageLayout, lots: tuple[GroupStrides, ...], kernel: Any, grid: Grid
    ) -> None:
        """``layout``: such as ``suits``. ``kernel``: ``codec_kernels.fetch``."""
        self._grid = grid
        self._launches: list[_Launch] = []
        for run in runs_of(PayloadLayout.of(layout, codec)):
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
        places = PayloadLayout.of(layout, codec)
        return not any(places.gaps()) and all(map(_suits, runs_of(places)))

    @staticmethod
    def smallest_tile(codec: Lossy, layout: PageLayout, grid: Grid) -> int:
        """Bytes of codes that a program reads before its next reads must wait for what they depend on."""
        codes = (int(run.constants(0)["LAYER_CODES"]) for run in runs_of(PayloadLayout.of(layout, codec)))
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


class EncodedMappedRoute:
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
            table, flags = fetch_table(self._card, len(slots))
            filled = table.numpy()
            filled[: len(slots)], filled[len(slots) :] = slots, host
            self._fetcher.queue(table, flags, layers)
        found: NDArray[np.int32] = flags.numpy()
        return found


def fetch_table(card: Card, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
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


_log = logging.getLogger("tierstore.gpu.coded_path")

CUTS = (Cut((5, 3), 3 << 20), Cut((1, 1), 3 << 20))
"""Of loads through slabs. Nothing hides what is computed after the last group has come, so it has fewer layers; with
much fewer the host would not have launched those before them by then. Each group has scales of its own: two small
pieces a page, and more where smallest numbers are stored, that take the link a microsecond each and the host three:
pages of 2 MiB in two groups came at half the speed of whole ones. Bytes are those of pages as they are."""

MAPPED_CUTS = (Cut((1, 1, 1, 1), 512 << 10), Cut((1, 1), 512 << 10))
"""Where kernels read payloads in host memory (see ``EncodedMappedRoute``): a group is one more launch for hundreds of
pages, and nothing else."""

MAPPED_NBYTES = 64 << 10
"""Of codes that a layer has of K, or of V, in a page. With fewer such kernels are slow: of 16 KiB, pages of 2 MiB as
``int8``, they carry .67 of what the link can."""


def encoded_route(
    pool: OwnPool | EnginePool, held: HostFormat, driver: Driver, device: torch.device
) -> Route | str:
    """Between these slots and host slots of ``held``. Compiles, seconds the first time on a machine.

    Else why not, after a warning: pages are then coded by the CPU, far below the speed of the link.
    """
    coder = _coder(pool, held, device)
    if isinstance(coder, str):
        _log.warning("host.codec %s: the CPU codes pages, and copies are slow: %s", held.codec, coder)
        return coder
    side = (driver.stream(device.index), driver.stream(device.index))
    card = TorchCard(device)
    fetcher = _fetcher(pool, held, card, device)
    if fetcher is not None:
        down, carry_down = _slabs(DOWN_NBYTES, held, card, side, driver, device)
        torch.cuda.current_stream(device).synchronize()  # as below
        return _mapped(held, fetcher, Saves(coder, (down, carry_down), side[1], card), card)
    (up, carry_up), (down, carry_down) = (
        _slabs(nbytes, held, card, side, driver, device) for nbytes in (UP_NBYTES, DOWN_NBYTES)
    )
    layers, groups = _by_layers(pool, held, up, driver, device)
    torch.cuda.current_stream(device).synchronize()  # zeros are there before another stream looks
    name = f"{held.codec} on the card"
    return EncodedSlabRoute(name, coder, (up, carry_up), (down, carry_down), side, card, layers, groups)


def _mapped(held: HostFormat, fetcher: Fetcher, saves: Saves, card: TorchCard) -> EncodedMappedRoute:
    layers = LayerGroups.by_shares(held.layout, MAPPED_CUTS if len(held.layout.specs) == 1 else ())
    name = f"{held.codec} on the card from host memory"
    return EncodedMappedRoute(name, fetcher, saves, card, layers if len(layers) > 1 else None)


def _slabs(
    nbytes: int,
    held: HostFormat,
    card: TorchCard,
    side: tuple[torch.cuda.Stream, torch.cuda.Stream],
    driver: Driver,
    device: torch.device,
) -> tuple[PayloadSlabs, Route]:
    slabs = PayloadSlabs(held.layout.blob_nbytes, held.slot_nbytes, nbytes, card)
    for stream in side:
        slabs.memory.record_stream(stream)  # should the store be dropped with copies on their way
    return slabs, _carrier(slabs, held.slot_nbytes, driver, device)


def _fetcher(
    pool: OwnPool | EnginePool, held: HostFormat, card: TorchCard, device: torch.device
) -> Fetcher | None:
    """None where such kernels cannot decode these pages, or slowly, or triton cannot compile them."""
    from tierstore.gpu.quant import codec_kernels
    from tierstore.gpu.quant.codec_kernels import fetch

    codec, found = LOSSY[held.codec], _lots(pool, held)
    if found is None or not Fetcher.suits(codec, held.layout):
        return None
    if Fetcher.smallest_tile(codec, held.layout, FETCH_GRID) < MAPPED_NBYTES:
        return None
    fetcher = Fetcher(codec, held.layout, found, fetch, FETCH_GRID)
    try:
        with torch.cuda.device(device):
            fetcher.compile(*fetch_table(card, 1))
    except codec_kernels.REFUSALS as error:
        _log.warning("host.codec %s: pages come through slabs: triton cannot compile: %s", held.codec, error)
        return None
    return fetcher


def _coder(pool: OwnPool | EnginePool, held: HostFormat, device: torch.device) -> Coder | str:
    try:
        from tierstore.gpu.quant import codec_kernels
    except ImportError:
        return "triton is missing"
    own = pool.bytes if isinstance(pool, CudaPool) else None
    found = _lots(pool, held)
    if found is None:
        return "the layers of the engine differ in strides"
    coder = Coder(LOSSY[held.codec], held.layout, found, own, held.slot_nbytes, codec_kernels)
    try:
        with torch.cuda.device(device):
            coder.compile(_any_call(held, device))
    except codec_kernels.REFUSALS as error:
        return f"triton cannot compile its kernels: {error}"
    return coder


def _lots(pool: OwnPool | EnginePool, held: HostFormat) -> tuple[GroupStrides, ...] | None:
    if isinstance(pool, CudaPool):
        return addresses.pool_strides(pool.bytes, held.layout)
    assert isinstance(pool, EnginePool)
    return addresses.tensor_strides(pool.layers)


def _by_layers(
    pool: OwnPool | EnginePool, held: HostFormat, slabs: PayloadSlabs, driver: Driver, device: torch.device
) -> tuple[LayerGroups | None, list[LayerCoder]]:
    """Loads by layers, where pages are large and all of them is encoded; else none."""
    from tierstore.gpu.quant import codec_kernels

    found = _lots(pool, held)
    layers = LayerGroups.by_shares(held.layout, CUTS)
    parts = parts_of(held, layers)
    if found is None or not parts:
        return None, []
    groups = []
    for part in parts:
        lot = replace(found[0], deltas=found[0].deltas[part.first : part.end])
        coder = Coder(LOSSY[held.codec], part.layout, (lot,), None, part.stride, codec_kernels)
        try:
            with torch.cuda.device(device):
                coder.compile_decoding(_any_call(held, device))
        except codec_kernels.REFUSALS as error:
            _log.warning("host.codec %s: pages come whole: triton cannot compile: %s", held.codec, error)
            return None, []
        carry = [
            DmaRoute(part.rows(slabs.memory.data_ptr() + at * slabs.nbytes), driver)
            for at in range(len(slabs.memory) // slabs.nbytes)
        ]
        groups.append(LayerCoder(coder, part.stride, carry, len(part.pieces)))
    return layers, groups


def _any_call(held: HostFormat, device: torch.device) -> Call:
    """Of the form that all calls have."""
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    flags = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return Call(slots, torch.zeros(held.slot_nbytes, dtype=torch.uint8, device=device), flags, 0, 1)


def _carrier(slabs: PayloadSlabs, nbytes: int, driver: Driver, device: torch.device) -> Route:
    """Between the slabs' rows and host memory: by DMA, or by the copy kernel where payloads are small."""
    columns = (slabs.memory.data_ptr(), slabs.stride, 0, nbytes)
    rows = Segments(*(np.array([column], dtype=np.int64) for column in columns))
    straight = DmaRoute(rows, driver)
    if nbytes > SIZES[-1] or not KernelRoute.suits(rows):
        return straight
    options = [Option(straight, "dma", 1, nbytes)]
    with suppress(ImportError):  # cupy comes with the extra "gpu"
        options.append(Option(KernelRoute(rows, device), "kernel", 1, nbytes))
    return FastestRoute(options, rates_of(driver, device)) if len(options) > 1 else straight
