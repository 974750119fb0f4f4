"""Whether a configuration fits together, and fits the pages and the machine; how many pages its sizes are.

Nothing is opened, nothing is taken: what does not fit is a ConfigError that names the key, its value and what is
allowed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from tierstore.codecs.held import Held
from tierstore.errors import ConfigError
from tierstore.gpu.device import require_device
from tierstore.host.memory import available_nbytes
from tierstore.nvme.record import allowed_over
from tierstore.page import PageLayout

if TYPE_CHECKING:
    from tierstore.config import StoreConfig
    from tierstore.gpu.device import HbmDevice

_log = logging.getLogger(__name__)


def owns_hbm(config: StoreConfig) -> bool:
    """Whether HBM is the store's own, not an engine's."""
    return config.hbm is not None and config.hbm.owner == "store"


def check_sections(config: StoreConfig, layout: PageLayout) -> None:
    """ConfigError for sections that do not go together, or with these pages, or with this machine's devices."""
    if config.page_size is not None and config.page_size != layout.page_size:
        raise ConfigError(
            f"page_size is {config.page_size}; allowed: {layout.page_size}, the page_size of the PageSpec, or none"
        )
    if config.hbm is None and config.host is None and config.nvme is None:
        raise ConfigError("the configuration names no tier; allowed: at least one of hbm, host, nvme")
    if not owns_hbm(config) and config.host is None:
        raise ConfigError(
            "host is missing; without HBM of its own the store serves an engine, and copies through host memory; "
            "allowed: an hbm section, or a host section with a capacity"
        )
    if config.hbm is not None:
        require_device(config.hbm.device)
        if config.hbm.device != "cpu" and config.host is None and config.nvme is not None:
            raise ConfigError(
                f"host is missing; pages go between hbm.device {config.hbm.device!r} and the disk through host memory; "
                "allowed: a host section with a capacity"
            )
    held_form(config, layout)
    if config.host is not None and config.host.codec != "none" and config.nvme is not None:
        allowed = allowed_over(config.host.codec)
        if config.nvme.codec not in allowed:
            raise ConfigError(
                f"nvme.codec is {config.nvme.codec!r}; allowed with host.codec {config.host.codec!r}, as which pages "
                f"come from memory: {', '.join(allowed)}"
            )
    if config.prefetch is not None:
        _log.info("the prefetch section has its effect once prefetch.Prefetcher.attach(store) was called")
    if config.host is not None and config.host.pin == "always" and not torch.cuda.is_available():
        raise ConfigError(
            "host.pin is 'always', but no CUDA device is there to pin for; allowed here: auto, never"
        )


def held_form(config: StoreConfig, layout: PageLayout) -> Held:
    """How host memory holds pages. ConfigError for a codec that does not suit them."""
    codec = "none" if config.host is None else config.host.codec
    try:
        return Held.of(codec, layout)
    except ValueError as error:
        raise ConfigError(f"host.codec is {codec!r}; allowed: {error}") from error


def slots_of(section: str, capacity: int | None, pages: PageLayout | Held) -> int | None:
    """Pages of a memory tier, None without a capacity. ConfigError if not even one fits."""
    if capacity is None:
        return None
    nbytes = pages.page_nbytes
    slots = capacity // nbytes
    if slots == 0:
        raise ConfigError(
            f"{section}.capacity is {capacity} bytes; allowed: at least one page, {nbytes} bytes"
        )
    return slots


def check_memory(layout: PageLayout, hbm_slots: int | None, held: Held, host_slots: int | None) -> None:
    """ConfigError if so many slots need more memory than is available now."""
    available = available_nbytes()
    wanted = {
        "hbm.capacity": (hbm_slots or 0) * layout.slot_nbytes,
        "host.capacity": (host_slots or 0) * held.slot_nbytes,
    }
    total = sum(wanted.values())
    if available is None or total <= available:
        return
    parts = ", ".join(f"{key} {nbytes}" for key, nbytes in wanted.items() if nbytes)
    raise ConfigError(
        f"{parts} bytes need {total} bytes of memory; allowed: at most {available} that are available"
    )


def check_device_memory(layout: PageLayout, hbm_slots: int | None, device: HbmDevice) -> None:
    """ConfigError if so many slots need more than is free on the device now."""
    available = device.available_nbytes()
    if hbm_slots is None or available is None or hbm_slots * layout.slot_nbytes <= available:
        return
    raise ConfigError(
        f"hbm.capacity needs {hbm_slots * layout.slot_nbytes} bytes of device memory; "
        f"allowed: at most {available} that are free"
    )
