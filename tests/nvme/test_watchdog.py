"""Test the watchdog thread: an error does not stop it, and it reports a hung read after the timeout."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from tests.nvme.rig import PATIENCE_S, Rig
from tests.support.sick_disk import Hanging
from tierstore.nvme.tier import Watchdog


def test_watchdog_continues_after_an_error_and_stops_when_closed(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[float] = []
    often = threading.Event()

    def broken(now: float) -> None:
        raise RuntimeError("planted")

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) == 5:
            often.set()

    began = monotonic()
    with caplog.at_level(logging.CRITICAL):
        watchdog = Watchdog([broken, look], timeout_s=0.004)
        assert often.wait(PATIENCE_S)
        watchdog.close()
    number = len(looks)
    assert began <= looks[0]
    assert looks == sorted(looks)
    assert not watchdog._thread.is_alive()
    watchdog.close()
    assert len(looks) == number


def test_a_hanging_write_is_reported_by_the_watchdog_after_the_timeout(
    tmp_path: Path, calls: Callable[..., None]
) -> None:
    rig = Rig(tmp_path, payload="extents")
    assert rig.write(range(4)).ok
    rig.close()
    rig = Rig(tmp_path, payload="extents", timeout_s=0.05)
    disk = Hanging(1)
    calls(preadv=disk)
    transfer, _ = rig.submit_read([3])
    assert rig.ack(transfer).late == (0,)
    assert rig.tier.state == "absent"
    disk.go_on.set()
    assert rig.ack(transfer).num_ready == 1
    rig.close()
