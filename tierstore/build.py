"""Builds the parts of a store from a configuration and a page layout.

First, the configuration is checked: it must have no contradictions, and must suit the pages and the machine.
These checks open and allocate nothing. A failed check raises a ConfigError that names the key, its value and a
remedy. Then the tiers are opened.
"""

from __future__ import annotations

import gc
import logging
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import torch

from tierstore.codecs import LOSS_CLASSES, saves
from tierstore.codecs.host_format import HostFormat
from tierstore.directory.directory import Directory
from tierstore.directory.residency import TierTable
from tierstore.errors import ConfigError
from tierstore.gpu.device import Between, CpuDevice, open_device, pinner, require_device
from tierstore.gpu.pool import CpuPool
from tierstore.host.arena import HostArena
from tierstore.host.free_memory import free_memory
from tierstore.host.pinned_memory import FIRST_NBYTES
from tierstore.keys import EXACT
from tierstore.metrics import Metrics, RankHealth
from tierstore.mover import LocalMover, RecordTier
from tierstore.nvme.page_codecs import allowed_over
from tierstore.nvme.tier import NvmeTier
from tierstore.page import PageLayout
from tierstore.policy import Known, WriteBudget, make_admission, make_history, make_policy
from tierstore.policy.registry import doubling_depth
from tierstore.types import Tier, TierDescription, exact_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from tierstore.config import HostConfig, NvmeConfig, StoreConfig
    from tierstore.gpu.device import HbmDevice
    from tierstore.gpu.engine_pages import EnginePages
    from tierstore.gpu.pool import OwnPool
    from tierstore.host.shared_memory import SharedMemory
    from tierstore.mover import Mover, SlotBytes
    from tierstore.types import PageKey

_fitting_log = logging.getLogger("tierstore.fitting")


def owns_hbm(config: StoreConfig) -> bool:
    """Return whether the store, rather than an engine, owns HBM."""
    return config.hbm is not None and config.hbm.owner == "store"


def check_sections(config: StoreConfig, layout: PageLayout) -> None:
    """Raise ConfigError if the sections contradict each other, or do not suit the pages or the machine."""
    if config.page_size is not None and config.page_size != layout.page_size:
        raise ConfigError(
            f"page_size must be {layout.page_size} (as in the PageSpec) or left out, got {config.page_size}"
        )
    if config.hbm is None and config.host is None and config.nvme is None:
        raise ConfigError(
            "the configuration has no tier; add at least one of the sections hbm, host and nvme"
        )
    if not owns_hbm(config) and config.host is None:
        raise ConfigError(
            "host is missing: a store that owns no HBM copies an engine's pages through host memory; add a host "
            "section with a capacity, or an hbm section if the store should allocate HBM itself"
        )
    if config.hbm is not None:
        require_device(config.hbm.device)
        if config.hbm.device != "cpu" and config.host is None and config.nvme is not None:
            raise ConfigError(
                f"host is missing: pages are copied between hbm.device {config.hbm.device!r} and the disk through host "
                "memory; add a host section with a capacity"
            )
    held_form(config, layout)
    if config.host is not None and config.host.codec != "none" and config.nvme is not None:
        allowed = allowed_over(config.host.codec)
        if config.nvme.codec not in allowed:
            raise ConfigError(
                f"nvme.codec must be one of {', '.join(allowed)} if host.codec is {config.host.codec!r}, got "
                f"{config.nvme.codec!r}: pages are written to disk in the form that they have in host memory"
            )
    if config.prefetch is not None:
        _fitting_log.info(
            "the prefetch section has no effect until prefetch.Prefetcher.attach(store) is called"
        )
    if config.host is not None and config.host.pin == "always" and not torch.cuda.is_available():
        raise ConfigError(
            "host.pin is 'always', but this machine has no CUDA device to page-lock memory for; set it to auto or never"
        )


