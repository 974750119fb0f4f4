"""The connector for an engine with pipeline stages on the CPU. vLLM loads it by name.

Every stage except the first needs a buffer for the tensors that it receives. vLLM 0.32 allocates this buffer in a dummy
run. In eager mode on the CPU, vLLM skips the dummy run, so the first step fails, even without a connector. This module
makes the stage allocate the buffer when it is first needed.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from tierstore.adapters.vllm import TierStoreConnector

__all__ = ["TierStoreConnector"]

_gather = GPUModelRunner.sync_and_gather_intermediate_tensors


def _gathered(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.intermediate_tensors is None:
        self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
            batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
        )
    return _gather(self, *args, **kwargs)


GPUModelRunner.sync_and_gather_intermediate_tensors = _gathered
