"""Test what is loaded and stored in special cases.

The cases are each ``kv_role``, an engine without prefix caching, requests that must not read the cache, and a second
connector.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import vllm_planted as planted
from tests.adapters import vllm_stub as stub
from tests.adapters.test_vllm_disk_prefetch import only_on_disk
from tests.adapters.vllm_engine import DOCUMENT, OUT, Engine
from tests.adapters.vllm_stub import HOST
from tierstore.types import Tier

OFF = "prefix caching is off in vLLM"


def stored(engine: Engine, tier: Tier = Tier.HOST) -> int:
    return len(engine.half._tiers.store._directory.residency.tables[tier].copies)


def with_disk(path: Path) -> dict[str, Any]:
    return {**HOST, "nvme": {"path": path, "capacity": 1 << 20, "flush": "10ms"}}


def test_producer_stores_and_loads_nothing(tmp_path: Path) -> None:
    producer = Engine(with_disk(tmp_path), role="kv_producer")
    only_on_disk(producer, DOCUMENT)
    name = producer.add(DOCUMENT, 2)
    producer.run()
    assert producer.taken == 0
    assert producer.answers[name] == producer.answers["r1"]
    assert stored(producer, Tier.NVME) == 5
    producer.check()
    producer.close()

    consumer = Engine(with_disk(tmp_path), role="kv_consumer")
    consumer.add(DOCUMENT, 2)
    consumer.run()
    assert consumer.taken == 8
    consumer.close()


def test_a_consumer_loads_and_stores_nothing(tmp_path: Path) -> None:
    producer = Engine(with_disk(tmp_path), role="kv_producer")
    producer.add(DOCUMENT, 2)
    producer.run()
    producer.close()

    consumer = Engine(with_disk(tmp_path), role="kv_consumer")
    before = stored(consumer, Tier.NVME)
    name = consumer.add(DOCUMENT, 8)
    consumer.add([2, *DOCUMENT[1:]], 2)
    consumer.run()
    consumer.abort(consumer.add([1, 1, *DOCUMENT], 2))
    consumer.run()
    assert consumer.taken == 8
    assert consumer.answers[name][: len(DOCUMENT)] == DOCUMENT
    assert (before, stored(consumer, Tier.NVME)) == (5, 5)
    assert stored(consumer) == 4, "only what was loaded is in memory"
    consumer.check()
    consumer.close()


@pytest.mark.parametrize("known", [True, False], ids=["by the scheduler", "only by the worker"])
def test_without_prefix_caching_nothing_is_offered_or_stored_and_it_is_logged_once(
    known: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled = Engine(with_disk(tmp_path))
    filled.add(DOCUMENT, 2)
    filled.run()
    filled.close()
    assert OFF not in caplog.text

    with caplog.at_level(logging.WARNING):
        engine = Engine(with_disk(tmp_path), caching=not known, worker_caching=False)
    before = stored(engine, Tier.NVME)
    name = engine.add(DOCUMENT, 2)
    engine.add([2, *DOCUMENT[1:]], 2)
    engine.run()
    assert engine.taken == 0
    assert engine.answers[name] == filled.answers["r1"]
    assert (stored(engine), stored(engine, Tier.NVME)) == (0, before)
    assert caplog.text.count(OFF) == 1
    engine.check()
    engine.close()


def test_request_that_skips_the_cache_computes_its_whole_prompt_and_is_stored(tmp_path: Path) -> None:
    engine = Engine(with_disk(tmp_path))
    only_on_disk(engine, DOCUMENT)
    name = engine.add(DOCUMENT, 2, reads=False)
    engine.run()
    assert engine.taken == 0
    assert engine.answers[name] == engine.answers["r1"]
    other = [2, *DOCUMENT[1:]]
    engine.add(other, 2, reads=False)
    engine.run()
    engine.forget()
    engine.add(other, 2)
    engine.run()
    assert engine.taken == 8, "its pages are stored"
    engine.close()


def test_requests_wait_for_the_workers_first_messages_and_hit(tmp_path: Path) -> None:
    filled = Engine(with_disk(tmp_path))
    filled.add(DOCUMENT, 2)
    filled.run()
    filled.close()

    engine = Engine(with_disk(tmp_path), ranks=1, met=False)
    name, gone = engine.add(DOCUMENT, 2), engine.add(DOCUMENT, 2)
    engine.abort(gone)
    assert engine.scheduler.get_num_new_matched_tokens(engine.requests[name], 0) == (None, False)
    engine.meet()
    assert name not in engine.answers
    engine.run()
    assert engine.taken == 8
    assert engine.answers[name] == filled.answers["r1"]
    engine.close()


def test_requests_do_not_wait_forever_for_the_workers_first_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine(HOST, met=False)
    monkeypatch.setattr(engine.workers[0], "build_connector_worker_meta", lambda: None)
    name = engine.add(DOCUMENT, 2)
    for _ in range(120):
        engine.step()
    assert name in engine.answers
    assert not engine.half.pending
    engine.close()


def load_elsewhere_under_slow_copies(*, beside: bool) -> Engine:
    engine = Engine({"host": {"capacity": 20 * 64, "pin": "never"}})
    for gate in engine.copies:
        gate.hold(OUT)
    engine.pace = 0.0
    engine.add(DOCUMENT, 1)
    while engine.requests:
        engine.step()
    engine.forget()
    engine.add([1, 2] * 7, 1, elsewhere=12, beside=beside)  # needs all blocks but one
    while engine.requests:
        engine.step()
    for gate in engine.copies:
        gate.open()
    engine.run()
    engine.forget()
    engine.add(DOCUMENT, 1)
    engine.run()
    return engine


@pytest.mark.parametrize("beside", [True, False], ids=["beside steps", "within a step"])
def test_blocks_that_another_connector_fills_are_copied_out_first(beside: bool) -> None:
    engine = load_elsewhere_under_slow_copies(beside=beside)
    assert engine.filled == 12
    assert engine.taken == 8
    engine.forget()
    engine.add([1, 2] * 7, 1)
    engine.run()
    assert engine.taken == 8 + 12, "what another connector loaded is stored as well"
    engine.check()
    engine.close()


@pytest.mark.deep
@pytest.mark.parametrize("beside", [True, False], ids=["beside steps", "within a step"])
def test_missing_fence_for_another_connectors_blocks_is_detected(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.blocks_that_another_connector_fills_are_not_fenced(monkeypatch)
    with pytest.raises(AssertionError, match="another's token"):
        load_elsewhere_under_slow_copies(beside=beside)


def test_vllm_finds_the_connector_by_name_and_it_takes_no_part_in_handshakes() -> None:
    engine = Engine(HOST)
    found = stub.KVConnectorFactory._registry["TierStoreConnector"]
    assert found == ("tierstore.adapters.vllm", "TierStoreConnector")
    assert engine.workers[0].get_handshake_metadata() is None
    engine.scheduler.set_xfer_handshake_metadata_pp_aware({(1, 0): object()})
    engine.close()
