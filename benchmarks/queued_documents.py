"""Simulates vLLM with documents on a slow disk, to compare loading and computing at several levels of concurrency.

The scheduler half of the connector is the real one: it decides what to offer, load, prefetch and compute. The
engine, the disk, the link and the clock are simulated, so results are deterministic and simulated time passes
faster than real time. Pages have no contents.

    python -m benchmarks.queued_documents --json
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import sha256
from heapq import heappop, heappush
from itertools import product
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from rich.table import Table
from typer import Option, echo
from typer import run as typer_run

from benchmarks.document_questions import Documents, ask_about
from tierstore.adapters.vllm.kv_groups import Group, Groups
from tierstore.adapters.vllm.messages import Catalogue, Hello, Report
from tierstore.adapters.vllm.requests import Step
from tierstore.adapters.vllm.scheduler import SchedulerHalf, Terms
from tierstore.cli.output import print_json, wide_console
from tierstore.config import load_config
from tierstore.page import PageSpec
from tierstore.types import Ack, PageKey, Tier, Transfer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tierstore.adapters.vllm.messages import Orders

Contender = Literal["compute", "always", "if_faster"]
CONTENDERS: tuple[Contender, ...] = ("compute", "always", "if_faster")
"""The contenders: "compute" is vLLM without the connector, the others are values of the setting ``load``."""
DISKS = (0.5, 2.0, 7.0)
"""Disk throughputs in GB/s."""
AT_A_TIME = (1, 2, 4, 8)
"""Numbers of questions that are in the system at the same time."""


@dataclass(frozen=True)
class Machine:
    """A simulated machine. The defaults are those of an H200 with a model that has the shape of Llama 3.1 8B.

    Attributes:
        disk: Disk throughput in bytes/s, shared by reads and writes.
        link: Throughput between host memory and HBM in bytes/s, in each direction.
        token_s: Seconds to compute a token that has no context.
        context_s: Seconds by which each token of context lengthens the computation of a token.
        step_s: Fixed seconds per step, in addition to those of its tokens.
        budget: Maximum number of tokens per step.
        block: Tokens per block.
        token_nbytes: Size of the KV of a token in bytes.
    """

    disk: float
    link: float = 50e9
    token_s: float = 2.28e-5
    context_s: float = 2 * 4.33e-10
    step_s: float = 0.008
    budget: int = 8192
    block: int = 16
    token_nbytes: int = 128 << 10


@dataclass(frozen=True)
class Workload(Documents):
    """Documents that are all on disk at first, and several rounds of questions about them.

    Attributes:
        rounds: Number of questions about each document. Their order is random.
        seed: Seed of the random order.
    """

    documents: int = 12
    tokens: int = 32768
    question: int = 64
    answer: int = 16
    in_host: float = 6.0
    in_hbm: float = 4.5
    rounds: int = 4
    seed: int = 0


_IDLE_S = 0.1
"""Maximum simulated seconds of a step that computes nothing.

A real worker waits at most 2 ms, but steps that short would not change the results.
"""


class Result(NamedTuple):
    """The result of one run. Times are in simulated seconds.

    ``disk_busy`` and ``engine_busy`` are the fractions of the run in which the disk and the engine were working.
    """

    contender: str
    disk_gbps: float
    at_a_time: int
    questions_per_s: float
    median_ttft_s: float
    worst_ttft_s: float
    loaded: float
    """Fraction of all prompt tokens that were loaded instead of computed."""
    disk_busy: float
    engine_busy: float


@dataclass(eq=False)
class _Request:
    request_id: str
    block_hashes: list[bytes]
    num_prompt_tokens: int
    end: int
    """Number of tokens, prompt and answer, after which the request ends."""
    arrived: float
    num_tokens: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    told: bool = False
    """Whether the request's load has ended. False without a load."""
    started: bool = False
    answered: float | None = None


