"""Tests of encoded host memory with HBM on a GPU: the GPU encodes and decodes to the same bytes as the CPU.

Also runs the state machine on a store with such memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

pytest.importorskip("triton")

from tests.adapters import encoded_blocks as blocks
from tests.codecs.holding import FEATURES, FLOATS, page_like_kv, spec_of
from tests.core.coding import Bench
from tests.gpu.card import delay
from tests.store.machine import HOST
from tests.store.secret_machine import SecretMachine
from tests.support import bench as benches
from tests.support import pages
from tests.support.pages import PATIENCE_S, chain, page_tensor, tiers
from tierstore import codecs
from tierstore.adapters.vllm.kv_groups import Heads
from tierstore.codecs import LOSSY
from tierstore.gpu import quant
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.gpu.engine_pages import EnginePages
from tierstore.gpu.layer_groups import Cut
from tierstore.gpu.quant import codec_kernels, encoded_routes
from tierstore.page import PageLayout, PageSpec
from tierstore.store import TierStore
from tierstore.types import LeaseState, Tier

pytestmark = pytest.mark.gpu

NAMES = [name for name, codec in LOSSY.items() if not codec.zstd]
SPEC = PageSpec(num_layers=4, page_size=32, num_kv_heads=4, head_dim=128, dtype="bfloat16", model="coded")
LAYOUT = PageLayout.of(SPEC)


def many_groups(dtype: str) -> PageLayout:
    return PageLayout.of(
        [
            spec_of(dtype, 2, 33, 3, 80),
            spec_of("uint8", 2, 33, 1, 7, 1),
            spec_of(dtype, 1, 33, 1, 64, 2, "mla"),
            spec_of("float32", 1, 33, 2, 3, 3, "state"),
        ]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", FLOATS)  # each dtype has its own kernels, which take seconds to compile
def test_payloads_and_pages_equal_those_of_the_cpu(name: str, dtype: str) -> None:
    layout = many_groups(dtype)
    for features in ([], FEATURES, ["subnormals", "tiny"], ["zeros", "outliers", "extremes"]):
        found = [page_like_kv(layout, seed, frozenset(features)) for seed in range(3)]
        bench = Bench(name, layout, found, codec_kernels, "cuda:0")
        bench.own_slots()
        bench.require_same()


@pytest.mark.parametrize(
    ("name", "letters"), [*((name, "BHNKD") for name in NAMES), ("k8v4", "BKNHD"), ("k8v4", "DNHKB")]
)
def test_engine_tensors_are_encoded_in_place_with_any_strides(name: str, letters: str) -> None:
    spec = spec_of("bfloat16", 3, 32, 2, 64)
    layout = PageLayout.of(spec)
    found = [page_like_kv(layout, seed, frozenset({"outliers"})) for seed in range(3)]
    bench = Bench(name, layout, found, codec_kernels, "cuda:0")
    sizes = dict(zip("BKNHD", (3, *spec.shape[1:]), strict=True))
    shape = [sizes[letter] for letter in letters]
    tensors = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda:0") for _ in range(3)]
    bench.engine_slots([EnginePages(tensors, letters)])
    bench.require_same(gaps=False)


def numbers_of(name: str) -> torch.Tensor:
    """Return the content of a page on the GPU, computed on the current stream."""
    (key,) = chain(1, name)
    chance = torch.Generator(device="cuda:0").manual_seed(int.from_bytes(key[:7], "big"))
    return torch.randn(SPEC.shape, generator=chance, device="cuda:0").to(torch.bfloat16)


def as_bytes(page: torch.Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return page.cpu().contiguous().view(torch.uint8).flatten().numpy()


def lossy(codec: str, page: torch.Tensor) -> tuple[bytes, torch.Tensor]:
    """Encode and decode a page on the CPU. Return the payload and the decoded page."""
    encoder, decoder = codecs.encoder(codec, LAYOUT), codecs.decoder(codec, LAYOUT)
    assert encoder is not None
    assert decoder is not None
    raw, out = as_bytes(page), np.empty(LAYOUT.blob_nbytes, dtype=np.uint8)
    length = encoder.encode(raw, out)
    assert length is not None
    back = np.empty_like(raw)
    decoder.decode(out[:length], back)
    return out[:length].tobytes(), torch.from_numpy(back).view(torch.bfloat16).view(SPEC.shape)


@pytest.fixture(params=[*NAMES, *(f"{name} through slabs" for name in NAMES)])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[benches.Bench]:
    """Yield a store for each codec and route. Slabs hold only three pages, so that transfers take turns."""
    codec, _, slabs = request.param.partition(" ")
    for way in ("UP_NBYTES", "DOWN_NBYTES"):
        monkeypatch.setattr(encoded_routes, way, 3 * SPEC.page_nbytes)
    if not slabs:
        monkeypatch.setattr(encoded_routes, "MAPPED_NBYTES", 0)
    config = tiers(16, 40, page_nbytes=SPEC.page_nbytes, host_more={"codec": codec})
    opened = benches.open_bench(config, SPEC, pump=True)
    yield opened
    torch.cuda.synchronize()
    opened.store.check()
    opened.close()


def held(bench: benches.Bench, key: bytes) -> bytes:
    """Return all bytes of a page's slot in host memory."""
    arena = bench.parts.arena
    assert arena is not None
    return arena.view(bench.directory.residency.tables[Tier.HOST].copies[key].slot).tobytes()  # type: ignore[index]


