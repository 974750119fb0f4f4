"""Collects keys of ``stats()`` and ``explain()``, metrics and the server's answers, to be compared with frozen ones."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

import prefetch
import tierstore
from tests.adapters import vllm_stub
from tests.golden.trees import Tree, shape
from tests.serve.serving import serving

SPEC = tierstore.PageSpec(
    num_layers=2, page_size=4, num_kv_heads=2, head_dim=8, dtype="float16", model="golden@1"
)
PATIENCE_S = 60.0


def _tree(stats: dict[str, object]) -> Tree:
    """Return the names and types in ``stats``, but leave out keys that depend on what has happened."""
    found = shape(stats)
    for name in ("in_flight", "bytes_per_s"):
        found[name] = "by edge"
    found["counters"] = dict.fromkeys(found["counters"], "by label values")
    return found


def _nvme(path: Path) -> dict[str, object]:
    return {"path": str(path), "capacity": "4MiB", "payload": "lmdb", "flush": "10ms", "daily_writes": "1GiB"}


def _put(store: tierstore.TierStore, first: int) -> list[tierstore.PageKey]:
    keys = store.keys(range(first, first + 4 * 4))
    store.put(keys, store.allocate(4))
    return keys


def stats(scratch: Path) -> Tree:
    """Return the name and type of each field of ``stats()`` and ``explain()``, for several stores and a prefetcher."""
    memory = {"capacity": 16 * SPEC.page_nbytes, "pin": "never"}
    own = {"hbm": {"capacity": 8 * SPEC.page_nbytes, "device": "cpu"}, "host": memory}
    found: dict[str, Tree] = {}
    with tierstore.TierStore.open(
        tierstore.load_config({**own, "nvme": _nvme(scratch / "own")}), SPEC
    ) as store:
        found["own HBM, host, NVMe"] = _tree(store.stats())
        keys = _put(store, 0)
        assert store.flush().complete
        with prefetch.Prefetcher.attach(store) as prefetcher:
            found["with a prefetcher"] = _tree(store.stats())
            found["Prefetcher.stats()"] = shape(prefetcher.stats())
        evicted = _put(store, 100)
        store.evict(evicted)
        strange = tierstore.PageKey(bytes(36))
        pages = store.explain([*keys, *evicted, strange])
        found["explain()"] = shape(pages, ("[].copies",))
    found["own HBM, no other"] = _stats_of({"hbm": own["hbm"]})
    engine = {"hbm": {"owner": "engine", "device": "cpu"}, "host": {**memory, "codec": "int8"}}
    with tierstore.TierStore.open(
        tierstore.load_config({**engine, "nvme": _nvme(scratch / "engine")}), SPEC
    ) as store:
        store.register(tierstore.EnginePages([torch.zeros(2, 8, 4, 2, 8).half() for _ in range(2)], "KBNHD"))
        keys = store.keys(range(16))
        store.put(keys, [0, 1, 2, 3])
        assert store.drain(PATIENCE_S)
        found["engine-owned HBM, host, NVMe"] = _tree(store.stats())
        found["explain(), engine-owned"] = shape(store.explain(keys), ("[].copies",))
    return found


def _stats_of(tree: dict[str, object]) -> Tree:
    with tierstore.TierStore.open(tierstore.load_config(tree), SPEC) as store:
        return _tree(store.stats())


def metrics(scratch: Path) -> Tree:
    """Return the names, types and labels of the metrics of a store and of vLLM's connector."""
    tree = {
        "hbm": {"capacity": 8 * SPEC.page_nbytes, "device": "cpu"},
        "host": {"capacity": 16 * SPEC.page_nbytes, "pin": "never"},
        "nvme": _nvme(scratch / "disk"),
    }
    with tierstore.TierStore.open(tierstore.load_config(tree), SPEC) as store:
        _put(store, 0)
        store.stats()
        found = {"store": _families(store.metrics.registry)}
    return {**found, "vLLM's connector": _vllm()}


def _families(registry: CollectorRegistry) -> Tree:
    """Return the metrics of one registry. Collectors provide the labels of metrics that have no samples yet."""
    labels = {
        name: getattr(collector, "_labelnames", ())
        for collector, names in registry._collector_to_names.items()
        for name in names
    }
    found: dict[str, Tree] = {}
    for family in registry.collect():
        named = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[family.name] = {
            "type": family.type,
            "labels": dict.fromkeys([*labels.get(family.name, ()), *sorted(named)], "label"),
            "values": _fixed_values(family.name, family.samples),
        }
    return found


