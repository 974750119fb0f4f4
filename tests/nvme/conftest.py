"""Fixtures for tests of the NVMe tier. Tests with ``payload`` run once with pages in LMDB and once in extent files."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.nvme import rig
from tests.nvme.watch import Calls
from tierstore.nvme import extents


@pytest.fixture(params=rig.PAYLOADS)
def payload(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = str(request.param)
    monkeypatch.setattr(rig, "default_payload", kind)
    return kind


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces the named system calls in ``extents``. Without arguments, it restores all."""

    def replace(**calls: Callable[..., object]) -> None:
        monkeypatch.setattr(extents, "os", Calls(**calls))

    return replace
