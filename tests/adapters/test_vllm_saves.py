"""What waits to be stored, and blocks that are reused while they are copied out."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters import vllm_planted as planted
from tests.adapters.vllm_engine import DOCUMENT, OUT, Engine
from tests.support.pages import chain
from tests.support.planting import Plant
from tierstore.adapters.vllm import saves as storing_module
from tierstore.adapters.vllm.kv_groups import Group, Groups
from tierstore.adapters.vllm.saves import Stores
from tierstore.types import PageKey, Tier


def reuse_blocks_under_slow_copies() -> Engine:
    engine = Engine({"host": {"capacity": 20 * 64, "pin": "never"}})
    for gate in engine.copies:
        gate.hold(OUT)
    engine.pace = 0.0
    engine.add(DOCUMENT, 1)
    while engine.requests:
        engine.step()
    engine.add([1, 2] * 7, 1)  # needs all blocks but one
    while engine.requests:
        engine.step()
    for gate in engine.copies:
        gate.open()
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 1)
    engine.run()
    return engine


def test_blocks_are_overwritten_only_when_what_they_held_is_saved() -> None:
    # F022, F041
    engine = reuse_blocks_under_slow_copies()
    assert engine.taken == 8
    engine.check()
    engine.close()


@pytest.mark.deep
@pytest.mark.parametrize("plant", [planted.no_fence, planted.worker_does_not_wait])
def test_without_a_fence_that_would_be_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="another's token"):
        reuse_blocks_under_slow_copies()


class FakeStore:
    """Keeps what it was given; ``reading``: blocks that a copy reads."""

    def __init__(self) -> None:
        self.puts: list[tuple[list[PageKey], list[int], list[PageKey | None]]] = []
        self.reading: set[int] = set()

    def put(self, keys: list[PageKey], blocks: list[int], parents: list[PageKey | None]) -> None:
        self.puts.append((keys, blocks, parents))

    def withdraw(self, blocks: list[int]) -> list[int]:
        return [block for block in blocks if block in self.reading]


def test_a_block_that_was_given_away_is_not_stored_as_what_it_held() -> None:
    store: Any = FakeStore()
    storing = Stores(store, Groups((Group(0, 4),)), None)
    one, two, three = chain(3)
    storing.add([one, two, three], [5, 6, 7], [None, one, two])
    assert storing.reused([6]) == ()
    storing.put(set())
    assert store.puts == [([one, three], [5, 7], [None, two])]
    assert storing.busy == {5, 7}


def test_a_block_given_away_is_fenced_only_while_a_copy_reads_it() -> None:
    store: Any = FakeStore()
    storing = Stores(store, Groups((Group(0, 4),)), None)
    storing.add(chain(2), [5, 6], [None, chain(1)[0]])
    storing.put(set())
    store.reading = {6}
    assert storing.reused([5, 6, 9]) == (6,)
    assert storing.busy == {6}
    storing.add(chain(1, "new"), [6], [None])
    storing.put(set())
    assert len(store.puts) == 1  # not before the old copy has ended
    storing.returned([6])
    storing.put(set())
    assert store.puts[1:] == [(chain(1, "new"), [6], [None])]


def test_a_bounded_number_is_stored_in_a_step_and_nothing_out_of_blocks_being_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing_module, "MOST_A_STEP", 2)
    store: Any = FakeStore()
    storing = Stores(store, Groups((Group(0, 4),)), None)
    keys = chain(5)
    storing.add(keys, [1, 2, 3, 4, 5], [None, *keys[:-1]])
    storing.put({1})
    assert [blocks for _, blocks, _ in store.puts] == [[2, 3]]
    assert storing.waiting
    storing.put({1})
    storing.put(set())
    assert [blocks for _, blocks, _ in store.puts] == [[2, 3], [4, 5], [1]]
    storing.add(chain(1, "late"), [6], [None])
    storing.returned([1, 2, 3, 4, 5])
    assert storing.waiting
    storing.forget()
    assert not storing.waiting


def test_what_the_store_has_lost_is_stored_again_out_of_the_engines_own_cache() -> None:
    engine = Engine({"host": {"capacity": 20 * 64, "pin": "never"}}, blocks=12)
    engine.add(DOCUMENT, 1)
    engine.run()
    store = engine.half._tiers.store
    held = engine.half._tiers.store._directory.residency.tables[Tier.HOST].copies
    assert len(held) == 4
    for lost in list(held):
        store.evict([lost])
        assert lost not in held
        name = engine.add(DOCUMENT, 1)
        engine.run()
        assert engine.taken == 0
        assert engine.answers[name] == engine.answers["r1"]
        assert lost in held
    engine.check()
    engine.close()
