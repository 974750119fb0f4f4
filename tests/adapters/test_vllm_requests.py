"""Tests of requests through the whole connector: loads, failures, aborts, reused ids and changed weights."""

from __future__ import annotations

import pytest

import tierstore.adapters.vllm as adapter
from tests.adapters import vllm_planted
from tests.adapters.vllm_engine import DOCUMENT, IN, OUT, Engine, Request
from tests.adapters.vllm_stub import HOST
from tests.support.planting import Plant
from tierstore.adapters.vllm import loads
from tierstore.types import Match, PageKey, Tier


def test_the_package_names_only_the_connector_and_imports_no_vllm_for_its_parts() -> None:
    assert adapter.__all__ == ["TierStoreConnector"]
    with pytest.raises(AttributeError, match="Nothing"):
        adapter.Nothing  # noqa: B018


def test_a_document_is_loaded_after_the_engine_has_forgotten_it() -> None:
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.taken == 8
    assert engine.answers["r1"] == engine.answers["r2"]
    engine.close()


def test_a_request_whose_load_failed_is_not_offered_the_same_again() -> None:
    # F019
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.copies[0].fail_next((Tier.HOST, Tier.HBM), 1)
    engine.copies[0].fail_next((Tier.HOST, Tier.HBM), 0)
    name = engine.add(DOCUMENT, 2)
    engine.run()
    assert engine.recomputed == 1
    assert engine.answers[name] == engine.answers["r1"]
    engine.close()


