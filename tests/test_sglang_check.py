"""Tests of ``tierstore sglang-check`` with stand-ins for SGLang's sources: it names every incompatible change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_cli import last_line, tierstore
from tests.test_vllm_check import ABSTRACT, OURS, interface, replace, write
from tierstore.cli import sglang_check
from tierstore.cli.sglang_check import every_check

STORAGE = "srt/mem_cache/hicache_storage.py"
FACTORY = "srt/mem_cache/storage/backend_factory.py"
CONTROLLER = "srt/managers/cache_controller.py"


def dataclass(name: str, fields: set[str]) -> str:
    return "\n    ".join([f"class {name}:", *(f"{field}: int" for field in sorted(fields))])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of stand-ins for SGLang's sources, with which TierStore's storage backend is compatible."""
    package = tmp_path / "sglang"
    write(package, "_version.py", "__version__ = version = '0.5.23'")
    parts = [
        ABSTRACT,
        dataclass("HiCacheStorageConfig", sglang_check._CONFIG),
        dataclass("PoolTransfer", sglang_check._TRANSFER),
        dataclass("PoolTransferResult", {"kv_hit_pages", "restorable_prefix_pages"}),
        interface(OURS / "sglang" / "storage.py", "TierStoreStorage", "HiCacheStorage"),
    ]
    write(package, STORAGE, "\n\n".join(parts))
    create = "def _create_dynamic_backend(cls):\n        return backend_class(storage_config, kwargs)"
    write(package, FACTORY, f"class StorageBackendFactory:\n    {create}")
    write(package, CONTROLLER, "extra_config.get('interface_v1', 0)")
    write(package, "srt/observability/metrics_collector.py", "class StorageMetrics: ...")
    write(package, "srt/runtime_context.py", "def get_server_args(): ...\ndef get_parallel(): ...")
    return package


def test_a_supported_version_is_reported_as_supported(package: Path) -> None:
    result = tierstore("sglang-check", "--source", package.parent, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = last_line(result)
    assert report["ok"] is True
    assert report["package"] == str(package)
    assert {check["state"] for check in report["checks"]} == {"ok"}
    assert {check["name"]: check["value"] for check in report["checks"]}["SGLang"] == "0.5.23"


@pytest.mark.parametrize(("version", "state"), [("0.5.22", "note"), ("0.5.23", "ok"), ("", "note")])
def test_other_versions_are_named(package: Path, version: str, state: str) -> None:
    write(package, "_version.py", f"__version__ = '{version}'")
    (check,) = (check for check in every_check(package) if check.name == "SGLang")
    assert (check.value, check.state) == (version or "unknown", state)
    assert ("tested with 0.5.23" in check.why) == (state != "ok")


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "said"),
    [
        (
            "storage backend's signatures",
            STORAGE,
            "def batch_get_v1(self, keys",
            "def batch_get_v1(self, x, keys",
            "x",
        ),
        (
            "storage backend's hooks",
            STORAGE,
            "def on_host_pools_registered",
            "@abstractmethod\n    def newer(self): ...\n    def on_host_pools_registered",
            "newer",
        ),
        ("storage backend's hooks", STORAGE, "class HiCacheStorage:", "class Other:", "not found"),
        ("HiCacheStorageConfig", STORAGE, "dp_rank: int", "other: int", "dp_rank"),
        ("PoolTransfer", STORAGE, "hit_policy: int", "other: int", "hit_policy"),
        (
            "states and windows",
            STORAGE,
            "restorable_prefix_pages: int",
            "other: int",
            "no restorable_prefix_pages",
        ),
        ("dynamic backend", FACTORY, "_create_dynamic_backend", "other", "none"),
        ("dynamic backend", FACTORY, "(storage_config, kwargs)", "(storage_config)", "other arguments"),
        ("StorageMetrics", "srt/observability/metrics_collector.py", "StorageMetrics", "Other", "missing"),
        ("get_server_args", "srt/runtime_context.py", "get_server_args", "other", "missing"),
    ],
)
def test_an_incompatible_change_is_named(
    package: Path, name: str, file: str, old: str, new: str, said: str
) -> None:
    replace(package, file, old, new)
    failed = [check for check in every_check(package) if check.state == "fail"]
    assert [check.name for check in failed] == [name]
    assert said in failed[0].value


def test_a_version_without_zero_copy_is_slower_but_works(package: Path) -> None:
    replace(package, CONTROLLER, "interface_v1", "other")
    assert [(check.name, check.state) for check in every_check(package) if check.state != "ok"] == [
        ("interface_v1", "note")
    ]


@pytest.mark.parametrize(
    ("config", "state", "said"),
    [
        ("nvme: {path: pages, capacity: 2GiB}", "ok", "2 GiB .* at .*pages"),
        (
            "host: {capacity: 1GiB}\nnvme: {path: pages, capacity: 2GiB}",
            "ok",
            "1 GiB .* of host memory, 2 GiB",
        ),
        ("host: {capacity: 1GiB}", "note", "a restart loses all pages"),
        ("host: {capacity: 1GiB, codec: int8}", "fail", "host.codec must be none"),
        ("page_size: 16", "fail", "nvme is missing"),
    ],
)
def test_the_tiers_of_a_configuration_are_checked(
    package: Path, tmp_path: Path, config: str, state: str, said: str
) -> None:
    file = tmp_path / "tiers.yaml"
    file.write_text(config)
    result = tierstore("sglang-check", "--source", package.parent, "--config", file, "--json")
    assert result.returncode == (1 if state == "fail" else 0)
    (check,) = (each for each in last_line(result)["checks"] if each["name"] == "tiers")
    assert check["state"] == state
    assert re.search(said, f"{check['value']} {check['why']}")


def test_a_missing_package_is_refused(tmp_path: Path) -> None:
    result = tierstore("sglang-check", "--source", tmp_path)
    assert result.returncode == 2
    assert "does not contain the sglang package; give the folder that contains it" in result.stderr
