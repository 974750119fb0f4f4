"""Every run of the tests draws the same examples, and none fails for being slow: a red run is red again.

`make soak` is for what is new each time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support import pages
from tierstore import space
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


def pytest_configure(config: pytest.Config) -> None:
    # Several threads wait for each other in models this small: on a busy machine ten times as long.
    torch.set_num_threads(1)
    space.STALL_S = 20.0  # a disk that others keep busy is none that stands still
    device.SMALLEST_BY_THREADS = 1  # so that the small pages of tests go layer by layer too
    pages.DEVICE = config.getoption("--hbm-device")