def require_gone_on_from_what_arrived(page: int, pieces: int, patch: pytest.MonkeyPatch) -> None:
    """Load four pages, ``pieces`` at a time, so that one fails. Check that the request still answers correctly."""
    patch.setattr(loads, "MOST_A_STEP", pieces)
    patch.setattr(loads, "MOST_IF_IDLE", pieces)
    engine = Engine(HOST)
    try:
        engine.add(DOCUMENT, 2)
        engine.run()
        engine.forget()
        for _ in range(page // pieces):
            engine.copies[0].fail_next(IN)
        engine.copies[0].fail_next(IN, page % pieces)
        name = engine.add(DOCUMENT, 2)
        engine.run()
        assert engine.recomputed == 1
        assert engine.answers[name] == engine.answers["r1"]
    finally:
        engine.close()


@pytest.mark.parametrize("page", range(4))
@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_request_continues_after_the_loaded_pages_that_arrived(
    page: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_gone_on_from_what_arrived(page, pieces, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("plant", "pieces"),
    [(vllm_planted.the_first_bad_block_is_not_told, 4), (vllm_planted.a_gap_in_a_load_is_not_seen, 1)],
)
def test_continuing_after_a_page_that_did_not_arrive_is_detected(
    plant: Plant, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plant a bug that the state machine does not always find. ``require_gone_on_from_what_arrived`` must find it."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="reads another's token"):
        require_gone_on_from_what_arrived(1, pieces, monkeypatch)


def test_pages_of_an_aborted_load_are_not_stored_as_if_loaded() -> None:
    # F037
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.pace = 0.0
    for gate in engine.copies:
        gate.hold((Tier.HOST, Tier.HBM))
    name = engine.add(DOCUMENT, 2)
    engine.step()
    engine.step()
    assert engine.requests[name].status == "loading"
    store, keys = engine.half._tiers.store, engine.half._known[name].chains[0].first(4)
    store.evict(keys)
    engine.abort(name)
    engine.step()
    assert name in engine.requests  # its blocks are held as long as the copy can write them
    for gate in engine.copies:
        gate.open()
    engine.run()
    assert store.match(keys).num_pages == 0
    assert len(engine.free) == 8
    engine.close()


def with_an_aborted_load_that_is_held_up(config: dict[str, object] = HOST) -> tuple[Engine, str]:
    engine = Engine(config)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    engine.pace = 0.0
    for gate in engine.copies:
        gate.hold(IN)
    name = engine.add(DOCUMENT, 2)
    engine.step()
    engine.step()
    assert engine.requests[name].status == "loading"
    engine.abort(name)
    engine.step()
    assert name in engine.requests
    return engine, name


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("document", [DOCUMENT, [2] * 9])
def test_request_id_can_be_reused_once_its_aborted_load_is_reported(document: list[int], fails: bool) -> None:
    """Once the load is reported, vLLM frees the aborted request and accepts a new one with the same ID.

    The new request can get the same blocks at once.
    """
    engine, name = with_an_aborted_load_that_is_held_up()
    with pytest.raises(AssertionError, match="duplicate request id"):
        engine.add(document, 2, name)
    if fails:
        engine.copies[0].fail_next(IN, 0)
    engine.copies[0].let_go(IN)
    while name in engine.requests:
        engine.step()
    taken = engine.taken
    engine.forget()
    engine.add(document, 2, name)
    engine.copies[0].open()
    engine.run()  # the engine requires that each load is reported once, and checks every cell that it reads
    assert engine.answers[name][:9] == document
    assert (engine.answers[name] == engine.answers["r1"]) == (document == DOCUMENT)
    assert engine.taken - taken == (8 if document == DOCUMENT else 0)
    assert len(engine.free) == 8
    engine.check()
    engine.close()


def test_request_with_the_id_of_an_aborted_load_is_not_reported_as_loaded() -> None:
    """vLLM never sends such a request. Without the check, it would be reported as loaded when the aborted load ends."""
    engine, name = with_an_aborted_load_that_is_held_up()
    second = Request(name, list(DOCUMENT), 11)
    engine.scheduler.on_new_request(second)
    assert engine.scheduler.get_num_new_matched_tokens(second, 0) == (0, False)
    engine.scheduler.request_finished_all_groups(second, ([],))
    engine.copies[0].open()
    engine.run()
    assert len(engine.free) == 8
    engine.check()
    engine.close()


def test_pages_of_a_declined_offer_are_not_stored_as_if_loaded() -> None:
    """Abort a request between the offer and its load, which vLLM 0.33 can delay by a few steps.

    The request owns blocks for the offered pages, but nothing has been loaded into them.
    """
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    name = engine.add(DOCUMENT, 2)
    request = engine.requests[name]
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    store, keys = engine.half._tiers.store, engine.half._known[name].chains[0].first(4)
    store.evict(keys)
    request.tables = [[]]
    engine.pool.grow(request.tables, 8)
    request.num_computed_tokens = 8
    engine.abort(name)
    engine.run()
    assert store.match(keys).num_pages == 0
    assert len(engine.free) == 8
    engine.close()


def with_an_offer_that_the_weights_changed_after() -> tuple[Engine, str]:
    """Return an engine whose weights changed after it accepted an offer, and the name of the request.

    As in vLLM 0.33, the load has not been queued yet, but the request has blocks for the pages and counts their tokens
    as computed.
    """
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    engine.forget()
    name = engine.add(DOCUMENT, 2)
    request = engine.requests[name]
    assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    request.tables = [[]]
    engine.pool.grow(request.tables, 8)
    request.num_computed_tokens, request.status = 8, "loading"
    engine.epoch += 1
    assert engine.scheduler.reset_cache()
    return engine, name


def test_offer_taken_after_a_weight_change_is_reported_as_failed() -> None:
    engine, name = with_an_offer_that_the_weights_changed_after()
    engine._tell(engine.requests[name], 8)
    engine.run()
    assert engine.recomputed == 1
    assert engine.answers[name] == engine.answers["r1"]
    assert len(engine.free) == 8
    engine.check()
    engine.close()


def test_offer_declined_at_a_weight_change_is_not_stored_as_if_loaded() -> None:
    engine, name = with_an_offer_that_the_weights_changed_after()
    keys = engine.half._known[name].chains[0].first(4)
    engine.requests[name].told = True
    engine.abort(name)
    engine.run()
    assert engine.half._tiers.store.match(keys).num_pages == 0
    assert len(engine.free) == 8
    engine.close()


def test_offer_made_before_a_weight_change_is_not_repeated() -> None:
    engine, name = with_an_offer_that_the_weights_changed_after()
    assert engine.scheduler.get_num_new_matched_tokens(engine.requests[name], 0) == (0, False)
    engine.requests[name].told = True
    engine.abort(name)
    engine.run()
    engine.close()


def test_pages_being_saved_during_a_weight_change_are_never_offered() -> None:
    # F015
    engine = Engine(HOST)
    for gate in engine.copies:
        gate.hold(OUT)
    engine.pace = 0.0
    engine.add(DOCUMENT, 2)
    for _ in range(3):
        engine.step()
    engine.change_weights()
    for gate in engine.copies:
        gate.open()
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 2)
    engine.run()  # the engine checks every cell that it reads
    engine.check()
    engine.close()


def test_hit_is_looked_up_once_for_repeated_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(HOST)
    engine.add(DOCUMENT, 2)
    engine.run()
    asked: list[int] = []
    store = engine.half._tiers.store
    match = store.match

    def counted(keys: list[PageKey]) -> Match:
        asked.append(len(keys))
        found: Match = match(keys)
        return found

    monkeypatch.setattr(store, "match", counted)
    request = engine.requests[engine.add(DOCUMENT, 2)]
    for _ in range(20):
        assert engine.scheduler.get_num_new_matched_tokens(request, 0) == (8, True)
    assert len(asked) == 1
    engine.run()
    engine.close()
