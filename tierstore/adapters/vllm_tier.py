"""Makes TierStore's NVMe tier available to vLLM as a secondary tier, below vLLM's own CPU tier.

In vLLM's ``--kv-transfer-config``:

    "kv_connector": "OffloadingConnector",
    "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8589934592,
      "secondary_tiers": [{"type": "TierStoreTier", "module_path": "tierstore.adapters.vllm_tier",
                           "config": "tierstore.yaml"}]}

Chunks on disk are checksummed, and are found again after a restart. Their total size is limited. This module
requires vLLM 0.32 or 0.33; earlier versions do not load tiers from other packages. Only vLLM imports it.
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

from tierstore.adapters.chunks import Chunks, Done, is_whole, nvme_section
from tierstore.adapters.model_files import adapters_digest, model_digest
from tierstore.config import NvmeConfig
from tierstore.errors import ConfigError
from tierstore.nvme.tier import NvmeTier
from tierstore.page import PageLayout, PageSpec

_log = logging.getLogger(f"vllm.{__name__}")  # shown next to vLLM's own log lines
_CLOSE_S = 30.0
_CODED = ("bfloat16", "float16")
_ATTENTION = ("attn", "mla_attn")


class TierStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """The NVMe tier as a secondary tier of vLLM's KV offloading.

    Each data-parallel engine uses its own part of the directory. Only one engine at a time can use a part.
    vLLM calls all methods in the scheduler's process, under the tiering manager's lock.

    Args:
        config: The path of a YAML file, or a mapping with the same contents. Only the section ``nvme`` is used.
        model: A name for the weights. It must change whenever the same tokens would produce different KV. By
            default, weights are identified by the model name given to vLLM, by samples of the files with weights and by
            the configuration files. A model of the Hugging Face hub is looked up in the local cache, on the branch
            main, and is also identified by its commit. Required if vLLM has the model from elsewhere. The tier cannot
            see settings such as ``--revision``, ``--hf-overrides`` and ``--quantization``. If you use one of these,
            give a name that changes with it.
        adapters: Directories of all LoRA adapters that are served. vLLM's chunk hashes identify an adapter by
            its name, not by its weights. The files in these directories therefore become part of the
            identity: if an adapter has been retrained, the next start does not find the old chunks.
        state_dtypes: The settings that determine the dtypes of recurrent states (Mamba, linear attention, short
            convolutions): the values of ``--dtype``, ``--mamba-cache-dtype`` and ``--mamba-ssm-cache-dtype``. The
            tier cannot see these settings, and states of other dtypes may have the same size, so the values become
            part of the identity. Required if the names of layers suggest that they have such states. Pass an empty
            list if no layer has one.
        cp_kv_cache_interleave_size: The value of ``--cp-kv-cache-interleave-size``. Required with decode context
            parallelism, which distributes the tokens of a block over ranks in pieces of this size. The tier cannot see
            the setting, so the value becomes part of the identity. Always give vLLM the flag too: without it, the size
            is 1, or the block size of one rank if any connector is NixlConnector. The flag
            ``--dcp-kv-cache-interleave-size`` must not be set to a value above 1, which would replace this one.
        enable_kv_events: Whether to publish events for chunks that are stored and removed. Has no effect
            unless vLLM's own KV events are enabled.
        locality: The value of vLLM's ``Locality`` to set in these events, or None.

    Raises:
        ConfigError: The configuration is not supported.
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
        state_dtypes: Sequence[str] | None = None,
        cp_kv_cache_interleave_size: int | None = None,
        enable_kv_events: bool = False,
        locality: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise ConfigError(
                f"secondary tier {tier_type}: unknown keys {', '.join(sorted(unknown))}; known keys are config, model, "
                "adapters, state_dtypes, cp_kv_cache_interleave_size, enable_kv_events, locality, backpressure"
            )
        if model is not None and not model.strip():
            raise ConfigError(
                f"secondary tier {tier_type}: model must be a non-blank name for the weights, got {model!r}; "
                "leave it out to identify the weights by vLLM's model name and the model's files"
            )
        if isinstance(state_dtypes, str) or not all(isinstance(name, str) for name in state_dtypes or ()):
            raise ConfigError(
                f"secondary tier {tier_type}: state_dtypes must be a list of names such as ['float16', 'float32'], "
                f"got {state_dtypes!r}"
            )
        recurrent = [] if state_dtypes is not None else _may_have_states(offloading_spec.config.groups)
        if recurrent:
            raise ConfigError(
                f"secondary tier {tier_type}: state_dtypes is missing, but layers {', '.join(recurrent[:3])} seem to "
                "have recurrent states, whose dtypes vLLM does not report; list the values of --dtype, "
                "--mamba-cache-dtype and --mamba-ssm-cache-dtype, such as ['bfloat16', 'auto', 'float32'], or [] if "
                "no layer has a state"
            )
        piece, context_ranks = cp_kv_cache_interleave_size, offloading_spec.config.parallel.dcp_size
        if context_ranks > 1 and (not isinstance(piece, int) or isinstance(piece, bool) or piece < 1):
            raise ConfigError(
                f"secondary tier {tier_type}: with decode_context_parallel_size {context_ranks}, "
                f"cp_kv_cache_interleave_size must be a number of tokens, got {piece!r}: tokens are distributed over "
                "ranks in pieces of a size that vLLM does not report to this tier; start vLLM with "
                "--cp-kv-cache-interleave-size and give the same value here (without the flag, the size is 1, or the "
                "block size if NixlConnector is used)"
            )
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        nvme = nvme_section(config, "vLLM's CPU tier")
        rows = np.asarray(primary_kv_view).view(np.uint8)
        described = identity(offloading_spec.config, rows.shape[1], model)
        if model is None and not described["weights"]:
            raise ConfigError(
                f"secondary tier {tier_type}: model is missing, and the weights of {described['model']!r} cannot be "
                "identified: it is neither a local folder nor in the local Hugging Face cache (branch main); give "
                "model a name that changes with the weights, such as 'org/name@commit'"
            )
        told = adapters_digest([Path(folder).expanduser() for folder in adapters])
        if told:
            described["adapters"] = told
        if state_dtypes:
            described["state_dtypes"] = list(state_dtypes)
        if context_ranks > 1:
            described["cp_kv_cache_interleave_size"] = piece
        woken = Event()
        self._chunks = Chunks(
            _open(nvme, described, offloading_spec.config, rows.shape[1], woken), rows, woken
        )
        events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[Any] | None = [] if events else None
        found = self._chunks.stats()
        _log.info("NVMe tier at %s: %s chunks found", found["path"], found["chunks"])

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Return HIT if the in-memory index lists the chunk as on disk, else MISS. O(1).

        A chunk that is still being written is a MISS, not a RETRY, because the primary tier still has it.
        While the disk hangs or fails, almost every lookup is a MISS.
        """
        return LookupResult.HIT if self._chunks.holds(key) else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        """Start writing chunks to disk, except those that are already there.

        The least recently used chunks are evicted to make space.
        """
        self._chunks.store(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids)

    def submit_load(self, job_metadata: Any) -> None:
        """Start reading chunks from disk.

        A chunk that is missing or corrupt is reported as failed, and vLLM computes it.
        """
        self._chunks.load(job_metadata.job_id, job_metadata.keys, job_metadata.chunk_ids)

    def get_finished_jobs(self) -> Iterable[Any]:
        """Return the results of the jobs that have finished since the last call. Does not block."""
        done = self._chunks.finished()
        self._note(done)
        return [_result(job) for job in done]

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        """Mark these chunks as recently used."""
        self._chunks.used(list(keys))

    def on_new_request(self, req_context: Any) -> Any:
        """Return vLLM's default context, with which vLLM offloads chunks as they are computed."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        """Block until no job accesses the primary tier. There is no timeout, even if the disk hangs."""
        self._chunks.drain()

    def take_events(self) -> Iterable[Any]:
        """Return events for chunks stored and removed since the last call. Empty if events are disabled."""
        events, self._events = self._events or [], None if self._events is None else []
        return events

    def shutdown(self) -> None:
        """Finish writes in flight and close the NVMe tier. Blocks for up to 30 s.

        Raises:
            TierStoreError: The disk did not respond in time and may still access the primary tier's memory,
                so that memory must not be freed.
        """
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
    """Return everything that determines what the bytes of a chunk mean, as values that JSON can represent.

    ``config`` is vLLM's OffloadingConfig.
    """
    parallel = config.parallel
    spread = ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")
    return {
        "engine": "vllm",
        "model": config.model.name if model is None else model,
        "weights": model_digest(config.model.name) if model is None else "",
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


def _may_have_states(groups: Iterable[Any]) -> list[str]:
    """Return the layers that may have a recurrent state, judging by their names.

    In vLLM, the name of an attention layer ends in ``.attn``, which a number may follow. The names of additional
    caches of such a layer end in ``cache``.
    """
    found = []
    for layer in (layer for group in groups for layer in group.layer_names):
        last = next((part for part in reversed(layer.split(".")) if not part.isdigit()), "")
        if last not in _ATTENTION and not last.endswith("cache"):
            found.append(layer)
    return found


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
    """Return a layout that describes a chunk as one row of 16-bit elements, which suffices for the codec.

    Return None if the dtype has no codec.
    """
    dtype = str(described["dtype"]).removeprefix("torch.")
    if dtype not in _CODED:
        if codec != "none":
            raise ConfigError(
                f"nvme.codec must be none if the KV dtype is {dtype}, got {codec}, which needs {' or '.join(_CODED)}"
            )
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
