"""Test that blocks of KV tensors in any layout are stored and restored exactly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.adapters.encoded_blocks import MHA, ODD, Coded, coded_on_cpu, tensors_of
from tests.adapters.encoded_blocks import MLA as WIDE
from tests.support.bench import open_bench
from tests.support.engine import OWNED_BY_ENGINE
from tests.support.pages import PATIENCE_S, chain, tiers
from tierstore import codecs
from tierstore.adapters.vllm.config import Settings
from tierstore.adapters.vllm.kv_groups import Heads
from tierstore.adapters.vllm.kv_layout import KVLayout, kv_layout
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.codecs.host_format import HostFormat
from tierstore.errors import ConfigError
from tierstore.gpu.addresses import tensor_segments
from tierstore.gpu.engine_pages import EnginePages, EnginePool
from tierstore.gpu.layer_groups import LayerGroups
from tierstore.gpu.slabs import ByLayers, Share
from tierstore.page import PageLayout, PageSpec
from tierstore.types import Failure, LeaseState, Tier

B, L, H, N, C = 5, 3, 2, 4, 6


def _layers(order: str) -> list[torch.Tensor]:
    """Allocate one tensor with its dimensions in this order. Return its view ``[B, H, N, C]`` for each layer."""
    sizes = {"B": B, "L": L, "H": H, "N": N, "C": C}
    whole = torch.arange(B * L * H * N * C, dtype=torch.float32).view([sizes[x] for x in order])
    logical = whole.permute([order.index(x) for x in "LBHNC"])
    return list(logical)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_of_any_layout_are_restored_bit_by_bit(order: str) -> None:
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


def test_equal_layouts_share_a_fingerprint_and_different_ones_do_not() -> None:
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
        [torch.zeros(B, 4, dtype=torch.int32)],
        [torch.zeros(4, B, 3, 8)[:, :, :, ::2]],
    ],
)
def test_tensors_without_blocks_are_refused(tensors: list[torch.Tensor]) -> None:
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


# -- layers that differ -----------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """A layer in vLLM's layout: its logical shape ``[B, heads, states, nbytes]``, and its padded page size."""

    heads: int
    states: int
    nbytes: int
    dtype: torch.dtype = torch.uint8
    padded: int = 0

    @property
    def page(self) -> int:
        return max(self.padded, self.heads * self.states * self.nbytes)


@dataclass
class Cache:
    """The tensors of a model, by group, and the memory that backs them."""

    raw: torch.Tensor
    groups: list[list[torch.Tensor]]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [tensor for group in self.groups for tensor in group]


