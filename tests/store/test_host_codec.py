"""Tests of host memory with a codec: more pages fit, they go to disk still encoded, and lose precision only once."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support import lanes
from tests.support import pages as support
from tests.support.pages import PATIENCE_S, chain, page_tensor, tier_stats, where
from tierstore import codecs
from tierstore.archive import closed_store, intake
from tierstore.codecs.host_format import HostFormat, Packer
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.keys import namespace
from tierstore.nvme.direct_io import aligned
from tierstore.nvme.reader import scratch_for
from tierstore.nvme.record_format import Codec, Head, parse
from tierstore.page import PageLayout, PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

SPEC = PageSpec(num_layers=4, page_size=64, num_kv_heads=2, head_dim=64, dtype="bfloat16", model="host codec")
LAYOUT = PageLayout.of(SPEC)
FIXED = ["fp8", "int8", "k8v4", "int4", "int4-64"]


def config(
    home: Path | None,
    codec: str = "int8",
    disk: str = "none",
    *,
    hbm: int = 6,
    host: int = 8,
    payload: str = "lmdb",
    owner: str = "store",
) -> dict[str, object]:
    hbm_section = {"device": support.DEVICE, "owner": owner}
    if owner == "store":
        hbm_section["capacity"] = str(hbm * SPEC.page_nbytes)
    tree: dict[str, object] = {
        "hbm": hbm_section,
        "host": {"capacity": host * SPEC.page_nbytes, "codec": codec},
    }
    if home is not None:
        tree["nvme"] = {"path": str(home), "capacity": 16 << 20, "codec": disk, "payload": payload}
    return tree


def open_store(home: Path | None, codec: str = "int8", disk: str = "none", **more: object) -> TierStore:
    return TierStore.open(load_config(config(home, codec, disk, **more)), SPEC)  # type: ignore[arg-type]


def content(key: PageKey) -> torch.Tensor:
    seed = torch.Generator().manual_seed(int.from_bytes(key[:7], "big"))
    return torch.randn(SPEC.shape, generator=seed).to(torch.bfloat16)


def put(store: TierStore, keys: Sequence[PageKey], pages: Sequence[torch.Tensor] | None = None) -> list[int]:
    slots = store.allocate(len(keys), timeout_s=PATIENCE_S)
    for index, (key, slot) in enumerate(zip(keys, slots, strict=True)):
        page_tensor(store)[slot] = content(key) if pages is None else pages[index]
    return store.put(keys, slots)


def read(store: TierStore, keys: Sequence[PageKey]) -> list[torch.Tensor]:
    with store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == len(keys)
        return [page_tensor(store)[slot].cpu().clone() for slot in lease.slots]


def same(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def error(page: torch.Tensor, key: PageKey) -> float:
    return float((page.float() - content(key).float()).norm() / content(key).float().norm())


def on_disk(store: TierStore, key: PageKey) -> Head:
    """Return the head of a page's record on disk."""
    assert store._parts.nvme is not None
    reader = store._parts.nvme._catalogue.reader
    raw, _ = reader.record(key, aligned(SPEC.page_nbytes), scratch_for(SPEC.page_nbytes))
    return parse(raw)


@pytest.mark.parametrize("codec", FIXED)
def test_more_encoded_pages_fit_within_the_error_bound_and_are_marked_inexact(codec: str) -> None:
    nbytes = codecs.fixed_nbytes(codec, LAYOUT)
    assert nbytes is not None
    keys = chain(4, "a")
    with open_store(None, codec) as store:
        host = tier_stats(store, Tier.HOST)
        assert host["num_slots"] == 8 * SPEC.page_nbytes // nbytes > 14
        assert host["payload_nbytes"] <= 8 * SPEC.page_nbytes
        put(store, keys)
        assert store.match(keys).exact
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        found = store.match(keys)
        assert (found.tiers, found.exact) == ((Tier.HOST,) * 4, False)
        assert store.match(keys, exact=True).num_pages == 0
        pages = read(store, keys)
        assert all(0 < error(page, key) < 0.2 for page, key in zip(pages, keys, strict=True))
        assert not store.match(keys).exact  # in HBM again, but not with the bytes that were put
        store.check()


