"""One rank of SGLang without a model: its pools, radix tree and cache controller, driven request by request.

``Engine`` makes the calls that SGLang's scheduler makes, in the same order. In place of a model's forward pass it
writes bytes that follow from the tokens alone, so every byte that a cache hit returns can be checked.
"""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.environ import envs
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import evict_from_tree_cache
from sglang.srt.mem_cache.hicache_storage import PoolTransfer
from sglang.srt.mem_cache.kv_cache_builder import maybe_register_hicache_draft
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative.base_spec_worker import HiCacheDraftMode
from torch import Tensor

PATIENCE_S = 120.0
"""A request that waits longer than this hangs."""


@dataclass(frozen=True)
class Setup:
    """Say which model, layout and storage an ``Engine`` has.

    ``model`` is one of mha, mla, swa (full and sliding-window layers), mamba (full layers and recurrent states) and dsa
    (MLA with an indexer, as in DeepSeek V3.2, whose pages must have 64 tokens). ``draft`` adds a draft model of one
    layer: "packed" puts it in the host pages of the target model, "sidecar" in host pages of its own, "heads" likewise
    with ordinary attention, and "window" (with swa) likewise with a sliding window.
    ``storage`` is a name that SGLang knows, such as file or dynamic, and ``extra`` its configuration. ``durable`` says
    whether it finds its pages again after a restart.
    """

    model: str = "mha"
    draft: str | None = None
    storage: str | None = "file"
    extra: Mapping[str, Any] = field(default_factory=dict)
    durable: bool = True
    io: str = "kernel"
    layout: str = "page_first"
    page_size: int = 4
    pages: int = 64
    ratio: float = 2.0
    window: int = 8
    states: int = 24
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    dtype: str = "bfloat16"
    name: str = "a-model"
    rank: int = 0
    ranks: int = 1
    group: Any = None


class WrongBytesError(AssertionError):
    """A cache hit returned other bytes than those that were computed for its tokens."""


def content(tokens: Sequence[int], label: str, size: int) -> Tensor:
    """Return the ``size`` bytes that the model would compute after ``tokens``, for the layer or state in ``label``."""
    seed = array("q", tokens).tobytes() + label.encode()
    return torch.frombuffer(bytearray(hashlib.shake_128(seed).digest(size)), dtype=torch.uint8)


@dataclass(eq=False)
class Request:
    """A prompt on its way through ``Engine``."""

    tokens: Sequence[int]
    handle: Any
    prefetched: int = 0
    hit: int = 0
    device_hit: int = 0
    node: Any = None
    lock: Any = None
    slot: Tensor | None = None


