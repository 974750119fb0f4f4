"""What ``child`` can do with SGLang's cache. Arguments and results are plain JSON values."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from sglang.version import __version__

from tests.sglang.engine import Engine, Request, Setup
from tests.sglang.walk import Walk


def version() -> str:
    return str(__version__)


def walk(
    setup: Mapping[str, Any],
    *,
    seed: int,
    operations: int,
    exact: bool,
    delay_s: float = 0.0,
    failures: float = 0.0,
) -> dict[str, float]:
    """Run a ``Walk``. Delays and failures are those of SGLang's own ``HiCacheStorageFailureInjector``."""
    begin = time.monotonic()
    with _injected(delay_s, failures), _ranks(setup) as ready:
        counts = Walk(ready, seed, exact=exact).run(operations)
    return {**counts, "seconds": round(time.monotonic() - begin, 1)}


def restarts(
    setup: Mapping[str, Any],
    *,
    prompts: int,
    later: Sequence[Mapping[str, Any]] = ({},),
    lost: str | None = None,
) -> list[list[int]]:
    """Serve prompts, restart, serve them again, and so on. Return the hits in tokens of each run, by prompt.

    ``later`` says how the setup of each further run differs. Before the second run, all stored pages of the pool
    ``lost`` are removed.
    """
    page = setup.get("page_size", 4)
    texts = [[1000 * number + token for token in range(page * 6)] for number in range(prompts)]
    hits = []
    for run, changes in enumerate(({}, *later)):
        if run == 1 and lost is not None:
            _lose(Path(setup["extra"]["config"]["nvme"]["path"]), lost)
        with _ranks({**setup, **changes}) as ready:
            engine = Engine(ready)
            hits.append([engine.serve(tokens).hit for tokens in texts])
            engine.settle()
            engine.evict(1 << 20)
            engine.settle()
            engine.sound()
            engine.stop()
    return [list(pair) for pair in zip(*hits, strict=True)]


def _lose(home: Path, pool: str) -> None:
    """Remove the stored pages of a pool."""
    found = [
        marker.parent
        for marker in home.glob("*/tierstore-shard.json")
        if json.loads(marker.read_text())["description"]["pool"] == pool
    ]
    assert found, f"there are no pages of {pool} in {home}"
    for folder in found:
        shutil.rmtree(folder)


def aborts(setup: Mapping[str, Any], *, rounds: int, delay_s: float) -> dict[str, int]:
    """Abort requests in each state that a request goes through, then serve them. Return how often each was reached."""
    page = setup.get("page_size", 4)
    reached = dict.fromkeys(("queued", "reading", "read", "admitted", "checked"), 0)
    with _injected(delay_s, 0.0), _ranks(setup) as ready:
        engine = Engine(ready)
        for number in range(rounds):
            tokens = [1000 * number + token for token in range(page * 8)]
            engine.serve(tokens)
            for state in reached:
                engine.settle()
                engine.evict(1 << 20)
                engine.settle()
                engine.evict_host(1 << 20)
                request = engine.submit(tokens)
                reached[state] += _advance(engine, request, state)
                engine.abort(request)
            engine.settle()
            assert engine.serve(tokens).hit == len(tokens), "an aborted request took pages with it"
        walk = Walk.__new__(Walk)
        walk.engine, walk.live, walk.setup = engine, [], ready
        walk.rest()
        engine.stop()
    return reached


def _advance(engine: Engine, request: Request, state: str) -> bool:
    """Bring a request into a state. Return whether it was seen there."""
    if state == "queued":
        return bool(engine.tree.has_ongoing_prefetch(request.handle))
    if state == "reading":
        for _ in engine.until():
            engine.step()
            going = engine.tree.ongoing_prefetch.get(request.handle)
            if going is None or going.host_indices is not None:
                return going is not None
    engine.wait(request)
    if state in ("admitted", "checked"):
        engine.admit(request)
    if state == "checked":
        engine.check(request)
    return True


@contextmanager
def _injected(delay_s: float, failures: float) -> Iterator[None]:
    """Have SGLang put its failure injector around the storage backend."""
    prefix = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_"
    wanted = {
        f"{prefix}{name}": value for name, value in (("DELAY", delay_s), ("FAILURE", failures)) if value
    }
    os.environ.update({name: str(value) for name, value in wanted.items()})
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]


@contextmanager
def _ranks(setup: Mapping[str, Any]) -> Iterator[Setup]:
    """Connect the ranks of an engine. Each rank is a process of its own; they meet at a file."""
    setup = dict(setup)
    meeting = setup.pop("meeting", None)
    if setup.get("ranks", 1) == 1:
        yield Setup(**setup)
        return
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=setup["rank"],
        world_size=setup["ranks"],
        timeout=timedelta(seconds=60),
    )
    try:
        yield Setup(**setup, group=torch.distributed.group.WORLD)
    finally:
        torch.distributed.destroy_process_group()