class _Lane:
    """The disk, or one direction of the link. It serves transfers one after another."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free = 0.0
        self.busy = 0.0

    def serve(self, nbytes: int, now: float) -> tuple[float, float]:
        """Queue a transfer. Return the time at which it ends, and how many seconds it takes without the wait."""
        took = nbytes / self._rate
        self._free = max(self._free, now) + took
        self.busy += took
        return self._free, took


class Simulation:
    """A simulated engine with the connector's real scheduler half. The contender "compute" has no connector."""

    def __init__(self, machine: Machine, workload: Workload, contender: Contender) -> None:
        self.now = 0.0
        self.engine_s = 0.0
        self.loaded = self.prompted = 0
        self.failed = 0
        """Number of loads that loaded only some of their pages, or none."""
        self._machine = machine
        self._workload = workload
        self._page_nbytes = machine.block * machine.token_nbytes
        self._half = self._opened(contender) if contender != "compute" else None
        self.disk = _Lane(machine.disk)
        self._lanes = {
            (Tier.NVME, Tier.HOST): self.disk,
            (Tier.HOST, Tier.NVME): self.disk,
            (Tier.HOST, Tier.HBM): _Lane(machine.link),
            (Tier.HBM, Tier.HOST): _Lane(machine.link),
        }
        self._acks: list[tuple[float, int, Ack]] = []
        blocks = int(workload.in_hbm * workload.tokens / machine.block)
        self._free = list(range(blocks, 0, -1))
        self._waiting: deque[_Request] = deque()
        self._loading: dict[str, _Request] = {}
        self._running: list[_Request] = []
        self._names = 0
        self._known_tokens: dict[int, list[bytes]] = {}

    # -- what callers do --------------------------------------------------------------------------------------

    def ask(self, document: int) -> _Request:
        """Queue a new question about a document."""
        work = self._workload
        self._names += 1
        prompt = work.tokens + work.question
        hashes = [
            *self._hashes(document),
            *(_digest(f"question {self._names} {i}") for i in range(work.question // self._machine.block)),
        ]
        request = _Request(f"r{self._names}", hashes, prompt, prompt + work.answer, self.now, prompt)
        self._waiting.append(request)
        if self._half is not None:
            self._half.arrived(request)
        return request

    def step(self) -> list[_Request]:
        """Run one step of the engine. Return the requests that finished."""
        parts = self._schedule()
        steps = [part for _, part in parts]
        begun = self.now
        orders = self._half.orders(steps) if self._half is not None else None
        if orders is not None:
            self._submit(orders.before)
        self.now += self._seconds(steps)
        if steps:
            self.engine_s += self.now - begun
        if orders is not None:
            self._submit(orders.after)
            if not steps:
                self._wait()
            self._report(orders)
        return self._finish([request for request, _ in parts])

    def close(self) -> None:
        """Check the invariants of the connector, and close it."""
        if self._half is not None:
            self._half.check()
            self._half.close()

    # -- the connector ------------------------------------------------------------------------------------------

    def _opened(self, contender: Literal["always", "if_faster"]) -> SchedulerHalf:
        machine, work, nbytes = self._machine, self._workload, self._page_nbytes
        each = work.tokens // machine.block
        slots = int(work.in_host * each)
        config = load_config(
            {
                "host": {"capacity": slots * nbytes, "pin": "never"},
                "nvme": {
                    "path": "simulated",
                    "capacity": 4 * work.documents * each * nbytes,
                    "flush": "60min",
                },
            }
        )
        groups = Groups((Group(0, machine.block),))
        terms = Terms(config, groups, load_timeout_s=3600.0, load=contender)
        namespace = bytes(range(32))
        half = SchedulerHalf(terms, [namespace], clock=lambda: self.now)
        spec = PageSpec(
            num_layers=1,
            page_size=machine.block,
            num_kv_heads=1,
            head_dim=machine.token_nbytes // 4,
            dtype="bfloat16",
            model="simulated",
        )
        assert spec.page_nbytes == nbytes
        records: list[tuple[PageKey, PageKey | None, int]] = []
        for document in range(work.documents):
            request = _Request("", self._hashes(document), 0, 0, 0.0)
            chain = groups.chains(request, [namespace])[0]
            parent = None
            for key in chain.first(each):
                records.append((key, parent, nbytes))
                parent = key
        catalogue = Catalogue.of(nbytes, 4 * work.documents * each * nbytes, records)
        blocks = int(work.in_hbm * each) + 1
        half.meet([Hello(0, spec, blocks, slots, catalogue, machine.disk)])
        return half

    def _submit(self, commands: Sequence[object]) -> None:
        for command in commands:
            if isinstance(command, Transfer):
                pages = len(command.keys)
                nbytes = pages * self._page_nbytes
                end, took = self._lanes[command.src, command.dst].serve(nbytes, self.now)
                sizes = (self._page_nbytes,) * pages
                ack = Ack(command.id, True, pages, nbytes, took, (), sizes, ())
                heappush(self._acks, (end, command.id, ack))

    def _wait(self) -> None:
        """Run a step without computing: advance the clock to the end of the next transfer, at most by ``_IDLE_S``."""
        ends = self._acks[0][0] if self._acks else self.now
        self.now = min(max(ends, self.now + 1e-3), self.now + _IDLE_S)

    def _report(self, orders: Orders) -> None:
        assert self._half is not None
        for name, blocks in orders.failed.items():
            request = self._loading.pop(name)
            self.failed += 1
            request.computed = request.table.index(blocks[0]) * self._machine.block
            request.told = True
            self._waiting.appendleft(request)
        acks = []
        while self._acks and self._acks[0][0] <= self.now:
            acks.append(heappop(self._acks)[2])
        report = Report({0: tuple(acks)}, orders.number) if acks or orders.answer else None
        for name in sorted(self._half.heard(report)):  # the order of a set differs between processes
            request = self._loading.pop(name)
            request.told = True
            self._waiting.appendleft(request)

    # -- the engine ---------------------------------------------------------------------------------------------

    def _schedule(self) -> list[tuple[_Request, Step]]:
        budget, parts = self._machine.budget, []
        for request in self._running:
            if budget > 0:
                parts.append((request, self._part(request, budget, fresh=[])))
                budget -= parts[-1][1].scheduled
        skipped: list[_Request] = []
        while self._waiting and budget > 0:
            request = self._waiting[0]
            if not request.table:
                offered = 0 if self._half is None else self._half.offer(request, 0)
                if offered is None:
                    skipped.append(self._waiting.popleft())
                    continue
                blocks = -(-request.end // self._machine.block)
                if blocks > len(self._free):
                    break
                request.table = [self._free.pop() for _ in range(blocks)]
                self.prompted += request.num_prompt_tokens
                self.loaded += offered
                if offered and self._half is not None:
                    self._half.allocated(request, [request.table], offered)
                    request.computed = offered
                    self._loading[request.request_id] = self._waiting.popleft()
                    continue
            self._waiting.popleft()
            self._running.append(request)
            parts.append((request, self._part(request, budget, fresh=request.table)))
            budget -= parts[-1][1].scheduled
        self._waiting.extendleft(reversed(skipped))
        return parts

    def _part(self, request: _Request, budget: int, fresh: list[int]) -> Step:
        count = min(budget, request.num_tokens - request.computed)
        first, request.started = not request.started, True
        fresh = fresh[request.computed // self._machine.block :]
        step = Step(request.request_id, request.computed, count, [request.table], fresh, first)
        request.computed += count
        return step

    def _seconds(self, steps: Sequence[Step]) -> float:
        if not steps:
            return 0.0
        machine = self._machine
        return machine.step_s + sum(
            step.scheduled * (machine.token_s + machine.context_s * (step.computed + step.scheduled / 2))
            for step in steps
        )

    def _finish(self, ran: Sequence[_Request]) -> list[_Request]:
        ended = []
        for request in ran:
            if request.computed < request.num_tokens:
                continue
            if request.answered is None:
                request.answered = self.now
            request.num_tokens += 1
            if request.num_tokens < request.end:
                continue
            ended.append(request)
            self._running.remove(request)
            if self._half is not None:
                self._half.finished(request.request_id, [request.table], request.computed)
            self._free += reversed(request.table)
        return ended

    def _hashes(self, document: int) -> list[bytes]:
        count = self._workload.tokens // self._machine.block
        return [_digest(f"document {document} {i}") for i in range(count)]


def _digest(text: str) -> bytes:
    return sha256(text.encode()).digest()


def run(
    machine: Machine, workload: Workload, contender: Contender, at_a_time: int, *, restarted: bool = False
) -> Result:
    """Simulate a warm-up, and then all rounds of the workload, which are measured.

    In the warm-up, one question at a time is asked: first about a document that is not on disk, and then about each
    document that is. The first question makes the engine compute a document, which tells the connector how fast the
    engine computes. If ``restarted``, there is no warm-up, and the connector does not know this rate at first. In the
    measured rounds, ``at_a_time`` questions are always in the system, except at the end.
    """
    simulation, dice = Simulation(machine, workload, contender), Random(workload.seed)
    order = list(range(workload.documents))
    for document in () if restarted else (workload.documents, *order):
        simulation.ask(document)
        while not simulation.step():
            pass
    todo: list[int] = []
    for _ in range(workload.rounds):
        dice.shuffle(order)
        todo += order
    begin, engine_s, disk_s = simulation.now, simulation.engine_s, simulation.disk.busy
    simulation.loaded = simulation.prompted = 0
    times: list[float] = []

    def step() -> int:
        answered = simulation.step()
        for request in answered:
            assert request.answered is not None
            times.append(request.answered - request.arrived)
        return len(answered)

    ask_about(todo, at_a_time, simulation.ask, step)
    took = simulation.now - begin
    simulation.close()
    return Result(
        contender,
        machine.disk / 1e9,
        at_a_time,
        len(times) / took,
        median(times),
        max(times),
        simulation.loaded / simulation.prompted,
        (simulation.disk.busy - disk_s) / took,
        (simulation.engine_s - engine_s) / took,
    )


def main(
    disk: Annotated[list[float] | None, Option(help="disk throughput in GB/s, repeatable")] = None,
    at_a_time: Annotated[list[int] | None, Option(help="questions at a time, repeatable")] = None,
    rounds: Annotated[int, Option(help="number of questions about each document")] = Workload.rounds,
    link: Annotated[float, Option(help="throughput of the link to HBM in GB/s")] = Machine.link / 1e9,
    block: Annotated[int, Option(help="tokens per block")] = Machine.block,
    restarted: Annotated[bool, Option(help="begin with an engine that has computed nothing yet")] = False,
    as_json: Annotated[bool, Option("--json", help="print one line of JSON at the end")] = False,
) -> None:
    """Simulate questions about documents on a slow disk, with and without the connector."""
    found = []
    for number, rate in product(at_a_time or AT_A_TIME, disk or DISKS):
        for contender in CONTENDERS:
            machine = Machine(rate * 1e9, link * 1e9, block=block)
            found.append(run(machine, Workload(rounds=rounds), contender, number, restarted=restarted))
            echo(str(found[-1]), err=True)
    show(found)
    if as_json:
        print_json({"rows": [row._asdict() for row in found]})


def show(found: Sequence[Result]) -> None:
    """Print the results as a table."""
    table = Table("at a time", "disk", "load", "questions/s", "TTFT median", "worst", "loaded", "disk busy")
    for row in found:
        table.add_row(
            str(row.at_a_time),
            f"{row.disk_gbps:g} GB/s",
            row.contender,
            f"{row.questions_per_s:.2f}",
            f"{row.median_ttft_s:.2f} s",
            f"{row.worst_ttft_s:.2f} s",
            f"{row.loaded:.0%}",
            f"{row.disk_busy:.0%}",
        )
    wide_console().print(table)


if __name__ == "__main__":
    typer_run(main)
