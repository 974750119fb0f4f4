"""What the scheduler's half of the vLLM connector takes of an engine's time, a block.

No worker, no tensors: acks are made up.

It is all in front of a request's first token where the engine holds the blocks itself; of a restore, what comes before
the first order is, and the rest goes on beside the link.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from time import perf_counter
from typing import TYPE_CHECKING

from tierstore.adapters.vllm.groups import Group, Groups
from tierstore.adapters.vllm.messages import Hello, Report
from tierstore.adapters.vllm.requests import Step
from tierstore.adapters.vllm.scheduling import SchedulerHalf
from tierstore.bench.measurement import Row
from tierstore.config import load_config
from tierstore.types import Ack, PageSpec, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.messages import Orders

_BLOCK = 16
_SPEC = PageSpec(
    num_layers=32, page_size=_BLOCK, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="tierstore-bench"
)
_CHUNK = 512
"""Blocks that a step computes: 8,192 tokens."""
_RUNS = 5
_HIT_GOAL_US = 1.2
_SETTLED_STEPS = 4
_MOST_STEPS = 10_000


@dataclass
class _Request:
    request_id: str
    block_hashes: list[bytes]
    num_tokens: int
    steps: list[Step] = field(default_factory=list)


class _Engine:
    """Calls as vLLM makes them for one request at a time, whose blocks are those of its number upward."""

    def __init__(self, blocks: int) -> None:
        config = load_config({"host": {"capacity": 4 * blocks * _SPEC.page_nbytes, "pin": "never"}})
        self.half = SchedulerHalf(
            config, Groups((Group(0, _BLOCK),)), [bytes(range(32))], load_timeout_s=600.0
        )
        self.half.meet([Hello(0, _SPEC, 4 * blocks, 4 * blocks, None)])
        self._blocks = blocks
        self._names = 0

    def request(self) -> _Request:
        """The same prompt again, under a new name, and a question of one token."""
        self._names += 1
        hashes = [sha256(str(i).encode()).digest() for i in range(self._blocks)]
        return _Request(f"r{self._names}", hashes, self._blocks * _BLOCK + 1)

    def compute(self) -> None:
        """Computes the prompt, chunk by chunk, and stores it."""
        request = self.request()
        self.half.arrived(request)
        assert self.half.offer(request, 0) == 0
        for start in range(0, self._blocks, _CHUNK):
            self._run(request, start, min(_CHUNK, self._blocks - start))
        self._end(request)
        for _ in range(_SETTLED_STEPS):
            self._carry(self.half.orders(()))

    def hit(self) -> float:
        """Seconds of a request of which the engine holds all blocks: the last token is computed."""
        request = self.request()
        begin = perf_counter()
        self.half.arrived(request)
        assert self.half.offer(request, self._blocks * _BLOCK) == 0
        self._run(request, self._blocks, 0, tokens=1)
        self._end(request)
        return perf_counter() - begin

    def restore(self) -> tuple[float, float]:
        """Of a request of which only host memory holds the blocks: seconds up to the first order, and in all."""
        request, first, loaded = self.request(), 0.0, set[str]()
        begin = perf_counter()
        self.half.arrived(request)
        tokens = self.half.offer(request, 0)
        assert tokens == self._blocks * _BLOCK
        self.half.allocated(request, [list(range(1, self._blocks + 1))], tokens)
        for _ in range(_MOST_STEPS):
            orders = self.half.orders(())
            first = first or perf_counter() - begin
            loaded = self._carry(orders)
            if loaded:
                break
        assert loaded == {request.request_id}
        self._run(request, self._blocks, 0, tokens=1)
        self._end(request)
        return first, perf_counter() - begin

    def _run(self, request: _Request, start: int, blocks: int, tokens: int = 0) -> None:
        table = list(range(1, start + blocks + 1 + bool(tokens)))
        scheduled = tokens or blocks * _BLOCK
        first = not request.steps
        step = Step(request.request_id, start * _BLOCK, scheduled, [table], table[start:], first)
        request.steps.append(step)
        self._carry(self.half.orders([step]))

    def _end(self, request: _Request) -> None:
        last = request.steps[-1]
        self.half.finished(request.request_id, last.tables, last.computed + last.scheduled)

    def _carry(self, orders: Orders) -> set[str]:
        acks = [_ack(c) for c in (*orders.before, *orders.after) if isinstance(c, Transfer)]
        return self.half.heard(Report({0: tuple(acks)}) if acks else None)


def scheduler_rows(blocks: int) -> Sequence[Row]:
    """Microseconds a block of a hit in the engine's own cache, and of a restore from host memory."""
    engine = _Engine(blocks)
    engine.compute()
    hit = min(engine.hit() for _ in range(_RUNS))
    restores = [engine.restore() for _ in range(_RUNS)]
    engine.half.check()
    engine.half.close()
    name = f"vLLM's scheduler, {blocks} blocks"
    each = 1e6 / blocks
    return [
        Row(f"{name} in its own cache", hit * each, "us/block", _HIT_GOAL_US),
        Row(
            f"{name} restored, up to the first order", min(first for first, _ in restores) * each, "us/block"
        ),
        Row(f"{name} restored, in all", min(whole for _, whole in restores) * each, "us/block"),
    ]


def _ack(transfer: Transfer) -> Ack:
    """All of it came."""
    pages = len(transfer.keys)
    sizes = (_SPEC.page_nbytes,) * pages
    return Ack(transfer.id, True, pages, pages * _SPEC.page_nbytes, 1e-3, (), sizes, ())
