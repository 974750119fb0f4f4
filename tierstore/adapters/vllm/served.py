"""What of vLLM's configuration the connector looks at: whether it can serve it, and what the user is to know."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


def device_of(tensor: torch.Tensor) -> str:
    """The tensor's device as ``hbm.device`` names it."""
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def tell_of_policy(transfer_config: Any) -> None:
    """A warning where requests would end with an error instead of being computed."""
    policy = getattr(transfer_config, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        _log.warning(
            "kv_load_failure_policy is %r: a request of which a page cannot be loaded ends with an error; "
            "with 'recompute' the page is computed",
            policy,
        )


def tell_of_hashes(last: bool) -> None:
    """A warning where nothing on disk would be found after a restart."""
    if not last:
        _log.warning(
            "this vLLM begins its block hashes at random in every process: pages on disk are found again after a "
            "restart only with PYTHONHASHSEED set to the same number for all of them"
        )


def wants_events(vllm_config: Any) -> bool:
    """Whether KV events are published."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


def require_served(vllm_config: Any) -> None:
    """ConfigError naming what of the parallel layout is not served, and what is."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}; allowed with TierStoreConnector: 1")


def memory_may_go(vllm_config: Any) -> bool:
    """Whether vLLM may take the KV cache's memory away while it sleeps."""
    model = vllm_config.model_config
    return any(getattr(model, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator"))
