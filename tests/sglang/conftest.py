"""Fixtures that start processes with SGLang in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.worker import Worker


@pytest.fixture(scope="session")
def workers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Worker]]:
    """Return two processes with SGLang in them, one per rank."""
    python: Path = request.config.getoption("--sglang-python")
    assert python.exists(), (
        f"{python} is not there: run `make test-sglang`, or name another with --sglang-python"
    )
    folder = tmp_path_factory.mktemp("workers")
    both = [Worker(python.absolute(), folder / f"{rank}.log") for rank in range(2)]
    yield both
    for worker in both:
        worker.close()


@pytest.fixture
def worker(workers: list[Worker]) -> Worker:
    """Return a process with SGLang in it."""
    return workers[0]