def held_form(config: StoreConfig, layout: PageLayout) -> HostFormat:
    """Return the format of pages in host memory.

    Raises:
        ConfigError: The codec of host memory does not support these pages.
    """
    codec = "none" if config.host is None else config.host.codec
    try:
        return HostFormat.of(codec, layout)
    except ValueError as error:
        raise ConfigError(f"host.{error}") from error


def slots_of(section: str, capacity: int | None, pages: PageLayout | HostFormat) -> int | None:
    """Return the number of pages that fit into a memory tier, or None if ``capacity`` is None.

    Args:
        section: Name of the tier's section, for the error message.
        capacity: Size of the tier in bytes.
        pages: The format of the pages in the tier.

    Raises:
        ConfigError: The capacity is less than one page.
    """
    if capacity is None:
        return None
    nbytes = pages.page_nbytes
    slots = capacity // nbytes
    if slots == 0:
        raise ConfigError(
            f"{section}.capacity must hold at least one page of {exact_size(nbytes)}, got {exact_size(capacity)}"
        )
    return slots


def check_memory(layout: PageLayout, hbm_slots: int | None, held: HostFormat, host_slots: int | None) -> None:
    """Raise ConfigError if these slots need more memory than is free on the machine or in its control groups."""
    free = free_memory()
    wanted = {
        "hbm.capacity": (hbm_slots or 0) * layout.slot_nbytes,
        "host.capacity": (host_slots or 0) * held.slot_nbytes,
    }
    total = sum(wanted.values())
    if free is None or total <= free.nbytes:
        return
    keys = [key for key, nbytes in wanted.items() if nbytes]
    raise_limit = "raise the limit, " if "control group" in free.limit else ""
    raise ConfigError(
        f"{' and '.join(keys)} {'needs' if len(keys) == 1 else 'need'} {exact_size(total)} of memory, but "
        f"{free.described()}; lower {' or '.join(keys)}, {raise_limit}or free memory used by other programs"
    )


def check_device_memory(layout: PageLayout, hbm_slots: int | None, device: HbmDevice) -> None:
    """Raise ConfigError if these slots need more memory than is free on the device now."""
    available = device.available_nbytes()
    if hbm_slots is None or available is None or hbm_slots * layout.slot_nbytes <= available:
        return
    raise ConfigError(
        f"hbm.capacity needs {exact_size(hbm_slots * layout.slot_nbytes)} of device memory, but only "
        f"{exact_size(available)} is free; lower hbm.capacity or free device memory"
    )


_log = logging.getLogger("tierstore.assembly")

_PIN_PATIENCE_S = 600.0
_CLOSE_S = 5.0
_NO_TIERS: Mapping[Tier, tuple[TierDescription, OpenedRecords]] = MappingProxyType({})


class HostSlots(Protocol):
    """The properties of host memory that the directory needs."""

    @property
    def num_slots(self) -> int:
        """Number of slots, each of which holds one page."""
        ...

    @property
    def held(self) -> HostFormat:
        """Format of the pages in host memory."""
        ...


class Records(Protocol):
    """The properties of a record tier that the directory needs."""

    @property
    def record_nbytes(self) -> int:
        """Largest size of one page's record, in bytes."""
        ...

    @property
    def budget_nbytes(self) -> int:
        """Maximum total size of all records, in bytes."""
        ...

    def records(self) -> Iterable[tuple[PageKey, PageKey | None, int]]:
        """Return the key, the parent and the stored size in bytes of each record."""
        ...


class OpenedRecords(Records, RecordTier, Protocol):
    """A record tier that this process has opened, as the directory and the mover use it."""


@dataclass
class Parts:
    """The parts of a store.

    Attributes:
        pool: The store's HBM, or None if an engine owns HBM.
        held: The format of pages in host memory.
        ranks: Returns the health of each rank, if other processes store the bytes. None if this process
            stores them.
    """

    layout: PageLayout
    held: HostFormat
    device: HbmDevice
    pool: OwnPool | None
    arena: HostArena | None
    nvme: NvmeTier | None
    directory: Directory
    mover: Mover
    metrics: Metrics
    ranks: Callable[[], Mapping[int, RankHealth]] | None = None

    def close(self) -> None:
        """Undo a failed construction: close every tier, and remove the files that were created."""
        if self.nvme is not None:
            self.nvme.retract(_CLOSE_S)
        if self.mover.close(_CLOSE_S) and self.arena is not None:
            self.arena.close()


