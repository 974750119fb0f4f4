"""vLLM KV connector: one JSON argument enables TierStore (docs/vllm.md).

    --kv-transfer-config '{"kv_connector": "TierStoreConnector", "kv_connector_module_path": "tierstore.adapters.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"config": "tiers.yaml"}}'

The connector has two halves. In the scheduler process, ``scheduler`` makes all decisions. It keeps track of the
pages but has no access to their contents. In each worker process, ``worker`` owns host memory, disk and the
engine's tensors, and moves the pages. The halves communicate only through the dataclasses in ``messages``. vLLM
is imported when ``TierStoreConnector`` is first accessed.
"""

from __future__ import annotations

from typing import Any

__all__ = ["TierStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "TierStoreConnector":
        from tierstore.adapters.vllm.connector import TierStoreConnector

        return TierStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
