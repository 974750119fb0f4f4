"""Test that the connector's scheduler half reports problems of one rank, in metrics, in stats() and in the log."""

from __future__ import annotations

import logging
from threading import Event
from typing import Any

import pytest

from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_stub import HOST
from tests.support.waiting import wait_for
from tierstore.adapters.vllm import metrics
from tierstore.adapters.vllm.messages import Hello, Report
from tierstore.metrics import RankHealth
from tierstore.types import Ack, Tier

PATIENCE_S = 60.0
NBYTES = 6 * 64
"""Payload bytes of one rank's host memory."""


class Pinner:
    """A stand-in that page-locks nothing. ``pin`` waits for ``gate``, and raises ``OSError(why)`` if ``why`` is set."""

    def __init__(self, *, gate: Event | None = None, why: str | None = None) -> None:
        self._gate = gate
        self._why = why

    def pin(self, address: int, nbytes: int) -> None:
        if self._gate is not None:
            assert self._gate.wait(PATIENCE_S)
        if self._why is not None:
            raise OSError(self._why)

    def unpin(self, address: int) -> None:
        pass


@pytest.fixture(autouse=True)
def _figures_at_every_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_EVERY_S", 0.0)


def _engine(**more: Any) -> Engine:
    return Engine({"host": {"capacity": 2 * NBYTES, "pin": "never"}}, ranks=2, **more)


def _stats(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = engine.half.stats()
    return found


def test_rank_with_unpinned_memory_is_reported_beside_a_pinned_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tierstore.ranks"):
        engine = _engine(pinners={0: Pinner(), 1: Pinner(why="cudaHostRegister: error 2")})
        wait_for(lambda: not any(w._worker.health().pinning for w in engine.workers))
        engine.step()
    first, second = _stats(engine)["ranks"]
    asked = second["pin_nbytes"]
    assert (first["unpinned_nbytes"], first["pinned_nbytes"], first["refused"]) == (0, asked, None)
    assert (second["unpinned_nbytes"], second["pinned_nbytes"]) == (asked, 0)
    assert second["refused"] == "cudaHostRegister: error 2"
    host = _stats(engine)["host"]
    assert (host["pin_nbytes"], host["pinned_nbytes"], host["unpinned_nbytes"]) == (2 * asked, asked, asked)
    assert host["refused"] == "rank 1: cudaHostRegister: error 2"
    found = engine.half.figures()
    assert found is not None, "told without a hit or a copy"
    assert found["unpinned_bytes"] == {"0": 0.0, "1": float(asked)}
    text = engine.half._tiers.store.metrics.text()
    assert f'tierstore_unpinned_bytes{{rank="1"}} {float(asked)}' in text
    assert f"tierstore_host_pinned_bytes {float(asked)}" in text
    assert [r.getMessage().split(":")[0] for r in caplog.records if r.name == "tierstore.apart"] == ["rank 1"]
    engine.close()


def test_unpinned_bytes_are_updated_when_pinning_ends_after_startup() -> None:
    gate = Event()
    engine = _engine(pinners={0: Pinner(), 1: Pinner(gate=gate)})
    wait_for(lambda: not engine.workers[0]._worker.health().pinning)
    engine.step()
    found = engine.half.figures()
    asked = _stats(engine)["ranks"][1]["pin_nbytes"]
    assert found["unpinned_bytes"] == {"0": 0.0, "1": float(asked)}
    assert _stats(engine)["host"]["pinning"]
    gate.set()
    wait_for(lambda: not engine.workers[1]._worker.health().pinning)
    engine.step()
    found = engine.half.figures()
    assert found["unpinned_bytes"] == {"0": 0.0, "1": 0.0}
    assert not _stats(engine)["host"]["pinning"]
    assert engine.half.figures() is None, "nothing changed since"
    engine.close()


def test_healthy_ranks_report_no_figures() -> None:
    engine = _engine()
    engine.step()
    assert engine.half.figures() is None
    assert [found["unpinned_nbytes"] for found in _stats(engine)["ranks"]] == [0, 0]
    engine.close()


def test_pages_that_one_rank_fails_to_move_are_counted_for_that_rank() -> None:
    engine = _engine()
    engine.copies[1].fail_next((Tier.HBM, Tier.HOST), 0)
    engine.add(DOCUMENT, 2)
    engine.run()
    found = engine.half.figures()
    assert found["rank_failed_pages"] == {"1": 1.0}
    assert [rank["failed_pages"] for rank in _stats(engine)["ranks"]] == [0, 1]
    engine.close()


def test_rank_that_does_not_answer_has_open_transfers() -> None:
    engine = _engine()
    engine.pace = 0.0
    engine.copies[1].hold((Tier.HBM, Tier.HOST))
    engine.add(DOCUMENT, 2)
    for _ in range(6):
        engine.step()
    first, second = _stats(engine)["ranks"]
    assert first["open_transfers"] == 0
    assert second["open_transfers"] > 0
    engine.copies[1].open()
    engine.pace = 1.0
    engine.run()
    assert [rank["open_transfers"] for rank in _stats(engine)["ranks"]] == [0, 0]
    engine.close()


def test_slow_copies_and_a_failing_disk_of_one_rank_are_reported_and_recover(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = _engine()
    sick = RankHealth(
        "cuda:1", "threads, as cuda-bindings is missing", "cuda-bindings is missing", disk="absent"
    )
    well = RankHealth("cuda:1", "straight, batch", disk="ok")
    with caplog.at_level(logging.WARNING, "tierstore.ranks"):
        for _ in range(3):
            engine.half.heard(Report({1: ()}, health={1: sick}))
    found = engine.half.figures()
    assert found["slow_copies"] == {"0": 0.0, "1": 1.0}
    assert found["rank_disk_trouble"] == {"0": 0.0, "1": 1.0}
    assert _stats(engine)["hbm"]["slow_copies"] == "rank 1: cuda-bindings is missing"
    assert len([r for r in caplog.records if r.name == "tierstore.apart"]) == 2, "each trouble once"
    engine.half.heard(Report({1: ()}, health={1: well}))
    found = engine.half.figures()
    assert found["slow_copies"] == found["rank_disk_trouble"] == {"0": 0.0, "1": 0.0}
    engine.close()


def test_health_is_merged_over_ranks_and_the_later_report_wins() -> None:
    early, late = RankHealth(pinned_nbytes=1), RankHealth(pinned_nbytes=2)
    one = Report({0: ()}, 1, {0: early}).merged(Report({1: (Ack(1, True, 1, 1),)}, 2, {1: early}))
    assert one.merged(Report({0: ()}, 3, {0: late})).health == {0: late, 1: early}


def test_an_engine_of_one_rank_has_the_same_keys() -> None:
    engine = Engine(HOST, pinners={0: Pinner(why="no")})
    wait_for(lambda: not engine.workers[0]._worker.health().pinning)
    hello: Hello = engine.workers[0]._worker.hello
    assert hello.health.pin_nbytes > 0
    engine.step()
    assert engine.half.figures()["unpinned_bytes"] == {"0": float(hello.health.pin_nbytes)}
    engine.close()


def test_log_line_names_unhealthy_ranks() -> None:
    words = metrics.in_words({"unpinned_bytes": {"0": 0.0, "1": 2e9}, "slow_copies": {"0": 0.0, "1": 1.0}})
    assert words == {"Host memory not pinned on rank 1 (MB)": 2000.0, "Slow copies on ranks": 1}
