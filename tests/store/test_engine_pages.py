"""Tests of HBM that belongs to an engine: layouts, copies out of and into its slots, and slots that are returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.bench import Bench, open_bench
from tests.support.engine import ENGINES, OWNED_BY_ENGINE, SLOTS, Engine, open_engine_bench, page_major, save
from tests.support.events import ManualEvent
from tests.support.pages import PATIENCE_S, SPEC, chain, let_deadline_come, tiers, where
from tests.support.stalls import IN, OUT, UP
from tests.support.waiting import wait_for
from tierstore.directory.writeback import Ticket
from tierstore.errors import ConfigError
from tierstore.store import Flush
from tierstore.types import LeaseState, Tier


def wait_settled(ticket: Ticket, bench: Bench) -> None:
    def settled() -> bool:
        bench.store.check()  # advances the store without taking the slots that poll reports
        return ticket.open == 0

    wait_for(settled)


@pytest.fixture
def engine() -> Engine:
    return page_major()


@pytest.fixture
def bench(engine: Engine, tmp_path: Path) -> Iterator[Bench]:
    bench = open_engine_bench(engine, nvme=tmp_path / "disk")
    yield bench
    bench.store.check()
    bench.close()


@pytest.mark.parametrize("build", ENGINES)
@pytest.mark.parametrize("nvme", [False, True])
def test_pages_are_read_back_in_any_layout(build: Callable[[], Engine], nvme: bool, tmp_path: Path) -> None:
    # F074
    engine = build()
    bench = open_engine_bench(engine, nvme=tmp_path if nvme else None)
    keys = chain(4)
    save(bench, engine, keys, [5, 0, 3, 1])
    if nvme:
        bench.store.demote(keys, Tier.NVME)
        assert bench.store.drain(PATIENCE_S)
    engine.wipe()
    with bench.store.acquire(keys, into=[2, 4, 0, 5]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.slots == [2, 4, 0, 5]
        assert all(engine.holds(slot, key) for slot, key in zip(lease.slots, keys, strict=True))
        assert not any(engine.holds(slot, key) for slot in (1, 3) for key in keys)
    bench.close()


def test_poll_returns_a_slot_only_after_its_copy_has_finished(bench: Bench, engine: Engine) -> None:
    keys = chain(2)
    bench.copies.hold(OUT)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, [0, 1])
    assert bench.store.poll() == []
    assert bench.store.match(keys).num_pages == 0
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert sorted(bench.store.poll()) == [0, 1]
    assert bench.store.poll() == []
    assert bench.store.match(keys).tiers == (Tier.HOST, Tier.HOST)


def test_a_copy_out_starts_only_after_the_event(bench: Bench, engine: Engine) -> None:
    keys = chain(1)
    event = ManualEvent()
    bench.store.put(keys, [2], after=event)
    assert bench.store.drain(0.02) is False
    assert bench.store.poll() == []
    engine.fill(2, keys[0])
    event.happen()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.poll() == [2]
    engine.wipe()
    with bench.store.acquire(keys, into=[4]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert engine.holds(4, keys[0])


def test_slots_of_pages_that_are_stored_already_are_reported_at_once_and_not_copied(
    bench: Bench, engine: Engine
) -> None:
    keys = chain(2)
    save(bench, engine, keys, [0, 1])
    bench.copies.hold(OUT)
    bench.store.put(keys, [4, 5])
    assert sorted(bench.store.poll()) == [4, 5]
    assert bench.copies.waiting(OUT) == 0


def test_a_failed_copy_out_is_a_miss_and_the_slot_is_reported(bench: Bench, engine: Engine) -> None:
    keys = chain(3)
    bench.copies.fail_next(OUT, 1)
    save(bench, engine, keys, [0, 1, 2])
    assert bench.store.match(keys).num_pages == 1
    save(bench, engine, keys, [0, 1, 2])
    assert bench.store.match(keys).num_pages == 3


def test_more_pages_than_host_holds_are_copied_down_as_host_gets_space(
    tmp_path: Path, engine: Engine
) -> None:
    bench = open_engine_bench(engine, host=2, nvme=tmp_path)
    keys = chain(6)
    save(bench, engine, keys, list(range(6)))
    assert bench.store.match(keys).num_pages == 6
    engine.wipe()
    with bench.store.acquire(keys, into=[5, 4, 3, 2, 1, 0]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 6
        assert all(engine.holds(slot, key) for slot, key in zip(lease.slots, keys, strict=True))
    bench.store.check()
    bench.close()


def test_pages_that_fit_nowhere_are_dropped_and_every_slot_is_reported(engine: Engine) -> None:
    bench = open_engine_bench(engine, host=2)
    for i in range(3):
        save(bench, engine, chain(6, str(i)), list(range(6)))
        bench.store.check()
    save(bench, engine, chain(2, "last"), [0, 1])
    assert bench.store.match(chain(2, "last")).num_pages == 2
    bench.close()


def test_truncated_lease_is_final_only_after_the_last_write_to_its_slots(
    bench: Bench, engine: Engine
) -> None:
    # F024: the engine writes into the slots of missing pages immediately
    keys, others = chain(4), chain(4, "other")
    save(bench, engine, keys, [0, 1, 2, 3])
    bench.store.demote(keys[1:], Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    engine.wipe()
    bench.records.fail_next(UP, 0)
    bench.records.hold(UP)
    with bench.store.acquire(keys, into=[0, 1, 2, 3]) as lease:
        bench.copies.settle()
        bench.copies.hold(IN)
        bench.records.let_go(UP)
        bench.settle()
        assert bench.copies.waiting(IN) == 1
        assert lease.wait(0.02) is LeaseState.PENDING
        assert lease.num_pages == 1
        bench.store.check()
        bench.copies.open()
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        for slot in (1, 2, 3):
            engine.fill(slot, others[slot])
        assert bench.store.drain(PATIENCE_S)
        assert engine.holds(0, keys[0])
        assert all(engine.holds(slot, others[slot]) for slot in (1, 2, 3))
    assert bench.store.poll() == []


def test_truncated_lease_starts_no_copies_into_released_slots(bench: Bench, engine: Engine) -> None:
    keys = chain(4)
    save(bench, engine, keys, [0, 1, 2, 3])
    bench.store.demote(keys, Tier.NVME)
    assert bench.store.drain(PATIENCE_S)
    engine.wipe()
    bench.records.hold(UP)
    with bench.store.acquire(keys, deadline_s=3600.0, into=[0, 1, 2, 3]) as lease:
        assert lease.num_pages == 4
        let_deadline_come(bench.store, lease)
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        bench.records.open()
        assert bench.store.drain(PATIENCE_S)
        assert not any(engine.holds(slot, key) for slot, key in enumerate(keys))
    assert bench.store.match(keys).num_pages == 4


def test_a_deadline_truncates_once_the_late_copies_have_finished(bench: Bench, engine: Engine) -> None:
    keys = chain(2)
    save(bench, engine, keys, [0, 1])
    bench.copies.hold(IN)
    with bench.store.acquire(keys, deadline_s=3600.0, into=[2, 3]) as lease:
        let_deadline_come(bench.store, lease)
        assert lease.wait(0.02) is LeaseState.PENDING
        bench.copies.open()
        assert lease.wait(PATIENCE_S) is LeaseState.FAILED
        assert lease.missing == list(keys)


def test_slots_of_a_lease_released_early_are_reported_by_poll(bench: Bench, engine: Engine) -> None:
    # F037
    keys = chain(2)
    save(bench, engine, keys, [0, 1])
    bench.copies.hold(IN)
    bench.store.acquire(keys, into=[2, 3]).release()
    assert bench.store.poll() == []
    bench.store.check()
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert sorted(bench.store.poll()) == [2, 3]


def test_slots_of_a_ready_lease_return_to_the_engine_at_once(bench: Bench, engine: Engine) -> None:
    keys = chain(2)
    save(bench, engine, keys, [0, 1])
    with bench.store.acquire(keys, into=[2, 3]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
    assert bench.store.poll() == []


def test_evicted_pages_are_not_loaded(bench: Bench, engine: Engine) -> None:
    keys = chain(3)
    save(bench, engine, keys, [0, 1, 2])
    assert bench.store.evict(keys[1:]) == 2
    with bench.store.acquire(keys, into=[3, 4, 5]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.missing == list(keys[1:])
    assert where(bench.store, keys[0]) == {Tier.HOST: "ready"}


@pytest.mark.parametrize("admission", ["all", "second_hit"])
@pytest.mark.parametrize("host", [8, 2, 1])
@pytest.mark.parametrize("ending", ["flush", "close"])
def test_pages_put_just_before_flush_or_close_are_on_disk_afterwards(
    tmp_path: Path, engine: Engine, admission: str, host: int, ending: str
) -> None:
    """Call flush or close while some copies out of the engine's slots are in progress and others have not begun."""
    config = tiers(
        SLOTS, host, tmp_path / "disk", hbm_more=OWNED_BY_ENGINE, nvme_more={"admission": admission}
    )
    keys = chain(6)
    bench = open_bench(config, SPEC)
    bench.store.register(engine.pages)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, range(6))
    if ending == "flush":
        bench.store.flush()
        assert bench.store.stats()["nvme"]["records"] == 6  # type: ignore[index]
        assert sorted(bench.store.poll()) == list(range(6))
        bench.store.check()
    bench.close()
    engine.wipe()
    again = open_bench(config, SPEC)
    again.store.register(engine.pages)
    with again.store.acquire(keys, into=range(6)) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert lease.num_pages == 6
        assert all(engine.holds(slot, key) for slot, key in enumerate(keys))
    again.close()


