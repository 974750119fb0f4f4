"""Tests of replays, which use the same objects as a store: hits and writes with each eviction policy."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.core.order_model import ORDERS
from tests.support import lanes
from tests.support.pages import SPEC, tiers
from tests.support.traces import chat_trace, ignore, mooncake, setting
from tierstore import build
from tierstore.build import assemble
from tierstore.directory import invariants
from tierstore.page import PageLayout
from tierstore.policy import registry
from tierstore.replay import simulation
from tierstore.replay.bounds import Bounds
from tierstore.replay.simulation import Setting, Simulation, replay, row
from tierstore.replay.traces import Trace, read_traces
from tierstore.types import PageKey, Tier

runner = CliRunner()


# -- the simulation ---------------------------------------------------------------------------------------------


def plain_lru(trace: Trace, pages: int) -> int:
    """Count the hits of a plain LRU list in the second half of a trace. A request touches its last page first."""
    kept: dict[PageKey, None] = {}
    total, half = 0, len(trace.requests) // 2
    for number, request in enumerate(trace.requests):
        hits = sum(1 for _ in itertools.takewhile(kept.__contains__, request.keys))
        total += hits if number >= half else 0
        for key in reversed(request.keys):
            kept.pop(key, None)
            kept[key] = None
        while len(kept) > pages:
            del kept[next(iter(kept))]
    return total


@pytest.mark.parametrize("pages", [14, 20, 40, 200])
def test_lru_hits_equal_those_of_an_lru_list(tmp_path: Path, pages: int) -> None:
    trace = chat_trace(tmp_path)
    outcome = replay(trace, setting(pages), ignore)
    assert outcome.hit_tokens == 512 * plain_lru(trace, pages)
    assert outcome.asked_tokens == sum(r.tokens for r in trace.requests[len(trace.requests) // 2 :])


@pytest.mark.parametrize("policy", ORDERS)
def test_no_policy_beats_the_bound_and_all_reach_it_if_everything_fits(tmp_path: Path, policy: str) -> None:
    trace = chat_trace(tmp_path)
    for pages in (14, 20, 40):
        found = row(trace, setting(pages, policy), Bounds(), ignore)
        assert 0 < found.hit_rate <= found.optimal_hit_rate
    everything = row(trace, setting(400, policy), Bounds(), ignore)
    assert everything.hit_rate == everything.optimal_hit_rate


@pytest.mark.parametrize("policy", ORDERS)
@pytest.mark.parametrize("admission", ["all", "second_hit", "cost"])
def test_directory_is_consistent_after_every_request(tmp_path: Path, policy: str, admission: str) -> None:
    pages = {Tier.HBM: 14, Tier.HOST: 8, Tier.NVME: 20}
    simulated = Simulation(Setting(pages, dict.fromkeys(pages, policy), 1 << 20, 48.0, admission=admission))
    for request in chat_trace(tmp_path, 3, 5).requests:
        found = simulated.serve(request)
        assert list(simulated.directory.residency.match(request.keys)) == [Tier.HBM] * len(request.keys)
        assert len(found) <= len(request.keys)
        invariants.check_residency(simulated.directory.residency)
        assert not simulated.directory.leases.open
        assert simulated.directory.transfers.idle()


def test_more_tiers_hit_more_and_second_hit_writes_less(tmp_path: Path) -> None:
    trace = chat_trace(tmp_path, 4, 6)
    pages = {Tier.HBM: 14, Tier.HOST: 6, Tier.NVME: 30}
    found = {
        admission: replay(
            trace, Setting(pages, dict.fromkeys(pages, "lru"), 1 << 20, 48.0, admission), ignore
        )
        for admission in ("all", "second_hit")
    }
    alone = replay(trace, setting(14), ignore)
    assert found["all"].hit_tokens > alone.hit_tokens
    assert set(found["all"].hits) >= {Tier.HBM, Tier.NVME}
    assert 0 < found["second_hit"].nvme_written < found["all"].nvme_written / 2
    assert found["all"].moved["HOST,NVME"] == found["all"].nvme_written // ((1 << 20) + 4096) * (1 << 20)


def test_request_larger_than_hbm_is_skipped_and_counted(tmp_path: Path) -> None:
    outcome = replay(chat_trace(tmp_path, 1, 6), setting(9), ignore)
    assert outcome.too_long == 2
    assert outcome.hit_tokens > 0


def test_simulator_uses_the_same_classes_as_a_store(tmp_path: Path) -> None:
    more = {"policy": "adaptive"}
    config = tiers(
        4, 4, tmp_path / "disk", hbm_more=more, host_more=more, nvme_more={**more, "admission": "cost"}
    )
    parts = assemble(config, PageLayout.of(SPEC), lambda: None)
    pages = {Tier.HBM: 4, Tier.HOST: 4, Tier.NVME: 4}
    simulated = Simulation(Setting(pages, dict.fromkeys(pages, "adaptive"), 1 << 20, 48.0, admission="cost"))
    assert type(simulated.directory) is type(parts.directory)
    for tier, table in parts.directory.residency.tables.items():
        mine = simulated.directory.residency.tables[tier]
        assert (type(mine), type(mine.policy)) == (type(table), type(table.policy))
    assert type(simulated.directory.admission) is type(parts.directory.admission)
    assert type(simulated.directory.admission._admission) is type(parts.directory.admission._admission)
    for name in ("make_policy", "make_admission", "make_history"):
        assert vars(simulation)[name] is vars(build)[name] is vars(registry)[name]
    parts.mover.close(10.0)


# -- adaptive eviction policies ---------------------------------------------------------------------------------


def returning(tmp_path: Path) -> Trace:
    """Return a trace of chats, and of prompts that occur only once. LRU evicts each chat before its next turn."""
    fresh = itertools.count(10_000)
    rows = []
    for turn in range(1, lanes.examples(26, 40)):
        for chat in range(8):
            rows.append((512 * 6, [100 * chat + i for i in range(1, 7)]))
            rows += [(512 * 4, [next(fresh) for _ in range(4)]) for _ in range(6)]
        assert turn
    return read_traces([mooncake(tmp_path / "returning.jsonl", rows)])[0]


@pytest.mark.parametrize("policy", ["session", "adaptive"])
def test_pages_requested_again_late_are_kept_and_pages_never_requested_again_are_not(
    tmp_path: Path, policy: str
) -> None:
    trace = returning(tmp_path)
    lru, found = (replay(trace, setting(64, name), ignore).hit_rate for name in ("lru", policy))
    assert lru == 0
    assert found > 0.5 * Bounds().rate(trace, 64)


def test_adaptive_follows_lru_where_recency_is_the_better_signal(tmp_path: Path) -> None:
    """Each chat has a few quick turns and is then never continued, so the longest idle pages are the best victims."""
    rows = []
    for start in range(0, 400, 2):
        for turn in range(1, 9):
            for chat in (start, start + 1):
                rows.append((512 * (2 + turn), [100 * chat + i for i in range(1, 3 + turn)]))
    trace = read_traces([mooncake(tmp_path / "quick.jsonl", rows)])[0]
    lru, adaptive = (replay(trace, setting(24, name), ignore).hit_rate for name in ("lru", "adaptive"))
    assert adaptive >= 0.98 * lru
