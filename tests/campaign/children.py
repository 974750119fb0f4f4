"""Child processes of a campaign: forked from a server that has imported all modules, and possibly killed.

A child runs a function ``act(say, *arguments)``. ``say`` sends a line of text over a pipe; the last line is the result.
Lines are short enough to be written atomically, so a kill never leaves part of a line.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from time import monotonic

PATIENCE_S = 120.0
"""Seconds after which a child counts as hung."""

_ROOMS = ["tests.campaign.tier_level", "tests.campaign.store_level", "tests.campaign.survivor"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_ROOMS)

Say = Callable[[str], None]


class Silent(Exception):
    """Raised when the child has ended and all of its lines have been received."""


class Failed(AssertionError):
    """Raised when the child was killed by a signal, failed with an exception, or did not exit in time."""


class Child:
    """A running child process. Only one thread may receive its lines."""

    def __init__(self, act: Callable[..., None], *arguments: object) -> None:
        self._lines, said = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(act, said, *arguments), daemon=True)
        self._process.start()
        said.close()

    def hear(self, timeout_s: float) -> str | None:
        """Return the next line, or None if no line arrives within ``timeout_s`` seconds.

        Raises:
            Silent: The child has ended, and there are no more lines.
            Failed: The child sent an error.
        """
        try:
            if not self._lines.poll(timeout_s):
                return None
            line = self._lines.recv_bytes().decode()
        except (EOFError, ConnectionResetError):
            raise Silent from None
        if line.startswith("!"):
            self.kill()
            raise Failed(line[1:])
        return line

    def kill(self) -> None:
        """Kill the child with SIGKILL and wait until it has exited. Lines that it sent before can still be received."""
        self._process.kill()
        self._process.join()

    def end(self) -> list[str]:
        """Wait until the child ends by itself, and return its remaining lines.

        Raises:
            Failed: The child was killed by a signal, failed with an exception, or did not exit in time.
        """
        lines: list[str] = []
        deadline = monotonic() + PATIENCE_S
        try:
            while (left := deadline - monotonic()) > 0:
                if (line := self.hear(left)) is not None:
                    lines.append(line)
            self._give_up()
        except Silent:
            self._process.join(PATIENCE_S)
        code = self._process.exitcode
        if code:
            raise Failed(
                f"the child was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"the child exited with status {code}"
            )
        return lines

    def _give_up(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGUSR1)  # makes it print the stacks of all its threads
        self._process.join(2.0)
        self.kill()
        raise Failed(f"the child did not exit within {PATIENCE_S:.0f} s")


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage()[-300:])


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """Yield a list that collects the last 300 characters of each warning logged in the ``with`` block."""
    heard = _Warnings()
    logging.getLogger().addHandler(heard)
    try:
        yield heard.told
    finally:
        logging.getLogger().removeHandler(heard)


def _run(act: Callable[..., None], said: Connection, *arguments: object) -> None:
    """Run ``act`` in the child process. An exception is sent to the parent."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it, and ends its children
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        act(lambda line: said.send_bytes(line.encode()), *arguments)
    except BaseException:  # noqa: BLE001  top of the process: the parent gets the error, and the process fails
        said.send_bytes(f"!{traceback.format_exc()}".encode())
        sys.exit(1)
    finally:
        said.close()
