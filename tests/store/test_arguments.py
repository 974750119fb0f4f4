"""Test that invalid seconds, slots, counts and layers are rejected before anything changes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from prefetch import Compute, Prefetcher, Sessions, Waiting, ahead
from tests.support.bench import Bench, open_bench
from tests.support.engine import SLOTS, Engine, page_major
from tests.support.pages import PATIENCE_S, SPEC, chain, fill, read, tier_stats, tiers, write
from tierstore.errors import ConfigError
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import Hint, LeaseState, Tier


@pytest.fixture
def store() -> Iterator[TierStore]:
    bench = open_bench(tiers(hbm=4, host=8), SPEC)
    bench.store.take_hints()
    yield bench.store
    bench.store.check()
    bench.close()


@pytest.fixture
def lease(store: TierStore) -> Lease:
    write(store, chain(2))
    return store.acquire(chain(2))


# -- seconds ------------------------------------------------------------------------------------------------------

NO_NUMBERS = ("1", True, None, 1j, [1.0])
NO_DURATIONS = (math.nan, np.float32("nan"), -1.0, -math.inf, 10**400)
NO_TIMES = (math.nan, -math.inf, 10**400)

WAITS: list[Callable[[TierStore, Any], object]] = [
    lambda s, timeout_s: s.take_hints(timeout_s),
    lambda s, timeout_s: s.allocate(1, timeout_s),
    lambda s, timeout_s: s.allocate(0, timeout_s),
    lambda s, timeout_s: s.drain(timeout_s),
    lambda s, timeout_s: s.close(timeout_s),
    lambda s, timeout_s: Prefetcher(s).close(timeout_s),
]


@pytest.mark.parametrize("wait", WAITS, ids=range(len(WAITS)))
@pytest.mark.parametrize("timeout_s", NO_DURATIONS)
def test_wait_rejects_nan_and_negative_timeouts(
    store: TierStore, wait: Callable[[TierStore, Any], object], timeout_s: Any
) -> None:
    """A wait with a timeout of NaN would never end, because no comparison with NaN is true."""
    with pytest.raises(ValueError, match=r"timeout_s must be a number of seconds, 0 or more, got "):
        wait(store, timeout_s)
    assert tier_stats(store, Tier.HBM)["free"] == 4


@pytest.mark.parametrize("wait", WAITS, ids=range(len(WAITS)))
@pytest.mark.parametrize("timeout_s", NO_NUMBERS)
def test_non_numeric_timeout_is_refused(
    store: TierStore, wait: Callable[[TierStore, Any], object], timeout_s: Any
) -> None:
    with pytest.raises(TypeError, match=r"timeout_s must be a number of seconds, 0 or more, got "):
        wait(store, timeout_s)
    assert tier_stats(store, Tier.HBM)["free"] == 4


@pytest.mark.parametrize(
    "wait", [lambda lease, s: lease.wait(s), lambda lease, s: lease.ready(0, s)], ids=["wait", "ready"]
)
def test_lease_refuses_invalid_timeouts_and_stays_usable(
    lease: Lease, wait: Callable[[Lease, Any], object]
) -> None:
    for strange in NO_DURATIONS:
        with pytest.raises(ValueError, match="timeout_s must be "):
            wait(lease, strange)
    with pytest.raises(TypeError, match=r"timeout_s must be .*, got '1'"):
        wait(lease, "1")
    assert lease.wait(math.inf) is LeaseState.READY
    assert lease.ready(0, math.inf) is None
    lease.release()


def test_deadline_may_have_passed_but_must_be_a_number(store: TierStore) -> None:
    write(store, chain(2))
    for strange in NO_TIMES:
        with pytest.raises(ValueError, match=r"deadline_s must be a number of seconds, got "):
            store.acquire(chain(2), strange)
    with pytest.raises(TypeError, match="deadline_s must be a number of seconds, got 'soon'"):
        store.acquire(chain(2), "soon")  # type: ignore[arg-type]
    for known in (-5.0, 0, Fraction(1, 3), np.float32(3.0), math.inf):
        with store.acquire(chain(2), known) as lease:  # type: ignore[arg-type]
            assert lease.wait(PATIENCE_S) is LeaseState.READY
            assert lease.num_pages == 2


def test_an_infinite_timeout_waits_until_the_condition_holds() -> None:
    """Python's threads reject an infinite timeout. The store must treat it like any timeout that is long enough."""
    store = TierStore.open(tiers(hbm=4, host=8), SPEC)
    store.take_hints()
    store.hint(Hint("r", 1, tuple(chain(1))))
    assert [hint.request_id for hint in store.take_hints(math.inf)] == ["r"]
    store.free(store.allocate(1, math.inf))
    assert store.drain(math.inf)
    with Prefetcher.attach(store) as prefetcher:
        assert asyncio.run(prefetcher.ready([], math.inf)) == 0
        prefetcher.close(math.inf)
    store.close(math.inf)


