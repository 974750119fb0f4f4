"""Lets vLLM cache prefixes of models with MLA on a CPU without AMX. ``child`` imports it before the engine starts.

vLLM switches prefix caching off in that case, because its prefill does not read cached tokens. Decoding does. A prompt
must therefore have a single token after its hit, which vLLM computes as in decoding.
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
