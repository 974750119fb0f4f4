"""Test an orchestrator's ``kv_hints``: valid hints are followed. Invalid hints are ignored and fail no request."""

from __future__ import annotations

import logging
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from tests.adapters import vllm_engine
from tests.adapters.test_vllm_disk_prefetch import only_on_disk
from tests.adapters.vllm_engine import DOCUMENT, Engine
from tests.adapters.vllm_stub import HOST
from tierstore.adapters.vllm.hints import NO_HINTS, RequestHints, hints_of
from tierstore.adapters.vllm.loads import DiskPrefetch
from tierstore.types import PageKey, Tier

OTHER = [2, *DOCUMENT[1:]]


def envelope(*actions: tuple[str, Any], version: str = "1") -> SimpleNamespace:
    """Return hints in the form of vLLM's ``KvHintsEnvelope``."""
    told = [
        SimpleNamespace(action_id=str(n), action_type=kind, action_version=version, payload=payload)
        for n, (kind, payload) in enumerate(actions)
    ]
    return SimpleNamespace(protocol_version="1", message_id="m", actions=told)


def of(*actions: tuple[str, Any], version: str = "1") -> RequestHints:
    return hints_of(SimpleNamespace(kv_hints=envelope(*actions, version=version)))


def test_hint_actions_are_parsed_and_foreign_ones_ignored() -> None:
    assert hints_of(SimpleNamespace()) == hints_of(SimpleNamespace(kv_hints=None)) == NO_HINTS
    assert of(("kvcr.move", {"to": "nowhere"})) == NO_HINTS
    assert of(("tierstore.will_need", {"deadline_s": 1.5, "priority": 2})) == RequestHints(1.5, 2)
    assert of(("tierstore.retain", {"ttl_s": 60})) == RequestHints(after="retain", keep_s=60)
    both = of(("tierstore.will_need", {}), ("tierstore.retain", {"ttl_s": 9.0, "priority": 1}))
    assert both == RequestHints(after="retain", keep_s=9.0, keep_priority=1)
    assert of(("tierstore.retain", {"ttl_s": 60}), ("tierstore.wont_need", {})).after == "wont_need"


@pytest.mark.parametrize(
    ("kind", "payload", "why"),
    [
        ("tierstore.pin", {}, "must be one of tierstore.will_need"),
        ("tierstore.retain", {}, "needs a ttl_s above 0"),
        ("tierstore.retain", {"ttl_s": float("inf")}, "a number from 0 to"),
        ("tierstore.retain", {"ttl_s": 1, "priority": 1.5}, "a whole number"),
        ("tierstore.will_need", {"deadline_s": -1}, "a number from 0 to"),
        ("tierstore.will_need", {"deadline_s": "soon"}, "a number from 0 to"),
        ("tierstore.will_need", {"deadline": 1}, "may only have the keys deadline_s, priority, got"),
        ("tierstore.wont_need", {"ttl_s": 1}, "must have no keys, got"),
        ("tierstore.retain", {"ttl_s": 10**400}, "a number from 0 to"),
        ("tierstore.will_need", {"deadline_s": 10**400}, "a number from 0 to"),
        ("tierstore.will_need", {"priority": 1e300}, "a number from 0 to"),
        ("tierstore.wont_need", None, "must be a mapping"),
        ("tierstore.retain", {1: 2, "a": 3}, "got the key 'a'"),
    ],
)
def test_invalid_hint_action_is_logged_and_ignored(
    kind: str, payload: Any, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert of((kind, payload), ("tierstore.will_need", {"deadline_s": 3})) == RequestHints(3)
    assert why in caplog.text


def test_hint_action_of_another_version_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert of(("tierstore.wont_need", {}), version="2") == NO_HINTS
    assert "in version '1', got" in caplog.text


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    engine = Engine({**HOST, "nvme": {"path": tmp_path, "capacity": 1 << 20, "flush": "10ms"}})
    for document in (DOCUMENT, OTHER):
        only_on_disk(engine, document)
    return engine


def ask(engine: Engine, document: list[int], kv_hints: object, monkeypatch: pytest.MonkeyPatch) -> str:
    """Queue a request with these hints, and return its name."""
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine.Request, "kv_hints", kv_hints, raising=False)
        return engine.add(document, 2)


def keys_of(engine: Engine, name: str) -> list[PageKey]:
    keys: list[PageKey] = engine.half._known[name].chains[0].first(4)
    return keys


def test_pages_of_the_earlier_deadline_are_promoted_before_those_of_the_earlier_arrival(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ask(engine, DOCUMENT, envelope(("tierstore.will_need", {"deadline_s": 30})), monkeypatch)
    sooner = ask(engine, OTHER, None, monkeypatch)
    ahead = engine.half._tiers.disk_prefetch
    monkeypatch.setattr(ahead._promotions, "most", 4)
    for records in engine.records:
        records.hold((Tier.NVME, Tier.HOST))
    ahead.advance()
    copies = engine.half._tiers.store._directory.residency.tables[Tier.HOST].copies
    assert set(copies) == set(keys_of(engine, sooner))
    assert not set(copies) & set(keys_of(engine, later))
    for records in engine.records:
        records.open()
    engine.run()
    engine.close()


def test_pages_are_retained_after_the_request_ends_until_their_ttl(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ask(engine, DOCUMENT, envelope(("tierstore.retain", {"ttl_s": 600})), monkeypatch)
    keys = keys_of(engine, name)
    engine.run()
    assert name not in engine.half._known
    hints = engine.half._tiers.store._directory.hints
    assert all(hints.retained(key) for key in keys)
    hints.expire(monotonic() + 300)
    assert all(hints.retained(key) for key in keys)
    hints.expire(monotonic() + 601)
    assert not any(hints.retained(key) for key in keys)
    engine.close()


def test_wont_need_pages_are_evicted_first_once_the_request_has_ended(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = ask(engine, DOCUMENT, envelope(("tierstore.wont_need", {})), monkeypatch)
    keys = keys_of(engine, name)
    engine.run()
    copies = engine.half._tiers.store._directory.residency.tables[Tier.NVME].copies
    assert all(copies[key].rank < 0 for key in keys)
    engine.close()


def test_reused_request_id_is_promoted_again(engine: Engine) -> None:
    tables, ahead = engine.half._tiers.store._directory.residency.tables, engine.half._tiers.disk_prefetch
    assert isinstance(ahead, DiskPrefetch)
    keys = list(tables[Tier.NVME].copies)[:2]
    ahead.want("same", keys, 0)
    ahead.over("same")
    assert not tables[Tier.HOST].copies
    ahead.want("same", keys, 0)
    ahead.advance()
    assert keys[0] in tables[Tier.HOST].copies
    engine.run()
    engine.close()
