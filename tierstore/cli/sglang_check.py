"""The ``sglang-check`` command, which checks whether TierStore's storage backend works with the installed SGLang.

The checks read SGLang's source code without importing it. They therefore also work on a machine without a GPU, and for
an installation that cannot be imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.adapters.sglang.host_cache import host_and_nvme
from tierstore.cli.doctor import Check, tell
from tierstore.cli.engine_sources import hooks, module, names, package_of, version_of
from tierstore.cli.output import Json, refusals
from tierstore.errors import ConfigError
from tierstore.types import exact_size

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTED = "0.5.23"
"""The version of SGLang with which the storage backend has been tested."""

_STORAGE = "srt/mem_cache/hicache_storage.py"
_FACTORY = "srt/mem_cache/storage/backend_factory.py"
_CONTROLLER = "srt/managers/cache_controller.py"
_OURS = Path(__file__).parents[1] / "adapters" / "sglang" / "storage.py"
_TRANSFER = {"name", "host_indices", "keys", "hit_policy"}
_CONFIG = {
    "tp_rank",
    "tp_size",
    "pp_rank",
    "pp_size",
    "attn_cp_rank",
    "attn_cp_size",
    "dp_rank",
    "dcp_size",
    "is_mla_model",
    "enable_storage_metrics",
    "model_name",
    "tp_lcm_size",
    "should_split_heads",
    "extra_config",
}
_NEEDED = {
    "StorageMetrics": "srt/observability/metrics_collector.py",
    "get_server_args": "srt/runtime_context.py",
    "get_parallel": "srt/runtime_context.py",
}


def sglang_check(
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with an unpacked sglang package. Default: the installed one."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file of the backend's configuration, which is checked too."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the installed SGLang supports, without starting it.

    Exit code 1 if the storage backend would not work.
    """
    with refusals(as_json):
        package = package_of("sglang", "SGLang", source)
        checks = [*every_check(package), *([] if config is None else [tiers(config)])]
    tell(checks, as_json, package=str(package))


def every_check(package: Path) -> Iterator[Check]:
    """Yield all checks in display order. ``package`` is the folder of the package ``sglang``."""
    yield version(package)
    theirs = module(package / _STORAGE).classes.get("HiCacheStorage")
    ours = module(_OURS).classes["TierStoreStorage"]
    yield from hooks("SGLang", "storage backend", theirs, ours, f"sglang/{_STORAGE}")
    yield fields(package, "HiCacheStorageConfig", _CONFIG)
    yield fields(package, "PoolTransfer", _TRANSFER)
    yield restorable_prefixes(package)
    yield factory(package)
    yield zero_copy(package)
    yield from imports(package)


def tiers(config: Path) -> Check:
    """Check that the storage backend accepts a configuration file, and show which tiers it has."""
    try:
        host, nvme = host_and_nvme(str(config), "SGLang's host memory")
    except ConfigError as error:
        return Check("tiers", "refused", "fail", str(error))
    memory = None if host is None else f"{exact_size(host.capacity)} of host memory"
    disk = None if nvme is None else f"{exact_size(nvme.capacity)} at {nvme.path}"
    found = ", ".join(each for each in (memory, disk) if each is not None)
    if nvme is None:
        why = "a restart loses all pages, and MLA works with one tensor parallel rank only"
        return Check("tiers", found, "note", why)
    return Check("tiers", found)


def version(package: Path) -> Check:
    """Check whether TierStore has been tested with this version of SGLang."""
    found = version_of(package)
    tested = f"tested with {TESTED}"
    return Check("SGLang", found or "unknown", *(("ok", "") if found == TESTED else ("note", tested)))


def fields(package: Path, name: str, needed: set[str]) -> Check:
    """Check that a dataclass of the storage interface has the fields that TierStore reads."""
    missing = sorted(needed - names(package / _STORAGE, name))
    if missing:
        return Check(name, ", ".join(missing), "fail", "this SGLang does not have these fields")
    return Check(name, f"{len(needed)} fields, as TierStore expects")


def restorable_prefixes(package: Path) -> Check:
    """Check whether a backend can say at which lengths a prefix with recurrent states or windows can be restored."""
    known = names(package / _STORAGE, "PoolTransferResult")
    if "restorable_prefix_pages" in known:
        return Check("states and windows", "restorable prefixes are listed")
    why = "this SGLang cannot be told that a prefix between two stored states cannot be restored"
    return Check("states and windows", "no restorable_prefix_pages", "fail", why)


def factory(package: Path) -> Check:
    """Check that SGLang loads backends from other packages, and how it calls them."""
    creators = module(package / _FACTORY).classes.get("StorageBackendFactory")
    create = None if creators is None else creators.functions.get("_create_dynamic_backend")
    if create is None:
        why = f"sglang/{_FACTORY} does not load backends from other packages"
        return Check("dynamic backend", "none", "fail", why)
    if "backend_class(storage_config, kwargs)" not in create.source:
        why = "this SGLang creates a backend with other arguments than (storage_config, kwargs)"
        return Check("dynamic backend", "other arguments", "fail", why)
    return Check("dynamic backend", "present")


def zero_copy(package: Path) -> Check:
    """Check that SGLang can pass the token indices of pages in its host memory instead of tensors."""
    if "interface_v1" in _text(package / _CONTROLLER):
        return Check("interface_v1", "present")
    return Check(
        "interface_v1", "missing", "note", "SGLang copies every page to a tensor first, which is slower"
    )


def imports(package: Path) -> Iterator[Check]:
    """Check that the names exist that the backend imports from SGLang."""
    for name, where in _NEEDED.items():
        if name in module(package / where).members:
            yield Check(name, "present")
        else:
            yield Check(
                name,
                "missing",
                "fail",
                f"sglang/{where} does not define it, so the backend cannot be imported",
            )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
