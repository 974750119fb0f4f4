"""Tests of ``tierstore vllm-check`` with stand-ins for vLLM's sources: it names every incompatible change."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

import pytest

from tests.test_cli import last_line, tierstore
from tierstore.cli import vllm_check
from tierstore.cli.vllm_check import every_check

OURS = Path(vllm_check.__file__).parents[1] / "adapters"


def signature(method: ast.FunctionDef) -> str:
    """Return the source of a method with the same decorators and parameters, and an empty body."""
    kind = [node.id for node in method.decorator_list if isinstance(node, ast.Name)]
    lines = [*(f"@{name}" for name in kind), f"def {method.name}({ast.unparse(method.args)}): ..."]
    return textwrap.indent("\n".join(lines), "    ")


def interface(path: Path, name: str, base: str, *more: str) -> str:
    """Return the source of a class ``base`` that has the methods of our class ``name`` and the members ``more``."""
    (found,) = (
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    methods = [signature(item) for item in found.body if isinstance(item, ast.FunctionDef)]
    return "\n".join([f"class {base}:", *methods, *(textwrap.indent(text, "    ") for text in more)])


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a package of stand-ins for vLLM's sources, with which TierStore's adapters are compatible."""
    package = tmp_path / "vllm"
    write(package, "_version.py", "__version__ = version = '0.32.0'")
    connector = interface(OURS / "vllm" / "connector.py", "TierStoreConnector", "KVConnectorBase_V1")
    hook = "@abstractmethod\n    def request_finished_all_groups(self, request, block_ids): ..."
    groups = f"class SupportsHMA:\n    {hook}"
    write(package, CONNECTOR, f"{ABSTRACT}{groups}\n\nclass KVConnectorTransferResults: ...\n\n{connector}")
    write(
        package,
        "config/kv_transfer.py",
        "class KVTransferConfig:\n    kv_connector_module_path: str\n    kv_load_failure_policy: str = 'fail'",
    )
    write(package, "v1/kv_cache_layout.py", "class KVCacheLayout:\n    LBHNC = 1\n    BLHNC = 2")
    write(package, "v1/metrics/cache_hit_source.py", "class CacheHitSource:\n    HOST = 1\n    DISK = 2")
    write(
        package,
        "v1/kv_offload/tiering/factory.py",
        "class F:\n    def get_tier_class(cls, config):\n        return config.get('module_path')",
    )
    write(
        package,
        "v1/kv_offload/tiering/base.py",
        ABSTRACT + interface(OURS / "vllm_tier.py", "TierStoreTier", "SecondaryTierManager"),
    )
    return package


def write(package: Path, name: str, text: str) -> None:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def replace(package: Path, name: str, old: str, new: str) -> None:
    text = (package / name).read_text()
    assert old in text
    (package / name).write_text(text.replace(old, new))


CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
ABSTRACT = "from abc import abstractmethod\n\n"
TIER = "v1/kv_offload/tiering/base.py"


def test_a_supported_version_is_reported_as_supported(package: Path) -> None:
    result = tierstore("vllm-check", "--source", package.parent, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = last_line(result)
    assert report["ok"] is True
    assert report["package"] == str(package)
    assert {check["state"] for check in report["checks"]} == {"ok"}
    assert {check["name"]: check["value"] for check in report["checks"]}["vLLM"] == "0.32.0"


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("0.25.9", "fail"),
        ("0.26.0", "ok"),
        ("0.33.1rc1", "ok"),
        ("0.34.0", "note"),
        ("1.0", "note"),
        ("dev", "note"),
    ],
)
def test_versions_outside_the_tested_range_are_named(package: Path, version: str, state: str) -> None:
    write(package, "_version.py", f"__version__ = '{version}'")
    (check,) = (check for check in every_check(package) if check.name == "vLLM")
    assert (check.value, check.state) == (version, state)
    assert ("tested with 0.26 to 0.33" in check.why) == (state != "ok")


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "said"),
    [
        (
            "connector's signatures",
            CONNECTOR,
            "def on_new_request(self, request",
            "def on_new_request(self, late, request",
            "late",
        ),
        (
            "connector's signatures",
            CONNECTOR,
            "request: Any, blocks: Any, num",
            "request: Any, num",
            "num_external_tokens",
        ),
        (
            "connector's signatures",
            CONNECTOR,
            "def reset_cache(self)",
            "def reset_cache(self, *, hard)",
            "hard",
        ),
        (
            "connector's signatures",
            CONNECTOR,
            "@property\n    def requires_kv_delivery",
            "def requires_kv_delivery",
            "requires_kv_delivery",
        ),
        (
            "connector's hooks",
            CONNECTOR,
            "def shutdown(self)",
            "@abstractmethod\n    def newer(self): ...\n    def shutdown(self)",
            "newer",
        ),
        ("connector's hooks", CONNECTOR, "class KVConnectorBase_V1", "class KVConnectorBase_V2", "not found"),
        ("hybrid KV cache manager", CONNECTOR, "class SupportsHMA", "class Other", "no SupportsHMA"),
        ("SupportsHMA's signatures", CONNECTOR, "request, block_ids)", "request, tables)", "tables"),
        ("kv_load_failure_policy", "config/kv_transfer.py", "kv_load_failure_policy", "other", "missing"),
        ("tier's signatures", TIER, "def lookup(self, key: bytes", "def lookup(self, keys: bytes", "keys"),
        (
            "tier's hooks",
            TIER,
            "def drain_jobs(self)",
            "@abstractmethod\n    def drain(self): ...\n    def drain_jobs(self)",
            "drain",
        ),
    ],
)
def test_drift_is_named(package: Path, name: str, file: str, old: str, new: str, said: str) -> None:
    replace(package, file, old, new)
    checks = {check.name: check for check in every_check(package)}
    assert checks[name].state == "fail"
    assert said in checks[name].value


def test_unsupported_version_exits_with_code_1(package: Path) -> None:
    write(package, "_version.py", "__version__ = '0.25.1'")
    result = tierstore("vllm-check", "--source", package, "--json")
    assert result.returncode == 1
    assert last_line(result)["failed"] == ["vLLM"]


def test_without_per_request_load_failures_window_support_is_a_note(package: Path) -> None:
    replace(package, CONNECTOR, "class KVConnectorTransferResults: ...", "")
    checks = {check.name: check for check in every_check(package)}
    assert checks["hybrid KV cache manager"].state == "note"


def test_features_missing_in_an_older_vllm_are_notes(package: Path) -> None:
    (package / "v1" / "kv_cache_layout.py").unlink()
    (package / "v1" / "metrics" / "cache_hit_source.py").unlink()
    replace(package, "v1/kv_offload/tiering/factory.py", "config.get('module_path')", "registry[config]")
    found = {check.name: check.state for check in every_check(package)}
    assert found["hit sources"] == found["tier below vLLM's"] == "note"
    assert "fail" not in found.values()


def test_missing_vllm_exits_with_code_2(tmp_path: Path) -> None:
    result = tierstore("vllm-check", "--source", tmp_path, "--json")
    assert result.returncode == 2
    assert "does not contain the vllm package" in last_line(result)["error"]