def test_lease_reports_the_end_of_its_exact_pages_in_any_tier() -> None:
    """Lease runs of pages that are in the same tier: one continues past the first inexact page, one ends before it."""
    keys = chain(6, "a")
    with open_store(None) as store:
        put(store, keys)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        put(store, keys[:2])
        for tiers in ((Tier.HBM,) * 2 + (Tier.HOST,) * 4, (Tier.HBM,) * 6):
            assert store.match(keys).tiers == tiers
            with store.acquire(keys, exact=True) as lease:
                assert lease.wait(PATIENCE_S) is LeaseState.READY
                assert (lease.num_pages, lease.exact, lease.missing_because) == (2, True, "inexact")
            with store.acquire(keys[:2]) as lease, store.acquire(keys) as longer:
                assert longer.wait(PATIENCE_S) is LeaseState.READY
                assert (lease.exact, longer.num_pages, longer.exact) == (True, 6, False)
                assert longer._record.inexact_from == 2
            store.check()


@pytest.mark.parametrize(
    ("codec", "disk", "payload"),
    lanes.some(
        [
            (codec, disk, payload)
            for codec, disk in [
                *((codec, "none") for codec in FIXED),
                *((codec, codec) for codec in FIXED),
                ("int8", "int8+zstd"),
                ("fp8", "fp8+zstd"),
            ]
            for payload in ("lmdb", "extents")
        ],
        lambda codec, disk, payload: payload == "extents" or codec == "int8",
    ),
)
def test_encoded_pages_are_written_to_disk_unchanged_and_read_back_unchanged(
    tmp_path: Path, codec: str, disk: str, payload: str
) -> None:
    keys = chain(4, "a")
    with open_store(tmp_path / "disk", codec, disk, payload=payload) as store:
        put(store, keys)
        store.flush()
        store.evict(keys, Tier.HBM)
        once = read(store, keys)  # from HOST
        head = on_disk(store, keys[0])
        assert head.raw_nbytes == SPEC.page_nbytes
        if disk.endswith("+zstd"):
            assert head.codec is {"int8": Codec.INT8_ZSTD, "fp8": Codec.FP8_ZSTD}[codec]
            assert head.stored_nbytes < (codecs.fixed_nbytes(codec, LAYOUT) or 0)
        else:
            assert head.stored_nbytes == codecs.fixed_nbytes(codec, LAYOUT)
        assert tier_stats(store, Tier.NVME)["used_nbytes"] < 0.75 * 4 * SPEC.page_nbytes
        for tier in (Tier.HBM, Tier.HOST):
            store.evict(keys, tier)
        assert set(store.match(keys).tiers) == {Tier.NVME}
        assert same(read(store, keys), once)
        store.check()
    with open_store(tmp_path / "disk", codec, disk, payload=payload) as store:
        assert (store.match(keys).num_pages, store.match(keys).exact) == (4, False)
        assert same(read(store, keys), once)


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
def test_a_page_moved_down_and_up_many_times_is_altered_only_once(codec: str) -> None:
    keys = chain(3, "a")
    with open_store(None, codec) as store:
        put(store, keys)
        found = []
        for _ in range(12):
            store.demote(keys, Tier.HOST)
            assert store.drain(PATIENCE_S)
            found.append(read(store, keys))
            store.evict(keys, Tier.HOST)
        assert store.match(keys).tiers == (Tier.HBM,) * 3
        first, last = found[0], found[-1]
        assert same(found[1], last)
        for page, again, key in zip(first, last, keys, strict=True):
            assert (page != again).float().mean() < 0.02
            assert error(again, key) <= 1.01 * error(page, key)