@pytest.mark.parametrize("by", [*NO_TIMES, "noon", True])
def test_prefetcher_ready_refuses_invalid_times(store: TierStore, by: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"by must be a number of seconds, got "):
        asyncio.run(Prefetcher(store).ready(chain(1), by))


HINTING: list[tuple[str, Callable[[TierStore, Any], object]]] = [
    ("pace_s", lambda s, value: Waiting(s, pace_s=value)),
    ("starts_in_s", lambda s, value: Waiting(s).add("r", chain(1), starts_in_s=value)),
    ("ttl_s", lambda s, value: Sessions(s).ended("a", chain(1), value)),
    ("Compute.page_s", lambda s, value: Compute(value)),
    ("Compute.square_s", lambda s, value: Compute(1.0, value)),
]


@pytest.mark.parametrize(("name", "call"), HINTING, ids=[name for name, _ in HINTING])
@pytest.mark.parametrize("value", [*NO_TIMES, "1", True])
def test_hint_sources_refuse_invalid_seconds(
    store: TierStore, name: str, call: Callable[[TierStore, Any], object], value: Any
) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"{name} must be a .*number of seconds"):
        call(store, value)
    assert store.take_hints() == []


def test_times_that_are_multiplied_must_be_finite(store: TierStore) -> None:
    for call in (lambda: Waiting(store, pace_s=math.inf), lambda: Compute(math.inf)):
        with pytest.raises(ValueError, match="must be a finite number of seconds, got inf"):
            call()


# -- slots, counts, layers ----------------------------------------------------------------------------------------

NO_INTEGERS = (True, 1.0, np.float64(1.0), np.True_, "1", None, torch.tensor(1.0))
INTEGERS: list[Callable[[int], Any]] = [np.int64, np.uint8, torch.tensor]


@pytest.mark.parametrize("strange", NO_INTEGERS, ids=repr)
def test_non_integer_slot_is_refused_and_nothing_changes(store: TierStore, strange: Any) -> None:
    slots = store.allocate(2)
    for call in (
        lambda: store.put(chain(2), [slots[0], strange]),
        lambda: store.free([strange, slots[0]]),
    ):
        with pytest.raises(TypeError, match=r"a slot must be an integer, got "):
            call()
    assert tier_stats(store, Tier.HBM)["owned"] == 2
    assert store.match(chain(2)).num_pages == 0
    store.free(slots)


@pytest.mark.parametrize("strange", NO_INTEGERS, ids=repr)
def test_non_integer_engine_slot_is_refused_and_nothing_changes(strange: Any) -> None:
    engine, bench = page_major(), engine_bench()
    store = bench.store
    store.register(engine.pages)
    for call in (
        lambda: store.put(chain(2), [0, strange]),
        lambda: store.acquire(chain(2), into=[0, strange]),
        lambda: store.withdraw([strange]),
    ):
        with pytest.raises(TypeError, match=r"a slot must be an integer, got "):
            call()
    assert store.drain(PATIENCE_S)
    assert store.poll() == []
    assert_saved_and_loaded(store, engine, int)
    bench.close()


@pytest.mark.parametrize("kind", INTEGERS, ids=["int64", "uint8", "torch"])
def test_numpy_and_torch_integers_are_accepted_as_slots(store: TierStore, kind: Callable[[int], Any]) -> None:
    keys = chain(2)
    slots = store.allocate(kind(3))
    fill(store, keys, slots[:2])
    kept = store.put(keys, [kind(slot) for slot in slots[:2]])
    store.free([kind(slots[2])])
    assert [type(slot) for slot in kept] == [int, int]
    assert read(store, keys) == 2
    with store.acquire(keys) as lease:
        assert lease.ready(kind(1), PATIENCE_S) is None