class SoonEvent(ManualEvent):
    """An event that occurs when it is queried for the twentieth time."""

    asked = 0

    def query(self) -> bool:
        self.asked += 1
        if self.asked == 20:
            self.happen()
        return super().query()


def test_flush_waits_for_pages_that_are_still_being_written(bench: Bench, engine: Engine) -> None:
    keys = chain(2)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, [0, 1], after=SoonEvent())
    bench.store.flush()
    assert [where(bench.store, key).get(Tier.NVME) for key in keys] == ["ready", "ready"]


def test_flush_counts_pages_that_did_not_leave_the_engine_and_returns(bench: Bench, engine: Engine) -> None:
    keys = chain(3)
    bench.copies.hold(OUT)
    bench.copies.fail_next(OUT, 1)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.store.put(keys, [0, 1, 2])
    ticket = Flush.of_unsaved(bench.store._pump).ticket
    bench.copies.holding.clear()
    bench.copies.let_go(OUT)
    wait_settled(ticket, bench)
    assert (ticket.open, ticket.failed) == (0, 1)
    assert [where(bench.store, key).get(Tier.NVME) for key in keys] == ["ready", None, "ready"]
    assert sorted(bench.store.poll()) == [0, 1, 2]


def test_flush_does_not_wait_for_pages_evicted_in_flight(bench: Bench, engine: Engine) -> None:
    keys = chain(2)
    bench.copies.hold(OUT)
    bench.store.put(keys, [0, 1])
    ticket = Flush.of_unsaved(bench.store._pump).ticket
    assert ticket.open == 2
    assert bench.store.evict(keys) == 2
    assert ticket.open == 0
    bench.store.put(keys[:1], [2])  # the same page again, while its first copy is still in flight
    ticket = Flush.of_unsaved(bench.store._pump).ticket
    bench.copies.open()
    wait_settled(ticket, bench)
    assert ticket.open == 0
    assert [where(bench.store, key).get(Tier.NVME) for key in keys] == ["ready", None]
    assert sorted(bench.store.poll()) == [0, 1, 2]
    assert not bench.directory.writeback.sinks.coming


