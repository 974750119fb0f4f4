"""A thread that looks at the others now and then: one of them that hangs in the kernel cannot say so itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

_log = logging.getLogger(__name__)

_LOOKS = 4
"""Looks in the time after which a read or a write is late."""


_CLOSE_S = 5.0


class Patience:
    """A daemon thread that calls each of ``looks`` with time.monotonic(), often enough for ``timeout_s``."""

    def __init__(self, looks: Sequence[Callable[[float], None]], timeout_s: float) -> None:
        self._looks = looks
        self._every_s = timeout_s / _LOOKS
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tierstore-nvme-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No look begins from now on. Waits a moment for one that is under way, which never does I/O."""
        self._over.set()
        self._thread.join(_CLOSE_S)  # not for ever: a signal's handler may have left locked what it looks at

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            for look in self._looks:
                try:
                    look(time.monotonic())
                except Exception:  # noqa: BLE001  the thread's top: it goes on looking
                    _log.exception("looking after the disk's threads failed")
