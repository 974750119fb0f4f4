"""Pages whose bytes are derived from their keys, small configurations, and functions that fill and read a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import shake_128
from pathlib import Path

import numpy as np
import pytest
import torch

from tierstore import codecs
from tierstore.config import StoreConfig, load_config
from tierstore.gpu.pool import GroupedPages
from tierstore.lease import Lease
from tierstore.nvme.record_format import record_nbytes
from tierstore.page import DTYPE_NBYTES, PageLayout, PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

PATIENCE_S = 60.0

DEVICE = "cpu"
"""The device of HBM in ``tiers``. `pytest --hbm-device cuda:0` runs the same tests on a GPU."""

SPEC = PageSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float16", model="test")


def chain(length: int, name: str = "") -> list[PageKey]:
    """Return distinct 36-byte keys for the pages of one sequence, like those that ``TierStore.keys`` returns."""
    return [PageKey(shake_128(f"{name}/{i}".encode()).digest(32) + bytes(4)) for i in range(length)]


STEADY: str | None = None
"""Name of a lossy codec, or None. If set, ``content`` returns pages that this codec does not change.

Tests can then compare every byte although the store has a lossy codec.
"""


def content(key: PageKey, spec: PageSpec = SPEC) -> torch.Tensor:
    """Return the content of a key's page as a tensor of ``spec.shape``: random bytes derived from the key.

    If ``STEADY`` is set, the codec that it names does not change the page. Compare pages with ``same``, because some
    elements are NaN.
    """
    raw = shake_128(key + spec.fingerprint.encode()).digest(spec.page_nbytes)
    if STEADY is not None:
        raw = _steady(raw, spec, STEADY)
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(spec.shape)


@cache
def _steady(raw: bytes, spec: PageSpec, name: str) -> bytes:
    """Return a page that the codec ``name`` does not change.

    Its elements are a few different integers, so that the codec can compress the page. The page is encoded and decoded
    until it no longer changes.
    """
    layout = PageLayout.of(spec)
    encoder, decoder = codecs.encoder(name, layout), codecs.decoder(name, layout)
    assert encoder is not None
    assert decoder is not None
    numbers = (np.frombuffer(raw, dtype=np.uint8)[: spec.page_nbytes // 2] % 5).astype(np.float16)
    assert spec.dtype == "float16"
    page, payload = numbers.view(np.uint8), np.empty(spec.page_nbytes, dtype=np.uint8)
    for _ in range(3):
        length = encoder.encode(page, payload)
        assert length is not None
        page = np.empty_like(page)
        decoder.decode(payload[:length], page)
    return page.tobytes()


def same(page: torch.Tensor, key: PageKey, spec: PageSpec = SPEC) -> bool:
    """Return whether a page has exactly the bytes of ``content(key)``."""
    want = content(key, spec)
    return torch.equal(page.cpu().contiguous().view(torch.uint8), want.view(torch.uint8))


def nvme_capacity(pages: int, nbytes: int = SPEC.page_nbytes) -> int:
    """Return a disk capacity in bytes that is enough for at least ``pages`` pages."""
    return (512 << 10) + pages * 4 * (record_nbytes(nbytes) + 4096)


def tiers(
    hbm: int | None = 4,
    host: int | None = 8,
    nvme: Path | None = None,
    *,
    nvme_pages: int = 200,
    page_nbytes: int = SPEC.page_nbytes,
    hbm_more: Mapping[str, object] | None = None,
    host_more: Mapping[str, object] | None = None,
    nvme_more: Mapping[str, object] | None = None,
) -> StoreConfig:
    """Return a configuration with this many pages per tier. None leaves a tier out."""
    if DEVICE != "cpu" and hbm is not None and host is None and nvme is not None:
        pytest.skip("pages of a GPU go to disk through host memory")
    source: dict[str, object] = {}
    if hbm is not None:
        source["hbm"] = {"capacity": hbm * page_nbytes, "device": DEVICE, **(hbm_more or {})}
    if host is not None:
        pin = "never" if DEVICE == "cpu" else "always"
        source["host"] = {"capacity": host * page_nbytes, "pin": pin, **(host_more or {})}
    if nvme is not None:
        capacity = nvme_capacity(nvme_pages, page_nbytes)
        source["nvme"] = {"path": nvme, "capacity": capacity, "flush": "10ms", **(nvme_more or {})}
    return load_config(source)


def page_tensor(store: TierStore) -> torch.Tensor:
    """Return ``store.pages`` of a store with one KV group."""
    pages = store.pages
    assert not isinstance(pages, GroupedPages)
    return pages


def fill(store: TierStore, keys: Sequence[PageKey], slots: Sequence[int], spec: PageSpec = SPEC) -> None:
    """Write the content of each key into its slot."""
    pages = page_tensor(store)
    assert DTYPE_NBYTES[spec.dtype] == pages.element_size()
    for key, slot in zip(keys, slots, strict=True):
        pages[slot].copy_(content(key, spec))
    settle()


def settle() -> None:
    """Wait until the device has finished all writes, so that pages can be put without an event."""
    if DEVICE != "cpu":
        torch.cuda.synchronize(DEVICE)


def write(
    store: TierStore, keys: Sequence[PageKey], lease: Lease | None = None, timeout_s: float = PATIENCE_S
) -> list[int]:
    """Allocate slots, fill them and put them, as an engine does. Return the slots that contain the pages."""
    slots = store.allocate(len(keys), timeout_s)
    fill(store, keys, slots)
    return store.put(keys, slots, lease=lease)


def write_each(store: TierStore, keys: Sequence[PageKey]) -> None:
    """Write a sequence page by page, so that it may be longer than HBM. Each write leases the previous page."""
    for i, key in enumerate(keys):
        with store.acquire(keys[max(0, i - 1) : i]) as lease:
            lease.wait(PATIENCE_S)
            write(store, [key], lease)


def require_right(store: TierStore, lease: Lease, spec: PageSpec = SPEC) -> None:
    """Assert that every page of a READY lease has the bytes of its key."""
    pages = page_tensor(store)
    for key, slot in zip(lease.keys, lease.slots, strict=False):
        assert same(pages[slot], key, spec)


def read(store: TierStore, keys: Sequence[PageKey], spec: PageSpec = SPEC) -> int:
    """Acquire pages, wait, check every byte, and release. Return the number of pages that the lease covered."""
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
        require_right(store, lease, spec)
        return lease.num_pages


def read_soon(store: TierStore, keys: Sequence[PageKey], spec: PageSpec = SPEC) -> int:
    """Read repeatedly until all matching pages are served, as a scheduler does if HBM has no space for all of them.

    Return the number of pages of the last lease.
    """
    for _ in range(200):
        served = read(store, keys, spec)
        if served == store.match(keys).num_pages:
            return served
        store.drain(0.05)
    return served


def let_deadline_come(store: TierStore, lease: Lease) -> None:
    """Make a lease reach its deadline now, and let the store handle that."""
    assert lease._record.deadline is not None
    lease._record.deadline = 0.0
    store.check()  # this call advances the store, and reports no slots


def where(store: TierStore, key: PageKey) -> dict[Tier, str]:
    """Return the tiers that have a copy of the page, with the state of the copy: "ready" or "arriving"."""
    copies = store.explain([key])[0]["copies"]
    assert isinstance(copies, dict)
    return {Tier[name]: copy["state"] for name, copy in copies.items()}


def write_down(store: TierStore, keys: list[PageKey], tier: Tier) -> None:
    """Write pages and demote them to ``tier``, so that no other tier has a copy of them."""
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(PATIENCE_S)
    assert {tuple(where(store, key)) for key in keys} == {(tier,)}


def tier_stats(store: TierStore, tier: Tier) -> dict[str, int]:
    """Return the figures of one tier in ``stats()``."""
    found = store.stats()["tiers"]
    assert isinstance(found, dict)
    figures = found[tier.name]
    assert isinstance(figures, dict)
    return figures


def records(store: TierStore) -> object:
    """Return the number of pages in the NVMe tier."""
    nvme = store.stats()["nvme"]
    assert isinstance(nvme, dict)
    return nvme["records"]


def counter(store: TierStore, name: str, labels: str) -> float:
    """Return one counter of ``stats()``, or 0 if it was never incremented."""
    found = store.stats()["counters"]
    assert isinstance(found, dict)
    value = found[name].get(labels, 0.0)
    assert isinstance(value, float)
    return value


def require_nothing_held(store: TierStore, patience_s: float = PATIENCE_S) -> None:
    """Assert that nothing stays pinned or in flight, and that all HBM slots can be allocated.

    Call this without open leases and without owned slots.
    """
    held: dict[str, int] = {}
    for _ in range(20):  # a timed spill may start at any call
        assert store.drain(patience_s), "the store is still not idle"
        tiers = store.stats()["tiers"]
        assert isinstance(tiers, dict)
        held = {
            f"{name} {state}": figures[state]
            for name, figures in tiers.items()
            for state in ("pinned", "owned", "quarantined", "arriving")
        }
        if not any(held.values()):
            break
    assert not any(held.values()), f"still held: {held}"
    store.check()
    slots = len(page_tensor(store))
    assert len(store.allocate(slots, timeout_s=patience_s)) == slots