def test_flush_writes_no_memory_only_page_that_is_being_copied_out(bench: Bench, engine: Engine) -> None:
    keys = chain(2)
    bench.copies.hold(OUT)
    bench.store.put(keys, [0, 1], memory_only=True)
    ticket = Flush.of_unsaved(bench.store._pump).ticket
    assert ticket.open == 0
    bench.copies.open()
    bench.store.flush()
    assert bench.store.drain(PATIENCE_S)
    assert [where(bench.store, key) for key in keys] == [{Tier.HOST: "ready"}] * 2


@pytest.mark.parametrize("why", ["memory_only", "second_hit"])
def test_a_page_to_be_stored_is_not_dropped_unsaved_for_the_next_one(
    tmp_path: Path, engine: Engine, why: str
) -> None:
    """The first put stores a page in HOST, which has space for one. The second adds a page and writes both to disk."""
    admission = "second_hit" if why == "second_hit" else "all"
    config = tiers(SLOTS, 1, tmp_path / "disk", hbm_more=OWNED_BY_ENGINE, nvme_more={"admission": admission})
    bench = open_bench(config, SPEC)
    bench.store.register(engine.pages)
    keys = chain(2)
    bench.store.put(keys[:1], [0], memory_only=why == "memory_only")
    assert bench.store.drain(PATIENCE_S)
    assert where(bench.store, keys[0]) == {Tier.HOST: "ready"}
    bench.store.put(keys, [1, 2])
    bench.store.flush()
    assert [where(bench.store, key).get(Tier.NVME) for key in keys] == ["ready", "ready"]
    assert sorted(bench.store.poll()) == [0, 1, 2]
    bench.store.check()
    bench.close()


