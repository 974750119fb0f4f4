"""Tests of the planner: no order of promotions beats the plan's in small cases, and simple cases give known plans."""

from __future__ import annotations

from itertools import permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefetch.planner import PIECE_PAGES, plan
from prefetch.types import Compute, Machine, Retained, Want
from tests.support.pages import chain
from tierstore.types import Tier

HBM, HOST, NVME = Tier.HBM, Tier.HOST, Tier.NVME
ROOMY = Machine(read_s=4.0, load_s=1.0, hbm_pages=1000, host_pages=1000)


def want(name: str, tiers: list[Tier], deadline: float = inf, *, more: int = 0, priority: int = 0) -> Want:
    keys = tuple(chain(len(tiers) + more, name))
    return Want(request_id=name, keys=keys, tiers=tuple(tiers), deadline=deadline, priority=priority)


def lateness(ends: dict[str, float], wants: list[Want]) -> float:
    return max(ends[w.request_id] - w.deadline for w in wants)


def least_lateness(wants: list[Want], read_s: float, load_s: float) -> float:
    """Return the minimum lateness over all orders of the reads and all orders of requests on the link.

    The link is idle only when no page in host memory remains to be loaded.
    """
    pages = [(w.request_id, tier) for w in wants for tier in w.tiers]
    reads = [i for i, (_, tier) in enumerate(pages) if tier == NVME]
    best = inf
    for read_order in set(permutations([pages[i][0] for i in reads])):
        for ranks in permutations([w.request_id for w in wants]):
            best = min(best, lateness(_ends(wants, read_order, ranks, read_s, load_s), wants))
    return best


def _ends(
    wants: list[Want], read_order: tuple[str, ...], ranks: tuple[str, ...], read_s: float, load_s: float
) -> dict[str, float]:
    arrivals = [(read_s * (n + 1), name) for n, name in enumerate(read_order)]
    arrivals += [(0.0, w.request_id) for w in wants for tier in w.tiers if tier == HOST]
    ends, now = dict.fromkeys((w.request_id for w in wants), 0.0), 0.0
    while arrivals:
        there = [a for a in arrivals if a[0] <= now]
        if not there:
            now = min(arrivals)[0]
            continue
        taken = min(there, key=lambda a: ranks.index(a[1]))
        arrivals.remove(taken)
        now += load_s
        ends[taken[1]] = now
    return ends


@given(
    shapes=st.lists(
        st.tuples(st.lists(st.sampled_from([HOST, NVME]), min_size=1, max_size=2), st.integers(0, 20)),
        min_size=1,
        max_size=3,
    ),
    ratio=st.integers(1, 4),
)
@settings(deadline=None)
def test_no_other_order_reduces_the_maximum_lateness(
    shapes: list[tuple[list[Tier], int]], ratio: int
) -> None:
    wants = [want(str(i), tiers, float(deadline)) for i, (tiers, deadline) in enumerate(shapes)]
    machine = Machine(read_s=float(ratio), load_s=1.0, hbm_pages=99, host_pages=99)
    found = plan(wants, machine, 0.0)
    ends = {name: outcome.ready for name, outcome in found.outcomes.items()}
    assert lateness(ends, wants) == least_lateness(wants, float(ratio), 1.0)


def test_the_earliest_deadline_is_served_first_then_the_higher_priority() -> None:
    wants = [
        want("a", [HOST], 9.0),
        want("b", [HOST], 5.0),
        want("c", [HOST], 9.0, priority=1),
        want("d", [HOST]),
    ]
    assert [p.request_id for p in plan(wants, ROOMY, 0.0).promotions] == ["b", "c", "a", "d"]


def test_a_page_is_read_into_host_memory_and_then_loaded() -> None:
    found = plan([want("a", [NVME, NVME])], ROOMY, 10.0)
    assert [(p.src, p.dst, len(p.keys), p.starts, p.ends) for p in found.promotions] == [
        (NVME, HOST, 2, 10.0, 18.0),
        (HOST, HBM, 2, 14.0, 19.0),
    ]


def test_without_host_memory_a_page_is_read_directly_into_hbm() -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=9, host_pages=None)
    found = plan([want("a", [NVME, NVME])], machine, 0.0)
    assert [(p.src, p.dst, p.starts, p.ends) for p in found.promotions] == [(NVME, HBM, 0.0, 8.0)]


def test_later_request_uses_the_link_time_left_by_a_sooner_one() -> None:
    found = plan([want("slow", [NVME, NVME], 5.0), want("quick", [HOST] * 4, 50.0)], ROOMY, 0.0)
    assert found.outcomes["slow"].ready == 9.0
    assert found.outcomes["quick"].ready == 4.0


def test_a_small_window_of_host_memory_carries_a_large_document() -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=1000, host_pages=2)
    found = plan([want("a", [NVME] * 500)], machine, 0.0)
    assert found.outcomes["a"].load == 500
    assert found.outcomes["a"].ready == 4.0 * 500 + 1.0


