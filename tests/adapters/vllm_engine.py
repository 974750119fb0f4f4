"""vLLM without vLLM: its scheduler's and its workers' calls in their order, over tensors whose every cell is checked.

What a token's cell holds follows from all tokens up to it and from the weights' epoch, so a forward pass that reads a
cell of another page, of another group, of an unwritten block or of old weights is an AssertionError. Blocks are reused
as soon as they are free, at random; steps may be scheduled ahead of the workers; everything between the halves is
pickled. All groups overlay the same tensors.
"""

from __future__ import annotations

import math
import pickle
import random
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
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
from tierstore.mover import LocalMover
from tierstore.page import PageLayout
from tierstore.pump import Wakeup
from tierstore.types import Tier

OUT, IN = (Tier.HBM, Tier.HOST), (Tier.HOST, Tier.HBM)
LAYERS, HEADS, CELL = 2, 1, 4
BUDGET = 4
"""Tokens of one step."""
DOCUMENT = [0, 1, 2, 0, 1, 2, 0, 1, 2]


class ImpatientWakeup(Wakeup):
    """Whoever waits in a worker waits for copies that a test holds back: they go on then."""

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
    """Ends with so many tokens."""
    status: str = "waiting"
    num_computed_tokens: int = 0
    tables: Tables = field(default_factory=list)
    """Its blocks, by group; empty: it has none."""
    started: bool = False
    told: bool = False
    failed: bool = False
    life: int = 0
    """Goes up with every preemption: what steps of an earlier one give is not its any more."""
    in_flight: int = 0
    """Tokens of steps that have not been done."""
    sampling: bool = False
    cached: int = 0
    """Tokens that did not have to be computed when it began last."""
    lora_request: stub.LoRARequest | None = None

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
    """Request, first token, tokens, and its blocks and life when it was scheduled."""
    number: int


class Part(NamedTuple):
    """What a request has of a step. ``blocks``: those that are new; where it begins, all it has."""

    request: Request
    blocks: Tables
    tokens: int


