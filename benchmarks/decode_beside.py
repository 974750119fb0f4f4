"""Measures how much restores slow down an engine that launches kernels from Python, without a GPU.

One thread stands in for vLLM's model runner in eager mode: in each step it alternates between Python code and calls
that release the GIL, as kernel launches do. Meanwhile, documents are restored one after another. The command queue and
the CUDA copy engine of the connector's worker half are the real ones, with their threads. The link is simulated: an
event completes when a link of 54 GB/s would have copied the bytes before it.

    python -m benchmarks.decode_beside --json
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from resource import RUSAGE_SELF, RUSAGE_THREAD, getrusage
from statistics import median
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from typer import Option, echo
from typer import run as typer_run

from tierstore.adapters.vllm.worker import CommandQueue
from tierstore.cli.output import print_json
from tierstore.codecs.host_format import HostFormat
from tierstore.directory.transfers import BATCH_PAGES
from tierstore.gpu.copy_routes import WholePages
from tierstore.gpu.cpu_copy_engine import CpuCopyEngine
from tierstore.gpu.cuda_copy_engine import CudaCopyEngine
from tierstore.gpu.pool import CpuPool
from tierstore.host.arena import HostArena
from tierstore.mover import LocalMover
from tierstore.page import PageLayout, PageSpec
from tierstore.pump import Wakeup
from tierstore.types import PageKey, Tier, Transfer

if TYPE_CHECKING:
    from numpy.typing import NDArray

RATE = 54e9
"""Throughput of the simulated link in bytes/s."""
SPEC = PageSpec(num_layers=32, page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16", model="beside")
SLAB_PAGES = 16
"""Number of pages in a staging buffer. For each buffer, a launch makes driver calls and runs Python code."""
MOST_A_STEP = 1024
_ALONE = 8
"""Number of steps before each restore."""
TOKEN_S = 0.0003
"""Seconds per step for which the engine waits for the sampled token."""

_driver = ctypes.CDLL(None).getppid
"""A short call that releases the GIL, like the calls of a GPU driver."""


class _Stream:
    free = 0.0
    """Time at which all copies that were queued so far are complete."""


class _Event:
    at = 0.0

    def record(self, stream: Any) -> None:
        _driver()
        self.at = max(perf_counter(), stream.free)

    def query(self) -> bool:
        _driver()
        return perf_counter() >= self.at

    def synchronize(self) -> None:
        sleep(max(0.0, self.at - perf_counter()))

    def elapsed_time(self, end: Any) -> float:
        _driver()
        return float(end.at - self.at) * 1e3


class _Link(WholePages):
    """A route whose copies run one after another at ``RATE``."""

    name = "simulated"
    launches = 0
    idle_s = 0.0
    """Seconds for which the link had nothing to copy between the first and the last launch of a restore."""
    fresh = True
    """Whether the next launch is the first of a restore."""

    def load(self, slots: NDArray[np.int64], host: NDArray[np.int64], stream: Any) -> None:
        self.launches += 1
        for first in range(0, len(slots), SLAB_PAGES):
            np.concatenate((slots[first : first + SLAB_PAGES], host[first : first + SLAB_PAGES]))
            sum(range(300))
            for _ in range(7):  # four calls for events, two launches and a batch of copies
                _driver()
        now = perf_counter()
        self.idle_s += 0.0 if self.fresh else max(0.0, now - stream.free)
        self.fresh = False
        stream.free = max(now, stream.free) + len(slots) * SPEC.page_nbytes / RATE

    save = load


class _Host:
    """A stand-in for the host arena, all of which is page-locked."""

    pinned_slots = 1 << 30
    pinning = False

    def __init__(self) -> None:
        self.held = HostFormat.of("none", PageLayout.of(SPEC))

    def addresses(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return slots


class Usage(NamedTuple):
    """The use of the processor so far, in seconds except for ``wakes``.

    Attributes:
        step_s: Elapsed time, minus the time for which other programs used the core of the engine's thread.
        blocked_s: The part of ``step_s`` for which the engine's thread slept or waited for the GIL.
        cpu_s: CPU time of all other threads.
        wakes: How often other threads were woken up.
    """

    step_s: float
    blocked_s: float
    cpu_s: float
    wakes: float

    @classmethod
    def now(cls) -> Usage:
        """Return the usage so far. Call it on the engine's thread."""
        mine, every = getrusage(RUSAGE_THREAD), getrusage(RUSAGE_SELF)
        ran, queued, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
        seconds = every.ru_utime + every.ru_stime - mine.ru_utime - mine.ru_stime
        step_s = perf_counter() - queued / 1e9
        return cls(step_s, step_s - ran / 1e9, seconds, float(every.ru_nvcsw - mine.ru_nvcsw))

    def since(self, before: Usage) -> Usage:
        """Return the usage from ``before`` to this one."""
        return Usage(*(now - then for now, then in zip(self, before, strict=True)))


