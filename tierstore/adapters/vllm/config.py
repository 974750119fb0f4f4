"""Configuration of the connector.

``Settings`` represents ``kv_connector_extra_config``. ``Deployment`` adds the relevant settings of vLLM. It
describes one engine, and is the same in the scheduler half and the workers. Unsupported settings raise
ConfigError. Settings that are supported but have surprising effects cause a logged warning.
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
from tierstore.adapters.vllm.kv_groups import Groups, Heads, groups_of, heads_of
from tierstore.adapters.vllm.kv_layout import kv_layout
from tierstore.codecs import LOSS_CLASSES
from tierstore.config import HbmConfig, load_config
from tierstore.errors import ConfigError
from tierstore.nvme.page_codecs import allowed_over

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

    from tierstore.adapters.vllm.keys import Adapter
    from tierstore.adapters.vllm.kv_layout import KVLayout
    from tierstore.config import StoreConfig

Load = Literal["always", "if_faster"]
Role = Literal["kv_producer", "kv_consumer", "kv_both"]
_KNOWN = ("config", "layout", "load", "load_timeout_s", "model_id", "put_off_s")
_LOADS: tuple[Load, ...] = ("always", "if_faster")
_HOST_CODECS = ("none", "int8")
_DISK_CODECS = ("none", "exp")
"""Values of ``nvme.codec`` if host memory has no codec."""
LOAD_TIMEOUT_S = 30.0
_CONTEXT_PARALLEL = ("prefill_context_parallel_size", "decode_context_parallel_size")


@dataclass(frozen=True)
class Settings:
    """The connector's settings in ``kv_connector_extra_config``.

    Attributes:
        config: The configuration of the tiers.
        layout: The KV layout to request from vLLM. None lets the connector choose.
        load_timeout_s: Time in seconds after which a request computes the pages that have not been loaded.
        model_id: A name that identifies the weights in addition to their files. Change it when the weights
            change in place.
        put_off_s: Maximum time in seconds that a request waits in vLLM's queue, without owning blocks, while its
            pages are read from disk. With 0, its load starts immediately.
        load: With "always", all pages that are found are loaded. With "if_faster", the connector loads as much of
            the prefix as minimizes the time that all requests together have to wait.
    """

    config: StoreConfig
    layout: str | None = None
    load_timeout_s: float = LOAD_TIMEOUT_S
    model_id: str = ""
    put_off_s: float = 0.0
    load: Load = "if_faster"

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Settings:
        """Parse vLLM's ``kv_connector_extra_config``.

        Raises:
            ConfigError: A key is unknown or a value is invalid. The message names the key, the value and the
                valid values.
        """
        for key in extra:
            if key not in _KNOWN:
                near = get_close_matches(key, _KNOWN, 1)
                meant = f" (did you mean {near[0]!r}?)" if near else ""
                raise ConfigError(
                    f"unknown key {key!r} in kv_connector_extra_config{meant}; known keys: {', '.join(_KNOWN)}"
                )
        source = extra.get("config")
        if not isinstance(source, str | PathLike | Mapping):
            raise ConfigError(
                f"config must be the path of a YAML file, or a mapping with the same contents, got {source!r}"
            )
        timeout, put_off = extra.get("load_timeout_s", LOAD_TIMEOUT_S), extra.get("put_off_s", 0)
        if not _are_seconds(timeout) or not timeout:
            raise ConfigError(
                f"load_timeout_s must be a number of seconds above 0 and at most 3600, got {timeout!r}"
            )
        if not _are_seconds(put_off):
            raise ConfigError(f"put_off_s must be a number of seconds from 0 to 3600, got {put_off!r}")
        for key in ("layout", "model_id"):
            if not isinstance(extra.get(key, ""), str | None):
                raise ConfigError(f"{key} must be a string, got {extra[key]!r}")
        if extra.get("model_id") is not None and not extra["model_id"].strip():
            raise ConfigError(
                f"model_id must not be blank, got {extra['model_id']!r}; give the weights a name, or leave model_id "
                "out to identify them by the model's files alone"
            )
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

    @property
    def loss_class(self) -> str:
        """Return the loss class of pages. It is part of their identity."""
        return LOSS_CLASSES[self.config.codec]

    def of_rank(self, world_size: int, replica: int | None, device: str, replicas: int = 1) -> StoreConfig:
        """Return the configuration of one rank: its share of all capacities, its device and its directory.

        Args:
            world_size: Number of ranks, among which the capacities are divided.
            replica: Index of this engine if several engines, each with its own scheduler, serve the model (data
                parallel). Each engine then has its own directory. None if there is one engine.
            device: Device of the rank's HBM pages, such as "cuda:0".
            replicas: Number of ranks that share host memory and store each page once. The host capacity is that of
                the shared memory.
        """
        config = self.config
        changes: dict[str, object] = {"hbm": HbmConfig(device=device, owner="engine")}
        if config.host is not None:
            changes["host"] = config.host.model_copy(
                update={"capacity": config.host.capacity * replicas // world_size}
            )
        if config.nvme is not None:
            changes["nvme"] = config.nvme.model_copy(
                update={
                    "path": _path_of(config.nvme.path, replica),
                    "capacity": config.nvme.capacity // world_size,
                    "daily_writes": config.nvme.daily_writes
                    and config.nvme.daily_writes * replicas // world_size,
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
            "hbm.owner must be 'engine' under vLLM, because vLLM owns HBM, but is 'store'; change it, or leave out "
            "the hbm section"
        )
    if config.host is None:
        raise ConfigError(
            "host is missing: under vLLM, the configuration needs a host section with a capacity"
        )
    host, disk = config.host.codec, "none" if config.nvme is None else config.nvme.codec
    if host not in _HOST_CODECS:
        raise ConfigError(
            f"host.codec must be {' or '.join(_HOST_CODECS)} under vLLM, got {host!r}: the other codecs need to know "
            "which bytes of a block are keys, values and tokens, and that depends on vLLM's attention backend"
        )
    if host == "none" and disk not in _DISK_CODECS:
        raise ConfigError(
            f"nvme.codec must be {' or '.join(_DISK_CODECS)} under vLLM without a host.codec, got {disk!r}: to "
            "store pages with a lossy codec in host memory and on disk, set host.codec to int8"
        )
    if host != "none" and disk not in allowed_over(host):
        raise ConfigError(
            f"nvme.codec must be one of {', '.join(allowed_over(host))} if host.codec is {host!r}, got {disk!r}: pages "
            "are written to disk in the form that they have in host memory"
        )
    return config


_log = logging.getLogger("tierstore.adapters.vllm.served")


def device_of(tensor: torch.Tensor) -> str:
    """Return the name of the tensor's device, as used in ``hbm.device``."""
    return "cpu" if tensor.device.type == "cpu" else f"cuda:{tensor.device.index or 0}"


