"""Every run of the tests draws the same examples, and none fails for being slow: a red run is red again.

`make soak` is for what is new each time.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import pages
from tierstore.directory import eviction
from tierstore.gpu import device

settings.register_profile(
    "same-every-time", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("same-every-time")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--hbm-device", default="cpu", help="device of the HBM tier in tests of the store")
    parser.addoption(
        "--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"), help="Python that has vLLM"
    )


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


def pytest_itemcollected(item: pytest.Item) -> None:
    """Turn warnings into errors while the test runs. Its own ``filterwarnings`` marks count more."""
    item.add_marker(pytest.mark.filterwarnings("error", f"default:::{PLUGINS}"), append=False)


def pytest_configure(config: pytest.Config) -> None:
    # Several threads wait for each other in models this small: on a busy machine ten times as long.
    torch.set_num_threads(1)
    eviction.STALL_S = 20.0  # a disk that others keep busy is none that stands still
    device.SMALLEST_BY_THREADS = 1  # so that the small pages of tests go layer by layer too
    pages.DEVICE = config.getoption("--hbm-device")
