"""Test which blocks are stored, and what happens to blocks that are reused while they are being copied out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.adapters import vllm_planted as planted
from tests.adapters.vllm_engine import DOCUMENT, OUT, Engine
from tests.adapters.vllm_pool import Kind
from tests.support.pages import chain
from tests.support.planting import Plant
from tierstore.adapters.vllm import saves as storing_module
from tierstore.adapters.vllm.kv_groups import Group, Groups, State, Window
from tierstore.adapters.vllm.requests import RequestState, Step
from tierstore.adapters.vllm.saves import Stores
from tierstore.types import Match, PageKey, Tier


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


def test_blocks_are_overwritten_only_after_their_pages_are_saved() -> None:
    # F022, F041
    engine = reuse_blocks_under_slow_copies()
    assert engine.taken == 8
    engine.check()
    engine.close()


@pytest.mark.deep
@pytest.mark.parametrize("plant", [planted.no_fence, planted.worker_does_not_wait])
def test_overwriting_blocks_without_a_fence_is_detected(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="another's token"):
        reuse_blocks_under_slow_copies()


class FakeStore:
    """A store that records every ``put``. ``reading`` contains the blocks that a copy is reading."""

    def __init__(self) -> None:
        self.puts: list[tuple[list[PageKey], list[int], list[PageKey | None]]] = []
        self.reading: set[int] = set()

    def put(self, keys: list[PageKey], blocks: list[int], parents: list[PageKey | None]) -> None:
        self.puts.append((keys, blocks, parents))

    def withdraw(self, blocks: list[int]) -> list[int]:
        return [block for block in blocks if block in self.reading]


def test_reused_block_is_not_stored_under_its_old_key() -> None:
    store: Any = FakeStore()
    storing = Stores(store, Groups((Group(0, 4),)), None)
    one, two, three = chain(3)
    storing.add([one, two, three], [5, 6, 7], [None, one, two])
    assert storing.reused([6]) == ()
    storing.put(set())
    assert store.puts == [([one, three], [5, 7], [None, two])]
    assert storing.busy == {5, 7}


def test_reused_block_is_fenced_only_while_a_copy_reads_it() -> None:
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


def test_stores_per_step_are_bounded_and_skip_blocks_being_loaded(
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


def test_evicted_pages_are_stored_again_from_the_engines_prefix_cache() -> None:
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


# -- windows ----------------------------------------------------------------------------------------------------

ROOM: dict[str, Any] = {"host": {"capacity": 48 * 64, "pin": "never"}}
BESIDE = (Kind(), Kind(window=3))
LONG = [i % 3 for i in range(25)]


@pytest.mark.parametrize(
    ("interval", "stored"), [(None, list(range(12))), (0, [11]), (8, [3, 7, 11]), (4, [1, 3, 5, 7, 9, 11])]
)
def test_window_group_stores_only_blocks_where_a_hit_is_likely_to_end(
    interval: int | None, stored: list[int]
) -> None:
    engine = Engine(ROOM, blocks=48, kinds=BESIDE, interval=interval)
    name = engine.add(LONG, 1)
    window = engine.half._known[name].chains[1]
    engine.run()
    held = engine.half._tiers.store._directory.residency.tables[Tier.HOST].copies
    assert [number for number, key in enumerate(window.first(99)) if key in held] == stored
    engine.forget()
    engine.add(LONG, 2)
    engine.run()
    assert engine.taken == 24
    engine.check()
    engine.close()


def test_the_next_turn_of_a_chat_finds_the_window_at_the_end_of_the_answer() -> None:
    engine = Engine(ROOM, blocks=48, kinds=BESIDE, interval=0)
    first = engine.add(DOCUMENT, 6)
    engine.run()
    engine.forget()
    turn = engine.answers[first]
    assert len(turn) == 15
    engine.add([*turn, 1, 2], 2)
    engine.run()
    assert engine.taken == 14
    engine.check()
    engine.close()


def test_aborted_prompt_is_found_up_to_its_last_computed_token() -> None:
    engine = Engine(ROOM, blocks=48, kinds=BESIDE, interval=0)
    name = engine.add(LONG, 2)
    while engine.requests[name].num_computed_tokens < 16:
        engine.step()
    engine.abort(name)
    engine.run()
    engine.forget()
    engine.add(LONG, 2)
    engine.run()
    assert engine.taken == 16
    engine.close()


def test_window_of_a_shared_prefix_is_stored_by_the_second_request() -> None:
    """Run three requests that diverge after a common prefix, and check which of them stores the prefix's window.

    The first request cannot know where later requests will diverge. The second learns it from the full-attention pages.
    """
    engine = Engine(ROOM, blocks=48, kinds=BESIDE, interval=0)
    taken = []
    for last in range(3):
        engine.forget()
        before = engine.taken
        engine.add([*DOCUMENT, 2, *[last] * 8], 1)
        engine.run()
        taken.append(engine.taken - before)
    assert taken == [0, 0, 10]
    engine.check()
    engine.close()


def test_windows_without_full_attention_are_all_stored() -> None:
    engine = Engine(ROOM, blocks=48, kinds=(Kind(window=3),), interval=0)
    engine.add(LONG, 2)
    engine.run()
    engine.forget()
    engine.add([*LONG[:11], 2], 1)
    engine.run()
    assert engine.taken == 10
    engine.close()


@dataclass
class Counted:
    """A store that counts the pages put into it, by group, and discards them."""

    pages: Counter[bytes] = field(default_factory=Counter)

    def put(self, keys: list[PageKey], blocks: list[int], parents: list[PageKey | None]) -> None:
        self.pages.update(key[:1] for key in keys)

    def match(self, keys: list[PageKey]) -> Match:
        return Match(0, (), True)


def pages_of(windows: Sequence[int], interval: int | None, tokens: int) -> int:
    """Return how many pages of a prompt of ``tokens`` tokens are stored when it is computed in steps of 8,192.

    There is one group with full attention, and one group for each of ``windows``.
    """
    groups = Groups(
        (Group(0, 16), *(Group(i, 16, 1, Window(w)) for i, w in enumerate(windows, 1))), interval=interval
    )
    hashes = [i.to_bytes(32, "big") for i in range(tokens // 16)]
    request: Any = SimpleNamespace(block_hashes=hashes, num_tokens=tokens)
    known = RequestState(request, groups.chains(request, [bytes([i]) * 32 for i in range(len(groups.all))]))
    store: Any = Counted()
    storing = Stores(store, groups, None)
    blocks = tokens // 16
    tables = [list(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(len(groups.all))]
    for computed in range(0, tokens, 8192):
        storing.follow(known, Step("r", computed, 8192, tables, [], first=not computed))
    while storing._collected:
        storing.put(set())
        storing.returned(list(storing.busy))
    return sum(store.pages.values())


@pytest.mark.parametrize(
    ("windows", "before", "after"),
    [
        ([1024] * 6, 7 * 2048, 2048 + 6 * 65),  # Gemma 3 27B: 10 layers per group
        ([128], 2 * 2048, 2048 + 9),  # gpt-oss-20b: 12 layers per group
    ],
)
def test_number_of_pages_stored_for_a_prompt_of_32768_tokens(
    windows: list[int], before: int, after: int
) -> None:
    """With interval 0, window groups store only what a hit at the end of the prompt needs.

    A longer prompt hits all blocks of this prompt. The same prompt hits all of them except the last.
    """
    assert pages_of(windows, None, 32768) == before
    assert pages_of(windows, 0, 32768) == after


def test_state_inside_a_block_is_stored_with_the_block_that_attention_ends_in() -> None:
    groups = Groups((Group(0, 8, 4), Group(1, 8, 4, State())))
    request: Any = SimpleNamespace(block_hashes=[bytes([i]) * 32 for i in range(12)], num_tokens=15)
    known = RequestState(request, groups.chains(request, [bytes([i]) * 32 for i in range(2)]))
    spine, states = known.chains[0], known.chains[1]
    store: Any = FakeStore()
    store.match = lambda keys: Match(0, (), True)
    store.has_prefix = lambda key: False
    storing = Stores(store, groups, None)

    offers = [
        (1, 9, 14),
        (1, 8, 13),
        (1, 0, 12),
        (1, 7, 20),
    ]  # 13: not a hash; 12: null block; 20: not computed yet
    storing.follow(known, Step("r", 8, 8, [[3, 4], [0, 5]], [], first=True, offers=offers))
    storing.put(set())
    after_first, [at_14, state_at_14] = spine.at(0), [*spine.ending([7]), *states.ending([7])]
    assert store.puts == [
        ([at_14, state_at_14], [4, 9], [after_first, after_first]),
        ([after_first], [3], [None]),
    ]
    storing.put(set())
    assert len(store.puts) == 2  # the full block waits until its copy has ended
    storing.returned([4])
    storing.put(set())
    assert store.puts[2:] == [([spine.at(1)], [4], [after_first])]

    storing.returned([3, 4, 9])
    storing.follow(known, Step("r", 16, 2, [[3, 4, 6], [0, 0, 5]], [6], first=False, offers=[(1, 10, 18)]))
    assert storing.reused([6]) == ()
    storing.put({10})
    assert len(store.puts) == 3
    storing.put(set())
    assert store.puts[3:] == [(states.ending([9]), [10], [spine.at(1)])]
    storing.follow(known, Step("r", 18, 1, [[3, 4, 6], [0, 0, 5]], [], first=False, offers=[(1, 11, 18)]))
    assert storing.waiting
    storing.forget()
    storing.put(set())
    assert len(store.puts) == 4


@pytest.mark.parametrize("interval", [0, 4])
def test_preempted_request_with_a_window_can_be_aborted(interval: int) -> None:
    config = {"host": {"capacity": 12 * 64, "pin": "never"}}
    engine = Engine(config, blocks=16, kinds=(Kind(), Kind(window=3)), interval=interval)
    name = engine.add([0] * 9, 3)
    for _ in range(4):
        engine.step()
    engine.preempt(name)  # vLLM then has no blocks of the request any more
    engine.abort(name)
    engine.run()
    engine.check()
    engine.close()
