"""Test which records are evicted to make space in the byte budget for a larger record."""

from __future__ import annotations

import pytest

from tests.support.pages import chain
from tierstore.directory.eviction import choose_victims
from tierstore.directory.residency import Residency, TierTable
from tierstore.errors import CapacityError
from tierstore.policy import Lru
from tierstore.types import PageKey, Tier

ROOT, OLD_CHILD, NEW_CHILD, LONER = chain(4, "victims")


def family(budget: int) -> Residency:
    """Return a tier with four records of 10 bytes each.

    A root has a rank between those of its two children. A page without relatives is newer than all of them.
    """
    residency = Residency({Tier.NVME: TierTable(Lru(), budget_nbytes=budget)})
    parents: dict[PageKey, PageKey] = {OLD_CHILD: ROOT, NEW_CHILD: ROOT}
    for key in (OLD_CHILD, ROOT, NEW_CHILD, LONER):
        [(slot, _)] = residency.reserve((key,), Tier.NVME, 10)
        residency.commit((key,), Tier.NVME, (slot,), sizes=(10,), parents=(parents.get(key),))
    return residency


def chosen(residency: Residency, nbytes: int) -> list[PageKey]:
    return choose_victims(residency.tables, residency.lineage, Tier.NVME, nbytes)


@pytest.mark.parametrize(
    ("nbytes", "victims"),
    [
        (10, [OLD_CHILD]),
        (20, [OLD_CHILD, NEW_CHILD]),
        (30, [OLD_CHILD, NEW_CHILD, ROOT]),
        (40, [OLD_CHILD, NEW_CHILD, ROOT, LONER]),
    ],
)
def test_a_parent_is_evicted_after_its_last_child_and_then_at_its_own_rank(
    nbytes: int, victims: list[PageKey]
) -> None:
    assert chosen(family(40), nbytes) == victims


def test_an_unreachable_page_counts_once_although_its_child_leaves_with_it() -> None:
    residency = Residency({Tier.NVME: TierTable(Lru(), budget_nbytes=30)})
    for key, parent in ((OLD_CHILD, ROOT), (NEW_CHILD, OLD_CHILD), (LONER, None)):
        [(slot, _)] = residency.reserve((key,), Tier.NVME, 10, parents=(parent,))
        residency.commit((key,), Tier.NVME, (slot,), sizes=(10,), parents=(parent,))
    assert chosen(residency, 20) == [NEW_CHILD, OLD_CHILD]
    assert chosen(residency, 30) == [NEW_CHILD, OLD_CHILD, LONER]


def test_a_parent_is_not_evicted_while_a_copy_of_its_child_is_in_flight_to_another_tier() -> None:
    residency = Residency(
        {Tier.HOST: TierTable(Lru(), num_slots=2), Tier.NVME: TierTable(Lru(), budget_nbytes=20)}
    )
    for key, parent in ((ROOT, None), (OLD_CHILD, ROOT)):
        [(slot, _)] = residency.reserve((key,), Tier.NVME, 10, parents=(parent,))
        residency.commit((key,), Tier.NVME, (slot,), sizes=(10,), parents=(parent,))
    assert chosen(residency, 20) == [OLD_CHILD, ROOT]
    residency.reserve((OLD_CHILD,), Tier.HOST, 0)
    assert chosen(residency, 10) == [OLD_CHILD]
    with pytest.raises(CapacityError, match="the pages that can be dropped take less than"):
        chosen(residency, 20)


def test_choosing_changes_nothing() -> None:
    residency = family(40)
    before = (list(residency.tables[Tier.NVME].droppable), residency.tables[Tier.NVME].used_nbytes)
    chosen(residency, 30)
    assert (list(residency.tables[Tier.NVME].droppable), residency.tables[Tier.NVME].used_nbytes) == before


def test_too_few_unpinned_records_raise_capacity_error() -> None:
    residency = family(40)
    residency.pin((NEW_CHILD,), Tier.NVME)
    with pytest.raises(CapacityError, match="the pages that can be dropped take less than"):
        chosen(residency, 30)
