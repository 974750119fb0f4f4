"""Plants bugs in parts of promotion that random walks rarely reach, and checks that a test notices each bug."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store import test_promote
from tests.support.bench import open_bench
from tests.support.pages import SPEC, tiers
from tests.support.planting import Bug, install
from tierstore.directory import loads
from tierstore.store import TierStore

pytestmark = pytest.mark.deep

Check = Callable[[Path], None]


def shared_places(path: Path) -> None:
    _on_a_bench(
        path,
        test_promote.test_page_shared_by_hints_is_displaced_only_if_all_of_them_are_later,
    )


def memory_on_the_way(path: Path) -> None:
    test_promote.test_host_slot_a_page_passed_through_is_free_for_the_next(path / "host")


def _on_a_bench(path: Path, test: Callable[[TierStore], None]) -> None:
    bench = open_bench(tiers(hbm=4, host=8, nvme=path), SPEC)
    bench.store.take_hints()
    try:
        test(bench.store)
    finally:
        bench.close()


KEEPERS = "return keepers == 1 or keepers == sum(place in self._kept.get(name, ()) for name in later)"

BUGS = [
    (shared_places, Bug("shared pages are never displaced", KEEPERS, "return keepers == 1")),
    (
        shared_places,
        Bug("shared pages are displaced by a request later than some of them", KEEPERS, "return True"),
    ),
    (
        memory_on_the_way,
        Bug(
            "host memory stays kept after the load",
            "if tier == Tier.HBM and below in kept:",
            "if False:",
        ),
    ),
]


@pytest.mark.parametrize(("check", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_planted_bug_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check, bug: Bug
) -> None:
    install(monkeypatch, loads, bug)
    with pytest.raises(AssertionError):
        check(tmp_path)


@pytest.mark.parametrize("check", [shared_places, memory_on_the_way])
def test_a_copy_without_a_bug_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Check) -> None:
    install(monkeypatch, loads)
    check(tmp_path)
