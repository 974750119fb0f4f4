"""The ``vllm-check`` command, which checks whether TierStore's connector and tier work with the installed vLLM.

The checks read vLLM's source code without importing it. They therefore also work for a CUDA build on a machine
without a GPU, and for an installation that cannot be imported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli.doctor import Check, tell
from tierstore.cli.engine_sources import hooks, module, names, package_of, version_of
from tierstore.cli.output import Json, refusals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from griffe import Class


def vllm_check(
    source: Annotated[
        Path | None,
        typer.Option(help="Folder with an unpacked vllm package. Default: the installed one."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what the installed vLLM supports, without starting it.

    Exit code 1 if the connector would not work.
    """
    with refusals(as_json):
        package = package_of("vllm", "vLLM", source)
        checks = list(every_check(package))
    tell(checks, as_json, package=str(package))


_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
_OURS = Path(__file__).parents[1] / "adapters"


def every_check(package: Path) -> Iterator[Check]:
    """Yield all checks in display order. ``package`` is the folder of the package ``vllm``."""
    yield version(package)
    connector = module(package / _CONNECTOR).classes
    ours = module(_OURS / "vllm" / "connector.py").classes["TierStoreConnector"]
    yield from hooks("vLLM", "connector", connector.get("KVConnectorBase_V1"), ours, f"vllm/{_CONNECTOR}")
    yield from groups(connector, ours)
    yield from settings(package)
    yield layouts(package, connector.get("KVConnectorBase_V1"))
    yield hit_sources(package)
    yield from secondary_tier(package)


def version(package: Path) -> Check:
    """Check whether TierStore has been tested with this version of vLLM."""
    from tierstore.adapters.vllm.compat import NEWEST, OLDEST

    found = version_of(package)
    tested = f"tested with {_dotted(OLDEST)} to {_dotted(NEWEST)}"
    numbers = found.split(".")[:2]
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers):
        return Check("vLLM", found or "unknown", "note", tested)
    at = (int(numbers[0]), int(numbers[1]))
    if at < OLDEST:
        return Check("vLLM", found, "fail", tested)
    return Check("vLLM", found, "ok" if at <= NEWEST else "note", "" if at <= NEWEST else tested)


def groups(connector: Mapping[str, Class], ours: Class) -> Iterator[Check]:
    """Check whether this vLLM can put layers with sliding windows into separate KV cache groups."""
    name, theirs = "hybrid KV cache manager", connector.get("SupportsHMA")
    if theirs is None:
        why = f"vllm/{_CONNECTOR} does not define the connector's interface"
        yield Check(name, "no SupportsHMA", "fail", why)
    elif "KVConnectorTransferResults" not in connector:
        why = (
            "layers with full attention and with windows share a group, because this vLLM cannot report for "
            "which group a load failed"
        )
        yield Check(name, "off with TierStore", "note", why)
    else:
        yield Check(name, "windows have separate groups")
        yield from hooks("vLLM", "SupportsHMA", theirs, ours, f"vllm/{_CONNECTOR}")


def settings(package: Path) -> Iterator[Check]:
    """Check that vLLM has the settings that the connector needs."""
    fields = names(package / "config" / "kv_transfer.py", "KVTransferConfig")
    for field, use in (
        ("kv_connector_module_path", "the connector cannot be chosen"),
        ("kv_load_failure_policy", "a request ends with an error if one of its pages cannot be loaded"),
    ):
        yield Check(field, "present") if field in fields else Check(field, "missing", "fail", use)


def layouts(package: Path, connector: Class | None) -> Check:
    """Check whether vLLM can place all layers of a block next to each other, so that one copy moves a block."""
    known = names(package / "v1" / "kv_cache_layout.py", "KVCacheLayout")
    if "BLHNC" in known:
        return Check("KV layouts", ", ".join(sorted(known)))
    if connector is not None and "prefer_cross_layer_blocks" in connector.members:
        return Check("KV layouts", "all layers of a block in one tensor, if the attention backend allows it")
    why = "a block is copied layer by layer"
    return Check("KV layouts", ", ".join(sorted(known)) or "a tensor per layer", "note", why)


def hit_sources(package: Path) -> Check:
    """Check whether vLLM's metrics distinguish cache hits in host memory from cache hits on disk."""
    known = names(package / "v1" / "metrics" / "cache_hit_source.py", "CacheHitSource")
    if {"HOST", "DISK"} <= known:
        return Check("hit sources", ", ".join(sorted(known)))
    return Check("hit sources", "none", "note", "vLLM's metrics count all hits outside HBM as one source")


def secondary_tier(package: Path) -> Iterator[Check]:
    """Check whether this vLLM can use TierStore as a tier below its own CPU tier."""
    where = "v1/kv_offload/tiering/base.py"
    factories = module(package / "v1" / "kv_offload" / "tiering" / "factory.py").classes.values()
    getters = [found for factory in factories if (found := factory.functions.get("get_tier_class"))]
    if not any("module_path" in getter.source for getter in getters):
        yield Check(
            "tier below vLLM's",
            "none",
            "note",
            "this vLLM does not load tiers from other packages; vLLM 0.32 does",
        )
        return
    theirs = module(package / where).classes.get("SecondaryTierManager")
    yield from hooks(
        "vLLM", "tier", theirs, module(_OURS / "vllm_tier.py").classes["TierStoreTier"], f"vllm/{where}"
    )


def _dotted(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
