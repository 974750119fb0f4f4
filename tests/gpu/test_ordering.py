"""Test the ordering of copies on a GPU.

A copy must read a page only after the page's last write, and overwrite a slot only after the slot's last use. The CPU
waits for neither the write nor the use.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import numpy as np
import pytest
import torch

from tests.gpu.card import (
    SPEC,
    Reader,
    as_integers,
    delay,
    pattern,
    small_tiers,
    stall_copies,
    write_late,
)
from tests.support.bench import Bench, open_bench
from tests.support.pages import PATIENCE_S, chain, page_tensor, tiers
from tierstore.gpu.engine_pages import EnginePages
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Event, LeaseState, PageKey, Tier

pytestmark = pytest.mark.gpu

ROUNDS = 1000
STREAM_ROUNDS = 200


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = open_bench(small_tiers(8, 24), SPEC, pump=True)
    yield bench
    torch.cuda.synchronize()
    bench.store.check()
    bench.close()


def covering(store: TierStore, keys: list[PageKey]) -> Lease:
    """Return a ready lease of all the keys. Retry as long as HBM has too few free slots."""
    for _ in range(10_000):
        lease = store.acquire(keys)
        if lease.num_pages == len(keys):
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            return lease
        assert lease.missing_because == "no_room"
        lease.release()
        store.drain(0.01)
    raise AssertionError("the slots never came free")


def put_late(store: TierStore, key: PageKey, slot: int, ms: float, stream: torch.cuda.Stream | None) -> None:
    """Queue a write after a kernel of ``ms`` milliseconds, and put the page at once.

    If ``stream`` is None, the current stream writes. Otherwise ``stream`` writes, and ``put`` is given an event.
    """
    if stream is None:
        write_late(store, key, slot, ms)
        store.put([key], [slot])
        return
    with torch.cuda.stream(stream):
        write_late(store, key, slot, ms)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    store.put([key], [slot], after=event)


def test_page_is_copied_down_with_its_late_write_in_every_round(bench: Bench) -> None:
    # F001
    chance, reader, store = random.Random(1), Reader(), bench.store
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    down: deque[PageKey] = deque()
    for turn in range(ROUNDS):
        (key,) = chain(1, f"round{turn}")
        (slot,) = store.allocate(1, timeout_s=PATIENCE_S)
        put_late(store, key, slot, chance.choice([0.0, 0.05, 0.5]), chance.choice([None, side]))
        assert store.demote([key], Tier.HOST) == 1
        down.append(key)
        if len(down) > 4:
            late = down.popleft()
            lease = covering(store, [late])
            reader.check(store, late, lease.slots[0])
            lease.release()
            store.evict([late])
    assert reader.pages == ROUNDS - 4
    reader.require_right()


def test_pages_swap_slots_under_late_readers_and_writers_and_stalled_copies(bench: Bench) -> None:
    # F001, F004, F005, F022: reads and writes are queued without waiting, while slots of both tiers are reused
    chance, reader, store = random.Random(2), Reader(), bench.store
    low, high = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
    streams = [None, low, high]
    names = [chain(2, str(i)) for i in range(12)]
    for _ in range(ROUNDS):
        keys, dice = chance.choice(names), chance.random()
        if dice < 0.1:
            stall_copies(bench, chance.choice([Tier.HBM, Tier.HOST]), chance.choice([0.1, 1.0]))
        elif dice < 0.2:
            store.evict(keys, chance.choice([None, Tier.HBM, Tier.HOST]))
        elif dice < 0.35:
            store.demote(keys, Tier.HOST)
        elif dice < 0.65:
            for key, slot in zip(keys, store.allocate(2, timeout_s=PATIENCE_S), strict=True):
                put_late(store, key, slot, chance.choice([0.0, 0.1]), chance.choice(streams))
        else:
            _read_late(store, keys, reader, chance.choice(streams), chance.choice([0.0, 0.2]))
    assert reader.pages > ROUNDS // 10
    reader.require_right()


def _read_late(
    store: TierStore, keys: list[PageKey], reader: Reader, stream: torch.cuda.Stream | None, ms: float
) -> None:
    """Queue reads of the leased pages after a kernel of ``ms`` milliseconds, and release the lease at once."""
    stream = stream or torch.cuda.current_stream()
    with torch.cuda.stream(stream), store.acquire(keys) as lease:
        assert lease.wait(PATIENCE_S, written=False) is not LeaseState.PENDING
        written = lease.ready(0)
        if written is not None:
            stream.wait_event(written)  # type: ignore[arg-type]
        for key, slot in zip(keys, lease.slots, strict=False):
            reader.check(store, key, slot, ms)


@pytest.mark.parametrize("explicit", [False, True])
def test_a_page_is_loaded_into_a_slot_after_the_last_round_that_writes_it(
    bench: Bench, explicit: bool
) -> None:
    # F004
    store, reader = bench.store, Reader()
    keys = chain(8, "wanted")
    for turn in range(20):
        slots = store.allocate(8, timeout_s=PATIENCE_S)
        for key, slot in zip(keys, slots, strict=True):
            write_late(store, key, slot, 0.0)
        store.put(keys, slots)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        slots = store.allocate(8, timeout_s=PATIENCE_S)
        delay(5.0)
        for slot in slots:
            as_integers(store, slot).fill_(turn)
        event: Event | None = None
        if explicit:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        store.free(slots, after=event)
        lease = covering(store, keys)
        for key, slot in zip(keys, lease.slots, strict=True):
            reader.check(store, key, slot)
        lease.release()
        store.evict(keys)
    reader.require_right()


def test_host_slots_are_not_reused_under_a_stalled_load(bench: Bench) -> None:
    # F007, F022
    store, reader = bench.store, Reader()
    for turn in range(10):
        keys, others = chain(4, f"wanted{turn}"), [chain(4, f"other{turn}/{i}") for i in range(6)]
        _down(store, keys)
        stall_copies(bench, Tier.HBM, 20.0)
        lease = store.acquire(keys)
        assert lease.num_pages == 4
        store.evict(keys, Tier.HOST)
        for other in others:  # as many pages as HOST has slots
            slots = store.allocate(4, timeout_s=PATIENCE_S)
            for key, slot in zip(other, slots, strict=True):
                write_late(store, key, slot, 0.0)
            store.put(other, slots)
            store.demote(other, Tier.HOST)
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        for key, slot in zip(keys, lease.slots, strict=True):
            reader.check(store, key, slot)
        lease.release()
        for other in others:
            store.evict(other)
    assert reader.pages == 40
    reader.require_right()


def _down(store: TierStore, keys: list[PageKey]) -> None:
    slots = store.allocate(len(keys), timeout_s=PATIENCE_S)
    for key, slot in zip(keys, slots, strict=True):
        write_late(store, key, slot, 0.0)
    store.put(keys, slots)
    store.demote(keys, Tier.HOST)
    assert store.drain(PATIENCE_S)


def test_an_engines_tensors_live_until_they_are_copied_out() -> None:
    # F008
    bench = open_bench(tiers(8, 8, page_nbytes=SPEC.page_nbytes, hbm_more={"owner": "engine"}), SPEC)
    keys = chain(8)
    whole = torch.empty(8, *SPEC.shape, dtype=torch.bfloat16, device="cuda:0")
    bench.store.register(EnginePages([whole], "BLKNHD"))
    stall_copies(bench, Tier.HOST, 50.0)
    for slot, key in enumerate(keys):
        whole[slot].view(torch.int16).flatten().copy_(pattern(key))
    bench.store.put(keys, list(range(8)))
    del whole
    gc.collect()
    for _ in range(4):
        torch.empty(8, *SPEC.shape, dtype=torch.bfloat16, device="cuda:0").fill_(3.0)
    assert bench.store.drain(PATIENCE_S)
    arena = bench.parts.arena
    assert arena is not None
    for key in keys:
        slot = bench.directory.residency.tables[Tier.HOST].copies[key].slot
        np.testing.assert_array_equal(arena.view(slot).view(np.int16), pattern(key).cpu().numpy())
    bench.close()


def test_slots_of_a_dropped_lease_are_written_only_when_all_streams_have_read_them(bench: Bench) -> None:
    store, keys = bench.store, chain(8, "dropped")
    others = [(torch.cuda.Stream(), Reader()) for _ in range(2)]  # type: ignore[no-untyped-call]
    for _ in range(20):
        slots = store.allocate(8, timeout_s=PATIENCE_S)
        for key, slot in zip(keys, slots, strict=True):
            write_late(store, key, slot, 0.0)
        store.put(keys, slots)
        torch.cuda.synchronize()
        lease = covering(store, keys)
        for (stream, reader), part in zip(others, (slice(0, 4), slice(4, 8)), strict=True):
            with torch.cuda.stream(stream):
                for key, slot in zip(keys[part], lease.slots[part], strict=True):
                    reader.check(store, key, slot, 2.0)
        with pytest.warns(ResourceWarning, match="8 pages"):
            del lease
        store.evict(keys)
        taken = store.allocate(8, timeout_s=PATIENCE_S)
        page_tensor(store)[taken] = 0.0
        store.free(taken)
    for _, reader in others:
        reader.require_right()


def test_copy_during_a_graph_capture_is_acked_after_the_capture(bench: Bench) -> None:
    store, reader, keys = bench.store, Reader(), chain(8, "loaded")
    slots = store.allocate(8, timeout_s=PATIENCE_S)
    for key, slot in zip(keys, slots, strict=True):
        write_late(store, key, slot, 0.0)
    store.put(keys, slots)
    store.demote(keys, Tier.HOST)
    assert store.drain(PATIENCE_S)
    number = torch.zeros(1, device="cuda:0")
    stall_copies(bench, Tier.HBM, 50.0)
    lease = store.acquire(keys)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        graph.capture_begin()
        number += 1
        for _ in range(100):
            store.poll()
        with suppress(RuntimeError):  # querying an event invalidates the capture
            graph.capture_end()
    assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert lease.num_pages == 8
    for key, slot in zip(keys, lease.slots, strict=True):
        reader.check(store, key, slot)
    lease.release()
    reader.require_right()


def test_a_page_put_with_an_event_is_unwritten_until_the_event_completes(bench: Bench) -> None:
    store = bench.store
    (key,) = chain(1)
    (slot,) = store.allocate(1)
    write_late(store, key, slot, 50.0)
    store.put([key], [slot])
    with store.acquire([key]) as lease:
        assert lease.wait(0.0) is LeaseState.PENDING
        assert lease.wait(0.0, written=False) is LeaseState.READY
        written = lease.ready(0)
        assert written is not None
        written.synchronize()
        assert torch.equal(as_integers(store, slot), pattern(key))
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.ready(0) is None
    assert page_tensor(store).is_cuda


@pytest.mark.parametrize("duplicate", [False, True], ids=["acquired", "put twice"])
def test_another_stream_reads_a_page_after_its_writer_in_every_round(bench: Bench, duplicate: bool) -> None:
    """Regression test (issue 20): a page is put before a stream has written it, and another stream uses or puts it."""
    store = bench.store
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    seen = Reader()
    for turn in range(STREAM_ROUNDS):
        (key,) = chain(1, f"two streams {turn}")
        (slot,) = store.allocate(1, timeout_s=PATIENCE_S)
        put_late(store, key, slot, 20.0, writer)
        with torch.cuda.stream(reader):
            lease = store.acquire([] if duplicate else [key])
            if duplicate:
                mine = store.allocate(1, timeout_s=PATIENCE_S)
                as_integers(store, mine[0]).copy_(pattern(key))
                assert store.put([key], mine, lease=lease) == [slot]
            assert lease.wait(0.0) is LeaseState.PENDING
            written = lease.ready(0)
            assert written is not None
            reader.wait_event(written)  # type: ignore[arg-type]
            seen.check(store, key, slot)
            if turn % 2:
                assert lease.wait(PATIENCE_S) is LeaseState.READY
                assert writer.query(), "READY before the writer had finished"
                assert lease.ready(0) is None
            lease.release()
        store.evict([key])
    assert seen.pages == STREAM_ROUNDS
    seen.require_right()


def test_a_thread_that_waits_sees_the_bytes_on_the_host_and_on_its_own_stream(bench: Bench) -> None:
    store, seen = bench.store, Reader()
    writer = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    right: list[bool] = []

    def read(key: PageKey) -> None:
        with torch.cuda.stream(torch.cuda.Stream()), store.acquire([key]) as lease:  # type: ignore[no-untyped-call]
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            seen.check(store, key, lease.slots[0])
            right.append(torch.equal(as_integers(store, lease.slots[0]).cpu(), pattern(key).cpu()))

    for turn in range(50):
        (key,) = chain(1, f"host {turn}")
        (slot,) = store.allocate(1, timeout_s=PATIENCE_S)
        put_late(store, key, slot, 5.0, writer)
        thread = Thread(target=read, args=(key,))
        thread.start()
        thread.join(PATIENCE_S)
        store.evict([key])
    assert right == [True] * 50
    seen.require_right()


def test_a_put_without_a_lease_never_answers_with_a_slot_that_another_stream_writes(bench: Bench) -> None:
    store, seen = bench.store, Reader()
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for turn in range(STREAM_ROUNDS):
        (key,) = chain(1, f"no lease {turn}")
        first, mine = (store.allocate(1, timeout_s=PATIENCE_S) for _ in range(2))
        put_late(store, key, first[0], 20.0, writer)
        with torch.cuda.stream(reader):
            as_integers(store, mine[0]).copy_(pattern(key))
            assert store.put([key], mine) == mine
            with store.acquire([key]) as lease:
                written = lease.ready(0)
                if written is not None:
                    reader.wait_event(written)  # type: ignore[arg-type]
                seen.check(store, key, lease.slots[0])
        store.demote([key], Tier.HOST)
        assert store.drain(PATIENCE_S)
        lease = covering(store, [key])
        seen.check(store, key, lease.slots[0])
        lease.release()
        store.evict([key])
    seen.require_right()
