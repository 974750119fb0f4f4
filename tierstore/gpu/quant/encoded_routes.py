"""Routes to host memory that holds encoded pages: the card encodes and decodes; only payloads cross the link.

``encoded_route`` builds the route for a pool, if the card can encode and decode its pages, and chooses how
they are loaded: through slabs, which DMA fills with payloads, or, for large pages, by a kernel that reads
payloads in page-locked host memory (``MappedLoads``). Saves go through slabs. Copies are only queued; no call
waits for them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.codecs import LOSSY
from tierstore.codecs.lossy import PayloadLayout
from tierstore.gpu import addresses
from tierstore.gpu.copy_routes import (
    SIZES,
    DmaRoute,
    FastestRoute,
    KernelRoute,
    Option,
    dma_copies,
    rates_of,
)
from tierstore.gpu.engine_pages import EnginePool
from tierstore.gpu.layer_groups import Cut, LayerGroups
from tierstore.gpu.pool import CudaPool
from tierstore.gpu.quant.coder import FETCH_GRID, Coder, can_fetch, smallest_tile
from tierstore.gpu.slabs import Batch, Ring, Share, SlabCopies, SlabRoute
from tierstore.page import PageLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tierstore.codecs.host_format import HostFormat
    from tierstore.gpu.addresses import GroupStrides
    from tierstore.gpu.copy_routes import Route
    from tierstore.gpu.driver import Driver
    from tierstore.gpu.pool import OwnPool
    from tierstore.gpu.slabs import Card, Carrier

_log = logging.getLogger("tierstore.gpu.coded_path")

CUTS = (Cut((5, 3), 3 << 20), Cut((1, 1), 3 << 20))
"""How loads through slabs are cut into layer groups.

Nothing hides what is computed after the last group has come, so that group has fewer layers; with far fewer the host
could not launch the groups before it in time. Each group has scales of its own: two small pieces for each page, or more
where smallest numbers are stored, which take the link one and the host three microseconds each. Pages of 2 MiB in two
groups came at half the speed of whole ones. Sizes are those of pages before encoding.
"""

MAPPED_CUTS = (Cut((1, 1, 1, 1), 512 << 10), Cut((1, 1), 512 << 10))
"""How loads are divided if a kernel reads payloads in host memory (see ``MappedLoads``).

A layer group then costs one more launch for hundreds of pages, and nothing else.
"""

MAPPED_NBYTES = 64 << 10
"""Bytes of codes that a layer has of K, or of V, in a page, at least, for ``MappedLoads``.

With less the kernel is slow: with 16 KiB (pages of 2 MiB as ``int8``) it reaches 0.67 of the link.
"""


UP_NBYTES = 192 << 20
"""Bytes of the pages whose payloads a slab of loads holds; and its own at most.

What the engine launches at once goes through one slab, three quarters of the layers of 32 large pages too: a round of
its own costs the caller a call of the driver and a launch.
"""

DOWN_NBYTES = 64 << 20
"""As ``UP_NBYTES``, for saves, for which nobody waits."""

_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """Layers ``[first, end)`` of an encoded page, which lie in a slab as the payload of a page that has these only.

    ``layout``: of such a page. ``stride``: bytes between such payloads in a slab. ``pieces``: of each its place in such
    a payload, its place in the whole one, and its length, in bytes.
    """

    first: int
    end: int
    layout: PageLayout
    stride: int
    pieces: tuple[tuple[int, int, int], ...]


def parts_of(held: HostFormat, layers: LayerGroups) -> list[EncodedPart]:
    """Return the part of each layer group; none for pages of several KV groups, or with bytes that are not encoded."""
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


def encoded_route(
    pool: OwnPool | EnginePool, held: HostFormat, driver: Driver, device: torch.device
) -> Route | str:
    """Return the route between these slots and host slots of ``held``, or why the card cannot code these pages.

    Compiles kernels, which takes seconds the first time on a machine. Where the card cannot code, a warning is logged:
    the CPU codes the pages then, far below the speed of the link.
    """
    coder = _coder(pool, held, device)
    if isinstance(coder, str):
        _log.warning("host.codec %s: the CPU codes pages, and copies are slow: %s", held.codec, coder)
        return coder
    down = Ring.open(slab_nbytes(held, DOWN_NBYTES), driver, device)
    saves = _whole(down, coder, held, driver, device)
    if coder.fetches and _compiles_fetching(coder, held, down.card, device):
        cut = LayerGroups.by_shares(held.layout, MAPPED_CUTS if len(held.layout.specs) == 1 else ())
        return mapped_route(f"{held.codec} on the card from host memory", coder, saves, cut)
    up = Ring.open(slab_nbytes(held, UP_NBYTES), driver, device)
    layers, groups = _by_layers(pool, held, up, driver, device)
    loads = _whole(up, coder, held, driver, device)
    return SlabRoute(f"{held.codec} on the card", loads, saves, layers, groups)


class MappedLoads:
    """Loads of pages, or of some of their layers, whose payloads a kernel reads in page-locked host memory.

    They begin and end on the stream that they are given. See ``slabs.Loads``.
    """

    pieces = 0
    ends_on: torch.cuda.Stream | None = None

    def __init__(self, coder: Coder, card: Card, layers: tuple[int, int] | None = None) -> None:
        """``coder``: one with a grid. ``layers``: first and end; None: all."""
        self._coder, self._card, self._layers = coder, card, layers

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Queue the copies. A page's entry of what is returned becomes 1 if it came from no payload.

        Keep that until the copies have ended: the kernel reads the memory that it is in.
        """
        with self._card.using(stream):
            table, flags = fetch_table(self._card, len(slots))
            filled = table.numpy()
            filled[: len(slots)], filled[len(slots) :] = slots, host
            self._coder.fetch(table, flags, self._layers)
        found: NDArray[np.int32] = flags.numpy()
        return found


