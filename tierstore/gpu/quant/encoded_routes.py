"""Copy routes for encoded pages in host memory. The GPU encodes and decodes; only payloads are transferred.

``encoded_route`` builds the route for a pool, if the GPU can encode and decode its pages. It also chooses how
pages are loaded: through slabs that DMA fills with payloads or, for large pages, by a kernel that reads
payloads in pinned host memory (``MappedLoads``). Saves always use slabs. All calls queue copies and return
without waiting for them.
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
from tierstore.gpu.layer_groups import MOST_GROUPS, Cut, LayerGroups
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
"""How pages are divided into layer groups for loads through slabs.

If the groups differ in size, the last one has fewer layers, because no load overlaps with computing that group.
With far fewer layers in the last group, the host could not launch the earlier groups in time.

Small pages are loaded whole. Each group has its own scales, which add two small pieces per page, or more if the
codec also stores minimums. Such a piece costs 1 us on the link and 3 us on the host. As a result, 2 MiB pages
that were loaded in two groups reached only half the throughput of 2 MiB pages that were loaded whole. All sizes
are sizes before encoding.
"""

MAPPED_CUTS = (Cut((1, 1, 1, 1), 512 << 10), Cut((1, 1), 512 << 10))
"""How pages are divided into layer groups if a kernel reads payloads in host memory (see ``MappedLoads``).

These are more groups than in ``CUTS``, because each one costs only one launch for hundreds of pages.
"""

MAPPED_NBYTES = 64 << 10
"""Minimum size in bytes of the codes for the K (or the V) of one layer of a page, for loads by ``MappedLoads``.

Pages with fewer bytes are loaded through slabs, because the kernel of ``MappedLoads`` is slow for them: at
16 KiB (2 MiB pages encoded as ``int8``), it reaches 67 % of the link's speed.
"""


UP_NBYTES = 192 << 20
"""Capacity of a slab for loads, in bytes of pages before encoding. Also the maximum size of the slab itself.

Even if pages are large, everything that the copy engine copies in one launch fits into one slab: at most 32
pages, and at most three quarters of their layers. A second slab would cost the caller another driver call and
another kernel launch.
"""

DOWN_NBYTES = 64 << 20
"""Capacity of a slab for saves, as in ``UP_NBYTES``. It is smaller because no request waits for saves."""

_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """Layers ``[first, end)`` of an encoded page.

    In a slab they are stored as the payload of a page with only these layers.

    Attributes:
        first: The first layer.
        end: One past the last layer.
        layout: The layout of a page with only these layers.
        stride: Distance between payloads in a slab, in bytes.
        pieces: For each piece of this payload: its offset in this payload, its offset in the payload of the whole
            page, and its length, all in bytes.
    """

    first: int
    end: int
    layout: PageLayout
    stride: int
    pieces: tuple[tuple[int, int, int], ...]


def parts_of(held: HostFormat, layers: LayerGroups) -> list[EncodedPart]:
    """Return the encoded part for each layer group.

    The list is empty if pages are not divided, have several KV groups, or have bytes that are not encoded.
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
    """Yield the offset and the length in bytes of each part of a payload.

    First come the scales and the minimums of each plane, unless they are empty, then the codes of each plane.
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
    pool: OwnPool | EnginePool,
    held: HostFormat,
    driver: Driver,
    device: torch.device,
    most_groups: int = MOST_GROUPS,
) -> Route | str:
    """Return the route between the slots of ``pool`` and host slots in the format ``held``.

    If ``most_groups`` is 1, pages are loaded whole. Any higher limit has no effect, because pages are then divided
    as in ``CUTS`` or ``MAPPED_CUTS``.

    Compiles kernels, which takes several seconds the first time on a machine. If the GPU cannot encode and
    decode these pages, log a warning and return a string that says why. The caller must then let the CPU
    encode and decode them, which is far slower than the link.
    """
    coder = _coder(pool, held, device)
    if isinstance(coder, str):
        _log.warning(
            "host.codec %s: the CPU encodes and decodes pages, so copies are slow: %s", held.codec, coder
        )
        return coder
    down = Ring.open(slab_nbytes(held, DOWN_NBYTES), driver, device)
    saves = _whole(down, coder, held, driver, device)
    if coder.fetches and _compiles_fetching(coder, held, down.card, device):
        cuts = MAPPED_CUTS if most_groups > 1 and len(held.layout.specs) == 1 else ()
        cut = LayerGroups.by_shares(held.layout, cuts)
        return mapped_route(f"{held.codec} on the card from host memory", coder, saves, cut)
    up = Ring.open(slab_nbytes(held, UP_NBYTES), driver, device)
    layers, groups = _by_layers(pool, held, up, driver, device) if most_groups > 1 else (None, [])
    loads = _whole(up, coder, held, driver, device)
    return SlabRoute(f"{held.codec} on the card", loads, saves, layers, groups)


class MappedLoads:
    """Loads whole pages, or some of their layers, with a kernel that reads payloads in pinned host memory.

    Loads start and complete on the stream passed to ``load``. See ``slabs.Loads``.
    """

    pieces = 0
    ends_on: torch.cuda.Stream | None = None

    def __init__(self, coder: Coder, card: Card, layers: tuple[int, int] | None = None) -> None:
        """Set the coder, which must have a grid, and the layers ``[first, end)`` to load.

        ``layers`` is None to load all layers.
        """
        self._coder, self._card, self._layers = coder, card, layers

    def load(
        self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: torch.cuda.Stream
    ) -> NDArray[np.int32]:
        """Queue the copies.

        Returns:
            int32 ``[len(slots)]``, nonzero for pages whose host slot does not contain a valid payload of the
            codec. The flags are valid once the copies are complete. Keep the array until then, because its
            memory also contains the table that the kernel reads.
        """
        with self._card.using(stream):
            table, flags = fetch_table(self._card, len(slots))
            filled = table.numpy()
            filled[: len(slots)], filled[len(slots) :] = slots, host
            self._coder.fetch(table, flags, self._layers)
        found: NDArray[np.int32] = flags.numpy()
        return found


def fetch_table(card: Card, pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate a table and flags for ``Coder.fetch``.

    Both are views of the same memory, so keeping one of them alive keeps both alive.
    """
    # The table is not uploaded, because that would take two more calls, each of which may hand the GIL to
    # another thread.
    memory = card.flags(5 * pages)
    return memory[: 4 * pages].view(torch.int64), memory[4 * pages :]


