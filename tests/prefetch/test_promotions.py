"""Tests of the queue of pages to promote before they are needed: the rules that hold for every caller."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from prefetch import promotions
from prefetch.planner import PIECE_PAGES
from prefetch.promotions import PromotionQueue
from tests.prefetch.promotions_machine import PromotionsMachine
from tests.prefetch.rig import UP, stored
from tests.support import lanes, planting
from tests.support.bench import Bench
from tests.support.pages import chain, where
from tests.support.planting import SEARCH, Bug, load, require_noticed
from tierstore.store import TierStore
from tierstore.types import Hint, PageKey, Tier


def hinted(store: TierStore, name: str, keys: list[PageKey]) -> Hint:
    store.take_hints()
    hint = Hint(name, 1, tuple(keys))
    store.hint(hint)
    return hint


def arriving(store: TierStore, keys: list[PageKey]) -> list[PageKey]:
    return [key for key in keys if "arriving" in where(store, key).values()]


def test_the_budget_holds_over_any_number_of_advances(bench: Bench) -> None:
    store, keys = bench.store, stored(bench.store, "a", 8)
    queue = PromotionQueue(store, 3)
    queue.want(hinted(store, "r", keys), keys, Tier.HOST)
    bench.records.hold(UP)
    for _ in range(4):
        queue.advance(Tier.HOST)
    assert arriving(store, keys) == keys[:3]
    assert (queue.in_flight, queue.left(Hint("r", 1, tuple(keys)))) == (3, 5)
    bench.open_gates()
    assert store.drain(60.0)
    queue.advance(Tier.HOST)
    assert store.drain(60.0)
    assert store.match(keys[:6]).tiers == (Tier.HOST,) * 6


def test_an_advance_starts_no_more_pages_than_allowed_but_covers_existing_ones(bench: Bench) -> None:
    store, keys = bench.store, stored(bench.store, "a", 8)
    queue = PromotionQueue(store, PIECE_PAGES)
    hint = hinted(store, "r", keys)
    queue.want(hint, keys[:3], Tier.HOST)
    queue.advance(Tier.HOST)
    assert store.drain(60.0)
    queue.want(hint, keys, Tier.HOST)
    found = queue.advance(Tier.HOST, 4)
    assert [key for each in found for key in each.started] == keys[3:7]
    assert [key for each in found for key in each.covered] == keys[:7]


def test_wants_are_started_in_order_and_equal_ones_by_arrival(bench: Bench) -> None:
    store, queue = bench.store, PromotionQueue(bench.store, 2)
    keys = {name: stored(store, name, 1) for name in ("late", "first", "second", "soon")}
    orders = {"late": 2.0, "first": 1.0, "second": 1.0, "soon": 0.0}
    for name in keys:
        queue.want(hinted(store, name, keys[name]), keys[name], Tier.HOST, order=(orders[name],))
    bench.records.hold(UP)
    started = []
    for _ in range(2):
        started += [each.hint.request_id for each in queue.advance(Tier.HOST)]
        bench.open_gates()
        assert store.drain(60.0)
    assert started == ["soon", "first", "second", "late"]


def test_an_evicted_page_ends_its_want_and_blocks_no_other(bench: Bench) -> None:
    store, queue = bench.store, PromotionQueue(bench.store, 8)
    first, second = stored(store, "first", 3), stored(store, "second", 2)
    hints = [hinted(store, "first", first), hinted(store, "second", second)]
    for hint in hints:
        queue.want(hint, hint.keys, Tier.HOST)
    store.evict(first[1:2])
    queue.advance(Tier.HOST)
    assert not queue
    assert store.drain(60.0)
    assert Tier.HOST not in where(store, first[2])
    assert store.match(second).tiers == (Tier.HOST,) * 2


@pytest.mark.parametrize(("passes", "tiers"), [(0, (Tier.HOST,) * 2), (1, (Tier.HBM,) * 2)])
def test_blocked_want_is_overtaken_by_at_most_the_allowed_number(
    bench: Bench, passes: int, tiers: tuple[Tier, ...]
) -> None:
    store, queue = bench.store, PromotionQueue(bench.store, 8, passes=passes)
    below, ready = stored(store, "below", 2), stored(store, "ready", 2, Tier.HOST)
    queue.want(hinted(store, "below", below), below, Tier.HBM)
    queue.want(hinted(store, "ready", ready), ready, Tier.HBM)
    queue.advance(Tier.HBM)
    assert store.drain(60.0)
    assert store.match(ready).tiers == tiers
    assert store.match(below).tiers == (Tier.NVME,) * 2


def test_hints_whose_pages_may_be_displaced_are_passed_to_the_store(store: TierStore) -> None:
    queue = PromotionQueue(store, 8)
    later, sooner = stored(store, "later", 8, Tier.HOST), stored(store, "sooner", 2, Tier.HOST)
    hints = [hinted(store, "sooner", sooner), hinted(store, "later", later)]
    queue.want(hints[1], later, Tier.HBM)
    queue.advance(Tier.HBM)
    assert store.drain(60.0)
    queue.want(hints[0], sooner, Tier.HBM)
    queue.advance(Tier.HBM)
    assert store.match(sooner).tiers == (Tier.HOST,) * 2
    queue.clear()
    queue.want(hints[0], sooner, Tier.HBM, later=hints[1:])
    queue.advance(Tier.HBM)
    assert store.drain(60.0)
    assert store.match(sooner).tiers == (Tier.HBM,) * 2


def test_evicted_pages_are_not_counted_as_kept(store: TierStore) -> None:
    queue = PromotionQueue(store, 8)
    there, hint = stored(store, "a", 2, Tier.HOST), hinted(store, "r", chain(3, "a"))
    assert list(queue.keep(hint, chain(3, "a"), Tier.HOST, ())) == there
    assert not queue
    assert queue.in_flight == 0


BUGS = [
    Bug(
        "there is no budget", "            if room <= 0:\n                break\n", "            room = 32\n"
    ),
    Bug("landed pages are never counted", "if self.most - self.in_flight < PIECE_PAGES:", "if False:"),
    Bug("pages in flight are not counted", "self.in_flight = found.in_flight", "self.in_flight = 0"),
    Bug(
        "an ended want continues",
        "wants[:] = [want for want in wants if _mark(want.hint) != mark]",
        "pass",
    ),
    Bug("the latest want goes first", "want = wants[at]", "want = wants[len(wants) - 1 - at]"),
    Bug("wants have no order", "    return want.order\n", "    return ()\n"),
    Bug("any number may pass", "1 + self._passes)", "99)"),
    Bug("a call starts as much as it likes", "left -= len(found.keys)", "left -= 0"),
    Bug("an evicted page is awaited", "[:1]).num_pages:", "[:1]) is not None:"),
    Bug(
        "a hint that ended is kept",
        "                self.over(want.hint)\n                at = 0\n",
        "                at += 1\n",
    ),
    Bug("pages are asked for again", "        want.done += pages\n", "        want.done += pages > 9\n"),
]


def machine_over(bug: Bug | None) -> type[PromotionsMachine]:
    return type("Planted", (PromotionsMachine,), {"module": load(promotions, bug)})


def test_no_order_of_wants_and_stalls_breaks_the_rules() -> None:
    few = settings(max_examples=lanes.examples(10, 100), stateful_step_count=25)
    run_state_machine_as_test(PromotionsMachine, settings=few)


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_the_machine_notices_a_bug(bug: Bug) -> None:
    shown = (*planting.NOTICED, ValueError)
    require_noticed(machine_over(bug), settings(SEARCH, max_examples=400), shown)


@pytest.mark.deep
def test_the_loaded_copy_without_a_bug_passes() -> None:
    run_state_machine_as_test(machine_over(None), settings=settings(SEARCH, max_examples=20))