def allocated(*groups: Sequence[Layer], blocks_first: bool, alignment: int = 1, num_blocks: int = B) -> Cache:
    """Allocate KV tensors like ``allocate_kv_cache`` in ``vllm.v1.worker.utils``: all groups overlay the same bytes.

    With ``blocks_first`` (BLHNC), all layers of a block are adjacent. Otherwise (LBHNC), each layer has its own
    range of memory.
    """
    block = max(sum(layer.page for layer in group) for group in groups)
    block = -(-block // alignment) * alignment
    raw = torch.zeros(num_blocks * block, dtype=torch.int8)
    found = []
    for group in groups:
        at, views = 0, list[torch.Tensor]()
        for layer in group:
            (heads, states, nbytes, dtype, _), page = layer, layer.page
            apart = block if blocks_first else page
            shape, strides = (num_blocks, heads, states, nbytes), (apart, states * nbytes, nbytes, 1)
            views.append(torch.as_strided(raw, shape, strides, at).view(dtype))
            at += page if blocks_first else num_blocks * page
        found.append(views)
    return Cache(raw, found)


def laid_out(cache: Cache, num_blocks: int = B) -> KVLayout:
    return kv_layout(cache.tensors, num_blocks=num_blocks, block_size=N, identity="m", shard=0)


BF16 = torch.bfloat16
MLA, INDEXER = Layer(1, 64, 656), Layer(1, 64, 132)
QWEN = Layer(2, 16, 2 * 64 * 2, BF16)
STATE = Layer(1, 1, QWEN.page - 96, torch.int8, QWEN.page)
V4, V4_INDEXER = Layer(1, 64, 584, padded=65 * 576), Layer(1, 64, 132, padded=15 * 576)
V4_WIDE, V4_WINDOW = Layer(1, 2, 584, padded=3 * 576), Layer(1, 64, 584, padded=65 * 576)
V4_COMPRESSOR = Layer(1, 8, 2048, torch.float32, padded=29 * 576)

FAMILIES: dict[str, Cache] = {
    "DeepSeek V3.2, GLM-5": allocated([MLA] * 3 + [INDEXER] * 3, blocks_first=True),
    "DeepSeek V3.2, layer by layer": allocated([MLA] * 3 + [INDEXER] * 3, blocks_first=False),
    "an indexer beside MLA in bfloat16": allocated(
        [Layer(1, 64, 1152, BF16)] * 2 + [INDEXER] * 2, blocks_first=True
    ),
    "DeepSeek V4": allocated(
        [V4, V4, V4_WIDE, V4_INDEXER],
        [V4_WINDOW] * 2,
        [V4_COMPRESSOR] * 2,
        blocks_first=True,
        alignment=576,
    ),
    "Qwen3-Next": allocated([QWEN] * 2, [STATE] * 2, [STATE] * 2, blocks_first=True),
    "Qwen3-Next, layer by layer": allocated([QWEN] * 2, [STATE] * 2, blocks_first=False),
    "more states than attention": allocated([QWEN], [STATE] * 3, blocks_first=True),
    "more states than attention, layer by layer": allocated([QWEN], [STATE] * 3, blocks_first=False),
    "Kimi Linear": allocated(
        [Layer(1, 16, 1152, BF16)] * 2, [Layer(1, 1, 18000, torch.int8, 18432)] * 2, blocks_first=True
    ),
    "Gemma 3, gpt-oss": allocated([QWEN] * 2, [QWEN] * 2, blocks_first=False),
    "heads of several sizes": allocated([Layer(4, N, 64, BF16), Layer(2, N, 256, BF16)], blocks_first=True),
    "one quantized layer": allocated([QWEN, Layer(2, 16, 2 * 64, torch.uint8)], blocks_first=False),
}


def filled(raws: Sequence[torch.Tensor], seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for raw in raws:
        raw.copy_(torch.randint(-128, 128, raw.shape, generator=dice).to(raw.dtype))


def places(tensor: torch.Tensor, block: int) -> torch.Tensor:
    """Return the offsets of all bytes of this block in the tensor's storage."""
    size, mine = tensor.element_size(), tensor[block]
    every = torch.arange(tensor.untyped_storage().nbytes())
    starts = every.as_strided(mine.shape, [s * size for s in mine.stride()], mine.storage_offset() * size)
    return (starts.flatten()[:, None] + torch.arange(size)).flatten()


def require_exact(tensors: Sequence[torch.Tensor], raws: Sequence[torch.Tensor], num_blocks: int) -> KVLayout:
    """Store a block, overwrite all memory, and load the block into another one. Return the layout.

    Require that every tensor then has the stored bytes in the second block, that nothing else has changed, and that the
    page contained each byte of the block once.
    """
    found = kv_layout(tensors, num_blocks=num_blocks, block_size=N, identity="m", shard=0)
    layout = PageLayout.of(found.spec)
    pool = EnginePool(layout, (found.pages,))
    source, target = 1, num_blocks - 1
    page = np.zeros(layout.blob_nbytes, dtype=np.uint8)
    filled(raws, 1)
    stored = [raw.clone() for raw in raws]
    pool.read(source, page)
    assert by_address(pool, layout, source) == page.tobytes()
    filled(raws, 2)
    before = [raw.clone() for raw in raws]
    pool.write(target, page)
    used = 0
    for raw, then, old in zip(raws, stored, before, strict=True):
        here = [t for t in tensors if t.untyped_storage().data_ptr() == raw.data_ptr()]
        mine = torch.zeros(len(raw), dtype=torch.bool)
        for tensor in here:
            to = places(tensor, target)
            assert torch.equal(raw[to], then[places(tensor, source)])
            mine[to] = True
        used += int(mine.sum())
        if found.spec.page_nbytes > used and here:  # padding within the block may be written
            at = torch.nonzero(mine).flatten()
            mine[int(at[0]) : int(at[-1])] = True
        assert torch.equal(raw[~mine], old[~mine])
    assert 0 <= found.spec.page_nbytes - used <= found.spec.page_nbytes // 8
    return found


def by_address(pool: EnginePool, layout: PageLayout, block: int) -> bytes:
    """Return a block's page, assembled from the memory addresses of its pieces, as on the GPU."""
    segments = tensor_segments(pool.layers, layout, 1 << 16)
    assert segments is not None
    page = ctypes.create_string_buffer(layout.blob_nbytes)
    (addresses,) = segments.addresses(np.array([block]))
    for at, offset, nbytes in zip(addresses, segments.offset, segments.nbytes, strict=True):
        ctypes.memmove(ctypes.addressof(page) + int(offset), int(at), int(nbytes))
    return page.raw


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_kernels_move_layers_of_any_size_through_a_slab(family: str) -> None:
    """Torch copies the pieces for which the GPU has no copy kernel, through a slab with one page per row."""
    cache = FAMILIES[family]
    found = laid_out(cache)
    layout = PageLayout.of(found.spec)
    pool = EnginePool(layout, (found.pages,))
    coder = ByLayers(pool.layers, layout)
    card: Any = SimpleNamespace(uploaded=torch.from_numpy)
    batch = coder.begin(np.array([4, 0, 2]), card)
    rows = torch.zeros(3 * layout.slot_nbytes, dtype=torch.uint8)
    filled([cache.raw], 5)
    stored = [[bits(tensor[block]) for tensor in cache.tensors] for block in (0, 2)]
    stream: Any = SimpleNamespace()
    share = Share(batch, rows, 1, 2, stream)
    coder.encode(share)
    page = np.zeros(layout.blob_nbytes, dtype=np.uint8)
    pool.read(2, page)
    assert rows[layout.slot_nbytes :][: len(page)].numpy().tobytes() == page.tobytes()
    filled([cache.raw], 6)
    coder.decode(share)
    assert [[bits(tensor[block]) for tensor in cache.tensors] for block in (0, 2)] == stored


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_any_size_and_dtype_are_restored_bit_by_bit(family: str) -> None:
    cache = FAMILIES[family]
    require_exact(cache.tensors, [cache.raw], B)


@pytest.mark.parametrize(
    ("family", "pieces", "nbytes"),
    [
        ("DeepSeek V3.2, GLM-5", 1, 3 * 64 * (656 + 132)),
        ("DeepSeek V3.2, layer by layer", 6, 3 * 64 * (656 + 132)),
        ("an indexer beside MLA in bfloat16", 1, 2 * 64 * (1152 + 132)),
        ("DeepSeek V4", 1, 2 * 65 * 576 + 3 * 576 + 64 * 132),
        ("Qwen3-Next", 1, 2 * QWEN.page),
        ("Qwen3-Next, layer by layer", 2, 2 * QWEN.page),
        ("more states than attention", 1, 3 * QWEN.page - 96),
        ("more states than attention, layer by layer", 3, 3 * QWEN.page - 2 * 96),
        ("Gemma 3, gpt-oss", 2, 2 * QWEN.page),
    ],
)
def test_page_holds_a_block_of_all_layers_in_as_few_pieces_as_possible(
    family: str, pieces: int, nbytes: int
) -> None:
    """Check that a page omits padding at the end of a block, and keeps padding between layers if that saves a piece."""
    found = laid_out(FAMILIES[family])
    assert (len(found.pages.tensors), found.spec.page_nbytes) == (pieces, nbytes)


def test_state_tensors_of_several_dtypes_are_bytes_of_their_block() -> None:
    """Use blocks that hold a convolution state in bfloat16, then an SSM state in float32, then padding."""
    raw = torch.zeros(B * 512, dtype=torch.int8)
    attention = raw.view(B, 1, 16, 32).view(BF16)
    conv = torch.as_strided(raw.view(BF16), (B, 3, 8), (256, 8, 1), 0)
    ssm = torch.as_strided(raw.view(torch.float32), (B, 4, 27), (128, 27, 1), 12)
    found = require_exact([attention, conv, ssm], [raw], B)
    assert (found.spec.dtype, found.spec.page_nbytes) == ("uint8", 512)
    alone = require_exact([conv, ssm], [raw], B)
    assert (alone.spec.dtype, alone.spec.page_nbytes) == ("uint8", 48 + 432)


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[torch.Tensor], list[torch.Tensor], int]:
    """Draw tensors in one or two storages. Several groups can overlay each other in a storage."""
    num_blocks = draw(st.integers(2, 4))
    dtypes = st.sampled_from([torch.uint8, BF16, torch.float32])
    layers = st.builds(
        lambda heads, states, elements, dtype, padding: Layer(
            heads, states, elements * dtype.itemsize, dtype, heads * states * elements * dtype.itemsize + padding
        ),
        st.integers(1, 2), st.integers(1, 3), st.integers(1, 4), dtypes, st.sampled_from([0, 0, 4, 12])
    )  # fmt: skip
    aligned = layers.map(lambda layer: layer._replace(padded=-(-layer.page // 4) * 4))
    tensors: list[torch.Tensor] = []
    raws = []
    for _ in range(draw(st.integers(1, 2))):
        blocks_first = draw(st.booleans())
        groups = draw(
            st.lists(st.lists(aligned, min_size=1, max_size=4), min_size=1, max_size=3 if blocks_first else 1)
        )
        cache = allocated(*groups, blocks_first=blocks_first, alignment=4, num_blocks=num_blocks)
        tensors += cache.tensors
        raws.append(cache.raw)
    return draw(st.permutations(tensors)), raws, num_blocks


@given(caches())
def test_any_block_tensors_are_restored_bit_by_bit_and_nothing_else_is_written(
    found: tuple[list[torch.Tensor], list[torch.Tensor], int],
) -> None:
    require_exact(*found)


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(B * 8).as_strided((B, 12), (6, 1))],  # each block overlaps the one before
        (lambda raw: [raw[:, :4], raw.view(-1)[6 : 6 + B * 8 - 8].view(B - 1, 8)])(torch.zeros(B, 8)),
        (lambda raw: [raw.view(B, 8), raw[: B * 4].view(B, 4)])(torch.zeros(B * 8)),
        (lambda raw: [raw.as_strided((B, 6), (8, 1)), raw.as_strided((B, 6), (8, 1), 4)])(torch.zeros(B * 9)),
    ],
)
def test_bytes_of_two_blocks_are_refused(tensors: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"must not share memory|needs a dimension"):
        kv_layout(tensors, num_blocks=B, block_size=N, identity="m", shard=0)


def test_layer_offsets_in_the_page_are_part_of_its_identity() -> None:
    raw = torch.zeros(B, 48, dtype=torch.uint8)
    one = [raw[:, :16], raw[:, 16:]]
    other = [raw[:, 32:], raw[:, :32]]
    mixed = [raw[:, :16].view(BF16), raw[:, 16:]]
    apart = [raw[:, :16], raw[:, 18:]]
    swapped = [raw[:, 30:46], raw[:, :28]]
    names = {
        kv_layout(tensors, num_blocks=B, block_size=N, identity="m", shard=0).spec.model
        for tensors in (one, other, mixed, apart, swapped)
    }
    assert len(names) == 5
    longer = torch.zeros(2 * B, 48, dtype=torch.uint8)
    there = kv_layout([longer[:, :16], longer[:, 16:]], num_blocks=2 * B, block_size=N, identity="m", shard=0)
    assert there.spec.model in names  # the number of blocks does not matter


def test_lossy_codecs_take_no_pages_of_several_dtypes() -> None:
    layout = PageLayout.of(laid_out(FAMILIES["an indexer beside MLA in bfloat16"]).spec)
    assert not codecs.saves("exp", layout)
    for codec in ("int8", "int4", "fp8", "k8v4"):
        with pytest.raises(ValueError, match="codec must be 'none'"):
            HostFormat.of(codec, layout)


def test_pages_of_unequal_layers_survive_the_tiers(tmp_path: Path) -> None:
    cache = allocated([MLA] * 2 + [INDEXER] * 2, blocks_first=False, num_blocks=6)
    found = laid_out(cache, 6)
    config = tiers(6, 8, tmp_path, hbm_more=OWNED_BY_ENGINE, page_nbytes=found.spec.page_nbytes)
    bench = open_bench(config, found.spec)
    bench.store.register(found.pages)
    filled([cache.raw], 3)
    stored = [[bits(tensor[block]) for tensor in cache.tensors] for block in (4, 1, 3)]
    keys = chain(3)
    bench.store.put(keys, [4, 1, 3])
    bench.store.demote(keys, Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    bench.store.poll()
    filled([cache.raw], 4)
    with bench.store.acquire(keys, into=[0, 5, 2]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert [[bits(tensor[block]) for tensor in cache.tensors] for block in lease.slots] == stored
    bench.store.check()
    bench.close()


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


# -- pages of heads, which a lossy codec encodes -----------------------------------------------------------------


def require_close(found: torch.Tensor, stored: torch.Tensor, dim: int) -> None:
    """Require that an element differs by at most 1/250 of the largest one in its group of 64, as int8 promises."""
    for one, other in zip(
        torch.split(found.float(), dim, -1), torch.split(stored.float(), dim, -1), strict=True
    ):
        for near, exact in zip(torch.split(one, 64, -1), torch.split(other, 64, -1), strict=True):
            largest = exact.abs().amax(-1, keepdim=True)
            assert ((near - exact).abs() <= largest / 250 + exact.abs() / 256).all()
            assert (near != exact).any()


@pytest.mark.parametrize("heads", [MHA, ODD, WIDE], ids=["heads of 64", "heads of 80", "one latent vector"])
@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_blocks_of_any_layout_are_encoded_head_by_head(order: str, heads: Heads) -> None:
    tensors = tensors_of(order, heads, "cpu")
    stored = [tensor.clone() for tensor in tensors]
    coded = Coded.of(tensors, heads)
    spec = coded.found.spec
    assert (spec.kind, spec.head_dim) == ("mha" if heads.planes == 2 else "mla", heads.dim)
    assert spec.page_nbytes == sum(tensor[0].nbytes for tensor in tensors)
    payloads = [coded_on_cpu(tensors, heads, block) for block in (1, 4)]
    assert coded.copy(Tier.HBM, (1, 4), Tier.HOST, (0, 1)).ok
    assert [coded.held(slot) for slot in (0, 1)] == [payload for payload, _ in payloads]
    assert round(spec.page_nbytes / len(payloads[0][0]), 3) == (1.905 if heads is ODD else 1.939)
    assert coded.copy(Tier.HOST, (0, 1), Tier.HBM, (5, 0)).ok
    for layer, (tensor, before) in enumerate(zip(tensors, stored, strict=True)):
        for (source, target), (_, decoded) in zip(((1, 5), (4, 0)), payloads, strict=True):
            assert torch.equal(tensor[target], decoded[layer])
            require_close(tensor[target], before[source], heads.dim)
        assert torch.equal(tensor[1:5], before[1:5])  # nothing else was written
    coded.half.close()


def test_block_with_a_number_that_is_not_finite_is_not_stored() -> None:
    tensors = tensors_of("BLHNC", MHA, "cpu")
    tensors[2][4, 1, 3, 100] = torch.inf
    coded = Coded.of(tensors, MHA)
    ack = coded.copy(Tier.HBM, (1, 4), Tier.HOST, (0, 1))
    assert (ack.num_ready, ack.failures) == (1, ((1, Failure.UNFIT),))
    coded.half.close()


def test_smaller_kernel_blocks_and_groups_over_the_same_bytes_are_encoded() -> None:
    layers = [torch.zeros(2 * B, H, N // 2, 128, dtype=BF16) for _ in range(2)]
    found = kv_layout([*layers, *layers], num_blocks=B, block_size=N, identity="m", shard=0, heads=MHA)
    assert found.spec.shape == (2, 2, N, H, 64)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (
            [torch.zeros(B, H, N, 128, dtype=BF16), torch.zeros(B, 1, N, 128, dtype=BF16)],
            "differ in shape or dtype",
        ),
        ([torch.zeros(B, H, N, 128)], "of bfloat16, got .* elements of float32 per block"),
        (
            [torch.zeros(B, H, N, 96, dtype=BF16)],
            "blocks of 4 tokens .*, got KV tensors with 1 x 768 elements of bfloat16 per block",
        ),
        (
            [torch.zeros(2, B, N, 3, 64, dtype=BF16)],
            "blocks of 4 tokens .*, got KV tensors with 2 x 768 elements of bfloat16 per block",
        ),
    ],
)
def test_tensors_that_are_not_of_these_heads_are_refused(tensors: list[torch.Tensor], said: str) -> None:
    with pytest.raises(ConfigError, match=f"host.codec must be none .*{said}.*; set host.codec to none"):
        kv_layout(tensors, num_blocks=B, block_size=N, identity="m", shard=0, heads=MHA)


# -- layouts that were supported before layers could differ ----------------------------------------------------


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).to(dtype).view(shape)


def served_before() -> dict[str, list[torch.Tensor]]:
    found = {order: _layers(order) for order in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")}
    found["one tensor of all layers"] = [numbered(B, L, 2, N, H, 3)]
    found["planes first"] = [numbered(2, B, N, H, 3), numbered(2, B, N, H, 3)]
    found["halves"] = [numbered(2 * B, H, N // 2, C, dtype=BF16)]
    layers = [numbered(B, H, N, C), numbered(B, H, N, C)]
    found["two groups cut differently"] = [*layers, *(t.view(B, H // 2, N * 2, C) for t in layers)]
    found["shared layer"] = [*layers, layers[0]]
    raw = numbered(B, 40)
    narrow = raw[:, :32].view(B, 8, 4)
    found["a narrow group over a wide one"] = [narrow, raw.view(B, 10, 4)]
    found["two dtypes over the same bytes"] = [narrow, raw.view(B, 10, 4).view(torch.float16)]
    return found


SERVED_BEFORE = {
    "LBHNC": ("f26f9540fa5009f2", "1083d9dc22174706"),
    "LBNHC": ("fe2e77cf23a7a4ec", "1083d9dc22174706"),
    "LHBNC": ("168a9cf4999dc685", "001d5bba5000859a"),
    "BLHNC": ("f26f9540fa5009f2", "9daf94de32a56006"),
    "BLNHC": ("fe2e77cf23a7a4ec", "9daf94de32a56006"),
    "BHLNC": ("168a9cf4999dc685", "c79da93e82526d5f"),
    "one tensor of all layers": ("a395bb7eec3f8ada", "9daf94de32a56006"),
    "planes first": ("f0fa1f0dbeb9a9e5", "a86055f011a75cbc"),
    "halves": ("df4f775dad04e986", "9a8edbb2ab11827a"),
    "two groups cut differently": ("6933387621809465", "daf660b80b4561bb"),
    "shared layer": ("5fd3e3c0f6de0b48", "daf660b80b4561bb"),
    "a narrow group over a wide one": ("7e5d0d11deba6de1", "4cd80ceb3e8deda6"),
    "two dtypes over the same bytes": ("c85d77671027cc02", "4cd80ceb3e8deda6"),
}
"""Fingerprint of the pages and digest of block 3, as in the directories of earlier versions."""


@pytest.mark.parametrize("name", SERVED_BEFORE)
def test_pages_and_identities_of_layouts_of_earlier_versions_have_not_changed(name: str) -> None:
    found = kv_layout(served_before()[name], num_blocks=B, block_size=N, identity="m", shard=0)
    page = np.zeros(found.spec.page_nbytes, dtype=np.uint8)
    EnginePool(PageLayout.of(found.spec), (found.pages,)).read(3, page)
    digest = sha256(page.tobytes()).hexdigest()
    assert (found.spec.fingerprint[:16], digest[:16]) == SERVED_BEFORE[name]


# -- runs as an engine's pages ----------------------------------------------------------------------------------

RUNS = PageSpec(
    kind="state", num_layers=1, page_size=4, num_kv_heads=1, head_dim=10, dtype="float16", model="m"
)


@pytest.mark.parametrize(
    ("tensors", "change"),
    [
        ([torch.zeros(B, 4), torch.zeros(B, 6)], {}),
        ([torch.zeros(B, 2, 5, dtype=torch.float16)], {}),
        ([torch.zeros(B, 9, dtype=torch.float16)], {}),
        ([torch.zeros(1, 10, dtype=torch.float16).expand(B, 10)], {}),
        ([torch.zeros(B, 10, dtype=torch.float16)], {"kind": "mla"}),
        ([torch.zeros(B, 10, dtype=torch.float16)], {"num_layers": 2}),
    ],
)
def test_runs_that_do_not_cover_the_page_are_refused(
    tensors: list[torch.Tensor], change: dict[str, Any]
) -> None:
    layout = PageLayout.of(replace(RUNS, **change))
    with pytest.raises(ConfigError, match=r"layout 'BX'|its own memory|runs of a page"):
        EnginePool(layout, [EnginePages(tensors, "BX")])