def assemble(
    config: StoreConfig,
    layout: PageLayout,
    wake: Callable[[], None],
    lower: Mapping[Tier, tuple[TierDescription, OpenedRecords]] = _NO_TIERS,
    *,
    name: str = "",
    shared: SharedMemory | None = None,
) -> Parts:
    """Open every tier that the configuration names.

    Args:
        lower: Further record tiers that the caller has opened, by Tier. They store pages in the format of the
            slowest memory tier, and are closed together with the other tiers.
        name: Display name of the model, stored in the marker file of the NVMe directory.
        shared: Memory of ``host_nbytes`` bytes for the HOST tier, which other processes use as well. If None, the tier
            has its own memory.

    Raises:
        ConfigError: A tier cannot be opened. Nothing is left open or changed.
    """
    check_sections(config, layout)
    device: HbmDevice = CpuDevice() if config.hbm is None else open_device(config.hbm.device)
    hbm_slots = slots_of("hbm", config.hbm.capacity if owns_hbm(config) and config.hbm else None, layout)
    held = held_form(config, layout)
    host_slots = _host_slots(config, held)
    # Other processes may have touched shared memory already, so it may not be free any more.
    own_host_slots = host_slots if shared is None else None
    check_memory(layout, hbm_slots if device.available_nbytes() is None else None, held, own_host_slots)
    check_device_memory(layout, hbm_slots, device)
    pool = None if hbm_slots is None else device.open_pool(layout, hbm_slots)
    with ExitStack() as undone:
        arena = None
        if host_slots is not None and config.host is not None:
            arena = _arena(config, config.host, layout, host_slots, shared)
            undone.callback(arena.close)
        nvme = None if config.nvme is None else _open_nvme(config.nvme, held, wake, name)
        if nvme is not None:
            undone.callback(nvme.retract, _CLOSE_S)
        metrics = Metrics()
        if arena is not None:
            metrics.watch_pinned(arena.pinned_nbytes)
        metrics.watch_ranks(lambda: {layout.shard: health(device, arena, nvme)}, apart=False)
        if nvme is not None:
            metrics.watch_disk(lambda: nvme.state)
        directory = make_directory(config, layout, pool, arena, nvme, metrics, lower)
        records: dict[Tier, RecordTier] = {} if nvme is None else {Tier.NVME: nvme}
        records |= {tier: opened for tier, (_, opened) in lower.items()}
        mover = _mover(device, pool, arena, records, wake)
        undone.pop_all()
    return Parts(layout, held, device, pool, arena, nvme, directory, mover, metrics)


def host_nbytes(config: StoreConfig, layout: PageLayout) -> int:
    """Return the size of the memory of the HOST tier, in bytes.

    Raises:
        ConfigError: This memory is not free, or the capacity is less than one page.
    """
    held = held_form(config, layout)
    slots = _host_slots(config, held)
    check_memory(layout, None, held, slots)
    return (slots or 0) * held.slot_nbytes


def health(device: HbmDevice, arena: HostArena | None, nvme: NvmeTier | None) -> RankHealth:
    """Return the health of this process: device, copy routes, pinned memory and disk. Thread-safe."""
    found = device.stats()
    slow = found["slow_copies"]
    return RankHealth(
        device=str(found["device"]),
        copies=str(found["copies"]),
        slow_copies=None if slow is None else str(slow),
        pin_nbytes=0 if arena is None else arena.pin_nbytes,
        pinned_nbytes=0 if arena is None else arena.pinned_nbytes(),
        pinning=arena is not None and arena.pinning,
        refused=None if arena is None else arena.refused,
        disk=None if nvme is None else nvme.state,
    )


