"""vLLM without vLLM: its scheduler's and its workers' calls in their order, over tensors whose every cell is checked.

What a token's cell holds follows from all tokens up to it and from the weights' epoch, so a forward pass that reads a
cell of another page, of an unwritten block or of old weights is an AssertionError. Blocks are reused as soon as they
are free, at random; steps may be scheduled ahead of the workers; everything between the halves is pickled.
"""

from __future__ import annotations

import math
import pickle
import random
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import torch

from tests.adapters import vllm_stub as stub
from tests.support.bench import WiredMover
from tests.support.stalls import Gate, GatedCopies, GatedRecords
from tierstore.adapters.vllm.geometry import Geometry
from tierstore.adapters.vllm.working import WorkerHalf
from tierstore.assembly import Parts, assemble
from tierstore.config import StoreConfig
from tierstore.layout import PageLayout
from tierstore.types import Tier
from tierstore.wakeup import Wakeup

OUT, IN = (Tier.HBM, Tier.HOST), (Tier.HOST, Tier.HBM)
BLOCK, LAYERS, HEADS, CELL = 2, 2, 1, 4
BUDGET = 4
"""Tokens of one step."""
DOCUMENT = [0, 1, 2, 0, 1, 2, 0, 1, 2]


class ImpatientWakeup(Wakeup):
    """Whoever waits in a worker waits for copies that a test holds back: they go on then."""

    gates: list[GatedCopies]

    def wait(self, seen: int, deadline: float | None, at_most_s: float) -> None:
        for gate in self.gates:
            gate.let_go(OUT)
        super().wait(seen, deadline, at_most_s)


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    most: int
    """Ends with so many tokens."""
    status: str = "waiting"
    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    started: bool = False
    told: bool = False
    failed: bool = False
    life: int = 0
    """Goes up with every preemption: what steps of an earlier one give is not its any more."""
    in_flight: int = 0
    sampling: bool = False
    cached: int = 0
    """Tokens that did not have to be computed when it began last."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    @property
    def block_hashes(self) -> list[bytes]:
        hashes, parent = [], b"root"
        for i in range(BLOCK, len(self.tokens) + 1, BLOCK):
            parent = sha256(parent + repr(self.tokens[i - BLOCK : i]).encode()).digest()
            hashes.append(parent)
        return hashes


def hashes_of(tokens: list[int]) -> list[bytes]:
    return Request("x", tokens, 0).block_hashes


@dataclass
class Step:
    output: Any
    metadata: bytes
    work: list[tuple[Request, int, int, list[int], int]]
    """Request, first token, tokens, and its blocks and life when it was scheduled."""
    number: int


class Engine:
    """``ahead``: steps scheduled before the workers are done with the first of them."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        blocks: int = 8,
        ranks: int = 1,
        ahead: int = 1,
        seed: int = 0,
        events: bool = False,
    ) -> None:
        self.connector = stub.load_connector()
        self.dice = random.Random(seed)
        self.ahead = ahead
        self.free = list(range(blocks))
        self.owners = [0] * blocks
        self.by_hash: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.requests: OrderedDict[str, Request] = OrderedDict()
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: set[str] = set()
        self.steps: deque[Step] = deque()
        self.deferred: list[tuple[int, list[int]]] = []
        self.number = 0
        self.done_steps = 0
        self.epoch = 0
        self.recomputed = 0
        """Loads that failed."""
        self.broken = False
        """Whether a wrong cell was read: what follows says nothing."""
        self.taken = 0
        """Tokens that came from outside."""
        self.answers: dict[str, list[int]] = {}
        self._names = 0
        kv = stub.kv_cache_config(blocks, BLOCK)
        extra = {"config": config}
        self.tensors = [
            [torch.zeros(blocks, HEADS, BLOCK, CELL) for _ in range(LAYERS)] for _ in range(ranks)
        ]
        self.copies: list[GatedCopies] = []
        self.records: list[GatedRecords] = []
        self.workers = [self._worker(extra, kv, rank, ranks) for rank in range(ranks)]
        role = stub.Role.SCHEDULER
        vllm_config = stub.vllm_config(extra, ranks, events=events)
        self.scheduler = self.connector.TierStoreConnector(vllm_config, role, kv)
        hellos = {r: worker.get_handshake_metadata() for r, worker in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata(pickle.loads(pickle.dumps(hellos)))
        self.placement._next_spill = math.inf
        self.pace = 1.0
        """How likely a lane lets a transfer go in a step."""

    def _worker(self, extra: dict[str, Any], kv: Any, rank: int, ranks: int) -> Any:
        worker = self.connector.TierStoreConnector(stub.vllm_config(extra, ranks), stub.Role.WORKER, kv)
        worker._rank = lambda: rank
        wakeup = ImpatientWakeup()
        wakeup.gates = []

        def opened(config: StoreConfig, found: Geometry, number: int) -> WorkerHalf:
            parts: Parts = assemble(config, PageLayout.of(found.spec), wakeup.bump)
            parts.mover = mover = WiredMover.around(parts)
            half = WorkerHalf(parts, found, number, wakeup)
            assert mover.copies is not None
            self.copies.append(mover.copies)
            wakeup.gates.append(mover.copies)
            if mover.records is not None:
                self.records.append(mover.records)
            return half

        worker._open_half = opened
        worker.register_kv_caches({f"layer.{i}": t for i, t in enumerate(self.tensors[rank])})
        return worker

    @property
    def half(self) -> Any:
        return self.scheduler._scheduler

    @property
    def placement(self) -> Any:
        return self.half._parts.directory.placement

    # -- what callers do ------------------------------------------------------------------------------------------

    def add(self, tokens: list[int], more: int) -> str:
        self._names += 1
        request = Request(f"r{self._names}", list(tokens), len(tokens) + more)
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
        self.by_hash.clear()
        self.hash_of.clear()

    def change_weights(self) -> None:
        """As ``reset_prefix_cache(reset_running_requests=True, reset_connector=True)`` after new weights came.

        vLLM cannot do that while requests wait for loads: they go first.
        """
        while self.steps:
            self._work()
        for request in [r for r in self.requests.values() if r.status == "loading"]:
            self._finish(request)
        for request in list(reversed(self.running)):
            self._preempt(request)
        self.forget()
        self.epoch += 1
        assert self.scheduler.reset_cache()

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
        budget, work = BUDGET, []
        new: list[tuple[Request, int]] = []
        resumed: list[tuple[Request, int]] = []
        cached: list[tuple[Request, list[int], int]] = []
        for request in list(self.running):
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            if request not in self.running or request.sampling or count <= 0:
                continue
            fresh = self._grow(request, request.num_computed_tokens + count)
            if fresh is None:
                continue
            budget -= count
            cached.append((request, fresh, count))
        # Those that hold blocks come first, as in vLLM: else they would wait for each other.
        for request in sorted(self.queue, key=lambda r: not r.blocks):
            if budget <= 0:
                break
            if request.status == "loading":
                if not request.told:
                    continue
                self._loaded(request)
            if not self._begin(request, budget):
                break
            if request.status == "loading":
                continue
            count = min(budget, request.num_tokens - request.num_computed_tokens)
            budget -= count
            (resumed if request.started else new).append((request, count))
            request.started = True
            request.status = "running"
            self.queue.remove(request)
            self.running.append(request)
        scheduled = {}
        for request, count in [*[(r, c) for r, _, c in cached], *new, *resumed]:
            start = request.num_computed_tokens
            scheduled[request.request_id] = count
            work.append((request, start, count, list(request.blocks), request.life))
        output = SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=r.request_id,
                    block_ids=(list(r.blocks),),
                    num_computed_tokens=r.num_computed_tokens,
                )
                for r, _ in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r.request_id for r, _, _ in cached] + [r.request_id for r, _ in resumed],
                new_block_ids=[(f,) if f else None for _, f, _ in cached]
                + [(list(r.blocks),) for r, _ in resumed],
                num_computed_tokens=[r.num_computed_tokens for r, _, _ in cached]
                + [r.num_computed_tokens for r, _ in resumed],
                resumed_req_ids={r.request_id for r, _ in resumed},
            ),
            num_scheduled_tokens=scheduled,
            finished_req_ids=set(self.ended),
        )
        self.ended.clear()
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        for request, _, count, _, _ in work:
            request.num_computed_tokens += count
            request.in_flight += 1
            request.sampling = request.num_computed_tokens == request.num_tokens
        self.number += 1
        return Step(output, metadata, work, self.number)

    def _grow(self, request: Request, tokens: int) -> list[int] | None:
        """Blocks for so many tokens, preempting others; None: it was preempted itself."""
        need = -(-tokens // BLOCK) - len(request.blocks)
        while need > len(self.free):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return None
        fresh = self._take(need)
        request.blocks += fresh
        return fresh

    def _begin(self, request: Request, budget: int) -> bool:
        """Gives a waiting request its blocks; False if there are not enough."""
        if request.num_computed_tokens:
            end = min(request.num_tokens, request.num_computed_tokens + budget)
            return self._extend(request, end)
        local = self._local(request)
        outside, beside = self.scheduler.get_num_new_matched_tokens(request, len(local) * BLOCK)
        assert outside % BLOCK == 0
        computed = len(local) * BLOCK + outside
        assert computed < request.num_tokens
        for block in local:
            self._hold(block)
        end = computed if beside else min(request.num_tokens, computed + budget)
        need = -(-end // BLOCK) - len(local)
        whole = -(-request.num_tokens // BLOCK) - len(local)
        if max(need, whole) > len(self.free) - self._reserved():
            self._release(local)
            return False
        request.blocks = local + self._take(need)
        blocks = SimpleNamespace(get_block_ids=lambda: (list(request.blocks),))
        self.scheduler.update_state_after_alloc(request, blocks, outside)
        request.num_computed_tokens = request.cached = computed
        self.taken += outside
        if beside:
            request.status, request.told, request.failed = "loading", False, False
        return True

    def _reserved(self) -> int:
        """Blocks that requests with a load still need: without them nobody might go on."""
        held = [r for r in self.queue if r.blocks]
        return sum(-(-r.num_tokens // BLOCK) - len(r.blocks) for r in held)

    def _extend(self, request: Request, tokens: int) -> bool:
        need = -(-tokens // BLOCK) - len(request.blocks)
        if need > len(self.free):
            return False
        request.blocks += self._take(need)
        blocks = SimpleNamespace(get_block_ids=lambda: (list(request.blocks),))
        self.scheduler.update_state_after_alloc(request, blocks, 0)
        return True

    def _loaded(self, request: Request) -> None:
        request.status = "waiting"
        if request.failed and not request.num_computed_tokens:
            self._free(request)
        else:
            self._cache(request, request.num_computed_tokens)

    def _local(self, request: Request) -> list[int]:
        found = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if block_hash not in self.by_hash:
                break
            found.append(self.by_hash[block_hash])
        return found

    def _cache(self, request: Request, tokens: int) -> None:
        for block_hash, block in zip(request.block_hashes[: tokens // BLOCK], request.blocks, strict=False):
            if block_hash not in self.by_hash and block not in self.hash_of:
                self.by_hash[block_hash] = block
                self.hash_of[block] = block_hash

    def _take(self, number: int) -> list[int]:
        taken = []
        for _ in range(max(0, number)):
            block = self.free.pop(self.dice.randrange(len(self.free)))
            if block in self.hash_of:
                del self.by_hash[self.hash_of.pop(block)]
            self.owners[block] = 1
            taken.append(block)
        return taken

    def _hold(self, block: int) -> None:
        if not self.owners[block]:
            self.free.remove(block)
        self.owners[block] += 1

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.owners[block] -= 1
            if not self.owners[block]:
                self.free.append(block)

    def _free(self, request: Request) -> None:
        """Its blocks may be reused, but only after the steps that may still write them."""
        blocks, request.blocks = request.blocks, []
        if self.steps or request.in_flight:
            self.deferred.append((self.number + 1, blocks))
        else:
            self._release(blocks)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        request.num_computed_tokens, request.status, request.sampling = 0, "waiting", False
        request.in_flight = 0
        request.life += 1
        self.queue.appendleft(request)

    def _finish(self, request: Request) -> None:
        waits = request.status == "loading" and not request.told
        self.scheduler.request_finished(request, list(request.blocks))
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
        for request, start, count, blocks, _ in step.work:
            self._forward(rank, request, start, count, blocks)
        if not loads_first:
            worker.start_load_kv(None)
        if step.work or self.dice.random() < 0.5:
            worker.wait_for_save()
        self._pass(self.copies[rank])
        if self.records:
            self._pass(self.records[rank])
        _, failed = worker.get_finished(step.output.finished_req_ids)
        bad = worker.get_block_ids_with_load_errors()
        return SimpleNamespace(
            finished_recving=failed,
            invalid_block_ids=bad,
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )

    def _pass(self, gate: Gate) -> None:
        """Each of the gate's lanes that is held lets one transfer go now and then; what has passed ends."""
        for lane in sorted(gate.holding):
            if self.dice.random() < self.pace:
                gate.let_go(lane, 1)
        gate.settle()

    def _forward(self, rank: int, request: Request, start: int, count: int, blocks: list[int]) -> None:
        for i in range(start + count):
            block, at = blocks[i // BLOCK], i % BLOCK
            want = float(crc32(repr((self.epoch, rank, request.tokens[: i + 1])).encode()) >> 8)
            for layer, tensor in enumerate(self.tensors[rank]):
                cell = tensor[block, 0, at]
                if i >= start:
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
        for blocks in due:
            self._release(blocks)
        merged = outputs[0]
        for other in outputs[1:]:
            assert merged.finished_recving == other.finished_recving
            mine, more = merged.kv_connector_worker_meta, other.kv_connector_worker_meta
            merged.kv_connector_worker_meta = mine.aggregate(more) if mine and more else mine or more
        merged.kv_connector_worker_meta = pickle.loads(pickle.dumps(merged.kv_connector_worker_meta))
        self._fail(merged.invalid_block_ids)
        for request, start, count, _, life in step.work:
            if request.status != "running" or request.life != life:
                continue
            request.in_flight -= 1
            self._cache(request, start + count)
            if request.sampling and start + count == request.num_tokens:
                request.sampling = False
                request.tokens.append(crc32(repr(request.tokens).encode()) % 3)
                if request.num_tokens >= request.most:
                    self.answers[request.request_id] = request.tokens
                    self._finish(request)
        self.scheduler.update_connector_output(merged)
        for name in merged.finished_recving or ():
            request = self.requests[name]
            if request.status == "loading":
                assert not request.told, f"{name} was told twice"
                request.told = True
            else:
                assert request.status == "finished", f"{name} was told of a load that it does not wait for"
                self._free(request)
                del self.requests[name]

    def _fail(self, bad: set[int]) -> None:
        for request in self.requests.values():
            if request.status != "loading" or request.told:
                continue
            first = next((i for i, block in enumerate(request.blocks) if block in bad), None)
            if first is not None:
                request.num_computed_tokens, request.failed = first * BLOCK, True
                self.recomputed += 1
