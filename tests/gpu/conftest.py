"""Puts the HBM tier of all tests in this folder on the first GPU, whatever device the other tests use."""

from __future__ import annotations

import pytest

from tests.support import pages


@pytest.fixture(autouse=True)
def on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "DEVICE", "cuda:0")
