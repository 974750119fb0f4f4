"""The way to host memory that holds pages encoded, built where the card can code."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tierstore.codecs import LOSSY
from tierstore.gpu import geometry
from tierstore.gpu.coded import DOWN_NBYTES, UP_NBYTES, Coded, LayerCoder, PayloadSlabs, Saves, TorchCard
from tierstore.gpu.coded_layers import parts_of
from tierstore.gpu.geometry import Cut, LayerGroups, Segments
from tierstore.gpu.mapped import UP, Fetcher, Mapped, table_of
from tierstore.gpu.pool import CudaPool, EnginePool
from tierstore.gpu.quant.coder import Call, Coder
from tierstore.gpu.routes import SIZES, Choice, Kernel, Option, Straight, rates_of

if TYPE_CHECKING:
    from tierstore.codecs.held import Held
    from tierstore.gpu.driver import Driver
    from tierstore.gpu.geometry import Lot
    from tierstore.gpu.pool import OwnPool
    from tierstore.gpu.routes import Route

_log = logging.getLogger(__name__)

CUTS = (Cut((5, 3), 3 << 20), Cut((1, 1), 3 << 20))
"""Of loads through slabs. Nothing hides what is computed after the last group has come, so it has fewer layers; with
much fewer the host would not have launched those before them by then. Each group has scales of its own: two small
pieces a page, and more where smallest numbers are stored, that take the link a microsecond each and the host three:
pages of 2 MiB in two groups came at half the speed of whole ones. Bytes are those of pages as they are."""

MAPPED_CUTS = (Cut((1, 1, 1, 1), 512 << 10), Cut((1, 1), 512 << 10))
"""Where kernels read payloads in host memory (see ``mapped``): a group is one more launch for hundreds of pages, and
nothing else."""

MAPPED_NBYTES = 64 << 10
"""Of codes that a layer has of K, or of V, in a page. With fewer such kernels are slow: of 16 KiB, pages of 2 MiB as
``int8``, they carry .67 of what the link can."""


def coded(pool: OwnPool | EnginePool, held: Held, driver: Driver, device: torch.device) -> Route | str:
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
    return Coded(name, coder, (up, carry_up), (down, carry_down), side, card, layers, groups)


def _mapped(held: Held, fetcher: Fetcher, saves: Saves, card: TorchCard) -> Mapped:
    layers = LayerGroups.by_shares(held.layout, MAPPED_CUTS if len(held.layout.specs) == 1 else ())
    name = f"{held.codec} on the card from host memory"
    return Mapped(name, fetcher, saves, card, layers if len(layers) > 1 else None)


def _slabs(
    nbytes: int,
    held: Held,
    card: TorchCard,
    side: tuple[torch.cuda.Stream, torch.cuda.Stream],
    driver: Driver,
    device: torch.device,
) -> tuple[PayloadSlabs, Route]:
    slabs = PayloadSlabs(held.layout.blob_nbytes, held.slot_nbytes, nbytes, card)
    for stream in side:
        slabs.memory.record_stream(stream)  # should the store be dropped with copies on their way
    return slabs, _carrier(slabs, held.slot_nbytes, driver, device)


def _fetcher(pool: OwnPool | EnginePool, held: Held, card: TorchCard, device: torch.device) -> Fetcher | None:
    """None where such kernels cannot decode these pages, or slowly, or triton cannot compile them."""
    from tierstore.gpu.quant import codec_kernels
    from tierstore.gpu.quant.codec_kernels import fetch

    codec, found = LOSSY[held.codec], _lots(pool, held)
    if found is None or not Fetcher.suits(codec, held.layout):
        return None
    if Fetcher.smallest_tile(codec, held.layout, UP) < MAPPED_NBYTES:
        return None
    fetcher = Fetcher(codec, held.layout, found, fetch, UP)
    try:
        with torch.cuda.device(device):
            fetcher.compile(*table_of(card, 1))
    except codec_kernels.REFUSALS as error:
        _log.warning("host.codec %s: pages come through slabs: triton cannot compile: %s", held.codec, error)
        return None
    return fetcher


def _coder(pool: OwnPool | EnginePool, held: Held, device: torch.device) -> Coder | str:
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


def _lots(pool: OwnPool | EnginePool, held: Held) -> tuple[Lot, ...] | None:
    if isinstance(pool, CudaPool):
        return geometry.pool_lots(pool.bytes, held.layout)
    assert isinstance(pool, EnginePool)
    return geometry.tensor_lots(pool.layers)


def _by_layers(
    pool: OwnPool | EnginePool, held: Held, slabs: PayloadSlabs, driver: Driver, device: torch.device
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
            Straight(part.rows(slabs.memory.data_ptr() + at * slabs.nbytes), driver)
            for at in range(len(slabs.memory) // slabs.nbytes)
        ]
        groups.append(LayerCoder(coder, part.stride, carry, len(part.pieces)))
    return layers, groups


def _any_call(held: Held, device: torch.device) -> Call:
    """Of the form that all calls have."""
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    flags = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    return Call(slots, torch.zeros(held.slot_nbytes, dtype=torch.uint8, device=device), flags, 0, 1)


def _carrier(slabs: PayloadSlabs, nbytes: int, driver: Driver, device: torch.device) -> Route:
    """Between the slabs' rows and host memory: by DMA, or by the copy kernel where payloads are small."""
    columns = (slabs.memory.data_ptr(), slabs.stride, 0, nbytes)
    rows = Segments(*(np.array([column], dtype=np.int64) for column in columns))
    straight = Straight(rows, driver)
    if nbytes > SIZES[-1] or not Kernel.suits(rows):
        return straight
    options = [Option(straight, "dma", 1, nbytes)]
    with suppress(ImportError):  # cupy comes with the extra "gpu"
        options.append(Option(Kernel(rows, device), "kernel", 1, nbytes))
    return Choice(options, rates_of(driver, device)) if len(options) > 1 else straight
