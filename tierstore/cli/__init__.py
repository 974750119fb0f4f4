"""The command line: ``tierstore COMMAND``.

Each command takes ``--json``: its last line on standard output is then one JSON object. Exit codes: 0 all is well;
1 the command ran and something is wrong (a bad record, a check that failed, an answer of no); 2 it could not be done
as asked (unknown option, a directory that is not a store's or is in use); 130 it was interrupted. Progress goes to
standard error.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["main"]

_INTERRUPTED = 128 + signal.SIGINT


def main() -> None:
    """The ``tierstore`` script. Interrupted while its rooms load, it ends at once: there is nothing to clean up."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from tierstore.cli.app import main as run  # most of a short command's time

    try:
        signal.signal(signal.SIGINT, usual)
        run()
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)


def _end(number: int, _: FrameType | None) -> None:
    # Not an exception: an import may turn it into another, or swallow it.
    os._exit(_INTERRUPTED)