@pytest.mark.parametrize("kind", INTEGERS, ids=["int64", "uint8", "torch"])
def test_numpy_and_torch_integers_are_accepted_as_engine_slots(kind: Callable[[int], Any]) -> None:
    engine, bench = page_major(), engine_bench()
    bench.store.register(engine.pages)
    assert_saved_and_loaded(bench.store, engine, kind)
    bench.close()


def engine_bench() -> Bench:
    return open_bench(tiers(SLOTS, 8, hbm_more={"owner": "engine"}), SPEC)


def assert_saved_and_loaded(store: TierStore, engine: Engine, kind: Callable[[int], Any]) -> None:
    """Save two pages from slots 1 and 2, and load them into slots 3 and 4. ``kind`` converts the slot numbers."""
    keys = chain(2)
    for key, slot in zip(keys, (1, 2), strict=True):
        engine.fill(slot, key)
    store.put(keys, [kind(1), kind(2)])
    assert store.drain(PATIENCE_S)
    assert sorted(store.poll()) == [1, 2]
    assert store.withdraw([kind(1)]) == []
    with store.acquire(keys, into=[kind(3), kind(4)]) as lease:
        assert lease.wait(PATIENCE_S) is LeaseState.READY
        assert [(slot, type(slot)) for slot in lease.slots] == [(3, int), (4, int)]
    assert engine.holds(3, keys[0])
    assert engine.holds(4, keys[1])
    store.check()


@pytest.mark.parametrize("strange", NO_INTEGERS, ids=repr)
def test_non_integer_counts_and_layers_are_refused(store: TierStore, lease: Lease, strange: Any) -> None:
    with pytest.raises(TypeError, match=r"n must be an integer, got "):
        store.allocate(strange)
    with pytest.raises(TypeError, match=r"layer must be an integer, got "):
        lease.ready(strange)
    with pytest.raises(TypeError, match=r"window must be an integer, got "):
        ahead(store, [], lambda _: [], window=strange)
    with pytest.raises(TypeError, match=r"most must be an integer, got "):
        Waiting(store, most=strange)
    assert tier_stats(store, Tier.HBM)["owned"] == 0
    lease.release()


def test_out_of_range_counts_and_layers_are_refused(store: TierStore, lease: Lease) -> None:
    with pytest.raises(ValueError, match="n must be an integer of at least 0, got -1"):
        store.allocate(-1)
    for layer in (-1, 2):
        with pytest.raises(ValueError, match=rf"layer must be .*, got {layer}"):
            lease.ready(layer)
    lease.release()


@pytest.mark.parametrize("strange", [True, False, 0, 1, 1.0, np.int64(1), "HOST", [Tier.HOST]], ids=repr)
def test_a_value_that_only_equals_a_tier_is_refused(store: TierStore, strange: Any) -> None:
    """True and 1 equal HOST, so an unchecked value would send pages to a tier that has no name."""
    hint = Hint("r", 1, tuple(chain(2)))
    store.hint(hint)
    write(store, chain(2))
    with pytest.raises(ValueError, match=r"cannot demote to .*; choose one of HOST"):
        store.demote(chain(2), strange)
    with pytest.raises(ValueError, match=r"cannot evict from .*; choose one of HBM, HOST"):
        store.evict(chain(2), strange)
    with pytest.raises(ValueError, match=r"cannot promote to .*; choose one of HBM"):
        store.promote(hint, chain(2), strange)
    assert store.drain(PATIENCE_S)
    assert store.match(chain(2)).tiers == (Tier.HBM, Tier.HBM)


@pytest.mark.parametrize("revision", [1.5, math.nan, True, "1"])
def test_non_integer_revision_is_refused(revision: Any) -> None:
    """A revision such as NaN is neither above nor below another one, so no later hint could replace this hint."""
    with pytest.raises(ValueError, match=r"Hint\.revision must be an integer, got "):
        Hint("r", revision, tuple(chain(1)))


@pytest.mark.parametrize(
    ("spec", "found"),
    [(None, "NoneType"), ("x", "str"), (7, "int"), ([SPEC, None], "NoneType"), ({}, "dict")],
)
def test_open_refuses_an_object_that_is_not_a_page_spec(spec: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"spec must be a PageSpec or a sequence of them, got {found}"):
        TierStore.open(tiers(hbm=4, host=8), spec)