def test_with_one_host_slot_reads_wait_for_loads() -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=1000, host_pages=1)
    assert plan([want("a", [NVME] * 3)], machine, 0.0).outcomes["a"].ready == 15.0


def test_pages_shared_by_two_requests_are_loaded_and_counted_once() -> None:
    both = [want("a", [HOST, HOST], 5.0), Want(request_id="b", keys=tuple(chain(2, "a")), tiers=(HOST, HOST))]
    found = plan(both, Machine(read_s=1.0, load_s=1.0, hbm_pages=2, host_pages=9), 0.0)
    assert [o.load for o in found.outcomes.values()] == [2, 2]
    assert sum(len(p.keys) for p in found.promotions) == 2


def test_pages_of_an_earlier_request_are_not_displaced_and_the_rest_waits_in_host_memory() -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=3, host_pages=2)
    found = plan(
        [want("later", [HOST, NVME, NVME, NVME], 9.0), want("sooner", [HBM, HBM], 5.0)], machine, 0.0
    )
    assert (found.outcomes["sooner"].load, found.outcomes["later"].load) == (2, 1)
    assert [(p.src, p.dst, len(p.keys)) for p in found.promotions] == [(HOST, HBM, 1), (NVME, HOST, 2)]


@pytest.mark.parametrize(("until", "load"), [(4.0, 1), (6.0, 3)])
def test_retained_pages_keep_their_space_before_requests_with_later_deadlines(
    until: float, load: int
) -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=3, host_pages=9)
    stay = Retained(keys=tuple(chain(2, "kept")), tiers=(HBM, HBM), until=until)
    assert plan([want("a", [HOST] * 3, 5.0)], machine, 0.0, [stay]).outcomes["a"].load == load


def test_pages_that_arrive_in_time_are_loaded_however_cheap_computing_is() -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=9, host_pages=9, compute=Compute(0.001))
    assert plan([want("a", [NVME] * 4, 17.0)], machine, 0.0).outcomes["a"] == (4, 17.0, 17.0)


def test_pages_that_are_faster_to_compute_are_not_loaded() -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=9, host_pages=9, compute=Compute(0.001))
    found = plan([want("a", [NVME] * 4, 0.0)], machine, 0.0)
    assert found.promotions == ()
    assert found.outcomes["a"] == (0, 0.0, 0.004)


def test_the_first_pages_are_loaded_and_the_rest_computed_meanwhile() -> None:
    machine = Machine(read_s=9.0, load_s=2.0, hbm_pages=9, host_pages=9, compute=Compute(2.0))
    assert plan([want("a", [HOST] * 6, 0.0)], machine, 0.0).outcomes["a"] == (3, 6.0, 6.0)


def test_deep_pages_cost_more_to_compute_and_are_loaded() -> None:
    deep = Compute(0.5, 0.25)
    assert deep.seconds(0, 2) == 2.0
    assert deep.seconds(2, 4) == 4.0
    machine = Machine(read_s=9.0, load_s=1.5, hbm_pages=99, host_pages=9, compute=deep)
    outcome = plan([want("a", [HOST] * 20, 0.0)], machine, 0.0).outcomes["a"]
    assert outcome.load > 15


def test_computing_the_missing_pages_hides_loads() -> None:
    machine = Machine(read_s=4.0, load_s=2.0, hbm_pages=9, host_pages=9, compute=Compute(2.0))
    assert plan([want("a", [HOST] * 4, 0.0, more=4)], machine, 0.0).outcomes["a"] == (4, 8.0, 8.0)


def test_without_a_deadline_all_pages_are_eventually_loaded() -> None:
    machine = Machine(read_s=4.0, load_s=1.0, hbm_pages=9, host_pages=9, compute=Compute(0.001))
    assert plan([want("a", [NVME] * 4)], machine, 0.0).outcomes["a"].load == 4


def test_promotions_are_split_into_pieces_the_store_starts_at_once() -> None:
    found = plan([want("a", [HOST] * (2 * PIECE_PAGES + 3))], ROOMY, 0.0)
    assert [len(p.keys) for p in found.promotions] == [PIECE_PAGES, PIECE_PAGES, 3]


def test_planning_stops_once_most_pages_is_reached() -> None:
    wants = [want(str(i), [HOST] * 10, float(i)) for i in range(10)]
    found = plan(wants, ROOMY, 0.0, most_pages=15)
    assert sum(len(p.keys) for p in found.promotions) == 20
    assert set(found.outcomes) == {str(i) for i in range(10)}


def test_unknown_rates_delay_nothing() -> None:
    machine = Machine(read_s=0.0, load_s=0.0, hbm_pages=9, host_pages=2, compute=Compute(1.0))
    assert plan([want("a", [NVME] * 5, 0.0)], machine, 7.0).outcomes["a"] == (5, 7.0, 7.0)


def test_planning_is_repeatable_and_changes_nothing() -> None:
    wants = [want("a", [NVME, HOST, HBM], 3.0), want("b", [HOST], 1.0)]
    assert plan(wants, ROOMY, 0.0) == plan(wants, ROOMY, 0.0)
