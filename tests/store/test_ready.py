"""Tests of ``ready(layer)``: a layer of a lease can be used while later layers are in flight."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Semaphore

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.bench import Bench, open_bench
from tests.support.events import ManualEvent
from tests.support.pages import PATIENCE_S, chain, content, fill, page_tensor, tiers
from tests.support.stalls import IN
from tierstore.gpu.engine_pages import EnginePages
from tierstore.gpu.layer_groups import Part
from tierstore.gpu.pool import CpuPool
from tierstore.page import PageSpec
from tierstore.types import LeaseState, PageKey, Tier

pytestmark = pytest.mark.skipif(
    "config.getoption('hbm_device') != 'cpu'", reason="stops the CPU twin's copies"
)

SPEC = PageSpec(num_layers=4, page_size=4, num_kv_heads=2, head_dim=16, dtype="float16", model="layers")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = open_bench(tiers(8, 8, page_nbytes=SPEC.page_nbytes), SPEC, pump=True)
    yield bench
    bench.store.check()
    bench.close()


class Let:
    """Holds back copies into HBM until the test lets them go, part by part. If ``broken`` is set, they fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._let = Semaphore(0)
        self.broken = False
        right = CpuPool.write_part

        def write_part(pool: CpuPool, slot: int, page: NDArray[np.uint8], part: Part) -> None:
            assert self._let.acquire(timeout=PATIENCE_S)
            if self.broken:
                raise RuntimeError("this part cannot be written")
            right(pool, slot, page, part)

        patch.setattr(CpuPool, "write_part", write_part)

    def go(self, parts: int) -> None:
        self._let.release(parts)


def below(bench: Bench, keys: list[PageKey]) -> None:
    """Put the pages into HOST only, and fill HBM with rubbish."""
    slots = bench.store.allocate(len(keys))
    fill(bench.store, keys, slots, SPEC)
    bench.store.put(keys, slots)
    bench.store.demote(keys, Tier.HOST)
    assert bench.store.drain(PATIENCE_S)
    slots = bench.store.allocate(len(page_tensor(bench.store)))
    page_tensor(bench.store).fill_(7)
    bench.store.free(slots)


def layers_right(bench: Bench, keys: list[PageKey], slots: list[int]) -> list[bool]:
    """Return, for each layer, whether all slots contain the expected bytes."""
    pages = page_tensor(bench.store)
    found = [
        [np.array_equal(pages[slot][i].numpy().view(np.uint8), content(key, SPEC)[i].numpy().view(np.uint8))
         for key, slot in zip(keys, slots, strict=True)]
        for i in range(SPEC.num_layers)
    ]  # fmt: skip
    return [all(each) for each in found]


