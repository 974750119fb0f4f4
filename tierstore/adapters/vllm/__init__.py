"""vLLM's KV connector: one JSON line turns TierStore on (docs/vllm.md).

    --kv-transfer-config '{"kv_connector": "TierStoreConnector", "kv_connector_module_path": "tierstore.adapters.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"config": "tiers.yaml"}}'

The scheduler's process decides (``scheduler``: a directory, metadata only), each worker's process moves (``worker``:
host memory, disk, the engine's tensors); ``messages`` is all that crosses. vLLM is imported with the connector's name.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TierStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "TierStoreConnector":
        from tierstore.adapters.vllm.connector import TierStoreConnector

        return TierStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
