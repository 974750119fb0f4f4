"""Test on a GPU that layers which are loaded from encoded host memory are correct once their events have completed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.codecs.holding import decoded
from tests.gpu.card import delay
from tests.support.bench import open_bench
from tests.support.pages import PATIENCE_S, chain, page_tensor, tiers
from tierstore.codecs import LOSSY
from tierstore.codecs.host_format import HostFormat, Packer
from tierstore.page import PageLayout, PageSpec
from tierstore.types import LeaseState, Tier

pytestmark = pytest.mark.gpu

PAGES, ROUNDS = 24, 60


def spec_of(head_dim: int) -> PageSpec:
    """Return a page specification with eight layers. With a ``head_dim`` of 256, pages are 4 MiB."""
    return PageSpec(
        num_layers=8, page_size=64, num_kv_heads=8, head_dim=head_dim, dtype="bfloat16", model="layers"
    )


def lossy(page: torch.Tensor, name: str, spec: PageSpec) -> torch.Tensor:
    """Encode and decode a page on the CPU. Return it as int16 ``[layers, elements per layer]``."""
    layout = PageLayout.of(spec)
    held = HostFormat.of(name, layout)
    slot = np.zeros(held.slot_nbytes, dtype=np.uint8)
    assert Packer(held).pack(page.cpu().view(torch.uint8).flatten().numpy(), slot)
    found = decoded(LOSSY[name], layout, slot[: held.payload_nbytes])
    return torch.from_numpy(np.array(found)).view(torch.int16).view(spec.num_layers, -1)


@pytest.mark.parametrize(
    ("name", "head_dim", "copies", "groups"),
    [
        ("int8", 256, "from host memory", 4),
        ("fp8", 256, "from host memory", 4),
        ("k8v4", 256, "from host memory", 4),
        ("int8", 528, "on the card, batch", 2),  # through slabs; the last 16 elements of a head share a scale
    ],
)
def test_layers_are_right_once_their_events_complete(
    name: str, head_dim: int, copies: str, groups: int
) -> None:
    spec = spec_of(head_dim)
    config = tiers(PAGES + 2, 2 * PAGES, page_nbytes=spec.page_nbytes, host_more={"codec": name})
    bench = open_bench(config, spec, pump=True)
    store, keys = bench.store, chain(PAGES)
    hbm = store.stats()["hbm"]
    assert isinstance(hbm, dict)
    assert copies in str(hbm["copies"])
    assert hbm["layer_groups"] == groups
    slots = store.allocate(PAGES, timeout_s=PATIENCE_S)
    pages = page_tensor(store)
    pages[slots] = torch.randn(PAGES, *spec.shape, device="cuda:0").to(torch.bfloat16)
    torch.cuda.synchronize()
    want = torch.stack([lossy(pages[slot], name, spec) for slot in slots]).cuda()
    store.put(keys, slots)
    store.demote(keys, Tier.HOST)
    assert store.drain(PATIENCE_S)
    words = pages.view(torch.int16).view(len(pages), spec.num_layers, -1)
    chance, wrong = random.Random(3), torch.zeros((), dtype=torch.int64, device="cuda:0")
    for _ in range(ROUNDS):
        store.evict(keys, Tier.HBM)
        assert store.drain(PATIENCE_S)
        words.fill_(-1)
        torch.cuda.synchronize()
        with store.acquire(keys) as lease:
            assert lease.num_pages == PAGES
            there = torch.tensor(lease.slots, device="cuda:0")
            if chance.random() < 0.3:
                delay(0.3)
            for layer in range(spec.num_layers):
                event = lease.ready(layer, PATIENCE_S)
                if isinstance(event, torch.cuda.Event):
                    torch.cuda.current_stream().wait_event(event)
                elif event is not None:
                    event.synchronize()
                wrong += (words[:, layer].index_select(0, there) != want[:, layer]).sum()
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == PAGES
    torch.cuda.synchronize()
    assert int(wrong) == 0, f"{int(wrong)} wrong numbers"
    store.check()
    bench.close()
