"""Stores and loads blocks in the KV tensors that vLLM allocates for models that need a GPU.

Run ``python -m tests.vllm.laid_out`` with the Python that has vLLM. vLLM plans and allocates the tensors from the specs
of its models. The program stores a block of random bytes, overwrites all memory, and loads the block into another one.
Its last line of output is JSON. For each model and layout, it lists the kinds of the groups, the size of a page, the
number of pieces of memory in a page, and whether the block was loaded unchanged in all layers.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm.v1.core.kv_cache_utils as planned
import vllm.v1.kv_cache_interface as kv
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from tierstore.adapters.vllm.kv_groups import groups_of
from tierstore.adapters.vllm.kv_layout import kv_layout
from tierstore.gpu.engine_pages import EnginePool
from tierstore.page import PageLayout

BLOCKS = 6


def _mla(tokens: int, width: int, **more: Any) -> Any:
    return kv.MLAAttentionSpec(block_size=tokens, num_kv_heads=1, head_size=width, dtype=torch.uint8, **more)


def _deepseek_v3_2() -> list[Any]:
    mla = _mla(64, 576, cache_dtype_str="fp8_ds_mla", state_content_bytes=656)
    indexer = _mla(64, 132, cache_role=kv.SparseCacheRole.INDEXER)
    return [
        _unequal(
            {f"{i}.{name}": spec for name, spec in (("mla", mla), ("indexer", indexer)) for i in range(3)}
        )
    ]


def _deepseek_v4() -> list[Any]:
    packed: dict[str, Any] = {
        "cache_dtype_str": "fp8_ds_mla",
        "alignment": 576,
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    dense, sparse = (_mla(256, 512, tokens_per_state=ratio, **packed) for ratio in (4, 128))
    indexer = _mla(256, 132, tokens_per_state=4, alignment=576)
    window = kv.SlidingWindowMLASpec(
        block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128, **packed
    )
    compressor = kv.SlidingWindowMLASpec(
        block_size=8, num_kv_heads=1, head_size=1024, dtype=torch.float32, sliding_window=8, alignment=576
    )
    return [
        _unequal({"0": dense, "1": dense, "2": sparse, "3": indexer}),
        kv.KVCacheGroupSpec(["4", "5"], window),
        kv.KVCacheGroupSpec(["6", "7"], compressor),
    ]


def _qwen3_next() -> list[Any]:
    full = kv.FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    state = kv.MambaSpec(
        block_size=128,
        shapes=((3, 64), (2, 62, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=full.page_size_bytes,
        mamba_cache_mode="align",
    )
    return [kv.KVCacheGroupSpec(["0"], full), kv.KVCacheGroupSpec(["1", "2", "3"], state)]


def _unequal(layers: dict[str, Any]) -> Any:
    size = next(iter(layers.values())).block_size
    return kv.KVCacheGroupSpec(
        list(layers), kv.UniformTypeKVCacheSpecs(block_size=size, kv_cache_specs=layers)
    )


def _planned(layout: Any, groups: list[Any]) -> Any:
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        prefix_cache_retention_interval=0,
        num_gpu_blocks_override=BLOCKS,
    )
    config = SimpleNamespace(cache_config=cache, attention_config=SimpleNamespace(hisparse_config=None))
    return planned.get_kv_cache_config_from_groups(config, groups, 1 << 26)


def _report(layout: Any, groups: list[Any]) -> dict[str, Any]:
    config = _planned(layout, groups)
    tensors = allocate_kv_cache(config, torch.device("cpu"), layout)
    found = kv_layout(
        list(tensors.values()), num_blocks=config.num_blocks, block_size=256, identity="m", shard=0
    )
    pool = EnginePool(PageLayout.of(found.spec), (found.pages,))
    memory = torch.empty(0, dtype=torch.uint8).set_(next(iter(tensors.values())).untyped_storage())
    page = np.zeros(found.spec.page_nbytes, dtype=np.uint8)
    memory.copy_(torch.randint(0, 256, memory.shape))
    stored = {name: _bits(tensor[1]) for name, tensor in tensors.items()}
    pool.read(1, page)
    memory.copy_(torch.randint(0, 256, memory.shape))
    pool.write(BLOCKS - 1, page)
    return {
        "kinds": [type(group.kind).__name__ for group in groups_of(config).all],
        "nbytes": found.spec.page_nbytes,
        "pieces": len(found.pages.tensors),
        "exact": stored == {name: _bits(tensor[BLOCKS - 1]) for name, tensor in tensors.items()},
    }


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def main() -> None:
    models = {"deepseek-v3.2": _deepseek_v3_2, "deepseek-v4": _deepseek_v4, "qwen3-next": _qwen3_next}
    reports = {
        f"{name} {layout.name}": _report(layout, groups())
        for name, groups in models.items()
        for layout in (KVCacheLayout.BLHNC, KVCacheLayout.LBHNC)
        if (name, layout.name) != ("deepseek-v4", "LBHNC")  # vLLM refuses this combination
    }
    print(json.dumps(reports))  # noqa: T201


if __name__ == "__main__":
    main()
