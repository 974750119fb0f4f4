"""The connector's configuration: its own settings, those read from vLLM's, and each rank's share.

``Settings`` is ``kv_connector_extra_config``; ``Deployment`` describes one engine, the same for the
scheduler's half and the workers'. Unsupported settings raise ConfigError here; settings with surprising
effects log a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from tierstore.adapters.vllm import compat
from tierstore.adapters.vllm.keys import identity
from tierstore.adapters.vllm.kv_groups import Groups, groups_of
from tierstore.adapters.vllm.kv_layout import kv_layout
from tierstore.config import HbmConfig, load_config
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from tierstore.adapters.vllm.keys import Adapter
    from tierstore.adapters.vllm.kv_layout import KVLayout
    from tierstore.config import StoreConfig

Load = Literal["always", "if_faster"]
_KNOWN = ("config", "layout", "load", "load_timeout_s", "model_id", "put_off_s")
_LOADS: tuple[Load, ...] = ("always", "if_faster")
_LOSSLESS = {"host.codec": ("none",), "nvme.codec": ("none", "exp")}
LOAD_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Settings:
    """``config`` has the tiers. ``layout`` is the KV layout asked of vLLM; None leaves the choice to the connector.

    ``load`` says whether pages that are faster to compute are still loaded from disk while no other request waits
    for the engine. ``load_timeout_s``: a request whose pages have not arrived by then computes the rest.
    ``model_id`` names the weights beyond their files; change it when the weights change in place. ``put_off_s``:
    how long a request waits in vLLM's queue, without blocks, for pages that come up from disk; with 0 its load
    begins at once.
    """

    config: StoreConfig
    layout: str | None = None
    load_timeout_s: float = LOAD_TIMEOUT_S
    model_id: str = ""
    put_off_s: float = 0.0
    load: Load = "if_faster"

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Parse vLLM's ``kv_connector_extra_config``. ConfigError names key, value and valid values."""
        for key in extra:
            if key not in _KNOWN:
                near = get_close_matches(key, _KNOWN, 1)
                meant = f"; did you mean {near[0]!r}?" if near else ""
                raise ConfigError(
                    f"unknown key {key!r} in kv_connector_extra_config{meant} known keys: {', '.join(_KNOWN)}"
                )
        source = extra.get("config")
        if not isinstance(source, str | PathLike | Mapping):
            raise ConfigError(
                f"config must be the path of a YAML file, or its content as a mapping, got {source!r}"
            )
        timeout, put_off = extra.get("load_timeout_s", LOAD_TIMEOUT_S), extra.get("put_off_s", 0)
        if not _are_seconds(timeout) or not timeout:
            raise ConfigError(f"load_timeout_s must be seconds above 0 and up to 3600, got {timeout!r}")
        if not _are_seconds(put_off):
            raise ConfigError(f"put_off_s must be seconds from 0 to 3600, got {put_off!r}")
        for key in ("layout", "model_id"):
            if not isinstance(extra.get(key, ""), str | None):
                raise ConfigError(f"{key} must be a string, got {extra[key]!r}")
        load = extra.get("load", "if_faster")
        if load not in _LOADS:
            raise ConfigError(f"load must be one of {', '.join(_LOADS)}, got {load!r}")
        return cls(
            _for_engine(load_config(source)),
            extra.get("layout"),
            float(timeout),
            extra.get("model_id") or "",
            float(put_off),
            load,
        )

    def of_rank(self, world_size: int, replica: int | None, device: str) -> StoreConfig:
        """Return the tiers of one rank: its share of all capacities, its device, a directory of its own engine.

        ``replica`` is the number of this engine if several with a scheduler each serve one model (data parallel).
        """
        config = self.config
        changes: dict[str, object] = {"hbm": HbmConfig(device=device, owner="engine")}
        if config.host is not None:
            changes["host"] = config.host.model_copy(update={"capacity": config.host.capacity // world_size})
        if config.nvme is not None:
            changes["nvme"] = config.nvme.model_copy(
                update={
                    "path": _path_of(config.nvme.path, replica),
                    "capacity": config.nvme.capacity // world_size,
                    "daily_writes": config.nvme.daily_writes and config.nvme.daily_writes // world_size,
                }
            )
        return config.model_copy(update=changes)


def _are_seconds(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool) and 0 <= found <= 3600


def _path_of(path: Path, replica: int | None) -> Path:
    return path if replica is None else path / f"engine-{replica}"


def _for_engine(config: StoreConfig) -> StoreConfig:
    if config.hbm is not None and config.hbm.owner == "store":
        raise ConfigError(
            "hbm.owner must be 'engine', or the hbm section missing, as vLLM owns HBM; got 'store'"
        )
    if config.host is None:
        raise ConfigError(
            "host is missing: under vLLM the configuration needs a host section with a capacity"
        )
    codecs = {
        "host.codec": config.host.codec,
        "nvme.codec": "none" if config.nvme is None else config.nvme.codec,
    }
    for name, codec in codecs.items():
        if codec not in _LOSSLESS[name]:
            allowed = " or ".join(_LOSSLESS[name])
            raise ConfigError(
                f"{name} must be {allowed} under vLLM, whose pages are stored byte by byte, got {codec!r}"
            )
    return config


_log = logging.getLogger("tierstore.adapters.vllm.served")


def device_of(tensor: torch.Tensor) -> str:
    """Return the tensor's device as ``hbm.device`` names it."""
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def tell_of_policy(transfer_config: Any) -> None:
    """Warn if vLLM would fail requests whose pages are missing instead of computing them."""
    policy = getattr(transfer_config, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        _log.warning(
            "kv_load_failure_policy is %r: a request ends with an error if one of its pages cannot be loaded; "
            "with 'recompute' the page is computed instead",
            policy,
        )


def tell_of_hashes(last: bool) -> None:
    """Warn if no page on disk would be found after a restart."""
    if not last:
        _log.warning(
            "this vLLM starts its block hashes at random in every process: pages on disk are found after a "
            "restart only if PYTHONHASHSEED is set to the same number for all of them"
        )


def wants_events(vllm_config: Any) -> bool:
    """Return whether KV events are published."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


def require_served(vllm_config: Any) -> None:
    """Raise ConfigError if the parallel layout is not supported."""
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(f"{name} must be 1 with TierStoreConnector, got {getattr(parallel, name)}")


def memory_may_go(vllm_config: Any) -> bool:
    """Return whether vLLM may free the KV cache's memory while it sleeps."""
    model = vllm_config.model_config
    return any(getattr(model, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator"))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Immutable plain data, the same for the scheduler's half and the workers."""

    settings: Settings
    groups: Groups
    identity: str
    """Identity of the model, from which the namespaces of its keys are made."""
    world_size: int
    """Number of workers that share each page."""
    replica: int | None
    """Number of this engine among those that share the requests (data parallel); None if there is only one."""
    num_blocks: int
    events: bool
    """Whether KV events are published."""
    lora: str
    """Settings that affect the K/V of LoRA adapters, besides the adapters' files."""
    memory_may_go: bool
    """Whether vLLM may free the KV cache's memory while it sleeps."""

    @classmethod
    def of(cls, vllm_config: Any, transfer_config: Any, kv_cache_config: Any) -> Deployment:
        """Read vLLM's configuration. ConfigError if this connector cannot work with it."""
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
        """Warn about settings that work, but perhaps not as expected."""
        tell_of_policy(transfer_config)
        if self.settings.config.nvme is not None:
            tell_of_hashes(compat.hashes_last())

    def with_adapter(self, adapter: Adapter) -> Sequence[bytes]:
        """Return the namespaces of the keys of requests with this LoRA adapter."""
        return self.groups.namespaces(f"{self.identity} lora {adapter.digest} {self.lora}")

    def of_rank(self, tensors: Sequence[torch.Tensor], rank: int) -> tuple[StoreConfig, KVLayout]:
        """Return the configuration of worker ``rank`` and its share, and the engine's ``tensors`` as pages.

        ConfigError if the tensors cannot be pages.
        """
        found = kv_layout(
            tensors,
            num_blocks=self.num_blocks,
            block_size=(self.groups.spine or self.groups.all[0]).block_size,
            identity=self.groups.name + self.identity,
            shard=rank,
        )
        return self.settings.of_rank(self.world_size, self.replica, device_of(tensors[0])), found