def mapped_route(name: str, coder: Coder, saves: SlabCopies, layers: LayerGroups) -> SlabRoute:
    """Return a route that loads with ``MappedLoads`` and saves with ``saves``.

    ``layers`` contains the layer groups for loads. With a single group, the route can only load whole pages.
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
        _log.warning(
            "host.codec %s: pages are loaded through slabs, because triton cannot compile: %s",
            held.codec,
            error,
        )
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
        return "the engine's layers differ in shape or strides, or are divided into several tensors"
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
    pairs = zip(pool.layers, held.layout.specs, strict=True)
    whole = all(
        len(layers) == spec.num_layers for layers, spec in pairs
    )  # not with layout "BX", which divides a layer into several tensors
    return addresses.tensor_strides(pool.layers) if whole else None


def slab_nbytes(held: HostFormat, nbytes: int) -> int:
    """Return the size in bytes of a slab with a capacity of ``nbytes`` bytes, but at least one page.

    See ``UP_NBYTES`` for how capacity is counted.
    """
    return max(1, nbytes // max(held.layout.blob_nbytes, held.slot_nbytes)) * held.slot_nbytes


def _whole(ring: Ring, coder: Coder, held: HostFormat, driver: Driver, device: torch.device) -> SlabCopies:
    """Return a ``SlabCopies`` for whole payloads. Its rows are as long as host slots."""
    carriers = [_carrier(at, held.slot_nbytes, driver, device) for at in ring.addresses]
    return SlabCopies(ring, coder, held.slot_nbytes, carriers)


def _by_layers(
    pool: OwnPool | EnginePool, held: HostFormat, ring: Ring, driver: Driver, device: torch.device
) -> tuple[LayerGroups | None, list[list[SlabCopies]]]:
    """Return the layer groups and their loads, or None and an empty list if pages must be loaded whole.

    Pages can be loaded by layer group if they are large, have one KV group, and are encoded completely. Compiles
    a kernel per group, and logs a warning if that fails.
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
            _log.warning(
                "host.codec %s: pages are not loaded layer by layer, because triton cannot compile: %s",
                held.codec,
                error,
            )
            return None, []
        groups.append([dma_copies(ring, coder, part.stride, part.pieces, driver)])
    return layers, groups


def _any_share(held: HostFormat, device: torch.device) -> Share:
    """Return a share to compile kernels with. Its tensors have the same types as those of every other share."""
    slots = np.zeros(1, dtype=np.int64)
    flags = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    rows = torch.zeros(held.slot_nbytes, dtype=torch.uint8, device=device)
    batch = Batch(slots, torch.from_numpy(slots).to(device), flags)
    return Share(batch, rows, 0, 1, torch.cuda.current_stream(device))


def _carrier(address: int, nbytes: int, driver: Driver, device: torch.device) -> Carrier:
    """Return the route between the rows of the slab at ``address`` and host memory.

    Payloads are copied by DMA. For small ones, each batch may use the copy kernel instead if that is expected to
    be faster.
    """
    rows = addresses.row_segments(address, nbytes, [(0, 0, nbytes)])
    straight = DmaRoute(rows, driver)
    if nbytes > SIZES[-1] or not KernelRoute.suits(rows):
        return straight
    options = [Option(straight, "dma", 1, nbytes)]
    with suppress(ImportError):  # cupy is part of the extra "gpu"
        options.append(Option(KernelRoute(rows, device), "kernel", 1, nbytes))
    return FastestRoute(options, rates_of(driver, device)) if len(options) > 1 else straight