def test_store_pages_move_down_and_up_with_the_cpus_encoding(store: benches.Bench) -> None:
    codec = store.parts.arena.held.codec if store.parts.arena is not None else ""
    keys = chain(11)
    slots = store.store.allocate(11)
    delay(20.0)
    for slot, number in zip(slots, range(11), strict=True):
        page_tensor(store.store)[slot].copy_(numbers_of(str(number)))
    store.store.put(keys, slots)
    store.store.demote(keys, Tier.HOST)
    assert store.store.drain(PATIENCE_S)
    wanted = [lossy(codec, numbers_of(str(number))) for number in range(11)]
    for key, (payload, _) in zip(keys, wanted, strict=True):
        found = held(store, key)
        assert found[: len(payload)] == payload
        assert not any(found[len(payload) :])
    with store.store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        for slot, (_, page) in zip(lease.slots, wanted, strict=True):
            assert torch.equal(page_tensor(store.store)[slot].cpu(), page)
    hbm = store.store.stats()["hbm"]
    assert isinstance(hbm, dict)
    assert hbm["copies"].startswith(f"{codec} on the card")
    assert ("from host memory" in hbm["copies"]) is (encoded_routes.MAPPED_NBYTES == 0)
    assert isinstance(store.copies.inner, CudaCopyEngine)


def test_only_the_unrepresentable_page_stays_behind(store: benches.Bench) -> None:
    keys = chain(8)
    slots = store.store.allocate(8)
    for number, slot in enumerate(slots):
        page_tensor(store.store)[slot].copy_(numbers_of(str(number)))
    for number, strange in ((2, float("nan")), (5, float("-inf"))):
        page_tensor(store.store)[slots[number]][3, 1, 31, 3, 127 - number] = strange
    store.store.put(keys, slots)
    assert store.store.drain(PATIENCE_S)
    explained = store.store.explain(keys)
    assert [entry.get("lost") for entry in explained] == [
        "unfit" if number in (2, 5) else None for number in range(8)
    ]
    assert store.store.match(keys).num_pages == 2


