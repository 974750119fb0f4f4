"""Child processes of a campaign: forked from a server that has imported everything, heard over a pipe, killed at will.

What a child does is a function ``act(say, *arguments)``. It says lines of text; one is shorter than a pipe's atomic
write, so a kill leaves whole lines only. Its result is the last line.
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
"""A child that takes longer hangs."""

_ROOMS = ["tests.campaign.tier_level", "tests.campaign.store_level", "tests.campaign.survivor"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_ROOMS)

Say = Callable[[str], None]


class Silent(Exception):
    """The child has ended, and all it said was heard."""


class Failed(AssertionError):
    """The child did not end as it should: a signal, an exception, or not at all."""


class Child:
    """A running child; heard by one thread."""

    def __init__(self, act: Callable[..., None], *arguments: object) -> None:
        self._lines, said = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(act, said, *arguments), daemon=True)
        self._process.start()
        said.close()

    def hear(self, timeout_s: float) -> str | None:
        """The next line, or None if none came in time. Silent after the last; Failed if it said why it fails."""
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
        """SIGKILL, and wait for its end. What it said before can still be heard."""
        self._process.kill()
        self._process.join()

    def end(self) -> list[str]:
        """Wait for its own end; what it said that was not heard yet. Failed for a signal, an exception or a hang."""
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
                f"ended in {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            )
        return lines

    def _give_up(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, signal.SIGUSR1)  # prints where all its threads are
        self._process.join(2.0)
        self.kill()
        raise Failed(f"hangs: no end after {PATIENCE_S:.0f} s")


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage()[-300:])


@contextmanager
def heard_warnings() -> Iterator[list[str]]:
    """The ends of the warnings that were logged meanwhile."""
    heard = _Warnings()
    logging.getLogger().addHandler(heard)
    try:
        yield heard.told
    finally:
        logging.getLogger().removeHandler(heard)


def _run(act: Callable[..., None], said: Connection, *arguments: object) -> None:
    """In the child."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's, who ends us
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        act(lambda line: said.send_bytes(line.encode()), *arguments)
    except BaseException:  # noqa: BLE001  a process's top: the parent is told, and the process fails
        said.send_bytes(f"!{traceback.format_exc()}".encode())
        sys.exit(1)
    finally:
        said.close()
