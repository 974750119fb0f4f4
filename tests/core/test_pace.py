"""Tests of how much the copy engine launches at a time, on a virtual clock.

The link must always have work, and the first layer must not wait for launches of later layers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from tests.core.virtual_link import FAST, SLOW, restore
from tests.support import planting
from tests.support.planting import Bug
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.gpu import cuda_copy_engine

GIB = 1 << 30


def require_first_layer_when_its_bytes_can_be_there(module: ModuleType) -> None:
    """Assert that the first layer arrives hardly later than the link can have copied its layer group, one of 16.

    The margin allows for copies of other groups that were launched before all pages were known, and for a copy that
    the link had already begun.
    """
    found = restore(module, 16 * GIB, FAST)
    assert found.first < 1.12 * found.link / 16
    assert found.whole < 1.01 * found.link


def require_few_launches_while_pages_are_taken(module: ModuleType) -> None:
    """Assert that few launches precede the first layer. On a slow processor, they decide when that layer arrives."""
    for page_size, most in ((64, 70), (16, 110)):
        found = restore(module, 16 * GIB, SLOW, page_size)
        assert found.early < most
        assert found.whole < 1.03 * found.link


def require_work_for_the_link_when_little_is_restored(module: ModuleType) -> None:
    for processor, late in ((FAST, 0.002), (SLOW, 0.0035)):
        found = restore(module, GIB // 4, processor)
        assert found.first < found.link / 4
        assert found.whole < found.link + late


def require_work_for_the_link_while_the_caller_computes(module: ModuleType) -> None:
    """Assert that the link is hardly idle while the caller computes, although encoded pages are transferred fast."""
    for processor in (FAST, SLOW):
        found = restore(module, 16 * GIB, processor, codec="int8", away=0.008)
        assert found.idle < 0.0015
        assert found.whole < found.link + 0.002


def require_work_for_the_link_while_an_engine_steps(module: ModuleType) -> None:
    """Assert that the link is hardly idle between two steps of an engine, although only the engine's thread runs."""
    for processor in (FAST, SLOW):
        found = restore(module, 2 * GIB, processor, page_size=16, away=0.014, most_groups=1)
        assert found.idle < 0.0015


def require_work_for_the_link_after_the_last_of_few_blocks(module: ModuleType) -> None:
    """Assert that the last blocks of a step are launched at once, and not when the engine calls again."""
    for processor in (FAST, SLOW):
        for transfers in (4, 6, 16):
            nbytes = transfers * BATCH_PAGES * (2 << 20)
            found = restore(module, nbytes, processor, page_size=16, away=0.03, most_groups=1)
            assert found.idle < 0.0005


PROMISES = (
    require_first_layer_when_its_bytes_can_be_there,
    require_few_launches_while_pages_are_taken,
    require_work_for_the_link_when_little_is_restored,
    require_work_for_the_link_while_the_caller_computes,
    require_work_for_the_link_while_an_engine_steps,
    require_work_for_the_link_after_the_last_of_few_blocks,
)


@pytest.mark.parametrize("promise", PROMISES)
def test_link_stays_busy_and_the_first_layer_arrives_early(promise: Callable[[ModuleType], None]) -> None:
    promise(cuda_copy_engine)


BUGS = [
    Bug(
        "submit launches more than one group",
        "self._advance(transfer.dst, 1)",
        "self._advance(transfer.dst, 4)",
    ),
    Bug("poll launches only one group", "self._advance(dst, self._pace.at_once)", "self._advance(dst, 1)"),
    Bug("no launch waits for more pages of its group", "if self._better_later(lane):", "if False:"),
    Bug(
        "the lane's thread never launches",
        "return not lane.growing and lane.nbytes < behind // 4",
        "return False",
    ),
    Bug(
        "later layers are launched as far ahead as the first",
        "return -(-nbytes // 4) if lane.may_be_overtaken",
        "return nbytes if 1",
    ),
    Bug("an engine's queue is shallow", "pace_of(host.held, each, groups)", "pace_of(host.held, each, 2)"),
    Bug(
        "encoded pages count with their decoded size",
        "= host.held.payload_nbytes",
        "= host.held.layout.page_nbytes",
    ),
]


PACES = [
    Bug(
        "the last blocks of a step wait for more",
        "WHOLE = Pace(ahead=2 << 30, enough=512 << 20, at_once=16)",
        "WHOLE = Pace(ahead=2 << 30, at_once=16)",
    ),
    Bug("launches are small", "pieces: int = 256", "pieces: int = 64"),
    Bug("launches of encoded pages are small", "ENCODED = Pace(pieces=512)", "ENCODED = Pace()"),
    Bug("large transfers are launched whole", "whole: int = 16 << 20", "whole: int = 256 << 20"),
]


def require_noticed(module: ModuleType) -> None:
    """Assert that the module breaks at least one promise."""
    broken = 0
    for promise in PROMISES:
        try:
            promise(module)
        except AssertionError:
            broken += 1
    assert broken


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    require_noticed(planting.load(cuda_copy_engine, bug))


@pytest.mark.deep
@pytest.mark.parametrize("bug", PACES, ids=[bug.name for bug in PACES])
def test_pace_that_is_too_slow_or_too_coarse_is_noticed(bug: Bug) -> None:
    require_noticed(planting.load(cuda_copy_engine, bug))
