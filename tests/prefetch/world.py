"""Rules that every plan must follow, checked page by page and independently of how the planner works."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

from prefetch.types import Machine, Outcome, Plan, Promotion, Retained, Want
from tests.support.pages import chain
from tierstore.types import PageKey, Tier

SEQUENCES = [chain(5, "a"), chain(4, "b"), [*chain(5, "a")[:2], *chain(2, "c")], chain(2, "d")]
"""Keys of four sequences. The third shares its first two pages with the first."""


def order(wants: Sequence[Want]) -> list[Want]:
    """Return the wants in the order in which they must be served."""
    return sorted(wants, key=lambda want: (want.deadline, -want.priority))


def spans(plan: Plan, src: Tier) -> list[Promotion]:
    return [promotion for promotion in plan.promotions if promotion.src == src]


def require_possible(plan: Plan, wants: Sequence[Want], machine: Machine, now: float) -> None:
    """Assert that a plan can be executed.

    Each edge carries one page at a time, no page is copied before it is in the source tier, and no page is copied
    to the same tier twice. Each promotion must be of a single page, so ``PIECE_PAGES`` must be 1.
    """
    tiers = {key: tier for want in wants for key, tier in zip(want.keys, want.tiers, strict=False)}
    read = {p.keys[0]: p.ends for p in plan.promotions if (p.src, p.dst) == (Tier.NVME, Tier.HOST)}
    for src, seconds in ((Tier.NVME, machine.read_s), (Tier.HOST, machine.load_s)):
        free = now
        for p in sorted(spans(plan, src), key=lambda p: (p.starts, p.ends)):
            assert len(p.keys) == 1
            assert p.starts >= free, "an edge carries two pages at once"
            assert p.ends == p.starts + seconds
            free = p.ends
            source = tiers[p.keys[0]]
            if src == Tier.NVME or p.keys[0] not in read:
                assert source == src, "a page is brought from where it is not"
            else:
                assert p.starts >= read[p.keys[0]], "a page is loaded before it was read"
    twice = Counter((p.keys[0], p.dst) for p in plan.promotions)
    assert not twice or max(twice.values()) == 1, "a page is brought twice"
    _require_places(plan, machine)


def _require_places(plan: Plan, machine: Machine) -> None:
    """Assert that the pages that pass through host memory never need more than ``host_pages`` slots at a time."""
    if machine.host_pages is None:
        assert all((p.src, p.dst) == (Tier.NVME, Tier.HBM) for p in plan.promotions if p.src == Tier.NVME)
        return
    loaded = {p.keys[0]: p.ends for p in spans(plan, Tier.HOST)}
    reads = [(p.starts, loaded.get(p.keys[0], inf)) for p in spans(plan, Tier.NVME)]
    for start, _ in reads:
        held = sum(a <= start < b or a == b == start for a, b in reads)
        if machine.read_s and machine.load_s:
            assert held <= machine.host_pages, "host memory has not so many places"


def covered(plan: Plan, want: Want) -> list[PageKey]:
    return list(want.keys[: plan.outcomes[want.request_id].load])


def require_room(
    plan: Plan, wants: Sequence[Want], machine: Machine, retained: Sequence[Retained] = ()
) -> None:
    """Assert that HBM has space for the pages of the wants, and that only these are loaded.

    If a want loads pages, the pages that are retained no longer than until that want's deadline must also fit.
    """
    mine = {key for want in wants for key in covered(plan, want)}
    assert len(mine) <= max(0, machine.hbm_pages)
    assert {p.keys[0] for p in plan.promotions if p.dst == Tier.HBM} <= mine
    tiers = {key: tier for want in wants for key, tier in zip(want.keys, want.tiers, strict=False)}
    loaded = {p.keys[0] for p in plan.promotions if p.dst == Tier.HBM}
    assert loaded == {key for key in mine if tiers[key] != Tier.HBM}, "a page is counted on and not brought"
    for want in wants:
        outcome = plan.outcomes[want.request_id]
        new = loaded.intersection(covered(plan, want))
        stay = {
            key
            for r in retained
            if r.until <= want.deadline
            for key, tier in zip(r.keys, r.tiers, strict=False)
            if tier == Tier.HBM
        }
        sooner = {k for w in order(wants)[: order(wants).index(want)] for k in covered(plan, w)}
        if new - sooner:
            assert len(stay | sooner | new) <= machine.hbm_pages, "a retained page is displaced"
        assert outcome.load <= len(want.tiers)


def done_with(want: Want, alone: Outcome, last_read: float, machine: Machine, now: float) -> float:
    """Return the time at which the prompt is complete if ``alone.load`` pages are loaded and the rest is computed."""
    assert machine.compute is not None
    start = max(want.deadline, now)
    rest = machine.compute.seconds(alone.load, len(want.keys))
    return max(alone.ready, max(start, last_read) + rest)