@pytest.mark.parametrize("home", [True, False])
def test_unrepresentable_page_is_dropped_and_counted_and_no_other_page_is_lost(
    tmp_path: Path, home: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys, others = chain(3, "a"), chain(3, "b")
    pages = [content(key) for key in keys]
    pages[1][1, 0, 3, 1, 7] = float("inf")
    with caplog.at_level(logging.WARNING), open_store(tmp_path / "disk" if home else None) as store:
        put(store, keys, pages)
        put(store, others)
        if home:
            store.flush()
        assert store.drain(PATIENCE_S)
        assert store.stats()["failing"] == []
        assert store.match(keys).num_pages == 1  # a gap ends the hit
        assert store.match(others).num_pages == 3
        assert store.explain(keys)[1]["lost"] == "unfit"
        assert store.metrics.snapshot()["dropped_copies"]["HBM,unfit"] == 1
        assert store.demote([keys[1]], Tier.HOST) == 0
        store.evict(others, Tier.HBM)
        assert all(error(page, key) < 0.01 for page, key in zip(read(store, others), others, strict=True))
        put(store, keys[1:])  # computed again, this time with finite numbers
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        assert store.match(keys).num_pages == 3
        store.check()
    assert not caplog.records


def test_leased_unrepresentable_page_stays_until_its_lease_ends() -> None:
    keys = chain(2, "a")
    pages = [content(key) for key in keys]
    pages[0][0, 0, 0, 0, 0] = float("nan")
    with open_store(None, hbm=2) as store, store.acquire([]) as lease:
        slots = store.allocate(2)
        for slot, page in zip(slots, pages, strict=True):
            page_tensor(store)[slot] = page
        store.put(keys, slots, lease=lease)
        assert store.drain(PATIENCE_S)
        assert store.match(keys).num_pages == 0
        assert page_tensor(store)[slots[0]].isnan().any()
        assert tier_stats(store, Tier.HBM)["quarantined"] == 1
        lease.release()
        assert tier_stats(store, Tier.HBM)["quarantined"] == 0
        assert len(store.allocate(2, timeout_s=PATIENCE_S)) == 2


def test_invalid_payload_in_host_memory_fails_only_its_page() -> None:
    keys = chain(4, "a")
    with open_store(None) as store:
        put(store, keys)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        arena = store._parts.arena
        assert arena is not None
        arena.view(store._parts.directory.residency.tables[Tier.HOST].copies[keys[2]].slot)[:2] = 0xFF
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 2
            found = [page_tensor(store)[slot].cpu() for slot in lease.slots[:2]]
            assert all(error(page, key) < 0.01 for page, key in zip(found, keys, strict=False))
        assert store.drain(PATIENCE_S)
        assert store.match(keys).num_pages == 2
        assert where(store, keys[3]) == {Tier.HBM: "ready", Tier.HOST: "ready"}
        put(store, keys[2:3])
        assert store.match(keys).num_pages == 4
        store.check()


def test_a_store_of_only_unrepresentable_pages_continues() -> None:
    with open_store(None, hbm=3, host=2) as store:
        for turn in range(12):
            keys = chain(2, f"{turn}")
            put(store, keys, [torch.full(SPEC.shape, float("nan"), dtype=torch.bfloat16)] * 2)
        assert store.drain(PATIENCE_S)
        store.check()


def test_disk_pages_of_the_same_loss_class_are_read_with_any_codec(tmp_path: Path) -> None:
    """Reopen a directory that was written with a codec only on disk, now with a codec in HOST.

    One page is stored raw, because int8 cannot represent its infinity. The second store cannot read this page into
    HOST, so it reports the page as missing.
    """
    keys, odd = chain(3, "a"), chain(2, "b")
    strange = [content(key) for key in odd]
    strange[1][0, 1, 5, 0, 9] = float("-inf")
    for disk in ("int8", "int8+zstd"):
        home = tmp_path / disk
        with open_store(home, "none", disk) as store:
            put(store, keys)
            put(store, odd, strange)
            store.flush()
            for tier in (Tier.HBM, Tier.HOST):
                store.evict(keys, tier)
            pages = read(store, keys)
        with open_store(home, "int8") as store:
            assert same(read(store, keys), pages)
            with store.acquire(odd) as lease:
                assert lease.wait(PATIENCE_S) is LeaseState.READY
                assert lease.num_pages == 1
            assert store.explain(odd)[1]["lost"] == "unfit"
            nvme = store.stats()["nvme"]
            assert isinstance(nvme, dict)
            assert (nvme["read_unfit"], nvme["read_integrity"]) == (1, 0)
            store.check()


def test_keys_depend_on_the_loss_class(tmp_path: Path) -> None:
    found = {}
    for codec, disk in [
        ("none", "none"),
        ("int8", "none"),
        ("int8", "int8+zstd"),
        ("none", "int8"),
        ("fp8", "none"),
    ]:
        with open_store(tmp_path / f"{codec}{disk}", codec, disk) as store:
            found[codec, disk] = store.keys(range(128))[0]
    assert found["int8", "none"] == found["int8", "int8+zstd"] == found["none", "int8"]
    assert len(set(found.values())) == 3
    assert namespace(LAYOUT.specs, loss_class="int8") != namespace(LAYOUT.specs, loss_class="fp8")


def test_packed_pages_contain_no_bytes_of_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's page does not fill the gaps between KV groups, so the packer's buffer must be zero there."""
    state = PageSpec(
        kind="state",
        num_layers=1,
        page_size=64,
        num_kv_heads=1,
        head_dim=9,
        dtype="float32",
        group=1,
        model="s",
    )
    layout = PageLayout.of([state, SPEC])
    rubbish = partial(np.full, fill_value=0xEE)
    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", lambda shape, dtype=float: rubbish(shape, dtype=dtype))
        packer = Packer(HostFormat.of("int8", layout))
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        packer.page[offset : offset + spec.page_nbytes] = 0
    assert not packer.page.any()


def test_an_engines_pages_go_through_encoded_memory(tmp_path: Path) -> None:
    keys = chain(3, "a")
    shape = (8, 2, 64, 2, 64)
    tensors = [
        torch.zeros(shape, dtype=torch.bfloat16, device=support.DEVICE) for _ in range(SPEC.num_layers)
    ]
    with open_store(tmp_path / "disk", owner="engine") as store:
        store.register(EnginePages(tensors, "BKNHD"))
        for slot, key in enumerate(keys):
            for layer, tensor in enumerate(tensors):
                tensor[slot] = content(key)[layer]
        store.put(keys, [0, 1, 2])
        assert store.drain(PATIENCE_S)
        store.flush()
        assert not store.match(keys).exact
        with store.acquire(keys, into=[5, 6, 7]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
        for key, slot in zip(keys, (5, 6, 7), strict=True):
            assert 0 < error(torch.stack([tensor[slot].cpu() for tensor in tensors]), key) < 0.01


@pytest.mark.parametrize(
    ("codec", "disk"), [("int8", "k8v4"), ("int8", "exp"), ("k8v4", "int8"), ("fp8", "int8+zstd")]
)
def test_a_disk_codec_that_is_not_the_memorys_is_refused_by_name(
    tmp_path: Path, codec: str, disk: str
) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"nvme.codec must be one of none, {codec}.*host.codec is '{codec}'.*got '{re.escape(disk)}'",
    ):
        open_store(tmp_path / "disk", codec, disk)
    assert not (tmp_path / "disk").exists()


@pytest.mark.parametrize("codec", ["exp", "int8+zstd", "zstd", ""])
def test_variable_length_codec_is_refused_by_the_configuration(codec: str) -> None:
    with pytest.raises(ConfigError, match=r"host\.codec"):
        load_config(config(None, codec))


def test_pages_that_a_codec_does_not_encode_are_refused_at_open() -> None:
    spec = PageSpec(num_layers=2, page_size=4, num_kv_heads=1, head_dim=8, dtype="uint8", model="bytes")
    with pytest.raises(ConfigError, match=r"host\.codec must be 'none' or encode .*uint8.*got 'int8'"):
        TierStore.open(load_config(config(None)), spec)


@pytest.mark.parametrize("flushed", [True, False])
def test_archive_moves_encoded_pages_between_equal_stores(tmp_path: Path, flushed: bool) -> None:
    """Export pages of a store that encodes them, and import them into a second such store.

    Pages on disk are exported in encoded form. Pages that are only in memory are decoded before they are exported, and
    the second store encodes them again, so these pages may differ slightly.
    """
    keys = chain(3, "a")
    with open_store(tmp_path / "one" if flushed else None) as store:
        put(store, keys)
        store.flush()
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        pages = read(store, keys)
        done = asyncio.run(store.export_pages(keys, tmp_path / "file"))
        assert (done.pages, dict(done.codecs)) == (3, {"int8" if flushed else "none": 3})
    description = asyncio.run(intake.read_contents(tmp_path / "file")).description
    assert description.loss_class == "int8"
    with closed_store.open_sink(
        tmp_path / "two", description, capacity=16 << 20, codec="int8", payload="lmdb"
    ) as sink:
        assert asyncio.run(intake.read_archive(tmp_path / "file", sink)).pages == 3
    with open_store(tmp_path / "two") as store:
        assert store.match(keys).num_pages == 3
        found = read(store, keys)
        if flushed:
            assert same(found, pages)
        for page, again, key in zip(pages, found, keys, strict=True):
            assert (page != again).float().mean() < 0.02
            assert error(again, key) <= 1.01 * error(page, key)
