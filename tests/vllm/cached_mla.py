"""Enables vLLM's prefix cache for models with MLA on a CPU without AMX. ``child`` imports it before the engine starts.

vLLM disables the prefix cache there, because prefill on such a CPU cannot read cached tokens. Decode can. Therefore, a
prompt must have exactly one token after its cached prefix: vLLM computes a single token as a decode step.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform

_checked = CpuPlatform.check_and_update_config


def _check_and_update_config(cls: Any, vllm_config: Any) -> None:
    cached = vllm_config.cache_config.enable_prefix_caching
    _checked(vllm_config)
    vllm_config.cache_config.enable_prefix_caching = cached


CpuPlatform.check_and_update_config = classmethod(_check_and_update_config)
