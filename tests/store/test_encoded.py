"""Tests of a disk with a lossless codec: matches are exact, bytes are unchanged, capacity counts stored bytes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.support.pages import PATIENCE_S, chain, page_tensor, tier_stats
from tierstore.config import load_config
from tierstore.page import PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

SPEC = PageSpec(num_layers=4, page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16", model="encoded")

opened_with = {"payload": "auto"}
"""The payload setting with which stores are opened. Each test runs once per kind of payload."""


@pytest.fixture(params=["lmdb", "extents"], autouse=True)
def payload(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(opened_with, "payload", str(request.param))


def open_store(home: Path, codec: str, capacity: int = 8 << 20) -> TierStore:
    tree = {
        "hbm": {"capacity": 8 * SPEC.page_nbytes, "device": "cpu"},
        "host": {"capacity": 8 * SPEC.page_nbytes},
        "nvme": {"path": str(home), "capacity": capacity, "codec": codec, "payload": opened_with["payload"]},
    }
    return TierStore.open(load_config(tree), SPEC)


def content(key: PageKey, *, noise: bool = False) -> torch.Tensor:
    """Return the page of a key: normally distributed numbers, or random bits if ``noise``."""
    seed = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    if noise:
        return torch.randint(-(1 << 15), 1 << 15, SPEC.shape, dtype=torch.int16, generator=seed).view(
            torch.bfloat16
        )
    return torch.randn(SPEC.shape, generator=seed).to(torch.bfloat16)


def put(store: TierStore, keys: Sequence[PageKey], *, noise: Sequence[PageKey] = ()) -> None:
    slots = store.allocate(len(keys), timeout_s=PATIENCE_S)
    for key, slot in zip(keys, slots, strict=True):
        page_tensor(store)[slot] = content(key, noise=key in noise)
    store.put(keys, slots)


def used_and_live(store: TierStore) -> tuple[int, int]:
    """Return the bytes in use on disk, as counted by the directory's table and by the tier."""
    nvme = store.stats()["nvme"]
    assert isinstance(nvme, dict)
    return tier_stats(store, Tier.NVME)["used_nbytes"], nvme["live_nbytes"]


def require_from_disk(store: TierStore, keys: Sequence[PageKey]) -> None:
    for tier in (Tier.HBM, Tier.HOST):
        store.evict(keys, tier)
    found = store.match(keys)
    assert (found.num_pages, found.exact) == (len(keys), True)
    assert set(found.tiers) == {Tier.NVME}
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == len(keys)
        for key, slot in zip(keys, lease.slots, strict=True):
            assert torch.equal(page_tensor(store)[slot].view(torch.int16), content(key).view(torch.int16))


def test_pages_are_read_back_exactly_and_take_their_stored_size(tmp_path: Path) -> None:
    keys = chain(6)
    with open_store(tmp_path / "disk", "exp") as store:
        put(store, keys)
        store.flush()
        used, resident = tier_stats(store, Tier.NVME)["used_nbytes"], tier_stats(store, Tier.NVME)["resident"]
        nvme = store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert resident == 6
        assert used == nvme["live_nbytes"] < 0.85 * 6 * nvme["record_nbytes"]
        require_from_disk(store, keys)
        store.check()
    with open_store(tmp_path / "disk", "exp") as store:
        assert tier_stats(store, Tier.NVME)["used_nbytes"] == used
        require_from_disk(store, keys)


def test_evicted_page_frees_its_stored_size(tmp_path: Path) -> None:
    keys = chain(6)
    noise = keys[3:]
    with open_store(tmp_path / "disk", "exp") as store:
        put(store, keys, noise=noise)  # one transfer, two sizes
        store.flush()
        before, live = used_and_live(store)
        assert before == live
        store.evict(noise)
        store.flush()
        after, live = used_and_live(store)
        assert after == live < before / 2
        require_from_disk(store, keys[:3])
        store.evict(keys)
        store.flush()
        assert used_and_live(store) == (0, 0)


def test_the_disk_holds_more_pages_than_without_the_codec(tmp_path: Path) -> None:
    held = {}
    for codec in ("none", "exp"):
        with open_store(tmp_path / codec, codec, 8 << 20) as store:
            for number in range(70):
                put(store, chain(4, f"{codec}{number}"))
                store.flush()
            figures = tier_stats(store, Tier.NVME)
            nvme = store.stats()["nvme"]
            assert isinstance(nvme, dict)
            held[codec] = figures["resident"]
            assert figures["used_nbytes"] <= figures["budget_nbytes"]
            assert figures["used_nbytes"] == nvme["live_nbytes"]
            assert nvme["disk_nbytes"] <= 8 << 20
            store.check()
    assert held["exp"] > 1.05 * held["none"]


def test_a_directory_may_change_its_codec_between_openings(tmp_path: Path) -> None:
    first, second = chain(3, "first"), chain(3, "second")
    for codec, keys in (("none", first), ("exp", second)):
        with open_store(tmp_path / "disk", codec) as store:
            put(store, keys)
    for codec in ("exp", "none"):
        with open_store(tmp_path / "disk", codec) as store:
            require_from_disk(store, first)
            require_from_disk(store, second)
            assert not tier_stats(store, Tier.NVME)["arriving"]


@pytest.mark.parametrize(
    ("codec", "dtype", "warned"),
    [
        (
            "exp",
            "float32",
            "exp', which does not make pages of float32 smaller; codecs that do: fp8, fp8+zstd, int8",
        ),
        ("int8", "int8", "int8', which does not make pages of int8 smaller; codecs that do: no codec"),
        ("exp", "bfloat16", None),
        ("int8", "float32", None),
        ("none", "float32", None),
    ],
)
def test_codec_that_cannot_compress_these_pages_is_logged_once_at_open(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str, dtype: str, warned: str | None
) -> None:
    spec = PageSpec(num_layers=2, page_size=8, num_kv_heads=2, head_dim=32, dtype=dtype, model="saves")
    nvme = {"path": str(tmp_path / "store"), "capacity": "16MiB", "codec": codec}
    with (
        caplog.at_level(logging.WARNING),
        TierStore.open(
            load_config({"hbm": {"capacity": "1MiB", "device": "cpu"}, "nvme": nvme}), spec
        ) as store,
    ):
        store.put(store.keys(range(16)), store.allocate(2))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (warned is not None)
    assert warned is None or warned in said[0]