def test_pages_swap_slots_under_late_readers_and_writers(store: benches.Bench) -> None:
    """Queue reads and writes without waiting, while the slots of both tiers and the slabs are reused."""
    codec = store.parts.arena.held.codec if store.parts.arena is not None else ""
    wanted = {str(n): lossy(codec, numbers_of(str(n)))[1].cuda() for n in range(6)}
    exact = {str(n): numbers_of(str(n)) for n in range(6)}
    wrong = torch.zeros((), dtype=torch.int64, device="cuda:0")
    chance = np.random.default_rng(3)
    served = 0
    for _ in range(150):
        name = str(int(chance.integers(6)))
        keys = chain(4, name)
        if chance.random() < 0.5:
            slots = store.store.allocate(4, timeout_s=PATIENCE_S)
            delay(float(chance.choice([0.0, 0.2])))
            for slot in slots:
                page_tensor(store.store)[slot].copy_(exact[name])
            store.store.put(keys, slots)
            store.store.demote(keys, Tier.HOST)
        else:
            with store.store.acquire(keys) as lease:
                assert lease.wait(PATIENCE_S) is not LeaseState.PENDING
                delay(float(chance.choice([0.0, 0.2])))
                for slot in lease.slots:
                    page = page_tensor(store.store)[slot].view(torch.int16)
                    other = (page != wanted[name].view(torch.int16)).any()
                    wrong += other & (page != exact[name].view(torch.int16)).any()
                    served += 1
    torch.cuda.synchronize()
    assert served > 20
    assert int(wrong) == 0


class EncodedOnCard(SecretMachine):
    """State machine of stores whose HOST tier contains pages as int8, encoded on the GPU."""

    shapes: ClassVar = [(HOST, None), (HOST, 200), (1, 200)]
    host_more: ClassVar[dict[str, object]] = {"codec": "int8"}


def test_no_sequence_of_calls_breaks_an_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "STEADY", "int8")
    run_state_machine_as_test(
        EncodedOnCard, settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )


def test_without_triton_the_cpu_encodes_and_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, codec_kernels.__name__, None)
    monkeypatch.delattr(quant, "codec_kernels")
    config = tiers(4, 8, page_nbytes=SPEC.page_nbytes, host_more={"codec": "int8"})
    with TierStore.open(config, SPEC) as opened:
        hbm = opened.stats()["hbm"]
        assert isinstance(hbm, dict)
        assert hbm["copies"] == "threads, as triton is missing"
        keys = chain(2)
        slots = opened.allocate(2)
        for slot in slots:
            page_tensor(opened)[slot].copy_(numbers_of("a"))
        opened.put(keys, slots)
        opened.demote(keys, Tier.HOST)
        assert opened.drain(PATIENCE_S)
        with opened.acquire(keys) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert torch.equal(page_tensor(opened)[lease.slots[0]].cpu(), lossy("int8", numbers_of("a"))[1])


@pytest.mark.parametrize("slabs", [False, True], ids=["from host memory", "through slabs"])
@pytest.mark.parametrize("heads", [blocks.MHA, blocks.MLA], ids=["keys and values", "one latent vector"])
@pytest.mark.parametrize("order", ["BLHNC", "LBNHC", "LHBNC"])
def test_blocks_of_vllm_are_encoded_in_place_and_loaded_whole(
    order: str, heads: Heads, slabs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cuts in ("CUTS", "MAPPED_CUTS"):  # so that pages this small would be loaded in two groups
        monkeypatch.setattr(encoded_routes, cuts, (Cut((1, 1), 0),))
    if not slabs:
        monkeypatch.setattr(encoded_routes, "MAPPED_NBYTES", 0)
    tensors = blocks.tensors_of(order, heads, "cuda:0")
    stored = [tensor.clone() for tensor in tensors]
    wanted = [blocks.coded_on_cpu(tensors, heads, block) for block in (1, 4)]
    coded = blocks.Coded.of(tensors, heads)
    hbm = coded.half.stats()["hbm"]
    assert isinstance(hbm, dict)
    assert hbm["copies"].startswith("int8 on the card")
    assert ("from host memory" in hbm["copies"]) is not slabs
    assert hbm["layer_groups"] == 1
    assert coded.copy(Tier.HBM, (1, 4), Tier.HOST, (0, 1)).ok
    assert [coded.held(slot) for slot in (0, 1)] == [payload for payload, _ in wanted]
    assert coded.copy(Tier.HOST, (0, 1), Tier.HBM, (5, 0)).ok
    torch.cuda.synchronize()
    for layer, (tensor, before) in enumerate(zip(tensors, stored, strict=True)):
        for target, (_, decoded) in zip((5, 0), wanted, strict=True):
            assert torch.equal(tensor[target].cpu(), decoded[layer])
        assert torch.equal(tensor[1:5], before[1:5])
    coded.half.close()
