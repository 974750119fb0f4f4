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

No load can overlap with the computation of the last group's layers, so that group has fewer layers. With far
fewer, the host could not launch the groups before it in time. Each group has scales of its own. They add two
small pieces per page, or more if the codec stores smallest numbers too. Such a piece takes the link 1 us and
the host 3 us. Pages of 2 MiB loaded in two groups reached half the throughput of whole pages. Sizes are those
of pages before encoding.
"""

MAPPED_CUTS = (Cut((1, 1, 1, 1), 512 << 10), Cut((1, 1), 512 << 10))
"""How loads are cut into layer groups if a kernel reads payloads in host memory (see ``MappedLoads``).

A layer group then costs only one more launch for hundreds of pages.
"""

MAPPED_NBYTES = 64 << 10
"""Least bytes of codes for the K, or the V, of one layer in a page that ``MappedLoads`` loads.

With fewer the kernel is slow: with 16 KiB (pages of 2 MiB as ``int8``) it reaches 67 % of the link's speed.
"""


UP_NBYTES = 192 << 20
"""Size of a slab for loads: the bytes, before encoding, of the pages it holds.

Also the most bytes of the slab.

The pages that the engine launches together fit one slab, even three quarters of the layers of 32 large pages.
A second slab would cost the caller a driver call and a kernel launch.
"""

DOWN_NBYTES = 64 << 20
"""As ``UP_NBYTES``, but for saves. The slab is smaller because no request waits for saves."""

_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """Layers ``[first, end)`` of an encoded page.

    In a slab they are the payload of a page with only these layers.

    ``layout`` is the layout of such a page, ``stride`` the bytes from one of its payloads to the next in a
    slab. ``pieces`` has the offset of each piece in that payload, its offset in the payload of the whole
    page, and its length, in bytes.
    """

    first: int
    end: int
    layout: PageLayout
    stride: int
    pieces: tuple[tuple[int, int, int], ...]


def parts_of(held: HostFormat, layers: LayerGroups) -> list[EncodedPart]:
    """Return the part of each layer group.

    The list is empty if pages are not cut, have several KV groups, or have bytes that are not encoded.
    """
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
    """Yield offset and length of the scales and smallest numbers of each plane, then of the codes of each.

    Scales and smallest numbers of length 0 are left out.
    """
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
    """Return the route between slots of ``pool`` and host slots of ``held``.

    If the card cannot encode and decode these pages, return a string explaining why and log a warning,
    because the CPU then does it, far below the speed of the link. Compiles kernels, which takes seconds the
    first time on a machine.
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
    """Loads of pages, or of some of their layers, by a kernel that reads payloads in page-locked host memory.

    They begin and end on the stream that ``load`` is given. See ``slabs.Loads``.
    """

    pieces = 0
    ends_on: torch.cuda.Stream | None = None

    def __init__(self, coder: Coder, card: Card, layers: tuple[int, int] | None = None) -> None:
        """Set the coder, which must have a grid, and the layers ``[first, end)`` to load, None for all."""
        self._coder, self._card, self._layers = coder, card, layers

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Queue the copies.

        Returns:
            int32 ``[len(slots)]``, not 0 for pages whose host memory holds no payload of the codec, valid
            once the copies have ended. Keep the array until then, because the kernel reads its table from the
            same memory.
        """
        with self._card.using(stream):
            table, flags = fetch_table(self._card, len(slots))
            filled = table.numpy()
            filled[: len(slots)], filled[len(slots) :] = slots, host
            self._coder.fetch(table, flags, self._layers)
        found: NDArray[np.int32] = flags.numpy()
        return found


def fetch_table(card: Card, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a table and flags for ``Coder.fetch``.

    They share their memory, so keeping the flags keeps both.
    """
    # The table is not uploaded: that takes two more calls, and each may hand the GIL to another thread.
    memory = card.flags(5 * pages)
    return memory[: 4 * pages].view(torch.int64), memory[4 * pages :]


def mapped_route(name: str, coder: Coder, saves: SlabCopies, layers: LayerGroups) -> SlabRoute:
    """Return a route that loads by ``MappedLoads`` and saves by ``saves``.

    ``layers`` are the layer groups that pages are cut into. If there is only one, pages are loaded whole.
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
    """Return the bytes of a slab with as many rows of whole pages as ``nbytes`` allow (see ``UP_NBYTES``).

    It has at least one row.
    """
    return max(1, nbytes // max(held.layout.blob_nbytes, held.slot_nbytes)) * held.slot_nbytes


def _whole(ring: Ring, coder: Coder, held: HostFormat, driver: Driver, device: torch.device) -> SlabCopies:
    """Return the copies of whole payloads, in rows of the length of a host slot."""
    carriers = [_carrier(at, held.slot_nbytes, driver, device) for at in ring.addresses]
    return SlabCopies(ring, coder, held.slot_nbytes, carriers)


def _by_layers(
    pool: OwnPool | EnginePool, held: HostFormat, ring: Ring, driver: Driver, device: torch.device
) -> tuple[LayerGroups | None, list[list[SlabCopies]]]:
    """Return layer groups and their loads, or None and an empty list if pages are only loaded whole.

    Pages are loaded by layer groups if they are large and all of their bytes are encoded.
    """
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
    """Return a share to compile kernels for. Its tensors have the same types as those of all other shares."""
    slots = np.zeros(1, dtype=np.int64)
    flags = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    rows = torch.zeros(held.slot_nbytes, dtype=torch.uint8, device=device)
    batch = Batch(slots, torch.from_numpy(slots).to(device), flags)
    return Share(batch, rows, 0, 1, torch.cuda.current_stream(device))


def _carrier(address: int, nbytes: int, driver: Driver, device: torch.device) -> Carrier:
    """Return the carrier between rows of a slab and host memory.

    It copies by DMA, or for small payloads by DMA or the copy kernel, whichever is faster.
    """
    rows = addresses.row_segments(address, nbytes, [(0, 0, nbytes)])
    straight = DmaRoute(rows, driver)
    if nbytes > SIZES[-1] or not KernelRoute.suits(rows):
        return straight
    options = [Option(straight, "dma", 1, nbytes)]
    with suppress(ImportError):  # cupy comes with the extra "gpu"
        options.append(Option(KernelRoute(rows, device), "kernel", 1, nbytes))
    return FastestRoute(options, rates_of(driver, device)) if len(options) > 1 else straight