def fetch_table(card: Card, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table and flags for ``Coder.fetch`` in one piece of memory: whoever keeps the flags keeps both."""
    # Not uploaded: two calls more, each of which may hand Python's lock to another thread.
    memory = card.flags(5 * pages)
    return memory[: 4 * pages].view(torch.int64), memory[4 * pages :]


def mapped_route(name: str, coder: Coder, saves: SlabCopies, layers: LayerGroups) -> SlabRoute:
    """Return the route whose loads go by ``MappedLoads``.

    ``layers``: how pages of one KV group are cut; one group: pages are loaded whole.
    """
    card = saves.ring.card
    whole = MappedLoads(coder, card)
    if len(layers) == 1:
        return SlabRoute(name, whole, saves)
    groups = [[MappedLoads(coder, card, (part.first, part.end)) for part in parts] for parts in layers.parts]
    return SlabRoute(name, whole, saves, layers, groups)


def _compiles_fetching(coder: Coder, held: HostFormat, card: Card, device: torch.device) -> bool:
    from tierstore.gpu.quant import codec_kernels

    try:
        with torch.cuda.device(device):
            coder.compile_fetching(*fetch_table(card, 1))
    except codec_kernels.REFUSALS as error:
        _log.warning("host.codec %s: pages come through slabs: triton cannot compile: %s", held.codec, error)
        return False
    return True


def _coder(pool: OwnPool | EnginePool, held: HostFormat, device: torch.device) -> Coder | str:
    try:
        from tierstore.gpu.quant import codec_kernels
    except ImportError:
        return "triton is missing"
    own = pool.bytes if isinstance(pool, CudaPool) else None
    found = _lots(pool, held)
    if found is None:
        return "the layers of the engine differ in strides"
    codec, layout = LOSSY[held.codec], held.layout
    fetches = can_fetch(codec, layout) and smallest_tile(codec, layout, FETCH_GRID) >= MAPPED_NBYTES
    grid = FETCH_GRID if fetches else None
    coder = Coder(codec, layout, found, own, held.slot_nbytes, codec_kernels, grid)
    try:
        with torch.cuda.device(device):
            coder.compile(_any_share(held, device))
    except codec_kernels.REFUSALS as error:
        return f"triton cannot compile its kernels: {error}"
    return coder


def _lots(pool: OwnPool | EnginePool, held: HostFormat) -> tuple[GroupStrides, ...] | None:
    if isinstance(pool, CudaPool):
        return addresses.pool_strides(pool.bytes, held.layout)
    assert isinstance(pool, EnginePool)
    return addresses.tensor_strides(pool.layers)


def slab_nbytes(held: HostFormat, nbytes: int) -> int:
    """Return the bytes of a slab with as many one-page rows as fit ``nbytes`` (see ``UP_NBYTES``), at least one."""
    return max(1, nbytes // max(held.layout.blob_nbytes, held.slot_nbytes)) * held.slot_nbytes


def _whole(ring: Ring, coder: Coder, held: HostFormat, driver: Driver, device: torch.device) -> SlabCopies:
    """Return the copies of whole payloads; each has the length of a host slot."""
    carriers = [_carrier(at, held.slot_nbytes, driver, device) for at in ring.addresses]
    return SlabCopies(ring, coder, held.slot_nbytes, carriers)


def _by_layers(
    pool: OwnPool | EnginePool, held: HostFormat, ring: Ring, driver: Driver, device: torch.device
) -> tuple[LayerGroups | None, list[list[SlabCopies]]]:
    """Return the loads by layers, if pages are large and all of their bytes are encoded; else none."""
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
                coder.compile_decoding(_any_share(held, device))
        except codec_kernels.REFUSALS as error:
            _log.warning("host.codec %s: pages come whole: triton cannot compile: %s", held.codec, error)
            return None, []
        groups.append([dma_copies(ring, coder, part.stride, part.pieces, driver)])
    return layers, groups


def _any_share(held: HostFormat, device: torch.device) -> Share:
    """Return a share of the form that all shares have, to compile for."""
    slots = np.zeros(1, dtype=np.int64)
    flags = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    rows = torch.zeros(held.slot_nbytes, dtype=torch.uint8, device=device)
    batch = Batch(slots, torch.from_numpy(slots).to(device), flags)
    return Share(batch, rows, 0, 1, torch.cuda.current_stream(device))


def _carrier(address: int, nbytes: int, driver: Driver, device: torch.device) -> Carrier:
    """Return the carrier between rows of a slab and host memory: by DMA, or by the copy kernel for small payloads."""
    rows = addresses.row_segments(address, nbytes, [(0, 0, nbytes)])
    straight = DmaRoute(rows, driver)
    if nbytes > SIZES[-1] or not KernelRoute.suits(rows):
        return straight
    options = [Option(straight, "dma", 1, nbytes)]
    with suppress(ImportError):  # cupy comes with the extra "gpu"
        options.append(Option(KernelRoute(rows, device), "kernel", 1, nbytes))
    return FastestRoute(options, rates_of(driver, device)) if len(options) > 1 else straight