class Engine:
    """``ahead``: steps scheduled before the workers are done with the first of them. ``kinds``: the KV groups.

    ``pinners``: of the ranks whose host memory is page-locked, by rank. ``more`` goes to the connector's extra
    configuration.
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
        pinners: Mapping[int, Pinner] | None = None,
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
        """What each worker has loaded, by ``lora_int_id``: what the files held then."""
        self.recomputed = 0
        """Loads that failed."""
        self.broken = False
        """Whether a wrong cell was read: what follows says nothing."""
        self.taken = 0
        """Tokens that came from outside."""
        self.answers: dict[str, list[int]] = {}
        self._names = 0
        kv = stub.kv_cache_config(blocks + 1, *(kind.spec for kind in kinds), hash_block_size=BLOCK)
        extra = {"config": config, **more}
        largest = max(kind.size for kind in kinds)
        layers = [
            [torch.zeros(blocks + 1, HEADS, largest, CELL) for _ in range(LAYERS)] for _ in range(ranks)
        ]
        self.tensors = [
            [[t.view(blocks + 1, HEADS, kind.size, -1) for t in tensors] for kind in kinds]
            for tensors in layers
        ]
        """By rank, group and layer."""
        self.copies: list[GatedCopies] = []
        self.records: list[GatedRecords] = []
        self.workers = [self._worker(extra, kv, rank, ranks) for rank in range(ranks)]
        role = stub.Role.SCHEDULER
        vllm_config = stub.vllm_config(extra, ranks, events=events)
        self.scheduler = self.connector.TierStoreConnector(vllm_config, role, kv)
        hellos = {r: worker.get_handshake_metadata() for r, worker in enumerate(self.workers)}
        self.scheduler._workers_here = list  # they are in other processes
        self.scheduler.set_xfer_handshake_metadata(pickle.loads(pickle.dumps(hellos)))
        self.placement._next_spill = math.inf
        self.pace = 1.0
        """How likely a lane lets a transfer go in a step."""

    def _worker(self, extra: dict[str, Any], kv: Any, rank: int, ranks: int) -> Any:
        worker = self.connector.TierStoreConnector(stub.vllm_config(extra, ranks), stub.Role.WORKER, kv)
        worker._rank = lambda: rank
        wakeup = ImpatientWakeup()
        wakeup.gates = []

        def opened(config: StoreConfig, found: KVLayout, number: int) -> WorkerHalf:
            parts: Parts = assemble(config, PageLayout.of(found.spec), wakeup.bump)
            if number in self.pinners:
                assert parts.arena is not None
                slots = parts.arena.num_slots
                parts.arena = arena = HostArena(parts.layout, slots, self.pinners[number])
                assert isinstance(parts.mover, LocalMover)
                parts.mover._memory[Tier.HOST] = arena
            parts.mover = mover = WiredMover.around(parts)
            half = WorkerHalf(parts, found, number, wakeup)
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

    @property
    def free(self) -> list[int]:
        return self.pool.free

    @property
    def half(self) -> Any:
        return self.scheduler._scheduler

    @property
    def placement(self) -> Any:
        return self.half._tiers.store._directory.writeback

    # -- what callers do ------------------------------------------------------------------------------------------

    def add(
        self, tokens: list[int], more: int, name: str | None = None, lora: stub.LoRARequest | None = None
    ) -> str:
        """``name``: used again, as soon as vLLM has forgotten who had it before."""
        self._names += 1
        request = Request(name or f"r{self._names}", list(tokens), len(tokens) + more, lora_request=lora)
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
        """The engine's own prefix cache is emptied."""
        self.pool.forget()

    def change_weights(self) -> None:
        """As ``reset_prefix_cache(reset_running_requests=True, reset_connector=True)`` after new weights came.

        vLLM cannot do that while requests wait for loads: they go first.
        """
        self._pause()
        self.epoch += 1
        assert self.scheduler.reset_cache()

    def sleep(self) -> None:
        """All levels: requests wait, and the KV memory goes away. Scheduler and workers are in one process."""
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
        """Everything that vLLM does before it resets its caches."""
        while self.steps:
            self._work()
        for request in [r for r in self.requests.values() if r.status == "loading"]:
            self._finish(request)
        for request in list(reversed(self.running)):
            self._preempt(request)
        self.forget()

    def spill(self) -> None:
        """The time of a timed spill has come."""
        self.placement._next_spill = 0.0
        self.step()
        self.placement._next_spill = math.inf

    # -- a step ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.steps.append(self._schedule())
        while len(self.steps) >= self.ahead:
            self._work()

    def run(self, most: int = 3000) -> None:
        """Until no request is left and nothing is on its way."""
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
        self.scheduler.shutdown()

    # -- the scheduler --------------------------------------------------------------------------------------------

    def _schedule(self) -> Step:
        cached = self._go_on()
        new, resumed = self._admit(BUDGET - sum(part.tokens for part in cached))
        parts = [*cached, *new, *resumed]
        # As it is scheduled: what happens to a request meanwhile changes nothing of this step.
        work = [(r, r.num_computed_tokens, count, _copied(r.tables), r.life) for r, _, count in parts]
        output = _output(cached, new, resumed, self.ended)
        self.ended.clear()
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        for request, _, count in parts:
            request.num_computed_tokens += count
            request.in_flight += count
            request.sampling = request.num_computed_tokens == request.num_tokens
        self.number += 1
        return Step(output, metadata, work, self.number)

    def _go_on(self) -> list[Part]:
        """Those that run, in their order, as far as there are tokens and blocks."""
        budget, parts = BUDGET, []
        for request in list(self.running):
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            if request not in self.running or request.sampling or count <= 0:
                continue
            fresh = self._grow(request, request.num_computed_tokens + count)
            if fresh is None:
                continue
            budget -= count
            parts.append(Part(request, fresh, count))
        return parts

    def _admit(self, budget: int) -> tuple[list[Part], list[Part]]:
        """Those that wait, as far as there are tokens and blocks: what begins, and what begins again."""
        new: list[Part] = []
        resumed: list[Part] = []
        # Those that hold blocks come first, as in vLLM: else they would wait for each other.
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
            count = min(budget, request.num_tokens - request.num_computed_tokens)
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
        """Blocks for so many tokens, preempting others; None: it was preempted itself."""
        self.pool.give_back(request.tables, request.num_computed_tokens - request.in_flight)
        while self.pool.need(request.tables, tokens) > len(self.free):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        return self.pool.grow(request.tables, tokens)

    def _begin(self, request: Request, budget: int) -> bool | None:
        """Gives a waiting request its blocks; False if there are not enough, None if it is to be asked again."""
        if request.num_computed_tokens:
            end = min(request.num_tokens, request.num_computed_tokens + budget)
            return self._extend(request, end)
        here, tables = self.pool.local(request.block_hashes, request.num_tokens - 1)
        outside, beside = self.scheduler.get_num_new_matched_tokens(request, here)
        if outside is None:
            return None
        assert outside % self.pool.unit == 0
        computed = here + outside
        assert computed < request.num_tokens
        self.pool.hold(tables)
        if outside:
            self.pool.release(
                [[*table[: self._gone(number, computed)]] for number, table in enumerate(tables)]
            )
            self.pool.nulls(tables, computed)
        end = computed if beside else min(request.num_tokens, computed + budget)
        if self.pool.need(tables, request.num_tokens) > len(self.free) - self._reserved():
            self.pool.release(tables)
            return False
        self.pool.grow(tables, end)
        request.tables = tables
        self._tell(request, outside)
        request.num_computed_tokens = request.cached = computed
        self.taken += outside
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
        """Blocks that requests with a load still need: without them nobody might go on."""
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
        """Its blocks may be reused, but only after the steps that may still write them."""
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
        worker.handle_preemptions(metadata)
        self._pass(self.copies[rank])
        loads_first = self.dice.random() < 0.5  # before vLLM 0.32
        if loads_first:
            worker.start_load_kv(None)
        self._load_adapters(rank, [request.lora_request for request, *_ in step.work])
        for request, start, count, tables, _ in step.work:
            for group, table in enumerate(tables):
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
        """Each of the gate's lanes that is held lets one transfer go now and then; what has passed ends."""
        for lane in sorted(gate.holding):
            if self.dice.random() < self.pace:
                gate.let_go(lane, 1)
        gate.settle()

    def _load_adapters(self, rank: int, wanted: Sequence[stub.LoRARequest | None]) -> None:
        """As vLLM's workers: files are read once for each id, and again where a request asks for it."""
        for lora in wanted:
            if lora is not None and (lora.load_inplace or lora.lora_int_id not in self.adapters[rank]):
                files = sorted(Path(lora.lora_path).iterdir())
                self.adapters[rank][lora.lora_int_id] = b"".join(file.read_bytes() for file in files)

    def drop_adapter(self, number: int) -> None:
        """Other adapters needed its place: it is loaded again when it is used next."""
        for loaded in self.adapters:
            loaded.pop(number, None)

    def _forward(
        self, rank: int, request: Request, start: int, count: int, group: int, table: list[int]
    ) -> None:
        """Writes all tokens of the step, after it has read those that the first of them sees."""
        kind = self.pool.kinds[group]
        weights: object = self.epoch
        if request.lora_request is not None:
            weights = (self.epoch, self.adapters[rank][request.lora_request.lora_int_id])
        for i in range(kind.seen_from(start), start + count):
            block, at = table[i // kind.size], i % kind.size
            want = float(crc32(repr((weights, rank, group, request.tokens[: i + 1])).encode()) >> 8)
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
        for name in merged.finished_recving or ():
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


def _output(cached: list[Part], new: list[Part], resumed: list[Part], ended: set[str]) -> Any:
    """As much of vLLM's ``SchedulerOutput`` as is read."""
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
    )


def _copied(tables: Tables) -> Tables:
    return [list(table) for table in tables]
