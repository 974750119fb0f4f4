"""Tensors of any layout are stored block by block."""

from __future__ import annotations

import pytest
import torch

from tierstore.adapters.vllm.config import Settings
from tierstore.adapters.vllm.kv_layout import kv_layout
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.errors import ConfigError
from tierstore.gpu.engine_pages import EnginePool
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.page import PageLayout

B, L, H, N, C = 5, 3, 2, 4, 6


def _layers(order: str) -> list[torch.Tensor]:
    """One logical ``[B, H, N, C]`` view a layer of memory in this order."""
    sizes = {"B": B, "L": L, "H": H, "N": N, "C": C}
    whole = torch.arange(B * L * H * N * C, dtype=torch.float32).view([sizes[x] for x in order])
    logical = whole.permute([order.index(x) for x in "LBHNC"])
    return list(logical)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_of_any_layout_come_back_bit_by_bit(order: str) -> None:
    # F074
    layers = _layers(order)
    found = kv_layout(layers, num_blocks=B, block_size=N, identity="m", shard=0)
    pool = EnginePool(PageLayout.of(found.spec), (found.pages,))
    assert pool.num_slots == B
    assert found.spec.page_nbytes == L * H * N * C * 4
    page = torch.empty(found.spec.page_nbytes, dtype=torch.uint8).numpy()
    before = [layer.clone() for layer in layers]
    pool.read(2, page)
    for layer in layers:
        layer[4] = -1
    pool.write(4, page)
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[4], old[2])
        assert torch.equal(layer[:4], old[:4])


def test_layouts_are_told_apart_and_equal_ones_are_not() -> None:
    # F009
    models = {
        order: kv_layout(_layers(order), num_blocks=B, block_size=N, identity="m", shard=0).spec.fingerprint
        for order in ("LBHNC", "LBNHC", "BLHNC")
    }
    assert models["LBHNC"] == models["BLHNC"]  # the bytes of a block are in the same order
    assert models["LBHNC"] != models["LBNHC"]


def test_layers_that_share_a_tensor_are_stored_once() -> None:
    layers = _layers("LBHNC")
    found = kv_layout([*layers, layers[0]], num_blocks=B, block_size=N, identity="m", shard=0)
    assert found.spec.num_layers == L


def test_one_tensor_of_all_layers_is_one_piece() -> None:
    whole = torch.zeros(B, L, 2, N, H, 3)
    found = kv_layout([whole], num_blocks=B, block_size=N, identity="m", shard=0)
    assert found.spec.shape == (1, 1, 1, 1, L * 2 * N * H * 3)


def test_planes_before_blocks_and_smaller_kernel_blocks_are_understood() -> None:
    planes = kv_layout([torch.zeros(2, B, N, H, 3)], num_blocks=B, block_size=N, identity="m", shard=0)
    assert planes.spec.shape == (1, 1, 1, 2, N * H * 3)
    halves = kv_layout([torch.zeros(2 * B, H, N // 2, C)], num_blocks=B, block_size=N, identity="m", shard=0)
    assert halves.spec.shape == (1, 1, 1, 1, H * N * C)


def test_groups_that_overlay_the_same_bytes_share_their_pages_however_they_cut_a_block() -> None:
    layers = [torch.zeros(B, H, N, C) for _ in range(2)]
    alike = [t.view(B, H // 2, N * 2, C) for t in layers]
    found = kv_layout([*layers, *alike], num_blocks=B, block_size=N, identity="m", shard=0)
    assert found.spec.shape == (2, 1, 1, 1, H * N * C)
    assert [t.data_ptr() for t in found.pages.tensors] == [t.data_ptr() for t in layers]
    names = {
        kv_layout([*layers, *v], num_blocks=B, block_size=N, identity="m", shard=0).spec.model
        for v in (alike, [])
    }
    assert len(names) == 2


def test_a_page_is_the_widest_of_the_groups_that_overlay_it() -> None:
    raw = torch.zeros(B, 40)
    narrow, wide = raw[:, :32].view(B, 8, 4), raw.view(B, 10, 4)
    found = kv_layout([narrow, wide], num_blocks=B, block_size=N, identity="m", shard=0)
    assert found.spec.shape == (1, 1, 1, 1, 40)
    assert found.spec.dtype == "float32"
    found.pages.tensors[0][3].fill_(1.0)
    assert (raw[3] == 1).all()
    assert not raw[2].any()
    bytes_of_both = kv_layout(
        [narrow, wide.view(torch.float16)], num_blocks=B, block_size=N, identity="m", shard=0
    )
    assert (bytes_of_both.spec.dtype, bytes_of_both.spec.page_nbytes) == ("uint8", 160)


@pytest.mark.parametrize(
    "tensors",
    [
        [],
        [torch.zeros(3, 7)],
        [torch.zeros(B, 4), torch.zeros(B, 6)],
        [torch.zeros(B, 4, dtype=torch.int32)],
        [torch.zeros(4, B, 3, 8)[:, :, :, ::2]],
    ],
)
def test_tensors_that_are_no_blocks_are_refused(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"must|needs a dimension|no layer has"):
        kv_layout(tensors, num_blocks=B, block_size=N, identity="m", shard=0)


def test_a_request_waits_for_all_of_its_pages_so_that_none_is_cut_by_layers() -> None:
    big = [torch.zeros(2, 1, 1, 1 << 16) for _ in range(16)]
    found = kv_layout(big, num_blocks=2, block_size=1, identity="m", shard=0)
    settings = Settings.of({"config": {"host": {"capacity": 16 << 20, "pin": "never"}}})
    half = WorkerHalf.open(settings.of_rank(1, None, "cpu"), found, 0)
    hbm = half.stats()["hbm"]
    half.close()
    assert isinstance(hbm, dict)
    assert hbm["layer_groups"] == 1
    assert len(LayerGroups.of(PageLayout.of(found.spec))) > 1
