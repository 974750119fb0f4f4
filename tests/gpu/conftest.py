"""Every test here has HBM on the first card, whatever the rest of the run uses."""

from __future__ import annotations

import pytest

from tests.support import pages


@pytest.fixture(autouse=True)
def on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "DEVICE", "cuda:0")
