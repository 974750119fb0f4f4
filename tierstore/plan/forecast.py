"""The plan for one model: pages and documents in each tier, and the times of restoring and of recomputing.

Numbers of pages, and reasons to refuse a configuration, come from the functions that open a store. Times come from
the rates that ``measure`` takes on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tierstore.build import check_memory, check_sections, held_form, owns_hbm, slots_of
from tierstore.codecs import fixed_nbytes
from tierstore.codecs.host_format import HostFormat
from tierstore.config import format_size
from tierstore.errors import ConfigError
from tierstore.nvme.disk_space import EXTENTS_FROM, size_extents
from tierstore.nvme.disk_space import size as size_lmdb
from tierstore.page import PageLayout
from tierstore.plan.measure import Rate, copy_rate, matmul_rate, read_rate
from tierstore.types import Tier

if TYPE_CHECKING:
    from tierstore.config import StoreConfig
    from tierstore.plan.geometry import Geometry


@dataclass(frozen=True, slots=True)
class TierSize:
    """``capacity`` in bytes from the configuration, and ``pages``: both None if an engine brings its own memory.

    ``pages`` is 0 if not one fits. ``page_nbytes`` is what one page takes of the capacity, with record and
    catalogue.
    """

    tier: Tier
    capacity: int | None
    pages: int | None
    page_nbytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all tiers.

    ``refused`` lists sizes, devices, memory and disk for which opening would fail on this machine.

    The store's directory is not opened: a plan does not depend on who created it or uses it.
    """

    tiers: tuple[TierSize, ...]
    refused: tuple[str, ...]

    def of(self, tier: Tier) -> TierSize | None:
        """Return the size of a tier, or None if the configuration does not have it."""
        return next((found for found in self.tiers if found.tier == tier), None)


def sizes(config: StoreConfig, layout: PageLayout) -> Sizes:
    """Return the size of every tier. Opens and changes nothing; looks at free memory and disk."""
    refused: list[str] = []
    with _noted(refused):
        check_sections(config, layout)
    tiers = [*_memory(config, layout, refused), *_disk(config, layout, refused)]
    return Sizes(tuple(tiers), tuple(refused))


def nearest_directory(path: Path) -> Path:
    """Return ``path``, or the deepest of its parents that exists."""
    return next(folder for folder in (path, *path.parents) if os.path.exists(folder))