def _fixed_values(name: str, samples: Iterable[Any]) -> Tree:
    """Return the label values of a metric, if they exist from the start and do not depend on what has happened."""
    if name not in ("tierstore_nvme_state", "tierstore_pages", "tierstore_lock_longest_hold_seconds"):
        return "by what has happened"
    return {",".join(sample.labels.values()): "value" for sample in samples}


def _vllm() -> Tree:
    """Return the metrics that the connector registers with vLLM. Stubs replace the base classes that vLLM provides."""
    connector = vllm_stub.load_connector().TierStoreConnector
    base = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
    stubs = vllm_stub._stubs()
    stubs[base] = ModuleType(base)
    stubs[base].KVConnectorPromMetrics = _PromMetrics  # type: ignore[attr-defined]
    stubs[base].KVConnectorStats = type("KVConnectorStats", (), {})  # type: ignore[attr-defined]
    found: dict[str, Tree] = {}

    def made(kind: str) -> Any:
        def make(name: str, documentation: str, labelnames: list[str]) -> SimpleNamespace:
            assert documentation
            found[name] = {"type": kind, "labels": dict.fromkeys(labelnames, "label")}
            return SimpleNamespace()

        return make

    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        kinds = {Gauge: made("gauge"), Counter: made("counter")}
        connector.build_prom_metrics(None, kinds, ["model_name"], {})
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
    return found


class _PromMetrics:
    """Stub of vLLM's ``KVConnectorPromMetrics``."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], values: Any) -> None:
        self.per_engine_labelvalues = values


def server() -> Tree:
    """Return the server's health, the shapes of its answers, its status codes, and its own metrics."""
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "max_tokens": 2}
    with serving() as running:
        http = running.http
        text = "Pages that nobody asked for leave first. " * 4
        document = http.post("/v1/documents", json={"name": "a note", "text": text}).json()
        asked = {"question": "Which?", "max_tokens": 2}
        answers = {
            "GET /health": http.get("/health").json(),
            "GET /v1/models": http.get("/v1/models").json(),
            "POST /v1/chat/completions": http.post("/v1/chat/completions", json=chat).json(),
            "POST /v1/completions": http.post(
                "/v1/completions", json={"model": "tiny", "prompt": "Once", "max_tokens": 2}
            ).json(),
            "POST /v1/documents": document,
            "GET /v1/documents": http.get("/v1/documents").json(),
            "POST /v1/documents/ID/ask": http.post(f"/v1/documents/{document['id']}/ask", json=asked).json(),
            "error": http.post("/v1/completions", json={"model": "other", "prompt": "Once"}).json(),
        }
        families = list(text_string_to_metric_families(http.get("/metrics").text))
        statuses = {
            "GET /": http.get("/").status_code,
            "HEAD /health": http.head("/health").status_code,
            "GET /metrics": http.get("/metrics").status_code,
            "GET /v1/models/tiny": http.get("/v1/models/tiny").status_code,
            "GET /v1/models/other": http.get("/v1/models/other").status_code,
            "GET /v1/documents/ID": http.get(f"/v1/documents/{document['id']}").status_code,
            "DELETE /v1/documents/ID": http.delete(f"/v1/documents/{document['id']}").status_code,
            "POST without a model": http.post("/v1/completions", json={"prompt": "Once"}).status_code,
        }
    return {
        "answers": shape(answers, ("POST /v1/documents/ID/ask.usage.reused",)),
        "health": answers["GET /health"],
        "statuses": statuses,
        "metrics": {
            family.name: {
                "type": family.type,
                "labels": dict.fromkeys(
                    sorted({n for s in family.samples for n in s.labels} - {"le"}), "label"
                ),
            }
            for family in families
            if family.name.startswith("tierstore_serve_") and not family.name.endswith("_created")
        },
    }


def results(scratch: Path) -> Tree:
    """Return the fields of the results of ``export_pages`` and ``import_pages``, whose classes are not exported."""
    tree = {"hbm": {"capacity": 8 * SPEC.page_nbytes, "device": "cpu"}}
    with tierstore.TierStore.open(tierstore.load_config(tree), SPEC) as store:
        keys = _put(store, 0)
        exported = asyncio.run(store.export_pages(keys, scratch / "x.tier"))
        imported = asyncio.run(store.import_pages(scratch / "x.tier"))
    return {
        "export_pages": {each.name: type(getattr(exported, each.name)).__name__ for each in fields(exported)},
        "import_pages": {each.name: type(getattr(imported, each.name)).__name__ for each in fields(imported)},
    }
