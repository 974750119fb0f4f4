"""Tests that a page is found only for the model, dtype, tokens, image and weights with which it was put."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import lanes
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, counter, read, tiers, where, write
from tests.support.stalls import IN, UP
from tierstore.keys import Extra, page_keys
from tierstore.nvme import directory_layout, record_format
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier

TOKENS = list(range(12))
EVERYWHERE = (Tier.HBM, Tier.HOST, Tier.NVME)


@contextmanager
def opened(tmp_path: Path) -> Iterator[Bench]:
    bench = open_bench(tiers(8, 8, tmp_path / "disk"), SPEC)
    yield bench
    bench.store.check()
    bench.close()


def only_in(store: TierStore, keys: list[PageKey], tier: Tier) -> None:
    """Move the written pages to ``tier``, so that no other tier has them."""
    if tier != Tier.HBM:
        store.demote(keys, tier)
        assert store.drain(PATIENCE_S)
    else:
        assert store.drain(PATIENCE_S)
        for below in (Tier.HOST, Tier.NVME):
            store.evict(keys, below)
    assert [where(store, key) for key in keys] == [{tier: "ready"}] * len(keys)


# -- F009, F010: another dtype or other weights under the same name ---------------------------------------------


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bfloat16", "float32"])
def test_a_run_of_another_dtype_on_the_same_directory_sees_no_page_of_the_first(
    tmp_path: Path, dtype: str
) -> None:
    # F009: the same shape, with a dtype of the same size (bfloat16) and of other sizes
    other = replace(SPEC, dtype=dtype)
    config = tiers(8, 8, tmp_path, page_nbytes=max(SPEC.page_nbytes, other.page_nbytes))
    with TierStore.open(config, SPEC) as store:
        write(store, store.keys(TOKENS))
        old = store.keys(TOKENS)
    with TierStore.open(config, other) as store:
        assert store.match(store.keys(TOKENS)).num_pages == store.match(old).num_pages == 0
    with TierStore.open(config, SPEC) as store:
        assert read(store, old) == 3


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bfloat16"])
def test_the_same_number_of_bytes_in_another_shape_and_dtype_is_another_page(
    tmp_path: Path, dtype: str
) -> None:
    # F009: the pages have the same size in bytes
    width = SPEC.page_nbytes // replace(SPEC, dtype=dtype).page_nbytes
    other = replace(SPEC, dtype=dtype, head_dim=SPEC.head_dim * width)
    assert other.page_nbytes == SPEC.page_nbytes
    with TierStore.open(tiers(8, 8, tmp_path), SPEC) as store:
        keys = store.keys(TOKENS)
        write(store, keys)
    with TierStore.open(tiers(8, 8, tmp_path), other) as store:
        assert store.match([*store.keys(TOKENS), *keys]).num_pages == store.match(keys).num_pages == 0


def test_spec_refuses_values_of_another_type_that_print_alike() -> None:
    # F010: PageSpec(model=None) and PageSpec(model="None") would share their pages
    for wrong in (None, 1, b"m"):
        with pytest.raises(ValueError, match=r"PageSpec\.model"):
            replace(SPEC, model=wrong)  # type: ignore[arg-type]
    for name in ("num_layers", "shard"):
        with pytest.raises(ValueError, match=name):
            replace(SPEC, **{name: True})  # type: ignore[arg-type]


# -- F014: names that an encoding with separators would confuse -------------------------------------------------

NAMES = [
    "org/model-SEP-name",
    "org/model/name",
    "org-model-name",
    "@@org@model",
    "@@org@@model",
    "/",
    "..",
    "../..",
    "a\0b",
    "a\0",
    "\u00e9",
    "e\u0301",
    "\ud800",
    "model=x",
    "model",
    "m\nmodel=m",
    "x" * 300,
]


def test_models_with_awkward_names_have_separate_directories_and_keep_their_names(tmp_path: Path) -> None:
    # F014
    config = tiers(4, None, tmp_path / "disk", nvme_pages=3)
    seen: dict[PageKey, str] = {}
    for name in NAMES:
        with TierStore.open(config, replace(SPEC, model=name)) as store:
            keys = store.keys(TOKENS)
            assert store.match(keys).num_pages == 0, f"{name!r} found pages of {seen.get(keys[0])!r}"
            write(store, keys)
            seen[keys[0]] = name
    assert len(seen) == len(NAMES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk"]
    markers = [
        directory_layout.read_marker(path)
        for path, _, _ in directory_layout.shard_directories(tmp_path / "disk")
    ]
    told = [marker.description["groups"] for marker in markers if marker is not None]
    assert sorted(group[0]["model"] for group in told) == sorted(NAMES)  # type: ignore[index]


parts = st.sampled_from(
    ["", "m", "/", "@@", "-SEP-", "..", "\0", "\u00e9", "e\u0301", "=", "\n", "group", "1"]
)
names = st.lists(parts, max_size=5).map("".join).filter(str.strip)


@settings(max_examples=lanes.examples(60, 300), deadline=None)
@given(names, names)
def test_fingerprints_are_equal_exactly_when_names_are(one: str, two: str) -> None:
    # F014
    assert (replace(SPEC, model=one).fingerprint == replace(SPEC, model=two).fingerprint) == (one == two)


# -- F012: images -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", EVERYWHERE)
@pytest.mark.parametrize("width", [2, 4, 31])
def test_another_image_under_the_same_placeholder_tokens_is_a_miss_in_every_tier(
    tmp_path: Path, tier: Tier, width: int
) -> None:
    # F012: digests that share their first or last bytes, and the same image at other positions
    image = bytes(range(1, 33))
    others = [
        bytes(32 - width) + image[-width:],
        image[:width] + bytes(32 - width),
        image[:-1],
        image + b"\0",
    ]
    placed: list[tuple[Extra, ...]] = [((5, other),) for other in others]
    placed += [((4, image),), ((6, image),), ((9, image),), (image,), ((5, image), (5, image)), ()]
    with opened(tmp_path) as bench:
        keys = bench.store.keys(TOKENS, extra=((5, image),))
        write(bench.store, keys)
        only_in(bench.store, keys, tier)
        for extra in placed:
            asked = bench.store.keys(TOKENS, extra=extra)
            shared = 1 if all(isinstance(item, tuple) for item in extra) else 0
            assert bench.store.match(asked).num_pages == shared, extra
            assert not set(asked[1:]) & set(keys)
        assert read(bench.store, keys) == 3


# -- F015: the epoch of the weights -----------------------------------------------------------------------------


def of_epoch(store: TierStore, epoch: int) -> list[PageKey]:
    return store.keys(TOKENS, extra=(f"weights-{epoch}",))


@pytest.mark.parametrize("tier", EVERYWHERE)
def test_weight_update_hides_older_pages_in_every_tier_and_the_old_epoch_still_hits(
    tmp_path: Path, tier: Tier
) -> None:
    # F015: a caller that keeps the old epoch still gets its pages
    with opened(tmp_path) as bench:
        old, new = of_epoch(bench.store, 1), of_epoch(bench.store, 2)
        write(bench.store, old)
        only_in(bench.store, old, tier)
        assert read(bench.store, new) == 0
        write(bench.store, new)
        bench.store.evict(new)
        assert read(bench.store, new) == 0
        assert read(bench.store, old) == 3


@pytest.mark.parametrize("lane", [IN, UP])
def test_a_load_that_arrives_after_the_weight_update_serves_no_request(
    tmp_path: Path, lane: tuple[Tier, Tier]
) -> None:
    # F015: the epoch changes while loads are in flight, and the engine evicts the pages of the old epoch
    with opened(tmp_path) as bench:
        old, new = of_epoch(bench.store, 1), of_epoch(bench.store, 2)
        write(bench.store, old)
        only_in(bench.store, old, lane[0])
        gate = bench.copies if lane == IN else bench.records
        gate.hold(lane)
        with bench.store.acquire(old) as lease:
            assert lease.wait(0.0) is LeaseState.PENDING
            assert gate.waiting(lane)
            assert bench.store.evict(old) == 3
            write(bench.store, new)
            gate.open()
            assert bench.store.drain(PATIENCE_S)
            assert lease.wait(PATIENCE_S) is LeaseState.FAILED
            assert lease.missing == old
        assert bench.store.match(old).num_pages == 0
        assert not any(where(bench.store, key) for key in old)
        assert read(bench.store, new) == 3


@pytest.mark.parametrize("by_model", [False, True])
def test_the_old_epoch_stays_gone_when_the_directory_is_reopened(tmp_path: Path, by_model: bool) -> None:
    # F015: the epoch is part of the keys, or of the model name in the page specification
    config = tiers(8, 8, tmp_path)
    first = replace(SPEC, model="test@1") if by_model else SPEC
    second = replace(SPEC, model="test@2") if by_model else SPEC
    with TierStore.open(config, first) as store:
        old = store.keys(TOKENS) if by_model else of_epoch(store, 1)
        write(store, old)
    with TierStore.open(config, second) as store:
        new = store.keys(TOKENS) if by_model else of_epoch(store, 2)
        assert read(store, new) == 0
        write(store, new)
    with TierStore.open(config, second) as store:
        assert read(store, new) == 3
        assert store.match(old).num_pages == (0 if by_model else 3)
    with TierStore.open(config, first) as store:
        assert read(store, old) == 3


def test_pages_evicted_with_their_epoch_stay_gone_after_a_reopen(tmp_path: Path) -> None:
    # F015
    config = tiers(8, 8, tmp_path)
    with TierStore.open(config, SPEC) as store:
        old = of_epoch(store, 1)
        write(store, old)
        store.flush()
        assert store.evict(old) == 3
    with TierStore.open(config, SPEC) as store:
        assert store.match(of_epoch(store, 1)).num_pages == 0


# -- F016: a record of another key ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["another key", "another fingerprint", "equal but for its last byte"])
def test_a_record_stored_under_a_key_that_is_not_its_own_is_a_miss_and_counted(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # F016: as if two keys collided in the catalogue. The record's header contains the full key, which is compared.
    keys = chain(2)
    true_encode = record_format.encode

    def lying(page: object, record: object, *, fingerprint: bytes, key: PageKey, **rest: object) -> int:
        if key == keys[1]:
            if what == "another fingerprint":
                fingerprint = record_format.fingerprint_digest("another model")
            elif what == "another key":
                key = chain(1, "other")[0]
            else:
                key = PageKey(key[:31] + bytes([key[31] ^ 1]) + key[32:])
        return true_encode(page, record, fingerprint=fingerprint, key=key, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr("tierstore.nvme.record_format.encode", lying)
    with opened(tmp_path) as bench:
        write(bench.store, keys)
        only_in(bench.store, keys, Tier.NVME)
        assert read(bench.store, keys) == 1
        assert counter(bench.store, "failed_pages", "NVME,HOST,integrity") == 1
        nvme = bench.store.stats()["nvme"]
        assert isinstance(nvme, dict)
        assert nvme["read_integrity"] == 1
        assert bench.store.explain(keys)[1]["lost"] == "integrity"


def test_keys_are_256_bit_digests_of_every_token() -> None:
    # F016: the keys of 1000 pages that differ in one token differ in each 64-bit part of the digest
    pages = [page_keys([*range(3), token], page_size=4, namespace=b"n")[0] for token in range(1000)]
    assert {len(key) for key in pages} == {36}
    for start in range(0, 32, 8):  # each 64-bit part alone distinguishes the pages
        assert len({key[start : start + 8] for key in pages}) == 1000


def test_a_thousand_pages_are_read_back_unchanged(tmp_path: Path) -> None:
    # F016
    config = tiers(1000, None, tmp_path / "disk", nvme_pages=1000)
    with TierStore.open(config, SPEC) as store:
        keys = [store.keys([0, 0, 0, token])[0] for token in range(1000)]
        for start in range(0, 1000, 100):
            write(store, keys[start : start + 100])
        store.flush()
        store.evict(keys, Tier.HBM)
        assert sum(read(store, [key]) for key in keys) == 1000