def register_pages(
    config: StoreConfig, parts: Parts, pages: tuple[EnginePages, ...], wake: Callable[[], None]
) -> None:
    """Register an engine's tensors as the HBM slots of a store, and open the copy engine for them.

    Raises:
        ConfigError: The store owns HBM, the tensors do not fit, or tensors are registered already.
    """
    outgoing = parts.directory.outgoing
    if parts.directory.owns_hbm or parts.arena is None:
        raise ConfigError("register needs hbm.owner: engine, but the store owns HBM here")
    if outgoing.num_slots:
        raise ConfigError("register was already called; an engine registers its tensors once per store")
    pool = parts.device.register(parts.layout, pages)
    capacity = None if config.hbm is None else config.hbm.capacity
    nbytes = pool.num_slots * parts.layout.page_nbytes
    if capacity is not None and nbytes > capacity:
        raise ConfigError(
            f"the engine's pages take {exact_size(nbytes)}, but hbm.capacity is {exact_size(capacity)}; raise "
            "hbm.capacity or leave it out"
        )
    assert isinstance(parts.mover, LocalMover)
    parts.mover.attach(parts.device.open_copies(Between(pool, parts.arena, wake)))
    outgoing.num_slots = pool.num_slots


def make_directory(
    config: StoreConfig,
    layout: PageLayout,
    pool: OwnPool | None,
    host: HostSlots | None,
    disk: Records | None,
    metrics: Metrics,
    lower: Mapping[Tier, tuple[TierDescription, Records]] = _NO_TIERS,
) -> Directory:
    """Create a directory for these tiers, and add the pages that the record tiers already contain."""
    records = dict(lower)
    if disk is not None:
        lossy = loss_class(config) != EXACT
        read_only = config.nvme is not None and config.nvme.read_only
        records[Tier.NVME] = TierDescription("records", durable=True, lossy=lossy, read_only=read_only), disk
    known = _known(config, layout, host, pool, disk)
    directory = Directory(
        _tables(config, pool, host, records, known),
        metrics,
        page_nbytes=layout.page_nbytes,
        flush_s=0.0 if config.nvme is None else config.nvme.flush,
        history=None if known is None else known.history,
        admission=make_admission("all" if config.nvme is None else config.nvme.admission, known),
        budget=WriteBudget(None if config.nvme is None else config.nvme.daily_writes),
    )
    with _collector_paused():
        for tier in sorted(records, reverse=True):
            directory.residency.load(tier, records[tier][1].records())
    return directory


def _mover(
    device: HbmDevice,
    pool: OwnPool | None,
    arena: HostArena | None,
    records: Mapping[Tier, RecordTier],
    wake: Callable[[], None],
) -> LocalMover:
    memory: dict[Tier, SlotBytes] = {}
    if isinstance(pool, CpuPool):
        memory[Tier.HBM] = pool
    if arena is not None:
        memory[Tier.HOST] = arena
    copies = device.open_copies(Between(pool, arena, wake)) if pool and arena else None
    return LocalMover(memory, copies, records)


def _host_slots(config: StoreConfig, held: HostFormat) -> int | None:
    return slots_of("host", config.host.capacity if config.host else None, held)


