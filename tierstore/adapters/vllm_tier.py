"""Our NVMe tier below vLLM's own CPU tier: bounded, checked, and found again after a restart.

    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
      "secondary_tiers": [{"type": "TierStoreTier", "module_path": "tierstore.adapters.vllm_tier",
                           "config": "tierstore.yaml"}]}

Needs vLLM 0.32 or 0.33: earlier versions do not load tiers of other packages. Only vLLM imports this module.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from tierstore.adapters.vllm.chunks import Chunks, Done, is_whole
from tierstore.adapters.vllm.keys import adapters_digest, weights_digest
from tierstore.config import NvmeConfig, load_config
from tierstore.errors import ConfigError
from tierstore.nvme.tier import NvmeTier
from tierstore.page import PageLayout, PageSpec

_log = logging.getLogger(f"vllm.{__name__}")  # shown next to vLLM's own lines
_CLOSE_S = 30.0
_CODED = ("bfloat16", "float16")


class TierStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """The NVMe tier as a secondary tier of vLLM's offloading.

    One engine at a time uses the directory; data-parallel engines each have their own part of it. Called in the
    scheduler's process, under the tiering manager's lock.

    Args:
        config: A YAML file or a mapping, of which only the section ``nvme`` is used.
        model: Must change when equal tokens would give other KV. None: the name that vLLM was given and, for a folder,
            samples of its weights.
        adapters: Folders of all LoRA adapters that are served. The tier sees only vLLM's hashes, which name an adapter
            but not its weights. With the adapters' files in the identity, a newly trained adapter begins another
            directory at the next start.
        enable_kv_events: Publish which chunks are stored and removed.

    Raises:
        ConfigError: The configuration cannot be used.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        config: str | Mapping[str, object],
        model: str | None = None,
        adapters: Sequence[str] = (),
        enable_kv_events: bool = False,
        locality: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise ConfigError(
                f"secondary tier {tier_type}: unknown {', '.join(sorted(unknown))}; it knows config, model, adapters, "
                "enable_kv_events, locality, backpressure"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        nvme = _section(config)
        rows = np.asarray(primary_kv_view).view(np.uint8)
        described = identity(offloading_spec.config, rows.shape[1], model)
        told = adapters_digest([Path(folder).expanduser() for folder in adapters])
        if told:
            described["adapters"] = told
        woken = Event()
        self._chunks = Chunks(
            _open(nvme, described, offloading_spec.config, rows.shape[1], woken), rows, woken
        )
        events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] | None = [] if events else None
        found = self._chunks.stats()
        _log.info("NVMe tier at %s: %s chunks found", found["path"], found["chunks"])

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Look a chunk up in memory, O(1). Never RETRY: what is on its way to disk is still in the primary tier."""
        return LookupResult.HIT if self._chunks.holds(key) else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Store chunks. Those that exist are not written again; the least recently used ones are evicted."""
        self._chunks.store(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids)

    def submit_load(self, job_metadata: Any) -> None:
        """Load chunks. One that fails its checks, or is gone, is reported as failed, and vLLM computes it."""
        self._chunks.load(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the jobs that ended since the last call."""
        done = self._chunks.finished()
        self._note(done)
        return [_result(job) for job in done]

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Mark these chunks as recently used."""
        self._chunks.used(list(keys))

    def on_new_request(self, req_context: Any) -> Any:
        """Return vLLM's default: chunks are stored as they are computed."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Wait until no job touches the primary tier, also if the disk hangs."""
        self._chunks.drain()

    def take_events(self) -> Iterable[Any]:
        """Return chunks stored and removed since the last call, if ``enable_kv_events``."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def shutdown(self) -> None:
        """Finish running writes. TierStoreError if the disk does not answer: the primary tier must stay then."""
        self._chunks.close(_CLOSE_S)

    def _note(self, done: Iterable[Done]) -> None:
        removed = self._chunks.removed()
        if self._events is None:
            return
        stored = [key for job in done if not job.is_load for key in job.arrived]
        for keys, gone in ((stored, False), ([bytes(key) for key in removed], True)):
            if keys and all(map(is_whole, keys)):
                self._events.append(
                    OffloadingEvent(keys=keys, medium=self.medium, removed=gone, locality=self.locality)
                )


def identity(config: Any, chunk_nbytes: int, model: str | None) -> dict[str, Any]:
    """Return, as plain data, everything that must agree for a chunk to mean the same.

    ``config`` is vLLM's OffloadingConfig.
    """
    parallel, folder = config.parallel, Path(config.model.name)
    spread = ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")
    return {
        "engine": "vllm",
        "model": config.model.name if model is None else model,
        "weights": weights_digest(folder) if model is None and folder.exists() else "",
        "dtype": str(config.model.dtype),
        "chunk_nbytes": chunk_nbytes,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": getattr(config, "kv_cache_layout", None),
        "canonical": getattr(config, "canonical_layout", False),
        "replicated": getattr(config, "replicated_layout", False),
        "parallel": {name: getattr(parallel, name) for name in spread},
    }


def _section(config: str | Mapping[str, object]) -> NvmeConfig:
    nvme = load_config(config).nvme
    if nvme is None:
        raise ConfigError("nvme is missing: the configuration needs an nvme section with path and capacity")
    fixed = {"admission": ("all",), "policy": ("lru",), "codec": ("none", "exp"), "daily_writes": (None,)}
    for name, allowed in fixed.items():
        value = getattr(nvme, name)
        if value not in allowed:
            known = " or ".join(map(str, allowed))
            raise ConfigError(f"nvme.{name} must be {known} below vLLM's CPU tier, got {value}")
    return nvme


def _open(nvme: NvmeConfig, described: Mapping[str, Any], config: Any, nbytes: int, woken: Event) -> NvmeTier:
    return NvmeTier.open(
        nvme.path,
        capacity=nvme.capacity,
        fingerprint=sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(),
        shard=config.parallel.data_parallel_index,
        page_nbytes=nbytes,
        wake=woken.set,
        readers=None if nvme.readers == "auto" else nvme.readers,
        timeout_s=nvme.timeout,
        description=described,
        payload=nvme.payload,
        codec=nvme.codec,
        layout=_layout(nvme.codec, described, nbytes),
    )


def _layout(codec: str, described: Mapping[str, Any], nbytes: int) -> PageLayout | None:
    """Return the layout of a chunk as one row of numbers, which is all that the codec needs to know."""
    dtype = str(described["dtype"]).removeprefix("torch.")
    if dtype not in _CODED:
        if codec != "none":
            raise ConfigError(f"nvme.codec must be none with KV of {dtype}, got {codec}")
        return None
    spec = PageSpec(
        kind="mla",
        num_layers=1,
        page_size=1,
        num_kv_heads=1,
        head_dim=nbytes // 2,
        dtype=dtype,
        model=str(described["model"]),
    )
    return PageLayout.of(spec)


def _result(job: Done) -> Any:
    partly = {} if job.complete or not job.is_load else {"successful_keys": job.arrived or None}
    return JobResult(job.job, job.complete, transfer_time=job.seconds, transfer_bytes=job.nbytes, **partly)
