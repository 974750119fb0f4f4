"""Requests through the whole connector: loaded, failed, aborted, forgotten."""

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
    """The load of four pages, so many at a time, in which one page fails: every cell that is read is checked."""
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
def test_a_request_goes_on_behind_the_pages_of_its_load_that_arrived(
    page: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_gone_on_from_what_arrived(page, pieces, monkeypatch)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("plant", "pieces"),
    [(vllm_planted.the_first_bad_block_is_not_told, 4), (vllm_planted.a_gap_in_a_load_is_not_seen, 1)],
)
def test_a_request_that_goes_on_behind_a_page_that_did_not_arrive_is_noticed(
    plant: Plant, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs that the machine meets in some searches only."""
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="reads another's token"):
        require_gone_on_from_what_arrived(1, pieces, monkeypatch)


def test_what_an_aborted_load_was_to_bring_is_not_stored_as_if_it_had_come() -> None:
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
    assert name in engine.requests  # its blocks are held while the copy may write them
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
def test_an_id_is_used_again_once_the_aborted_load_that_had_it_was_told_of(
    document: list[int], fails: bool
) -> None:
    """vLLM frees the aborted request then, and takes another of this id, which may get the same blocks at once."""
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
    engine.run()  # each load is told of once, and every cell that is read is checked
    assert engine.answers[name][:9] == document
    assert (engine.answers[name] == engine.answers["r1"]) == (document == DOCUMENT)
    assert engine.taken - taken == (8 if document == DOCUMENT else 0)
    assert len(engine.free) == 8
    engine.check()
    engine.close()


def test_a_request_of_an_id_that_an_aborted_load_still_has_gets_nothing_by_that_loads_end() -> None:
    """No vLLM sends one. It would be told that its pages are there when those of the other have come."""
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


def test_an_offer_that_was_not_taken_is_not_stored_as_if_it_had_come() -> None:
    """vLLM 0.33 may put a load off until steps have ended; a request aborted meanwhile has blocks for it."""
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
    """vLLM 0.33 has put the load off: the request has blocks for the pages, and counts them."""
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


def test_an_offer_that_is_taken_after_the_weights_changed_is_told_to_have_failed() -> None:
    engine, name = with_an_offer_that_the_weights_changed_after()
    engine._tell(engine.requests[name], 8)
    engine.run()
    assert engine.recomputed == 1
    assert engine.answers[name] == engine.answers["r1"]
    assert len(engine.free) == 8
    engine.check()
    engine.close()


def test_an_offer_that_was_not_taken_when_the_weights_changed_is_not_stored_as_if_it_had_come() -> None:
    engine, name = with_an_offer_that_the_weights_changed_after()
    keys = engine.half._known[name].chains[0].first(4)
    engine.requests[name].told = True
    engine.abort(name)
    engine.run()
    assert engine.half._tiers.store.match(keys).num_pages == 0
    assert len(engine.free) == 8
    engine.close()


def test_an_offer_made_before_the_weights_changed_is_not_repeated() -> None:
    engine, name = with_an_offer_that_the_weights_changed_after()
    assert engine.scheduler.get_num_new_matched_tokens(engine.requests[name], 0) == (0, False)
    engine.requests[name].told = True
    engine.abort(name)
    engine.run()
    engine.close()


def test_pages_on_their_way_out_when_the_weights_change_are_never_offered() -> None:
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
    engine.run()  # every cell that it reads is checked
    engine.check()
    engine.close()


def test_a_verdict_is_looked_up_once_however_often_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
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
