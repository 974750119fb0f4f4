"""The plan for one model: pages and documents per tier, and the times to restore, recompute and stream documents.

Pages are counted and configurations are rejected by the same functions as when a store is opened. Times are
computed from the rates that ``measure`` finds on this machine.
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
from tierstore.errors import ConfigError
from tierstore.gpu.attention.page_stream import require_streamable, ring_shape
from tierstore.nvme.disk_space import EXTENTS_FROM, size_extents
from tierstore.nvme.disk_space import size as size_lmdb
from tierstore.page import PageLayout
from tierstore.plan.measure import Rate, copy_rate, found_card, matmul_rate, read_rate
from tierstore.types import Tier, exact_size, format_size

if TYPE_CHECKING:
    from tierstore.config import StoreConfig
    from tierstore.plan.geometry import Geometry


@dataclass(frozen=True, slots=True)
class TierSize:
    """The size of one tier.

    ``capacity`` is in bytes, from the configuration. ``pages`` is the number of pages that fit, possibly 0. Both
    are None for HBM that an engine provides. ``page_nbytes`` is the part of the capacity that one page takes; on
    disk it includes the page's record head and catalogue entry.
    """

    tier: Tier
    capacity: int | None
    pages: int | None
    page_nbytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of all tiers.

    ``refused`` contains the reasons why a store with this configuration could not be opened on this machine:
    sizes, devices, memory or disk space. The contents of the store's directory are not considered.
    """

    tiers: tuple[TierSize, ...]
    refused: tuple[str, ...]

    def of(self, tier: Tier) -> TierSize | None:
        """Return the size of a tier, or None if the configuration does not have this tier."""
        return next((found for found in self.tiers if found.tier == tier), None)


def sizes(config: StoreConfig, layout: PageLayout) -> Sizes:
    """Return the size of every tier, and the reasons why the store could not be opened on this machine.

    Free memory and free disk space are checked. Nothing is opened or changed.
    """
    refused: list[str] = []
    with _noted(refused):
        check_sections(config, layout)
    tiers = [*_memory(config, layout, refused), *_disk(config, layout, refused)]
    return Sizes(tuple(tiers), tuple(refused))


