"""Ranks with context parallelism for real vLLM on the CPU: an executor whose ranks have KV memory but no model.

vLLM's own kernels for CPUs cannot distribute tokens over ranks ("Context Parallelism is not supported on CPU"). With
this executor, only the model is simulated. The configuration, the planning of the KV cache and its memory, the
scheduler, the pool of blocks and the block hashes are vLLM's. All ranks are in one process.

The KV of a token is derived from all tokens up to it. The next token of an answer is derived from the KV of all tokens
before it, as it is found in the blocks of all ranks. A wrong cell therefore changes the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from zlib import crc32

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.utils import allocate_kv_cache

HEAD = 8
LAYERS = 2
MEMORY_NBYTES = 64 << 20
VOCABULARY = 512
Tables = list[list[int]]


def place(token: int, block_size: int, ranks: int, interleave: int) -> tuple[int, int, int]:
    """Return the number of a token's block, the rank that has the token, and the token's place in the rank's block.

    It repeats vLLM's kernels for slot mappings, in ``vllm/v1/worker/block_table.py``. ``block_size`` is that of a rank.
    """
    block, offset = divmod(token, block_size * ranks)
    owner = offset // interleave % ranks
    return block, owner, offset // (interleave * ranks) * interleave + offset % interleave


class Rank:
    """The KV memory of a rank, and its half of the connector."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, number: int) -> None:
        self.connector: Any = None
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        self.layers = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        if vllm_config.kv_transfer_config is not None:
            self.connector = KVConnectorFactory.create_connector(
                vllm_config, KVConnectorRole.WORKER, kv_cache_config
            )
            self.connector._rank = lambda: number
            self.connector._stage = lambda: 0
            self.connector.register_kv_caches(self.layers)

    def begin(self, metadata: Any) -> None:
        if self.connector is not None:
            self.connector.handle_preemptions(metadata)
            self.connector.bind_connector_metadata(metadata)

    def end(self, finished: set[str]) -> KVConnectorOutput | None:
        if self.connector is None:
            return None
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(finished)
        output = KVConnectorOutput(
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return output


class Ranks(Executor):  # type: ignore[misc]
    """The executor. vLLM loads it by name (``distributed_executor_backend``)."""

    replicated = 0
    """Number of layers that vLLM does not distribute, as those of some draft models."""

    def _init_executor(self) -> None:
        self._ranks: list[Rank] = []
        self._groups: list[Any] = []
        self._tokens: dict[str, list[int]] = {}
        self._tables: dict[str, Tables] = {}
        self._size = self.parallel_config.decode_context_parallel_size
        assert self._size == self.parallel_config.world_size

    # -- what vLLM asks when it starts ----------------------------------------------------------------------------

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_specs(self) -> Any:
        spec: dict[str, Any] = {
            "block_size": self.cache_config.block_size,
            "num_kv_heads": 1,
            "head_size": HEAD,
            "dtype": torch.float32,
        }
        names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS + self.replicated)]
        layers = {
            name: FullAttentionSpec(**spec, dcp_sharded=number < LAYERS) for number, name in enumerate(names)
        }
        return [layers] * self._size

    def determine_available_memory(self) -> list[int]:
        return [MEMORY_NBYTES] * self._size

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["BLHNC", "LBHNC"]] * self._size

    def set_kv_cache_layout(self, layout_name: str, *interleave: int) -> None:
        self.cache_config.kv_cache_layout = layout_name

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self._groups = kv_cache_configs[0].kv_cache_groups
        self._ranks = [Rank(self.vllm_config, each, number) for number, each in enumerate(kv_cache_configs)]

    def collective_rpc(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        if method == "shutdown":
            for rank in self._ranks:
                if rank.connector is not None:
                    rank.connector.shutdown()
        return []

    def check_health(self) -> None:
        """Do nothing: ranks in this process cannot fail alone."""

    # -- a step ---------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._tokens.pop(request_id, None)
            self._tables.pop(request_id, None)
        for rank in self._ranks:
            rank.begin(scheduler_output.kv_connector_metadata)
        starts = self._starts(scheduler_output)
        sampled = {
            request_id: self._answer(request_id, start, scheduler_output.num_scheduled_tokens[request_id])
            for request_id, start in starts.items()
        }
        outputs = [
            ModelRunnerOutput(
                req_ids=list(sampled),
                req_id_to_index={name: number for number, name in enumerate(sampled)},
                sampled_token_ids=list(sampled.values()),
                kv_connector_output=rank.end(scheduler_output.finished_req_ids),
            )
            for rank in self._ranks
        ]
        aggregator = self.kv_output_aggregator
        output = outputs[0] if aggregator is None else aggregator.aggregate(outputs)
        future: Future[Any] = Future()
        future.set_result(output)
        return future if non_block else output

    def _starts(self, output: Any) -> dict[str, int]:
        """Update the block tables. Return each scheduled request with the number of its computed tokens."""
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            self._tables[new.req_id] = [list(blocks) for blocks in new.block_ids]
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, more, start in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self._tables[name] = [list(blocks) for blocks in more]
            else:
                for table, blocks in zip(self._tables[name], more or (), strict=False):
                    table += blocks
            starts[name] = start
        return starts

    def _answer(self, request_id: str, start: int, count: int) -> list[int]:
        """Write the KV of tokens ``start`` to ``start + count``. Return the next token if none of the request is left.

        The next token depends on the KV of all tokens so far, as it is in the blocks.
        """
        tokens = self._tokens[request_id]
        hashed = 0
        for number, token in enumerate(tokens[: start + count]):
            hashed = crc32(token.to_bytes(4, "little"), hashed)
            if number >= start:
                for layer, cell in enumerate(self._cells(request_id, number)):
                    cell.fill_((hashed >> 8) + layer)
        if start + count < len(tokens):
            return []
        seen = 0
        for number in range(len(tokens)):
            for cell in self._cells(request_id, number):
                seen = crc32(cell.contiguous().numpy().tobytes(), seen)
        tokens.append(3 + seen % (VOCABULARY - 3))
        return tokens[-1:]

    def _cells(self, request_id: str, token: int) -> list[torch.Tensor]:
        """Return the KV of a token in each layer, on each rank that has the token."""
        found = []
        for group, table in zip(self._groups, self._tables[request_id], strict=True):
            spec = group.kv_cache_spec
            ranks = self._size if spec.dcp_sharded else 1
            interleave = self.parallel_config.cp_kv_cache_interleave_size
            block, owner, at = place(token, spec.block_size, ranks, interleave)
            owners = self._ranks[owner : owner + 1] if spec.dcp_sharded else self._ranks
            found += [rank.layers[name][table[block], :, at] for name in group.layer_names for rank in owners]
        return found


class RanksWithReplicatedLayers(Ranks):
    """Ranks that also have layers which vLLM does not distribute."""

    replicated = LAYERS
