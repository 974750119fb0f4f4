"""Tests that pages keep their bytes in every layout, dtype and KV group, and are never read as other pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, SPEC, chain, content, same, tiers
from tierstore.errors import ConfigError
from tierstore.gpu.engine_pages import EnginePages
from tierstore.gpu.pool import GroupedPages
from tierstore.page import DTYPE_NBYTES, PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

SLOTS = 5
ENGINE: dict[str, object] = {"owner": "engine"}
Views = Callable[[PageSpec, torch.dtype], tuple[list[torch.Tensor], str, Callable[[int, int], torch.Tensor]]]


def planes_first(
    spec: PageSpec, dtype: torch.dtype
) -> tuple[list[torch.Tensor], str, Callable[..., torch.Tensor]]:
    """Create tensors ``[2, N, ...]``, as in FlashAttention.

    Returns:
        The tensor of each layer, their layout, and a function that returns a view of a slot in a layer.
    """
    layers, planes, tokens, heads, dim = spec.shape
    made = [torch.zeros(planes, SLOTS, tokens, heads, dim, dtype=dtype) for _ in range(layers)]
    return made, "KBNHD", lambda slot, i: made[i][:, slot]


def blocks_first(
    spec: PageSpec, dtype: torch.dtype
) -> tuple[list[torch.Tensor], str, Callable[..., torch.Tensor]]:
    """Create tensors ``[N, 2, ...]``, as in FlashInfer. Returns the same as ``planes_first``."""
    layers, planes, tokens, heads, dim = spec.shape
    made = [torch.zeros(SLOTS, planes, tokens, heads, dim, dtype=dtype) for _ in range(layers)]
    return made, "BKNHD", lambda slot, i: made[i][slot]


def heads_before_tokens_with_gaps(
    spec: PageSpec, dtype: torch.dtype
) -> tuple[list[torch.Tensor], str, Callable[..., torch.Tensor]]:
    """Create tensors with permuted strides. They use every other block of a larger storage, starting at an offset."""
    layers, planes, tokens, heads, dim = spec.shape
    count = 2 * SLOTS * heads * planes * tokens * dim
    storages = [torch.zeros(7 + count, dtype=dtype) for _ in range(layers)]
    made = [s[7:].view(2 * SLOTS, heads, planes, tokens, dim)[1::2].permute(0, 2, 3, 1, 4) for s in storages]
    assert not any(t.is_contiguous() or t.storage_offset() == 0 for t in made)
    return made, "BKNHD", lambda slot, i: made[i][slot]


def one_tensor_layers_last(
    spec: PageSpec, dtype: torch.dtype
) -> tuple[list[torch.Tensor], str, Callable[..., torch.Tensor]]:
    layers, planes, tokens, heads, dim = spec.shape
    whole = torch.zeros(SLOTS, tokens, heads, planes, dim, layers, dtype=dtype)
    return [whole], "BNHKDL", lambda slot, i: whole[slot, ..., i].permute(2, 0, 1, 3)


@pytest.mark.parametrize(
    "views", [planes_first, blocks_first, heads_before_tokens_with_gaps, one_tensor_layers_last]
)
@pytest.mark.parametrize("dtype", sorted(DTYPE_NBYTES))
def test_pages_of_every_dtype_are_read_back_in_every_layout_byte_for_byte(views: Views, dtype: str) -> None:
    # F074: reported for FP8. The slots beside those of the pages must not change.
    spec = replace(SPEC, dtype=dtype)
    tensors, letters, layer_of = views(spec, getattr(torch, dtype))
    bench = open_bench(tiers(SLOTS, 8, hbm_more=ENGINE, page_nbytes=spec.page_nbytes), spec)
    bench.store.register(EnginePages(tensors, letters))
    keys = chain(2)

    def put_into(slot: int, page: torch.Tensor) -> None:
        for i, layer in enumerate(page):
            layer_of(slot, i).copy_(layer)

    def raw(slot: int) -> torch.Tensor:
        return torch.stack([layer_of(slot, i).contiguous().view(torch.uint8) for i in range(spec.num_layers)])

    for slot, key in zip((4, 1), keys, strict=True):
        put_into(slot, content(key, spec))
    bench.store.put(keys, [4, 1])
    assert bench.store.drain(PATIENCE_S)
    for slot in range(SLOTS):
        put_into(slot, content(chain(1, f"poison{slot}")[0], spec))
    before = {slot: raw(slot).clone() for slot in (1, 3, 4)}
    with bench.store.acquire(keys, into=[0, 2]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        for slot, key in zip((0, 2), keys, strict=True):
            want = torch.stack([layer.contiguous().view(torch.uint8) for layer in content(key, spec)])
            assert torch.equal(raw(slot), want)
    assert all(torch.equal(raw(slot), bytes_before) for slot, bytes_before in before.items())
    bench.close()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_order_of_planes_and_blocks_is_declared_and_never_guessed_from_the_shape(slots: int) -> None:
    # F074: with two slots, [2, N, ...] and [N, 2, ...] have the same shape
    layers, planes, tokens, heads, dim = SPEC.shape
    tensors = [torch.zeros(2, slots, tokens, heads, dim, dtype=torch.float16) for _ in range(layers)]
    with TierStore.open(tiers(8, 8, hbm_more=ENGINE), SPEC) as store:
        if slots != planes:
            with pytest.raises(ConfigError, match="tensor of layer 0 must hold pages of"):
                store.register(EnginePages(tensors, "BKNHD"))
        store.register(EnginePages(tensors, "KBNHD"))
        key = chain(1)[0]
        for i, layer in enumerate(content(key)):
            tensors[i][:, slots - 1].copy_(layer)
        store.put([key], [slots - 1])
        assert store.drain(PATIENCE_S)
        for tensor in tensors:
            tensor.zero_()
        with store.acquire([key], into=[0]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert all(
            torch.equal(t[:, 0].view(torch.int16), p.view(torch.int16))
            for t, p in zip(tensors, content(key), strict=True)
        )


def test_slots_that_share_memory_are_refused() -> None:
    # F074: an expanded tensor has the right shape, but a copy into one slot would overwrite all slots
    layers, planes, tokens, heads, dim = SPEC.shape
    one = torch.zeros(1, layers, planes, tokens, heads, dim, dtype=torch.float16)
    with (
        TierStore.open(tiers(8, 8, hbm_more=ENGINE), SPEC) as store,
        pytest.raises(ConfigError, match="share memory"),
    ):
        store.register(EnginePages([one.expand(6, *one.shape[1:])], "BLKNHD"))


@pytest.mark.parametrize("kind", ["inference", "requires grad"])
def test_tensors_made_in_inference_mode_or_that_require_grad_are_loaded_into_like_others(kind: str) -> None:
    # F074: torch rejects in-place writes to such tensors outside inference mode or no_grad
    shape = (SLOTS, *SPEC.shape)
    with torch.inference_mode(kind == "inference"):
        whole = torch.zeros(shape, dtype=torch.float16, requires_grad=kind == "requires grad")
    with TierStore.open(tiers(8, 8, hbm_more=ENGINE), SPEC) as store:
        store.register(EnginePages([whole], "BLKNHD"))
        key = chain(1)[0]
        with torch.inference_mode():
            whole[3].copy_(content(key))
        store.put([key], [3])
        assert store.drain(PATIENCE_S)
        with store.acquire([key], into=[1]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert same(whole[1].detach(), key)


# -- F076: layers that differ -----------------------------------------------------------------------------------


def group(number: int, **changes: object) -> PageSpec:
    return replace(SPEC, group=number, **changes)  # type: ignore[arg-type]


MODELS = {
    "latent and indexer": (
        group(0, kind="mla", num_layers=3, num_kv_heads=1, head_dim=576, dtype="bfloat16"),
        group(1, kind="mla", num_layers=3, num_kv_heads=1, head_dim=132, dtype="uint8"),
    ),
    "head dims 256 and 512": (
        group(0, num_layers=5, num_kv_heads=2, head_dim=256, dtype="bfloat16"),
        group(1, num_layers=1, num_kv_heads=1, head_dim=512, dtype="bfloat16"),
    ),
    "target, draft and a state": (
        group(0, num_layers=4, head_dim=64, dtype="float8_e4m3fn"),
        group(1, num_layers=1, num_kv_heads=1, head_dim=16, dtype="float32"),
        group(2, kind="state", num_layers=2, num_kv_heads=3, head_dim=33, dtype="float32"),
    ),
}


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.HOST, Tier.NVME])
@pytest.mark.parametrize("model", MODELS)
def test_groups_of_different_shapes_and_dtypes_keep_their_own_geometry_in_every_tier(
    tmp_path: Path, model: str, tier: Tier
) -> None:
    # F076: also after a reopen
    groups = MODELS[model]
    nbytes = sum(spec.page_nbytes for spec in groups)
    config = tiers(4, 4, tmp_path, page_nbytes=nbytes, nvme_pages=20)

    def right(store: TierStore, slot: int, key: bytes) -> bool:
        pages = store.pages
        assert isinstance(pages, GroupedPages)
        return all(same(page, key, spec) for page, spec in zip(pages[slot], groups, strict=True))  # type: ignore[arg-type]

    with TierStore.open(config, groups) as store:
        keys = store.keys(range(12))
        slots = store.allocate(3)
        for key, slot in zip(keys, slots, strict=True):
            pages = store.pages
            assert isinstance(pages, GroupedPages)
            for page, spec in zip(pages[slot], groups, strict=True):
                assert tuple(page.shape) == spec.shape
                page.copy_(content(key, spec))
        store.put(keys, slots)
        if tier != Tier.HBM:
            store.demote(keys, tier)
        assert store.drain(PATIENCE_S)
        with store.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert all(right(store, slot, key) for slot, key in zip(lease.slots, keys, strict=True))
    with TierStore.open(config, groups) as store, store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 3
        assert all(right(store, slot, key) for slot, key in zip(lease.slots, keys, strict=True))


def test_groups_of_different_page_sizes_are_refused_by_name() -> None:
    # F076: such groups would need separate keys. They must not be treated as groups of one page size.
    with pytest.raises(ConfigError, match=r"KV groups must have the same page_size, got 4, 16"):
        TierStore.open(tiers(4, 4), (group(0), group(1, page_size=16)))


@pytest.mark.parametrize(
    "change", [{"head_dim": 5}, {"dtype": "float32"}, {"num_layers": 3}, {"kind": "mla"}]
)
def test_a_change_of_one_group_makes_every_page_a_miss(tmp_path: Path, change: dict[str, object]) -> None:
    # F076
    before = (group(0), group(1, num_kv_heads=1))
    after = (before[0], replace(before[1], **change))  # type: ignore[arg-type]
    nbytes = 2 * sum(spec.page_nbytes for spec in before)
    config = tiers(4, 4, tmp_path, page_nbytes=nbytes, nvme_pages=20)
    with TierStore.open(config, before) as store:
        keys = store.keys(range(12))
        store.put(keys, store.allocate(3))
    with TierStore.open(config, after) as store:
        assert store.match(keys).num_pages == store.match(store.keys(range(12))).num_pages == 0
    with TierStore.open(config, before) as store:
        assert store.match(keys).num_pages == 3
