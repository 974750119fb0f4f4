"""Simulated vLLM: makes the same calls in the same order as vLLM's scheduler and workers, and checks all KV cells.

The content of a token's cell depends on all tokens up to it and on the epoch of the weights. A forward pass therefore
raises AssertionError if it reads a cell of another page, of another group, of an unwritten block or of old weights.
Blocks are reused as soon as they are free, in random order. Steps can be scheduled ahead of the workers. Everything
between the scheduler and the workers is pickled. All groups overlay the same tensors. A state fills all cells of its
block with one value, and so does the content of a ring. As in vLLM, steps end where a block of states ends, and the
engine then offers the states for storing.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import pytest
import torch

from tests.adapters import vllm_stub as stub
from tests.adapters.vllm_pool import BLOCK, FULL, Kind, Pool, Tables, hashes_of
from tests.support.bench import WiredMover
from tests.support.stalls import Gate, GatedCopies, GatedRecords
from tierstore.adapters.vllm.kv_layout import KVLayout
from tierstore.adapters.vllm.worker import WorkerHalf
from tierstore.build import Parts, assemble
from tierstore.config import StoreConfig
from tierstore.host.arena import HostArena
from tierstore.host.pinned_memory import Pinner
from tierstore.host.shared_memory import SharedMemory
from tierstore.mover import LocalMover
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.types import Tier

OUT, IN = (Tier.HBM, Tier.HOST), (Tier.HOST, Tier.HBM)
LAYERS, HEADS, CELL = 2, 1, 4
BUDGET = 4
"""Maximum tokens of a step."""
DOCUMENT = [0, 1, 2, 0, 1, 2, 0, 1, 2]


class ImpatientWakeup(Wakeup):
    """Lets held-back copies continue as soon as a worker waits for them."""

    gates: list[GatedCopies]
    lanes: tuple[tuple[Tier, Tier], ...] = (OUT,)

    def wait(self, seen: int, deadline: float | None, at_most_s: float) -> None:
        for gate in self.gates:
            for lane in self.lanes:
                gate.let_go(lane)
        super().wait(seen, deadline, at_most_s)


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    most: int
    """The request ends when it has this many tokens."""
    status: str = "waiting"
    num_computed_tokens: int = 0
    tables: Tables = field(default_factory=list)
    """The request's blocks, by group. Empty if it has none."""
    started: bool = False
    told: bool = False
    failed: bool = False
    life: int = 0
    """Incremented by every preemption. Results of steps from before the preemption are ignored."""
    in_flight: int = 0
    """Tokens of steps that are scheduled but not done."""
    sampling: bool = False
    cached: int = 0
    """Tokens that did not have to be computed when the request last began."""
    lora_request: stub.LoRARequest | None = None
    skip_reading_prefix_cache: bool = False
    elsewhere: int = 0
    """Leading tokens that another connector (of vLLM's ``MultiConnector``) loads if this connector offers none."""
    beside: bool = True
    """Whether the other connector loads these tokens while the request waits, and not during its first step."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def block_hashes(self) -> list[bytes]:
        lora = self.lora_request
        return hashes_of(self.tokens, None if lora is None else (lora.lora_name, lora.lora_path))


@dataclass
class Step:
    output: Any
    metadata: bytes
    work: list[tuple[Request, int, int, Tables, int]]
    """Request, first token, number of tokens, and the request's blocks and life when the step was scheduled."""
    number: int
    fills: list[tuple[Request, int, int, Tables]]
    """The loads of another connector: request, first token, end, and the request's blocks."""


class Part(NamedTuple):
    """A request's part of a step. ``blocks`` are its new blocks, or all its blocks if the request starts or resumes."""

    request: Request
    blocks: Tables
    tokens: int