@contextmanager
def _noted(refused: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        refused.append(str(error))


def _memory(config: StoreConfig, layout: PageLayout, refused: list[str]) -> Iterator[TierSize]:
    slots: dict[Tier, int | None] = {Tier.HBM: None, Tier.HOST: None}
    held = HostFormat.of("none", layout)
    with suppress(ConfigError):  # reported by check_sections
        held = held_form(config, layout)
    for tier, section in ((Tier.HBM, config.hbm), (Tier.HOST, config.host)):
        if section is None:
            continue
        pages = None if section.capacity is None else 0
        with _noted(refused):
            pages = slots_of(tier.name.lower(), section.capacity, layout if tier == Tier.HBM else held)
        slots[tier] = pages
        yield TierSize(tier, section.capacity, pages, (layout if tier == Tier.HBM else held).page_nbytes)
    in_memory = owns_hbm(config) and config.hbm is not None and config.hbm.device == "cpu"
    with _noted(refused):
        check_memory(layout, slots[Tier.HBM] if in_memory else None, held, slots[Tier.HOST])


def _disk(config: StoreConfig, layout: PageLayout, refused: list[str]) -> Iterator[TierSize]:
    if config.nvme is None:
        return
    capacity, pages, record = config.nvme.capacity, 0, layout.blob_nbytes
    with _noted(refused):
        # With auto: as many as fit in every layout that the disk's speed may choose.
        payload, sizings = config.nvme.payload, []
        if payload != "extents":
            sizings.append(size_lmdb(capacity, layout.blob_nbytes, codec=config.codec))
        if payload == "extents" or (payload == "auto" and capacity >= EXTENTS_FROM):
            sizings.append(size_extents(capacity, layout.blob_nbytes, codec=config.codec))
        sizing = min(sizings, key=lambda each: each.budget_nbytes // each.record_nbytes)
        fixed = fixed_nbytes(config.codec, layout)  # None: as many pages as fit, however badly they compress
        record = sizing.record_nbytes if fixed is None else sizing.cost(fixed)
        pages = sizing.budget_nbytes // record
    yield TierSize(Tier.NVME, capacity, pages, record)
    place = nearest_directory(config.nvme.path)
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if capacity > free and not config.nvme.read_only:
        refused.append(
            f"nvme.capacity must be at most {free}, what is free at {place} besides the store's own files, got "
            f"{capacity} bytes"
        )


PAGE_SIZE = 64
"""Tokens per page if neither the configuration nor the caller says."""

_COMPUTED = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of this machine.

    ``copy`` (HOST -> HBM) and ``read`` (the disk) are in bytes/s; ``read`` is None without NVMe.

    ``prefill`` is in tokens/s or operations/s, as ``per_token`` says.
    """

    copy: Rate
    read: Rate | None
    prefill: Rate
    per_token: bool


@dataclass(frozen=True, slots=True)
class Restore:
    """One document length in one tier. ``documents`` is how many fit, None if the tier's size is the engine's.

    ``seconds`` is the time until one is in HBM, None if it does not fit or a rate is missing. ``sooner`` is the
    speed-up over recomputing it.
    """

    tier: str
    documents: int | None
    seconds: float | None
    sooner: float | None


@dataclass(frozen=True, slots=True)
class Document:
    """``pages`` counts full pages, which are stored. ``recompute_s`` is None if it cannot be predicted."""

    tokens: int
    pages: int
    nbytes: int
    recompute_s: float | None
    tiers: tuple[Restore, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """``refused``: why this machine could not open the configuration. ``warnings``: what opens, but will disappoint."""

    geometry: Geometry
    layout: PageLayout
    sizes: Sizes
    rates: Rates
    documents: tuple[Document, ...]
    warnings: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return the plan for JSON: bytes, tokens and seconds; null for unknown values."""
        model, layout, rates = self.geometry, self.layout, self.rates
        return {
            "model": {
                "name": model.name,
                "kind": model.kind,
                "num_layers": model.num_layers,
                "window_layers": sum(window is not None for window in model.windows),
                "num_kv_heads": model.num_kv_heads,
                "head_dim": model.head_dim,
                "dtype": layout.specs[0].dtype,
            },
            "bytes_per_token": layout.page_nbytes // layout.page_size,
            "page_size": layout.page_size,
            "smallest_reuse_tokens": layout.page_size,
            "page_nbytes": layout.page_nbytes,
            "page_padding_nbytes": layout.slot_nbytes - layout.page_nbytes,
            "tiers": [_plain_tier(tier, layout.page_size) for tier in self.sizes.tiers],
            "documents": [asdict(document) for document in self.documents],
            "rates": {
                "host_to_hbm_bytes_per_s": asdict(rates.copy),
                "nvme_read_bytes_per_s": None if rates.read is None else asdict(rates.read),
                f"prefill_{'tokens' if rates.per_token else 'operations'}_per_s": asdict(rates.prefill),
            },
            "refused": list(self.sizes.refused),
            "warnings": list(self.warnings),
        }


def page_layout(
    config: StoreConfig, model: Geometry, page_size: int | None, dtype: str | None
) -> tuple[StoreConfig, PageLayout]:
    """Return the pages, and the configuration with ``page_size`` replaced if given. ConfigError for the dtype."""
    tokens = page_size or config.page_size or PAGE_SIZE
    layout = PageLayout.of(model.specs(tokens, dtype))
    return config.model_copy(update={"page_size": tokens}), layout


def measure(
    config: StoreConfig,
    model: Geometry,
    layout: PageLayout,
    tokens_per_s: float | None,
    say: Callable[[str], None],
) -> Rates:
    """Measure this machine's rates for these pages, the disk's where ``nvme.path`` is or will be. Takes seconds."""
    device = config.hbm.device if config.hbm is not None else "cpu"
    say("a page from HOST to HBM")
    copy = copy_rate(layout.blob_nbytes, device)
    read = None
    if config.nvme is not None:
        say("a page from disk")
        read = read_rate(layout.blob_nbytes, nearest_directory(config.nvme.path))
    if tokens_per_s is not None:
        given = Rate(tokens_per_s, "given with --prefill-tokens-per-s")
        return Rates(copy=copy, read=read, prefill=given, per_token=True)
    if isinstance(model.prefill, str):
        unknown = Rate(None, f"not predicted: {model.prefill}; set it with --prefill-tokens-per-s")
        return Rates(copy=copy, read=read, prefill=unknown, per_token=False)
    say("a matrix multiplication")
    wanted = (layout.specs[0].dtype, model.dtype, "bfloat16")
    dtype = next(name for name in wanted if name in _COMPUTED)
    rate = matmul_rate(model.prefill.hidden, model.prefill.inner, dtype, device)
    return Rates(copy=copy, read=read, prefill=rate, per_token=False)


def forecast(
    config: StoreConfig, model: Geometry, layout: PageLayout, rates: Rates, lengths: Sequence[int]
) -> Plan:
    """Return the plan for documents of ``lengths`` tokens. Pure, except that it looks at free memory and disk."""
    found = sizes(config, layout)
    documents = tuple(_document(length, model, layout, found, rates) for length in dict.fromkeys(lengths))
    warnings = (*_of_the_model(model), *_of_tiers(found), *_of_documents(documents, layout, found))
    return Plan(model, layout, found, rates, documents, warnings)


def restore_seconds(tier: Tier, pages: int, nbytes: int, rates: Rates, *, through_host: bool) -> float | None:
    """Return the time until ``pages`` pages of ``nbytes`` are in HBM, from a tier that holds them all.

    From NVMe through HOST it is the sum of both hops. They overlap batch by batch, but readers, checksums and
    copies share the cores: a store on two cores was measured closer to the sum than to the slower hop.
    """
    if tier == Tier.HBM:
        return 0.0
    up = rates.copy.seconds(pages * nbytes)
    if tier == Tier.HOST:
        return up
    read = None if rates.read is None else rates.read.seconds(pages * nbytes)
    if not through_host or read is None:
        return read
    return None if up is None else read + up


def _document(tokens: int, model: Geometry, layout: PageLayout, found: Sizes, rates: Rates) -> Document:
    pages = tokens // layout.page_size
    recompute = _recompute_seconds(tokens, model, rates)
    hbm = found.of(Tier.HBM)
    fits = pages > 0 and (hbm is None or hbm.pages is None or hbm.pages >= pages)
    through_host = found.of(Tier.HOST) is not None
    tiers = []
    for size in found.tiers:
        documents = None if size.pages is None or not pages else size.pages // pages
        seconds = None
        if fits and documents != 0:
            seconds = restore_seconds(size.tier, pages, layout.blob_nbytes, rates, through_host=through_host)
        sooner = recompute / seconds if recompute and seconds else None
        tiers.append(Restore(size.tier.name, documents, seconds, sooner))
    return Document(tokens, pages, pages * layout.page_nbytes, recompute, tuple(tiers))


def _recompute_seconds(tokens: int, model: Geometry, rates: Rates) -> float | None:
    if rates.per_token:
        return rates.prefill.seconds(tokens)
    return None if isinstance(model.prefill, str) else rates.prefill.seconds(model.prefill.operations(tokens))


def _of_the_model(model: Geometry) -> Iterator[str]:
    windows = sorted({window for window in model.windows if window is not None})
    if windows:
        count = sum(window is not None for window in model.windows)
        yield (
            f"{count} of {model.num_layers} layers attend only to the last {windows[-1]} tokens, "
            "but pages hold all layers of all tokens"
        )


def _of_tiers(found: Sizes) -> Iterator[str]:
    nvme = found.of(Tier.NVME)
    above = sum(size.pages or 0 for size in found.tiers if size.tier < Tier.NVME)
    if nvme is not None and nvme.pages is not None and nvme.pages < above:
        yield f"NVME holds {nvme.pages} pages, the tiers above it {above}: not all of them can be saved"


def _of_documents(documents: Sequence[Document], layout: PageLayout, found: Sizes) -> Iterator[str]:
    for document in documents:
        if not document.pages:
            yield (
                f"a document of {document.tokens} tokens is shorter than a page ({layout.page_size}): "
                "nothing is stored"
            )
        for size in found.tiers:
            if size.pages is not None and size.pages < document.pages:
                yield _too_small(document, size, layout)
        for restore in document.tiers:
            if restore.sooner is not None and restore.sooner < 1:
                yield (
                    f"recomputing a document of {document.tokens} tokens is faster than restoring it from "
                    f"{restore.tier}"
                )


def _too_small(document: Document, size: TierSize, layout: PageLayout) -> str:
    holds = (size.pages or 0) * layout.page_nbytes
    return (
        f"a document of {document.tokens} tokens needs {document.pages} pages ({format_size(document.nbytes)}), "
        f"{size.tier.name} holds {size.pages} ({format_size(holds)})"
    )


def _plain_tier(size: TierSize, page_size: int) -> dict[str, Any]:
    return {
        "tier": size.tier.name,
        "capacity": size.capacity,
        "pages": size.pages,
        "tokens": None if size.pages is None else size.pages * page_size,
        "nbytes_per_page": size.page_nbytes,
    }
