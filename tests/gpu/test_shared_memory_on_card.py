"""Tests that ranks in two processes page-lock the same host memory, and copy to and from it with a GPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from tests.adapters.rank_process import require_shared

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_ranks_on_gpus_load_what_either_has_stored(codec: str) -> None:
    devices = [f"cuda:{i % torch.cuda.device_count()}" for i in range(2)]
    found = require_shared(devices, 256, {"capacity": "2GiB", "codec": codec, "pin": "always"})
    sys.stdout.write(json.dumps({"codec": codec, **found}) + "\n")  # shown by pytest -s
