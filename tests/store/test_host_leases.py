"""Tests of leases that pin pages in host memory (``acquire(keep_in=Tier.HOST)``), and a state machine with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from tests.store.machine import StoreMachine, prefixes
from tests.support import lanes
from tests.support.bench import open_bench
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    content,
    counter,
    read,
    tier_stats,
    tiers,
    where,
    write,
    write_down,
)
from tierstore.errors import LeaseError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier


def bytes_in_host(store: TierStore, slot: int) -> bytes:
    arena = store.host_memory
    assert arena is not None
    return arena.view(slot).tobytes()


def require_right_in_host(store: TierStore, lease: Lease) -> None:
    """Assert that each host slot of the lease has the bytes of its key."""
    for key, slot in zip(lease.keys, lease.slots, strict=False):
        want = content(key).numpy().tobytes()
        assert bytes_in_host(store, slot)[: len(want)] == want


def test_lease_on_host_covers_pages_where_they_are_and_loads_nothing(store: TierStore) -> None:
    keys = chain(3)
    write_down(store, keys, Tier.HOST)
    with store.acquire(keys, keep_in=Tier.HOST) as lease:
        assert lease.wait(0.0) is LeaseState.READY
        assert (lease.num_pages, lease.tiers, lease.missing) == (3, [Tier.HOST] * 3, [])
        require_right_in_host(store, lease)
        assert store.drain(PATIENCE_S)
        assert {tuple(where(store, key)) for key in keys} == {(Tier.HOST,)}
    assert counter(store, "hits_pages", "HOST") == 0


def test_lease_on_host_ends_before_the_first_page_that_host_does_not_have(store: TierStore) -> None:
    keys = chain(3)
    write_down(store, keys[:1], Tier.HOST)
    with store.acquire(keys[:1]) as before:
        before.wait(PATIENCE_S)
        write(store, keys[1:2], before)
    with store.acquire(keys, keep_in=Tier.HOST) as lease:
        assert (lease.num_pages, lease.missing_because) == (1, "elsewhere")
    with store.acquire(keys[2:], keep_in=Tier.HOST) as lease:
        assert (lease.num_pages, lease.missing_because) == (0, "not_found")


def test_pages_leased_in_host_stay_there_while_others_displace_the_rest(tmp_path: Path) -> None:
    bench = open_bench(tiers(hbm=4, host=4, nvme=tmp_path / "disk"), SPEC)
    store, keys = bench.store, chain(3)
    write_down(store, keys, Tier.HOST)
    with store.acquire(keys, keep_in=Tier.HOST) as lease:
        slots = lease.slots
        for name in "bcd":
            write(store, chain(3, name))
            store.demote(chain(3, name), Tier.NVME)
            assert store.drain(PATIENCE_S)
        store.evict(keys)  # no other caller finds the pages any more, but their bytes stay
        assert store.match(keys).num_pages == 0
        store.check()
        assert lease.slots == slots
        require_right_in_host(store, lease)
    store.check()
    assert tier_stats(store, Tier.HOST)["quarantined"] == 0
    bench.close()


def test_page_that_the_disk_has_gets_a_copy_in_host_only_if_exactly_that_is_asked(store: TierStore) -> None:
    keys = chain(2)
    write(store, keys)
    store.flush()
    store.evict(keys, Tier.HOST)
    assert {tuple(where(store, key)) for key in keys} == {(Tier.HBM, Tier.NVME)}
    with store.acquire(keys) as lease:
        store.demote(keys, Tier.HOST, even_if_saved=True)
        assert store.drain(PATIENCE_S)
        assert {tuple(where(store, key)) for key in keys} == {(Tier.HBM, Tier.HOST, Tier.NVME)}
        assert lease.num_pages == 2
    with store.acquire(keys, keep_in=Tier.HOST) as lease:
        assert {tuple(where(store, key)) for key in keys} == {(Tier.HOST, Tier.NVME)}
        require_right_in_host(store, lease)
    assert read(store, keys) == 2
    store.evict(keys, Tier.HOST)
    store.demote(keys, Tier.HOST)
    assert store.drain(PATIENCE_S)
    assert {tuple(where(store, key)) for key in keys} == {(Tier.NVME,)}
    with pytest.raises(TypeError, match="even_if_saved"):
        store.demote(keys, Tier.HOST, even_if_saved=1)  # type: ignore[arg-type]


def test_host_slots_are_reused_only_after_the_event_of_the_release(store: TierStore) -> None:
    keys, event = chain(3), ManualEvent()
    write_down(store, keys, Tier.HOST)
    store.acquire(keys, keep_in=Tier.HOST).release(after=event)
    assert tier_stats(store, Tier.HOST)["pinned"] == 3
    event.happen()
    store.poll()
    assert tier_stats(store, Tier.HOST)["pinned"] == 0
    assert read(store, keys) == 3


def test_lease_on_host_refuses_what_it_cannot_do(store: TierStore) -> None:
    keys = chain(2)
    write_down(store, keys[:1], Tier.HOST)
    with pytest.raises(ValueError, match="cannot keep pages in NVME; choose one of HBM, HOST"):
        store.acquire(keys, keep_in=Tier.NVME)
    with pytest.raises(ValueError, match="deadline_s has no effect with keep_in=HOST"):
        store.acquire(keys, 1.0, keep_in=Tier.HOST)
    with store.acquire(keys[:1], keep_in=Tier.HOST) as lease:
        slots = store.allocate(1)
        with pytest.raises(LeaseError, match="pages cannot be put with a lease on HOST"):
            store.put(keys[1:], slots, lease=lease)
        store.free(slots)


def test_a_store_without_host_memory_refuses_a_lease_on_host() -> None:
    bench = open_bench(tiers(hbm=4, host=None), SPEC)
    assert bench.store.host_memory is None
    with pytest.raises(ValueError, match="cannot keep pages in HOST"):
        bench.store.acquire(chain(1), keep_in=Tier.HOST)
    bench.close()


def test_failure_of_a_writer_in_hbm_does_not_end_a_lease_on_the_host_slot_with_the_same_number(
    store: TierStore,
) -> None:
    keys, event = chain(1), ManualEvent()
    write_down(store, keys, Tier.HOST)
    with store.acquire(keys, keep_in=Tier.HOST) as lease:
        slots = store.allocate(4)
        store.put(chain(4, "late"), slots, after=event)
        assert set(lease.slots) <= set(slots)  # numbers of different tiers
        assert lease.wait(0.0) is LeaseState.READY
        event.fail()
        store.poll()
        assert lease.num_pages == 1
        require_right_in_host(store, lease)


class HostLeaseMachine(StoreMachine):
    """The store's state machine with callers that pin pages in host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[tuple[Lease, list[bytes]]] = []
        """The open leases on host memory, each with the bytes of its slots when it was acquired."""

    @precondition(lambda self: Tier.HOST in self.running.directory.residency.tables)
    @rule(keys=prefixes, down=st.booleans(), even_if_saved=st.booleans())
    def keep_in_host(self, keys: list[PageKey], down: bool, even_if_saved: bool) -> None:
        if down:
            self.write(keys)
            self.running.store.demote(keys, Tier.HOST, even_if_saved=even_if_saved)
            self.running.open_gates()
        store = self.running.store
        lease = store.acquire(keys, keep_in=Tier.HOST)
        assert set(keys[: lease.num_pages]) <= self.written
        require_right_in_host(store, lease)
        self.pinned.append((lease, [bytes_in_host(store, slot) for slot in lease.slots]))

    @precondition(lambda self: self.pinned)
    @rule(which=st.integers(0, 9))
    def let_go_of_host(self, which: int) -> None:
        lease, _ = self.pinned.pop(which % len(self.pinned))
        lease.release()

    def let_everyone_go(self) -> None:
        for lease, _ in self.pinned:
            lease.release()
        self.pinned = []
        super().let_everyone_go()

    @invariant()
    def slots_that_are_leased_in_host_keep_their_bytes(self) -> None:
        for lease, found in self.pinned:
            assert [bytes_in_host(self.running.store, slot) for slot in lease.slots] == found


def test_store_with_leases_on_host_memory_agrees_with_the_model() -> None:
    run_state_machine_as_test(
        HostLeaseMachine,
        settings=settings(
            max_examples=lanes.examples(8, 120),
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
