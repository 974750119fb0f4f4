"""`make test` draws the same examples every time, and no test fails for being slow: a red run is red again.

With ``--seed`` hypothesis draws other examples, and longer walks: `make test-all`. The seed is printed at the
end of the run, and the same seed draws the same examples.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import lanes, pages
from tierstore import store
from tierstore.directory import eviction
from tierstore.gpu import device

settings.register_profile(
    "same-every-time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
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
    parser.addoption("--seed", type=int, help="draw other examples than `make test`, and more of them")


PLUGINS = "pytest_|_?hypothesis_?pytestplugin|xdist|execnet|coverage"
"""Modules of pytest plugins, installed or not: their warnings are shown, and fail no test."""


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn warnings into errors while modules are imported and tests are collected."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", module=PLUGINS)
        return (yield)


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the walk over what is imported by now: a third of a second each."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else some library says at exit that its types leaked


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lanes.SEED is not None:
        terminalreporter.write_line(
            f"drawn from seed {lanes.SEED}: `make test-all SEED={lanes.SEED}` draws the same"
        )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Turn warnings into errors while the test runs. Its own ``filterwarnings`` marks count more."""
    item.add_marker(pytest.mark.filterwarnings("error", f"default:::{PLUGINS}"), append=False)


@pytest.hookimpl(tryfirst=True)  # before hypothesis and xdist read the options
def pytest_configure(config: pytest.Config) -> None:
    lanes.SEED = config.option.seed
    if lanes.SEED is not None:
        config.option.hypothesis_seed = lanes.SEED
        settings.load_profile("fresh")
    # Several threads wait for each other in models this small: on a busy machine ten times as long.
    torch.set_num_threads(1)
    eviction.STALL_S = 20.0  # a disk that others keep busy is none that stands still
    store._FLUSH_STALL_S = 60.0
    device.SMALLEST_BY_THREADS = 1  # so that the small pages of tests go layer by layer too
    pages.DEVICE = config.getoption("--hbm-device")
