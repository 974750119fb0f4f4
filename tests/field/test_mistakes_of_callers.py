"""Tests that a caller's mistake or a failing device affects only that call, and that no slot or pin is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.engine import page_major
from tests.support.events import ManualEvent
from tests.support.pages import (
    PATIENCE_S,
    SPEC,
    chain,
    fill,
    page_tensor,
    read,
    require_nothing_held,
    tiers,
    where,
    write,
)
from tierstore.config import load_config
from tierstore.store import TierStore
from tierstore.types import Hint, HintResult, LeaseState, PageKey, Tier


class Broken:
    """A device event that fails: the first ``asked`` queries return False, and all later ones raise an error."""

    def __init__(self, asked: int) -> None:
        self._asked = asked

    def query(self) -> bool:
        self._asked -= 1
        if self._asked < 0:
            raise RuntimeError("device lost")
        return False

    def synchronize(self) -> None:
        raise RuntimeError("device lost")


CALLS: dict[str, Callable[[TierStore, Any], object]] = {
    "match": lambda store, keys: store.match(keys),
    "acquire": lambda store, keys: store.acquire(keys),
    "demote": lambda store, keys: store.demote(keys, Tier.HOST),
    "evict": lambda store, keys: store.evict(keys),
    "explain": lambda store, keys: store.explain(keys),
}


@pytest.mark.parametrize("strange", [None, [], bytearray(36), 7, "key"], ids=repr)
@pytest.mark.parametrize("call", CALLS)
def test_an_invalid_page_key_anywhere_in_a_list_is_refused_and_changes_nothing(
    call: str, strange: object
) -> None:
    with TierStore.open(tiers(40, 40), SPEC) as store:
        keys = chain(35)
        write(store, keys)
        with pytest.raises(TypeError, match="page keys"):
            CALLS[call](store, [*keys, strange])
        assert store.match(keys).tiers == (Tier.HBM,) * 35
        require_nothing_held(store)


@pytest.mark.parametrize("strange", [None, [], bytearray(36), chain(1)], ids=repr)
def test_a_hint_with_an_invalid_page_key_is_refused_before_the_store_sees_it(strange: Any) -> None:
    with pytest.raises(ValueError, match="page keys"):
        Hint("r", 1, (*chain(2), strange), "retain")


def test_a_list_of_keys_that_grows_after_its_hint_retains_nothing_forever() -> None:
    with TierStore.open(tiers(2, None), SPEC) as store:
        keys: Any = chain(1)
        other = chain(2, "other")
        store.hint(Hint("r", 1, keys, "retain"))
        keys += other[:1]
        assert store.hint(Hint("r", 2, ())) is HintResult.APPLIED
        store.hint(Hint("s", 1, tuple(other[:1]), "retain"))
        write(store, other[:1])
        write(store, chain(1, "newer"))
        write(store, other[1:])
        assert where(store, other[0]) == {Tier.HBM: "ready"}


@pytest.mark.parametrize("strange", [5, "now", object()], ids=["5", "now", "object"])
def test_non_event_object_is_refused_and_no_slot_is_lost(strange: Any) -> None:
    with TierStore.open(tiers(4, 4), SPEC) as store:
        keys = chain(2)
        write(store, keys)
        slots, lease = store.allocate(1), store.acquire(keys)
        with pytest.raises(TypeError, match="after must be an event"):
            store.put(chain(1, "other"), slots, after=strange)
        with pytest.raises(TypeError, match="after must be an event"):
            store.free(slots, after=strange)
        with pytest.raises(TypeError, match="after must be an event"):
            lease.release(after=strange)
        store.free(slots)
        lease.release()
        require_nothing_held(store)


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_pages_whose_writer_failed_with_its_device_are_missing_and_their_slots_are_reused(
    asked: int,
) -> None:
    with TierStore.open(tiers(4, 4), SPEC) as store:
        keys = chain(3)
        write(store, keys[:1])
        with store.acquire(keys[:1]) as lease:
            slots = store.allocate(2)
            page_tensor(store)[slots] = 0
            store.put(keys[1:], slots, after=Broken(asked), lease=lease)
            for _ in range(asked + 1):
                store.poll()
            assert store.match(keys).num_pages == 1
        assert read(store, keys) == 1
        write(store, keys)
        assert read(store, keys) == 3
        require_nothing_held(store)


def test_page_put_again_by_a_failed_writer_is_read_from_the_copy_below() -> None:
    with TierStore.open(tiers(2, 4), SPEC) as store:
        keys = chain(2)
        write(store, keys)
        store.demote(keys, Tier.HOST)
        assert store.drain(PATIENCE_S)
        slots = store.allocate(2)
        page_tensor(store)[slots] = 0
        store.put(keys, slots, after=Broken(1))
        store.poll()
        store.poll()
        assert read(store, keys) == 2
        require_nothing_held(store)


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_slots_and_leases_whose_last_reader_failed_with_its_device_are_released(asked: int) -> None:
    with TierStore.open(tiers(4, 4), SPEC) as store:
        keys = chain(2)
        write(store, keys)
        store.free(store.allocate(1), after=Broken(asked))
        store.acquire(keys).release(after=Broken(asked))
        slots = store.allocate(2)
        fill(store, keys, slots)
        assert not set(store.put(keys, slots, after=Broken(asked))) & set(slots)
        for _ in range(asked + 1):
            store.poll()
        assert read(store, keys) == 2
        require_nothing_held(store)


def test_failed_event_delays_no_other_event() -> None:
    with TierStore.open(tiers(4, 4), SPEC, pump=False) as store:
        happens, waits = ManualEvent(), ManualEvent()
        keys = chain(2)
        slots = store.allocate(2)
        fill(store, keys, slots)
        store.put(keys[:1], slots[:1], after=happens)
        store.free(store.allocate(1), after=Broken(1))
        store.put(keys[1:], slots[1:], after=waits)
        happens.happen()
        store.poll()
        store.poll()
        store.check()
        waits.happen()
        assert read(store, keys) == 2
        require_nothing_held(store)


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_slots_whose_writer_failed_are_returned_to_the_engine_and_become_no_pages(asked: int) -> None:
    source: dict[str, object] = {
        "hbm": {"owner": "engine", "device": "cpu"},
        "host": {"capacity": 4 * SPEC.page_nbytes, "pin": "never"},
    }
    with TierStore.open(load_config(source), SPEC) as store:
        engine = page_major()
        store.register(engine.pages)
        keys: list[PageKey] = chain(2)
        store.put(keys, [0, 1], after=Broken(asked))
        back: list[int] = []
        for _ in range(asked + 2):
            back += store.poll()
        assert sorted(back) == [0, 1]
        assert store.drain(PATIENCE_S)
        assert store.match(keys).num_pages == 0
        for key, slot in zip(keys, [0, 1], strict=True):
            engine.fill(slot, key)
        store.put(keys, [0, 1])
        assert store.drain(PATIENCE_S)
        with store.acquire(keys, into=[2, 3]) as lease:
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert engine.holds(2, keys[0])
            assert engine.holds(3, keys[1])
        store.check()
