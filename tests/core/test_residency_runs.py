"""Tests of runs of pages in which one page is in an unusual state.

The state machine generates these cases too rarely to cover them reliably.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest

from tests.support.planting import Bug, load
from tierstore.directory import residency as module
from tierstore.directory.invariants import check_residency
from tierstore.directory.residency import Residency, TierTable
from tierstore.errors import CapacityError, LeaseError
from tierstore.policy.orders import Fifo
from tierstore.policy.registry import make_policy
from tierstore.types import PageKey, Tier

KEYS = [PageKey(bytes([number]) * 36) for number in range(3)]
SIX = [PageKey(bytes([number]) * 36) for number in range(6)]


def residency_of(
    room: ModuleType = module, keys: Sequence[PageKey] = KEYS, host: Fifo | None = None
) -> Residency:
    """Return a ``Residency`` in which all of ``keys`` are readable in HOST."""
    tables = {
        Tier.HBM: TierTable(make_policy("lru"), num_slots=6),
        Tier.HOST: TierTable(host or make_policy("lru"), num_slots=6),
    }
    residency: Residency = room.Residency(tables)
    for key in keys:
        write_to_host(residency, key)
    return residency


def write_to_host(residency: Residency, key: PageKey) -> None:
    """Write a page directly into HOST, as some engines do."""
    [(slot, _)] = residency.reserve((key,), Tier.HOST)
    residency.commit((key,), Tier.HOST, (slot,))


def require_each_source_to_be_let_go_where_it_was(room: ModuleType) -> None:
    """Assert that a load unpins its own source, even if the page was evicted from HOST and written again meanwhile.

    The newer copy is not the source of the load, and keeps its pin.
    """
    residency = residency_of(room)
    host = residency.tables[Tier.HOST]
    places = residency.reserve(KEYS, Tier.HBM, src=Tier.HOST, pins=1)
    residency.evict(KEYS[1], Tier.HOST)
    write_to_host(residency, KEYS[1])
    [held] = residency.pin(KEYS[1:2], Tier.HOST)
    slots, sources = zip(*places, strict=True)
    assert held != sources[1]
    assert residency.commit(KEYS, Tier.HBM, slots, Tier.HOST, sources) == [True] * 3
    assert [host.copies[key].pins for key in KEYS] == [0, 1, 0]
    assert not host.quarantine
    check_residency(residency)


def test_each_source_is_unpinned_in_its_own_tier() -> None:
    require_each_source_to_be_let_go_where_it_was(module)


@pytest.mark.deep
def test_confusing_a_newer_copy_with_the_source_is_noticed() -> None:
    planted = load(
        module, Bug("another source", "below is None or below.slot != src_slots[i]:", "below is None:")
    )
    with pytest.raises((AssertionError, LeaseError)):
        require_each_source_to_be_let_go_where_it_was(planted)


def test_a_page_released_once_too_often_is_a_lease_error() -> None:
    residency = residency_of()
    slots = residency.pin(KEYS, Tier.HOST)
    residency.release(KEYS, Tier.HOST, slots)
    check_residency(residency)
    with pytest.raises(LeaseError, match="unpinned more often"):
        residency.release(KEYS[:1], Tier.HOST, slots[:1])


def test_a_run_and_its_pages_one_by_one_are_left_in_the_same_order() -> None:
    as_run, one_by_one = residency_of(keys=SIX), residency_of(keys=SIX)
    slots = as_run.pin(SIX, Tier.HOST)
    as_run.release(SIX, Tier.HOST, slots)
    slots = [slot for key in SIX for slot in one_by_one.pin((key,), Tier.HOST)]
    one_by_one.touch(SIX)
    for key, slot in zip(reversed(SIX), reversed(slots), strict=True):
        one_by_one.unpin((key,), Tier.HOST, (slot,))
    assert list(as_run.tables[Tier.HOST].droppable) == SIX[::-1]
    assert list(one_by_one.tables[Tier.HOST].droppable) == SIX[::-1]
    check_residency(as_run)


def test_pages_in_flight_count_for_a_prefix() -> None:
    residency = residency_of(keys=())
    assert not residency.has_prefix(KEYS[0])
    [(slot, _)] = residency.reserve(KEYS[:1], Tier.HOST)
    residency.reserve(KEYS[1:], Tier.HOST, parents=KEYS[:2])
    assert all(map(residency.has_prefix, KEYS))
    residency.fail(KEYS[0], Tier.HOST, slot)
    assert not any(map(residency.has_prefix, KEYS))
    check_residency(residency)


def test_storable_page_lifts_its_refused_parent() -> None:
    # The child's first copy was reserved with a parent. Then the page was put without naming a parent.
    tables = {
        Tier.HBM: TierTable(make_policy("lru"), num_slots=4),
        Tier.NVME: TierTable(make_policy("lru"), budget_nbytes=100),
    }
    residency = Residency(tables)
    parent, child = KEYS[:2]
    residency.memory_only.refuse(parent)
    residency.adopt(parent, Tier.HBM, residency.take(Tier.HBM), None)
    [(slot, _)] = residency.reserve((child,), Tier.HBM, parents=(parent,))
    assert not residency.memory_only.will_lift(parent)
    residency.adopt(child, Tier.HBM, residency.take(Tier.HBM), None)
    assert residency.memory_only.will_lift(parent)
    residency.fail(child, Tier.HBM, slot)
    check_residency(residency)


def test_new_pages_from_outside_the_tiers_each_take_a_victims_slot_until_none_is_left() -> None:
    residency = residency_of(keys=SIX)
    host = residency.tables[Tier.HOST]
    residency.pin(SIX[4:], Tier.HOST)
    new = [PageKey(bytes([100 + number]) * 36) for number in range(6)]
    places = residency.reserve(new, Tier.HOST)
    assert [drop.key for drop in residency.dropped] == SIX[:4]
    assert len({slot for slot, _ in places}) == 4
    assert list(host.copies) == SIX[4:] + new[:4]
    check_residency(residency)
    with pytest.raises(CapacityError):
        residency.reserve(new[4:], Tier.HOST)


def test_of_pages_that_arrive_together_only_the_last_can_be_evicted() -> None:
    residency = residency_of(keys=())
    slots = [slot for slot, _ in residency.reserve(SIX, Tier.HOST)]
    residency.commit(SIX[:3], Tier.HOST, slots[:3], parents=[None, *SIX[:2]])
    assert list(residency.tables[Tier.HOST].droppable) == [SIX[2]]
    residency.commit(SIX[3:], Tier.HOST, slots[3:], parents=SIX[2:5])
    assert list(residency.tables[Tier.HOST].droppable) == [SIX[5]]
    check_residency(residency)


def require_only_the_first_page_of_a_load_to_evict(room: ModuleType) -> None:
    """Assert that a load into a full tier evicts one page, and ends after the page that takes its slot."""
    residency = residency_of(room, SIX)
    hbm = residency.tables[Tier.HBM]
    places = residency.reserve(SIX[:3], Tier.HBM, src=Tier.HOST)
    slots, sources = zip(*places, strict=True)
    residency.commit(SIX[:3], Tier.HBM, slots, Tier.HOST, sources)
    for number in (7, 8, 9):
        residency.reserve((PageKey(bytes([number]) * 36),), Tier.HBM, pins=1)
    assert not hbm.free
    assert len(residency.reserve(SIX[3:], Tier.HBM, src=Tier.HOST)) == 1
    assert sum(key in hbm.copies for key in SIX[:3]) == 2
    check_residency(residency)


def test_only_the_first_page_of_a_load_evicts_another() -> None:
    require_only_the_first_page_of_a_load_to_evict(module)


@pytest.mark.deep
def test_a_load_whose_later_pages_evict_others_is_noticed() -> None:
    bug = Bug(
        "every page of a load may evict a page",
        "                if places and copied:\n                    break\n",
        "",
    )
    with pytest.raises(AssertionError):
        require_only_the_first_page_of_a_load_to_evict(load(module, bug))
