"""Tests that ask for ``payload`` run once with page bytes in LMDB and once in extent files."""

from __future__ import annotations

import pytest

from tests.nvme import rig


@pytest.fixture(params=rig.PAYLOADS)
def payload(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    kind = str(request.param)
    monkeypatch.setattr(rig, "default_payload", kind)
    return kind
