"""How many pages each tier holds and what an opening would refuse, by the same functions that open a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.codecs import fixed_nbytes
from tierstore.codecs.held import Held
from tierstore.errors import ConfigError
from tierstore.fitting import check_memory, check_sections, held_form, nbytes_of, owns_hbm, slots_of
from tierstore.nvme.sizing import EXTENTS_FROM, size, size_extents
from tierstore.types import Tier

if TYPE_CHECKING:
    from tierstore.config import StoreConfig
    from tierstore.layout import PageLayout


@dataclass(frozen=True, slots=True)
class TierSize:
    """``capacity``: bytes in the configuration, None where an engine brings its own. ``pages``: None likewise, 0 where
    not one fits. ``page_nbytes``: what one page takes of the capacity, records and catalogue included.
    """

    tier: Tier
    capacity: int | None
    pages: int | None
    page_nbytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """``refused``: sizes, devices, memory and disk for which an opening on this machine would fail. The store's
    directory is not looked into: who made or uses it is no part of a plan.
    """

    tiers: tuple[TierSize, ...]
    refused: tuple[str, ...]

    def of(self, tier: Tier) -> TierSize | None:
        """The tier, if the configuration has it."""
        return next((found for found in self.tiers if found.tier == tier), None)


def sizes(config: StoreConfig, layout: PageLayout) -> Sizes:
    """Every tier of the configuration. Opens nothing, changes nothing; looks at free memory and disk."""
    refused: list[str] = []
    with _noted(refused):
        check_sections(config, layout)
    tiers = [*_memory(config, layout, refused), *_disk(config, layout, refused)]
    return Sizes(tuple(tiers), tuple(refused))


def nearest_directory(path: Path) -> Path:
    """``path``, or the deepest of its parents that is there."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


@contextmanager
def _noted(refused: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        refused.append(str(error))


def _memory(config: StoreConfig, layout: PageLayout, refused: list[str]) -> Iterator[TierSize]:
    slots: dict[Tier, int | None] = {Tier.HBM: None, Tier.HOST: None}
    held = Held.of("none", layout)
    with suppress(ConfigError):  # check_sections has noted it
        held = held_form(config, layout)
    for tier, section in ((Tier.HBM, config.hbm), (Tier.HOST, config.host)):
        if section is None:
            continue
        pages = None if section.capacity is None else 0
        with _noted(refused):
            pages = slots_of(tier.name.lower(), section.capacity, layout if tier == Tier.HBM else held)
        slots[tier] = pages
        yield TierSize(tier, section.capacity, pages, nbytes_of(layout if tier == Tier.HBM else held))
    in_memory = owns_hbm(config) and config.hbm is not None and config.hbm.device == "cpu"
    with _noted(refused):
        check_memory(layout, slots[Tier.HBM] if in_memory else None, held, slots[Tier.HOST])


def _disk(config: StoreConfig, layout: PageLayout, refused: list[str]) -> Iterator[TierSize]:
    if config.nvme is None:
        return
    capacity, pages, record = config.nvme.capacity, 0, layout.blob_nbytes
    with _noted(refused):
        # With auto as many as fit wherever the disk's speed will put them.
        payload, sizings = config.nvme.payload, []
        if payload != "extents":
            sizings.append(size(capacity, layout.blob_nbytes, codec=config.codec))
        if payload == "extents" or (payload == "auto" and capacity >= EXTENTS_FROM):
            sizings.append(size_extents(capacity, layout.blob_nbytes, codec=config.codec))
        sizing = min(sizings, key=lambda each: each.budget_nbytes // each.record_nbytes)
        fixed = fixed_nbytes(
            config.codec, layout
        )  # None: as many pages as fit however badly they are encoded
        record = sizing.record_nbytes if fixed is None else sizing.cost(fixed)
        pages = sizing.budget_nbytes // record
    yield TierSize(Tier.NVME, capacity, pages, record)
    place = nearest_directory(config.nvme.path)
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if capacity > free:
        refused.append(
            f"nvme.capacity is {capacity} bytes, but {place} has {free} free; allowed: at most that, and what the "
            "store already has there"
        )
