"""One engine as it is deployed: what vLLM's configuration says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.keys import identity
from tierstore.adapters.vllm.kv_groups import Groups, groups_of
from tierstore.adapters.vllm.kv_layout import geometry
from tierstore.adapters.vllm.served import (
    device_of,
    memory_may_go,
    require_served,
    tell_of_hashes,
    tell_of_policy,
    wants_events,
)
from tierstore.adapters.vllm.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tierstore.adapters.vllm.keys import Adapter
    from tierstore.adapters.vllm.kv_layout import Geometry
    from tierstore.config import StoreConfig


@dataclass(frozen=True, slots=True)
class Deployment:
    """Plain data, the same on the scheduler's side and on the workers'; nothing changes in it."""

    settings: Settings
    groups: Groups
    identity: str
    """What the keys of this model's pages begin with."""
    world_size: int
    """Workers that share each page among them."""
    replica: int | None
    """The number of this engine among those that share the requests (data parallel); None: there is one."""
    num_blocks: int
    events: bool
    """Whether KV events are published."""
    lora: str
    """What decides how adapters are computed, besides their files."""
    memory_may_go: bool
    """Whether vLLM may take the KV cache's memory away while it sleeps."""

    @classmethod
    def of(cls, vllm_config: Any, transfer_config: Any, kv_cache_config: Any) -> Deployment:
        """ConfigError for a configuration or a vLLM that does not go together with this connector."""
        compat.require_tested()
        settings = Settings.of(transfer_config.kv_connector_extra_config)
        require_served(vllm_config)
        parallel = vllm_config.parallel_config
        return cls(
            settings=settings,
            groups=groups_of(kv_cache_config),
            identity=identity(vllm_config, settings.model_id),
            world_size=parallel.world_size,
            replica=parallel.data_parallel_index if parallel.data_parallel_size > 1 else None,
            num_blocks=kv_cache_config.num_blocks,
            events=wants_events(vllm_config),
            lora=str(getattr(getattr(vllm_config, "lora_config", None), "lora_dtype", "")),
            memory_may_go=memory_may_go(vllm_config),
        )

    def tell(self, transfer_config: Any) -> None:
        """Warnings of what works, and not as the user may think."""
        tell_of_policy(transfer_config)
        if self.settings.config.nvme is not None:
            tell_of_hashes(compat.hashes_last())

    def with_adapter(self, adapter: Adapter) -> Sequence[bytes]:
        """The namespaces of the keys of requests with this LoRA adapter."""
        return self.groups.namespaces(f"{self.identity} lora {adapter.digest} {self.lora}")

    def of_rank(self, tensors: Sequence[torch.Tensor], rank: int) -> tuple[StoreConfig, Geometry]:
        """What the half of worker ``rank`` opens: its share of the tiers, and the engine's ``tensors`` as pages.

        ConfigError for tensors that are no pages.
        """
        found = geometry(
            tensors,
            num_blocks=self.num_blocks,
            block_size=(self.groups.spine or self.groups.all[0]).block_size,
            identity=self.groups.name + self.identity,
            shard=rank,
        )
        return self.settings.of_rank(self.world_size, self.replica, device_of(tensors[0])), found