class Engine:
    """Serve prompts with SGLang's cache, as one rank."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._extra = json.dumps({"prefetch_threshold": 1, "model": setup.name, **setup.extra})
        arguments = ServerArgs(
            model_path="dummy",
            served_model_name=setup.name,
            page_size=setup.page_size,
            enable_hierarchical_cache=True,
            hicache_ratio=setup.ratio,
            hicache_io_backend=setup.io,
            hicache_mem_layout=setup.layout,
            hicache_write_policy=setup.write_policy,
            hicache_storage_backend=setup.storage,
            hicache_storage_backend_extra_config=self._extra if setup.storage else None,
            hicache_storage_prefetch_policy=setup.prefetch_policy,
        )
        arguments._mamba_cache_chunk_size = setup.page_size
        set_global_server_args_for_scheduler(arguments)
        get_parallel().override_permanently(
            **dict.fromkeys(("tp_rank", "attn_tp_rank", "moe_tp_rank"), setup.rank),
            **dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), setup.ranks),
            pp_rank=0,
            pp_size=1,
        )
        self._requests = 0
        self._make_pools()
        components = {
            "mha": (ComponentType.FULL,),
            "mla": (ComponentType.FULL,),
            "dsa": (ComponentType.FULL,),
            "swa": (ComponentType.FULL, ComponentType.SWA),
            "mamba": (ComponentType.FULL, ComponentType.MAMBA),
        }[setup.model]
        params = CacheInitParams(
            req_to_token_pool=self._rows,
            token_to_kv_pool_allocator=self._allocator,
            page_size=setup.page_size,
            disable=False,
            tree_components=components,
            tp_cache_group=setup.group,
            sliding_window_size=setup.window if setup.model == "swa" else None,
            enable_mamba_extra_buffer=setup.model == "mamba",
            mtp_draft_device_pools=(self._draft,) if setup.draft == "packed" else (),
        )
        self.tree = UnifiedRadixCache(params=params)
        self.tree.init_hicache(arguments, params)
        if setup.draft in ("sidecar", "heads", "window"):
            plan = SimpleNamespace(mode=HiCacheDraftMode.SIDECAR, device_pools=(self._draft,))
            maybe_register_hicache_draft(tree_cache=self.tree, draft_plan=plan)
        self.tree.load_back_threshold = 0
        for entry in self.tree.host_pool_group.entries:
            entry.host_pool.pin_memory = False  # a CPU build of torch has no page-locked memory

        page = RadixKey(array("q", range(setup.page_size)))
        get_storage_hash_str(page, None, page_size=setup.page_size)  # the first call compiles SGLang's hash

    @property
    def controller(self) -> Any:
        return self.tree.cache_controller

    def serve(self, tokens: Sequence[int]) -> Request:
        """Answer a prompt of whole pages: prefetch, load, check the hit's bytes, compute the rest, insert it."""
        request = self.submit(tokens)
        self.wait(request)
        self.admit(request)
        self.check(request)
        self.finish(request)
        return request

    def submit(self, tokens: Sequence[int]) -> Request:
        """Put a prompt into the queue, which starts a prefetch from storage."""
        self._requests += 1
        request = Request(list(tokens), CacheRequestHandle(f"r{self._requests}", 0))
        found = self.tree.match_prefix(MatchPrefixParams(key=self._key(request)))
        matched = found.device_prefix_len + found.host_hit_length
        anchor = found.last_host_node
        if self.tree.is_backuped(anchor) or self.tree.is_root(anchor):
            self.tree.prefetch_from_storage(
                request.handle,
                anchor,
                array("q", tokens[matched:]),
                self.tree.get_last_hash_value(anchor),
                self.tree.get_prefix_hash_values(anchor)
                if self.tree.hicache_storage_pass_prefix_keys
                else None,
                matched_prefix_tokens=array("q", tokens[:matched]),
            )
        return request

    def step(self) -> None:
        """Let the cache handle what its threads have finished, as the scheduler does before each batch."""
        self.tree.check_hicache_events()

    def ready(self, request: Request) -> bool:
        """Return whether the request's prefetch is over, or may be stopped under the prefetch policy."""
        return bool(self.tree.check_prefetch_progress(request.handle))

    def wait(self, request: Request) -> None:
        for _ in self.until():
            self.step()
            if self.ready(request):
                break
        request.prefetched = self.prefetched(request)

    def prefetched(self, request: Request) -> int:
        """Return how many tokens the request's prefetch has read from storage, once."""
        return int(self.tree.pop_prefetch_loaded_tokens(request.handle))

    def admit(self, request: Request) -> None:
        """Match the prompt again, start copying what lies in host memory, and lock what was found."""
        if self._states is not None:
            request.slot = self._states.alloc(1)
            if request.slot is None:
                self.tree.evict_for_alloc(EvictParams(mamba_num=1))
                request.slot = self._states.alloc(1)
            assert request.slot is not None, "no free state"
        found = self.tree.match_prefix(MatchPrefixParams(key=self._key(request)))
        waiting = SimpleNamespace(
            rid=request.handle.rid,
            cache_request_handle=request.handle,
            last_node=found.last_device_node,
            swa_host_hit_length=found.swa_host_hit_length,
            mamba_host_hit_length=found.mamba_host_hit_length,
            lock=None,
            kv=SimpleNamespace(
                holds_mamba=True, mamba_pool_idx=None if request.slot is None else request.slot[0]
            ),
        )
        request.device_hit = found.device_prefix_len
        request.node = found.last_device_node
        first = self.tree.lock(request.node)
        _, request.node = self.tree.init_load_back(
            InitLoadBackParams(
                best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=waiting
            )
        )
        request.lock = self.tree.lock(request.node)
        self.tree.unlock(first)
        self.tree.ready_to_load_host_cache()
        request.hit = len(self.tree.path_device_indices(request.node))

    def check(self, request: Request) -> None:
        """Compare all bytes of the hit with the bytes that belong to its tokens."""
        indices = self.tree.path_device_indices(request.node)
        visible = len(indices) - self.setup.window
        for label, row, upto in self._pages_of(indices, 0, visible):
            size = row.numel()
            if not torch.equal(row.flatten(), content(request.tokens[:upto], label, size)):
                raise WrongBytesError(f"{label} of the page that ends at token {upto} of {request.tokens}")
        if self._states is not None and request.hit:
            state = self.tree.tree_core.get_component_device_value(request.node, ComponentType.MAMBA)
            for label, row in self._state_rows(int(state)):
                if not torch.equal(row, content(request.tokens[: request.hit], label, row.numel())):
                    raise WrongBytesError(f"{label} of the state after {request.tokens[: request.hit]}")

    def finish(self, request: Request) -> None:
        """Compute what was not found and insert the whole prompt into the tree."""
        self._settle_loads()
        old = self.tree.path_device_indices(request.node)
        new = self._allocate(len(request.tokens) - len(old))
        if new is None:
            self.drop(request)
            return
        indices = torch.cat([old, new])
        for label, row, upto in self._pages_of(indices, len(old), 0):
            row.copy_(content(request.tokens[:upto], label, row.numel()).view(row.shape))
        if request.slot is not None:
            for label, row in self._state_rows(int(request.slot)):
                row.copy_(content(request.tokens, label, row.numel()))
        result = self.tree.insert(
            InsertParams(
                key=self._key(request),
                value=indices.to(torch.int64),
                prev_prefix_len=len(old),
                mamba_value=request.slot,
            )
        )
        if request.slot is not None and not result.mamba_exist:
            request.slot = None
        self.drop(request)

    def abort(self, request: Request) -> None:
        """Abort a request in any state up to ``finish``."""
        self.tree.release_aborted_request(request.handle)
        self.drop(request)

    def drop(self, request: Request) -> None:
        self._settle_loads()
        self.tree.unlock(request.lock)
        request.lock = None
        if request.slot is not None:
            self._states.free(request.slot)
            request.slot = None

    def settle(self) -> None:
        """Wait until every copy, write to storage and prefetch is over."""
        tree = self.tree
        for _ in self.until():
            self.step()
            if not (
                tree.ongoing_backup
                or tree.ongoing_write_through
                or tree.ongoing_load_back
                or tree.ongoing_prefetch
                or self.controller.write_queue
            ):
                return

    def store(self) -> None:
        """Like ``settle``, and wait until every rank finds in storage what this rank has written."""
        self.settle()
        if hasattr(self.backend, "flush"):
            assert self.backend.flush(PATIENCE_S), "the backend is still writing"
        if self.setup.group is not None:
            torch.distributed.barrier(self.setup.group)

    def finds(self, tokens: Sequence[int]) -> bool:
        """Return whether storage has all pages of the tokens, also those of an indexer and a draft model."""
        page = self.setup.page_size
        keys = get_storage_hash_str(RadixKey(array("q", tokens)), None, page_size=page)
        asked = [
            PoolTransfer(spec.pool_name, hit_policy=spec.hit_policy) for spec in self.tree.sidecar_pool_specs
        ]
        return bool(self.backend.batch_exists_v2(keys, asked).kv_hit_pages == len(tokens) // page)

    def evict(self, pages: int) -> None:
        """Evict device pages, in the order of the tree's policy."""
        tokens = pages * self.setup.page_size
        states = tokens if self._states is not None else 0
        self.tree.evict(EvictParams(num_tokens=tokens, swa_num_tokens=tokens, mamba_num=states))
        self.tree.writing_check(write_back=True)

    def evict_host(self, pages: int) -> None:
        """Evict host pages that are no longer on the device."""
        self.tree.evict_host(pages * self.setup.page_size)

    def problems(self) -> list[str]:
        """Wait until the backend has written everything, and return which of its invariants are broken."""
        if not hasattr(self.backend, "check"):
            return []
        assert self.backend.flush(PATIENCE_S), "the backend is still writing"
        return [str(problem) for problem in self.backend.check()]

    def reattach(self) -> None:
        """Detach the storage backend and attach it again, while the engine runs."""
        detached, message = self.tree.detach_storage_backend()
        assert detached, message
        attached, message = self.tree.attach_storage_backend(
            storage_backend=self.setup.storage,
            storage_backend_extra_config_json=self._extra,
            served_model_name=self.setup.name,
            hicache_storage_prefetch_policy=self.setup.prefetch_policy,
            hicache_write_policy=self.setup.write_policy,
        )
        assert attached, message

    def stop(self) -> None:
        """End the engine as a server does that shuts down: nothing in HBM or host memory survives."""
        self.tree.detach_storage_backend()
        self.tree.release_host_resources()

    @property
    def backend(self) -> Any:
        """Return the storage backend, without the failure injector around it."""
        storage = self.controller.storage_backend
        return getattr(storage, "_backend", storage)

    def leaked(self) -> dict[str, int]:
        """Return the number of slots in use by pool, without pools that are free. The tree must be empty."""
        setup, allocator = self.setup, self._allocator
        tokens = setup.pages * setup.page_size
        if setup.model == "swa":
            used = {
                "device": tokens - allocator.full_attn_allocator.available_size(),
                "device, window": tokens - allocator.swa_attn_allocator.available_size(),
            }
        else:
            used = {"device": tokens - allocator.available_size()}
        if self._states is not None:
            used["device, states"] = setup.states - self._states.available_size()
        for entry in self.tree.host_pool_group.entries:
            used[f"host, {entry.name}"] = entry.host_pool.size - entry.host_pool.available_size()
        return {name: int(slots) for name, slots in used.items() if slots}

    def sound(self) -> None:
        """Check the tree's own invariants."""
        self.tree.sanity_check()

    def _key(self, request: Request) -> Any:
        return RadixKey(array("q", request.tokens))

    def until(self) -> Iterator[None]:
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            yield
            time.sleep(0.0005)
        raise TimeoutError(
            f"nothing has moved for {PATIENCE_S:.0f} s: {vars(self.tree).get('ongoing_prefetch')}"
        )

    def _settle_loads(self) -> None:
        for _ in self.until():
            if not self.tree.ongoing_load_back:
                return
            self.step()

    def _allocate(self, tokens: int) -> Tensor | None:
        if not tokens:
            return torch.empty(0, dtype=torch.int64)
        evict_from_tree_cache(self.tree, tokens)
        if self.setup.model != "swa":
            return self._allocator.alloc(tokens)  # type: ignore[no-any-return]
        # The allocator's own method for pages needs a Triton kernel. This is what it does.
        full, window = self._allocator.full_attn_allocator, self._allocator.swa_attn_allocator
        if min(full.available_size(), window.available_size()) < tokens:
            return None
        indices = full.alloc(tokens)
        self._allocator.full_to_swa_index_mapping[indices] = window.alloc(tokens)
        return indices  # type: ignore[no-any-return]

    def _make_pools(self) -> None:
        setup = self.setup
        size, page, dtype = setup.pages * setup.page_size, setup.page_size, getattr(torch, setup.dtype)
        common = {"device": "cpu", "dtype": dtype, "page_size": page}
        heads = {"head_num": 2, "head_dim": 8}
        self._states: Any = None
        self._rows: Any = ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
        self._draft: Any = None
        if setup.draft == "window":
            self._draft = SWAKVPool(
                size=size,
                size_swa=size,
                swa_attention_layer_ids=[0],
                full_attention_layer_ids=[],
                **heads,
                **common,
            )
        elif setup.draft is not None:
            self._draft = self._plain_pool("mha" if setup.draft == "heads" else setup.model, layers=1)
        if setup.model in ("mha", "mla", "dsa"):
            pool = self._plain_pool(setup.model, layers=3 if setup.model == "dsa" else 2)
        elif setup.model == "swa":
            pool = SWAKVPool(
                size=size,
                size_swa=size,
                swa_attention_layer_ids=[0, 2],
                full_attention_layer_ids=[1, 3],
                **heads,
                **common,
            )
        else:
            with envs.SGLANG_MAMBA_SSM_DTYPE.override("bfloat16"):
                shape = Mamba2StateShape.create(
                    tp_world_size=1,
                    intermediate_size=32,
                    n_groups=1,
                    num_heads=2,
                    head_dim=16,
                    state_size=8,
                    conv_kernel=4,
                )
                states = Mamba2CacheParams(shape=shape, layers=[0, 2])
            self._rows = HybridReqToTokenPool(
                size=4,
                mamba_size=setup.states,
                mamba_spec_state_size=4,
                max_context_len=64,
                device="cpu",
                enable_memory_saver=False,
                cache_params=states,
                mamba_layer_ids=[0, 2],
                enable_mamba_extra_buffer=True,
                speculative_num_draft_tokens=3,
            )
            self._states = self._rows.mamba_allocator
            pool = HybridLinearKVPool(
                size=size,
                full_attention_layer_ids=[1, 3],
                enable_memory_saver=False,
                mamba_pool=self._rows.mamba_pool,
                **heads,
                **common,
            )
        self._pool = pool
        arguments = {"size": size, "dtype": dtype, "device": "cpu", "kvcache": pool, "need_sort": False}
        if setup.model == "swa":
            self._allocator: Any = SWATokenToKVPoolAllocator(size_swa=size, page_size=page, **arguments)
        else:
            self._allocator = PagedTokenToKVPoolAllocator(page_size=page, **arguments)

    def _plain_pool(self, kind: str, layers: int) -> Any:
        setup = self.setup
        common = {
            "size": setup.pages * setup.page_size,
            "layer_num": layers,
            "device": "cpu",
            "dtype": getattr(torch, setup.dtype),
            "page_size": setup.page_size,
            "enable_memory_saver": False,
        }
        if kind == "mha":
            return MHATokenToKVPool(head_num=2, head_dim=8, **common)
        if kind == "mla":
            return MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=8, **common)
        shared = [False, True, False][:layers]  # the second layer uses the first one's choice of tokens
        return DSATokenToKVPool(
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            kv_cache_dim=24,
            index_head_dim=128,
            skip_topk_layers=shared,
            **common,
        )

    def _layers(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield each layer's label, its rows by token, and whether its rows have numbers of their own (SWA)."""
        pools = [("", self._pool, False)]
        if self.setup.model == "swa":
            pools = [("", self._pool.full_kv_pool, False), ("window ", self._pool.swa_kv_pool, True)]
        elif self.setup.model == "mamba":
            pools = [("", self._pool.full_kv_pool, False)]
        if self.setup.draft == "window":
            pools.append(("draft window ", self._draft.swa_kv_pool, True))
        elif self._draft is not None:
            pools.append(("draft ", self._draft, False))
        for name, pool, own in pools:
            if isinstance(pool, MLATokenToKVPool):  # the same on every rank
                for layer, rows in enumerate(pool.kv_buffer):
                    yield f"{name}layer {layer}", rows, own
            else:
                whose = f"rank {self.setup.rank} "
                for kind, buffers in (("K", pool.k_buffer), ("V", pool.v_buffer)):
                    for layer, rows in enumerate(buffers):
                        yield f"{whose}{name}layer {layer} {kind}", rows, own

    def _pages_of(self, indices: Tensor, start: int, visible: int) -> Iterator[tuple[str, Tensor, int]]:
        """Yield the bytes of each page from token ``start`` on, with a label and the page's end in tokens.

        Of sliding-window layers, only pages with tokens after ``visible`` are included. Nobody reads the others.
        """
        page = self.setup.page_size
        for label, rows, own in self._layers():
            flat = rows.view(rows.shape[0], -1).view(torch.uint8)
            for begin in range(start, len(indices), page):
                at = indices[begin : begin + page]
                if own:
                    if begin + page <= visible:
                        continue
                    at = self._allocator.full_to_swa_index_mapping[at]
                first = int(at[0])
                assert at.tolist() == list(range(first, first + page)), f"{at} is not a page"
                yield label, flat[first : first + page], begin + page
        for label, rows in self._indexers():
            for begin in range(start, len(indices), page):
                number = int(indices[begin]) // page
                yield label, rows[number : number + 1], begin + page

    def _indexers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of each layer of an indexer, one per page, with a label."""
        for name, pool in (("", self._pool), ("draft ", self._draft)):
            if isinstance(pool, DSATokenToKVPool):
                for layer, rows in enumerate(pool.index_k_with_scale_buffer):
                    if len(rows):
                        yield f"{name}indexer {layer}", rows

    def _state_rows(self, slot: int) -> Iterator[tuple[str, Tensor]]:
        cache = self._rows.mamba_pool.mamba_cache
        for name, states in [(f"conv {n}", conv) for n, conv in enumerate(cache.conv)] + [
            ("ssm", cache.temporal)
        ]:
            for layer in range(states.shape[0]):
                row = states[layer, slot].view(-1).view(torch.uint8)
                yield f"rank {self.setup.rank} {name} layer {layer}", row