def test_flush_writes_a_page_that_is_put_to_be_stored_while_its_memory_only_copy_is_there(
    bench: Bench, engine: Engine
) -> None:
    """Put a memory-only page again without ``memory_only``. It stays memory-only until the put's event has occurred."""
    keys = chain(1)
    bench.store.put(keys, [0], memory_only=True)
    assert bench.store.drain(PATIENCE_S)
    bench.store.put(keys, [1], after=SoonEvent())
    bench.store.flush()
    assert where(bench.store, keys[0]) == {Tier.HOST: "ready", Tier.NVME: "ready"}


def test_slots_withdrawn_before_their_copy_starts_are_free_at_once(engine: Engine) -> None:
    bench = open_engine_bench(engine, host=2)
    keys = chain(4)
    for slot, key in enumerate(keys):
        engine.fill(slot, key)
    bench.copies.hold(OUT)
    bench.store.put(keys, [0, 1, 2, 3])  # HOST has no space for two of them
    assert bench.store.withdraw([1, 2, 3, 5]) == [1]
    engine.fill(2, keys[0])
    bench.store.put(chain(1, "other"), [3])
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert sorted(bench.store.poll()) == [0, 1, 3]
    assert bench.store.match(keys).num_pages <= 2
    bench.store.check()
    bench.close()


@pytest.mark.parametrize("taken_back", [False, True])
def test_a_slot_is_not_reported_for_an_earlier_page_once_another_page_is_put_from_it(
    taken_back: bool, bench: Bench, engine: Engine
) -> None:
    """If the slot were reported, the engine would overwrite it while the newer page is being copied from it."""
    first, second = chain(1), chain(1, "other")
    save(bench, engine, first, [0])
    bench.store.put(first, [1])  # the store has this page already, so the slot is free at once
    if taken_back:
        assert bench.store.withdraw([1]) == []
    bench.copies.hold(OUT)
    engine.fill(1, second[0])
    bench.store.put(second, [1])
    assert bench.store.poll() == []
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.poll() == [1]


def test_a_slot_withdrawn_after_its_copy_has_finished_is_not_reported(bench: Bench, engine: Engine) -> None:
    engine.fill(1, chain(1)[0])
    bench.store.put(chain(1), [1])
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.withdraw([1]) == []
    assert bench.store.poll() == []


def test_slot_withdrawn_while_its_event_is_pending_is_still_in_use(bench: Bench, engine: Engine) -> None:
    event = ManualEvent()
    bench.store.put(chain(1), [2], after=event)
    assert bench.store.withdraw([2]) == [2]
    event.happen()
    assert bench.store.drain(PATIENCE_S)
    assert bench.store.poll() == [2]


def test_flush_does_not_wait_for_withdrawn_pages(tmp_path: Path, engine: Engine) -> None:
    bench = open_engine_bench(engine, host=2, nvme=tmp_path)
    bench.copies.hold(OUT)
    bench.store.put(chain(6), list(range(6)))
    ticket = Flush.of_unsaved(bench.store._pump).ticket
    assert ticket.open == 6
    assert bench.store.withdraw(list(range(6))) == [0, 1]
    bench.copies.open()
    wait_settled(ticket, bench)
    assert (ticket.open, ticket.failed) == (0, 4)
    bench.close()


def test_pages_put_one_by_one_have_the_given_parents(bench: Bench, engine: Engine) -> None:
    keys = chain(3)
    save(bench, engine, keys[:1], [0])
    for i in (1, 2):
        engine.fill(i, keys[i])
        bench.store.put([keys[i]], [i], parent=keys[i - 1])
        assert bench.store.drain(PATIENCE_S)
    assert [page["parent"] for page in bench.store.explain(keys)] == [None, keys[0].hex(), keys[1].hex()]


def test_unchained_pages_are_copied_together_with_their_own_parents(bench: Bench, engine: Engine) -> None:
    (one, two), (beside_one, beside_two) = chain(2), chain(2, "beside")
    keys, parents = [one, two, beside_one, beside_two], [None, one, one, two]
    bench.copies.hold(OUT)
    bench.store.put(keys, [0, 1, 2, 3], parents=parents)
    assert bench.copies.waiting(OUT) == 1
    bench.copies.open()
    assert bench.store.drain(PATIENCE_S)
    lineage = bench.directory.residency.lineage
    assert [lineage.parent(key) for key in keys] == parents
    with pytest.raises(ValueError, match="got 1 parents for 2 keys"):
        bench.store.put(keys[:2], [4, 5], parents=[None])


def test_with_store_owned_hbm_put_refuses_parents() -> None:
    bench = open_bench(tiers(2, 4), SPEC)
    slots = bench.store.allocate(1)
    with pytest.raises(ConfigError, match=r"needs hbm\.owner: engine"):
        bench.store.put(chain(1), slots, parents=[None])
    bench.store.free(slots)
    bench.close()