class Engine:
    """A simulated engine: vLLM's scheduler, a worker per rank, and the connector between them.

    Args:
        config: Configuration of the store.
        ahead: Number of steps that are scheduled before the workers have done the first of them.
        kinds: The KV groups.
        interval: vLLM's ``prefix_cache_retention_interval`` for the connector. The engine's own cache keeps everything.
        drafts: Indices of the groups of a draft model.
        pinners: For some ranks, the object that page-locks the rank's host memory.
        clears: Whether new blocks are cleared before the connector is called, as in model runner V2.
        context_ranks: Size of decode context parallelism. Kinds with more than one rank must have this many.
        interleave: Number of consecutive tokens that are on the same rank.
        apart: Whether each rank is on a machine of its own, so that ranks cannot share memory.
        more: Further entries of the connector's extra configuration.
    """

    def __init__(
        self,
        config: dict[str, Any],
        *,
        blocks: int = 8,
        ranks: int = 1,
        ahead: int = 1,
        seed: int = 0,
        events: bool = False,
        kinds: Sequence[Kind] = FULL,
        interval: int | None = None,
        drafts: Sequence[int] = (),
        pinners: Mapping[int, Pinner] | None = None,
        role: str = "kv_both",
        caching: bool = True,
        worker_caching: bool = True,
        met: bool = True,
        stages: int = 1,
        clears: bool = False,
        context_ranks: int = 1,
        interleave: int = 1,
        apart: bool = False,
        **more: Any,
    ) -> None:
        self.connector = stub.load_connector()
        self.pinners = pinners or {}
        self.dice = random.Random(seed)
        self.ahead = ahead
        self.pool = Pool(blocks, kinds, self.dice)
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: set[str] = set()
        self.steps: deque[Step] = deque()
        self.deferred: list[tuple[int, Tables]] = []
        self.number = 0
        self.done_steps = 0
        self.epoch = 0
        self.adapters: list[dict[int, bytes]] = [{} for _ in range(ranks)]
        """For each worker, the contents of the adapter files when it loaded them, by ``lora_int_id``."""
        self.recomputed = 0
        """Number of loads that failed."""
        self.broken = False
        """Whether a wrong cell was read. If so, later checks mean nothing."""
        self.taken = 0
        """Number of tokens loaded from the store."""
        self.answers: dict[str, list[int]] = {}
        self._names = 0
        self._rings: dict[tuple[int, Request, int], tuple[int, int]] = {}
        """The request's life and number of tokens when a ring was last filled, by rank, request and group."""
        self.fills: list[tuple[Request, int, int, Tables]] = []
        self.filled = 0
        """Number of tokens that another connector loaded."""
        self.clears = clears
        assert all(kind.ranks in (1, context_ranks) for kind in kinds)
        self.context_ranks, self.interleave = context_ranks, interleave
        alike = all(kind.mla for kind in kinds) and context_ranks == 1
        self.replicas = ranks // stages if alike else 1
        """Number of consecutive ranks that have the same KV."""
        self.apart = apart
        self.shared: dict[int, SharedMemory] = {}
        """The memory that the first rank of each stage has created."""
        kv = stub.kv_cache_config(blocks + 1, *(kind.spec for kind in kinds), hash_block_size=BLOCK)
        kv.prefix_cache_retention_interval = interval
        for number in drafts:
            kv.kv_cache_groups[number].is_eagle_group = True
        kv.needs_kv_cache_zeroing = clears
        extra = {"config": config, **more}
        largest = max(kind.cells for kind in kinds)
        layers = [
            [
                torch.zeros(blocks + 1, HEADS, largest, CELL)
                for _ in range(LAYERS + self._stage(rank, ranks, stages))
            ]
            for rank in range(ranks)
        ]
        self.tensors = [
            [[t.view(blocks + 1, HEADS, kind.cells, -1) for t in tensors] for kind in kinds]
            for tensors in layers
        ]
        """The KV tensors, by rank, group and layer."""
        self.copies: list[GatedCopies] = []
        self.records: list[GatedRecords] = []
        parallel: dict[str, Any] = {
            "stages": stages,
            "context_ranks": context_ranks,
            "interleave": interleave,
        }
        here = stub.vllm_config(extra, ranks, role=role, caching=worker_caching, **parallel)
        self.workers = [
            self._worker(here, kv, rank, self._stage(rank, ranks, stages)) for rank in range(ranks)
        ]
        vllm_config = stub.vllm_config(extra, ranks, events=events, role=role, caching=caching, **parallel)
        vllm_config.use_v2_model_runner = here.use_v2_model_runner = clears
        self.scheduler = self.connector.TierStoreConnector(vllm_config, stub.Role.SCHEDULER, kv)
        if clears:
            self.scheduler.bind_gpu_block_pool(self.pool)
        self.scheduler._workers_here = list  # as if the workers were in other processes
        self.pace = 1.0
        """The probability that a held lane lets one transfer proceed in a step."""
        if met:
            self.meet()

    def meet(self) -> None:
        """Run the first step, as a serving engine does before there is a request."""
        assert self.scheduler.has_pending_push_work()
        self.steps.append(self._schedule())
        self._work()
        self.placement._next_spill = math.inf

    @staticmethod
    def _stage(rank: int, ranks: int, stages: int) -> int:
        """Return the pipeline stage of a rank. Stage ``n`` has ``n`` more layers than the first one."""
        return rank * stages // ranks

    def _worker(self, vllm_config: Any, kv: Any, rank: int, stage: int) -> Any:
        kv = copy.deepcopy(kv)
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            for group in kv.kv_cache_groups:
                group.layer_names = [f"{name}.of.{stage}" for name in group.layer_names]
        worker = self.connector.TierStoreConnector(vllm_config, stub.Role.WORKER, kv)
        worker._rank = lambda: rank
        worker._stage = lambda: stage
        worker._shared_memory = lambda nbytes: None if self.apart else self._map(stage, nbytes)
        wakeup = ImpatientWakeup()
        wakeup.gates = []

        def opened(
            config: StoreConfig, found: KVLayout, number: int, replicas: int, shared: SharedMemory | None
        ) -> WorkerHalf:
            parts: Parts = assemble(config, PageLayout.of(found.spec), wakeup.bump, shared=shared)
            if number in self.pinners:
                assert parts.arena is not None
                slots = parts.arena.num_slots
                parts.arena = arena = HostArena(parts.layout, slots, self.pinners[number])
                assert isinstance(parts.mover, LocalMover)
                parts.mover._memory[Tier.HOST] = arena
            parts.mover = mover = WiredMover.around(parts)
            half = WorkerHalf(parts, found, number, wakeup, replicas)
            half.idle_s = 0.0
            assert mover.copies is not None
            self.copies.append(mover.copies)
            wakeup.gates.append(mover.copies)
            if mover.records is not None:
                self.records.append(mover.records)
            return half

        worker._open_half = opened
        worker.register_kv_caches(
            {f"{g}.{i}": t for g, layers in enumerate(self.tensors[rank]) for i, t in enumerate(layers)}
        )
        return worker

    def _map(self, stage: int, nbytes: Callable[[], int]) -> SharedMemory:
        """Return the memory of a stage for one more rank. Each rank has a mapping of its own."""
        if stage not in self.shared:
            self.shared[stage] = SharedMemory.create(nbytes())
            return self.shared[stage]
        found = SharedMemory.open(self.shared[stage].handle)
        found.close()
        return found

    @property
    def free(self) -> list[int]:
        return self.pool.free

    @property
    def half(self) -> Any:
        return self.scheduler._scheduler

    @property
    def placement(self) -> Any:
        return self.half._tiers.store._directory.writeback

    # -- calls of users -------------------------------------------------------------------------------------------

    def add(
        self,
        tokens: list[int],
        more: int,
        name: str | None = None,
        lora: stub.LoRARequest | None = None,
        *,
        reads: bool = True,
        elsewhere: int = 0,
        beside: bool = True,
    ) -> str:
        """Queue a request, and return its name.

        ``name`` can be reused as soon as vLLM has forgotten the earlier request of this name. ``reads`` says whether
        the request may read cached KV.
        """
        self._names += 1
        request = Request(
            name or f"r{self._names}",
            list(tokens),
            len(tokens) + more,
            lora_request=lora,
            skip_reading_prefix_cache=not reads,
            elsewhere=elsewhere,
            beside=beside,
        )
        assert request.request_id not in self.requests, "duplicate request id"
        self.requests[request.request_id] = request
        self.queue.append(request)
        self.scheduler.on_new_request(request)
        return request.request_id

    def abort(self, name: str) -> None:
        request = self.requests.get(name)
        if request is not None and request.status != "finished":
            self._finish(request)

    def preempt(self, name: str) -> None:
        request = self.requests.get(name)
        if request is not None and request in self.running:
            self._preempt(request)

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self.pool.forget()

    def change_weights(self) -> None:
        """Change the weights, and reset the prefix cache, running requests and connector, as one call of vLLM does.

        vLLM cannot reset the cache while requests wait for loads, so these requests are aborted first.
        """
        self._pause()
        self.epoch += 1
        assert self.scheduler.reset_cache()

    def sleep(self) -> None:
        """Pause all requests and discard the KV memory, as vLLM does at every sleep level.

        The scheduler can reach the workers directly, as when both are in one process.
        """
        self._pause()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.scheduler, "_workers_here", lambda: [w._worker for w in self.workers])
            patch.setattr(ImpatientWakeup, "lanes", (OUT, IN))
            assert self.scheduler.reset_cache()
        for gate in self.copies:
            under_way = gate.running + gate.waiting(OUT) + gate.waiting(IN)
            assert not under_way, "a copy touches memory that is gone"
        for layer in (layer for groups in self.tensors for layers in groups for layer in layers):
            layer.fill_(-1.0)

    def _pause(self) -> None:
        """Finish, abort or preempt all work, as vLLM does before it resets its caches."""
        while self.steps:
            self._work()
        for request in [r for r in self.requests.values() if r.status == "loading"]:
            self._finish(request)
        for request in list(reversed(self.running)):
            self._preempt(request)
        self.forget()

    def spill(self) -> None:
        """Run a step in which a timed spill is due."""
        self.placement._next_spill = 0.0
        self.step()
        self.placement._next_spill = math.inf

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.steps.append(self._schedule())
        while len(self.steps) >= self.ahead:
            self._work()

    def run(self, most: int = 3000) -> None:
        """Step until no request is left and nothing is in flight."""
        for _ in range(most):
            if not (self.requests or self.half.pending or self.deferred):
                self.placement._next_spill = math.inf
                return
            self.placement._next_spill = 0.0
            self.step()
            while self.steps and not self.requests:
                self._work()
        raise AssertionError(f"{[(r.request_id, r.status) for r in self.requests.values()]} do not end")

    def check(self) -> None:
        self.scheduler.check()
        for worker in self.workers:
            worker.check()

    def close(self) -> None:
        for gate in [*self.copies, *self.records]:
            gate.open()
        while self.steps:
            self._work()
        for worker in self.workers:
            worker.shutdown()
        for memory in self.shared.values():
            memory.close()
        self.scheduler.shutdown()

    # -- the scheduler --------------------------------------------------------------------------------------------

    def _schedule(self) -> Step:
        cached = self._go_on()
        new, resumed = self._admit(BUDGET - sum(part.tokens for part in cached))
        parts = [*cached, *new, *resumed]
        # Copy the state as scheduled: later changes of a request must not change this step.
        work = [(r, r.num_computed_tokens, count, _copied(r.tables), r.life) for r, _, count in parts]
        output = _output(
            cached, new, resumed, self.ended, self._offers(parts), self.pool.taken if self.clears else []
        )
        self.pool.taken = []
        self.ended.clear()
        fills, self.fills = self.fills, []
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        for request, _, count in parts:
            request.num_computed_tokens += count
            request.in_flight += count
            request.sampling = request.num_computed_tokens == request.num_tokens
        self.number += 1
        return Step(output, metadata, work, self.number, fills)

    def _offers(self, parts: Sequence[Part]) -> dict[str, list[tuple[int, int, int]]]:
        """Return offers to store the states at block ends after this step, mixed with offers that must be refused."""
        offers: dict[str, list[tuple[int, int, int]]] = {}
        for number, kind in enumerate(self.pool.kinds):
            for request, _, count in parts:
                end = request.num_computed_tokens + count
                if not kind.state or end % kind.size or self.dice.random() < 0.2:
                    continue
                block = request.tables[number][end // kind.size - 1]
                noise = [(number, 0, end), (number, block, end - 1), (number, block, end + kind.size)]
                offers.setdefault(request.request_id, []).extend([(number, block, end), *noise])
                offers.setdefault("gone", []).append((number, block, kind.size))
        return offers

    def _end(self, request: Request, start: int, budget: int) -> int:
        """Return the token at which a step of at most ``budget`` tokens ends."""
        end = min(request.num_tokens, start + budget)
        size = max((kind.size for kind in self.pool.kinds if kind.state), default=0)
        if not size:
            return end
        stops = [end, (request.num_tokens - 1) // size * size]
        if start % size:
            stops.append((start // size + 1) * size)
        if end < request.num_tokens:
            stops = [min(at, end // size * size) for at in stops]
        return min((at for at in stops if start < at <= end), default=start)

    def _go_on(self) -> list[Part]:
        """Schedule running requests in order, as far as the token budget and the free blocks allow."""
        budget, parts = BUDGET, []
        for request in list(self.running):
            count = self._end(request, request.num_computed_tokens, budget) - request.num_computed_tokens
            if request not in self.running or request.sampling or count <= 0:
                continue
            fresh = self._grow(request, request.num_computed_tokens + count)
            if fresh is None:
                continue
            budget -= count
            parts.append(Part(request, fresh, count))
        return parts

    def _admit(self, budget: int) -> tuple[list[Part], list[Part]]:
        """Schedule waiting requests while tokens and blocks are left. Return the new requests and the resumed ones."""
        new: list[Part] = []
        resumed: list[Part] = []
        # As in vLLM, requests that hold blocks come first. Otherwise they could wait for each other.
        for request in sorted(self.queue, key=lambda r: not r.tables):
            if budget <= 0:
                break
            if request.status == "loading":
                if not request.told:
                    continue
                self._loaded(request)
            begun = self._begin(request, budget)
            if begun is None:
                continue
            if not begun:
                break
            if request.status == "loading":
                continue
            count = self._end(request, request.num_computed_tokens, budget) - request.num_computed_tokens
            budget -= count
            (resumed if request.started else new).append(Part(request, _copied(request.tables), count))
            self._runs(request)
        return new, resumed

    def _runs(self, request: Request) -> None:
        request.started = True
        request.status = "running"
        self.queue.remove(request)
        self.running.append(request)

    def _grow(self, request: Request, tokens: int) -> Tables | None:
        """Add blocks for ``tokens`` tokens, preempting others if needed.

        Return the new blocks, or None if the request itself was preempted.
        """
        self.pool.give_back(request.tables, request.num_computed_tokens - request.in_flight)
        while self.pool.need(request.tables, tokens) > len(self.free):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        return self.pool.grow(request.tables, tokens)

    def _begin(self, request: Request, budget: int) -> bool | None:
        """Give a waiting request its blocks. Return False if too few are free, or None if it must wait."""
        if request.num_computed_tokens:
            end = self._end(request, request.num_computed_tokens, budget)
            return self._extend(request, end) if end > request.num_computed_tokens else None
        most = 0 if request.skip_reading_prefix_cache else request.num_tokens - 1
        here, tables = self.pool.local(request.block_hashes, most)
        outside, beside = self.scheduler.get_num_new_matched_tokens(request, here)
        if outside is None:
            return None
        assert outside % self.pool.unit == 0
        filled = 0
        if not outside:
            most = min(request.elsewhere, request.num_tokens - 1) // self.pool.unit * self.pool.unit
            filled = max(0, most - here)
            beside = bool(filled) and request.beside
        computed = here + outside + filled
        assert computed < request.num_tokens
        end = computed if beside else self._end(request, computed, budget)
        if end == computed and not beside:
            return None
        self.pool.hold(tables)
        if computed > here:
            self.pool.release(
                [[*table[: self._gone(number, computed)]] for number, table in enumerate(tables)]
            )
            self.pool.nulls(tables, computed)
        states = sum(kind.state for kind in self.pool.kinds) if computed > here else 0
        if self.pool.need(tables, request.num_tokens) + states > len(self.free) - self._reserved():
            self.pool.release(tables)
            return False
        before = len(self.pool.taken)
        if computed > here:
            self.pool.grow(tables, computed)  # a state that is loaded has a separate block
        self.pool.grow(tables, end)
        if beside:
            del self.pool.taken[before:]  # vLLM does not clear blocks that a load fills
        request.tables = tables
        self._tell(request, outside)
        if filled:
            self.fills.append((request, here, computed, _copied(tables)))
        request.num_computed_tokens = request.cached = computed
        self.taken += outside
        self.filled += filled
        if beside:
            request.status, request.told, request.failed = "loading", False, False
        return True

    def _gone(self, number: int, tokens: int) -> int:
        kind = self.pool.kinds[number]
        return kind.seen_from(tokens) // kind.size

    def _tell(self, request: Request, outside: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: tuple(_copied(request.tables)))
        self.scheduler.update_state_after_alloc(request, blocks, outside)

    def _reserved(self) -> int:
        """Return how many blocks the loading requests still need. Without this reserve, they could all wait forever."""
        return sum(self.pool.need(r.tables, r.num_tokens) for r in self.queue if r.tables)

    def _extend(self, request: Request, tokens: int) -> bool:
        self.pool.give_back(request.tables, request.num_computed_tokens)
        if self.pool.need(request.tables, tokens) > len(self.free):
            return False
        self.pool.grow(request.tables, tokens)
        self._tell(request, 0)
        return True

    def _loaded(self, request: Request) -> None:
        request.status = "waiting"
        if request.failed and not request.num_computed_tokens:
            self._free(request)
        else:
            self.pool.cache(request.block_hashes, request.tables, request.num_computed_tokens)

    def _free(self, request: Request) -> None:
        """Free the request's blocks once all steps that can still write to them are done."""
        tables, request.tables = request.tables, []
        if self.steps or request.in_flight:
            self.deferred.append((self.number + 1, tables))
        else:
            self.pool.release(tables)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.num_computed_tokens, request.status, request.sampling = 0, "waiting", False
        request.in_flight = 0
        request.life += 1
        self.queue.appendleft(request)

    def _finish(self, request: Request) -> None:
        waits = request.status == "loading" and not request.told
        tables = request.tables or [[] for _ in self.pool.kinds]
        self.pool.give_back(tables, max(0, request.num_computed_tokens - request.in_flight))
        self.scheduler.request_finished_all_groups(request, tuple(_copied(tables)))
        if request in self.running:
            self.running.remove(request)
        if request in self.queue:
            self.queue.remove(request)
        request.status = "finished"
        self.ended.add(request.request_id)
        if not waits:
            self._free(request)
            del self.requests[request.request_id]

    # -- the workers ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        step = self.steps.popleft()
        outputs = [self._on(rank, step) for rank in range(len(self.workers))]
        self.done_steps = step.number
        self._update(step, outputs)

    def _on(self, rank: int, step: Step) -> Any:
        worker, metadata = self.workers[rank], pickle.loads(step.metadata)
        if self.clears:
            for block in step.output.new_block_ids_to_zero:
                for layer in (layer for layers in self.tensors[rank] for layer in layers):
                    layer[block].fill_(-2.0)
        worker.handle_preemptions(metadata)
        for request, start, end, tables in step.fills:
            self._fill(rank, request, start, end, tables)
        self._pass(self.copies[rank])
        loads_first = self.dice.random() < 0.5  # before vLLM 0.32
        if loads_first:
            worker.start_load_kv(None)
        self._load_adapters(rank, [request.lora_request for request, *_ in step.work])
        for request, start, count, tables, life in step.work:
            for group, table in enumerate(tables):
                if self.pool.kinds[group].ring:
                    self._fill_ring(rank, request, start, count, group, table[0], life)
                elif self.pool.kinds[group].state:
                    self._advance(rank, request, start, count, group, table)
                else:
                    self._forward(rank, request, start, count, group, table)
        if not loads_first:
            worker.start_load_kv(None)
        if step.work or self.dice.random() < 0.5:
            worker.wait_for_save()
        self._pass(self.copies[rank])
        if self.records:
            self._pass(self.records[rank])
        told = worker.get_transfer_results(step.output.finished_req_ids)
        return SimpleNamespace(
            finished_recving=told.finished_recving,
            failed_recving=told.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )

    def _pass(self, gate: Gate) -> None:
        """With probability ``pace``, let one transfer of each held lane proceed. Wait for these transfers to end."""
        for lane in sorted(gate.holding):
            if self.dice.random() < self.pace:
                gate.let_go(lane, 1)
        gate.settle()

    def _load_adapters(self, rank: int, wanted: Sequence[stub.LoRARequest | None]) -> None:
        """Load adapters as vLLM's workers do: once for each id, and again if a request asks for a reload."""
        for lora in wanted:
            if lora is not None and (lora.load_inplace or lora.lora_int_id not in self.adapters[rank]):
                files = sorted(Path(lora.lora_path).iterdir())
                self.adapters[rank][lora.lora_int_id] = b"".join(file.read_bytes() for file in files)

    def drop_adapter(self, number: int) -> None:
        """Unload an adapter, as if another adapter needed its slot. The next request that uses it loads it again."""
        for loaded in self.adapters:
            loaded.pop(number, None)

    def _forward(
        self, rank: int, request: Request, start: int, count: int, group: int, table: list[int]
    ) -> None:
        """Check the earlier cells that the step's first token sees, and write the cells of the step's tokens.

        Only the rank that has a token checks or writes its cell.
        """
        kind = self.pool.kinds[group]
        for i in range(kind.seen_from(start), start + count):
            number, owner, at = kind.place(i, self.interleave)
            if owner != rank % kind.ranks:
                continue
            block = table[number]
            want = self._want(rank, request, group, i + 1)
            for layer, tensor in enumerate(self.tensors[rank][group]):
                cell = tensor[block, 0, at]
                if i >= start:
                    assert block, f"{request.request_id} writes where it has no block"
                    cell.fill_(want + layer)
                elif not bool((cell == want + layer).all()):
                    self.broken = True
                    raise AssertionError(
                        f"{request.request_id} reads another's token {i} in block {block} of rank {rank}"
                    )

    def _advance(
        self, rank: int, request: Request, start: int, count: int, group: int, table: list[int]
    ) -> None:
        """Check the state that the step starts from, and write the state that it leaves, often into the same block."""
        size = self.pool.kinds[group].size
        if start:
            self._require_all(rank, request, group, table[(start - 1) // size], start)
        self._fill_all(rank, request, group, table[(start + count - 1) // size], start + count)

    def _fill_ring(
        self, rank: int, request: Request, start: int, count: int, group: int, block: int, life: int
    ) -> None:
        """Check what the previous step left in the ring, unless this step is the request's first, and fill the ring."""
        ring = (rank, request, group)  # not the name, because names are reused
        if start and self._rings.get(ring) == (life, start):
            self._require_all(rank, request, group, block, start)
        self._fill_all(rank, request, group, block, start + count)
        self._rings[ring] = (life, start + count)

    def _want(self, rank: int, request: Request, group: int, tokens: int) -> float:
        weights: object = self.epoch
        if request.lora_request is not None:
            weights = (self.epoch, self.adapters[rank][request.lora_request.lora_int_id])
        return float(
            crc32(repr((weights, rank // self.replicas, group, request.tokens[:tokens])).encode()) >> 8
        )

    def _require_all(self, rank: int, request: Request, group: int, block: int, tokens: int) -> None:
        want = self._want(rank, request, group, tokens)
        for layer, tensor in enumerate(self.tensors[rank][group]):
            if not block or not bool((tensor[block] == want + layer).all()):
                self.broken = True
                raise AssertionError(
                    f"{request.request_id} reads another's state in block {block} of rank {rank}"
                )

    def _fill_all(self, rank: int, request: Request, group: int, block: int, tokens: int) -> None:
        assert block, f"{request.request_id} writes where it has no block"
        for layer, tensor in enumerate(self.tensors[rank][group]):
            tensor[block].fill_(self._want(rank, request, group, tokens) + layer)

    def _fill(self, rank: int, request: Request, start: int, end: int, tables: Tables) -> None:
        """Write the KV of tokens ``[start, end)``, as if another connector had loaded it."""
        for group, (kind, table) in enumerate(zip(self.pool.kinds, tables, strict=True)):
            if kind.state:
                self._fill_all(rank, request, group, table[(end - 1) // kind.size], end)
            for i in range(start, 0 if kind.state or kind.ring else end):
                number, owner, at = kind.place(i, self.interleave)
                for layer, tensor in enumerate(self.tensors[rank][group]):
                    if table[number] and owner == rank % kind.ranks:
                        tensor[table[number], 0, at].fill_(self._want(rank, request, group, i + 1) + layer)

    def _update(self, step: Step, outputs: list[Any]) -> None:
        self.deferred, due = (
            [(n, b) for n, b in self.deferred if n > step.number + 1],
            [b for n, b in self.deferred if n <= step.number + 1],
        )
        for tables in due:
            self.pool.release(tables)
        merged = outputs[0]
        for other in outputs[1:]:
            assert merged.finished_recving == other.finished_recving
            mine, more = merged.kv_connector_worker_meta, other.kv_connector_worker_meta
            merged.kv_connector_worker_meta = mine.aggregate(more) if mine and more else mine or more
        merged.kv_connector_worker_meta = pickle.loads(pickle.dumps(merged.kv_connector_worker_meta))
        self._fail(merged.invalid_block_ids, merged.failed_recving)
        for request, start, count, _, life in step.work:
            if request.status != "running" or request.life != life:
                continue
            request.in_flight -= count
            self.pool.cache(request.block_hashes, request.tables, start + count)
            if request.sampling and start + count == request.num_tokens:
                request.sampling = False
                request.tokens.append(crc32(repr(request.tokens).encode()) % 3)
                if request.num_tokens >= request.most:
                    self.answers[request.request_id] = request.tokens
                    self._finish(request)
        self.scheduler.update_connector_output(merged)
        filled = {request.request_id for request, *_ in step.fills if request.beside}
        for name in filled | (merged.finished_recving or set()):
            assert name in self.requests, f"{name} was told of when it had ended"
            request = self.requests[name]
            if request.status == "loading":
                assert not request.told, f"{name} was told twice"
                request.told = True
            else:
                assert request.status == "finished", f"{name} was told of a load that it does not wait for"
                self._free(request)
                del self.requests[name]

    def _fail(self, bad: set[int], failed: set[str]) -> None:
        assert not bad or len(self.pool.kinds) == 1, "vLLM takes no blocks of several groups"
        for request in self.requests.values():
            if request.status != "loading" or request.told:
                continue
            first = next((i for i, block in enumerate(request.tables[0]) if block in bad), None)
            if request.request_id in failed:
                first = 0
            if first is not None:
                request.num_computed_tokens, request.failed = first * self.pool.unit, True
                self.recomputed += 1


def _output(
    cached: list[Part],
    new: list[Part],
    resumed: list[Part],
    ended: set[str],
    offers: dict[str, list[tuple[int, int, int]]],
    cleared: list[int],
) -> Any:
    """Return the part of vLLM's ``SchedulerOutput`` that the connector reads."""
    again = [*cached, *resumed]
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=part.request.request_id,
                block_ids=part.blocks,
                num_computed_tokens=part.request.num_computed_tokens,
            )
            for part in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[part.request.request_id for part in again],
            new_block_ids=[_copied(part.blocks) if any(part.blocks) else None for part in again],
            num_computed_tokens=[part.request.num_computed_tokens for part in again],
            resumed_req_ids={part.request.request_id for part in resumed},
        ),
        num_scheduled_tokens={part.request.request_id: part.tokens for part in [*again, *new]},
        finished_req_ids=set(ended),
        new_block_ids_to_zero=cleared,
        kv_connector_block_state=SimpleNamespace(boundary_state_offloads=offers),
    )


def _copied(tables: Tables) -> Tables:
    return [list(table) for table in tables]