class Engine:
    """An engine that decodes one answer while documents of ``pages`` pages are restored.

    Each step makes ``launches`` calls that release the GIL.
    """

    def __init__(self, pages: int, launches: int) -> None:
        small = PageLayout.of(
            PageSpec(num_layers=1, page_size=1, num_kv_heads=1, head_dim=8, dtype="uint8", model="s")
        )
        self._memory = CpuPool(small, 1), HostArena(small, 1)
        threads = CpuCopyEngine(*self._memory, small.page_nbytes, lambda: None)
        streams = cast("tuple[torch.cuda.Stream, torch.cuda.Stream]", (_Stream(), _Stream()))
        self.link = _Link()
        copies = CudaCopyEngine(self.link, _Host(), streams, threads, new_event=_Event)
        self._queue = CommandQueue(LocalMover({}, copies, {}), Wakeup())
        self._pages, self._launches, self._number = pages, launches, 0
        self._terms = [torch.ones(1 << 14) for _ in range(3)]

    def step(self, commands: list[Transfer] | None = None) -> tuple[float, int]:
        """Decode a token. Return the time in seconds, and the number of pages that have arrived."""
        begun = perf_counter()
        for command in commands or ():
            self._queue.submit(command)
        one, other, out = self._terms
        for _ in range(self._launches):
            sum(range(1000))
            torch.add(one, other, out=out)
        sleep(TOKEN_S)
        arrived = sum(ack.num_ready for ack in self._queue.take())
        return perf_counter() - begun, arrived

    def restore(self) -> list[float]:
        """Restore a document. Return the time of each step until all of its pages have arrived."""
        waiting, left, steps = self._transfers(), self._pages, []
        self.link.fresh = True
        while left:
            most = MOST_A_STEP // BATCH_PAGES
            seconds, arrived = self.step(waiting[:most])
            del waiting[:most]
            left -= arrived
            steps.append(seconds)
        return steps

    def close(self) -> None:
        """Stop all threads."""
        if self._queue.close(10.0):
            self._memory[1].close()

    def _transfers(self) -> list[Transfer]:
        found = []
        for start in range(0, self._pages, BATCH_PAGES):
            slots = tuple(range(start, min(start + BATCH_PAGES, self._pages)))
            keys, parents = (PageKey(bytes(36)),) * len(slots), (None,) * len(slots)
            self._number += 1
            found.append(Transfer(self._number, keys, Tier.HOST, slots, Tier.HBM, slots, 0, parents))
        return found


def measured(pages: int, launches: int, documents: int) -> dict[str, float]:
    """Measure steps with and without restores, alternately. Times are in milliseconds.

    The result contains the mean length of a step and the part of it for which the engine's thread was blocked, the
    median time of a restore, and, per document, the CPU time and the wake-ups of all other threads.
    """
    torch.set_num_threads(1)
    engine = Engine(pages, launches)
    alone: list[Usage] = []
    beside: list[Usage] = []
    restores: list[float] = []
    steps = 0
    try:
        for _ in range(documents):
            before = Usage.now()
            for _ in range(_ALONE):
                engine.step()
            between = Usage.now()
            seconds = engine.restore()
            beside.append(Usage.now().since(between))
            alone.append(between.since(before))
            restores.append(sum(seconds))
            steps += len(seconds)
    finally:
        engine.close()
    return {
        "alone_ms": sum(use.step_s for use in alone) / documents / _ALONE * 1e3,
        "beside_ms": sum(use.step_s for use in beside) / steps * 1e3,
        "blocked_alone_ms": sum(use.blocked_s for use in alone) / documents / _ALONE * 1e3,
        "blocked_beside_ms": sum(use.blocked_s for use in beside) / steps * 1e3,
        "restore_ms": median(restores) * 1e3,
        "link_ms": pages * SPEC.page_nbytes / RATE * 1e3,
        "link_idle_ms": engine.link.idle_s / documents * 1e3,
        "other_threads_cpu_ms": sum(use.cpu_s for use in beside) / documents * 1e3,
        "other_threads_wakes": sum(use.wakes for use in beside) / documents,
        "launches": engine.link.launches / documents,
    }


def main(
    pages: Annotated[int, Option(help="Pages of 2 MiB in a document.")] = 2048,
    launches: Annotated[int, Option(help="Calls in a step that release the GIL.")] = 400,
    documents: Annotated[int, Option(help="Number of restores.")] = 20,
    *,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure how much restores slow down an engine that launches kernels from Python."""
    found = {name: round(value, 2) for name, value in measured(pages, launches, documents).items()}
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        echo(f"{name:22} {value:10.2f}")


if __name__ == "__main__":
    typer_run(main)