def test_a_layer_is_ready_while_later_ones_are_not(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = chain(3)
    below(bench, keys)
    let = Let(monkeypatch)
    with bench.store.acquire(keys) as lease:
        with pytest.raises(TimeoutError):
            lease.ready(0, timeout_s=0.0)
        for layer in range(SPEC.num_layers):
            let.go(3)
            assert lease.ready(layer, timeout_s=PATIENCE_S) is None
            assert layers_right(bench, keys, lease.slots) == [i <= layer for i in range(SPEC.num_layers)]
            if layer < SPEC.num_layers - 1:
                assert lease.wait(0.0) is LeaseState.PENDING
                with pytest.raises(TimeoutError):
                    lease.ready(layer + 1, timeout_s=0.0)
        assert lease.wait(PATIENCE_S) is LeaseState.READY


def test_a_page_that_is_not_in_flight_yet_keeps_every_layer_waiting(bench: Bench) -> None:
    keys = chain(4)
    below(bench, keys)
    bench.copies.hold(IN)
    with bench.store.acquire(keys[:2]) as first:
        bench.copies.let_go(IN)
        assert first.wait(PATIENCE_S) is LeaseState.READY
        with bench.store.acquire(keys) as lease:
            with pytest.raises(TimeoutError):
                lease.ready(0, timeout_s=0.01)
            bench.copies.open()
            assert lease.ready(0, timeout_s=PATIENCE_S) is None


def test_a_copy_that_fails_after_its_first_layers_still_cuts_the_lease(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = chain(2)
    below(bench, keys)
    let = Let(monkeypatch)
    with bench.store.acquire(keys) as lease:
        let.go(2)
        assert lease.ready(0, timeout_s=PATIENCE_S) is None
        let.broken = True
        let.go(2)
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert lease.missing_because == "failed"
        assert lease.ready(3) is None, "of no pages"
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("told", [True, False])
def test_page_put_while_its_layers_load_truncates_their_readers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Put a page again while a lease waits for its layers, so that its old slot is soon reused.

    Once ``ready`` has returned for a layer, the caller may be reading the old slot, so the lease is truncated before
    the page. Otherwise the lease switches to the new slot.
    """
    keys = chain(3)
    below(bench, keys)
    let = Let(monkeypatch)
    with bench.store.acquire(keys) as lease:
        if told:
            let.go(3)
            assert lease.ready(0, timeout_s=PATIENCE_S) is None
        read = lease.slots
        mine = bench.store.allocate(1)
        fill(bench.store, keys[1:2], mine, SPEC)
        assert bench.store.put(keys[1:2], mine) == mine
        let.go(12)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.slots == (read[:1] if told else [read[0], *mine, read[2]])
        assert lease.missing_because == ("replaced" if told else None)
        assert layers_right(bench, keys[: lease.num_pages], lease.slots) == [True] * SPEC.num_layers
        bench.store.check()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.match(keys).tiers == (Tier.HBM,) * 3


def test_layer_of_pages_being_written_has_their_writers_event(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = chain(3)
    below(bench, keys[:2])
    let = Let(monkeypatch)
    event = ManualEvent()
    bench.store.put(keys[2:], bench.store.allocate(1), after=event)
    with bench.store.acquire(keys) as lease:
        let.go(2)
        written = lease.ready(0, timeout_s=PATIENCE_S)
        assert written is not None
        assert not written.query()
        event.happen()
        assert written.query()
        let.go(6)


def test_pages_from_disk_are_ready_by_layers_once_host_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = open_bench(tiers(4, 4, tmp_path, page_nbytes=SPEC.page_nbytes), SPEC, pump=True)
    keys = chain(2)
    below(bench, keys)
    bench.store.demote(keys, Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    bench.store.evict(keys, Tier.HOST)
    let = Let(monkeypatch)
    with bench.store.acquire(keys) as lease:
        assert lease.tiers == [Tier.NVME] * 2
        let.go(8)
        assert lease.ready(3, timeout_s=PATIENCE_S) is None
        assert layers_right(bench, keys, lease.slots) == [True] * 4
    bench.close()


def test_an_engines_slots_are_filled_by_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tierstore.gpu.engine_pages import EnginePool

    bench = open_bench(
        tiers(4, 4, page_nbytes=SPEC.page_nbytes, hbm_more={"owner": "engine"}), SPEC, pump=True
    )
    whole = torch.zeros(SPEC.num_layers, 2, 4, *SPEC.shape[2:], dtype=torch.float16)
    bench.store.register(EnginePages(list(whole), "KBNHD"))
    keys = chain(2)
    for slot, key in enumerate(keys):
        whole[:, :, slot].copy_(content(key, SPEC))
    bench.store.put(keys, [0, 1])
    assert bench.store.drain(PATIENCE_S)
    let = Semaphore(0)
    right = EnginePool.write_part

    def write_part(pool: EnginePool, slot: int, page: NDArray[np.uint8], part: Part) -> None:
        assert let.acquire(timeout=PATIENCE_S)
        right(pool, slot, page, part)

    monkeypatch.setattr(EnginePool, "write_part", write_part)
    with bench.store.acquire(keys, into=[3, 2]) as lease:
        let.release(4)
        assert lease.ready(1, timeout_s=PATIENCE_S) is None
        for slot, key in zip((3, 2), keys, strict=True):
            want = content(key, SPEC).view(torch.uint8)
            got = whole[:, :, slot].contiguous().view(torch.uint8)
            assert torch.equal(got[:2], want[:2])
            assert not got[2:].any()
        let.release(4)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
    bench.close()


def test_every_layer_of_pages_in_hbm_is_ready(bench: Bench) -> None:
    slots = bench.store.allocate(2)
    fill(bench.store, chain(2), slots, SPEC)
    bench.store.put(chain(2), slots)
    with bench.store.acquire(chain(2)) as lease:
        assert [lease.ready(layer) for layer in range(SPEC.num_layers)] == [None] * SPEC.num_layers
