"""Configures pytest and hypothesis so that runs can be repeated.

`make test` draws the same examples in every run, and no test fails because it is slow. `make test-all` runs pytest with
``--seed``: hypothesis draws other examples and longer random walks. The seed is printed at the end of the run, and the
same seed draws the same examples again.
"""

from __future__ import annotations

import gc
import subprocess
import warnings
from collections.abc import Generator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from typer import testing
from typer.main import get_command

from tests.support import forked, lanes, pages
from tierstore import store
from tierstore.directory import eviction
from tierstore.gpu import device
from tierstore.nvme import examination

settings.register_profile(
    "same-every-time",
    derandomize=True,
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fresh",
    derandomize=False,
    database=None,  # examples of earlier runs would come before those of the seed
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same-every-time")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hbm-device", default="cpu", help="device of the HBM tier in tests of the store")
    parser.addoption(
        "--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), help="Python that has vLLM"
    )
    parser.addoption(
        "--sglang-python", type=Path, default=Path(".venv-sglang/bin/python"), help="Python that has SGLang"
    )
    parser.addoption("--all-models", action="store_true", help="with -m vllm: start engines of every model")
    parser.addoption("--seed", type=int, help="draw other examples than `make test`, and more of them")


PLUGINS = "pytest_|_?hypothesis_?pytestplugin|xdist|execnet|coverage"
"""Modules of pytest plugins. Their warnings are shown, but do not fail a test."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn warnings into errors while modules are imported and tests are collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", module=PLUGINS)
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while tests are collected. It would only cost time: almost all objects stay alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude all objects that exist now from garbage collection. This saves a third of a second per collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise a library reports at exit that its types leaked


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lanes.SEED is not None:
        terminalreporter.write_line(
            f"drawn from seed {lanes.SEED}: `make test-all SEED={lanes.SEED}` draws the same"
        )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Turn warnings into errors while the test runs. The test's own ``filterwarnings`` marks take precedence."""
    item.add_marker(pytest.mark.filterwarnings("error", f"default:::{PLUGINS}"), append=False)


@pytest.hookimpl(tryfirst=True)  # before hypothesis and xdist read the options
def pytest_configure(config: pytest.Config) -> None:
    lanes.SEED = config.option.seed
    if lanes.SEED is not None:
        config.option.hypothesis_seed = lanes.SEED
        settings.load_profile("fresh")
    # Models this small gain nothing from several threads, which make them ten times slower on a busy machine.
    torch.set_num_threads(1)
    eviction.STALL_S = 20.0  # a disk that other programs keep busy is not stalled
    store._FLUSH_STALL_S = 60.0
    device.SMALLEST_BY_THREADS = 1  # so that even the small pages of tests are copied layer by layer
    if lanes.SEED is None:  # most tests open directories, and starting Python takes most of that time
        process = SimpleNamespace(run=forked.examine, TimeoutExpired=subprocess.TimeoutExpired)
        vars(examination)["subprocess"] = process
    # Build the command line from its functions' signatures only once, not again in each test that runs it.
    vars(testing)["_get_command"] = cache(get_command)
    pages.DEVICE = config.getoption("--hbm-device")