def nearest_directory(path: Path) -> Path:
    """Return ``path`` if it exists, else its nearest parent that exists."""
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
        # With "auto", an existing directory keeps its layout, whichever it is. Count the pages that fit with
        # either layout.
        payload, sizings = config.nvme.payload, []
        if payload != "extents":
            sizings.append(size_lmdb(capacity, layout.blob_nbytes, codec=config.codec))
        if payload == "extents" or (payload == "auto" and capacity >= EXTENTS_FROM):
            sizings.append(size_extents(capacity, layout.blob_nbytes, codec=config.codec))
        sizing = min(sizings, key=lambda each: each.budget_nbytes // each.record_nbytes)
        fixed = fixed_nbytes(config.codec, layout)  # None: sizes vary, so assume that pages do not shrink
        record = sizing.record_nbytes if fixed is None else sizing.cost(fixed)
        pages = sizing.budget_nbytes // record
    yield TierSize(Tier.NVME, capacity, pages, record)
    place = nearest_directory(config.nvme.path)
    disk = os.statvfs(place)
    free = disk.f_bavail * disk.f_frsize
    if capacity > free and not config.nvme.read_only:
        refused.append(
            f"nvme.capacity must be at most {exact_size(free)}, which is the free space at {place} (space that an "
            f"existing store already uses is not counted as free), got {exact_size(capacity)}"
        )


PAGE_SIZE = 64
"""Number of tokens per page if neither the caller nor the configuration sets a page size."""

_COMPUTED = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of this machine.

    ``copy`` is the rate of copies from host memory to HBM, and ``read`` the rate of reads from disk, both in
    bytes/s. ``read`` is None if the configuration has no NVMe tier. ``prefill`` is in tokens/s if ``per_token`` is
    true, else in floating-point operations per second.
    """

    copy: Rate
    read: Rate | None
    prefill: Rate
    per_token: bool


@dataclass(frozen=True, slots=True)
class Restore:
    """How many documents of one length fit into a tier, and how long it takes to restore one from there.

    ``documents`` is the number of documents that fit, or None if the tier's size is unknown or a document has
    no full page. ``seconds`` is the time to restore a document to HBM, or None if it does not fit or a rate is
    unknown. ``sooner`` is the time to recompute the document divided by ``seconds``, or None if either is unknown.
    """

    tier: str
    documents: int | None
    seconds: float | None
    sooner: float | None


@dataclass(frozen=True, slots=True)
class Decode:
    """How questions on one document are decoded together: from HBM, or with pages that stream from host memory.

    Each question needs a page of its own in HBM, for tokens that are not in a full page of the document. As many of
    the document's last pages as fit are in HBM too. All others are streamed in every step, once for all questions.

    Attributes:
        streamed_pages: Number of pages that are streamed. 0 if the document and the questions fit into HBM.
        streamed_nbytes: Number of bytes that are copied from host memory in each step.
        ring_nbytes: Size of the rings in bytes. They take HBM in addition to ``hbm.capacity``.
        step_s: Time of the copies of a step in seconds. A step takes at least as long. It is 0 if nothing is
            streamed, and None if the pages cannot be streamed or the copy rate is unknown.
        tokens_per_s: Number of tokens per second of all questions together, or None if ``step_s`` is 0 or None.
        limits: The reasons why the pages cannot be streamed.
    """

    streamed_pages: int
    streamed_nbytes: int
    ring_nbytes: int
    step_s: float | None
    tokens_per_s: float | None
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """The plan for documents of one length.

    ``pages`` is the number of full pages of a document; only these are stored. ``nbytes`` is their size in bytes.
    ``recompute_s`` is the time to recompute a document in seconds, or None if the prefill rate is unknown.
    ``tiers`` has an entry for each tier. ``decode`` is None if the size of HBM is unknown.
    """

    tokens: int
    pages: int
    nbytes: int
    recompute_s: float | None
    tiers: tuple[Restore, ...]
    decode: Decode | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan for one model and configuration on this machine.

    ``sizes.refused`` lists the reasons why a store with this configuration could not be opened on this machine.
    ``questions`` is the number of questions on each document that are decoded together. ``warnings`` lists problems
    that do not prevent a store from being opened.
    """

    geometry: Geometry
    layout: PageLayout
    sizes: Sizes
    rates: Rates
    questions: int
    documents: tuple[Document, ...]
    warnings: tuple[str, ...]

    def plain(self) -> dict[str, Any]:
        """Return the plan as JSON-serializable data. Sizes are in bytes and times in seconds.

        Unknown values are None.
        """
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
            "questions": self.questions,
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
    """Determine the page size. Return the configuration with this page size, and the layout of the model's pages.

    Args:
        config: The configuration.
        model: The model.
        page_size: Number of tokens per page. None means the page size of the configuration, or PAGE_SIZE if the
            configuration sets none.
        dtype: The dtype of the pages. None means the model's own dtype.

    Raises:
        ConfigError: The dtype is not supported.
    """
    tokens = page_size or config.page_size or PAGE_SIZE
    layout = PageLayout.of(model.specs(tokens, dtype))
    return config.model_copy(update={"page_size": tokens}), layout


_NO_DEVICE = "the configuration has no hbm section, and torch finds no GPU on this machine"


def measure(
    config: StoreConfig,
    model: Geometry,
    layout: PageLayout,
    tokens_per_s: float | None,
    say: Callable[[str], None],
    device: str | None = None,
) -> Rates:
    """Measure this machine's rates for pages of this layout. Takes a few seconds.

    The disk is measured at ``nvme.path``, or at its nearest parent that exists.

    Args:
        config: The configuration.
        model: The model.
        layout: The layout of the model's pages.
        tokens_per_s: Prefill rate in tokens/s, if known. With None, it is predicted from a measured matrix
            multiplication.
        say: Called with the name of each measurement before it starts.
        device: The device that computes and has the HBM tier. None means ``hbm.device`` or, if the
            configuration has no hbm section, the GPU that torch finds. If torch finds no GPU, the rates of
            copies and prefill stay unknown, because the engine probably runs on another machine.
    """
    if device is None:
        device = config.hbm.device if config.hbm is not None else found_card()
    if device is None:
        copy = Rate(None, f"not measured: {_NO_DEVICE}; set --device")
    else:
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
    if device is None:
        unknown = Rate(None, f"not predicted: {_NO_DEVICE}; set --device or --prefill-tokens-per-s")
        return Rates(copy=copy, read=read, prefill=unknown, per_token=False)
    say("a matrix multiplication")
    wanted = (layout.specs[0].dtype, model.dtype, "bfloat16")
    dtype = next(name for name in wanted if name in _COMPUTED)
    rate = matmul_rate(model.prefill.hidden, model.prefill.inner, dtype, device)
    return Rates(copy=copy, read=read, prefill=rate, per_token=False)


def forecast(
    config: StoreConfig,
    model: Geometry,
    layout: PageLayout,
    rates: Rates,
    lengths: Sequence[int],
    questions: int = 1,
) -> Plan:
    """Return the plan for documents of ``lengths`` tokens.

    The result depends only on the arguments, and on this machine's free memory and free disk space.

    Args:
        config: The configuration.
        model: The model.
        layout: The layout of the model's pages.
        rates: The rates of this machine.
        lengths: The lengths of documents in tokens.
        questions: Number of questions on each document that are decoded together.
    """
    found = sizes(config, layout)
    documents = []
    for length in dict.fromkeys(lengths):
        decode = _decode(length // layout.page_size, questions, config, model, layout, found, rates)
        documents.append(_document(length, model, layout, found, rates, decode))
    warnings = (
        *_of_the_model(model),
        *_of_tiers(found),
        *_of_documents(documents, layout, found),
        *_of_streams(documents, questions, layout),
    )
    return Plan(model, layout, found, rates, questions, tuple(documents), warnings)


def restore_seconds(tier: Tier, pages: int, nbytes: int, rates: Rates, *, through_host: bool) -> float | None:
    """Return how long it takes to restore ``pages`` pages of ``nbytes`` bytes each to HBM, in seconds.

    All pages are in ``tier``. The result is None if a rate is unknown.

    If pages from NVMe pass through host memory, the result is the sum of the times of reading and of copying.
    Reading and copying overlap batch by batch, but compete for the CPU's cores. On two cores, the measured time
    was closer to the sum than to the longer of the two times.
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


def _document(
    tokens: int, model: Geometry, layout: PageLayout, found: Sizes, rates: Rates, decode: Decode | None
) -> Document:
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
    return Document(tokens, pages, pages * layout.page_nbytes, recompute, tuple(tiers), decode)


def _decode(
    pages: int,
    questions: int,
    config: StoreConfig,
    model: Geometry,
    layout: PageLayout,
    found: Sizes,
    rates: Rates,
) -> Decode | None:
    """Return how ``questions`` questions on a document of ``pages`` full pages are decoded together."""
    hbm = found.of(Tier.HBM)
    if config.hbm is None or hbm is None or hbm.pages is None:
        return None
    resident = hbm.pages - questions
    # The pages of each KV group that are not in HBM. Those before the window are not needed.
    groups = []
    for spec, window in zip(layout.specs, _group_windows(model), strict=True):
        needed = pages if window is None else min(pages, -(-window // layout.page_size))
        groups.append((spec, max(0, needed - max(0, resident))))
    streamed = max(count for _, count in groups)
    limits = []
    if resident < 0:
        limits.append(
            f"hbm.capacity must be at least {exact_size(questions * hbm.page_nbytes)}, so that each question has a "
            f"page of its own, got {exact_size(hbm.capacity or 0)}"
        )
    if streamed:
        limits += _host_limits(streamed, config, layout, found)
    nbytes = sum(count * spec.page_nbytes for spec, count in groups)
    with suppress(ConfigError):  # reported by check_sections
        held = held_form(config, layout)
        if held.encoded:
            nbytes = nbytes * held.payload_nbytes // layout.page_nbytes
    ring_nbytes = 0
    for spec, count in groups:
        rows, slabs = ring_shape(spec)
        ring_nbytes += slabs * rows * spec.layer_nbytes if count else 0
    step = None if limits else rates.copy.seconds(nbytes)
    return Decode(streamed, nbytes, ring_nbytes, step, questions / step if step else None, tuple(limits))


def _host_limits(streamed: int, config: StoreConfig, layout: PageLayout, found: Sizes) -> Iterator[str]:
    """Yield the reasons why host memory cannot hold ``streamed`` pages such that they can be streamed."""
    host, device = found.of(Tier.HOST), None if config.hbm is None else config.hbm.device
    if config.host is None or host is None:
        wanted = exact_size(streamed * layout.page_nbytes)
        yield f"the configuration has no host section; add one with a capacity of at least {wanted}"
        return
    if (host.pages or 0) < streamed:
        yield (
            f"host.capacity must be at least {exact_size(streamed * host.page_nbytes)} to hold the streamed pages, "
            f"got {exact_size(config.host.capacity)}"
        )
    kind = "cpu" if device == "cpu" else "cuda"
    if config.host.pin == "never" and kind != "cpu":
        yield "host.pin must be auto or always, because a GPU can only stream page-locked memory, got never"
    try:
        require_streamable(held_form(config, layout), kind)
    except ConfigError as error:
        yield str(error)


def _group_windows(model: Geometry) -> list[int | None]:
    """Return the largest window of each KV group in tokens, or None for full attention."""
    windows = [window for window in model.windows if window is not None]
    full: list[int | None] = [None] if len(windows) < model.num_layers else []
    return [*full, max(windows)] if windows else full


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
            "but pages store K and V of all layers for all tokens"
        )


def _of_tiers(found: Sizes) -> Iterator[str]:
    nvme = found.of(Tier.NVME)
    above = sum(size.pages or 0 for size in found.tiers if size.tier < Tier.NVME)
    if nvme is not None and nvme.pages is not None and nvme.pages < above:
        yield f"NVME holds {nvme.pages} pages, but the tiers above it hold {above}, so it cannot save all of them"


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
        f"but {size.tier.name} holds {size.pages} ({format_size(holds)})"
    )


def _of_streams(documents: Sequence[Document], questions: int, layout: PageLayout) -> Iterator[str]:
    asked = "1 question on" if questions == 1 else f"{questions} questions on"
    for document in documents:
        decode = document.decode
        if decode is None or not (decode.streamed_pages or decode.limits):
            continue
        what = f"{asked} a document of {document.tokens} tokens"
        if decode.limits:
            for limit in decode.limits:
                yield f"{what} can be decoded neither from HBM nor with streamed pages: {limit}"
        else:
            yield (
                f"decoding {what} needs {decode.streamed_pages * layout.page_size} tokens from host memory in every "
                "step: use tierstore.gpu.attention.streamed"
            )


def _plain_tier(size: TierSize, page_size: int) -> dict[str, Any]:
    return {
        "tier": size.tier.name,
        "capacity": size.capacity,
        "pages": size.pages,
        "tokens": None if size.pages is None else size.pages * page_size,
        "nbytes_per_page": size.page_nbytes,
    }
