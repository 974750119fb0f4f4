"""Pages whose every byte follows from their key, small configurations, and a caller that fills and reads a store."""

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
"""Where ``tiers`` puts HBM: `pytest --hbm-device cuda:0` runs the same tests on a card."""

SPEC = PageSpec(num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float16", model="test")


def chain(length: int, name: str = "") -> list[PageKey]:
    """Keys of one sequence, as ``TierStore.keys`` would make them: 36 bytes each, no two alike."""
    return [PageKey(shake_128(f"{name}/{i}".encode()).digest(32) + bytes(4)) for i in range(length)]


STEADY: str | None = None
"""A codec that gives every ``content`` back as it was: then a store that loses something is held to every byte."""


def content(key: PageKey, spec: PageSpec = SPEC) -> torch.Tensor:
    """The page of a key: raw bytes seen as the spec's dtype (compare with ``same``: some are NaN), or ``STEADY``."""
    raw = shake_128(key + spec.fingerprint.encode()).digest(spec.page_nbytes)
    if STEADY is not None:
        raw = _steady(raw, spec, STEADY)
    dtype = getattr(torch, spec.dtype)
    assert isinstance(dtype, torch.dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).view(spec.shape)


@cache
def _steady(raw: bytes, spec: PageSpec, name: str) -> bytes:
    """A page of few whole numbers, so that codes can be compressed, encoded and decoded often enough."""
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
    """Whether a page holds exactly the bytes of its key."""
    want = content(key, spec)
    return torch.equal(page.cpu().contiguous().view(torch.uint8), want.view(torch.uint8))


def nvme_capacity(pages: int, nbytes: int = SPEC.page_nbytes) -> int:
    """A capacity on disk that holds at least ``pages`` pages."""
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
    """A configuration with so many pages in each tier; None: the tier is not there."""
    if DEVICE != "cpu" and hbm is not None and host is None and nvme is not None:
        pytest.skip("pages of a card go to disk through host memory")
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
    """``store.pages`` of a store with one KV group."""
    pages = store.pages
    assert not isinstance(pages, GroupedPages)
    return pages


def fill(store: TierStore, keys: Sequence[PageKey], slots: Sequence[int], spec: PageSpec = SPEC) -> None:
    """Writes each key's content into its slot."""
    pages = page_tensor(store)
    assert DTYPE_NBYTES[spec.dtype] == pages.element_size()
    for key, slot in zip(keys, slots, strict=True):
        pages[slot].copy_(content(key, spec))
    settle()


def settle() -> None:
    """Waits for the device: what is put next has been written, as it has on the CPU, and need not wait for an event."""
    if DEVICE != "cpu":
        torch.cuda.synchronize(DEVICE)


def write(
    store: TierStore, keys: Sequence[PageKey], lease: Lease | None = None, timeout_s: float = PATIENCE_S
) -> list[int]:
    """What an engine does: allocate, compute, seal. The slots that hold the pages."""
    slots = store.allocate(len(keys), timeout_s)
    fill(store, keys, slots)
    return store.put(keys, slots, lease=lease)


def write_each(store: TierStore, keys: Sequence[PageKey]) -> None:
    """Writes a sequence page by page, each after the one before, so that it may be longer than HBM less one."""
    for i, key in enumerate(keys):
        with store.acquire(keys[max(0, i - 1) : i]) as lease:
            lease.wait(PATIENCE_S)
            write(store, [key], lease)


def require_right(store: TierStore, lease: Lease, spec: PageSpec = SPEC) -> None:
    """Every covered page of a READY lease has the bytes of its key."""
    pages = page_tensor(store)
    for key, slot in zip(lease.keys, lease.slots, strict=False):
        assert same(pages[slot], key, spec)


def read(store: TierStore, keys: Sequence[PageKey], spec: PageSpec = SPEC) -> int:
    """Acquires, waits, checks every byte, releases; how many pages were served."""
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
        require_right(store, lease, spec)
        return lease.num_pages


def read_soon(store: TierStore, keys: Sequence[PageKey], spec: PageSpec = SPEC) -> int:
    """Reads until HBM had room for all that matched, as a scheduler does; how many pages were served."""
    for _ in range(200):
        served = read(store, keys, spec)
        if served == store.match(keys).num_pages:
            return served
        store.drain(0.05)
    return served


def let_deadline_come(store: TierStore, lease: Lease) -> None:
    """The deadline of a lease comes now, after all that its acquire has begun, however slow the machine is."""
    assert lease._record.deadline is not None
    lease._record.deadline = 0.0
    store.check()  # it advances the store, and reports no slots


def where(store: TierStore, key: PageKey) -> dict[Tier, str]:
    """Tiers that have a copy of the page, and its state: "ready" or "arriving"."""
    copies = store.explain([key])[0]["copies"]
    assert isinstance(copies, dict)
    return {Tier[name]: copy["state"] for name, copy in copies.items()}


def write_down(store: TierStore, keys: list[PageKey], tier: Tier) -> None:
    """The pages are in one tier alone."""
    write(store, keys)
    store.demote(keys, tier)
    assert store.drain(PATIENCE_S)
    assert {tuple(where(store, key)) for key in keys} == {(tier,)}


def tier_stats(store: TierStore, tier: Tier) -> dict[str, int]:
    """The figures ``stats()`` gives of one tier."""
    found = store.stats()["tiers"]
    assert isinstance(found, dict)
    figures = found[tier.name]
    assert isinstance(figures, dict)
    return figures


def records(store: TierStore) -> object:
    """How many pages the NVMe tier has."""
    nvme = store.stats()["nvme"]
    assert isinstance(nvme, dict)
    return nvme["records"]


def counter(store: TierStore, name: str, labels: str) -> float:
    """One counter of ``stats()``, 0 if it never counted."""
    found = store.stats()["counters"]
    assert isinstance(found, dict)
    value = found[name].get(labels, 0.0)
    assert isinstance(value, float)
    return value


def require_nothing_held(store: TierStore, patience_s: float = PATIENCE_S) -> None:
    """With no lease open and no slot owned, nothing is pinned or on its way for good, and all of HBM can be had."""
    held: dict[str, int] = {}
    for _ in range(20):  # a timed spill may begin at any call
        assert store.drain(patience_s), "something never ends"
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