def tell_of_policy(transfer_config: Any) -> None:
    """Warn if vLLM is set to fail a request whose pages cannot be loaded, instead of computing the pages."""
    policy = getattr(transfer_config, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        _log.warning(
            "kv_load_failure_policy is %r: a request ends with an error if one of its pages cannot be loaded; "
            "with 'recompute' the page is computed instead",
            policy,
        )


def tell_of_hashes(last: bool) -> None:
    """Warn that pages on disk will not be found after a restart, because block hashes will be different.

    Do nothing if block hashes stay the same (``last``).
    """
    if not last:
        _log.warning(
            "this vLLM seeds its block hashes at random in every process: pages on disk are found after a "
            "restart only if PYTHONHASHSEED is set to the same number for all processes"
        )


def tell_of_no_caching() -> None:
    """Warn that the connector does nothing because vLLM's prefix caching is off."""
    _log.warning(
        "prefix caching is off in vLLM (by --no-enable-prefix-caching, or because vLLM switched it off for this model "
        "or platform): TierStoreConnector offers no hits and stores no pages"
    )


def wants_events(vllm_config: Any) -> bool:
    """Return whether vLLM publishes KV events."""
    events = getattr(vllm_config, "kv_events_config", None)
    return events is not None and bool(events.enable_kv_cache_events)


def distribution(vllm_config: Any) -> str:
    """Return how decode context parallelism distributes the tokens of a block over ranks.

    The result is empty if decode context parallelism is not used. Blocks that are distributed differently have
    different contents on each rank. In a worker, do not call this before vLLM creates its connectors, because
    NixlConnector may change the size of the pieces until then.
    """
    parallel = vllm_config.parallel_config
    ranks = getattr(parallel, "decode_context_parallel_size", 1)
    if ranks == 1:
        return ""
    # vLLM derives the size that it uses from the old and the new setting.
    settings = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
    pieces = [getattr(parallel, name, 1) for name in settings]
    return f"tokens over {ranks} ranks in pieces of {pieces} "


def replicas_of(parallel: Any, groups: Groups) -> int:
    """Return the number of tensor-parallel ranks that have the same KV. The result is 1 unless all layers have MLA.

    It is also 1 with decode context parallelism, because ranks then have different tokens, and with prefill context
    parallelism, because ranks agree on sharing memory only within one tensor-parallel group per stage.
    """
    split = max(getattr(parallel, name, 1) for name in _CONTEXT_PARALLEL)
    return parallel.tensor_parallel_size if groups.replicated and split == 1 else 1


def _stored_once(replicas: int) -> str:
    """Return a part of the identity of pages that ``replicas`` ranks store once. Empty if each rank stores its own."""
    return "" if replicas == 1 else f"once on {replicas} ranks "


def clears_blocks_early(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Return whether vLLM clears new blocks before the connector can wait for copies that read them.

    If layers have recurrent states, or keep KV in several precisions, vLLM clears each block before its next use.
    Model runner V2 clears it before calling the connector, so a copy in flight might store cleared bytes.
    """
    clears = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    return bool(clears and getattr(vllm_config, "use_v2_model_runner", False))


def memory_may_go(vllm_config: Any) -> bool:
    """Return whether vLLM may free the memory of the KV cache while it sleeps."""
    model = vllm_config.model_config
    return any(getattr(model, name, False) for name in ("enable_sleep_mode", "enable_cumem_allocator"))


def caching_is_on(vllm_config: Any) -> bool:
    """Return whether vLLM's prefix caching is on.

    In a worker, do not call this before the model has been loaded, because loading it may switch prefix caching off.
    """
    return bool(vllm_config.cache_config.enable_prefix_caching)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Configuration of one engine, the same in the scheduler half and the workers. Immutable plain data."""

    settings: Settings
    groups: Groups
    heads: Heads | None
    """The heads that ``host.codec`` encodes. None without a codec."""
    identity: str
    """Identity of the model, from which the namespaces of page keys are derived."""
    distribution: str
    """How the tokens of a block are distributed over ranks. It is part of the identity of pages in a worker."""
    world_size: int
    """Number of workers. Each page is split among them."""
    stages: int
    """Number of pipeline stages. Each has the KV of its own layers. Stages may have different numbers of layers."""
    replicas: int
    """Number of consecutive ranks whose KV is the same. They store each page once if they can share host memory."""
    replica: int | None
    """Index of this engine if requests are distributed over several engines (data parallel), else None."""
    num_blocks: int
    events: bool
    """Whether KV events are published."""
    lora: str
    """Settings that affect the K/V of LoRA adapters, in addition to the adapters' files."""
    memory_may_go: bool
    """Whether vLLM may free the memory of the KV cache while it sleeps."""
    role: Role
    """vLLM's ``kv_role``."""
    caching: bool
    """Whether prefix caching is on in vLLM, as far as this process knows."""
    pins: bool
    """Whether blocks must be pinned in vLLM's pool while they are copied. See ``clears_blocks_early``."""

    @classmethod
    def of(cls, vllm_config: Any, transfer_config: Any, kv_cache_config: Any) -> Deployment:
        """Return the deployment that vLLM's configuration describes. Raises ConfigError if it is not supported."""
        compat.require_tested()
        settings = Settings.of(transfer_config.kv_connector_extra_config)
        parallel = vllm_config.parallel_config
        groups = groups_of(kv_cache_config, getattr(parallel, "decode_context_parallel_size", 1))
        codec = "none" if settings.config.host is None else settings.config.host.codec
        return cls(
            settings=settings,
            groups=groups,
            heads=None if codec == "none" else heads_of(kv_cache_config, codec),
            identity=identity(vllm_config, settings.model_id, settings.loss_class),
            distribution=distribution(vllm_config),
            world_size=parallel.world_size,
            stages=parallel.pipeline_parallel_size,
            replicas=replicas_of(parallel, groups),
            replica=parallel.data_parallel_index if parallel.data_parallel_size > 1 else None,
            num_blocks=kv_cache_config.num_blocks,
            events=wants_events(vllm_config),
            lora=str(getattr(getattr(vllm_config, "lora_config", None), "lora_dtype", "")),
            memory_may_go=memory_may_go(vllm_config),
            role=transfer_config.kv_role,
            caching=caching_is_on(vllm_config),
            pins=clears_blocks_early(vllm_config, kv_cache_config),
        )

    def tell(self, transfer_config: Any) -> None:
        """Log a warning for each setting that is supported but may not do what the user expects."""
        tell_of_policy(transfer_config)
        if not self.caching:
            tell_of_no_caching()
        if self.settings.config.nvme is not None:
            tell_of_hashes(compat.hashes_last())

    def with_adapter(self, adapter: Adapter) -> Sequence[bytes]:
        """Return the key namespaces for requests with this LoRA adapter, one per group."""
        return self.groups.namespaces(f"{self.identity} lora {adapter.digest} {self.lora}")

    @property
    def _stage_name(self) -> str:
        """Return a name for the layers of this process's pipeline stage. Empty if a single stage has all layers."""
        return "" if self.stages == 1 else repr([group.layers for group in self.groups.all])

    def of_rank(
        self, tensors: Sequence[torch.Tensor], rank: int, replicas: int = 1
    ) -> tuple[StoreConfig, KVLayout]:
        """Return the configuration of worker ``rank``, and the layout of pages in its KV tensors.

        ``replicas`` consecutive ranks share host memory and store each page once. They do not find pages that were
        stored in another way.

        Raises:
            ConfigError: The layout of the tensors is not supported.
        """
        found = kv_layout(
            tensors,
            num_blocks=self.num_blocks,
            block_size=(self.groups.spine or self.groups.all[0]).tokens_per_rank,
            identity=_stored_once(replicas)
            + self._stage_name
            + self.distribution
            + self.groups.name
            + self.identity,
            shard=rank,
            heads=self.heads,
        )
        device = device_of(tensors[0])
        return self.settings.of_rank(self.world_size, self.replica, device, replicas), found