def _arena(
    config: StoreConfig, host: HostConfig, layout: PageLayout, num_slots: int, shared: SharedMemory | None
) -> HostArena:
    """Allocate host memory, and pin it if the configuration requests that.

    With ``pin: always``, all memory is pinned before the function returns. With ``pin: auto``, only the first
    part is, and the rest is pinned in the background.

    Raises:
        ConfigError: ``pin`` is ``always``, and the memory could not be pinned.
    """
    device = "cpu" if config.hbm is None else config.hbm.device
    if host.pin == "never" or (host.pin == "auto" and device == "cpu"):
        return HostArena(layout, num_slots, codec=host.codec, shared=shared)
    arena = HostArena(layout, num_slots, pinner(device), codec=host.codec, shared=shared)
    first = max(1, FIRST_NBYTES // arena.held.slot_nbytes)
    if (
        not arena.wait_pinned(num_slots if host.pin == "always" else first, _PIN_PATIENCE_S)
        and host.pin == "always"
    ):
        why = arena.refused
        arena.close()
        raise ConfigError(
            f"host.pin is 'always', but page-locking {exact_size(arena.nbytes)} failed: {why}; "
            "raise the limit, or set host.pin to auto or never"
        )
    return arena


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's cyclic garbage collector.

    Without this pause, the collector repeatedly traverses the objects of up to a million pages, which takes
    half of the time needed to open a store.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _open_nvme(config: NvmeConfig, held: HostFormat, wake: Callable[[], None], name: str) -> NvmeTier:
    layout = held.layout
    if config.codec != "none" and not saves(config.codec, layout):
        _log.warning(
            "nvme.codec is %r, which does not make pages of %s smaller; codecs that do: %s",
            config.codec,
            " and ".join(dict.fromkeys(spec.dtype for spec in layout.specs)),
            ", ".join(name for name in LOSS_CLASSES if saves(name, layout)) or "no codec",
        )
    return NvmeTier.open(
        config.path,
        capacity=config.capacity,
        fingerprint=layout.fingerprint,
        shard=layout.shard,
        page_nbytes=layout.blob_nbytes,
        wake=wake,
        description={"groups": [asdict(spec) for spec in layout.specs]} | ({"name": name} if name else {}),
        readers=None if config.readers == "auto" else config.readers,
        timeout_s=config.timeout,
        payload=config.payload,
        codec=config.codec,
        layout=layout,
        held=held.codec,
        read_only=config.read_only,
    )


def _known(
    config: StoreConfig,
    layout: PageLayout,
    arena: HostSlots | None,
    pool: OwnPool | None,
    nvme: Records | None,
) -> Known | None:
    """Return the page history and the recompute cost for the policies, or None if no policy needs them."""
    sections = [section for section in (config.hbm, config.host, config.nvme) if section is not None]
    names = [section.policy for section in sections] + [config.nvme.admission if config.nvme else "all"]
    pages = sum(memory.num_slots for memory in (arena, pool) if memory is not None)
    history = make_history(names, pages + (0 if nvme is None else nvme.budget_nbytes // nvme.record_nbytes))
    if history is None:
        return None
    return Known(history, min(doubling_depth(spec) for spec in layout.specs))


def loss_class(config: StoreConfig) -> str:
    """Return the loss class of pages that pass through all tiers.

    Stores with different loss classes have different keys.
    """
    return LOSS_CLASSES[config.codec]


def _tables(
    config: StoreConfig,
    pool: OwnPool | None,
    arena: HostSlots | None,
    records: Mapping[Tier, tuple[TierDescription, Records]],
    known: Known | None,
) -> dict[Tier, TierTable]:
    tables: dict[Tier, TierTable] = {}
    if config.hbm is not None and pool is not None:
        tables[Tier.HBM] = TierTable(
            make_policy(config.hbm.policy, known, pool.num_slots), num_slots=pool.num_slots
        )
    if config.host is not None and arena is not None:
        tables[Tier.HOST] = TierTable(
            make_policy(config.host.policy, known, arena.num_slots),
            num_slots=arena.num_slots,
            lossy=arena.held.encoded,
        )
    for tier, (described, found) in records.items():
        policy = config.nvme.policy if tier == Tier.NVME and config.nvme is not None else "lru"
        tables[tier] = TierTable(
            make_policy(policy, known, max(1, found.budget_nbytes // found.record_nbytes)),
            budget_nbytes=found.budget_nbytes,
            record_nbytes=found.record_nbytes,
            durable=described.durable,
            lossy=described.lossy,
            read_only=described.read_only,
        )
    return tables
